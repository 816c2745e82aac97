"""Training: how a run is assembled and carried out.

| module | subject |
|---|---|
| `execution`, `assemble`, `loop` | one run from configuration to record; its parts; its steps |
| `keeping`, `checkpoint`, `resume`, `interruption` | what is kept of a run, stopping and going on |
| `budget`, `calibrating` | the noise multiplier for an eps |
| `evaluation`, `generation` | accuracy and loss of a split; texts |
| `schedules` | step sizes over time |
| `devices`, `leases`, `micro_batch`, `estimate` | where a run computes, what fits there, how long it takes |
| `fusing`, `lockstep` | several seeds in one pass |
| `distributed`, `team`, `following`, `slices` | one run in several processes |
| `randomness` | named random streams |
| `display` | what is printed meanwhile |
"""
