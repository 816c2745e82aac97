"""Trains cases in teams of one, two and three processes, and keeps what each process found.

python team_worker.py FOLDER writes FOLDER/<crew>-<rank>.pt: by case, what `trained_by_this_process` returns. The
processes are forked once everything is imported, which takes longer than the cases.
"""

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cli import SMALL
from helpers import Kept, composed

from dpbench import run
from dpbench.config import RunConfig, config_hash
from dpbench.data import Prompts, Split, Splits, TextDataset, TokenSplit
from dpbench.filters import Identity
from dpbench.gradients import PerSampleGradients
from dpbench.noise import Noise
from dpbench.privacy import epsilon
from dpbench.privacy.sampling import PoissonSampler
from dpbench.randomness import generator, global_stream
from dpbench.step import PrivateStep
from dpbench.training import loop
from dpbench.training.assemble import assemble
from dpbench.training.budget import open_ledger
from dpbench.training.distributed import TorchTeam
from dpbench.training.following import join
from dpbench.training.lockstep import alone, together
from dpbench.training.team import Team
from dpbench.training.torchrun import torchrun_team

MULTIPLIER, NORM, BATCH = 0.7, 1.0, 64
SETTINGS = (
    "device=cpu",
    "model=linear",
    "privacy.accountant=rdp",
    f"batch_size={BATCH}",
    "epochs=0.25",  # six steps
    "evaluation.every_steps=3",
)

Sabotage = Callable[[pytest.MonkeyPatch, Team], None]


def nothing(patch: pytest.MonkeyPatch, team: Team) -> None:
    pass


class Case(NamedTuple):
    """A run, and what is broken in it."""

    settings: tuple[str, ...] = ()
    sabotage: Sabotage = nothing
    broken_samples: slice | None = None


@cache
def digits() -> Splits:
    return composed(*SETTINGS).dataset.load(Path("no such folder"), download=False)


def texts(data: TextDataset) -> Splits:
    """Made-up samples of different lengths; where the next token is learnt also prompts, answered in five words."""
    chance = torch.Generator().manual_seed(5)

    def drawn(low: int, high: int, shape: tuple[int, ...]) -> list[Any]:
        return torch.randint(low, high, shape, generator=chance).tolist()

    def split(count: int) -> TokenSplit:
        samples = [drawn(1, data.vocabulary, (length,)) for length in drawn(3, data.max_length, (count,))]
        labels = drawn(1, 3, (count,)) if data.generates else drawn(0, data.classes, (count,))
        return TokenSplit.of(samples, labels, padding=data.padding, longest=data.max_length, generates=data.generates)

    def say(ids: list[int]) -> str:
        return " ".join("abcde"[token % 5] for token in ids)

    asked = drawn(1, data.vocabulary, (10, 4))
    told = [[say(text)] for text in drawn(1, data.vocabulary, (10, data.most_tokens))]
    prompts = Prompts(asked, told, end=2, decode=say) if data.generates else None
    return Splits(split(data.train_size), split(data.test_size), {"validation": split(25)}, prompts)


def splits_of(case: Case) -> Splits:
    data = composed(*SETTINGS, *case.settings).dataset
    if isinstance(data, TextDataset):
        return texts(data)
    splits = digits()
    if case.broken_samples is None:
        return splits
    rows = splits.train.take(slice(None))[0].clone()
    rows[case.broken_samples] = float("nan")
    return Splits(Split.raw(rows, splits.train.labels), splits.test)


