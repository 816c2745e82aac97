"""The rules by which claims are judged, on records made up for the purpose."""

import json
import math
import re
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from made_up_evidence import ABOVE, BELOW, digest, search
from scipy.integrate import quad
from scipy.stats import ttest_ind
from specifications import PAPERS

from dpbench.claims import Artefact, Cell, Evidence, Finding, Lack, Outcome, examine, load_all, load_artefact
from dpbench.claims.computed_file import Computed, path_of, write_computed
from dpbench.claims.evidence import Measured, Run
from dpbench.claims.notation import number
from dpbench.claims.schema import METRICS, Order
from dpbench.claims.scorecard import Scorecard
from dpbench.claims.standard_errors import Noise, StandardError, error_of, errors_at
from dpbench.claims.verdict import judge_order
from dpbench.config import conf_folder
from dpbench.errors import UserError
from dpbench.report.selection import selection_of
from dpbench.scores import text_scores
from dpbench.scores.texts import _NoSynonyms

# Values.


@pytest.mark.parametrize(
    ("accuracies", "outcome"),
    [
        ((60.2, 60.4, 60.3), Outcome.REPRODUCED),
        ((59.0, 59.0, 59.0), Outcome.REPRODUCED),  # exactly one point
        ((58.9, 58.9, 58.9), Outcome.BELOW),
        ((61.0, 61.0, 61.0), Outcome.REPRODUCED),
        ((61.1, 61.1, 61.1), Outcome.ABOVE),
        # Their spread is 2, so the standard error of the difference is sqrt(2^2 + 0.3^2)/sqrt(3) = 1.1676.
        ((60.3, 62.3, 64.3), Outcome.REPRODUCED),  # 2.3 < 2 x 1.1676
        ((60.4, 62.4, 64.4), Outcome.ABOVE),  # 2.4 > 2 x 1.1676
    ],
)
def test_a_value_is_reproduced_within_a_point_or_two_standard_errors(world, accuracies, outcome):
    finding = world.values(*accuracies)
    assert finding.outcome == outcome
    assert finding.claim == "method new, eps 1: 60 %"


def test_a_difference_that_is_hardly_too_large_is_written_with_the_digits_that_say_so(world):
    finding = world.values(61.0004, 61.0004, 61.0004)
    assert finding.outcome == Outcome.ABOVE
    assert finding.detail.endswith(", +1.0004, allowed ±1")


@pytest.mark.parametrize(("printed", "found"), [("90.57 ± 0.02", 90.57 + 1.5e-14), ("0", 6e-18)])
def test_what_rounding_leaves_of_a_difference_is_not_shown(world, printed, found):
    finding = world.values(*[found] * 3, change=lambda text: text.replace("60 ± 0.3", printed))
    assert finding.detail == f"{printed[:5] if found > 1 else '0.00'} % over 3 runs, +0, allowed ±1"


def test_a_small_difference_that_is_no_rounding_is_shown(world):
    assert ", +6e-07, allowed" in world.values(*[60 + 6e-7] * 3).detail


@pytest.mark.parametrize(
    ("printed", "tolerance", "found", "said"),
    [
        ("60", "0.00000000000001", 60 + 2e-13, "60.00 % over 3 runs, +0,"),  # rounding is in proportion to the number
        ("0", "0.000000001", 5e-10, "0.00 % over 3 runs, +5e-10,"),  # and that of none to what is allowed
    ],
)
def test_rounding_is_told_from_differences_where_little_is_allowed(world, printed, tolerance, found, said):
    strict = f"tolerance: {{points: {tolerance}}}\nneeds:"
    change = lambda text: text.replace("60 ± 0.3", printed).replace("needs:", strict)  # noqa: E731
    finding = world.values(*[found] * 3, change=change)
    assert finding.outcome == Outcome.REPRODUCED
    assert finding.detail.startswith(said)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (67185.0, "s", "67185"),
        (1e6, "", "1000000"),
        (2e6, "", "2e+06"),
        (-12345.0, "", "-12345"),
        (12345.6, "", "1.235e+04"),
        (0.0, "", "0"),
        (1e-10, "", "1e-10"),
        (90.0, "%", "90.00"),
    ],
)
def test_whole_numbers_are_written_plainly(value, unit, text):
    assert number(value, unit) == text


def test_a_number_that_is_derived_and_not_printed_is_counted_apart(world):
    derived = lambda text: text.replace("\nneeds:", "\n  - {method: new, eps: 1, derived: made_up.md 2}\nneeds:")  # noqa: E731
    finding = world.values(60.3, 60.3, 60.3, change=derived)
    assert finding.outcome == Outcome.AS_DERIVED
    assert finding.claim == "method new, eps 1: 60 % (not printed, by made_up.md 2)"
    assert world.artefact(change=derived).cells[1].derived is None
    other = world.artefact(change=lambda text: derived(text).replace("60 ± 0.3", "50 ± 0.3"))
    found = examine(other, world.evidence).findings[0]
    assert found.outcome == Outcome.ABOVE
    assert found.derived


def test_the_spread_that_the_paper_prints_counts(world):
    world.runs("dataset=digits algo=disk eps=8", 73.4, 73.4, 73.4)
    assert (
        examine(world.artefact(), world.evidence).findings[1].outcome == Outcome.REPRODUCED
    )  # 3.4 < 2 x 3/sqrt(3) = 3.46
    narrower = world.artefact(change=lambda text: text.replace("70 ± 3", "70 ± 2.9"))
    assert examine(narrower, world.evidence).findings[1].outcome == Outcome.ABOVE  # 2 x 2.9/sqrt(3) = 3.35


def test_a_file_may_have_another_tolerance(world):
    strict = "tolerance: {points: 0.1}\n"
    finding = world.values(60.4, 60.4, 60.4, change=lambda text: text.replace("needs:", strict + "needs:"))
    assert finding.outcome == Outcome.ABOVE  # 0.4 > 2 x 0.3/sqrt(3) = 0.346


def test_the_statistic_is_what_the_file_says(world):
    """The made-up runs' best accuracy is a point above their last."""
    best = "statistic: best\n"
    finding = world.values(58.5, 58.5, 58.5, change=lambda text: text.replace("needs:", best + "needs:"))
    assert finding.outcome == Outcome.REPRODUCED
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.BELOW


