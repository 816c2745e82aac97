"""How publications set their noise, where that is not a valid account of what they run.

Three rules: the Rényi accountant of Poisson sampling whatever the sampling (DiSK, DP-PMLF, DC-SGD, KalmanDP), and ADP's
calibration theorem, as it is proven and as its main text has it, for batches of any size. They give a noise multiplier
and the eps that a publication would state; what a run spends is always asked of a valid accountant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpbench.privacy.accountants import epsilon
from dpbench.privacy.adp_theorem import AdpTheorem
from dpbench.privacy.calibration import calibrate
from dpbench.privacy.plan import Plan


@dataclass(frozen=True)
class Setting:
    """What a rule is asked about.

    Attributes:
        plan: relative scales as the publication takes them, Poisson sampling.
        size: training samples N.
        batch: batch size B.
        delta: in (0, 1).
    """

    plan: Plan
    size: int
    batch: int
    delta: float


@dataclass(frozen=True)
class Rule:
    """A publication's arithmetic, both ways.

    Attributes:
        multiplier: z for a target eps.
        eps: stated for z.
        unmet: conditions that its proof needs and that are not met at an eps, in words.
    """

    multiplier: Callable[[Setting, float], float]
    eps: Callable[[Setting, float], float]
    unmet: Callable[[Setting, float], tuple[str, ...]] = lambda setting, eps: ()


def _theorem(*, as_in_main_text: bool) -> Rule:
    def of(setting: Setting) -> AdpTheorem:
        factors = [run.release.noise_multiplier for run in setting.plan.runs for _ in range(run.times)]
        return AdpTheorem(tuple(factors), setting.size, setting.batch, setting.delta, as_in_main_text)

    return Rule(
        lambda setting, eps: of(setting).noise_multiplier(eps),
        lambda setting, z: of(setting).spent(z),
        lambda setting, eps: of(setting).unmet(eps),
    )


RULES = {
    "poisson_rdp": Rule(
        lambda setting, eps: calibrate(setting.plan, eps, setting.delta, "rdp").noise_multiplier,
        lambda setting, z: epsilon(setting.plan.scaled(z), setting.delta, "rdp", eps_scale=1.0),
    ),
    "adp_theorem": _theorem(as_in_main_text=False),
    "adp_main_text": _theorem(as_in_main_text=True),
}
