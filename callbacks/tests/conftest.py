"""These tests run with genesis absent, as in other people's projects, even where it is installed."""

import os
import sys
from pathlib import Path

WITHOUT_GENESIS = str(Path(__file__).parent / "without_genesis")

sys.path.insert(0, WITHOUT_GENESIS)
# Ranks, writers and programs that tests start find it first too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WITHOUT_GENESIS, os.environ.get("PYTHONPATH"))))