def test_a_test_error_is_one_less_the_accuracy(world):
    error = "metric: test_error\n"
    assert (
        world.values(40, 40, 40, change=lambda text: text.replace("needs:", error + "needs:")).outcome == "reproduced"
    )


def test_more_runs_than_asked_for_do_not_count(world):
    """Else one could go on until the mean fits."""
    assert world.values(57, 57, 57, 69).outcome == Outcome.BELOW


def test_a_difference_is_judged_by_the_runs_of_both_cells(world):
    world.runs("dataset=digits algo=disk eps=1", 62, 62, 62)
    world.runs("dataset=digits algo=dpsgd eps=1", 57.5, 57.5, 57.5)
    gain = examine(world.artefact(), world.evidence).findings[4]
    assert (gain.claim, gain.outcome) == ("method gain, eps 1: 5 points", Outcome.REPRODUCED)
    assert "4.50 points" in gain.detail


# What keeps a claim from being judged.


def test_too_few_seeds(world):
    finding = world.values(60, 60)
    assert finding.outcome == Outcome.TOO_FEW_SEEDS
    assert finding.detail == "2 of 3 runs at method new, eps 1, mean 60.00 %"


def test_a_number_that_no_run_will_have_is_refused(world):
    validation = lambda text: text.replace("needs:", "metric: validation_accuracy\nneeds:")  # noqa: E731
    with pytest.raises(UserError, match=r"validation_accuracy: .*without dataset\.validation_size"):
        world.artefact(change=validation)
    aside = world.artefact(change=lambda text: validation(text).replace("digits", "digits dataset.validation_size=9"))
    assert {cell.metric for cell in aside.cells} == {"validation_accuracy"}


def test_seeds_count_in_whichever_order_they_finish(world):
    """Only a search has to wait for its first one."""
    for seed in (1, 2):
        world.run("dataset=digits algo=disk eps=1", seed, 60 + seed)
    finding = examine(world.artefact(), world.evidence).findings[0]
    assert finding.outcome == Outcome.TOO_FEW_SEEDS
    assert finding.detail == "2 of 3 runs at method new, eps 1, mean 61.50 %"


def test_what_was_not_run_says_what_it_needs(world):
    finding = examine(world.artefact(), world.evidence).findings[0]
    assert (finding.outcome, finding.lack) == (Outcome.NOT_RUN, Lack.WEIGHTS)
    assert finding.detail == "needs data digits; weights some-model; 3 runs; 6 to 12 GPU hours"


@pytest.mark.parametrize("source", ["own.pt", "weights/own.safetensors", "./own", "/elsewhere/own"])
def test_weights_that_are_a_file_are_told_apart_from_those_of_a_hub(world, source):
    """Of an order, too, if one of its cells needs them."""

    def lacks(source: str) -> list[Lack | None]:
        begins = f"new: algo=disk model.pretrained={source}"
        artefact = world.artefact(ABOVE % "", change=lambda text: text.replace("new: algo=disk", begins))
        return [finding.lack for finding in examine(artefact, world.evidence).findings]

    new, old, gain, order = [Lack.UNPUBLISHED] * 2, [Lack.WEIGHTS] * 2, [Lack.UNPUBLISHED] * 2, [Lack.UNPUBLISHED]
    assert lacks(source) == [*new, *old, *gain, *order]
    assert set(lacks("owner/model")) == set(lacks("vit_small_patch16_224.augreg")) == {Lack.WEIGHTS}


@pytest.mark.parametrize("status", ["diverged", "failed", "invalid"])
def test_a_run_that_ended_badly_does_not_count(world, status):
    """Its accuracy would fit."""
    world.run("dataset=digits algo=disk eps=1", 0, 60)
    world.run("dataset=digits algo=disk eps=1", 1, 60)
    folder = world.run("dataset=digits algo=disk eps=1", 2, 60, status)
    finding = examine(world.artefact(), world.evidence).findings[0]
    assert finding.outcome == Outcome.FAILED
    assert finding.detail == f"{status} ({folder.relative_to(world.results)})"


@pytest.mark.parametrize("status", ["diverged", "failed", "invalid"])
def test_no_other_seed_makes_up_for_one_that_was_lost(world, status):
    """Else a method that diverges now and then would be judged by the runs that went well."""
    for seed in (0, 2, 3, 4):
        world.run("dataset=digits algo=disk eps=1", seed, 60)
    folder = world.run("dataset=digits algo=disk eps=1", 1, 10, status)
    finding = examine(world.artefact(), world.evidence).findings[0]
    assert finding.outcome == Outcome.FAILED
    assert finding.detail == f"{status} ({folder.relative_to(world.results)})"


def test_seeds_that_a_cell_does_not_ask_for_say_nothing_of_it(world):
    """Neither their numbers, nor how they ended, nor what they spent."""
    world.run("dataset=digits algo=disk eps=1", 0, 60)
    world.run("dataset=digits algo=disk eps=1", 1, 60)
    world.run("dataset=digits algo=disk eps=1", 3, 60)
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.TOO_FEW_SEEDS
    world.run("dataset=digits algo=disk eps=1", 2, 60)
    world.run("dataset=digits algo=disk eps=1", 4, 60, eps=1.7)
    world.run("dataset=digits algo=disk eps=1", 5, 10, "diverged")
    artefact = world.artefact()
    measured = world.evidence.measure(artefact.cells[0], None)
    assert (measured.seeds, measured.broken, measured.overspent) == ((0, 1, 2), {}, {})
    assert examine(artefact, world.evidence).findings[0].outcome == Outcome.REPRODUCED


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_a_run_that_may_still_finish_is_none_yet(world, status):
    world.run("dataset=digits algo=disk eps=1", 0, 60, status)
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.NOT_RUN


def test_reduced_runs_never_count(world):
    """A shorter run is another configuration, whatever it came to; so is a forced run under way beside a record."""
    world.runs("dataset=digits algo=disk eps=1 epochs=0.1", 60, 60, 60)
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.NOT_RUN
    folder = world.run("dataset=digits algo=disk eps=1", 0, 60)
    folder.rename(folder.with_name("0.rerun"))
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.NOT_RUN


