"""python -m dpbench.privacy."""

import sys

from dpbench.cli.starting import starting
from dpbench.garbage import uncollected

with starting(), uncollected():
    from dpbench.cli.privacy import main

if __name__ == "__main__":
    sys.exit(main())
