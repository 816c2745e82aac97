"""How near generated texts come to those that people wrote."""

from dpbench.scores.texts import text_scores, wordnet

__all__ = ["text_scores", "wordnet"]