def trained_by_this_process(case: Case, team: Team) -> dict[str, Any]:
    """What a run comes to in this process."""
    config: RunConfig = composed(*SETTINGS, *case.settings)
    found: dict[str, Any] = {"thresholds": [], "metrics": [], "error": None, "batches": []}
    with pytest.MonkeyPatch.context() as patch:
        case.sabotage(patch, team)
        added_up = TorchTeam._added_up
        patch.setattr(
            TorchTeam,
            "_added_up",
            lambda self, own, counts: found["batches"].append(counts) or added_up(self, own, counts),
        )
        start = time.monotonic()
        error = parts = None
        try:
            ledger = open_ledger(config, MULTIPLIER)
            parts = assemble(config, torch.device("cpu"), MULTIPLIER, ledger)
            join(team, parts, config)
            parts.step.recorder = kept = Kept()
            steps = loop.train(
                config,
                parts,
                team.shares(splits_of(case)),
                ledger,
                team=team,
                on_step=lambda step: found["thresholds"].append(parts.step.threshold.value(step)),
                on_evaluation=lambda metrics: found["metrics"].append(metrics.as_dict()),
            )
            with global_stream(config.seed, "model", team.stream(config_hash(config))):
                found["draw"] = float(torch.rand(()))
                if isinstance(team, TorchTeam):
                    together([steps], team.clipped_sums)
                else:
                    alone(steps)
            found["gradients"] = torch.stack(kept.private_gradients)
        except Exception as raised:
            error, found["error"] = raised, f"{type(raised).__name__}: {raised}"
        if isinstance(team, TorchTeam):
            team.contact.end(error)
        if parts is not None:
            states = [value for state in parts.step.optimizer.state.values() for value in state.values()]
            found["state"] = sum(value.numel() for value in states if isinstance(value, torch.Tensor))
            found["weights"] = parts.step.gradients.flat.vector.clone()
            found["ledger"] = ledger.state_dict()
        found["seconds"] = time.monotonic() - start
    return found


# What goes wrong in one process.


def fail_at(step: int, rank: int, owner: type, name: str) -> Sabotage:
    """Raise in one process, at a call of a method."""

    def sabotage(patch: pytest.MonkeyPatch, team: Team) -> None:
        original, calls = getattr(owner, name), []

        def method(*arguments: Any, **named: Any) -> Any:
            calls.append(1)
            if team.rank == rank and len(calls) == step:
                raise RuntimeError("broken on purpose")
            return original(*arguments, **named)

        patch.setattr(owner, name, method)

    return sabotage


def fail_in_evaluation(patch: pytest.MonkeyPatch, team: Team) -> None:
    fail_at(2, 1, loop, "evaluate")(patch, team)


def little_memory(patch: pytest.MonkeyPatch, team: Team) -> None:
    """Process 1 has memory for five samples at once."""
    original = PerSampleGradients.way

    def way(self: PerSampleGradients, points: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if team.rank == 1 and len(targets) > 5:
            raise torch.OutOfMemoryError("no memory, on purpose")
        return original(self, points, inputs, targets)

    patch.setattr(PerSampleGradients, "way", way)


def no_samples(patch: pytest.MonkeyPatch, team: Team) -> None:
    patch.setattr(PoissonSampler, "draw", lambda self: torch.empty(0, dtype=torch.int64))


# Mutants of the reduction.


def before_it_is_added_up(change: Callable[[TorchTeam, Any], Any]) -> Sabotage:
    """Change what a process brings to the reduction."""

    def sabotage(patch: pytest.MonkeyPatch, team: Team) -> None:
        added_up = TorchTeam._added_up
        patch.setattr(TorchTeam, "_added_up", lambda self, own, counts: added_up(self, change(self, own), counts))

    return sabotage


def noise_by_each(patch: pytest.MonkeyPatch, team: Team) -> None:
    """Each process adds full noise of its own to its share, and nothing is added to the sum."""
    no_samples(patch, team)
    noise = generator(7, "noise", torch.device("cpu"), team.stream("mutant"))
    before_it_is_added_up(
        lambda _, own: own._replace(
            total=own.total + MULTIPLIER * NORM * torch.empty_like(own.total).normal_(generator=noise)
        )
    )(patch, team)
    patch.setattr(Noise, "draw", lambda self, out, source: out.zero_())


def mean_of_means(team: TorchTeam, own: Any) -> Any:
    """The means of the shares are averaged, and taken times the batch size."""
    return own._replace(total=own.total / max(1, len(own.losses)) * BATCH / team.size)


def not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchTeam, "agreed", lambda self, value: value)


