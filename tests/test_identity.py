"""What a run is: its hash, and the name that its settings give it."""

from dataclasses import fields

import pytest
from cli import CONF, hash_of

from dpbench.config import RunConfig, compose_jobs
from dpbench.config.identity import name_of
from dpbench.config.registry import SCHEMAS


def test_the_hash_does_not_depend_on_how_a_number_is_typed():
    assert hash_of("eps=8") == hash_of("eps=8.0") == hash_of("eps=8e0") == hash_of()
    assert hash_of(f"delta={1437**-1.1}") == hash_of("delta='1/N^1.1'") == hash_of()


def test_the_hash_does_not_depend_on_where_and_how_a_run_is_carried_out():
    elsewhere = ["device=cpu", "results_dir=elsewhere", "data.root=elsewhere", "data.download=true", "micro_batch=7"]
    shown = ["tracker=disabled", "tracker.project=other", "tracker.tags=[a]", "tracker.group=b", "force=true"]
    carried_out = ["channels_last=true", "checkpoint.every_steps=3", "fuse_seeds=false", "dataset.resident=false"]
    kept = ["keep_model=true", "shard_states=true"]
    assert hash_of(*elsewhere, *shown, *carried_out, *kept, "plan=true", "seed=5") == hash_of()


def test_the_hash_does_not_depend_on_typing_what_is_the_default():
    typed = ["algo=dpsgd", "filter=none", "clip=automatic", "batch_size=256", "epochs=40", "optim.lr=2"]
    unused = ["dataset.suggested.lr.adam=0.5", "dataset.suggested.epochs=1"]
    same_times = ["evaluation.every_epochs=null", "evaluation.every_steps=6"]
    assert hash_of(*typed, *unused, *same_times) == hash_of()


@pytest.mark.parametrize(
    "override",
    [
        "eps=4",
        "eps=inf",
        "delta=1e-5",
        "epochs=3",
        "batch_size=128",
        "clip=threshold",
        "clip.stabiliser=0",
        "threshold.norm=2",
        "filter=momentum",
        "query=two_point",
        "optim.lr=0.1",
        "schedule=cosine",
        "model.hidden=[32]",
        "privacy.accountant=rdp",
        "algo=disk",
    ],
)
def test_the_hash_depends_on(override):
    assert hash_of(override) != hash_of()


def test_an_algorithm_is_the_stages_it_names():
    assert hash_of("algo=disk") == hash_of("query=two_point", "filter=exponential")
    assert hash_of("algo=disk", "algo.kappa=0.6") == hash_of(
        "query=two_point", "filter=exponential", "query.kappa=0.6", "filter.kappa=0.6"
    )


def test_no_setting_has_the_name_under_which_the_identity_has_the_class():
    of_stages = [stage for options in SCHEMAS.values() for stage in options.values()]
    assert [kind for kind in (RunConfig, *of_stages) if "kind" in {field.name for field in fields(kind)}] == []


def test_a_pattern_over_algorithms_gives_the_algorithms_and_nothing_else():
    jobs = compose_jobs(["algo=glob(*)"], multirun=True)
    assert sorted(job.choices["algo"] for job in jobs) == sorted(path.stem for path in (CONF / "algo").glob("*.yaml"))


@pytest.mark.parametrize(
    "typed",
    [
        "device=cuda",
        "channels_last=true",
        "+tracker.tags=[a]",
        "tracker=disabled",
        "checkpoint.every_steps=3",
        "plan=true",
    ],
)
def test_what_does_not_change_a_run_is_not_in_its_name(typed):
    assert name_of([typed, "eps=2", "seed=1"]) == "eps=2 seed=1"
    assert name_of([typed]) == "defaults"


@pytest.mark.parametrize(
    "typed",
    ["algo=disk", "dataset.train_size=5", "seeds=3", "seed=4", "optim.lr=0.1", "dataset.suggested.lr.sgd=1"],
)
def test_what_tells_a_run_from_others_is_in_its_name(typed):
    assert name_of(["device=cpu", typed]) == typed
