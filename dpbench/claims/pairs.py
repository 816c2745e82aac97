"""Which cells a claim compares with one another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from dpbench.claims.schema import Artefact, Cell, Order, Selection, Trend
from dpbench.errors import UserError


def sources(artefact: Artefact, cell: Cell) -> tuple[Cell, ...]:
    """The cells that have the runs behind a cell: itself, or the two that it is the difference of."""
    if cell.minus is None:
        return (cell,)
    axis, first, second = cell.minus
    found = [_sibling(artefact, cell, {axis: label}) for label in (first, second)]
    return tuple(part for part in found if part is not None)


def pairs_of(artefact: Artefact, order: Order) -> Iterator[tuple[Cell, Cell]]:
    """Cells that an order compares, the one said to be above first; they differ on the axes of the order alone.

    A quoted cell without a number has nothing to compare with.
    """
    for above in artefact.select({**order.at, **order.higher}):
        for labels in itertools.product(*order.lower.values()):
            below = _sibling(artefact, above, dict(zip(order.lower, labels, strict=True)))
            if below is not None and below.at != above.at and _comparable(above) and _comparable(below):
                yield above, below


def distinct_pairs(artefact: Artefact, order: Order) -> Iterator[tuple[Cell, Cell]]:
    """The pairs of an order without those whose numbers come from the same runs as an earlier one's.

    Of a distance to stay within, the two of a pair may be exchanged.
    """
    seen = set()
    for above, below in pairs_of(artefact, order):
        both = _origin(above), _origin(below)
        pair = both if order.within is None else frozenset(both)
        if pair not in seen:
            seen.add(pair)
            yield above, below


def changes_of(artefact: Artefact, trend: Trend) -> Iterator[tuple[tuple[Cell, int], ...]]:
    """The cells, with their signs, that make up each change along the axis of a trend."""
    of: Selection = {} if trend.of is None else {trend.of[0]: (trend.of[1],)}
    for start in artefact.select({**trend.at, trend.along: (trend.ends[0],), **of}):
        terms = [(_sibling(artefact, start, {trend.along: trend.ends[1]}), 1), (start, -1)]
        if trend.of is not None:
            other = {trend.of[0]: trend.of[2]}
            terms += [(_sibling(artefact, cell, other) if cell is not None else None, -sign) for cell, sign in terms]
        found = tuple((cell, sign) for cell, sign in terms if cell is not None)
        if len(found) == len(terms):
            yield found


def check_claims(artefact: Artefact) -> None:
    """Raise `UserError` for a claim about cells that the artefact does not have."""
    for cell in artefact.cells:
        if cell.minus is not None and len(sources(artefact, cell)) < 2:
            raise UserError("expected both cells that it is the difference of", field="where", value=cell.place)
    for index, claim in enumerate(artefact.claims):
        where = f"claims[{index}]"
        match claim:
            case Order():
                pairs = sum(1 for _ in distinct_pairs(artefact, claim))
                if claim.pairs is not None and 0 < pairs < claim.pairs:
                    allowed = f"expected a number of pairs among the {pairs} compared"
                    raise UserError(allowed, field=f"{where}.pairs", value=claim.pairs)
                compared = pairs > 0
            case Trend():
                compared = any(changes_of(artefact, claim))
            case _:
                continue
        if not compared:
            raise UserError("expected a claim about cells that are there", field=where, value=claim.says)


def _origin(cell: Cell) -> object:
    """What decides the number of a cell; equal for cells of the same runs."""
    return (cell.candidates, cell.metric, cell.statistic) if cell.runs else cell.place


def _comparable(cell: Cell) -> bool:
    return cell.quoted is None or cell.printed is not None


def _sibling(artefact: Artefact, cell: Cell, labels: Mapping[str, str]) -> Cell | None:
    """The cell with some labels exchanged; None where the artefact has none there."""
    at = {**cell.at, **labels}
    return next((one for one in artefact.cells if one.at == at), None)