def sampling_apart(patch: pytest.MonkeyPatch, team: Team) -> None:
    """Each process draws its own batches."""
    patch.setattr(
        "dpbench.training.assemble.generator",
        lambda seed, name, device, run="": generator(
            seed, name, device, team.stream(run) if name == "sampling" else run
        ),
    )


def sampling_apart_unnoticed(patch: pytest.MonkeyPatch, team: Team) -> None:
    sampling_apart(patch, team)
    not_compared(patch)


def all_rows_everywhere(patch: pytest.MonkeyPatch, team: Team) -> None:
    patch.setattr(TorchTeam, "shares", lambda self, splits: splits)


def own_evaluation(patch: pytest.MonkeyPatch, team: Team) -> None:
    """An evaluation is of the process's own samples."""
    patch.setattr(TorchTeam, "sum", lambda self, value: value)


def answers_of_the_other(patch: pytest.MonkeyPatch, team: Team) -> None:
    """What process 1 answers is taken for what process 0 was asked, and the other way round."""
    gather = TorchTeam.gather

    def gathered(self: TorchTeam, value: Any) -> list[Any]:
        found = gather(self, value)
        return found[::-1] if isinstance(value, list) else found

    patch.setattr(TorchTeam, "gather", gathered)


def own_norms(patch: pytest.MonkeyPatch, team: Team) -> None:
    """Thresholds see the norms of the process's own samples."""
    added_up = TorchTeam._added_up
    patch.setattr(
        TorchTeam, "_added_up", lambda self, own, counts: added_up(self, own, counts)._replace(norms=own.norms)
    )


def own_norms_unnoticed(patch: pytest.MonkeyPatch, team: Team) -> None:
    own_norms(patch, team)
    not_compared(patch)


