"""Tables and the scorecard as they are written, of records made up for the purpose."""

import csv
import io
import json
import math

import pytest
from made_up_evidence import ABOVE, BELOW, NEW, OLD, World, digest, search

from dpbench.claims import Evidence, Outcome, load_all, load_artefact
from dpbench.claims.computed_file import Axis, Computed, Curve, Panel, path_of, write_computed
from dpbench.config import conf_folder
from dpbench.report.grid import Grid, build_grid
from dpbench.report.outcomes import BADGES
from dpbench.report.scorecard import as_markdown as scorecard
from dpbench.report.scorecard import newest_record, origins_of, repeated
from dpbench.report.selection import selection_of
from dpbench.report.tables import as_csv, as_markdown


def grid_of(world: World, *claims: str, **how) -> Grid:
    return build_grid(world.artefact(*claims, **how), world.evidence)


def lines_of(text: str | None) -> list[dict[str, str]]:
    assert text is not None
    return list(csv.DictReader(io.StringIO(text)))


# Grids.


def test_a_grid_holds_printed_ours_and_verdict_at_every_place(world):
    world.runs(NEW, 60.0, 60.6, 61.2)
    grid = grid_of(world)
    assert (grid.row_axes, grid.column_axes) == (("method",), ("eps",))
    assert (grid.rows, grid.columns) == ((("new",), ("old",), ("gain",)), (("1",), ("8",)))
    entry = grid.at(("new",), ("1",))
    assert entry is not None
    # The mean of 60, 60.6, 61.2 is 60.6, its sample standard deviation 0.6.
    assert (entry.printed, entry.ours, entry.verdict) == ("60 ± 0.3", "60.60 ± 0.60 (n = 3)", "reproduced")
    missing = grid.at(("old",), ("8",))
    assert missing is not None
    assert (missing.printed, missing.ours, missing.verdict, missing.value) == ("69.5", "–", "not run", None)


def test_the_runs_behind_a_number_are_named(world):
    world.runs(NEW, 60.0, 61.0, 62.0, 63.0, eps=1.7, published_eps=1.0)
    entry = grid_of(world).at(("new",), ("1",))
    assert entry is not None
    folder = world.results / "runs" / digest(NEW.split())
    assert [(run.seed, run.folder, run.eps, run.published_eps) for run in entry.runs] == [
        (seed, folder / str(seed), 1.7, 1.0) for seed in range(3)
    ]
    assert [run.value for run in entry.runs] == pytest.approx([60.0, 61.0, 62.0])
    assert entry.remark == "spends eps 1.7"


def test_the_runs_of_a_search_are_those_of_its_winner(world):
    world.runs(f"{NEW} optim.lr=1", 50)
    world.runs(f"{NEW} optim.lr=2", 60, 60, 60)
    entry = grid_of(world, change=search).at(("new",), ("1",))
    assert entry is not None
    assert {run.folder.parent.name for run in entry.runs} == {digest(f"{NEW} optim.lr=2".split())}
    assert "optim.lr=2" in (entry.parts[0].overrides or ())


def test_a_difference_has_the_runs_of_both_cells_and_the_spread_of_both(world):
    world.runs(NEW, 60.0, 63.0, 66.0)  # standard deviation 3
    world.runs(OLD, 50.0, 54.0, 58.0)  # standard deviation 4
    gain = grid_of(world).at(("gain",), ("1",))
    assert gain is not None
    assert gain.value == pytest.approx(9.0)
    assert gain.spread == pytest.approx(5.0)
    assert len(gain.runs) == 6
    assert gain.ours == "9.00 ± 5.00 (n = 3)"


@pytest.mark.parametrize("first", [NEW, OLD])
def test_a_difference_is_of_as_many_runs_as_the_cell_that_has_fewer(world, first):
    """Whose spread nobody knows where that is one."""
    world.runs(first, 60.0, 63.0)
    world.runs(OLD if first == NEW else NEW, 50.0)
    gain = grid_of(world).at(("gain",), ("1",))
    assert gain is not None
    assert gain.spread is None
    assert gain.ours.endswith("11.50 (n = 1 of 3)")


