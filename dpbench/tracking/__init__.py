"""The local record of a run, which is the source of truth, and trackers that copy it elsewhere.

| module | subject |
|---|---|
| `record`, `provenance` | writing a record |
| `shapes`, `reading` | what a valid record is; reading one, whatever it holds |
| `index`, `columns`, `values` | what all records say, as a table that follows the files; comparing settings |
| `wandb` | Weights & Biases |
"""

from dpbench.tracking.record import RunRecord
from dpbench.tracking.status import Status
from dpbench.tracking.wandb import Tracker, log_once, log_table, open_tracker, tracker_line

__all__ = ["RunRecord", "Status", "Tracker", "log_once", "log_table", "open_tracker", "tracker_line"]
