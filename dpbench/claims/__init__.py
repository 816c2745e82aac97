"""What the papers claim, and what the records say about it. Reads files and records, imports nothing of training.

A file conf/paper/<paper>/<artefact>.yaml is one table or figure:

| key | content |
|---|---|
| `title`, `source` | what it is, and the section of the notes (docs/reproducing.md) |
| `kind`, `reason` | trained, computed or not reproducible; the last two say how or why |
| `rows`, `columns` | axes; of each its labels, with the overrides that they stand for |
| `common`, `where`, `each` | overrides of all cells, of those named by labels, and of single cells as a table |
| `values` | the numbers as printed, a table as text; or "not printed" |
| `derived` | the section that works out the `values` where the paper prints none; they are judged and counted apart |
| `sparse` | true: only rows that `values` lists exist |
| `seeds`, `statistic`, `metric`, `unit`, `tolerance` | which number of how many runs is compared, and how closely |
| `draw` | x, lines, panels or y: the axes of a figure; x may be epoch, step, frequency or value; or none |
| `needs` | weights, and hours of a run on a GPU as the notes estimate them |
| `taken_over` | true: the `values` are settings that runs here take over from the paper, and no results |
| `claims` | orders, trends, words; `printed: false`: the paper's numbers contradict it; `own: true`: not the paper's |
| `deviations`, `readings` | what is done otherwise, and what the paper leaves open, with references |

An override with several values, ``optim.lr=0.1,0.2``, is a search: the cell is the best of it. Lines of `where` may
also say that cells are absent, quoted from another publication, or the difference of two others (`minus`). A computed
number (`metric: computed`) has settings of what computes it for overrides (`dpbench.computed`), and is looked up in
<results_dir>/computed/<paper>/<artefact>.json by its place in words, such as "data MNIST, delta here".
"""

from dpbench.claims.evidence import Evidence, Measured, Run
from dpbench.claims.finding import Finding, Lack, Outcome
from dpbench.claims.load import load_all, load_artefact
from dpbench.claims.needs import cost
from dpbench.claims.schema import SECTIONS, Artefact, Cell, Claim, Kind
from dpbench.claims.scorecard import JudgedCell, Judgement, Scorecard, examine

__all__ = [
    "SECTIONS",
    "Artefact",
    "Cell",
    "Claim",
    "Evidence",
    "Finding",
    "JudgedCell",
    "Judgement",
    "Kind",
    "Lack",
    "Measured",
    "Outcome",
    "Run",
    "Scorecard",
    "cost",
    "examine",
    "load_all",
    "load_artefact",
]