@pytest.mark.parametrize(("new", "old"), [(2.5, 1.5), (1.5, 2.5)])
def test_a_difference_of_runs_that_overspent_tells_the_largest_eps(world, new, old):
    world.runs(NEW, 60.0, 63.0, 66.0, eps=new)
    world.runs(OLD, 50.0, 54.0, 58.0, eps=old)
    gain = grid_of(world).at(("gain",), ("1",))
    assert gain is not None
    assert gain.remark == "spends eps 2.5"


def test_a_search_that_overspent_says_so_beside_its_number(world):
    world.runs(NEW, 60.0, 60.0, 60.0)
    artefact, place = world.artefact(), grid_of(world).at(("new",), ("1",)).cell.place
    write_computed(path_of(world.results, artefact.paper, artefact.name), Computed(spent={place: 1.7}), {})
    assert grid_of(world).at(("new",), ("1",)).remark == "all runs of the search spend eps 1.7"


@pytest.mark.parametrize(("eps", "remark"), [(1.0, "eps not proven"), (1.7, "spends eps 1.7, eps not proven")])
def test_a_number_whose_eps_is_not_proven_says_so(world, eps, remark):
    world.runs(NEW, 60.0, 60.0, 60.0, eps=eps, private=False)
    entry = grid_of(world).at(("new",), ("1",))
    assert entry is not None
    assert entry.remark == remark
    assert "eps not proven; on the numbers alone: reproduced" in as_markdown(grid_of(world))


@pytest.mark.parametrize(
    ("accuracies", "text"),
    [((60.0,), "60.00 (n = 1 of 3)"), ((60.0, 61.0), "60.50 ± 0.71 (n = 2 of 3)"), ((), "–")],
)
def test_a_mean_says_how_many_runs_are_missing(world, accuracies, text):
    world.runs(NEW, *accuracies)
    entry = grid_of(world).at(("new",), ("1",))
    assert entry is not None
    assert entry.ours == text


def test_runs_that_ended_badly_are_told_in_place_of_a_number(world):
    world.run(NEW, 0, 60, "diverged")
    entry = grid_of(world).at(("new",), ("1",))
    assert entry is not None
    assert (entry.ours, entry.verdict) == ("diverged", "failed")


def test_numbers_are_shown_as_they_are_printed():
    """With their zeros, as a fraction, as a time; each file's numbers are compared elsewhere."""
    folder = conf_folder() / "paper"
    evidence = Evidence(folder / "nowhere", digest)
    texts = {
        entry.printed
        for file in ("dp_pmlf/table_1", "doppler/table_2", "dc_sgd/table_1")
        for entry in build_grid(load_artefact(folder / f"{file}.yaml"), evidence).entries.values()
    }
    assert {"47.74 ± 1.20", "-9/11", "89.00 ± 0.06"} <= texts
    assert any("m" in text and "s" in text for text in texts)


def test_a_grid_of_what_is_not_reproducible_has_its_one_finding(tmp_path):
    artefact = load_artefact(conf_folder() / "paper" / "adp" / "table_6.yaml")
    grid = build_grid(artefact, Evidence(tmp_path, digest))
    assert grid.whole is not None
    assert grid.findings == (grid.whole,)
    assert all(entry.finding is None and entry.ours == "–" for entry in grid.entries.values())


# Selection.


def test_how_numbers_are_chosen_is_disclosed(world):
    text = "\n".join(grid_of(world, change=search).selection)
    assert "after the last step" in text
    assert "2 of 4 cells: the best of 2 configurations (optim.lr 1, 2), tuned on test data" in text
    assert "in 2 of 2 searches not counted in eps" in text


def test_the_best_over_a_run_is_called_a_choice_on_test_data(world):
    text = grid_of(world, change=lambda text: text.replace("needs:", "statistic: best\nneeds:")).selection[0]
    assert "choice made on test data" in text


