"""Training: how a run is assembled and carried out.

| module | subject |
|---|---|
| `execution`, `preparing`, `assemble` | one run from configuration to record; what it needs for that; its parts |
| `loop`, `losses`, `padding`, `recorder` | its steps; their losses; whether padding is read; gradients that are kept |
| `job_record`, `summary` | where a run's record is and what settings it holds; what the run came to |
| `keeping`, `checkpoint`, `resume`, `repeating`, `interruption` | what is kept of a run, stopping and going on |
| `budget`, `calibrating` | the noise multiplier for an eps |
| `loading`, `evaluation`, `generation` | the splits; accuracy and loss of one; texts |
| `leases`, `micro_batch`, `estimate` | whose GPU it is, what fits on a device, how long a run takes |
| `fusing`, `lockstep` | several seeds in one pass |
| `distributed`, `team`, `following`, `slices` | one run in several processes |
| `torchrun`, `contact`, `shared_sources` | which these are; what they say to each other; what one draws for all |
| `display` | what is printed meanwhile |
"""
