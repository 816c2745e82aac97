"""The arguments of python -m dpbench.results: a verb, conditions, and key=value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dpbench.errors import UserError, require
from dpbench.results.selection import Selection
from dpbench.wording import flag_of, folder_of

WHICH = "[HASH | SETTING=VALUE[,VALUE] ...]"
USAGE = f"""\
python -m dpbench.results VERB {WHICH} [KEY=VALUE] ...

What has been recorded below results_dir (default: results). Runs are named by the beginning of their hashes, with
/SEED if need be, or by their settings, all of which must hold. VERB --help tells of one verb alone.
"""
SETTINGS = """\
SETTING is a dotted name (optim.lr), a group (dataset, filter) or one of
  seed, status (running, finished, interrupted, diverged, failed, invalid, damaged), accuracy and best (of the test
  split, 0 to 1), steps, spent (eps by summary.json or, where there is none, ledger.json), search_eps (of the search
  that a run is charged for), seconds, commit, age (of a run, such as 30m or 2d), or what a record holds: summary.*,
  provenance.*
=, != take several values; <, <=, >, >= compare numbers and want quotes in most shells.
"""
EXITS = """\
Exit codes: 0; 1, something is wrong with a record, or W&B failed; 2, bad input; 130, interrupted.
"""
BETWEEN = "vs"


@dataclass(frozen=True)
class Verb:
    """What one verb does, and how its help tells it.

    Attributes:
        which: what it takes to say which runs.
        purpose: what it does with them.
        examples: lines of a shell.
        keys: what its keys are for.
        options: its keys besides results_dir, with their defaults.
    """

    which: str
    purpose: str
    examples: str
    keys: str
    options: dict[str, str] = field(default_factory=dict)


VERBS = {
    "list": Verb(
        which=WHICH,
        purpose="A table of runs below results_dir (default: results).",
        examples="""\
  python -m dpbench.results list algo=disk eps=8 optim.lr=0.5,1.0 status=finished     a table, the newest first
  python -m dpbench.results list 'accuracy>0.9' 'age<2d' sort=-accuracy limit=20 columns=optim.lr,filter
""",
        keys="""\
list     sort      a setting, with - before it from the largest (default: age)
         limit     rows at most; 0 for all (default: 50)
         columns   further settings to show
""",
        options={"sort": "age", "limit": "50", "columns": ""},
    ),
    "compare": Verb(
        which=f"{WHICH} [vs ...]",
        purpose="Configurations or groups of runs below results_dir (default: results), side by side.",
        examples="""\
  python -m dpbench.results compare ddbf d5767                  settings that differ, results as mean ± std over seeds
  python -m dpbench.results compare algo=disk eps=8 vs algo=dpsgd eps=8
""",
        keys="""\
compare  without vs, each matching configuration is a column
""",
    ),
    "export": Verb(
        which=WHICH,
        purpose="Writes runs below results_dir (default: results) to a file, or sends them to Weights & Biases.",
        examples="""\
  python -m dpbench.results export dataset=mnist to=runs.csv    or runs.parquet: a row for each run, all settings
  python -m dpbench.results export algo=disk to=wandb           to Weights & Biases; once more makes no second run
""",
        keys="""\
export   to        a file that ends in .csv or .parquet, or wandb
         project, entity, mode    of W&B (default: those of each run; mode=auto is online where a key is known). Runs
                   that W&B has recorded while they ran are left out, unless tracker.mode says otherwise
""",
        options={"to": "", "project": "", "entity": "", "mode": "auto"},
    ),
    "check": Verb(
        which="[HASH] ...",
        purpose="Looks whether the files of records below results_dir (default: results) are whole and agree.",
        examples="""\
  python -m dpbench.results check                               are all files whole, and do they agree?
""",
        keys="""\
check    quarantine    true: what is wrong is moved to <results_dir>/quarantine, and is run again next time
         quiet     a run counts as killed if it has written nothing for so long (default: 1h)
""",
        options={"quarantine": "false", "quiet": "1h"},
    ),
    "remove": Verb(
        which=WHICH,
        purpose="Removes records below results_dir (default: results), which are shown first.",
        examples="""\
  python -m dpbench.results remove status=failed,interrupted    shows what would go; yes=true removes it
""",
        keys="""\
remove   yes       true: remove it. Finished runs go only if named by hash or by status=finished
""",
        options={"yes": "false"},
    ),
}


@dataclass(frozen=True)
class Arguments:
    """What was asked for.

    Attributes:
        verb: one of `VERBS`.
        selections: which records; several only where groups are compared.
        options: the verb's keys.
        results_dir: folder of the records.
    """

    verb: str
    selections: tuple[Selection, ...] = (Selection(),)
    options: dict[str, str] = field(default_factory=dict)
    results_dir: Path = Path("results")

    @property
    def selection(self) -> Selection:
        """Which records, for verbs that take one group."""
        return self.selections[0]

    def flag(self, key: str) -> bool:
        """An option that is true or false."""
        return flag_of(key, self.options[key])


def help_text(typed: Sequence[str]) -> str:
    """What --help prints: of the verb that was typed, or of all."""
    name = next((word for word in typed if word in VERBS), None)
    if name is None:
        examples = "".join(verb.examples for verb in VERBS.values())
        keys = "".join(verb.keys for verb in VERBS.values())
        return "\n".join((USAGE, examples, SETTINGS, keys, EXITS))
    verb = VERBS[name]
    head = f"python -m dpbench.results {name} {verb.which} [KEY=VALUE] ...\n\n{verb.purpose}\n"
    return "\n".join((head, verb.examples, *([] if name == "check" else [SETTINGS]), verb.keys, EXITS))


def parse(typed: Sequence[str]) -> Arguments:
    """The arguments of a command line; reads nothing.

    Raises:
        UserError: there is no such verb, a word is no condition, or a key stands there twice.
    """
    verb = typed[0] if typed else ""
    if verb not in VERBS:
        raise UserError(
            f"{verb or 'nothing typed'}: expected one of {', '.join(VERBS)} first; --help tells what they do"
        )
    options = VERBS[verb].options
    given: dict[str, str] = {}
    groups: list[list[str]] = [[]]
    for word in typed[1:]:
        key, separator, value = word.partition("=")
        if separator and key in (*options, "results_dir"):
            require(key not in given, key, value, "once")
            given[key] = value
        elif word == BETWEEN:
            groups.append([])
        else:
            groups[-1].append(word)
    if len(groups) > 1 and verb != "compare":
        raise UserError(f"{BETWEEN}: only compare takes several groups of runs")
    if len(groups) > 1 and not all(groups):
        raise UserError(f"{BETWEEN}: expected hashes or settings on both of its sides")
    folder = folder_of("results_dir", given.pop("results_dir", "results"))
    if verb == "check" and any("=" in word or "<" in word or ">" in word for word in groups[0]):
        raise UserError(f"{' '.join(groups[0])}: check takes hashes alone; by default it looks at all records")
    selections = tuple(Selection.parse(group) for group in groups)
    return Arguments(verb, selections, options | given, folder)