def test_an_accuracy_that_is_no_number_does_not_count(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, math.nan)
    finding = examine(world.artefact(), world.evidence).findings[0]
    assert finding.outcome == Outcome.FAILED
    assert "no finite test_accuracy in the record" in finding.detail


# Numbers other than accuracies: under which names records hold them, and in which unit.


def of_metric(world, metric: str, unit: str, statistic: str = "last", **summary: object):
    """What the records say of a cell of this metric, where one run came to this summary."""
    world.run("dataset=digits algo=disk eps=1", 0, 60, **summary)
    rows = f"metric: {metric}\nunit: '{unit}'\nstatistic: {statistic}\nrows:"
    artefact = world.artefact(change=lambda text: text.replace("rows:", rows, 1))
    return world.evidence.measure(artefact.cells[0], None)


@pytest.mark.parametrize(
    ("metric", "unit", "entry", "printed"),
    [
        ("mismatched_accuracy", "%", 0.843, 84.3),
        ("bleu", "%", 44.56, 44.56),  # a percentage already
        ("rouge_l", "%", 58.7, 58.7),
        ("meteor", "", 0.379, 0.379),
        ("nist", "", 8.733, 8.733),
        ("cider", "", 2.773, 2.773),
        ("test_loss", "", 0.921, 0.921),
        ("validation_loss", "", 0.921, 0.921),
    ],
)
def test_scores_are_compared_in_the_unit_that_records_hold(world, metric, unit, entry, printed):
    assert of_metric(world, metric, unit, **{metric: entry}).values == (printed,)


def test_an_error_is_what_an_accuracy_leaves(world):
    assert of_metric(world, "test_error", "%").values == (pytest.approx(40.0),)


def test_meteor_without_synonyms_is_not_meteor(world):
    found = of_metric(world, "meteor", "", meteor_without_synonyms=0.4)
    assert (found.values, list(found.broken.values())) == ((), ["no meteor in the record"])


def test_what_records_hold_of_the_last_evaluation_alone_is_not_the_best(world):
    found = of_metric(world, "test_loss", "", statistic="best", test_loss=0.9)
    assert (found.values, list(found.broken.values())) == ((), ["no best test_loss in the record"])


