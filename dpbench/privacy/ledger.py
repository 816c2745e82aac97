"""The ledger: every release of a run, recorded as it happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from dpbench.privacy.accountants import Account, epsilon
from dpbench.privacy.plan import Part, Plan, Release, Repeat

# Two accounts of the same releases differ by no more.
ROUNDING = 1e-6


class BudgetError(RuntimeError):
    """A release that the plan does not contain was asked for."""


def exceeds(spent: float, target: float) -> bool:
    """Whether an eps is more than its target, and not by rounding alone."""
    return spent > target * (1 + ROUNDING)


class Ledger:
    """Records releases against a plan and says what they have cost.

    A release is refused, before it is made, unless it is exactly the next one of the plan; so what is spent never
    exceeds what was calibrated for. A plan that was not calibrated is not held to `eps`: ask `epsilon` what it spends.

    Attributes:
        plan: the releases that the run was calibrated for.
        delta: failure probability of the guarantee.
        accountant: name of the accountant.
        eps: target; also sets how finely PLD rounds.
        published_eps: what a publication's rule states for the whole plan, where that rule set the noise.

    Raises:
        UserError: delta is none, or too small for the accountant.
        ValueError: the accountant gives no valid bound for the plan's scheme.
    """

    def __init__(
        self, plan: Plan, *, eps: float, delta: float, accountant: str, published_eps: float | None = None
    ) -> None:
        self.plan = plan
        self.eps = eps
        self.delta = delta
        self.accountant = accountant
        self.published_eps = published_eps
        self._runs: list[Repeat] = []
        self._account = Account(plan, delta, accountant, eps_scale=eps)
        self._spent: tuple[int, float] = (0, 0.0)

    def __len__(self) -> int:
        """Number of releases made."""
        return sum(run.times for run in self._runs)

    def record(self, release: Release) -> None:
        """Enter a release; call it before the result is used.

        Raises:
            BudgetError: it is not the next release of the plan. Nothing is recorded.
        """
        run, position = self._next()
        if run is None:
            raise BudgetError(f"all {len(self.plan)} planned releases are spent; refused {release}")
        if release != run.release:
            raise BudgetError(f"planned {run.release}, refused {release}")
        if position == 0:
            self._runs.append(Repeat(release, 1))
        else:
            self._runs[-1] = Repeat(release, position + 1)

    def _next(self) -> tuple[Repeat | None, int]:
        """The run of the plan that the next release belongs to, and how many of it are made."""
        if not self._runs:
            return (self.plan.runs[0] if self.plan.runs else None), 0
        current = len(self._runs) - 1
        if self._runs[-1].times < self.plan.runs[current].times:
            return self.plan.runs[current], self._runs[-1].times
        return (self.plan.runs[current + 1] if current + 1 < len(self.plan.runs) else None), 0

    @property
    def made(self) -> Plan:
        """The releases made so far."""
        return self.plan.prefix(len(self))

    def reaching(self, made: float) -> Ledger:
        """This ledger, or if it has fewer, one of the first `made` releases of the plan; of all if that has fewer."""
        if made <= len(self):
            return self
        further = Ledger(
            self.plan,
            eps=self.eps,
            delta=self.delta,
            accountant=self.accountant,
            published_eps=self.published_eps,
        )
        further._runs = list(self.plan.prefix(int(min(made, len(self.plan)))).runs)
        return further

    def complete(self) -> bool:
        """Whether the releases made are exactly those planned."""
        return tuple(self._runs) == self.plan.runs

    def epsilon(self) -> float:
        """Eps of all releases made so far, at the ledger's delta."""
        if self._spent[0] != len(self):
            if self.complete():
                value = epsilon(self.plan, self.delta, self.accountant, eps_scale=self.eps)
            else:
                value = self._account.epsilon(len(self))
            self._spent = (len(self), value)
        return self._spent[1]

    def state_dict(self) -> dict[str, Any]:
        """The ledger as plain values, also what ledger.json holds.

        Each entry of "releases" stands for "count" releases at each of its "noise_multipliers", one after the other.
        """
        scheme, correlation = self.plan.scheme, self.plan.correlation
        return {
            "neighbouring": scheme.neighbouring,
            "sampler": scheme.name,
            "epoch": self.plan.epoch or None,
            "mechanism": "gaussian",
            "correlation": repr(correlation) if correlation is not None else None,
            "accountant": self.accountant,
            "discretisation": self._account.interval,
            "target_eps": self.eps,
            "published_eps": self.published_eps,
            "delta": self.delta,
            "planned": len(self.plan),
            "releases": [_entry(list(alike)) for _, alike in groupby(self._runs, _but_for_noise)],
        }

    def load_state_dict(self, state: dict[str, Any], asked: Sequence[int] = ()) -> None:
        """Continue a ledger of the same plan.

        Args:
            state: that `state_dict` returned.
            asked: numbers of releases after which eps was asked for, so that it will be the same to the last bit.

        Raises:
            BudgetError: the state is of another plan, or knows of fewer releases than were made here: those can't be
                taken back. The ledger stays as it is.
        """
        ours = self.state_dict()
        if any(state[key] != ours[key] for key in ("sampler", "epoch", "correlation", "delta", "planned")):
            raise BudgetError("the ledger to continue is of another plan")
        runs = [run for entry in state["releases"] for run in _runs(entry)]
        if tuple(runs) != self.plan.prefix(sum(run.times for run in runs)).runs:
            raise BudgetError("the recorded releases are not the first ones of this plan")
        if sum(run.times for run in runs) < len(self):
            raise BudgetError(f"{len(self)} releases were made, more than the ledger to continue holds")
        self._runs = runs
        for made in asked:
            self._account.advance(made)


def _but_for_noise(run: Repeat) -> tuple[float, tuple[Part, ...], int]:
    return run.release.sampling_rate, run.release.beside, run.times


def _entry(alike: Sequence[Repeat]) -> dict[str, Any]:
    """Runs that differ in their noise alone, as plain values: of a noise that changes at each step, one entry."""
    rate, beside, times = _but_for_noise(alike[0])
    return {
        "sampling_rate": rate,
        "noise_multipliers": [run.release.noise_multiplier for run in alike],
        "beside": [part._asdict() for part in beside],
        "count": times,
    }


def _runs(entry: Mapping[str, Any]) -> Iterator[Repeat]:
    beside = tuple(Part(**part) for part in entry["beside"])
    for multiplier in entry["noise_multipliers"]:
        yield Repeat(Release(entry["sampling_rate"], multiplier, beside), entry["count"])
