"""Makes torch's profiler quiet, by which the doctor measures the memory of a step.

Importing this module changes no state. The table of commands calls `make_quiet` before it imports the doctor, because
torch reads the environment when it is imported.
"""

import os
from typing import Final

_VARIABLES: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}


def make_quiet() -> None:
    """Sets the variables that are not set."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