def test_a_record_without_the_number_failed_and_says_what_it_lacks(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    change = "metric: nist\nunit: ''\nrows:"
    finding = examine(world.artefact(change=lambda text: text.replace("rows:", change, 1)), world.evidence).findings[0]
    assert finding.outcome == Outcome.FAILED
    assert "no nist in the record" in finding.detail


def test_a_language_model_is_recorded_under_the_names_that_claims_ask_for(monkeypatch):
    """What the scorer returns goes into the summary as it is; METEOR has its name only where WordNet is."""
    monkeypatch.setattr("dpbench.scores.texts.wordnet", lambda: None)
    without = text_scores(["a small cat sat"], [["a small cat sat", "the cat sat down"]])
    assert set(without) == {"bleu", "rouge_l", "meteor_without_synonyms", "nist", "cider"}
    monkeypatch.setattr("dpbench.scores.texts.wordnet", _NoSynonyms)
    assert {"bleu", "rouge_l", "meteor", "nist", "cider"} == set(text_scores(["a cat"], [["a cat"]])) <= set(METRICS)


def test_configurations_that_cannot_be_composed_have_no_runs(world):
    world.evidence.hash_of = lambda _: None
    assert world.values(60, 60, 60).outcome == Outcome.NOT_RUN


def test_accounting_differs_where_a_run_spent_more_than_it_was_asked_for(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60, eps=1.7, published_eps=1.0)
    finding = examine(world.artefact(ABOVE % ", at: {eps: 1}"), world.evidence).findings[0]
    assert finding.outcome == Outcome.ACCOUNTING_DIFFERS
    assert finding.detail.startswith("eps=1 spends 1.7; on the numbers alone: reproduced")
    world.runs("dataset=digits algo=dpsgd eps=1", 50, 50, 50)
    order = examine(world.artefact(ABOVE % ", at: {eps: 1}"), world.evidence).findings[-1]
    assert order.outcome == Outcome.ACCOUNTING_DIFFERS
    assert order.detail.startswith("eps=1 spends 1.7; on the numbers alone: order holds")


def test_accounting_differs_where_all_runs_of_a_search_spend_more_than_is_printed_for_their_choice(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    world.runs("dataset=digits algo=dpsgd eps=1", 50, 50, 50)
    artefact = world.artefact(ABOVE % ", at: {eps: 1}")
    (cell,) = artefact.select({"method": ("new",), "eps": ("1",)})
    path = path_of(world.evidence.results_dir, artefact.paper, artefact.name)
    for spent, differs in ((1.005, False), (1.7, True)):
        write_computed(path, Computed(spent={cell.place: spent}), {})
        findings = examine(artefact, world.evidence).findings
        for finding, plain in ((findings[0], "reproduced"), (findings[-1], "order holds")):
            assert finding.outcome == (Outcome.ACCOUNTING_DIFFERS if differs else Outcome(plain))
            told = f"all runs of a search for eps=1 spend 1.7; on the numbers alone: {plain}"
            assert finding.detail.startswith(told) == differs


@pytest.mark.parametrize(
    ("eps", "told"), [(1.0, "eps not proven"), (1.7, "eps=1 spends 1.7, eps not proven")], ids=["asked", "more"]
)
def test_accounting_differs_where_nobody_knows_what_a_run_spent(world, eps, told):
    world.runs("dataset=digits algo=disk eps=1", 60, 60)
    world.run("dataset=digits algo=disk eps=1", 2, 60, eps=eps, private=False)
    world.runs("dataset=digits algo=dpsgd eps=1", 50, 50, 50)
    findings = examine(world.artefact(ABOVE % ", at: {eps: 1}"), world.evidence).findings
    assert findings[0].outcome == findings[-1].outcome == Outcome.ACCOUNTING_DIFFERS
    assert findings[0].detail.startswith(f"{told}; on the numbers alone: reproduced")
    assert findings[-1].detail.startswith(f"{told}; on the numbers alone: order holds")


def test_nothing_is_unproven_where_no_eps_is_claimed(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60, eps="inf", target_eps="inf", private=False)
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.REPRODUCED


@pytest.mark.parametrize("spent", [0.4, 1.005])
def test_accounting_does_not_differ_where_published_accounting_overstates(world, spent):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60, eps=spent, published_eps=1.0)
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.REPRODUCED


def test_a_run_without_any_privacy_overspends_a_finite_eps(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60, eps="inf")
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.ACCOUNTING_DIFFERS


def test_no_privacy_asked_for_is_no_difference(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60, eps="inf", target_eps="inf")
    assert examine(world.artefact(), world.evidence).findings[0].outcome == Outcome.REPRODUCED


# Orders.

SAME = (60.0, 60.0, 60.0)
MORE = (61.0, 61.0, 61.0)
JUST_MORE = (61.0 + 1e-13, 61.0 + 1e-13, 61.0 + 1e-13)
NOISY = (56.0, 60.0, 64.0)  # spread 4, standard error 2.309


@pytest.mark.parametrize(
    ("claim", "new", "old", "outcome"),
    [
        ("", (MORE, MORE), (SAME, SAME), Outcome.ORDER_HOLDS),
        ("", (SAME, MORE), (MORE, SAME), Outcome.ORDER_FAILS),
        ("", (SAME, MORE), (SAME, SAME), Outcome.ORDER_OPEN),  # a tie is no lead
        ("", (MORE, MORE), (NOISY, SAME), Outcome.ORDER_OPEN),  # 1 < 2 x 2.309
        ("", ((65, 65, 65), MORE), (NOISY, SAME), Outcome.ORDER_HOLDS),  # 5 > 4.618
        (", pairs: 1", (SAME, MORE), (MORE, SAME), Outcome.ORDER_HOLDS),
        (", pairs: 1", (SAME, SAME), (MORE, SAME), Outcome.ORDER_OPEN),
        (", pairs: 1", (SAME, SAME), (MORE, MORE), Outcome.ORDER_FAILS),
        (", at: {eps: 8}", (SAME, MORE), (MORE, SAME), Outcome.ORDER_HOLDS),
        (", at_least: true", (SAME, SAME), (SAME, NOISY), Outcome.ORDER_HOLDS),
        (", at_least: true", (SAME, SAME), (SAME, MORE), Outcome.ORDER_FAILS),
        (", margin: 1", (MORE, MORE), (SAME, SAME), Outcome.ORDER_HOLDS),
        (", margin: 1.1", (MORE, MORE), (SAME, SAME), Outcome.ORDER_FAILS),  # the tolerance of values is none of orders
        (", margin: 1.1", (MORE, MORE), (SAME, NOISY), Outcome.ORDER_FAILS),
        (", margin: 1.1, at: {eps: 8}", (MORE, MORE), (SAME, NOISY), Outcome.ORDER_OPEN),
        (", within: 1", (MORE, SAME), (SAME, MORE), Outcome.ORDER_HOLDS),
        (", within: 1", (JUST_MORE, SAME), (SAME, JUST_MORE), Outcome.ORDER_HOLDS),
        (", within: 0.9", (MORE, SAME), (SAME, MORE), Outcome.ORDER_FAILS),
        (", within: 0.9, at: {eps: 8}", (MORE, NOISY), (SAME, MORE), Outcome.ORDER_OPEN),
        # One of two pairs that decide is granted more than two standard errors: here it misses by 2.5.
        (", at_least: true", ((50.2, 54.2, 58.2), SAME), (SAME, SAME), Outcome.ORDER_HOLDS),
        (", margin: 1", ((51.2, 55.2, 59.2), MORE), (SAME, SAME), Outcome.ORDER_OPEN),
        (", within: 1", ((49.2, 53.2, 57.2), SAME), (SAME, SAME), Outcome.ORDER_OPEN),
    ],
)
def test_an_order_is_judged_pair_by_pair(world, claim, new, old, outcome):
    assert world.order(ABOVE % claim, new, old).outcome == outcome


def student(errors, freedom):
    """How often chance exceeds so many standard errors, by quadrature of Student's density."""
    density = lambda x: (1 + x * x / freedom) ** (-(freedom + 1) / 2)  # noqa: E731
    return quad(density, errors, math.inf)[0] / quad(density, -math.inf, math.inf)[0]


@pytest.mark.parametrize(("share", "freedom"), [(1 / 2, 4), (1 / 28, 8), (3 / 4, 3.7)])
def test_the_more_pairs_could_decide_the_more_noise_each_is_granted(share, freedom):
    assert errors_at(1, freedom) == 2
    assert student(errors_at(share, freedom), freedom) == pytest.approx(share * student(2, freedom), rel=1e-6)


def test_the_error_of_a_mean_is_that_of_its_runs(world):
    cell = world.artefact().cells[0]
    runs = tuple(Run(seed, value, Path(str(seed)), value) for seed, value in enumerate((60.0, 63.0, 66.0)))
    of_three = error_of(cell, Measured((60.0, 63.0, 66.0), 3, {}, runs=runs))
    assert (of_three.size, of_three.freedom) == (pytest.approx(3 / 3**0.5), 2)
    # Of one run the tolerance, a point, is two errors; a number that no run is behind has none.
    assert error_of(cell, Measured((60.0,), 3, {}, runs=runs[:1])) == StandardError(0.5, math.inf)
    assert error_of(cell, Measured((60.0,), 3, {})) == StandardError(0.0, math.inf)


def test_noise_of_two_means_has_the_degrees_of_freedom_of_welch():
    a, b = (1.0, 3.0, 8.0, 2.0), (5.0, 5.5, 4.0)
    noise = Noise(*(StandardError(stdev(x) / len(x) ** 0.5, len(x) - 1) for x in (a, b)), 1, 1 / 10)
    welch = ttest_ind(a, b, equal_var=False)
    error = float((fmean(a) - fmean(b)) / welch.statistic)
    assert noise.bearing_out == pytest.approx(2 * error)
    level = student(2, welch.df) / 10
    assert student(noise.contradicting / error, welch.df) == pytest.approx(level, rel=1e-6)


def test_an_order_of_many_pairs_is_not_contradicted_by_chance():
    """Eight rows alike, in normal noise, five runs each: one of them is not said to be beaten for that (seed fixed)."""
    draws = np.random.default_rng(0).normal(size=(400, 8, 5))
    wrong = at_two = 0
    for rows in draws:
        means, errors = rows.mean(1), rows.std(1, ddof=1) / 5**0.5
        noises = [Noise(StandardError(errors[0], 4), StandardError(error, 4), 1, 1 / 7) for error in errors[1:]]
        wrong += any(means[0] - mean < -noise.contradicting for mean, noise in zip(means[1:], noises, strict=True))
        at_two += any(means[0] - mean < -noise.bearing_out for mean, noise in zip(means[1:], noises, strict=True))
    assert wrong / 400 < student(2, 8) + 0.03
    assert at_two / 400 > 3 * student(2, 8)


TIES = """
title: Ties
kind: trained
source: made_up.md 5
seeds: 5
common: dataset=digits
rows:
  method: {new: algo=disk, old: algo=dpsgd}
columns:
  eps: {%s}
values: not printed
claims: [{says: better, higher: {method: new}, lower: {method: old}, pairs: %d}]
"""


@pytest.mark.parametrize(("asked", "of"), [(2, 3), (13, 18)])
@pytest.mark.parametrize(("lead", "wrong"), [(20.0, Outcome.ORDER_HOLDS), (-20.0, Outcome.ORDER_FAILS)])
def test_chance_among_ties_decides_orders_no_more_often_than_a_pair(tmp_path, asked, of, lead, wrong):
    """One pair less than would decide it is clear, all others are ties: of 300 draws of five runs (seed fixed).

    A tie alone seems to be decided in either direction in P(t_8 > 2) = 4 % of them.
    """
    path = tmp_path / "adp" / "ties.yaml"
    path.parent.mkdir()
    columns = ", ".join(f"{i}: eps={i}" for i in range(1, of + 1))
    path.write_text(TIES % (columns, asked))
    artefact = load_artefact(path)
    (order,) = artefact.claims
    assert isinstance(order, Order)
    clear = asked - 1 if wrong == Outcome.ORDER_HOLDS else of - asked
    draws = np.random.default_rng(1)

    def measured(cell: Cell) -> Measured:
        ahead = lead if cell.at["method"] == "new" and int(cell.at["eps"]) <= clear else 0.0
        values = [float(value) for value in draws.normal(50 + ahead, 0.3, size=5)]
        runs = tuple(Run(seed, value, Path(), value) for seed, value in enumerate(values))
        return Measured(tuple(values), 5, {}, runs=runs)

    outcomes = [judge_order(artefact, order, measured).outcome for _ in range(300)]
    assert outcomes.count(wrong) / 300 < student(2, 8) + 0.03


def test_pairs_of_the_same_runs_count_once(world):
    """Of a distance to stay within, but of nothing else, in either direction; and of two columns of the same runs."""
    same = lambda text: text.replace("    8: eps=8\n", "    8: eps=1\n")  # noqa: E731
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    world.runs("dataset=digits algo=dpsgd eps=1", 55, 55, 55)
    both = "{method: [new, old]}"
    claims = [ABOVE % "", f"{{says: alike, higher: {both}, lower: {both}, within: 6}}"]
    details = [
        finding.detail for finding in examine(world.artefact(*claims, change=same), world.evidence).findings[-2:]
    ]
    assert details[0] == "holds in 1 of 1 pairs, fails in 0, within noise in 0"
    assert details[1] == "within 6: holds in 1 of 1 pairs, fails in 0, within noise in 0"
    order = f"{{says: above, higher: {both}, lower: {both}}}"
    one_way = examine(world.artefact(order, change=same), world.evidence).findings[-1]
    assert one_way.detail == "holds in 1 of 2 pairs, fails in 1, within noise in 0"
    apart = examine(world.artefact(ABOVE % ""), world.evidence).findings[-1]
    assert apart.outcome == Outcome.NOT_RUN


@pytest.mark.parametrize(("lead", "outcome"), [(1.4, Outcome.ORDER_OPEN), (1.5, Outcome.ORDER_HOLDS)])
def test_single_runs_are_told_apart_by_the_tolerance_of_their_numbers(world, lead, outcome):
    """A point for one of them, so sqrt(2) for two: of a single run no spread is known."""
    world.run("dataset=digits algo=disk eps=1", 0, 60 + lead)
    world.run("dataset=digits algo=dpsgd eps=1", 0, 60)

    def once(text: str) -> str:
        return re.sub(r"seeds: \d+", "seeds: 1", text)

    findings = examine(world.artefact(ABOVE % ", at: {eps: 1}", change=once), world.evidence).findings
    assert findings[-1].outcome == outcome


def test_an_order_says_in_how_many_pairs_it_holds(world):
    finding = world.order(ABOVE % "", (MORE, SAME), (SAME, SAME))
    assert finding.detail == "holds in 1 of 2 pairs, fails in 0, within noise in 1"


def test_an_order_waits_for_all_of_its_runs(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    world.runs("dataset=digits algo=disk eps=8", 60, 60, 60)
    world.runs("dataset=digits algo=dpsgd eps=1", 60, 60, 60)
    missing = examine(world.artefact(ABOVE % ""), world.evidence).findings[-1]
    assert missing.outcome == Outcome.NOT_RUN
    assert "3 runs" in missing.detail
    world.run("dataset=digits algo=dpsgd eps=8", 0, 60)
    assert examine(world.artefact(ABOVE % ""), world.evidence).findings[-1].outcome == Outcome.TOO_FEW_SEEDS
    world.run("dataset=digits algo=dpsgd eps=8", 1, 60, "diverged")
    assert examine(world.artefact(ABOVE % ""), world.evidence).findings[-1].outcome == Outcome.FAILED


def test_an_order_is_decided_where_what_was_not_run_could_not_change_it(world):
    """Of two pairs one is there; what it may decide depends on how many pairs are claimed."""
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    world.runs("dataset=digits algo=dpsgd eps=1", 61, 61, 61)
    claims = [order % pairs for order in (ABOVE, BELOW) for pairs in ("", ", pairs: 1")]
    findings = examine(world.artefact(*claims), world.evidence).findings[-4:]
    assert [one.outcome for one in findings] == [
        Outcome.ORDER_FAILS,
        Outcome.NOT_RUN,
        Outcome.NOT_RUN,
        Outcome.ORDER_HOLDS,
    ]
    assert findings[0].detail == "holds in 0 of 2 pairs, fails in 1, within noise in 0, not run in 1"


def test_accounting_differs_by_the_runs_that_decide_alone(world):
    """A run that spent too much, in a pair that is not complete, says nothing of the verdict of another pair."""
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    world.runs("dataset=digits algo=dpsgd eps=1", 61, 61, 61)
    world.runs("dataset=digits algo=disk eps=8", 60, 60, 60, eps=9.5, target_eps=8.0)
    assert examine(world.artefact(ABOVE % ""), world.evidence).findings[-1].outcome == Outcome.ORDER_FAILS
    world.runs("dataset=digits algo=dpsgd eps=8", 61, 61, 61)
    assert examine(world.artefact(ABOVE % ""), world.evidence).findings[-1].outcome == Outcome.ACCOUNTING_DIFFERS


def test_accounting_tells_the_largest_eps_that_was_spent(world):
    """Methods of an order may overspend the same budget by different amounts."""
    for seed, eps in enumerate((2.0, 2.5, 1.1)):
        world.run("dataset=digits algo=disk eps=1", seed, 60, eps=eps)
    world.runs("dataset=digits algo=dpsgd eps=1", 61, 61, 61, eps=1.5)
    finding = examine(world.artefact(ABOVE % ", at: {eps: 1}"), world.evidence).findings[-1]
    assert finding.detail.startswith("eps=1 spends 2.5;")


def quoted(text: str) -> str:
    """The file with the second method's numbers taken over from somebody else."""
    text = text.replace("needs:\n", "  - {method: old, quoted: Smith 2020}\nneeds:\n")
    text = text.replace("{method: gain, minus: {method: [new, old]}, unit: points}", "{method: gain, absent: true}")
    return text.replace("  gain   | 5          | 0.5\n", "")


def test_an_order_compares_with_a_quoted_number_as_it_is_printed(world):
    """The cell itself has no runs, and its value is nobody's claim here."""
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    world.runs("dataset=digits algo=disk eps=8", 60, 60, 60)

    findings = examine(world.artefact(ABOVE % ", pairs: 1", change=quoted), world.evidence).findings
    assert findings[2].outcome == Outcome.NOT_RUN
    assert "quoted from Smith 2020" in findings[2].detail
    assert findings[-1].detail == "holds in 1 of 2 pairs, fails in 1, within noise in 0"
    assert findings[-1].outcome == Outcome.ORDER_HOLDS


def test_an_order_has_no_pair_with_a_quoted_cell_without_a_number(world):
    def change(text: str) -> str:
        return quoted(text).replace("old    | 55         |", "old    | N/A        |")

    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    finding = examine(world.artefact(ABOVE % "", change=change), world.evidence).findings[-1]
    assert finding.outcome == Outcome.NOT_RUN  # at eps = 8 alone, where nothing was run
    world.runs("dataset=digits algo=disk eps=8", 70, 70, 70)
    finding = examine(world.artefact(ABOVE % "", change=change), world.evidence).findings[-1]
    assert finding.detail == "holds in 1 of 1 pairs, fails in 0, within noise in 0"


def test_the_last_and_the_best_accuracy_of_the_same_runs_are_two_pairs(world):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    world.runs("dataset=digits algo=dpsgd eps=1", 55, 55, 55)

    def change(text: str) -> str:
        return text.replace("    8: eps=8\n", "    8: eps=1\n").replace(
            "needs:\n", "  - {eps: 8, statistic: best}\nneeds:\n"
        )

    finding = examine(world.artefact(ABOVE % "", change=change), world.evidence).findings[-1]
    assert finding.detail == "holds in 2 of 2 pairs, fails in 0, within noise in 0"


# Trends.


@pytest.mark.parametrize(
    ("rising", "new", "old", "outcome"),
    [
        ("false", ((65,) * 3, SAME), (SAME, SAME), Outcome.ORDER_HOLDS),  # the lead falls from 5 to 0
        ("true", ((65,) * 3, SAME), (SAME, SAME), Outcome.ORDER_FAILS),
        ("true", (SAME, (65,) * 3), (SAME, SAME), Outcome.ORDER_HOLDS),
        ("true", (SAME, (65,) * 3), (SAME, (65,) * 3), Outcome.ORDER_OPEN),  # both rise alike
        ("true", (SAME, (64,) * 3), (SAME, NOISY), Outcome.ORDER_OPEN),  # 4 < 2 x 2.309
    ],
)
def test_a_lead_grows_or_shrinks_along_an_axis(world, rising, new, old, outcome):
    claim = f"{{says: lead, along: eps, ends: [1, 8], rising: {rising}, of: {{method: [new, old]}}}}"
    assert world.order(claim, new, old).outcome == outcome


def test_a_number_grows_along_an_axis(world):
    claim = "{says: more, along: eps, ends: [1, 8], rising: true, at: {method: new}}"
    finding = world.order(claim, (SAME, MORE), (SAME, SAME))
    assert finding.outcome == Outcome.ORDER_HOLDS
    assert finding.detail == "changes by +1 on average over 1 places, noise ±0"


@pytest.mark.parametrize(("rise", "outcome"), [(2.2, Outcome.ORDER_OPEN), (2.5, Outcome.ORDER_HOLDS)])
def test_the_noise_of_a_trend_is_that_of_the_mean_over_its_places(world, rise, outcome):
    """Of one of two places alone the standard error is 2.309, so that of the mean of both is half of it."""
    claim = "{says: more, along: eps, ends: [1, 8], rising: true, at: {method: [new, old]}}"
    risen = [value + rise for value in SAME]
    finding = world.order(claim, (SAME, [value + rise for value in NOISY]), (SAME, risen))
    assert finding.outcome == outcome
    assert finding.detail == f"changes by +{rise} on average over 2 places, noise ±2.31"


# Searches.


def test_a_search_is_judged_by_its_winner_at_the_first_seed(world):
    """A candidate with a better mean that lost at the first seed is not the winner: one run each decides."""
    world.run("dataset=digits algo=disk eps=1 optim.lr=1", 0, 50)
    world.runs("dataset=digits algo=disk eps=1 optim.lr=2", 60, 60, 60)
    assert examine(world.artefact(change=search), world.evidence).findings[0].outcome == Outcome.REPRODUCED
    world.run("dataset=digits algo=disk eps=1 optim.lr=1", 1, 99)
    assert examine(world.artefact(change=search), world.evidence).findings[0].outcome == Outcome.REPRODUCED


def test_a_search_with_samples_set_aside_is_decided_by_them(world):
    """And judged by the test accuracy of the winner, whatever that is; it loses where it was not validated."""
    change = lambda text: search(text).replace("digits", "digits dataset.validation_size=9")  # noqa: E731
    one, two = (f"dataset=digits dataset.validation_size=9 algo=disk eps=1 optim.lr={lr}" for lr in (1, 2))
    for seed in range(3):
        world.run(one, seed, 60.1, validation_accuracy=0.7)
    world.run(two, 0, 65, validation_accuracy=0.6)
    artefact = world.artefact(change=change)
    found = world.evidence.measure(artefact.cells[0], None)
    assert found.values == pytest.approx((60.1, 60.1, 60.1))
    assert examine(artefact, world.evidence).findings[0].outcome == Outcome.REPRODUCED
    (world.results / "runs" / digest(two.split()) / "0/summary.json").write_text(
        json.dumps({"test_accuracy": {"final": 0.65, "best": 0.65}, "validation_accuracy": 0.8})
    )
    assert world.evidence.measure(artefact.cells[0], None).values == (65,)
    (world.results / "runs" / digest(one.split()) / "0/summary.json").write_text(
        json.dumps({"test_accuracy": {"final": 0.99, "best": 0.99}, "validation_accuracy": math.nan})
    )
    broken = world.evidence.measure(artefact.cells[0], None).broken
    assert list(broken.values()) == ["no finite validation_accuracy in the record"]
    assert selection_of(artefact)[1].startswith("Hyper-parameters, 2 of 4 cells: the best of 2 configurations")
    assert "tuned on validation data" in selection_of(artefact)[1]
    assert "tuned on test data" in selection_of(world.artefact(change=search))[1]


def test_a_search_needs_all_candidates(world):
    world.runs("dataset=digits algo=disk eps=1 optim.lr=2", 60, 60, 60)
    finding = examine(world.artefact(change=search), world.evidence).findings[0]
    assert (finding.outcome, finding.lack) == (Outcome.NOT_RUN, Lack.WEIGHTS)
    assert "4 runs" in finding.detail


def test_a_candidate_that_diverged_has_lost(world):
    world.runs("dataset=digits algo=disk eps=1 optim.lr=2", 60, 60, 60)
    world.run("dataset=digits algo=disk eps=1 optim.lr=1", 0, 10, "diverged")
    assert examine(world.artefact(change=search), world.evidence).findings[0].outcome == Outcome.REPRODUCED
    # Its other seeds make up for nothing: it is ranked by the one it lost.
    world.run("dataset=digits algo=disk eps=1 optim.lr=1", 1, 99)
    assert examine(world.artefact(change=search), world.evidence).findings[0].outcome == Outcome.REPRODUCED


def test_a_candidate_that_diverged_is_no_failure_while_the_winner_waits_for_seeds(world):
    world.run("dataset=digits algo=disk eps=1 optim.lr=1", 0, 10, "diverged")
    world.run("dataset=digits algo=disk eps=1 optim.lr=2", 0, 60)
    finding = examine(world.artefact(change=search), world.evidence).findings[0]
    assert (finding.outcome, finding.detail.partition(" at ")[0]) == (Outcome.TOO_FEW_SEEDS, "1 of 3 runs")


def test_a_search_whose_candidates_all_diverged_fails(world):
    for step in (1, 2):
        world.run(f"dataset=digits algo=disk eps=1 optim.lr={step}", 0, 10, "diverged")
    assert examine(world.artefact(change=search), world.evidence).findings[0].outcome == Outcome.FAILED


def test_a_winner_that_loses_a_seed_fails(world):
    world.runs("dataset=digits algo=disk eps=1 optim.lr=1", 50, 50, 50)
    world.run("dataset=digits algo=disk eps=1 optim.lr=2", 0, 60)
    world.run("dataset=digits algo=disk eps=1 optim.lr=2", 1, 60)
    world.run("dataset=digits algo=disk eps=1 optim.lr=2", 2, 10, "diverged")
    world.run("dataset=digits algo=disk eps=1 optim.lr=2", 3, 60)
    assert examine(world.artefact(change=search), world.evidence).findings[0].outcome == Outcome.FAILED


def test_a_candidate_whose_first_seed_has_not_ended_may_still_win(world):
    world.runs("dataset=digits algo=disk eps=1 optim.lr=2", 60, 60, 60)
    world.run("dataset=digits algo=disk eps=1 optim.lr=1", 1, 50)
    world.run("dataset=digits algo=disk eps=1 optim.lr=1", 2, 10, "diverged")
    assert examine(world.artefact(change=search), world.evidence).findings[0].outcome == Outcome.NOT_RUN


# Computed numbers, and what no number decides.


def test_computed_numbers_come_from_their_own_file(tmp_path):
    artefact = load_artefact(conf_folder() / "paper" / "disk" / "table_7.yaml")
    evidence = Evidence(tmp_path, digest)
    waiting = examine(artefact, evidence).findings[0]
    assert (waiting.detail, waiting.lack) == ("not computed yet", Lack.COMPUTATION)
    numbers = {"data MNIST, delta here": 60000**-1.1, "data MNLI, delta here": 392702**-1.1}
    write_computed(path_of(tmp_path, "disk", "table_7"), Computed(numbers), {})
    found = {finding.claim: finding.outcome for finding in examine(artefact, evidence).findings}
    # 60000^-1.1 = 5.547e-6, which the paper prints as 5.5e-6, and 392702^-1.1 = 7.02e-7, as 6.3e-7.
    assert found["data MNIST, delta here: 5.5e-06"] == Outcome.REPRODUCED
    assert found["data MNLI, delta here: 6.3e-07"] == Outcome.ABOVE


def test_what_is_not_reproducible_is_one_finding_with_its_reason(tmp_path):
    artefact = load_artefact(conf_folder() / "paper" / "adp" / "figure_5.yaml")
    (finding,) = examine(artefact, Evidence(tmp_path, digest)).findings
    assert (finding.outcome, finding.lack) == (Outcome.NOT_RUN, Lack.NOT_REPRODUCIBLE)
    assert finding.detail.startswith("not reproducible: a listing printed as a picture")


def test_words_are_not_judged(world):
    finding = examine(world.artefact("{says: it looks good, why: a matter of taste}"), world.evidence).findings[-1]
    assert (finding.outcome, finding.detail) == (Outcome.NOT_JUDGED, "a matter of taste")


# The scorecard.


def test_the_scorecard_counts_every_claim_once(tmp_path):
    artefacts = load_all(conf_folder() / "paper")
    evidence = Evidence(tmp_path, digest)
    card = Scorecard(tuple(finding for one in artefacts for finding in examine(one, evidence).findings))
    assert {finding.lack for finding in card.findings} == {*Lack, None}
    assert set(card.counts) == {Outcome.NOT_RUN, Outcome.NOT_JUDGED}
    assert sum(card.counts.values()) == len(card.findings) > 1000
    assert len(card.published.findings) + len(card.own.findings) == len(card.findings)
    assert len(card.own.findings) > 10
    for part in (card.papers, card.artefacts):
        assert sum(len(one.findings) for one in part.values()) == len(card.published.findings)
    assert list(card.papers) == ["doppler", "disk", "adp", "dp_pmlf", "dc_sgd"]
    claiming = [one for one in artefacts if one.paper in PAPERS and not _only_own(one)]
    assert len(card.artefacts) == len(claiming)


def _only_own(artefact: Artefact) -> bool:
    """Whether nothing is claimed there but what dpbench claims."""
    return not artefact.printed and all(isinstance(claim, Order) and claim.own for claim in artefact.claims or [None])


def test_what_dpbench_claims_itself_is_in_no_number_of_a_paper(world):
    """Of two orders that say the same one is the paper's."""
    world.runs("dataset=digits algo=disk eps=1", *MORE)
    world.runs("dataset=digits algo=dpsgd eps=1", *SAME)
    artefact = world.artefact(ABOVE % ", at: {eps: 1}", ABOVE % ", at: {eps: 1}, own: true")
    card = Scorecard(examine(artefact, world.evidence).findings)
    assert card.counts[Outcome.ORDER_HOLDS] == 2
    assert card.own.counts == {Outcome.ORDER_HOLDS: 1}
    of_paper = [card.published, card.papers["adp"], card.artefacts["adp/made_up.yaml"]]
    assert [one.counts[Outcome.ORDER_HOLDS] for one in of_paper] == [1, 1, 1]
    assert [len(one.findings) for one in of_paper] == [len(card.findings) - 1] * 3


def test_the_scorecard_counts_outcomes_in_their_order():
    outcomes = [Outcome.BELOW, Outcome.REPRODUCED, Outcome.BELOW]
    card = Scorecard(tuple(Finding("adp/table_1.yaml", str(i), one, "") for i, one in enumerate(outcomes)))
    assert list(card.counts.items()) == [(Outcome.REPRODUCED, 1), (Outcome.BELOW, 2)]


@pytest.mark.parametrize(
    ("break_it", "seen"),
    [
        (("dpbench.claims.verdict.standard_error", lambda _: 0.0), Outcome.ABOVE),
        (("dpbench.claims.verdict.printed_error", lambda _: 10.0), Outcome.REPRODUCED),
    ],
)
def test_the_rules_are_sensitive_to_their_parts(world, monkeypatch, break_it, seen):
    """2.3 off at a standard error of 1.1676 is reproduced; 9 off is not."""
    monkeypatch.setattr(*break_it)
    off = 2.3 if seen == Outcome.ABOVE else 9
    assert world.values(58 + off, 60 + off, 62 + off).outcome == seen


def test_a_cell_asks_for_its_own_seeds(world):
    cell: Cell = world.artefact().cells[0]
    assert world.evidence.measure(cell, None).wanted == 3


@pytest.mark.parametrize("which", ["new", "old"])
def test_accounting_differs_by_the_search_behind_either_number_of_a_pair_or_a_difference(world, which):
    world.runs("dataset=digits algo=disk eps=1", 60, 60, 60)
    world.runs("dataset=digits algo=dpsgd eps=1", 55, 55, 55)
    artefact = world.artefact(ABOVE % ", at: {eps: 1}")
    (cell,) = artefact.select({"method": (which,), "eps": ("1",)})
    path = path_of(world.evidence.results_dir, artefact.paper, artefact.name)
    write_computed(path, Computed(spent={cell.place: 1.7}), {})
    findings = examine(artefact, world.evidence).findings
    (gain,) = (finding for finding in findings if finding.claim.startswith("method gain, eps 1:"))
    for finding in (gain, findings[-1]):
        assert finding.outcome == Outcome.ACCOUNTING_DIFFERS
        assert finding.detail.startswith("all runs of a search for eps=1 spend 1.7; ")


@pytest.mark.parametrize(("printed", "outcome"), [("5", Outcome.BELOW), ("-5", Outcome.REPRODUCED)])
def test_a_gain_that_came_out_as_a_loss_is_none(world, printed, outcome):
    world.runs("dataset=digits algo=disk eps=1", 55, 55, 55)
    world.runs("dataset=digits algo=dpsgd eps=1", 60, 60, 60)
    artefact = world.artefact(change=lambda text: text.replace("gain   | 5 ", f"gain   | {printed} "))
    findings = examine(artefact, world.evidence).findings
    (gain,) = (finding for finding in findings if finding.claim.startswith("method gain, eps 1:"))
    assert gain.outcome == outcome
    assert gain.detail.startswith("-5.00 points over 3 runs")
