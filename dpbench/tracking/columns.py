"""A table of many rows with any entries, by column; each distinct value of a column is held once, as JSON."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

# A row has no entry of this name; null is an entry.
ABSENT: Final = object()
_NONE = -1


class Columns:
    """Rows that are added one by one."""

    def __init__(self) -> None:
        self.size = 0
        self._texts: dict[str, dict[str, int]] = {}
        self._codes: dict[str, array[int]] = {}

    @property
    def names(self) -> Iterable[str]:
        """Of the columns."""
        return self._codes.keys()

    def append(self, row: Iterable[tuple[str, str]]) -> None:
        """Add a row, given as names and JSON texts; of a name that comes twice the first counts."""
        place = self.size
        for name, text in row:
            codes = self._codes.get(name)
            if codes is None:
                codes = self._codes[name] = array("i")
                self._texts[name] = {}
            if len(codes) > place:
                continue
            if len(codes) < place:
                codes.extend([_NONE] * (place - len(codes)))
            known = self._texts[name]
            codes.append(known.setdefault(text, len(known)))
        self.size += 1

    def values(self, name: str) -> list[Any]:
        """A column; `ABSENT` where a row has no such entry."""
        codes = self._codes.get(name, array("i"))
        values = [*_decoded(list(self._texts.get(name, ()))), ABSENT]  # the last one is that of code -1
        return [values[code] for code in codes] + [ABSENT] * (self.size - len(codes))

    def table(self) -> pa.Table:
        """All of it as an Arrow table of texts."""
        import pyarrow as pa

        found = {}
        for name, codes in self._codes.items():
            texts = [*self._texts[name], None]
            found[name] = pa.array([texts[code] for code in codes] + [None] * (self.size - len(codes)), pa.string())
        return pa.table(found)


class Kept:
    """Rows in a Parquet file, of which only the columns that are asked for are read.

    Raises:
        OSError: there is no such file.
        ValueError: it is none of ours.
    """

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        names = parquet.read_schema(path, memory_map=True).names
        self._file = parquet.ParquetFile(path, memory_map=True, read_dictionary=names)
        self.names = frozenset(names)
        self.size: int = self._file.metadata.num_rows

    def values(self, name: str) -> list[Any]:
        """A column; `ABSENT` where a row has no such entry."""
        if name not in self.names or not self.size:
            return [ABSENT] * self.size
        column = self._file.read(columns=[name]).column(0)
        found: list[Any] = []
        for chunk in column.chunks:
            values = _decoded(chunk.dictionary.to_pylist())
            found += [ABSENT if code is None else values[code] for code in chunk.indices.to_pylist()]
        return found

    def table(self) -> pa.Table:
        """All of it as an Arrow table of texts."""
        import pyarrow as pa

        found = self._file.read()
        return pa.table({name: found[name].cast(pa.string()) for name in found.column_names})


def as_parquet(parts: Iterable[tuple[pa.Table, Sequence[int]]], replaced: dict[str, list[str]]) -> bytes:
    """A Parquet file of some rows of some tables.

    Args:
        parts: tables, and which of their rows.
        replaced: columns that take the place of those of that name, for all these rows.
    """
    import pyarrow as pa
    from pyarrow import parquet

    chosen = [table.take(pa.array(rows, pa.int64())) for table, rows in parts]
    whole = pa.concat_tables(chosen, promote_options="default").drop_columns(
        [name for name in replaced if any(name in table.column_names for table in chosen)]
    )
    for name, texts in replaced.items():
        whole = whole.append_column(name, pa.array(texts, pa.string()))
    stream = BytesIO()
    parquet.write_table(whole, stream, compression="zstd", row_group_size=max(1, whole.num_rows))
    return stream.getvalue()


def _decoded(texts: list[str]) -> list[Any]:
    """Values of JSON texts, in one go."""
    values: list[Any] = json.loads(f"[{','.join(texts)}]")
    return values
