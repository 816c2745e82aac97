"""What has been recorded: listing, comparing, exporting, checking and removing runs. Trains nothing.

| module | subject |
|---|---|
| `arguments` | what was typed |
| `selection` | which records are meant, by the settings of their runs or by their hashes |
| `listing`, `comparison` | tables |
| `export`, `sync` | CSV and Parquet; Weights & Biases |
| `integrity`, `checking` | what is wrong with one record; all of them, what killed runs left, and moving it away |
| `removal` | removing records |
"""
