"""Jobs of a sweep share the reading of files; what they become is what Hydra makes of each line by itself."""

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from dpbench.config import compose_jobs, conf_folder, resolved
from dpbench.config.compose import _Composer, load
from dpbench.config.own import find_own_stages
from dpbench.config.registry import register
from dpbench.errors import UserError

LINES = [
    ("algo=disk", "algo.kappa=0.5", "eps=3", "dataset=mnist", "delta='1/N^1.1'"),
    ("algo=disk", "algo.kappa=0.9", "dataset=mnist", "delta=1e-6"),
    ("algo=dp_pmlf", "algo.length=3", "optim=adam", "optim.lr=0.3", "optim.beta1=0"),
    ("eps=inf", "clip=none"),
    ("model=mlp", "model.hidden=[8,9]", "tracker.tags=[a,b]", "evaluation.every_steps=3"),
    ("algo=adp", "noise=constant", "schedule=cosine", "seed=4", "batch_size=77", "micro_batch=null"),
]


def test_shared_reading_composes_what_hydra_composes():
    register()
    find_own_stages(())
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_folder()), version_base="1.3", job_name="run"):
        composer = _Composer([])
        for line in [*LINES, *reversed(LINES)]:
            (shared, chosen_shared), (whole, chosen_whole) = composer(line), composer._whole(line)
            assert chosen_shared == chosen_whole
            for composed in (shared, whole):
                OmegaConf.set_struct(composed, False)
            assert resolved(load(shared, chosen_shared)) == resolved(load(whole, chosen_whole))


def test_jobs_of_a_sweep_do_not_change_each_other():
    jobs = compose_jobs(["algo=disk", "algo.kappa=0.5,0.9", "optim.lr=1,2"], multirun=True)
    found = [(job.config.filter.kappa, job.config.query.kappa, job.config.optim.lr) for job in jobs]
    assert found == [(0.5, 0.5, 1.0), (0.5, 0.5, 2.0), (0.9, 0.9, 1.0), (0.9, 0.9, 2.0)]


@pytest.mark.parametrize("line", ["optim.lr=fast", "optim.rate=1", "algo.kapa=0.5"])
def test_a_wrong_value_behind_right_ones_is_named(line):
    with pytest.raises(UserError) as error:
        compose_jobs(["algo=disk", "eps=1,2", line], multirun=True)
    assert str(error.value).startswith(line)


def test_a_sweep_over_delta_may_mix_numbers_and_rules():
    jobs = compose_jobs(["delta=1e-5,1/N^1.1,1/N"], multirun=True)
    assert [job.config.delta for job in jobs] == [1e-5, "1/N^1.1", "1/N"]


@pytest.mark.parametrize("typed", [True, False])
def test_a_path_in_no_encoding_is_refused(typed, monkeypatch):
    """Which Linux lets be, and records can't hold; the command line and the environment have it as half of a pair."""
    path = b"/caf\xe9".decode(errors="surrogateescape")
    if not typed:
        monkeypatch.setenv("DPBENCH_DATA", path)
    with pytest.raises(UserError, match=r"^data\.root='?/caf\\udce9'?: expected text in UTF-8$"):
        compose_jobs([f"data.root={path}"] if typed else [], multirun=False)
