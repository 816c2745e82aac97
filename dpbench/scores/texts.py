"""BLEU, ROUGE-L, METEOR, NIST and CIDEr of generated texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from dpbench.scores.cider import cider


class _NoSynonyms:
    """Stands for WordNet where its data are not here."""

    def synsets(self, word: str) -> list[Any]:
        return []


def text_scores(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Scores by name; BLEU and ROUGE-L in percent, the larger the better.

    BLEU is sacrebleu's; ROUGE-L the F-measure of the best reference by rouge-score; METEOR and NIST are NLTK's and
    CIDEr is CIDEr-D, all three on lower-case words as sacrebleu's 13a splits them. METEOR needs the data of WordNet
    (``python -m nltk.downloader wordnet``); without them it matches words and stems but no synonyms, and is called
    meteor_without_synonyms. None of this is the tool of the E2E challenge, whose METEOR and splitting differ.

    Args:
        hypotheses: texts.
        references: of each, one or more.
    """
    from nltk.translate.meteor_score import meteor_score
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    most = max(map(len, references))
    streams: Any = [[written[k] if k < len(written) else None for written in references] for k in range(most)]
    rouge = RougeScorer(["rougeL"], use_stemmer=False)
    split: Callable[[str], str] = Tokenizer13a()  # type: ignore[no-untyped-call]
    said = [split(text.lower()).split() for text in hypotheses]
    wanted = [[split(text.lower()).split() for text in written] for written in references]
    synonyms = wordnet()
    meteor = "meteor" if synonyms is not None else "meteor_without_synonyms"
    pairs = list(zip(hypotheses, references, strict=True))
    return {
        "bleu": BLEU().corpus_score(list(hypotheses), streams).score,
        "rouge_l": 100 * fmean(rouge.score_multi(written, text)["rougeL"].fmeasure for text, written in pairs),
        meteor: fmean(meteor_score(w, h, wordnet=synonyms or _NoSynonyms()) for h, w in zip(said, wanted, strict=True)),
        "nist": _nist(said, wanted),
        "cider": cider(said, wanted),
    }


def _nist(said: list[list[str]], wanted: list[list[list[str]]]) -> float:
    from nltk.translate.nist_score import corpus_nist

    try:
        return float(corpus_nist(wanted, said))
    except ZeroDivisionError:  # where no text has five words, or none at all is said
        return 0.0


def wordnet() -> Any:
    """NLTK's WordNet; None where its data are not here."""
    from nltk.corpus import wordnet as found

    try:
        found.ensure_loaded()
    except LookupError:
        return None
    return found
