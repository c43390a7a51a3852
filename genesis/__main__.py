"""Runs the command line as `python -m genesis`."""

import sys

from genesis.cli.program import run

if __name__ == "__main__":
    sys.exit(run())
