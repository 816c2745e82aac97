"""A table of runs as CSV or Parquet: a row for each, with all settings by their dotted names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from dpbench.errors import UserError, require
from dpbench.files import write_atomically
from dpbench.spreadsheet import as_text, csv_of
from dpbench.tracking.columns import ABSENT
from dpbench.tracking.index import OWN, PROVENANCE, SUMMARY, Index
from dpbench.tracking.shapes import NOT_FINITE, is_number

FORMATS = (".csv", ".parquet")


def require_format(to: str) -> Path:
    """The file to be written.

    Raises:
        UserError: it ends in none of `FORMATS`, or its folder is not there.
    """
    path = Path(to).expanduser()
    require(path.suffix in FORMATS, "to", to or "''", f"a file that ends in {' or '.join(FORMATS)}, or wandb")
    require(path.parent.is_dir(), "to", to, f"a file in a folder that exists; {path.parent} does not")
    return path


def export(index: Index, places: Sequence[int], path: Path) -> None:
    """Write the records at these places of the index."""
    found = {name: [index.column(name)[place] for place in places] for name in names_of(index)}
    content = _as_csv(found) if path.suffix == ".csv" else _as_parquet(found)
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"can't be written ({error.strerror})", field="to", value=path) from error


def names_of(index: Index) -> list[str]:
    """The columns in their order: which run, how it stands, settings, summary, provenance."""
    own = [name for name in OWN if name in index.names]
    others = [sorted(name for name in index.names if name.startswith(start)) for start in (SUMMARY, PROVENANCE)]
    return [*own, *index.settings, *others[0], *others[1]]


def _as_csv(columns: dict[str, list[Any]]) -> str:
    return csv_of([columns, *zip(*(map(_text, values) for values in columns.values()), strict=True)])


def _text(value: Any) -> str:
    """A cell of a CSV file: empty for nothing, as JSON what is no text."""
    if value is ABSENT or value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _as_parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    stream = BytesIO()
    parquet.write_table(pa.table({name: _typed(values) for name, values in columns.items()}), stream)
    return stream.getvalue()


def _typed(values: list[Any]) -> Any:
    """A column of the narrowest type that holds all of its values: whole numbers, numbers, true and false, texts."""
    import pyarrow as pa

    present = [value for value in values if value is not ABSENT and value is not None]
    kinds = {type(value) for value in present}
    plain = [None if value is ABSENT else value for value in values]
    if present and kinds <= {bool}:
        return pa.array(plain, pa.bool_())
    if present and kinds <= {int} and all(-(2**63) <= value < 2**63 for value in present):
        return pa.array(plain, pa.int64())
    # Words for numbers that JSON has none for are numbers here, in a column that has others.
    if kinds & {int, float} and all(is_number(value) for value in present):
        return pa.array([None if value is None else float(value) for value in plain], pa.float64())
    if present and kinds == {str} and set(present) <= set(NOT_FINITE):
        return pa.array([None if value is None else float(value) for value in plain], pa.float64())
    return pa.array([None if value is None else as_text(_text(value)) for value in plain], pa.string())
