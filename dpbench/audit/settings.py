"""The settings of an audit, and the run that it attacks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpbench.config import Job, RunConfig, compose_jobs, identity
from dpbench.config.messages import explain
from dpbench.config.privacy import Privacy
from dpbench.config.schema import MOST_STEPS, EvaluationTimes
from dpbench.data import Augmentation
from dpbench.errors import UserError, require
from dpbench.privacy.sampling import CYCLIC, POISSON

PREFIX = "audit."


@dataclass
class AuditSettings:
    """How hard an audit tries; typed as audit.runs=3000.

    Attributes:
        runs: of the step with the canary, and as many without, on which each attack by many runs is judged.
        canaries: of the attack in one run.
        steps: of the attack in one run; its noise is calibrated for so many.
        confidence: with which all lower bounds hold together.
    """

    runs: int = 1000
    canaries: int = 2000
    steps: int = 50
    confidence: float = 0.95

    def __post_init__(self) -> None:
        require(self.runs >= 10, "audit.runs", self.runs, "a whole number >= 10")
        require(4 <= self.canaries <= 2**20, "audit.canaries", self.canaries, f"a whole number from 4 to {2**20}")
        require(0 < self.steps <= MOST_STEPS, "audit.steps", self.steps, f"a whole number > 0, at most {MOST_STEPS}")
        require(0 < self.confidence < 1, "audit.confidence", self.confidence, "a number in (0, 1)")


def compose(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> tuple[Job, AuditSettings]:
    """The run and the settings of a command line.

    Raises:
        UserError: the first thing that is wrong, in one sentence.
    """
    for line in overrides:
        if line.startswith("seeds="):
            raise UserError(f"{line}: an audit has one seed; set seed")
    own = [line for line in overrides if line.startswith(PREFIX)]
    settings = _settings([line.removeprefix(PREFIX) for line in own])
    jobs = compose_jobs([line for line in overrides if line not in own], multirun=True, config_dirs=config_dirs)
    if len(jobs) > 1:
        raise UserError(f"{jobs[0].name}, {jobs[1].name}, ...: several runs; an audit is of one")
    job = jobs[0]
    if job.config.plan:  # typed so that nothing runs
        raise UserError("plan=true: an audit prints no plan, it would run; leave it out")
    given = job.config.privacy.noise_multiplier
    allowed = "null, for the attacked runs are shorter than the run and each is calibrated to its eps"
    require(given is None, "privacy.noise_multiplier", given, allowed)
    published = job.config.privacy.published
    allowed = "null, as privacy=poisson has it: an audit attacks noise that is calibrated to eps, not by a rule"
    require(published is None, "privacy.published", published, allowed)
    if math.isinf(job.config.eps):
        raise UserError("promises nothing that an audit could refute", field="eps", value=job.config.eps)
    return job, settings


def _settings(lines: Sequence[str]) -> AuditSettings:
    known = ", ".join(asdict(AuditSettings()))
    for line in lines:
        key, sign, value = line.partition("=")
        if not sign:
            raise UserError(f"{PREFIX}{line}: expected key=value")
        if key not in asdict(AuditSettings()):
            raise UserError(f"no such setting; audit has {known}", field=PREFIX + key, value=value)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(AuditSettings), OmegaConf.from_dotlist(list(lines)))
        return cast(AuditSettings, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        said = explain(error)
        raise UserError(
            said.message, field=None if said.field is None else PREFIX + said.field, value=said.value
        ) from error


def audited(config: RunConfig, *, steps: int, batch_size: int) -> RunConfig:
    """The run with `steps` steps on batches of this expected size, and noise calibrated for them.

    Samples are not augmented, so that the attacker knows what a canary becomes. Batches are Poisson samples whatever
    the run's, since that is what the attacks' claims are about: what they try is the step, the sampler only if it is
    Poisson's. Noise that is correlated between steps has no claim for Poisson samples, and takes the same batches in
    every pass. The account is the run's where that is one for these batches, and noise and batches are of its kind.
    """
    sampler = POISSON if config.noise.correlation is None else CYCLIC
    privacy = Privacy(sampler=sampler.name, secure_noise=config.privacy.secure_noise)
    if config.privacy.accountant in privacy.scheme.accountants:
        privacy = replace(privacy, accountant=config.privacy.accountant)
    size = config.dataset.trained_on
    of_a_pass = math.ceil(size / batch_size) if privacy.scheme.passes else size / batch_size
    return replace(
        config,
        batch_size=batch_size,
        epochs=steps / of_a_pass,
        augmentation=Augmentation(),
        evaluation=EvaluationTimes(every_epochs=None),
        privacy=privacy,
    )


def audit_hash(config: RunConfig, settings: AuditSettings) -> str:
    """12 hexadecimal digits that name an audit."""
    content = {"run": identity(config), "seed": config.seed, "audit": asdict(settings)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
