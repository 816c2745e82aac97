import json
import math
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import cli, engines, timing
from benchmarks.measure import measure
from benchmarks.memory import peak_memory, peak_on_cpu
from benchmarks.models import SPECS, Case, build_case
from benchmarks.process import MeasurementError, in_own_process, reason
from benchmarks.report import ONE_POINT_ENGINES, markdown
from benchmarks.steps import DPSGD_STEP, NON_PRIVATE_STEP, STEPS
from benchmarks.timing import LARGEST_ERROR, Contenders, Settings, time_case

CPU = torch.device("cpu")
TWO_POINT_STEPS = [name for name in STEPS if name not in (NON_PRIVATE_STEP, DPSGD_STEP)]
ONE_ROUND = Settings(rounds=1, small=True, steps=False)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the peers'


def small_case(name: str) -> Case:
    return build_case(name, CPU, small=True)


@pytest.mark.parametrize("name", ["cnn5_28", "roberta", "vit"])
def test_engines_compute_the_same_sums(name):
    result = time_case(small_case(name), list(engines.ENGINES), ONE_ROUND)
    for engine, entry in result["engines"].items():
        if "failed" in entry:
            assert engine == "opacus_ew"  # it knows few operations
            continue
        assert entry["error"] < 1e-4, engine
        assert entry["ratio"] > 0
        assert len(entry["seconds"]) == 1
    assert result["engines"]["vmap_8"]["from_dpbench"] < 1e-4
    assert result["batch"] == len(small_case(name).targets)


def test_engines_repeat_themselves_and_leave_the_model_alone():
    case = small_case("cnn5_28")
    before = torch.nn.utils.parameters_to_vector(case.model.parameters()).clone()
    for name in engines.takes_part(engines.ENGINES, "cpu"):
        compute = engines.ENGINES[name].build(case, 1.0)
        first, second = (torch.cat([p.reshape(-1) for p in compute(case.inputs, case.targets)]) for _ in range(2))
        assert torch.allclose(first, second, rtol=1e-3, atol=1e-5), name
        assert first.shape == before.shape
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(case.model.parameters()))
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_an_engine_that_fails_is_recorded_and_stops_nothing(monkeypatch):
    def raising(case, threshold):
        raise RuntimeError("no rule for /some/private/folder/layer.py\nand more")

    def wrong(case, threshold):
        compute = engines.non_private(case, threshold)
        return lambda inputs, targets: [2 * piece for piece in compute(inputs, targets)]

    def wearing_out(case, threshold):
        compute, calls = engines.vmap_grad(8)(case, threshold), []

        def run(inputs, targets):
            calls.append(None)
            if len(calls) > 1:
                raise MemoryError("no more")
            return compute(inputs, targets)

        return run

    broken = {"raising": raising, "wrong": wrong, "wearing_out": wearing_out}
    for name, build in broken.items():
        monkeypatch.setitem(engines.ENGINES, name, engines.Engine(name, build))
    result = time_case(small_case("cnn5_28"), [*broken, "dpbench", "vmap_8"], ONE_ROUND)["engines"]
    assert result["raising"] == {"failed": "RuntimeError: no rule for layer.py"}
    assert "relative error" in result["wrong"]["failed"]
    assert result["wrong"]["error"] > LARGEST_ERROR
    assert result["wearing_out"]["failed"] == "MemoryError: no more"
    assert result["dpbench"]["ratio"] > 0
    assert result["vmap_8"]["ratio"] > 0


def test_steps_are_compared_with_a_step_of_dpsgd():
    settings = Settings(rounds=2, small=True)
    steps = time_case(small_case("cnn5_28"), ["dpbench"], settings)["steps"]
    assert steps["step_dpsgd"]["ratio"] > 0
    assert steps["step_disk"]["ratio_to_dpsgd"] > 0
    assert steps["step_pmlf"]["ratio_to_dpsgd"] > 0


def test_slow_contenders_sit_out_and_ratios_are_of_the_same_round(monkeypatch):
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    contenders = Contenders(CPU)
    waits = {"base": 0.02, "fast": 0.024, "dpbench_disk": 0.048, "slow": 0.1}
    for name, seconds in waits.items():
        contenders.add(name, lambda seconds=seconds: lambda: wait(seconds), warmups=0)
    once = iter([0.2])
    contenders.add("slow once", lambda: lambda: wait(next(once, 0.024)), warmups=0)
    contenders.race(dict.fromkeys(contenders.runs, "base"), rounds=5, seconds=60)
    assert [value is not None for value in contenders.seconds["slow"]] == [True, True, True, False, False]
    for name in ("fast", "dpbench_disk", "slow once"):
        assert None not in contenders.seconds[name]
    assert contenders.ratio("slow", "base") == pytest.approx(5)
    assert contenders.ratio("fast", "base") == pytest.approx(1.2)


