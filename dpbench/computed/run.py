"""Computing what is asked for and not up to date."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dpbench.claims import Artefact
from dpbench.claims.computed_file import path_of, write_computed
from dpbench.computed.catalogue import COMPUTED
from dpbench.computed.fingerprint import fingerprint
from dpbench.files import read_json
from dpbench.tracking.provenance import provenance


def compute_all(results_dir: Path, artefacts: Sequence[Artefact], say: Callable[[str], None]) -> None:
    """Compute those of the artefacts that are computed, wholly or in part, into <results_dir>/computed.

    A file is left as it is if nothing that its numbers depend on has changed since.

    Args:
        results_dir: folder of the records.
        artefacts: any of conf/paper; those that are only trained are passed over.
        say: gets a line for each computed artefact.
    """
    for artefact in artefacts:
        compute = COMPUTED.get((artefact.paper, artefact.name))
        if compute is None:
            continue
        name, path = artefact.stem, path_of(results_dir, artefact.paper, artefact.name)
        made_of = fingerprint(artefact, compute.__module__)
        if read_json(path).get("provenance", {}).get("fingerprint") == made_of:
            say(f"{name}: up to date")
            continue
        start = time.perf_counter()
        computed = compute(artefact)
        seconds = time.perf_counter() - start
        origin = {**provenance(torch.device("cpu")), "seconds": round(seconds, 3), "fingerprint": made_of}
        write_computed(path, computed, origin)
        say(f"{name}: {len(computed.values)} numbers, {len(computed.panels)} panels, {seconds:.1f} s")
