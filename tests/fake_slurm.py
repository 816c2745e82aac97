"""As much of SLURM as submitit asks for, on this machine: sbatch, srun, scontrol and sacct, by the name of this file.

A job array runs at once; a job that `scontrol requeue` was called for runs again when it has ended.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scontrol", "sacct")
JOB = 1000


def install(folder: Path) -> None:
    """Make the commands in a folder, which is to be on PATH."""
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
        (folder / name).chmod(0o755)


def sbatch(state: Path, script: str) -> None:
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", Path(script).read_text()).groups())
    (state / "script").write_text(Path(script).read_text())
    job = JOB + len(list(state.glob("job-*")))
    (state / f"job-{job}").touch()
    for task in range(first, last + 1):
        own = {"SLURM_JOB_ID": f"{job + task}", "SLURM_ARRAY_JOB_ID": f"{job}", "SLURM_ARRAY_TASK_ID": f"{task}"}
        command = [sys.executable, sys.argv[0], "work", script, f"{job}_{task}"]
        subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"Submitted batch job {job}")


def work(state: Path, script: str, job: str) -> None:
    line = next(line for line in Path(script).read_text().splitlines() if line.startswith("srun "))
    words = shlex.split(line)
    again, restarts = state / f"again-{job}", 0
    while True:
        own = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": str(restarts)}
        with (state / f"log-{job}").open("a") as log:
            begin = next(place for place, word in enumerate(words) if "python" in word)
            subprocess.run(words[begin:], env={**os.environ, **own}, stdout=log, stderr=log)
        if not again.exists():
            return
        again.unlink()
        restarts += 1


if __name__ == "__main__":
    here = Path(sys.argv[0]).parent
    if sys.argv[1] == "work":
        work(here, *sys.argv[2:])
    elif Path(sys.argv[0]).name == "sbatch":
        sbatch(here, sys.argv[1])
    elif Path(sys.argv[0]).name == "scontrol":
        (here / f"again-{sys.argv[-1]}").touch()
    elif Path(sys.argv[0]).name == "sacct":
        print("JobID|State|NodeList")
