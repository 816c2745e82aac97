"""The command line."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.engines import ENGINES
from benchmarks.machine import slug
from benchmarks.measure import measure
from benchmarks.models import SPECS
from benchmarks.process import ALLOCATORS
from benchmarks.timing import FEWEST_ROUNDS, Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments ask for and write the report; the exit code."""
    options = _parser().parse_args(arguments)
    settings = Settings(
        device=options.device,
        threads=options.threads,
        rounds=FEWEST_ROUNDS if options.quick else options.rounds,
        seconds=options.seconds,
        allocator=options.allocator,
        small=options.quick,
        steps=options.steps,
    )
    results = measure(options.models, options.engines, settings, memory=options.memory, show=_show)
    complete = set(options.models) == set(SPECS) and set(options.engines) == set(ENGINES)
    complete = complete and options.memory and options.steps
    for path in report.write(results, options.output, slug(settings, partial=not complete)):
        print("Wrote", path)
    return 0


def _show(result: dict[str, Any]) -> None:
    """Print the times of one model."""
    print(result["title"], flush=True)
    if "failed" in result:
        print(f"  fails: {result['failed']}", flush=True)
        return
    for kind in ("engines", "steps"):
        for name, entry in result[kind].items():
            print(f"  {name:18}", _outcome(entry), flush=True)


def _outcome(entry: dict[str, Any]) -> str:
    if "failed" in entry:
        return f"fails: {entry['failed']}"
    words = [f"{1000 * entry['median_seconds']:9.1f} ms"]
    if entry["ratio"] is not None:
        words.append(f"{entry['ratio']:6.2f}x")
    if "error" in entry:
        words.append(f"error {entry['error']:.0e}")
    return "  ".join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time and memory of one private gradient: dpbench beside other libraries.",
    )
    for what, names in (("models", list(SPECS)), ("engines", list(ENGINES))):
        parser.add_argument(
            f"--{what}", type=_subset(names), default=names, metavar="A,B", help=f"some of {', '.join(names)}"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    output = Path("results/benchmarks")
    default = "(default: %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help=f"where to compute {default}")
    parser.add_argument("--threads", type=_positive, default=cores, metavar="N", help=f"of torch {default}")
    parser.add_argument(
        "--rounds", type=_positive, default=Settings.rounds, metavar="N", help=f"most rounds of a model {default}"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=Settings.seconds,
        metavar="S",
        help=f"for rounds of a model beyond the first {FEWEST_ROUNDS} {default}",
    )
    parser.add_argument(
        "--allocator",
        choices=ALLOCATORS,
        default="tuned" if platform.libc_ver()[0] == "glibc" else "default",
        help="tuned: glibc keeps freed memory while timing, for every engine, as it does in a run of dpbench",
    )
    parser.add_argument("--quick", action="store_true", help="small models, few rounds: tries everything")
    parser.add_argument("--no-steps", dest="steps", action="store_false", help="leave out whole steps")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out memory")
    parser.add_argument("--output", type=Path, default=output, metavar="DIR", help=f"for the report {default}")
    return parser


class _subset:
    """Parses a comma-separated choice of names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in self._names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(self._names)}")
        return chosen


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