TIGHT = ("clip=threshold", "threshold.norm=0.3")
ONE = ("clip=threshold", f"threshold.norm={NORM}", "epochs=2", "evaluation.every_steps=12")
EQUAL = {
    "DP-SGD": Case(("algo=dpsgd", *TIGHT)),
    "DiSK": Case(("algo=disk",)),
    "DP-PMLF": Case(("algo=dp_pmlf",)),
    "DC-SGD-E": Case(("algo=dcsgd_e",)),
    "DP-Adam with error feedback": Case(
        ("algo=dpadam", "clip=error_feedback", "clip.uncertified=true", "threshold.norm=0.3")
    ),
    "DP-FTRL": Case(("algo=dp_ftrl",)),
    "adaptive quantiles": Case(("algo=andrew",)),
    "points clipped apart": Case(("algo=dp_pmlf_released",)),
    "fixed size": Case(("privacy=fixed_size",)),
    "shuffled": Case(("privacy=shuffled",)),
    "average of iterates": Case(("averaging=exponential",)),
    # A small step size: the noise of one sample would make a loss so large that its rounding shows.
    "empty shares": Case(("batch_size=1", "epochs=0.02", "optim.lr=0.01", "evaluation.every_steps=12")),
    "broken samples in process 1": Case(("algo=dcsgd_e",), broken_samples=slice(1, None, 10)),
    "little memory in process 1": Case((), little_memory),
    "no samples": Case(ONE, no_samples),
    "diverged": Case(("optim.lr=1e38", "eps=inf")),
}
SMALL_TEXTS = (
    "model.vocabulary=40",
    "model.width=8",
    "model.heads=2",
    "model.longest=24",
    "dataset.max_length=12",
    "dataset.train_size=96",
    "dataset.test_size=41",
    "batch_size=16",
    "epochs=1",
)
LANGUAGE = (
    *("dataset=e2e", "model=gpt2", "model.padding=0", "model.depth=1", "model.pretrained=null", "model.dropout=0"),
    *("dataset.beams=2", "dataset.most_tokens=6"),
)
EQUAL |= {
    "texts": Case(("dataset=sst2", "model=text_small", *SMALL_TEXTS, "algo=disk")),
    "language model": Case((*LANGUAGE, *SMALL_TEXTS, "algo=dpadam", "optim.lr=0.1")),
}
# Each with another filter and optimizer; equal to the case without, which is the same run.
MOMENTUM = ("algo=doppler", "optim.momentum=0.9", "filter=lp3")
SHARDED = {
    "low-pass and momentum": MOMENTUM,
    "DC-SGD-E": EQUAL["DC-SGD-E"].settings,
    "DiSK": EQUAL["DiSK"].settings,
    "filtered Adam": ("algo=lp_dpadam",),
}
IN_PARTS = {f"{name} in parts": Case((*settings, "shard_states=true")) for name, settings in SHARDED.items()}
EQUAL |= {name: Case(settings) for name, settings in SHARDED.items()}
APART = {
    "augmented": Case(("augmentation=crop_flip", "augmentation.crop=1", "augmentation.copies=2")),
    "secure noise": Case(("algo=dcsgd_e", "privacy.secure_noise=true")),
    "secure shuffled batches": Case(("algo=dpsgd", "privacy=shuffled", "privacy.secure_noise=true")),
    "secure noise alone": Case((*ONE, "privacy.secure_noise=true"), no_samples),
}
FAILING = {
    "in the gradients of process 1": Case((), fail_at(3, 1, PerSampleGradients, "clipped_sum")),
    "in the gradients of process 0": Case((), fail_at(3, 0, PerSampleGradients, "clipped_sum")),
    "right of the gradient in process 1": Case((), fail_at(3, 1, Identity, "apply")),
    "right of the gradient in process 0": Case((), fail_at(3, 0, Identity, "apply")),
    "in the last step of process 1": Case((), fail_at(6, 1, Identity, "apply")),
    "in an evaluation": Case((), fail_in_evaluation),
    "while it is put together": Case((), fail_at(1, 1, PrivateStep, "__init__")),
}
MUTANTS = {
    "noise by each": Case(ONE, noise_by_each),
    "mean of means": Case(EQUAL["DP-SGD"].settings, before_it_is_added_up(mean_of_means)),
    "sampling apart": Case(EQUAL["DP-SGD"].settings, sampling_apart),
    "sampling apart, unnoticed": Case(EQUAL["DP-SGD"].settings, sampling_apart_unnoticed),
    "all rows everywhere": Case(EQUAL["DP-SGD"].settings, all_rows_everywhere),
    "own evaluation": Case(EQUAL["language model"].settings, own_evaluation),
    "answers of the other": Case(EQUAL["language model"].settings, answers_of_the_other),
    "own norms": Case((*EQUAL["DC-SGD-E"].settings, "epochs=0.5"), own_norms),  # before their thresholds differ
    "own norms, unnoticed": Case(EQUAL["DC-SGD-E"].settings, own_norms_unnoticed),
}
OF_THREE = ("DP-SGD", "DC-SGD-E", "DP-FTRL", "empty shares")


# A stage of one's own that breaks process 1 in its third step.
FAULTY = """
import os, signal
from dataclasses import dataclass

from dpbench.filters import Filter


@dataclass
class Faulty(Filter):
    how: str = ""

    def __post_init__(self):
        self._steps = 0

    def apply(self, gradient):
        self._steps += 1
        if self._steps == 3 and os.environ.get("RANK") == "1":
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("broken on purpose")
        return gradient
"""
OPTION = "# Breaks.\ndefaults:\n  - /schema/filter@_here_: faulty.Faulty\n  - _self_\n"
# A sweep of which one run breaks.
SWEPT = ("algo=dcsgd_e", "evaluation.every_steps=1")
COMMAND = (*SMALL, *SWEPT, "-cd", "own", "results_dir=results", "-m", "filter=raise,none")


