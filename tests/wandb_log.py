"""Reading what W&B wrote offline, without its private modules."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as proto

MAGIC = b":W&B"
FILE_HEADER, BLOCK = 7, 32 * 1024
CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def messages(path: Path) -> Iterator[proto.Record]:
    """The records of a .wandb file: a LevelDB log, whose chunks lie within blocks; a long record takes several."""
    data = path.read_bytes()
    assert data.startswith(MAGIC), path
    position, record = FILE_HEADER, b""
    while position + CHUNK_HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < CHUNK_HEADER.size:  # too little for a chunk: padding
            position += left
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(data, position)
        position += CHUNK_HEADER.size
        record = data[position : position + length] if kind in (FULL, FIRST) else record + data[position:][:length]
        position += length
        if kind in (FULL, LAST):
            yield proto.Record.FromString(record)


class OfflineRun:
    """One W&B run.

    Attributes:
        folder: where it lies.
        run: id, project, group, job type, name and tags.
        config: its configuration.
        metrics: defined metrics by name.
        history: what was logged, a dictionary a step.
        summary: its last values, nested keys joined by slashes; of a metric summed up by its last value, that one.
        exit_code: None where the run was never finished.
    """

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        self.run = proto.RunRecord()
        self.config: dict[str, Any] = {}
        self.metrics: dict[str, proto.MetricRecord] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        for message in messages(path):
            kind = message.WhichOneof("record_type")
            if kind == "run":
                self.run = message.run
                self.config.update(_plain(message.run.config.update))
            elif kind == "config":
                self.config.update(_plain(message.config.update))
            elif kind == "metric":
                self.metrics[message.metric.name] = message.metric
            elif kind == "history":
                self.history.append(_plain(message.history.item))
            elif kind == "summary":
                self.summary.update(_last(_plain(message.summary.update)))
            elif kind == "exit":
                self.exit_code = message.exit.exit_code

    def table(self, key: str) -> list[dict[str, Any]]:
        """The rows of a logged table."""
        (step,) = [step for step in self.history if f"{key}/path" in step]
        table = json.loads((self.folder / "files" / step[f"{key}/path"]).read_text())
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def _plain(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _last(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value["last"] if isinstance(value, dict) else value for key, value in values.items()}


def offline_runs(results: Path) -> list[OfflineRun]:
    """Every W&B run below a results folder, in the order in which they began."""
    found = [OfflineRun(path) for path in results.glob("wandb/offline-run-*/run-*.wandb")]
    return sorted(found, key=lambda each: each.run.start_time.ToNanoseconds())
