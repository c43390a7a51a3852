"""What becomes of every combination: the text that `golden/fakecuda/combinations.txt` holds.

python -m tests.fakecuda.matrix          runs all of them (minutes), and fails where one differs from the golden text
GENESIS_UPDATE_GOLDEN=1 python -m ...    writes the golden text again
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict

from tests.fakecuda.client import FakeDevice
from tests.fakecuda.combinations import Combination, all_combinations
from tests.golden.files import read_golden

GOLDEN = "fakecuda/combinations.txt"


def describe(device: FakeDevice, combination: Combination) -> str:
    """Runs a combination and returns its line: that it trains, or what refuses it."""
    result = device.run("fit", combination=asdict(combination))
    assert "refused" in result or result["kernels"]
    return f"{combination}: {result.get('refused', 'trains')}"


def golden_lines(fresh: str) -> dict[str, str]:
    """Returns the golden line of each combination."""
    return {line.partition(":")[0]: line for line in read_golden(GOLDEN, fresh).splitlines()}


def run_all(combinations: Iterable[Combination]) -> str:
    """Returns the lines of combinations, printed as they come."""
    device, lines = FakeDevice(), []
    for combination in combinations:
        try:
            lines.append(describe(device, combination))
        except AssertionError as error:  # the others run all the same
            lines.append(f"{combination}: fails, {str(error).splitlines()[0]}")
        print(lines[-1], flush=True)
    device.close()
    return "".join(f"{line}\n" for line in lines)


def main() -> int:
    """Runs all of them. Returns 1 where one differs."""
    began = time.monotonic()
    fresh = run_all(all_combinations())
    golden = golden_lines(fresh)
    differing = [line for line in fresh.splitlines() if golden.get(line.partition(":")[0]) != line]
    num_trained = fresh.count(": trains\n")
    print(f"{len(fresh.splitlines())} combinations, {num_trained} train, {time.monotonic() - began:.0f} s")
    for line in differing:
        print(f"not as in tests/golden/{GOLDEN}: {line}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
