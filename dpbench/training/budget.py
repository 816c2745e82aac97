"""The noise multiplier of a run, within its budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpbench.config.schema import RunConfig
from dpbench.errors import UserError
from dpbench.privacy import Calibration, Ledger, calibrate, calibrated, epsilon
from dpbench.privacy.accountants import LARGEST_MULTIPLIER, least_epsilon
from dpbench.privacy.guarantee import promises_little, statement, tail_of
from dpbench.privacy.published import RULES, Setting
from dpbench.privacy.search import calibrate_search, calibrated_search, search_cost, search_of
from dpbench.wording import number_of


class OverspentError(UserError):
    """A configured multiplier would spend more than eps."""


@dataclass(frozen=True)
class Budget:
    """What a run may spend.

    Attributes:
        noise_multiplier: z.
        eps: of all planned releases, by a valid accountant.
        published_eps: what the publication's rule states instead; None where no such rule is in use.
        unmet: conditions that the rule's proof needs and that the run does not meet, in words.
        search: expected number of runs and eps of the search that the run is one of; None where it is of none.
        seconds: that calibration took; 0 when it was read from the cache or given.
    """

    noise_multiplier: float
    eps: float
    published_eps: float | None = None
    unmet: tuple[str, ...] = ()
    search: tuple[float, float] | None = None
    seconds: float = 0.0


def budget(config: RunConfig) -> Budget:
    """The calibrated multiplier, or the configured one if it stays within eps.

    Raises:
        OverspentError: the configured multiplier would.
        UserError: no multiplier can reach eps, or the noise of a step is beyond float32.
    """
    if math.isinf(config.eps):
        return Budget(0.0, math.inf)
    found = _budget(config)
    noisiest = found.noise_multiplier * max(run.release.noise_multiplier for run in config.release_plan().runs)
    if noisiest > LARGEST_MULTIPLIER:
        given = config.privacy.noise_multiplier
        raise UserError(
            f"gives a step a noise multiplier of {noisiest:.4g}; expected at most {LARGEST_MULTIPLIER:g}, beyond which "
            "float32 keeps nothing of the gradient",
            field="eps" if given is None else "privacy.noise_multiplier",
            value=config.eps if given is None else given,
        )
    return found


def _budget(config: RunConfig) -> Budget:
    settings = config.privacy
    given = settings.noise_multiplier
    if settings.published is not None:
        return _published(config, settings.published)
    if settings.search_runs is not None:
        return _searched(config, settings.search_runs, given)
    plan = config.release_plan()
    if given is None:
        found = calibrate(plan, config.eps, config.delta_value, settings.valid_accountant)
        return Budget(found.noise_multiplier, found.eps, seconds=found.seconds)
    # Far beyond the budget a bound is enough to refuse, where the exact eps could take minutes.
    least = least_epsilon(plan.scaled(given), config.delta_value)
    if least > 10 * config.eps + 10:
        _require_within(config, given, least, "in one of its steps")
    spent = _spent(config, given)
    _require_within(config, given, spent, f"over {number_of(config.steps, 'step')}")
    return Budget(given, spent)


def is_known(config: RunConfig) -> bool:
    """Whether `budget` takes a moment: the multiplier is given, is a publication's, or was found before."""
    settings = config.privacy
    if math.isinf(config.eps) or settings.published is not None or settings.noise_multiplier is not None:
        return True
    plan, eps, delta = config.release_plan(), config.eps, config.delta_value
    if settings.search_runs is not None:
        return calibrated_search(plan, eps, delta, search_of(settings.search_runs)) is not None
    return calibrated(plan, eps, delta, settings.valid_accountant) is not None


def affords(config: RunConfig, multiplier: float) -> bool:
    """Whether a run with this multiplier stays within eps."""
    try:
        budget(replace(config, privacy=replace(config.privacy, noise_multiplier=multiplier)))
    except UserError:
        return False
    return True


def search_eps(config: RunConfig, found: Budget, multiplier: float) -> float | None:
    """What the search that a run is charged for spends; None for a run of none.

    Args:
        config: the run.
        found: its budget.
        multiplier: that it has: a run that goes on keeps the one that it began with.
    """
    if found.search is None:
        return None
    runs, spent = found.search
    if multiplier == found.noise_multiplier:
        return spent
    return search_cost(config.release_plan().scaled(multiplier), config.delta_value, search_of(runs))


def _require_within(config: RunConfig, given: float, spent: float, where: str) -> None:
    if spent > config.eps:
        raise OverspentError(
            f"spends eps={spent:.4g} {where}, more than eps={config.eps:g}; leave it null to calibrate it",
            field="privacy.noise_multiplier",
            value=given,
        )


