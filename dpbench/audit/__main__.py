"""python -m dpbench.audit: lower bounds on what a run reveals, beside what it claims."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dpbench.cli.starting import starting
from dpbench.garbage import uncollected

with starting(), uncollected():
    from rich.progress import Progress

    from dpbench.audit.attacks import audit
    from dpbench.audit.page import print_audit
    from dpbench.audit.result import Audit, Finding
    from dpbench.audit.settings import AuditSettings, audit_hash, compose
    from dpbench.cli.command import OverridesParser, run_command
    from dpbench.config import Job, config_hash, resolved
    from dpbench.config.own import own_errors_placed
    from dpbench.console import make_console
    from dpbench.devices import choose_device, prepare_device
    from dpbench.errors import UserError
    from dpbench.files import jsonable, require_writable, write_atomically
    from dpbench.tracking.provenance import provenance

CONSISTENT, VIOLATED, FAILED = 0, 1, 3

HELP = """\
python -m dpbench.audit [GROUP=OPTION | SETTING=VALUE] ... [-cd FOLDER]

Attacks the real private step of a run with inserted canaries, and gives lower bounds on eps beside the eps it claims.
The attacker sees every private gradient g_t, but not what is released beside it, and knows all samples but the canary.

  python -m dpbench.audit algo=disk eps=8
  python -m dpbench.audit algo=dpsgd eps=1 audit.runs=20000

ATTACKS
  one step, full batch       the step on the run's own model and data, and on a model of canaries made for it,
                             many times with and without one canary; nothing is sampled
  one step, batches sampled  the same with batches from the sampler
  one run                    many canaries, each in by a fair coin (Steinke, Nasr & Jagielski 2023)

Groups and settings are those of python -m dpbench.run --help; noise is calibrated anew for what each attack runs.
Samples are not augmented. SETTINGS of the audit itself, with their defaults:

{settings}

The result is printed and kept as <results_dir>/audits/<hash>/audit.json; the page of dpbench.reproduce has it beside
the runs of the same configuration.
Exit codes: 0 consistent with the claim, 1 violates the claim, 2 bad input, 3 the audit failed, 130 interrupted.
"""
PURPOSE = {
    "runs": "of the step with the canary and as many without, per attack; a smaller eps needs more",
    "canaries": "of the attack in one run",
    "steps": "of the attack in one run",
    "confidence": "with which all lower bounds hold together",
}

console = make_console()
errors = make_console(stderr=True)


def main(typed: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    return run_command(_main, typed, lambda _: help_text(), "interrupted; nothing is kept")


def _main(typed: list[str]) -> int:
    options, folders = OverridesParser().parse(typed)
    job, settings = compose(options.overrides, folders)
    try:
        with own_errors_placed(job.config):
            return _audit(job, settings)
    except UserError:
        raise
    except Exception:  # 1 would say that it violates the claim
        errors.print(traceback.format_exc(), style="red")
        return FAILED


def help_text() -> str:
    """Usage and settings."""
    defaults = asdict(AuditSettings())
    typed = {name: f"audit.{name}={value}" for name, value in defaults.items()}
    return HELP.format(settings="\n".join(f"  {typed[name]:<22} {PURPOSE[name]}" for name in defaults))


def _audit(job: Job, settings: AuditSettings) -> int:
    config = job.config
    require_writable(Path(config.results_dir))
    device = choose_device(config.device)
    prepare_device(device)
    folder = Path(config.results_dir) / "audits" / audit_hash(config, settings)
    console.print(f"Auditing {job.name}", style="bold")
    if config.uncertified is not None:
        console.print(
            f"NOT CERTIFIED: {config.uncertified}. No proof covers the claimed eps, whatever these attacks show.",
            style="yellow",
        )

    def say(finding: Finding) -> None:
        console.print(f"  {finding.attack}, {finding.attacked}: done")

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("runs of this attack")
        found = audit(config, settings, device, say, lambda done, total: bar.update(task, completed=done, total=total))
    console.print()
    print_audit(found, console)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "audit.json", _as_json(found, job, settings, provenance(device)))
    console.print(f"kept in {folder / 'audit.json'}")
    return VIOLATED if found.violated else CONSISTENT


def _as_json(found: Audit, job: Job, settings: AuditSettings, origin: dict[str, object]) -> str:
    content = {
        **found.as_dict(),
        "run": config_hash(job.config),
        "settings": asdict(settings),
        "overrides": list(job.overrides),
        "uncertified": job.config.uncertified,
        "config": {**resolved(job.config), "choices": job.choices},
        "provenance": origin,
    }
    return json.dumps(jsonable(content), indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main())
