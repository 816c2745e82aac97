"""Training: how a run is assembled and carried out.

| module | subject |
|---|---|
| `execution`, `assemble`, `loop` | one run from configuration to record; its parts; its steps |
| `keeping`, `checkpoint`, `resume`, `repeating`, `interruption` | what is kept of a run, stopping and going on |
| `budget`, `calibrating` | the noise multiplier for an eps |
| `evaluation`, `generation` | accuracy and loss of a split; texts |
| `leases`, `micro_batch`, `estimate` | whose GPU it is, what fits on a device, how long a run takes |
| `fusing`, `lockstep` | several seeds in one pass |
| `distributed`, `team`, `following`, `slices` | one run in several processes |
| `display` | what is printed meanwhile |
"""