def test_when_the_time_is_up_only_the_fewest_rounds_are_made():
    contenders = Contenders(CPU)
    contenders.add("base", lambda: lambda: time.sleep(0.001), warmups=0)
    contenders.race({"base": "base"}, rounds=9, seconds=0)
    assert len(contenders.seconds["base"]) == 3


def test_a_memory_cell_is_positive_and_grows_with_per_sample_gradients():
    cells = {
        engine: in_own_process(peak_memory, "cnn5_28", engine, "cpu", 1, True, timeout=60)
        for engine in ("nonprivate", "opacus_hooks")
    }
    assert 0 < cells["nonprivate"] < cells["opacus_hooks"]


def _one_after_the_other() -> None:
    for megabytes in (4, 8, 2):
        torch.zeros(megabytes, 2**18)


def _together() -> Tensor:
    return torch.zeros(4, 2**18) + torch.zeros(2, 1, 2**18)  # 4 and 2 MiB make 8


def _first_call_only(seen: list[None]) -> None:
    seen.append(None)
    torch.zeros(16 if len(seen) == 1 else 1, 2**18)


@pytest.mark.parametrize(
    ("compute", "megabytes"), [(_one_after_the_other, 8), (_together, 14), (partial(_first_call_only, []), 1)]
)
def test_memory_is_what_is_held_at_once_beyond_what_was_there(compute, megabytes):
    there = torch.zeros(64, 2**18)
    assert peak_on_cpu(compute) == pytest.approx(megabytes * 2**20, rel=1e-3)
    del there


def test_processes_that_fail_say_why():
    with pytest.raises(MeasurementError, match="ValueError: bad"):
        in_own_process(_raise, timeout=60)
    with pytest.raises(MeasurementError, match="ended with code 3"):
        in_own_process(_die, timeout=60)
    with pytest.raises(MeasurementError, match="stopped after"):
        in_own_process(time.sleep, 60, timeout=0.2)


def _raise():
    raise ValueError("bad")


def _die():
    os._exit(3)


def test_reasons_are_short_and_name_no_folder():
    assert reason(KeyError("x")) == "KeyError: 'x'"
    assert reason(OSError("cannot read /home/me/data/file.bin")) == "OSError: cannot read file.bin"
    assert len(reason(RuntimeError("a" * 1000))) <= 160


def test_the_command_writes_data_and_tables(tmp_path, capsys):
    arguments = ["--quick", "--models", "cnn5_28", "--engines", "dpbench,dpbench_disk,vmap_8", "--threads", "1"]
    assert cli.main([*arguments, "--output", str(tmp_path)]) == 0
    assert "CNN-5, 28 px" in capsys.readouterr().out
    (data,), (tables,) = tmp_path.glob("*-1-thread-quick-partial.json"), tmp_path.glob("*-1-thread-quick-partial.md")
    results = json.loads(data.read_text())
    assert results["machine"].keys() >= {"device", "threads", "versions", "commit", "date"}
    assert results["machine"]["versions"].keys() >= {"torch", "opacus", "transformers"}
    assert results["settings"]["allocator"] in ("default", "tuned")
    model = results["models"]["cnn5_28"]
    assert model["batch"] > 0
    assert list(model["engines"]) == ["nonprivate", "dpbench", "dpbench_disk", "vmap_8"]
    assert all(cell["bytes"] > 0 for cell in model["memory"].values())
    assert model["engines"]["dpbench_disk"]["ratio_to_dpsgd"] > 0
    text = tables.read_text()
    assert text == markdown(results)
    for heading in ("one clipped sum", "Two gradients", "Whole steps", "Peak memory", "Deviation"):
        assert heading in text
    assert "| CNN-5, 28 px | 6 |" in text


def test_what_fails_is_in_the_tables():
    results = measure([], ["dpbench", "vmap_8"], ONE_ROUND, memory=False)
    works = {"median_seconds": 0.1, "ratio": 1.0, "seconds": [0.1], "error": 1e-7}
    ran = {"nonprivate": works, "dpbench": works | {"ratio": 1.5}, "vmap_8": {"failed": "RuntimeError: no"}}
    results["models"] = {
        "cnn5_28": {"batch": 4, "engines": ran, "steps": {}, "memory": {}},
        "wrn": {"failed": "its process ended with code -9"},
    }
    text = markdown(results)
    assert "| CNN-5, 28 px | 4 | 100 ms | **1.50** | fails |" in text
    assert "| WRN-16-4, group norm | fails | fails | fails | fails |" in text
    assert "- torch.func, chunks of 8 (CNN-5, 28 px): `RuntimeError: no`" in text
    assert "its process ended with code -9" in text


