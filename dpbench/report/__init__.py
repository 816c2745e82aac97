"""Tables, figures and the scorecard of recorded runs. Reads records, knows nothing of training."""

from dpbench.report.grid import Entry, Grid, build_grid
from dpbench.report.output import write_output

__all__ = ["Entry", "Grid", "build_grid", "write_output"]
