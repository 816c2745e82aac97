"""The local record of a run, which is the source of truth, and trackers that copy it elsewhere.

| module | subject |
|---|---|
| `record`, `provenance` | writing a record; where its numbers come from |
| `status`, `proven` | words for how a run stands; whether its eps is a guarantee |
| `shapes`, `safe_yaml`, `reading` | what a valid record is; reading one, whatever it holds |
| `damage`, `published` | keeping aside what can't be read; what was seen of a run, which outlasts its record |
| `lock`, `process` | one process at a time for a run; whether its holder has gone |
| `index`, `columns`, `values` | what all records say, as a table that follows the files; comparing settings |
| `wandb`, `wandb_mode` | Weights & Biases; whether it records online, offline or not at all |
| `tracker`, `background` | one of its runs; calls that nobody waits for |
"""

from dpbench.tracking.record import RunRecord
from dpbench.tracking.status import Status
from dpbench.tracking.tracker import Tracker
from dpbench.tracking.wandb import log_once, log_table, open_tracker
from dpbench.tracking.wandb_mode import tracker_line

__all__ = ["RunRecord", "Status", "Tracker", "log_once", "log_table", "open_tracker", "tracker_line"]
