"""What the runs of a search for hyper-parameters must have in common, that the eps of the search holds."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dpbench.config.compose import Job
from dpbench.errors import UserError


def require_same_releases(jobs: Iterable[Job]) -> None:
    """Raise `UserError` if two runs of a search make other releases, by their plans or by multipliers that are given.

    The eps of a search holds where one curve bounds each of its runs, see `calibrate_search`.

    Args:
        jobs: of any number of searches, and of none: those are one search that have its number of runs, its budget and
            its data set.
    """
    seen: dict[tuple[object, ...], tuple[Job, tuple[object, ...]]] = {}
    for job in jobs:
        config, runs = job.config, job.config.privacy.search_runs
        if runs is None or math.isinf(config.eps):
            continue
        releases = (config.release_plan(), config.privacy.noise_multiplier)
        search = (runs, config.eps, config.delta_value, config.dataset.name)
        first, made = seen.setdefault(search, (job, releases))
        if releases != made:
            typed = [{line.partition("=")[0]: line for line in a.overrides} for a in (first, job)]
            apart = [key for key in typed[0] | typed[1] if typed[0].get(key) != typed[1].get(key)]
            one, other = (" ".join(lines[key] for key in apart if key in lines) for lines in typed)
            raise UserError(
                f"the runs of a search must make the same releases, and {one} and {other} do not; sweep them as "
                "searches of their own",
                field="privacy.search_runs",
                value=runs,
            )