def test_a_search_whose_eps_counts_its_runs_is_told():
    text = "\n".join(selection_of(load_artefact(conf_folder() / "paper" / "beyond" / "panel_digits.yaml")))
    assert "in 108 of 108 searches charged as a random search of that size" in text
    assert "not counted" not in text


def test_tuning_that_is_paid_for_by_noise_is_told():
    artefact = load_artefact(conf_folder() / "paper" / "dc_sgd" / "table_2.yaml")
    grid = build_grid(artefact, Evidence(conf_folder() / "nowhere", digest))
    assert "in 72 of 72 searches counted as the paper does, by a larger noise multiplier" in "\n".join(grid.selection)


# Markdown.


def test_the_page_of_an_artefact_has_numbers_verdicts_and_all_that_explains_them(world):
    world.runs(NEW, 60.0, 60.6, 61.2)
    world.runs(OLD, 50.0, 50.0, 50.0, eps=1.7, published_eps=1.0)
    extra = "deviations: [Another model.]\nreadings: {made_up.md 6: three seeds}\nneeds:"
    page = as_markdown(
        grid_of(world, ABOVE % ", at: {eps: 1}", change=lambda text: text.replace("needs:", extra)), "made_up.svg"
    )
    assert page.splitlines()[0] == "# ADP, Made up: Made up"
    assert "**7 claims**: 1 reproduced, 3 accounting differs, 3 not run." in page
    assert "![ADP, Made up: Made up](made_up.svg)" in page
    row = "| new | 1 | 60 ± 0.3 % | 60.60 ± 0.60 (n = 3) % | reproduced | 60.60 % over 3 runs, +0.6, allowed ±1 |"
    assert row in page
    assert "| old | 1 | 55 % | 50.00 ± 0.00 (n = 3) % | accounting differs | eps=1 spends 1.7; " in page
    assert "| old | 8 | 69.5 % | – | not run |  |" in page
    assert "| better | accounting differs | eps=1 spends 1.7; on the numbers alone: order holds" in page
    assert "- Another model." in page
    assert "- three seeds (made_up.md 6)" in page
    assert "python -m dpbench.reproduce paper=adp artefact=made_up" in page
    needs = "data digits; weights some-model; 12 runs; 24 to 48 GPU hours. The hours are estimated in made_up.md 4."
    assert f"It needs {needs}" in page


def test_a_claim_that_the_papers_own_numbers_contradict_is_marked(world):
    page = as_markdown(grid_of(world, ABOVE % ", printed: false"))
    assert "better *(The numbers that the paper prints do not bear it out.)*" in page


def test_of_numbers_that_are_worked_out_none_is_said_to_be_printed(world):
    change = {"change": lambda text: text.replace("needs:", "derived: made_up.md 3\nneeds:")}
    page = as_markdown(grid_of(world, ABOVE % ", printed: false", **change))
    assert "better *(The numbers worked out from what the paper prints do not bear it out.)*" in page


def test_an_axis_with_one_label_is_told_once(tmp_path):
    artefact = load_artefact(conf_folder() / "paper" / "doppler" / "figure_10.yaml")
    page = as_markdown(build_grid(artefact, Evidence(tmp_path, digest)))
    assert "Numbers in %. All with eps 8." in page
    assert "| lr | printed | ours | verdict | note |" in page


def test_a_bar_in_a_text_does_not_end_a_table_cell(world):
    page = as_markdown(grid_of(world, "{says: 'a | b', why: taste}"))
    assert "| a \\| b | not judged by numbers | taste |" in page


# CSV.


