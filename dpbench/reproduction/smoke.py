"""A few steps of one cell of every table and figure: whether the pipeline works, and nothing about the papers.

The runs are configurations of their own, far smaller, with records in a temporary folder: no table can take them for
those of a cell.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

from dpbench.claims import Artefact, Cell, Kind
from dpbench.claims.notation import settings_of
from dpbench.config import Job, RunConfig, compose_each
from dpbench.data import (
    Dataset,
    ImageDataset,
    Prompts,
    Samples,
    Split,
    Splits,
    TableDataset,
    TextDataset,
    TokenSplit,
)
from dpbench.data.subset import Subset, with_validation
from dpbench.errors import UserError
from dpbench.launch.execute import execute
from dpbench.models.language import PretrainedText
from dpbench.reproduction.available import Available
from dpbench.reproduction.facts import Facts, facts_of
from dpbench.reproduction.times import forward_flops
from dpbench.tracking.status import WITH_RESULT
from dpbench.training.job_record import record_of
from dpbench.training.loading import load_splits

STEPS, BATCH = 2, 4
# Samples of the data that are evaluated on, and of made-up data that are trained on.
TESTED, MADE_UP = 8, 64
# Of an image, where no weights ask for more.
PIXELS = 32
# Of a text, in tokens; and of what a model says.
LENGTH, SAID = 32, 4


def smoke(
    artefacts: Sequence[Artefact],
    passed_on: Sequence[str],
    config: RunConfig,
    console: Console,
    config_dirs: Sequence[Path],
) -> bool:
    """Try every artefact, and print a line about each; whether one failed.

    Args:
        artefacts: to be tried.
        passed_on: settings of all runs.
        config: a run with these.
        console: for the lines.
        config_dirs: further folders searched for options.
    """
    console.print(f"{STEPS} steps of {BATCH} samples of one cell of each; none of these runs is a result.")
    available = Available(Path(config.data.root), download=config.data.download)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="dpbench-smoke-") as folder:
        trial = _Trial(Path(folder), passed_on, available, tuple(config_dirs))
        for artefact in artefacts:
            start = time.perf_counter()
            problem, said = trial.of(artefact)
            failed += problem
            seconds = time.perf_counter() - start
            took = f" ({seconds:.0f} s)" if seconds >= 1 else ""
            console.print(f"{artefact.stem}: {said}{took}", style="red" if problem else None)
    console.print(f"{failed} failed." if failed else "None failed.")
    return failed > 0


class _Trial:
    """Runs cells cut down to a few steps."""

    def __init__(
        self, folder: Path, passed_on: Sequence[str], available: Available, config_dirs: tuple[Path, ...]
    ) -> None:
        self._folder = folder
        self._config_dirs = config_dirs
        self._passed_on = [line for line in passed_on if not line.startswith(("tracker", "fuse_seeds"))]
        self._available = available
        self._data: dict[str, Splits] = {}

    def of(self, artefact: Artefact) -> tuple[bool, str]:
        """Try one cell of an artefact: whether that failed, and what there is to say."""
        cells = [cell for cell in artefact.cells if cell.runs]
        if not cells:
            return False, str(artefact.kind) if artefact.kind != Kind.COMPUTED else "computed, not trained; not tried"
        try:
            known = [(cell, facts_of(settings_of(cell.candidates[0]), self._config_dirs)) for cell in cells]
            return self._tried(*min(known, key=self._cost))
        except UserError as error:
            return True, f"failed: {error}"
        except Exception as error:  # of a loader, say; the others are tried all the same
            return True, f"failed: {type(error).__name__}: {' '.join(str(error).split())}"

    def _cost(self, cell: tuple[Cell, Facts]) -> tuple[bool, float]:
        """Cells for which everything is here come first, then those of small models."""
        return self._available.lacks(*cell) is not None, forward_flops(cell[1])

    def _tried(self, cell: Cell, facts: Facts) -> tuple[bool, str]:
        instead = []
        here = self._available.data(facts) is None
        if not here:
            instead.append(f"made-up data, for it needs {self._available.data(facts)}")
        job = self._job(cell, facts, made_up=not here)
        weights = self._available.weights(facts)
        if weights is not None:
            instead.append(f"random weights, for it needs {weights}")
        told = StringIO()
        execute([job], Console(file=told), self._splits(job.config, made_up=not here))
        status, reason, _ = record_of(job).outcome(forced=job.config.force)
        if status not in WITH_RESULT:
            return True, f"failed: {reason or status} ({job.name})"
        return False, "; ".join([f"ran, {cell.place}", *instead])

    def _job(self, cell: Cell, facts: Facts, *, made_up: bool) -> Job:
        """A few steps of a cell, of a smaller model where weights or data are not here and that is easy."""
        aside = facts.dataset.validation_size is not None
        size = MADE_UP - TESTED * aside if made_up else facts.dataset.trained_on
        lines = [
            f"batch_size={BATCH}",
            f"epochs={(STEPS - 0.5) * BATCH / size}",
            "evaluation.every_epochs=null",
            "evaluation.every_steps=null",
            "tracker=disabled",
        ]
        if made_up:
            lines += [f"dataset.train_size={MADE_UP}", f"dataset.test_size={TESTED}"]
            lines += [f"dataset.validation_size={TESTED}"] if aside else []
        if isinstance(facts.dataset, TextDataset):
            lines += [f"dataset.max_length={LENGTH}", "dataset.beams=1", f"dataset.most_tokens={SAID}"]
        if isinstance(facts.dataset, ImageDataset) and made_up and facts.dataset.height > PIXELS:
            lines += [f"dataset.height={PIXELS}", f"dataset.width={PIXELS}"]
        lacks_weights = self._available.weights(facts) is not None
        if (getattr(facts.model, "image_size", None) or 0) > PIXELS and (lacks_weights or facts.weights is None):
            lines.append(f"model.image_size={PIXELS}")
        if lacks_weights:
            lines.append("model.pretrained=null")
            lines += ["model.depth=1"] if isinstance(facts.model, PretrainedText) else []
        (job,) = compose_each([(*cell.candidates[0], *self._passed_on, *lines)], self._config_dirs)
        job.config.results_dir = str(self._folder)
        return job

    def _splits(self, config: RunConfig, *, made_up: bool) -> Splits:
        data = config.dataset
        key = repr(replace(data, suggested=replace(data.suggested, batch_size=0)))
        if key not in self._data:
            self._data.clear()  # one is enough to hold
            self._data[key] = made_up_splits(data) if made_up else self._real(config)
        return self._data[key]

    def _real(self, config: RunConfig) -> Splits:
        data = load_splits(config, torch.device("cpu"))
        others = {name: _first(split, TESTED) for name, split in data.others.items()}
        asked = data.prompts
        if asked is not None:
            asked = Prompts(asked.ids[:BATCH], asked.references[:BATCH], asked.end, asked.decode)
        return Splits(data.train, _first(data.test, TESTED), others, asked)


def made_up_splits(data: Dataset) -> Splits:
    """Random samples of the shape of a data set's."""
    draws = torch.Generator().manual_seed(0)

    def split(size: int) -> Samples:
        labels = torch.randint(data.classes, (size,), generator=draws)
        if isinstance(data, ImageDataset):
            pixels = torch.randint(data.highest + 1, (size, *data.sample_shape), generator=draws, dtype=torch.uint8)
            return Split.of(pixels, labels, highest=data.highest, mean=data.mean, std=data.std)
        if isinstance(data, TableDataset):
            return Split.raw(torch.randn(size, data.features, generator=draws), labels)
        assert isinstance(data, TextDataset)
        ids = torch.randint(data.vocabulary, (size, data.max_length), generator=draws)
        ids = ids.masked_fill(ids == data.padding, (data.padding + 1) % data.vocabulary)
        return TokenSplit.of(
            ids.tolist(),
            labels.tolist() if not data.generates else [1] * size,
            padding=data.padding,
            longest=data.max_length,
            generates=data.generates,
        )

    return with_validation(Splits(split(data.train_size), split(data.test_size)), data.validation_size)


def _first(split: Samples, count: int) -> Samples:
    """The first samples of a split."""
    return Subset(split, torch.arange(min(count, len(split))))
