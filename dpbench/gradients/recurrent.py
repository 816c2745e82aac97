"""LSTMs, taken apart: one linear map of all inputs, then a loop over time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.errors import UserError
from dpbench.gradients.parts import bias_parts
from dpbench.gradients.recording import Part, Recording
from dpbench.gradients.uses import Outer, Term
from dpbench.gradients.uses.base import full

States = tuple[Tensor, Tensor]


def lstm(recording: Recording, layer: nn.LSTM, input: Tensor, hx: States | None = None) -> tuple[Tensor, States]:
    """Batch-first LSTM of any depth, in one or both directions.

    All four parameters of a direction see the same gradient, that of the gates before they are squashed.
    """
    if not layer.batch_first or layer.proj_size or not isinstance(input, Tensor) or input.dim() != 3:
        raise UserError("an LSTM needs batch_first=True, no projection, and inputs (B, T, d) that are not packed")
    directions = 2 if layer.bidirectional else 1
    if hx is None:
        zeros = input.new_zeros(layer.num_layers * directions, len(input), layer.hidden_size)
        hx = (zeros, zeros)
    last_h, last_c = [], []
    for depth in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            index = depth * directions + direction
            suffix = f"_l{depth}" + ("_reverse" if direction else "")
            output, h, c = _direction(recording, layer, suffix, input, hx[0][index], hx[1][index])
            outputs.append(output)
            last_h.append(h)
            last_c.append(c)
        input = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
        if depth + 1 < layer.num_layers:
            input = F.dropout(input, layer.dropout, layer.training)
    return input, (torch.stack(last_h), torch.stack(last_c))


def _direction(
    recording: Recording, layer: nn.LSTM, suffix: str, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (B, T, hidden), and the last state, of one layer in one direction."""
    of_input, of_state = getattr(layer, f"weight_ih{suffix}"), getattr(layer, f"weight_hh{suffix}")
    biases = [getattr(layer, f"bias_{kind}{suffix}") for kind in ("ih", "hh")] if layer.bias else []
    first = h.detach()
    reverse = suffix.endswith("reverse")
    if reverse:
        x = x.flip(1)
    kept, states = x.detach(), [first]

    def of_inputs(b: Tensor) -> Term:
        return Term(recording.tokens(kept), recording.tokens(b))

    def of_states(b: Tensor) -> Term:
        return Term(recording.tokens(torch.stack(states[:-1], dim=1)), recording.tokens(b))

    parts = [
        Part((of_input,), Outer((tuple(of_input.shape),)), of_inputs),
        Part((of_state,), Outer((tuple(of_state.shape),)), of_states),
    ]
    for bias in biases:
        parts += bias_parts(recording, bias, full)
    total_bias = biases[0] + biases[1] if biases else None
    gates = recording.watch(F.linear(x, of_input, total_bias), kept, parts)
    outputs = []
    for now in gates.unbind(1):
        i, f, g, o = (now + F.linear(h, of_state)).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
        states.append(h.detach())
    output = torch.stack(outputs, dim=1)
    return (output.flip(1) if reverse else output), h, c
