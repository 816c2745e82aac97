"""The parts of a reproduction: which records are a cell's, what is missing, what it costs, what runs first."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import ALGORITHMS
from hydra import compose, initialize_config_dir
from made_up_papers import SEARCH, TABLE, loaded, only_cell, record
from omegaconf import OmegaConf
from specifications import FILES

from dpbench.claims import Artefact, Cell, Evidence, load_all
from dpbench.claims.notation import settings_of
from dpbench.config import Job, compose_each, conf_folder, config_hash
from dpbench.config.identity import changes_nothing
from dpbench.config.registry import SCHEMAS
from dpbench.devices import describe
from dpbench.errors import UserError
from dpbench.reproduction import available, facts, queue, standing, times
from dpbench.reproduction.arguments import PASSED_ON, Arguments, parse
from dpbench.reproduction.available import Available
from dpbench.reproduction.facts import facts_of
from dpbench.reproduction.hashes import Hashes
from dpbench.reproduction.index import RecordIndex, canonical
from dpbench.reproduction.options import kinds_of, option_name
from dpbench.reproduction.plan import Planner
from dpbench.reproduction.standing import State, standing_of
from dpbench.reproduction.times import Basis, Times, forward_flops


@pytest.fixture(autouse=True)
def known_machine(monkeypatch, known_speed):
    """No test measures a device, or finds the data of this one."""
    monkeypatch.delenv("DPBENCH_DATA", raising=False)


# Which records are a candidate's.


@cache
def job_of_candidate(*candidate: str) -> Job:
    return compose_each([candidate])[0]


def full_hash(candidate: tuple[str, ...]) -> str:
    return config_hash(job_of_candidate(*candidate).config)


def cells_with_runs(artefacts: Iterable[Artefact]) -> list[Cell]:
    return [cell for artefact in artefacts for cell in artefact.cells if cell.runs]


def some_candidates(*where: str) -> list[tuple[str, ...]]:
    wanted = set(where)
    found = [a for a in load_all(FILES) if a.where.removesuffix(".yaml") in wanted]
    assert len(found) == len(wanted)
    return list(dict.fromkeys(candidate for cell in cells_with_runs(found) for candidate in cell.candidates[:3]))


def test_the_index_finds_every_record_that_full_hashing_finds(tmp_path, own_cache):
    candidates = some_candidates("dp_pmlf/figure_5", "adp/figure_4", "dc_sgd/figure_4")
    jobs = compose_each(candidates)
    for job in random.Random(0).sample(jobs, len(jobs) // 3):
        record(tmp_path, job, 0)
    recorded = {folder.name for folder in (tmp_path / "runs").iterdir()}
    hashes = Hashes(RecordIndex(tmp_path))
    wanted = [config_hash(job.config) for job in jobs]
    assert {digest for digest in wanted if digest in recorded} == recorded
    for candidate, digest in zip(candidates, wanted, strict=True):
        found = hashes(candidate)
        assert found == digest if digest in recorded else found not in recorded
    # The index does rule out most of what it is asked about.
    assert sum(len(hashes.index.possible(candidate)) for candidate in candidates) < 3 * len(candidates)


TYPED_AS = [
    "dataset=digits model=linear algo=dpsgd eps=2",
    "dataset=digits model=linear algo=dpsgd eps=2.0 optim.lr=2",
    "eps=2e0 model=linear batch_size=256 epochs=40.0",
    "model=linear eps=2 delta=1/N^1.1 evaluation.every_epochs=1",
    "model=linear eps=2 evaluation.every_steps=6 evaluation.every_epochs=null",
    "model=linear eps=2 seed=4 device=cpu record_coordinates=0 micro_batch=17",
    "model=linear eps=2.00 algo=doppler filter=none clip.stabiliser=1e-2",
    "model=linear eps=2 privacy.secure_noise=false dataset.resident=false dataset.suggested.lr.adam=0.5",
]


@pytest.mark.parametrize("typed", TYPED_AS)
def test_a_record_is_found_however_its_settings_were_typed(tmp_path, typed, own_cache):
    job = job_of_candidate(*TYPED_AS[0].split())
    digest = record(tmp_path, job, 0).parent.name
    assert full_hash(tuple(typed.split())) == digest
    assert Hashes(RecordIndex(tmp_path))(tuple(typed.split())) == digest


@pytest.mark.parametrize(
    "typed",
    ["eps=3", "eps=2 optim.lr=1", "eps=2 dataset=mnist", "eps=2 model=mlp", "batch_size=64", "eps=2 optim=adam"],
)
def test_what_another_setting_rules_out_is_not_composed(tmp_path, typed, monkeypatch):
    record(tmp_path, job_of_candidate(*TYPED_AS[0].split()), 0)
    monkeypatch.setattr(Hashes, "learn", None)
    line = typed if "model=" in typed else f"{typed} model=linear"
    assert Hashes(RecordIndex(tmp_path))(tuple(line.split())) is None


@pytest.mark.parametrize(("typed", "found"), [("null", True), ("30", False)])
def test_a_record_from_before_there_were_searches_is_that_of_a_run_without_one(tmp_path, typed, found, own_cache):
    folder = record(tmp_path, job_of_candidate(*TYPED_AS[0].split()), 0)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    del settings["privacy"]["search_runs"]
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    line = (*TYPED_AS[0].split(), f"privacy.search_runs={typed}")
    index = RecordIndex(tmp_path)
    assert bool(index.possible(line)) is found
    assert Hashes(index)(line) == (folder.parent.name if found else None)


def test_a_record_whose_settings_cannot_be_read_is_ruled_out_by_nothing(tmp_path):
    folder = record(tmp_path, job_of_candidate(*TYPED_AS[0].split()), 0)
    (folder / "config.yaml").unlink()
    index = RecordIndex(tmp_path)
    assert index.possible(["eps=3"]) == {folder.parent.name}
    assert Hashes(index)(tuple(TYPED_AS[1].split())) == folder.parent.name


def test_a_record_that_appears_later_is_seen_after_a_refresh(tmp_path):
    index, line = RecordIndex(tmp_path), ["model=linear", "eps=2"]
    assert not index.possible(line)
    folder = record(tmp_path, job_of_candidate(*TYPED_AS[0].split()), 0)
    index.refresh()
    assert index.possible(line) == {folder.parent.name}


def test_options_that_cannot_be_composed_have_no_hash(tmp_path, own_cache):
    record(tmp_path, job_of_candidate(*TYPED_AS[0].split()), 0)
    hashes = Hashes(RecordIndex(tmp_path))
    hashes.prepare([("eps=2", "filter=no_such"), ("eps=2", "model=linear")])
    assert hashes(("eps=2", "filter=no_such")) is None
    assert hashes(("eps=2", "model=linear")) is not None


def test_hashes_are_kept_until_an_option_changes(tmp_path, monkeypatch, own_cache):
    record(tmp_path, job_of_candidate(*TYPED_AS[0].split()), 0)
    candidate = tuple(TYPED_AS[1].split())
    digest = Hashes(RecordIndex(tmp_path))(candidate)
    with monkeypatch.context() as patch:
        patch.setattr("dpbench.reproduction.hashes.compose_each", None)
        assert Hashes(RecordIndex(tmp_path))(candidate) == digest
    monkeypatch.setattr("dpbench.reproduction.hashes.fingerprint", lambda config_dirs: "another")
    monkeypatch.setattr("dpbench.reproduction.hashes.compose_each", lambda *_: [])
    with pytest.raises(ValueError, match="zip"):
        Hashes(RecordIndex(tmp_path))(candidate)


@pytest.mark.parametrize(
    ("one", "other"), [("2", 2.0), ("1e-3", 0.001), ("inf", "inf"), ("true", True), ("null", None)]
)
def test_values_are_compared_as_what_they_stand_for(one, other):
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize("group", ["dataset", "model"])
def test_options_carry_their_names(group):
    for file in (conf_folder() / group).glob("*.yaml"):
        assert option_name(group, file.stem) == file.stem
    assert option_name(group, "no_such") is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        *(f"algo={algo}" for algo in ALGORITHMS),
        "algo=adp noise=constant",
        "algo=lp_dpadam filter=f3 optim=adambc clip=normalised",
        "dataset=cifar10",
        "dataset=cifar10 model=wrn_40_4",
    ],
)
def test_the_stages_of_a_run_are_known_from_the_files_of_its_options(line):
    compose_each([])  # makes the schemas known to Hydra
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        composed = compose("config", line.split())
    found = dict(kind.split(".kind=") for kind in kinds_of(tuple(tuple(typed.split("=")) for typed in line.split())))
    assert found == {group: OmegaConf.get_type(composed, group).__name__ for group in SCHEMAS}


@pytest.mark.parametrize("options", [(("algo", "no_such"),), (("dataset", "no_such"),)])
def test_of_options_that_are_not_there_nothing_is_known(options):
    assert kinds_of(options) == ()


# What is known of a run before it is composed.


def test_facts_are_those_of_the_composed_run():
    seen = {}
    for cell in cells_with_runs(load_all(FILES)):
        keys = ("dataset", "model", "algo", "batch_size", "epochs", "evaluation.every_steps", "algo.length")
        seen.setdefault(tuple(cell.overrides.get(key) for key in keys), cell.candidates[0])
    some = random.Random(1).sample(sorted(seen.values()), 12)
    for candidate, job in zip(some, compose_each(some), strict=True):
        config, found = job.config, facts_of(settings_of(candidate))
        assert (found.dataset, found.model) == (config.dataset, config.model)
        assert found.query.most_points == config.query.most_points
        assert (found.batch_size, found.copies) == (config.batch_size, config.augmentation.copies)
        rounded = config.epochs if config.privacy.scheme.passes else 0  # each pass is rounded up to whole batches
        assert found.steps == pytest.approx(config.steps, rel=0.01, abs=rounded)
        assert found.evaluations == pytest.approx(config.steps / config.evaluate_every, abs=1)


def test_facts_of_options_of_another_form_are_composed(monkeypatch):
    monkeypatch.setattr(facts, "schema_of", lambda content, group: {}[group])
    facts._made.cache_clear()
    found = facts_of({"dataset": "digits", "model": "linear", "algo": "disk", "eps": "1"})
    facts._made.cache_clear()
    assert (found.model.name, found.query.most_points, found.batch_size) == ("linear", 2, 256)


def test_a_search_never_varies_what_a_run_takes():
    for cell in cells_with_runs(load_all(FILES)):
        ends = [facts_of(settings_of(one)) for one in (cell.candidates[0], cell.candidates[-1])]
        assert ends[0].kind == ends[1].kind
        assert ends[0].steps == ends[1].steps


# What is here.


def test_what_a_cell_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(available, "wordnet", lambda: None)
    for looked_up in (available._missing_weights, available._wordnet_here):
        looked_up.cache_clear()
    monkeypatch.setattr(available, "weights_here", lambda source: "gpt2" in source)
    lacking, fetching = Counter(), Counter()
    for cell in cells_with_runs(load_all(FILES, ["disk", "adp"])):
        found = facts_of(settings_of(cell.candidates[0]))
        lacking[Available(tmp_path, download=False).lacks(cell, found)] += 1
        fetching[Available(tmp_path, download=True).lacks(cell, found)] += 1
    available._missing_weights.cache_clear()
    of_hub = "weights FacebookAI/roberta-base (data.download=true, or: hf download FacebookAI/roberta-base)"
    of_timm = "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"  # which has no repository of its bare name
    assert lacking[of_hub] > 0
    assert lacking[f"weights vit_small_patch16_224 (data.download=true, or: hf download {of_timm})"] > 0
    assert lacking["data mnist"] > 0
    assert lacking["data e2e"] > 0
    assert None not in lacking
    # What is on a hub is fetched; what nobody published can't be.
    nowhere = "weights cnn_abadi_cifar100.pt (to be made: docs/reproducing.md)"
    assert fetching[nowhere] == lacking[nowhere] > 0
    assert fetching[None] > 0
    assert {why for why in fetching if why is not None} == {
        nowhere,
        "data imagenet",
        "WordNet, for METEOR (python -m nltk.downloader wordnet)",
    }
    assert (
        Available(tmp_path, download=True).data(facts_of({"dataset": "mnist", "model": "linear", "algo": "dpsgd"}))
        is None
    )


def test_runs_that_meteor_is_a_score_of_wait_for_wordnet_for_its_other_scores_too(tmp_path, monkeypatch):
    """A record made without it lacks METEOR for good."""
    monkeypatch.setattr(available, "weights_here", lambda source: True)
    monkeypatch.setattr(Available, "data", lambda self, facts: None)
    available._missing_weights.cache_clear()
    cells = list(cells_with_runs(load_all(FILES, ["disk"])))
    facts = [facts_of(settings_of(cell.candidates[0])) for cell in cells]

    def lacking():
        available._wordnet_here.cache_clear()
        here = Available(tmp_path, download=False, cells=cells)
        found = Counter()
        for cell, of_cell in zip(cells, facts, strict=True):
            if here.lacks(cell, of_cell) == "WordNet, for METEOR (python -m nltk.downloader wordnet)":
                found[cell.metric] += 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(available, "wordnet", lambda: None)
        without = lacking()
    assert without["meteor"] > 0
    assert {without[score] for score in ("bleu", "rouge_l", "nist", "cider")} == {without["meteor"]}
    assert without["validation_loss"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(available, "wordnet", lambda: object())
        assert lacking() == {}
    available._wordnet_here.cache_clear()
    available._missing_weights.cache_clear()


def test_data_of_ones_own_are_looked_for_under_their_name(tmp_path):
    facts = facts_of({"dataset": "adult", "model": "mlp", "algo": "dpsgd"})
    own = replace(facts, dataset=replace(facts.dataset, name="sensors", train_size=2, test_size=1))
    here = Available(tmp_path, download=False)
    assert here.data(own) == "data sensors"
    (tmp_path / "sensors").mkdir()
    for split, size in (("train", 2), ("test", 1)):
        np.savez(tmp_path / "sensors" / f"{split}.npz", inputs=np.ones((size, 104)), labels=np.zeros(size, int))
    assert Available(tmp_path, download=False).data(own) is None


# How long it takes.


def test_operations_of_a_forward_pass_are_those_of_the_publications():
    def flops(**overrides: str) -> float:
        return forward_flops(facts_of({"algo": "dpsgd", **overrides}))

    assert flops(dataset="mnist", model="linear") == 2 * 784 * 10
    assert flops(dataset="adult", model="mlp") == 2 * (104 * 64 + 64 * 2)
    # He et al. 2016: 1.8e9 multiplications of ResNet-18; Touvron et al. 2021: 4.6e9 of ViT-S/16.
    assert flops(dataset="cifar10", model="resnet18", **{"model.image_size": "224"}) == pytest.approx(3.6e9, rel=0.05)
    assert flops(dataset="cifar10", model="vit_small") == pytest.approx(9.2e9, rel=0.05)
    # Of a text: two for each weight and token, tables aside.
    weights = (4 * 64 * (64 + 128)) + 2 * 4 * 128 * (128 + 128) / 2 + 128 * 18
    assert flops(dataset="names", model="lstm") == pytest.approx(2 * 32 * weights, rel=0.5)


def test_tables_are_looked_up_without_arithmetic():
    """However many ids they have; what they give is read by layers."""
    lookups = (
        facts_of({"dataset": "sst2", "model": "text_small", "model.vocabulary": size}) for size in ("300", "600")
    )
    one, other = (times._counted(found) for found in lookups)
    assert one == other > 0


SMALL = {"dataset": "digits", "model": "linear", "algo": "dpsgd", "batch_size": "64", "epochs": "10"}


def timed_record(
    results: Path, seconds: float, *settings: str, seeds_at_once: int = 1, device: str | None = None
) -> Path:
    job = job_of_candidate(*(f"{key}={value}" for key, value in SMALL.items()), *settings)
    folder = record(results, job, 0)
    origin = {
        "device": device or describe(torch.device("cpu")),
        "wall_seconds": seconds,
        "seeds_at_once": seeds_at_once,
    }
    (folder / "provenance.json").write_text(json.dumps(origin))
    return folder


def learnt(results: Path) -> Times:
    index, found = RecordIndex(results), Times("cpu")
    for digest in index.digests:
        found.learn(results / "runs" / digest / "0", index.settings_of(digest))
    return found


def test_a_run_without_records_is_estimated_from_its_arithmetic(tmp_path):
    found = facts_of(SMALL)
    steps = 225  # ceil(10 * 1437 / 64)
    forward = 2 * 64 * 10
    wanted = times.SECONDS_TO_START + steps * (1e-3 + 3 * 64 * forward / 1e9) + 11 * 360 * forward / 1e9
    assert Times("cpu").seconds(found) == (pytest.approx(wanted, rel=0.01), Basis.ARITHMETIC)
    twice, _ = Times("cpu").seconds(facts_of({**SMALL, "algo": "disk"}))
    assert twice - wanted == pytest.approx(steps * 3 * 64 * forward / 1e9, rel=0.01)


def test_records_of_the_same_kind_tell_the_time(tmp_path):
    timed_record(tmp_path, 50.0, "eps=1")  # of 100 steps
    timed_record(tmp_path, 70.0, "eps=3")
    timed_record(tmp_path, 120.0, "eps=4", seeds_at_once=2)
    assert learnt(tmp_path).seconds(facts_of(SMALL)) == (times.SECONDS_TO_START + 225 * 0.6, Basis.RECORDS)


def test_records_of_other_batch_sizes_tell_it_in_proportion(tmp_path):
    timed_record(tmp_path, 50.0, "batch_size=32")
    timed_record(tmp_path, 999.0, "batch_size=512")
    assert learnt(tmp_path).seconds(facts_of(SMALL)) == (times.SECONDS_TO_START + 225 * 1.0, Basis.OTHER_BATCHES)


def test_the_nearest_batch_size_is_that_of_the_smallest_ratio(tmp_path):
    timed_record(tmp_path, 50.0, "batch_size=16")
    timed_record(tmp_path, 300.0, "batch_size=128")
    assert learnt(tmp_path).seconds(facts_of(SMALL)) == (times.SECONDS_TO_START + 225 * 1.5, Basis.OTHER_BATCHES)


def test_runs_of_several_batch_sizes_are_estimated_one_by_one(tmp_path):
    timed_record(tmp_path, 50.0)
    found = learnt(tmp_path)
    assert found.seconds_of_step(facts_of(SMALL)) == (0.5, Basis.RECORDS)
    assert found.seconds_of_step(facts_of({**SMALL, "batch_size": "128"})) == (1.0, Basis.OTHER_BATCHES)


def test_records_of_other_numbers_of_threads_tell_it_where_there_are_no_others(tmp_path):
    timed_record(tmp_path, 50.0, device="cpu, 99 threads")
    timed_record(tmp_path, 70.0, "eps=3", "batch_size=32", device="cpu, 98 threads")
    assert learnt(tmp_path).seconds(facts_of(SMALL)) == (times.SECONDS_TO_START + 225 * 0.5, Basis.OTHER_THREADS)
    timed_record(tmp_path, 40.0, "eps=4", "batch_size=32")
    assert learnt(tmp_path).seconds(facts_of(SMALL)) == (times.SECONDS_TO_START + 225 * 0.8, Basis.OTHER_BATCHES)


def test_records_of_as_many_views_of_a_sample_tell_the_time(tmp_path):
    timed_record(tmp_path, 50.0, "dataset=mnist", "augmentation.copies=2", "augmentation.flip=true")
    one, two = ({**SMALL, "dataset": "mnist", "augmentation.copies": copies} for copies in "12")
    two["augmentation.flip"] = "true"
    found = learnt(tmp_path)
    assert found.seconds_of_step(facts_of(two)) == (0.5, Basis.RECORDS)
    assert found.seconds_of_step(facts_of(one))[1] == Basis.ARITHMETIC


@pytest.mark.parametrize("other", [{"model": "mlp"}, {"algo": "disk"}, {"dataset": "mnist"}])
def test_records_of_another_kind_tell_nothing(tmp_path, other):
    timed_record(tmp_path, 50.0)
    assert learnt(tmp_path).seconds(facts_of({**SMALL, **other}))[1] == Basis.ARITHMETIC


@pytest.mark.parametrize("status", ["interrupted", "failed", "running"])
def test_a_run_that_did_not_end_tells_nothing(tmp_path, status):
    folder = timed_record(tmp_path, 50.0)
    (folder / "status.json").write_text(json.dumps({"status": status}))
    assert learnt(tmp_path).seconds(facts_of(SMALL))[1] == Basis.ARITHMETIC


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.yaml", "batch_size: 64", "batch_size: 0"),
        ("config.yaml", "batch_size: 64", "batch_size: -64"),
        ("summary.json", '"steps": 100', f'"steps": {10**400}'),
        ("summary.json", '"steps": 100', '"steps": -5'),
        ("provenance.json", '"wall_seconds": 50.0', '"wall_seconds": "inf"'),
        ("provenance.json", '"seeds_at_once": 1', f'"seeds_at_once": {10**400}'),
    ],
)
def test_a_record_of_odd_numbers_tells_nothing(tmp_path, name, old, new):
    path = timed_record(tmp_path, 50.0) / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert learnt(tmp_path).seconds(facts_of(SMALL))[1] == Basis.ARITHMETIC


def test_records_of_another_device_tell_nothing(tmp_path):
    timed_record(tmp_path, 50.0, device="another")
    assert learnt(tmp_path).seconds(facts_of(SMALL))[1] == Basis.ARITHMETIC


# What is missing.


class CellWorld:
    """One cell, and the records made up for it."""

    def __init__(self, folder: Path, text: str) -> None:
        self.results = folder / "results"
        self.cell = only_cell(loaded(folder, table_1=text))
        self.jobs = {candidate: job_of_candidate(*candidate) for candidate in self.cell.candidates}

    def run(self, candidate: int, seed: int, accuracy: float = 0.6, status: str = "finished", **summary) -> None:
        record(self.results, list(self.jobs.values())[candidate], seed, accuracy, status, **summary)

    def standing(self, may_retry=lambda candidate, seed: False, lacking: str | None = None) -> standing.Standing:
        return standing_of(self.cell, Evidence(self.results, Hashes(RecordIndex(self.results))), may_retry, lacking)

    def asked(self, **options) -> list[tuple[int, tuple[int, ...]]]:
        order = list(self.jobs)
        return [(order.index(batch.candidate), batch.seeds) for batch in self.standing(**options).batches]


@pytest.fixture
def one(tmp_path):
    return CellWorld(tmp_path, SEARCH.replace("0.1,0.5,1", "0.5").replace("seeds: 2", "seeds: 3"))


@pytest.fixture
def search(tmp_path):
    return CellWorld(tmp_path, SEARCH)


def test_a_cell_asks_for_the_seeds_that_it_lacks(one):
    assert (one.standing().state, one.asked()) == (State.MISSING, [(0, (0, 1, 2))])
    one.run(0, 1)
    assert (one.standing().state, one.asked()) == (State.PARTLY, [(0, (0, 2))])
    one.run(0, 0)
    one.run(0, 2)
    assert (one.standing().state, one.asked()) == (State.DONE, [])


def test_runs_that_have_not_ended_are_asked_for_again(one):
    one.run(0, 0, status="running")
    one.run(0, 1, status="interrupted")
    assert one.asked() == [(0, (0, 1, 2))]


def test_seeds_that_a_cell_does_not_ask_for_do_not_count(one):
    one.run(0, 7)
    one.run(0, 9, status="diverged")
    assert (one.standing().state, one.asked()) == (State.MISSING, [(0, (0, 1, 2))])


def test_what_diverged_is_a_result_and_no_other_seed_takes_its_place(one):
    one.run(0, 0)
    one.run(0, 1, status="diverged")
    assert one.asked() == [(0, (2,))]
    assert one.asked(may_retry=lambda candidate, seed: True) == [(0, (2,))]
    one.run(0, 2)
    assert (one.standing().state, one.standing().reason) == (State.FAILED, "diverged")


@pytest.mark.parametrize("status", ["failed", "invalid"])
def test_what_failed_is_run_again_only_if_asked(one, status):
    one.run(0, 0)
    one.run(0, 1)
    one.run(0, 2, status=status)
    assert (one.standing().state, one.asked()) == (State.FAILED, [])
    assert one.asked(may_retry=lambda candidate, seed: seed == 2) == [(0, (2,))]
    assert one.asked(may_retry=lambda candidate, seed: seed != 2) == []


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"meteor_without_synonyms": 0.4}, "no meteor in the record"),
        ({"meteor": "inf"}, "no finite meteor in the record"),
    ],
)
def test_a_record_without_the_number_is_not_run_again(tmp_path, entry, reason):
    world = CellWorld(tmp_path, SEARCH.replace("0.1,0.5,1", "0.5").replace("seeds: 2", "seeds: 1\nmetric: meteor"))
    world.run(0, 0, **entry)
    assert (world.standing().state, world.standing().reason) == (State.FAILED, reason)


def test_a_search_runs_all_candidates_once_then_the_winner_with_all_seeds(search):
    first = search.standing()
    assert search.asked() == [(0, (0,)), (1, (0,)), (2, (0,))]
    assert (first.later, first.runs) == (1, 4)
    search.run(0, 0, 0.5)
    search.run(1, 0, 0.7)
    assert (search.asked(), search.standing().later) == ([(2, (0,))], 1)
    search.run(2, 0, status="diverged")
    assert (search.asked(), search.standing().later) == ([(1, (1,))], 0)
    search.run(1, 1, 0.1)
    assert search.standing().state == State.DONE


def test_a_search_of_which_one_candidate_has_run_is_partly_there(search):
    assert search.standing().state == State.MISSING
    search.run(1, 0, 0.7)
    assert search.standing().state == State.PARTLY


def test_a_search_is_ranked_by_the_first_seed_and_waits_for_it(search):
    """A candidate that has another seed alone, however good, is asked for its first; one that lost it is behind."""
    search.run(0, 0, 0.5)
    search.run(1, 1, 0.9)
    search.run(2, 0, status="diverged")
    search.run(2, 1, 0.9)
    assert search.asked() == [(1, (0,))]
    search.run(1, 0, 0.4)
    assert search.asked() == [(0, (1,))]


def test_a_search_fails_by_what_its_winner_lost(search):
    search.run(0, 0, status="diverged")
    search.run(1, 0, 0.7)
    search.run(1, 1, status="failed")
    search.run(2, 0, 0.4)
    assert (search.standing().state, search.standing().reason) == (State.FAILED, "failed")


def test_a_search_without_a_winner_fails_by_all_that_was_lost(search):
    for candidate, status in enumerate(("diverged", "failed", "diverged")):
        search.run(candidate, 0, status=status)
        search.run(candidate, 1, status="diverged")
    assert (search.standing().state, search.standing().reason) == (State.FAILED, "diverged, failed")


def test_what_is_lacking_matters_only_while_something_is_missing(one):
    assert one.standing(lacking="weights x").state == State.BLOCKED
    for seed in range(3):
        one.run(0, seed)
    assert one.standing(lacking="weights x").state == State.DONE


# Order and budget.


def plan_of(folder: Path, retry: bool = False, **files: str) -> Planner:
    return Planner(loaded(folder, **files), folder / "results", job_of_candidate("device=cpu").config, retry=retry)


class Carried:
    """Makes up the record of what it is given, and remembers it."""

    def __init__(self, folder: Path, status: str = "finished") -> None:
        self.results = folder / "results"
        self.status = status
        self.runs: list[tuple[str, int]] = []
        self.waves: list[int] = []

    def __call__(self, wave) -> None:
        self.waves.append(len(wave))
        for work in wave:
            job = job_of_candidate(*work.batch.candidate)
            for seed in work.batch.seeds:
                record(self.results, job, seed, status=self.status)
                self.runs.append((config_hash(job.config), seed))


@pytest.mark.parametrize("together", [False, True])
def test_everything_is_run_once_and_shared_runs_too(tmp_path, together):
    carried = Carried(tmp_path)
    left = queue.carry_out(plan_of(tmp_path), None, carried, together=together)
    # Four cells of two seeds; of the search two further candidates, whose winner is one of them or in the table.
    assert len(carried.runs) == len(set(carried.runs))
    assert len(carried.runs) in (8 + 2, 8 + 2 + 1)
    assert left == queue.Left(0, None)
    again = Carried(tmp_path)
    queue.carry_out(plan_of(tmp_path), None, again, together=together)
    assert again.runs == []


def test_cells_that_need_least_come_first(tmp_path):
    planner, carried = plan_of(tmp_path), Carried(tmp_path)
    cost = {}
    for entry in planner.entries:
        cost.setdefault(full_hash(entry.cell.candidates[0]), planner.seconds(entry))
    queue.carry_out(planner, None, carried, together=False)
    order = [cost[digest] for digest, _ in carried.runs if digest in cost]
    assert order == sorted(order)


def test_a_cell_of_few_long_runs_may_come_before_one_of_many_short_ones(tmp_path):
    """What is missing of it counts as a whole."""
    search = SEARCH.replace("0.1,0.5,1", "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8").replace("algo=disk", "algo=dpsgd")
    planner, carried = plan_of(tmp_path, table_1=TABLE, table_2=search), Carried(tmp_path)
    short = planner.entries[-1]
    assert all(planner.seconds_of_run(one)[0] >= planner.seconds_of_run(short)[0] for one in planner.entries)
    assert all(planner.seconds(one) < planner.seconds(short) for one in planner.entries[:-1])
    queue.carry_out(planner, None, carried, together=False)
    of_table = {full_hash(entry.cell.candidates[0]) for entry in planner.entries[:-1]}
    assert {digest for digest, _ in carried.runs[:8]} == of_table


@pytest.mark.parametrize("together", [False, True])
def test_no_run_is_begun_that_would_end_after_the_budget(tmp_path, monkeypatch, together):
    now = [0.0]
    monkeypatch.setattr(queue.time, "monotonic", lambda: now[0])
    planner = plan_of(tmp_path, table_1=TABLE)
    each = min(planner.seconds_of_run(entry)[0] for entry in planner.entries)
    carried = Carried(tmp_path)

    def carry(wave) -> None:
        carried(wave)
        now[0] += sum(work.seconds for work in wave)

    left = queue.carry_out(planner, 1.9 * each, carry, together=together)
    assert (len(carried.runs), left.runs) == (1, 7)
    nothing = Carried(tmp_path)
    left = queue.carry_out(plan_of(tmp_path, table_1=TABLE), 0.9 * each, nothing, together=False)
    assert (nothing.runs, left.runs) == ([], 7)
    assert left.cheapest is not None
    assert left.cheapest.seconds == pytest.approx(each)


@pytest.mark.parametrize("status", ["failed", "running"])
def test_no_run_is_begun_twice_by_one_call(tmp_path, status):
    for _ in range(2):
        carried = Carried(tmp_path, status)
        left = queue.carry_out(plan_of(tmp_path, retry=True, table_1=TABLE), None, carried, together=False)
        assert len(carried.runs) == len(set(carried.runs)) == 8
        assert left.runs == 0
    carried = Carried(tmp_path)
    queue.carry_out(plan_of(tmp_path, table_1=TABLE), None, carried, together=False)
    assert len(carried.runs) == (0 if status == "failed" else 8)


def test_estimates_follow_what_was_measured(tmp_path):
    planner = plan_of(tmp_path, table_1=TABLE)
    before = planner.line(planner.entries)

    def carry(wave) -> None:
        for work in wave:
            job = job_of_candidate(*work.batch.candidate)
            for seed in work.batch.seeds:
                folder = record(tmp_path / "results", job, seed, steps=5)
                origin = {"device": describe(torch.device("cpu")), "wall_seconds": 5000.0}
                (folder / "provenance.json").write_text(json.dumps(origin))

    left = queue.carry_out(planner, 10 * before.seconds, carry, together=False)
    # After one cell of each query is known to take hours, nothing fits any more.
    after = planner.line(planner.entries)
    assert left.runs == after.runs == 4
    assert after.seconds > 50 * before.seconds
    assert (before.basis, after.basis) == (Basis.ARITHMETIC, Basis.RECORDS)


def test_a_plan_counts_shared_runs_once(tmp_path):
    planner = plan_of(tmp_path, table_1=TABLE, table_2=TABLE)
    assert planner.line(planner.entries).runs == 8
    assert planner.line(planner.entries).states == Counter({State.MISSING: 8})
    # And so does what is said of those that did not fit into a budget.
    assert queue.carry_out(planner, 0.0, Carried(tmp_path), together=False).runs == 8


# The same runs, their numbers and the order of their settings typed otherwise.
RETYPED = TABLE.replace("eps=2", "eps=2.0").replace(
    "dataset=digits model=linear batch_size=64 epochs=0.2", "batch_size=64 epochs=2e-1 model=linear dataset=digits"
)


@pytest.mark.parametrize("status", ["finished", "failed", "running"])
def test_runs_that_are_typed_in_two_ways_are_counted_and_begun_once(tmp_path, status):
    assert RETYPED.count("2.0") == RETYPED.count("2e-1") == 1
    planner = plan_of(tmp_path, retry=True, table_1=TABLE, table_2=RETYPED)
    assert planner.line(planner.entries).runs == 8
    carried = Carried(tmp_path, status)
    assert queue.carry_out(planner, None, carried, together=False).runs == 0
    assert len(carried.runs) == len(set(carried.runs)) == 8


@pytest.mark.parametrize("together", [False, True])
def test_a_search_goes_on_from_what_was_run_for_another_that_is_typed_otherwise(tmp_path, together):
    """Its candidates have all run, and the winner's further seeds are its own."""
    retyped = SEARCH.replace("seeds: 2", "seeds: 3").replace("epochs=0.2", "epochs=0.2 averaging=none")
    assert retyped.count("averaging=none") == retyped.count("seeds: 3") == 1  # what is so anyway
    planner, carried = plan_of(tmp_path, table_1=SEARCH, table_2=retyped), Carried(tmp_path)
    assert queue.carry_out(planner, None, carried, together=together).runs == 0
    assert len(carried.runs) == len(set(carried.runs)) == 3 + 2


