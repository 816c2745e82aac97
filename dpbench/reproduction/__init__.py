"""From what the papers claim to runs: what is there, what is missing, what it takes, and carrying it out in a budget.

| module | subject |
|---|---|
| `arguments` | what was typed |
| `index`, `hashes` | which records can be a candidate's, without composing every configuration |
| `options` | what options mean, from their files alone |
| `facts`, `available` | what a candidate is, read from its options alone; whether its data and weights are here |
| `times` | how long its runs take on this device |
| `standing` | which runs a cell still asks for |
| `plan`, `show` | all of it together, and as text |
| `queue`, `launching` | running what is missing, cheapest first |
| `smoke` | a few steps of one cell of every artefact |
"""
