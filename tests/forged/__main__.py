"""The command of `tests.forged`."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.forged import families, imports, manifests, requests, sources, templates
from tests.forged.operators import Case
from tests.forged.runner import Outcome, Runner, summarise

KINDS: dict[str, Callable[[int, Path], Iterator[Case]]] = {
    "import": imports.iterate_cases,
    "template": templates.iterate_cases,
    "manifest": manifests.iterate_cases,
    "data": sources.iterate_cases,
    "family": families.iterate_cases,
}


def main() -> int:
    """Runs the cases, prints each failure as JSON and a table at the end; the status is 1 after a failure."""
    parser = argparse.ArgumentParser("tests.forged")
    parser.add_argument("directory", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("kinds", nargs="*", default=[*KINDS, "request"])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", type=re.compile, default="")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    runner = Runner(options.directory.resolve() / "forged", has_families="family" in options.kinds)
    outcomes: list[Outcome] = []
    for kind in options.kinds:
        if kind == "request":
            found = requests.run(runner, options.seed, options.every)
        else:
            cases = [case for case in KINDS[kind](options.seed, runner.mark) if re.search(options.only, case.name)]
            found = runner.run(cases[:: options.every])
        for outcome in found:
            outcomes.append(outcome)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            if outcome.problems:
                print(json.dumps(dataclasses.asdict(outcome)), file=sys.stderr, flush=True)
    print(summarise(outcomes))
    return int(any(one.problems for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
