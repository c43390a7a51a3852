"""Runs the command line as `python -m genesis`."""

import sys

from genesis.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
