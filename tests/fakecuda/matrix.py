"""What becomes of every combination: the texts that `golden/fakecuda/combinations.txt` and `tuned.txt` hold.

python -m tests.fakecuda.matrix          runs all of them (minutes), and fails where one differs from its golden text
GENESIS_UPDATE_GOLDEN=1 python -m ...    writes the golden text again
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

from tests.fakecuda.client import FakeDevice
from tests.fakecuda.combinations import Combination, all_combinations, choose_pairwise, tuned_combinations
from tests.fakecuda.repeatable import is_refused
from tests.golden.files import read_golden

GOLDEN = "fakecuda/combinations.txt"
TUNED_GOLDEN = "fakecuda/tuned.txt"
"""Of fine-tuning: every pair of options, with the places at which a step waits for the device."""


def describe(device: FakeDevice, combination: Combination) -> str:
    """Runs a combination and returns its line: that it trains, or what refuses it."""
    result = device.run("fit", combination=asdict(combination))
    assert "refused" in result or result["kernels"]
    assert not any(map(is_refused, result.get("operators", ())))
    return f"{combination}: {result.get('refused', 'trains')}"


def describe_tuned(device: FakeDevice, combination: Combination) -> str:
    """Runs a combination that fine-tunes and returns its line: what refuses it, or where a step waits."""
    result = device.run("fit", combination=asdict(combination))
    if "refused" in result:
        return f"{combination}: {result['refused']}"
    assert result["kernels"]
    assert not any(map(is_refused, result["operators"]))
    return f"{combination}: waits for {', '.join(f'{count} {key}' for key, count in sorted(result['syncs'].items()))}"


def golden_lines(fresh: str, golden: str = GOLDEN) -> dict[str, str]:
    """Returns the golden line of each combination."""
    return {line.partition(":")[0]: line for line in read_golden(golden, fresh).splitlines()}


def run_all(
    combinations: Iterable[Combination], describe_one: Callable[[FakeDevice, Combination], str] = describe
) -> str:
    """Returns the lines of combinations, printed as they come."""
    device, lines = FakeDevice(), []
    for combination in combinations:
        try:
            lines.append(describe_one(device, combination))
        except AssertionError as error:  # the others run all the same
            lines.append(f"{combination}: fails, {str(error).splitlines()[0]}")
        print(lines[-1], flush=True)
    device.close()
    return "".join(f"{line}\n" for line in lines)


def main() -> int:
    """Runs all of them. Returns 1 where one differs."""
    began, differing = time.monotonic(), []
    parts = (
        (GOLDEN, run_all(all_combinations())),
        (TUNED_GOLDEN, run_all(choose_pairwise(tuned_combinations()), describe_tuned)),
    )
    for name, fresh in parts:
        golden = golden_lines(fresh, name)
        differing += [(name, line) for line in fresh.splitlines() if golden.get(line.partition(":")[0]) != line]
        num_trained = fresh.count(": trains\n") + fresh.count(": waits for ")
        print(f"{len(fresh.splitlines())} combinations, {num_trained} train, {time.monotonic() - began:.0f} s")
    for name, line in differing:
        print(f"not as in tests/golden/{name}: {line}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