@pytest.mark.parametrize("arguments", [["--models", "resnet"], ["--engines", "dpbench,fast"], ["--rounds", "0"]])
def test_arguments_that_mean_nothing_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_all_models_are_made():
    for name in SPECS:
        case = small_case(name)
        logits = case.model(case.inputs)
        assert len(logits) == case.batch == len(case.targets)
        assert torch.equal(small_case(name).inputs, case.inputs)


def columns_of(engines):
    """The ratios that the README's tables show of a model, the fastest in bold, whoever it is."""
    chunked = [name for name in engines if name.startswith("vmap_")]
    columns = (["dpbench"], ["opacus_hooks"], ["opacus_ghost"], ["opacus_ew"], chunked)
    ratios = [
        min((engines[name]["ratio"] for name in names if "failed" not in engines[name]), default=math.inf)
        for names in columns
    ]
    shown = ["fails" if it == math.inf else f"{it:.2f}" for it in ratios]
    fastest = ratios.index(min(ratios))
    shown[fastest] = f"**{shown[fastest]}**"
    return shown


def test_the_numbers_in_the_readme_are_the_recorded_ones():
    root = Path(__file__).resolve().parents[1]
    recorded, other = (
        json.loads((root / f"results/benchmarks/cpu-{machine}-2-threads.json").read_text())["models"]
        for machine in ("amd-epyc", "intel-xeon")
    )
    readme = " ".join((root / "README.md").read_text().split())
    *others, last = (f"{model['engines']['dpbench']['ratio']:.2f}" for model in other.values())
    assert f"an Intel Xeon have {', '.join(others)} and {last} in the order" in readme
    for models, sentence in (
        (recorded, "Whole steps of DiSK and DP-PMLF take {} to {} times those of DP-SGD."),
        (other, "ahead of all others there too, and {} to {} times DP-SGD's step for those of DiSK and DP-PMLF."),
    ):
        steps = [model["steps"][name]["ratio_to_dpsgd"] for model in models.values() for name in TWO_POINT_STEPS]
        assert sentence.format(f"{min(steps):.2f}", f"{max(steps):.2f}") in readme
        for model in models.values():
            own = [name for name in ONE_POINT_ENGINES if name in model["engines"]]
            private = {name: model["engines"][name].get("ratio", math.inf) for name in own}
            assert min(private, key=private.__getitem__) == "dpbench"
    roberta = recorded["roberta"]
    step, gradient = roberta["steps"]["step_dpsgd"], roberta["engines"]["dpbench"]
    shown = f"takes {1000 * step['median_seconds']:.0f} ms, {1000 * gradient['median_seconds']:.0f} of them for"
    assert shown in readme
    for model in recorded.values():
        assert f"| {' | '.join(columns_of(model['engines']))} |" in readme


def test_the_numbers_of_a_gpu_in_the_readme_are_the_recorded_ones():
    root = Path(__file__).resolve().parents[1]
    models = json.loads((root / "results/benchmarks/nvidia-h200.json").read_text())["models"]
    assert list(models) == list(SPECS)
    readme = " ".join((root / "README.md").read_text().split())
    for model in models.values():
        own = model["engines"]["dpbench"]
        replayed = f"{model['engines']['nonprivate_replayed']['ratio']:.2f}"
        row = [*columns_of(model["engines"]), replayed, f"{model['batch'] / own['median_seconds']:,.0f}"]
        assert f"| {' | '.join(row)} |" in readme
    steps = [model["steps"][name]["ratio_to_dpsgd"] for model in models.values() for name in TWO_POINT_STEPS]
    assert f"take {min(steps):.2f} to {max(steps):.2f} times those of DP-SGD there" in readme
    own, hooks, ghost = (
        [m["memory"][name]["ratio"] for m in models.values()] for name in ("dpbench", "opacus_hooks", "opacus_ghost")
    )
    assert f"in all {min(own):.1f} to {max(own):.1f} times what the non-private gradient takes" in readme
    assert f"Opacus hooks {min(hooks):.1f} to {max(hooks):.1f} times, and" in readme
    less = sum(theirs < ours for theirs, ours in zip(ghost, own, strict=True))
    assert (less, len(models)) == (4, 6)
    assert f"ghost clipping {min(ghost):.1f} to {max(ghost):.1f} times, which is less in four of the six." in readme
