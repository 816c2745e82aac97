"""Samples of tokens, on the device, and batches of them with little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A target that is none: padding, and what a language model is told rather than asked.
IGNORED = -100
# Batches are as long as their longest sample, rounded up to a multiple of this, so that few shapes occur.
ROUNDED_TO = 8


@dataclass
class TokenSplit:
    """One split of a text data set, its samples one after the other.

    Inputs are ids (B, T), filled up with the padding id, from which a model derives its attention mask. Targets are the
    labels (B,); or, for language models, the next token at each position (B, T), `IGNORED` where it is none to predict.

    Attributes:
        tokens: int32, of all samples, shape (M,).
        starts: int64, where each sample begins, and M, shape (N + 1,).
        labels: int64, shape (N,): classes; for language models, how many tokens at the start are told.
        padding: id.
        longest: most tokens of an input.
        generates: whether targets are next tokens.
    """

    tokens: Tensor
    starts: Tensor
    labels: Tensor
    padding: int
    longest: int
    generates: bool = False

    @classmethod
    def of(
        cls, samples: Sequence[Sequence[int]], labels: Sequence[int], *, padding: int, longest: int, generates: bool
    ) -> TokenSplit:
        """A split of lists of ids."""
        starts = torch.tensor([0, *map(len, samples)]).cumsum(0)
        # There is a token to look up even if all samples are empty.
        tokens = torch.tensor([token for sample in samples for token in sample] or [padding], dtype=torch.int32)
        return cls(tokens, starts, torch.tensor(labels), padding, longest, generates)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.labels)

    def to(self, device: torch.device) -> TokenSplit:
        """The split on a device."""
        tokens, starts, labels = (t.to(device) for t in (self.tokens, self.starts, self.labels))
        return TokenSplit(tokens, starts, labels, self.padding, self.longest, self.generates)

    def lengths(self, indices: Tensor | slice) -> Tensor:
        """Tokens of these samples."""
        return self.starts[1:][indices] - self.starts[:-1][indices]

    def take(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these indices, on the device."""
        return self._padded(indices, int(self.lengths(indices).max()))

    def _padded(self, indices: Tensor | slice, most: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of samples of at most so many tokens."""
        lengths, starts, labels = self.lengths(indices), self.starts[:-1][indices], self.labels[indices]
        # Empty texts, of a tokenizer without marks, are padding alone.
        rounded = -(-max(most, 1) // ROUNDED_TO) * ROUNDED_TO
        # A language model never reads the last token, which it has nothing to say about.
        columns = torch.arange(min(rounded, self.longest + self.generates), device=self.tokens.device)
        ids = self.tokens[(starts.unsqueeze(1) + columns).clamp(max=len(self.tokens) - 1)].long()
        ids.masked_fill_(columns >= lengths.unsqueeze(1), self.padding)
        if not self.generates:
            return ids, labels
        asked = (columns >= labels.unsqueeze(1)) & (columns < lengths.unsqueeze(1))
        return ids[:, :-1].contiguous(), ids.masked_fill(~asked, IGNORED)[:, 1:].contiguous()

    def batches(self, indices: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of these indices, at most `size` at a time, each with those that are as long as it is."""
        lengths, order = self.lengths(indices).sort(stable=True)
        # The last one of each is its longest; those of all are read at once, for a GPU is waited for.
        longest = lengths[[*range(size - 1, len(lengths), size), -1]].tolist() if len(lengths) else []
        return map(self._padded, indices[order].split(size), longest)

    def everything(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples, at most `size` at a time, the short ones first."""
        return self.batches(torch.arange(len(self), device=self.labels.device), size)
