"""Many made-up records on disk, of a few configurations that differ in numbers; their hashes are made up, too."""

import json
import os
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

SOME_ALGORITHMS = ("dpsgd", "disk", "doppler", "dp_pmlf", "adp")
STATUSES = ("failed", "diverged", "interrupted", "invalid", "running")
# Such a part of the records is not finished.
UNFINISHED = 0.02
# One file may have so many names.
LINKS = 20_000
OLD = 3600.0  # seconds since the records were made, so that their times say that they are as they were


def make(results: Path, template: Path, count: int, seeds: int = 1) -> None:
    """Records like that of a real run.

    Args:
        results: folder that gets them.
        template: folder of the record of a finished run.
        count: of records.
        seeds: so many of them share a hash.
    """
    chance = random.Random(0)
    files = {path.name: path.read_text() for path in template.iterdir() if path.suffix in (".json", ".jsonl", ".yaml")}
    summary, origin = json.loads(files["summary.json"]), json.loads(files["provenance.json"])
    began = datetime.now(UTC) - timedelta(days=30)
    for number in range(count):
        if number % seeds == 0:
            digest, algorithm = f"{chance.getrandbits(48):012x}", chance.choice(SOME_ALGORITHMS)
            eps, rate = chance.choice([0.5, 1.0, 2.0, 4.0, 8.0]), chance.choice([0.1, 0.25, 0.5, 1.0, 2.0])
        if number % LINKS == 0:  # what all records have alike
            shared = {name: results / f"shared-{number}-{name}" for name in ("metrics.jsonl", "ledger.json")}
            results.mkdir(parents=True, exist_ok=True)
            for name, path in shared.items():
                path.write_text(files[name])
        seed = number % seeds
        folder = results / "runs" / digest / str(seed)
        folder.mkdir(parents=True)
        status = chance.choice(STATUSES) if chance.random() < UNFINISHED else "finished"
        accuracy = 0.5 + 0.4 * chance.random() if status == "finished" else None
        (folder / "status.json").write_text(json.dumps({"status": status}))
        config = files["config.yaml"].replace("\neps: 8.0", f"\neps: {eps}").replace("eps: 8.0\n", f"eps: {eps}\n", 1)
        config = config.replace("seed: 0\n", f"seed: {seed}\n", 1).replace("\n  lr: 2.0\n", f"\n  lr: {rate}\n", 1)
        config = config.replace("\nalgo:\n  name: dpsgd", f"\nalgo:\n  name: {algorithm}")
        (folder / "config.yaml").write_text(config.replace("choices:\n  algo: dpsgd", f"choices:\n  algo: {algorithm}"))
        scores = {"final": accuracy, "best": accuracy, "best_step": 3}
        content = {**summary, "test_accuracy": scores, "eps": eps * 0.99, "target_eps": eps, "seed": seed}
        (folder / "summary.json").write_text(json.dumps(content))
        started = (began + timedelta(seconds=20 * number)).isoformat(timespec="seconds")
        (folder / "provenance.json").write_text(json.dumps({**origin, "started": started}))
        for name, path in shared.items():
            os.link(path, folder / name)
    made = datetime.now().timestamp() - OLD
    for number, folder in enumerate([*(results / "runs").glob("*/*"), *(results / "runs").glob("*")]):
        os.utime(folder, (made - number, made - number))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