def test_runs_that_others_left_and_for_which_no_time_is_left_did_not_fit(tmp_path):
    planner = plan_of(tmp_path, table_1=TABLE)
    (work, *_) = queue._works(planner, planner.entries[0])
    planner.note(work.batch)
    untried = queue.carry_out(planner, 0.0, Carried(tmp_path), together=False)
    planner.put_back(work.batch)
    again = queue.carry_out(planner, None, carried := Carried(tmp_path), together=False)
    assert (untried.runs, again.runs, len(carried.runs)) == (8, 0, 8)


# What is typed.


def test_arguments_are_read():
    found = parse(["paper=disk,adp", "artefact=table_1", "budget=1h30m", "plan=true", "device=cpu", "data.root=/x"])
    assert found.papers == ("disk", "adp")
    assert (found.artefacts, found.budget, found.plan, found.retry) == (("table_1",), 5400.0, True, False)
    assert found.passed_on == ("device=cpu", "data.root=/x")
    assert parse([]) == Arguments(claims=conf_folder() / "paper")


def test_a_folder_of_options_may_stand_anywhere(tmp_path):
    for typed in (["-cd", str(tmp_path), "plan=true"], ["plan=true", "--config-dir", str(tmp_path)]):
        found = parse(typed)
        assert (found.config_dirs, found.plan) == ((tmp_path,), True)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("budget", "budget: expected key=value; --help lists the keys"),
        ("budget=30", "budget=30: expected a time such as 90s, 30m, 2h or 1h30m"),
        ("paper=disc", "paper=disc: expected one of doppler, disk, adp, dp_pmlf, dc_sgd"),
        ("plan=yes", "plan=yes: expected true or false"),
        ("optim.lr=1", "optim.lr=1: expected one of paper, artefact,"),
        ("launcher=a b", "launcher=a b: expected the name of a launcher"),
        ("artefact=a-b", "artefact=a-b: expected names, separated by commas"),
        ("results_dir=", "results_dir='': expected the name of a folder"),
        ("smoke=true plan=true", "plan=true: expected no such key beside smoke=true, which tries a few steps here"),
        ("budget=1s smoke=true", "budget=1s: expected no such key beside smoke=true"),
        ("-cd tests -cd conf", "-cd conf: expected once"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(typed, says):
    with pytest.raises(UserError) as caught:
        parse([typed] if typed.startswith("launcher") else typed.split())
    assert str(caught.value).startswith(says)


def test_no_setting_that_is_passed_on_changes_what_is_computed():
    assert {key for key in PASSED_ON if not changes_nothing(f"{key}=1")} == set()