def _searched(config: RunConfig, expected_runs: float, given: float | None) -> Budget:
    """Of one run of a search: eps is what the search may spend, of which the run itself spends less."""
    plan, search, delta = config.release_plan(), search_of(expected_runs), config.delta_value
    if given is None:
        found = calibrate_search(plan, config.eps, delta, search)
    else:
        found = Calibration(given, search_cost(plan.scaled(given), delta, search), 0.0)
        _require_within(config, given, found.eps, f"in a search with {expected_runs:g} runs expected")
    multiplier = found.noise_multiplier
    return Budget(multiplier, _spent(config, multiplier), search=(expected_runs, found.eps), seconds=found.seconds)


def _published(config: RunConfig, name: str) -> Budget:
    rule = RULES[name]
    setting = Setting(config.published_plan(), config.dataset.trained_on, config.batch_size, config.delta_value)
    multiplier = config.privacy.noise_multiplier or rule.multiplier(setting, config.eps)
    stated = rule.eps(setting, multiplier)
    if config.privacy.noise_multiplier is not None:
        _require_within(config, multiplier, stated, f"by the publication's rule, {name}")
    return Budget(multiplier, _spent(config, multiplier), published_eps=stated, unmet=rule.unmet(setting, stated))


def _spent(config: RunConfig, multiplier: float) -> float:
    plan = config.release_plan().scaled(multiplier)
    return epsilon(plan, config.delta_value, config.privacy.valid_accountant, eps_scale=config.eps)


def guarantee_of(config: RunConfig, found: Budget) -> str:
    """What the run promises within its budget, in words."""
    return statement(
        config.release_plan().scaled(found.noise_multiplier),
        eps=found.eps,
        delta=config.delta_value,
        accountant=config.privacy.valid_accountant,
        size=config.dataset.trained_on,
        aside=config.dataset.validation_size or 0,
        secure=config.privacy.secure_noise,
        published=found.published_eps,
        unmet=found.unmet,
        search=found.search,
        uncertified=config.uncertified,
    )


def open_ledger(config: RunConfig, multiplier: float, published_eps: float | None = None) -> Ledger:
    """An empty ledger for the run's plan at this multiplier."""
    plan = config.release_plan().scaled(multiplier)
    accountant = config.privacy.valid_accountant
    return Ledger(plan, eps=config.eps, delta=config.delta_value, accountant=accountant, published_eps=published_eps)


def noise_in_words(config: RunConfig, found: Budget) -> str:
    """One line: what noise the run adds and why."""
    if math.isinf(config.eps):
        bounded = math.isfinite(config.clip.sensitivity(1.0))
        return f"eps=inf: not private; no noise, clipping {'on' if bounded else 'off'}"
    if config.privacy.noise_multiplier is None:
        eps, how = f"for eps={config.eps:g}", f", {found.seconds:.1f} s" if found.seconds else ""
    else:
        spent = found.eps if found.search is None else found.search[1]
        eps, how = f"as given, eps={spent:.4g} of eps={config.eps:g}", ""
    warning = "" if config.uncertified is None else f"NOT CERTIFIED: {config.uncertified}, eps does not hold; "
    runs = config.privacy.search_runs
    of_search = "" if runs is None else f" of a search with {runs:g} runs expected, {found.eps:.4g} of this one"
    size = config.dataset.trained_on
    little = f" (above 1/{size}, which promises little)" if promises_little(config.delta_value, size) else ""
    taken = f"noise multiplier {found.noise_multiplier:.4f}{_scaled(config)}"
    over = f"over {number_of(config.steps, 'step')}"
    delta = f"delta={config.delta_value:.3g}{little}"
    differs = difference_in_words(config, found)
    if differs is None:
        rate = f"at sampling rate {config.sampling_rate:.4g}"
        line = f"{warning}{taken} {eps}{of_search}, {delta} {over} {rate} ({_accounting(config)}{how})"
    else:
        line = f"{warning}{taken} {over}: {differs}, {delta}"
    if config.privacy.secure_noise:
        return line
    tail = tail_of(config.release_plan().scaled(found.noise_multiplier), found.eps, config.delta_value)
    return line if tail is None else f"{line}; {tail}"


def difference_in_words(config: RunConfig, found: Budget) -> str | None:
    """The eps that a publication's rule states and the one that is spent; None where no such rule is in use."""
    if found.published_eps is None:
        return None
    stated = f"eps={found.published_eps:.4g} as published ({config.privacy.published})"
    return f"accounting differs, {stated}, eps={found.eps:.4g} by what is run ({_accounting(config)})"


def _accounting(config: RunConfig) -> str:
    return f"{config.privacy.sampler}, {config.privacy.valid_accountant}"


def _scaled(config: RunConfig) -> str:
    """By what the noise of single steps differs from the multiplier, if it does."""
    scales = [run.release.noise_multiplier for run in config.release_plan().runs]
    least, most = min(scales), max(scales)
    return "" if least == most == 1 else f" (times {least:.4g} to {most:.4g} over the steps)"
