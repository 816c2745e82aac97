"""All attacks of an audit, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dpbench.audit.many_runs import attack_step
from dpbench.audit.one_run import attack_run
from dpbench.audit.result import Audit, Finding
from dpbench.audit.settings import AuditSettings, audited
from dpbench.audit.targets import canary_target, model_target
from dpbench.config import RunConfig
from dpbench.training.budget import budget

ATTACKS = 4


def audit(
    config: RunConfig, settings: AuditSettings, device: torch.device, on_finding: Callable[[Finding], None]
) -> Audit:
    """Attack a run in every way, with the risk of a wrong bound shared equally.

    Args:
        config: the run.
        settings: how hard to try.
        device: where.
        on_finding: called as soon as an attack is over.

    Raises:
        UserError: before the first attack: data that are not there, or noise that can't be calibrated.
    """
    everyone = config.dataset.train_size
    for steps, batch_size in ((1, everyone), (1, config.batch_size), (settings.steps, config.batch_size)):
        budget(audited(config, steps=steps, batch_size=batch_size))  # cached
    findings = []
    for finding in _findings(config, settings, device, (1 - settings.confidence) / ATTACKS):
        on_finding(finding)
        findings.append(finding)
    return Audit(settings.confidence, tuple(findings))


def _findings(config: RunConfig, settings: AuditSettings, device: torch.device, risk: float) -> Iterator[Finding]:
    everyone = config.dataset.train_size
    # The first one reads data, which may be missing.
    yield attack_step(model_target(config, device, everyone), settings.runs, risk)
    yield attack_step(canary_target(config, device, everyone), settings.runs, risk)
    yield attack_step(canary_target(config, device, config.batch_size), settings.runs, risk)
    yield attack_run(config, settings, device, risk)
