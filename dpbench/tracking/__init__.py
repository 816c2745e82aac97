"""The local record of a run, which is the source of truth, and trackers that copy it elsewhere.

| module | subject |
|---|---|
| `record`, `provenance` | writing a record; where its numbers come from |
| `status`, `proven` | words for how a run stands; whether its eps is a guarantee |
| `shapes`, `safe_yaml`, `reading` | what a valid record is; reading one, whatever it holds |
| `damage`, `published` | keeping aside what can't be read; what was seen of a run, which outlasts its record |
| `lock`, `process` | one process at a time for a run; whether its holder has gone |
| `index`, `columns`, `values` | what all records say, as a table that follows the files; comparing settings |
| `wandb`, `background` | Weights & Biases; calls that nobody waits for |
"""

from dpbench.tracking.record import RunRecord
from dpbench.tracking.status import Status
from dpbench.tracking.wandb import Tracker, log_once, log_table, open_tracker, tracker_line

__all__ = ["RunRecord", "Status", "Tracker", "log_once", "log_table", "open_tracker", "tracker_line"]
