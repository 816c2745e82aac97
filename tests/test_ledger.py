"""Ledgers: what they refuse, how they go on, and what they write."""

import math

import pytest
from accounting_references import BESIDE, equal_plan

from dpbench.errors import UserError
from dpbench.privacy import BudgetError, Ledger, Part, Plan, Release, epsilon
from dpbench.privacy.correlation import BandedSquareRoot, Tree
from dpbench.privacy.sampling import CYCLIC, FIXED_SIZE, SHUFFLED
from dpbench.tracking.reading import releases_in

DELTA = 1e-5
pytestmark = pytest.mark.usefixtures("quiet_accountants")


def ledger_of(plan, accountant="rdp"):
    return Ledger(plan, eps=1.0, delta=DELTA, accountant=accountant)


@pytest.mark.parametrize("accountant", ["gdp", "PLD", "unheard of"])
def test_a_ledger_by_an_accountant_without_a_bound_for_the_batches_is_refused(accountant):
    with pytest.raises(ValueError, match=f"{accountant} gives no bound for poisson sampling; take pld or rdp"):
        ledger_of(equal_plan(0.1, 2.0, 4), accountant)


@pytest.mark.parametrize(
    ("delta", "accountant"), [(0.0, "rdp"), (2.0, "rdp"), (math.nan, "pld"), (0.0, "pld"), (1e-12, "pld")]
)
def test_a_ledger_at_a_delta_that_is_none_is_refused(delta, accountant):
    """Also at one that the floating point of the accountant can't tell from none."""
    with pytest.raises(UserError, match=r"delta=.*expected"):
        Ledger(equal_plan(0.1, 2.0, 4), eps=1.0, delta=delta, accountant=accountant)


def test_a_plan_scaled_after_its_ledger_was_opened_is_refused():
    opened = ledger_of(equal_plan(0.1, 2.0, 4))
    with pytest.raises(BudgetError, match="refused"):
        opened.record(equal_plan(0.1, 2.0, 4).scaled(0.5).runs[0].release)
    opened.record(Release(0.1, 2.0))
    opened.plan = opened.plan.scaled(2.0)
    with pytest.raises(BudgetError, match="planned"):
        opened.record(Release(0.1, 2.0))
    assert not opened.complete()


def test_a_release_recorded_twice_leaves_none_for_the_end():
    opened = ledger_of(equal_plan(0.1, 2.0, 4))
    for _ in range(2):
        opened.record(Release(0.1, 2.0))
        opened.record(Release(0.1, 2.0))
    with pytest.raises(BudgetError, match="all 4 planned releases are spent"):
        opened.record(Release(0.1, 2.0))


def test_a_ledger_resumed_from_an_empty_state_never_is_complete():
    first = ledger_of(equal_plan(0.1, 2.0, 4))
    before = []
    for _ in range(2):
        before.append(first.state_dict())
        first.record(Release(0.1, 2.0))
    empty, _ = before
    for state in before:
        with pytest.raises(BudgetError, match="2 releases were made"):
            first.load_state_dict(state)
    assert len(first) == 2

    resumed = ledger_of(equal_plan(0.1, 2.0, 4))
    resumed.load_state_dict(empty)
    for _ in range(2):  # what is left of the run
        resumed.record(Release(0.1, 2.0))
    assert not resumed.complete()


@pytest.mark.parametrize(
    "other",
    [
        Ledger(equal_plan(0.1, 2.0, 5), eps=1.0, delta=DELTA, accountant="rdp"),
        Ledger(equal_plan(0.1, 2.0, 4), eps=1.0, delta=1e-6, accountant="rdp"),
        Ledger(equal_plan(0.1, 2.0, 4, FIXED_SIZE), eps=1.0, delta=DELTA, accountant="rdp"),
        Ledger(equal_plan(0.1, 2.0, 4, SHUFFLED), eps=1.0, delta=DELTA, accountant="rdp"),
    ],
    ids=["length", "delta", "fixed size", "passes"],
)
def test_a_ledger_of_another_plan_is_not_continued(other):
    other.record(Release(0.1, 2.0))
    with pytest.raises(BudgetError, match="another plan"):
        ledger_of(equal_plan(0.1, 2.0, 4)).load_state_dict(other.state_dict())


@pytest.mark.parametrize("other", [(3, Tree()), (4, BandedSquareRoot(bands=2)), (4, None)], ids=str)
def test_a_ledger_of_passes_is_continued_by_one_of_the_same_passes_and_noise(other):
    first, second = (ledger_of(Plan.of([Release(0.25, 2.0)] * 8, CYCLIC, *how), "gdp") for how in ((4, Tree()), other))
    first.record(Release(0.25, 2.0))
    with pytest.raises(BudgetError, match="another plan"):
        second.load_state_dict(first.state_dict())


def test_a_ledger_continues_in_the_middle_of_different_releases_beside_parts():
    plan = Plan.of([Release(0.1, 2.0 + t // 2, BESIDE) for t in range(7)])
    first, resumed = ledger_of(plan), ledger_of(plan)
    releases = [run.release for run in plan.runs for _ in range(run.times)]
    for release in releases[:3]:
        first.record(release)
    resumed.load_state_dict(first.state_dict())
    assert resumed.epsilon() == pytest.approx(first.epsilon(), rel=1e-12)
    for release in releases[3:]:
        first.record(release)
        resumed.record(release)
    assert resumed.complete()
    assert resumed.state_dict() == first.state_dict()
    assert resumed.epsilon() == epsilon(plan, DELTA, "rdp", eps_scale=1.0)


def test_a_ledger_writes_every_release_in_its_order_and_a_changing_noise_as_one_entry():
    multipliers = [4.0, 3.5, 3.5, 3.0, 2.5, 2.0, 2.0, 2.0]
    releases = [Release(0.1 if t < 7 else 0.2, z, BESIDE if t < 2 else ()) for t, z in enumerate(multipliers)]
    opened = ledger_of(Plan.of(releases))
    for release in releases:
        opened.record(release)
    entries = opened.state_dict()["releases"]
    written = [
        Release(entry["sampling_rate"], multiplier, tuple(Part(**part) for part in entry["beside"]))
        for entry in entries
        for multiplier in entry["noise_multipliers"]
        for _ in range(entry["count"])
    ]
    assert written == releases
    assert releases_in(entries) == 8
    falling = [Release(0.1, 4.0 - 0.01 * t) for t in range(300)]
    opened = ledger_of(Plan.of(falling))
    for release in falling:
        opened.record(release)
    assert len(opened.state_dict()["releases"]) == 1


@pytest.mark.parametrize("planned", [(), (Part("histogram of norms", 5.0),)], ids=["none", "histogram"])
@pytest.mark.parametrize(
    "beside",
    [
        (),
        (Part("histogram of norms", 4.0),),
        (Part("histogram of norms", 5.0), Part("share of unclipped samples", 5.0)),
    ],
    ids=["none", "noise", "two"],
)
def test_what_is_released_beside_a_sum_has_to_be_planned_too(planned, beside):
    """The sum alone being as planned is not enough: eps would be that of fewer releases than are made."""
    opened = Ledger(Plan.of([Release(0.1, 2.0, planned)] * 3), eps=1.0, delta=1e-5, accountant="rdp")
    opened.record(Release(0.1, 2.0, planned))
    if beside != planned:
        with pytest.raises(BudgetError, match=r"planned .* refused"):
            opened.record(Release(0.1, 2.0, beside))
        assert len(opened) == 1
    opened.record(Release(0.1, 2.0, planned))
    assert len(opened) == 2
