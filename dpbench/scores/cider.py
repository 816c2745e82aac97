"""CIDEr-D (Vedantam et al. 2015), on words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Words = Sequence[str]
Vector = dict[tuple[str, ...], float]

ORDERS = (1, 2, 3, 4)
# Standard deviation of the penalty for another length, in words; and the customary factor.
SIGMA, FACTOR = 6.0, 10.0


def cider(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> float:
    """Mean over the hypotheses of ten times their clipped cosine with their references, in TF-IDF of n-grams, n = 1..4.

    The frequency of an n-gram is the number of hypotheses with a reference that has it.

    Args:
        hypotheses: texts.
        references: of each, one or more.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    for written in references:
        seen.update({gram for words in written for gram in _grams(words)})
    everyone = math.log(len(references))

    def vector(words: Words) -> list[Vector]:
        weights: list[Vector] = [{} for _ in ORDERS]
        for gram, count in _grams(words).items():
            weights[len(gram) - 1][gram] = count * (everyone - math.log(max(1, seen[gram])))
        return weights

    total = 0.0
    for hypothesis, written in zip(hypotheses, references, strict=True):
        said = vector(hypothesis)
        for reference in written:
            wanted = vector(reference)
            penalty = math.exp(-((len(hypothesis) - len(reference)) ** 2) / (2 * SIGMA**2))
            near = sum(_cosine(a, b) for a, b in zip(said, wanted, strict=True)) / len(ORDERS)
            total += FACTOR * penalty * near / len(written)
    return total / len(hypotheses)


def _grams(words: Words) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for n in ORDERS for i in range(len(words) - n + 1))


def _cosine(said: Vector, wanted: Vector) -> float:
    """The cosine, what is said too often counted as often as it is wanted."""
    product = sum(min(weight, wanted.get(gram, 0.0)) * wanted.get(gram, 0.0) for gram, weight in said.items())
    norms = math.sqrt(sum(w * w for w in said.values()) * sum(w * w for w in wanted.values()))
    return product / norms if norms else 0.0