def test_csv_has_exact_numbers_and_the_records(world):
    world.runs(NEW, 60.0, 60.6, 61.4)
    first, *others = lines_of(as_csv(grid_of(world)))
    assert len(others) == 5
    assert (first["at_method"], first["at_eps"], first["unit"], first["verdict"]) == ("new", "1", "%", "reproduced")
    assert float(first["printed"]) == 60
    assert float(first["printed_spread"]) == 0.3
    values = [0.6 * 100, 0.606 * 100, 0.614 * 100]
    assert [float(value) for value in first["values"].split()] == values
    assert math.isclose(float(first["ours"]), sum(values) / 3, rel_tol=1e-15)
    assert first["seeds"] == "0 1 2"
    hashed = digest(NEW.split())
    assert first["records"] == f"{hashed}/0 {hashed}/1 {hashed}/2"
    assert first["eps_spent"] == "0.999 0.999 0.999"
    assert first["overrides"] == NEW
    assert [line["ours"] for line in others] == [""] * 5


def test_csv_of_curves_alone_has_their_points(tmp_path):
    artefact = load_artefact(conf_folder() / "paper" / "doppler" / "figure_1.yaml")
    assert as_csv(build_grid(artefact, Evidence(tmp_path, digest))) is None
    panel = Panel("gain", Axis("t"), Axis("k"), (Curve("k_t", (0.0, 1.0), (1.0, 0.1 + 0.2)),))
    write_computed(path_of(tmp_path, "doppler", "figure_1"), Computed(panels=(panel,), remarks=("ours",)), {})
    grid = build_grid(artefact, Evidence(tmp_path, digest))
    assert [(line["curve"], line["x"], line["y"]) for line in lines_of(as_csv(grid))] == [
        ("k_t", "0.0", "1.0"),
        ("k_t", "1.0", "0.30000000000000004"),
    ]
    assert "- ours" in as_markdown(grid)


# The scorecard.


def test_the_scorecard_counts_and_says_first_how_little_was_run(tmp_path):
    artefacts = load_all(conf_folder() / "paper")
    evidence = Evidence(tmp_path, digest)
    grids = [build_grid(artefact, evidence) for artefact in artefacts]
    page = scorecard(grids)
    claimed = [finding for grid in grids for finding in grid.findings if not finding.own]
    total = len(claimed)
    reported = {finding.artefact for finding in claimed}  # our own comparisons claim nothing
    waiting = sum(finding.outcome == Outcome.NOT_RUN for finding in claimed)
    assert (
        f"Of {total} claims in {len(reported)} tables and figures 0 have been compared with numbers of ours; 0 of these"
        in page
    )
    assert f"{waiting} have not been run." in page
    assert "| reproduced | 0 |" in page
    rows = page.split("## Why claims have not been run")[1].split("## Papers")[0].splitlines()
    counts = [int(row.rsplit("|", 2)[1]) for row in rows if row.startswith("| ") and "reason" not in row]
    assert sum(counts) == waiting
    assert all(f"]({grid.artefact.paper}/{grid.artefact.name}.md)" in page for grid in grids)


def test_the_scorecard_tells_what_was_compared(world):
    world.runs(NEW, 60.0, 60.0, 60.0)
    world.runs(OLD, 57.0, 57.0, 57.0)
    page = scorecard([grid_of(world, ABOVE % ", at: {eps: 1}")])
    # new is reproduced, old is above; the gain is 3 where 5 is printed, so below; the order holds.
    assert (
        "Of 7 claims in 1 table or figure 4 have been compared with numbers of ours; 2 of these (1 number and 1 order: "
        in page
    )
    assert "| ADP | 7 | 1 | 1 | 1 | 1 | 3 |" in page


def test_the_scorecard_says_what_its_words_mean_and_what_writes_it(world):
    lines = scorecard([grid_of(world)]).splitlines()
    for outcome in Outcome:
        (told,) = (line for line in lines if line.startswith(f"- *{outcome}*: "))
        assert told.endswith(f"{BADGES[outcome].meaning}.")
        assert lines.index("| outcome | claims |") < lines.index(told) < lines.index("## Papers")
    (command,) = (line for line in lines if "writes this page" in line)
    assert "`python -m dpbench.reproduce`" in command
    assert "docs/reproducing.md" in command


