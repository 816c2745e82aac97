"""All attacks of an audit, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dpbench.audit.many_runs import attack_step
from dpbench.audit.one_run import attack_run, one_run
from dpbench.audit.result import Audit, Finding
from dpbench.audit.settings import AuditSettings, audited
from dpbench.audit.targets import canary_target, model_target
from dpbench.config import RunConfig
from dpbench.training.budget import budget


def audit(
    config: RunConfig,
    settings: AuditSettings,
    device: torch.device,
    on_finding: Callable[[Finding], None],
    on_run: Callable[[int, int], object] = lambda done, total: None,
) -> Audit:
    """Attack a run in every way, with the risk of a wrong bound shared equally.

    Args:
        config: the run.
        settings: how hard to try.
        device: where.
        on_finding: called as soon as an attack is over.
        on_run: told how many runs of the attack under way are done, of how many.

    Raises:
        UserError: before the first attack: data that are not there, or noise that can't be calibrated.
    """
    for attacked in (*_one_step(config), one_run(config, settings)):
        budget(attacked)  # cached
    findings = []
    risk = (1 - settings.confidence) / (2 + len(_one_step(config)))
    for finding in _findings(config, settings, device, risk, on_run):
        on_finding(finding)
        findings.append(finding)
    return Audit(settings.confidence, tuple(findings))


def _one_step(config: RunConfig) -> list[RunConfig]:
    """The run with one step on all samples, and on batches that are drawn unless its noise is correlated."""
    full = audited(config, steps=1, batch_size=config.dataset.trained_on)
    if config.noise.correlation is not None:
        return [full]
    return [full, audited(config, steps=1, batch_size=config.batch_size)]


def _findings(
    config: RunConfig,
    settings: AuditSettings,
    device: torch.device,
    risk: float,
    on_run: Callable[[int, int], object],
) -> Iterator[Finding]:
    # The first one reads data, which may be missing.
    yield attack_step(model_target(config, device, config.dataset.trained_on), settings.runs, risk, on_run)
    for attacked in _one_step(config):
        yield attack_step(canary_target(config, device, attacked.batch_size), settings.runs, risk, on_run)
    yield attack_run(config, settings, device, risk)
