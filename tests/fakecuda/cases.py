"""What can be asked to run on the fake device, by name; each case runs in a process of its own."""

from collections.abc import Callable
from typing import Any, Final

from tests.fakecuda.combinations import Combination
from tests.fakecuda.fits import run_fit


def fit(combination: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Runs three steps; see `run_fit`."""
    return run_fit(Combination(**combination), **options)


CASES: Final[dict[str, Callable[..., Any]]] = {"fit": fit}
