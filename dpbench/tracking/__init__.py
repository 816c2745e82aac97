"""The local record of a run, which is the source of truth, and trackers that copy it elsewhere."""

from dpbench.tracking.record import RunRecord, Status
from dpbench.tracking.wandb import Tracker, log_once, log_table, open_tracker, tracker_line

__all__ = ["RunRecord", "Status", "Tracker", "log_once", "log_table", "open_tracker", "tracker_line"]
