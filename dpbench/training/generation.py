"""Texts that a language model continues from prompts, by beam search."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dpbench.data import Prompts
from dpbench.models import NextToken


@torch.no_grad()
def continuations(model: NextToken, prompts: Prompts, *, beams: int, most_tokens: int, batch: int) -> list[str]:
    """What the model says after each prompt, until it ends the text; it is left in training mode.

    Of a prompt that leaves no room for the longest continuation the model is told the end.

    Args:
        model: of the next token.
        prompts: of any lengths.
        beams: hypotheses that are followed; 1 is greedy.
        most_tokens: longest continuation.
        batch: prompts at once.
    """
    model.eval()
    device = next(model.parameters()).device
    said = [""] * len(prompts.ids)
    positions = model.net.config.max_position_embeddings
    most_tokens = min(most_tokens, positions - 1)
    told = [ids[-(positions - most_tokens) :] for ids in prompts.ids]
    for where in _of_similar_length(told, batch):
        chosen = [told[i] for i in where]
        longest = max(map(len, chosen))
        # Filled up on the left, so that all go on from the last column.
        ids = torch.tensor([[prompts.end] * (longest - len(one)) + one for one in chosen], device=device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in chosen], device=device)
        out = model.net.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=most_tokens,
            num_beams=beams,
            do_sample=False,
            eos_token_id=prompts.end,
            pad_token_id=prompts.end,
        )
        for i, new in zip(where, out[:, longest:].tolist(), strict=True):
            end = new.index(prompts.end) if prompts.end in new else len(new)
            said[i] = prompts.decode(new[:end]).strip()
    model.train()
    return said


def _of_similar_length(ids: list[list[int]], size: int) -> Iterator[list[int]]:
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    return (order[start : start + size] for start in range(0, len(order), size))
