"""python -m dpbench: the same as python -m dpbench.run."""

import sys

from dpbench.run import main

if __name__ == "__main__":
    sys.exit(main())