def test_dpbenchs_own_claims_have_a_row_and_are_in_no_other_number(world):
    """One of the paper's, one of ours which holds, one of ours which fails, one that waits for runs."""
    world.runs(NEW, 60.0, 60.0, 60.0)
    world.runs(OLD, 57.0, 57.0, 57.0)
    own = [order % ", at: {eps: 1}, own: true" for order in (ABOVE, BELOW)]
    grid = grid_of(world, ABOVE % ", at: {eps: 1}", *own, ABOVE % ", at: {eps: 8}, own: true")
    page = scorecard([grid])
    assert (
        "Of 7 claims in 1 table or figure 4 have been compared with numbers of ours; 2 of these (1 number and 1 order: "
        in page
    )
    assert "2 by training and 0 by computing. 3 have not been run." in page
    assert "dpbench's own claims about the papers, 3 orders" in page
    assert "2 of them have been compared, and 1 hold." in page
    assert "| ADP | 7 | 1 | 1 | 1 | 1 | 0 | 3 |" in page
    assert "| dpbench's own claims | 3 | 0 | 0 | 0 | 1 | 1 | 1 |" in page
    assert "| order fails | 0 |" in page
    assert "](adp/made_up.md) | 7 | 1 | 1 | 1 | 1 | 3 |" in page
    text = as_markdown(grid)
    assert "**7 claims**: 1 reproduced, 1 above, 1 below, 1 order holds, 3 not run." in text
    assert "Of dpbench's own, **3 claims**: 1 order holds, 1 order fails, 1 not run." in text


def test_the_scorecard_counts_derived_numbers_apart_whether_they_agree_or_not(world):
    world.runs(NEW, 60.0, 60.0, 60.0)
    world.runs(OLD, 57.0, 57.0, 57.0)
    derived = "\n".join(f"  - {{method: {row}, eps: 1, derived: made_up.md 2}}" for row in ("new", "old"))
    page = scorecard([grid_of(world, change=lambda text: text.replace("\nneeds:", f"\n{derived}\nneeds:"))])
    assert "1 have been compared with numbers of ours; 0 of these" in page  # the gain
    assert "are also 2 numbers that no paper prints: they follow from its formulas" in page
    assert "and do not count as compared. 1 agree with ours, and 1 do not." in page


def test_the_scorecard_names_the_newest_record(world):
    grid = grid_of(world)
    assert newest_record(origins_of([grid])) is None
    world.runs(NEW, 60.0, 60.0)
    for seed, origin in enumerate(
        (
            {"started": "2026-01-02T00:00:00+00:00", "commit": "b" * 40, "dirty": True},
            {"started": "2026-01-01T00:00:00+00:00", "commit": "a" * 40},
        )
    ):
        (world.results / "runs" / digest(NEW.split()) / str(seed) / "provenance.json").write_text(json.dumps(origin))
    grid = grid_of(world)
    newest = "2026-01-02T00:00:00+00:00, commit bbbbbbbbbbbb with changes"
    assert newest_record(origins_of([grid])) == newest
    # Both panels have the same two runs, of which one began with changes.
    told = f"Newest record: {newest}.\n1 of 2 runs behind cells began with changes that were in no commit.\n"
    assert told in scorecard([grid, grid])


def test_the_scorecard_tells_numbers_that_the_same_runs_reproduce_twice(world):
    """The same runs beside another number, or other runs beside the same one, are no repetition."""
    world.runs(NEW, 60.0, 60.0, 60.0)
    world.runs(OLD, 60.0, 60.0, 60.0)
    first = grid_of(world, change=lambda text: text.replace("| 55 ", "| 60 "))
    other = grid_of(world, change=lambda text: text.replace("60 ± 0.3", "60.1"))
    assert repeated([first]) is None
    assert repeated([first, other]) is None
    again = grid_of(world)
    told = "The 3 printed numbers reproduced by training are 2 distinct ones: in 1 place the same runs"
    assert told in repeated([first, again])
    assert told in scorecard([first, again])