def write_faulty(folder: Path) -> None:
    """A folder of options, filter=raise and filter=kill."""
    (folder / "filter").mkdir(parents=True)
    (folder / "faulty.py").write_text(FAULTY)
    for how in ("raise", "kill"):
        (folder / "filter" / f"{how}.yaml").write_text(f"{OPTION}how: {how}\n")


def stops_answering(patch: pytest.MonkeyPatch, team: Team) -> None:
    """Process 1 is stopped in its third step, and never goes on."""
    apply, calls = Identity.apply, []

    def stop(self: Identity, gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if team.rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return apply(self, gradient)

    patch.setattr(Identity, "apply", stop)


class Crew(NamedTuple):
    """Processes that train the same cases together, or that are given a command line."""

    size: int
    cases: dict[str, Case] = {}  # noqa: RUF012 - never changed
    command: tuple[str, ...] = ()
    patience: timedelta = timedelta(seconds=60)


CREWS = {
    "one": Crew(1, EQUAL | {"augmented": APART["augmented"]}),
    "two": Crew(2, EQUAL | IN_PARTS | APART | FAILING | MUTANTS),
    "three": Crew(3, {name: EQUAL[name] for name in OF_THREE} | IN_PARTS),
    "stuck": Crew(2, {"stuck": Case((), stops_answering)}, patience=timedelta(seconds=5)),
    "command": Crew(2, command=COMMAND),
}
# One after the other: where there are two cores, ten processes at once only wait for each other.
LOTS = (("two", "stuck"), ("one", "three", "command"))


def work(file: Path, crew: Crew) -> None:
    """Train all cases of a crew in this process, or carry out its command line."""
    if crew.command:
        for stream, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(file.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
        os.chdir(file.parent)
        sys.argv = ["dpbench"]
        torch.save(run.main(crew.command), file)
        return
    with torchrun_team(crew.patience) as team:
        found = {}
        for name, case in crew.cases.items():
            if isinstance(team, TorchTeam):
                if team.leads:
                    team.contact.announce(name)
                elif (order := team.contact.next_instruction()) != name:
                    raise RuntimeError(f"expected {name}, got {order}")
            found[name] = trained_by_this_process(case, team)
        if isinstance(team, TorchTeam) and not team.leads:
            assert team.contact.next_instruction() is None
        torch.save(found, file)


def forked(file: Path, crew: Crew, rank: int, port: int) -> int:
    """Start a process of a crew, in the environment that torchrun would give it; returns its id."""
    child = os.fork()
    if child:
        return child
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": crew.size, "LOCAL_WORLD_SIZE": crew.size}
    os.environ.update({name: str(value) for name, value in own.items()}, MASTER_PORT=str(port))
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="test")
    status = 1
    try:
        work(file, crew)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def free_ports(count: int) -> list[int]:
    """So many that differ, which they do while all are taken."""
    with ExitStack() as taken:
        listening = [taken.enter_context(socket.socket()) for _ in range(count)]
        for each in listening:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in listening]


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    digits()
    # Once for all processes: what is imported where an optimizer steps and an account is asked for.
    importlib.import_module("torch._dynamo")
    epsilon(composed(*SETTINGS).release_plan().scaled(MULTIPLIER), 1e-5, "rdp", eps_scale=8.0)
    write_faulty(folder / "own")
    for case in chain(*(crew.cases.values() for crew in CREWS.values())):
        composed(*SETTINGS, *case.settings)
    ports = dict(zip(CREWS, free_ports(len(CREWS)), strict=True))
    codes = []
    for lot in LOTS:
        children = {
            name: [
                forked(folder / f"{name}-{rank}.pt", CREWS[name], rank, ports[name]) for rank in range(CREWS[name].size)
            ]
            for name in lot
        }
        stopped = [children["stuck"].pop()] if "stuck" in lot else []
        codes += [exit_code(child) for child in chain(*children.values())]
        for child in stopped:
            os.kill(child, signal.SIGKILL)
            exit_code(child)
    return max(codes)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
