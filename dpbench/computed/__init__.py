"""The tables and figures of the papers that need no training, by the program's own parts.

| module | subject |
|---|---|
| `catalogue` | which artefact is computed by what |
| `doppler`, `disk`, `adp`, `dp_pmlf`, `dc_sgd` | a function for each artefact: `Artefact` in, `Computed` out |
| `responses` | of filters, in time and frequency |
| `fingerprint` | what an artefact's numbers depend on |

A function gives the artefact's computed cells (`metric: computed`), whose overrides in conf/paper are its settings,
and the panels of a figure. Random draws are of the stream "synthetic", so every number comes out again.
"""

from dpbench.computed.run import compute_all

__all__ = ["compute_all"]
