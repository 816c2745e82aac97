"""A guarantee in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dpbench.privacy.plan import Plan
from dpbench.privacy.sampling import Scheme
from dpbench.privacy.tail import COORDINATES, END, moved_by, probability_beyond, tail_in_words

ACCOUNTS = {
    "pld": "privacy loss distributions (numerical, rounded upwards)",
    "rdp": "Rényi divergences (an upper bound)",
    "gdp": "the exact trade-off of a Gaussian mechanism",
}

UNCOUNTED = (
    "other runs on the same data, training losses and norms of gradients in the record, the mean and deviation that "
    "images are normalised by, the size of the data set, the weights that training begins with and a tokenizer, and "
    "floating-point effects of the noise."
)
SEEDED = (
    "Whoever has or guesses the seed, which the record holds, can draw noise and batches again and take the noise off."
)
NOT_COUNTED = f"Not counted: the choice of hyper-parameters on the same data, {UNCOUNTED}"


def promise(
    scheme: Scheme,
    *,
    steps: int,
    beside: Iterable[str],
    correlated: bool,
    eps: float,
    delta: float,
    accountant: str,
    size: int,
    aside: int,
) -> str:
    """Who is protected, against what, and how it was accounted for.

    Args:
        scheme: how batches are drawn.
        steps: releases.
        beside: names of what is released beside each sum.
        correlated: whether noise is correlated between steps.
        eps: spent by all of them.
        delta: of the guarantee.
        accountant: that found eps.
        size: training samples N.
        aside: samples that are evaluated on, not trained on, and not protected.
    """
    if math.isinf(eps):
        return "No guarantee: the run adds no noise, or too little to bound anything."
    parts = sorted(set(beside))
    also = f" Beside each sum, {' and '.join(parts)} of the same batch is released, and counted." if parts else ""
    together = (
        " Noise is correlated between steps; all steps are accounted for as one release of a matrix mechanism."
        if correlated
        else ""
    )
    weak = (
        f" A delta above 1/{size} promises little: releasing one sample outright would satisfy it."
        if promises_little(delta, size)
        else ""
    )
    others = f" The {aside} samples set aside for validation are not protected." if aside else ""
    seen = "after its only step" if steps == 1 else f"at every one of its {steps} steps"
    return (
        f"The run is ({eps:.4g}, {delta:.3g})-differentially private towards anyone who sees the model {seen}. It "
        f"protects each of the {size} training samples by itself (neighbouring data sets: {scheme.neighbouring})."
        f"{others} Batches: {scheme.words}. Accounted for by {ACCOUNTS[accountant]}."
        f"{also}{together}{weak}"
    )


def promises_little(delta: float, size: int) -> bool:
    """Whether delta is above 1/N; that itself is common, and may be a little more in floating point."""
    return delta * size > 1 + 1e-9


def circumstances(search: tuple[float, float] | None, published: float | None, unmet: Sequence[str] = ()) -> str:
    """What else it means that the run is of a search, or that a publication's rule says what it spends.

    Args:
        search: see `statement`.
        published: see `statement`.
        unmet: see `statement`.

    Returns:
        Sentences that follow a promise, a space before them; nothing where it is neither.
    """
    if search is not None:
        return f" {_of_search(*search)}"
    if published is None:
        return ""
    conditions = f" Nor are all conditions met that the proof of that rule needs: {'; '.join(unmet)}." if unmet else ""
    return (
        f" Accounting differs: by the publication's rule the run would spend eps={published:.4g}, which is "
        f"none that holds unless the rule covers how the batches are drawn and how much noise is added.{conditions}"
    )


def _of_search(runs: float, eps: float) -> str:
    return (
        f"As the best of a random search, of a number of runs drawn from the logarithmic distribution of mean {runs:g} "
        "and each with settings drawn anew among those that leave the releases as they are, its publication as a whole "
        f"spends eps={eps:.4g} at the same delta; a grid of as many settings that is gone through spends more, and so "
        "may a number drawn in another way, or runs among them with other batches, steps or noise."
    )


def statement(
    plan: Plan,
    *,
    eps: float,
    delta: float,
    accountant: str,
    size: int,
    aside: int,
    secure: bool,
    published: float | None,
    unmet: Sequence[str] = (),
    search: tuple[float, float] | None = None,
    uncertified: str | None = None,
) -> str:
    """A paragraph: who is protected, against what, how it was accounted for, and what is not counted.

    Args:
        plan: releases with their final multipliers.
        eps: spent by all of them.
        delta: of the guarantee.
        accountant: that found eps.
        size: training samples N.
        aside: see `promise`.
        secure: whether noise and batches come from keys that nobody has, not from a seed.
        published: eps that a publication's rule states for the same run; None without one.
        unmet: conditions that the rule's proof needs and that the run does not meet, in words.
        search: expected number of runs and eps of the search that it is the best of; None where it is of none.
        uncertified: what no proof covers; None for nothing.
    """
    if uncertified is not None:
        return f"No guarantee: {uncertified}, which no proof covers. The noisy sums alone would spend eps={eps:.4g}."
    promised = promise(
        plan.scheme,
        steps=len(plan),
        beside=(part.name for run in plan.runs for part in run.release.beside),
        correlated=plan.correlation is not None,
        eps=eps,
        delta=delta,
        accountant=accountant,
        size=size,
        aside=aside,
    )
    if math.isinf(eps):
        return promised
    more = circumstances(search, published, unmet)
    told = f"{promised} {NOT_COUNTED}{more}" if search is None else f"{promised}{more} Not counted: {UNCOUNTED}"
    return told if secure else f"{told} {SEEDED}{sentence(tail_of(plan, eps, delta))}"


def tail_of(plan: Plan, eps: float, delta: float) -> str | None:
    """What noise from a seed lacks, where that matters, as a clause; see tail.py.

    Args:
        plan: releases with their final multipliers.
        eps: spent by all of them.
        delta: of the guarantee.
    """
    releases = (
        (run.times, run.release.sampling_rate, multiplier)
        for run in plan.runs
        for multiplier in (run.release.noise_multiplier, *(part.noise_multiplier for part in run.release.beside))
    )
    correlated = eps if plan.correlation is not None else None
    return tail_in_words(shown(plan.scheme, releases, correlated=correlated, delta=delta), delta)


def shown(
    scheme: Scheme, releases: Iterable[tuple[int, float, float]], *, correlated: float | None, delta: float
) -> float:
    """Probability, at most, that a sample shows for sure by where noise from a seed ends.

    Args:
        scheme: how batches are drawn.
        releases: of such as are alike their count, sampling rate and noise multiplier, 0 without noise.
        correlated: eps, where noise is correlated between steps, which makes all of them one release; else None.
        delta: of the guarantee.
    """
    counted = list(releases)
    if correlated is not None:
        steps = sum(count for count, _, _ in counted)
        return probability_beyond(END, [(1, 1.0, moved_by(correlated, delta))], coordinates=COORDINATES * steps)
    return probability_beyond(
        END, [(count, rate, scheme.sensitivity / z if z else math.inf) for count, rate, z in counted]
    )


def sentence(clause: str | None) -> str:
    """A clause as a sentence, a space before it; nothing where there is none."""
    return "" if clause is None else f" {clause[0].upper()}{clause[1:]}."
