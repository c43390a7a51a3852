"""Fails if a text has a phrase that the house style replaces but codespell's `words.txt` cannot express.

A rule is a regular expression with the words to use instead and the paths where it holds. A word that is right in other
contexts has a narrow rule: its paths, or the words around it, leave those contexts out. A line that needs the phrase,
such as a test of this check, ends with the comment `phrases: ignore`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
IGNORE = "phrases: ignore"
PACKAGES = ("genesis/", "callbacks/src/")
PLAIN = ("genesis/serve/", "genesis/cli/", "genesis/export/", "genesis/operations/release/", "configs/")
EVERYWHERE = ("",)
SKIPPED = (
    "tests/golden/",
    "callbacks/tests/golden/",
    "benchmarks/records/",
    "CHANGELOG.md",
    ".ci/",
    "tests/test_words.py",
)
"""Records of the past, the rules themselves, and their test."""


class Rule(NamedTuple):
    """A phrase and the words to use instead.

    Args:
        pattern: Matches the phrase in one line; `(?i)` ignores case.
        instead: The words to use.
        paths: Beginnings of the paths where the rule holds.
        but: Beginnings of paths where it does not.
    """

    pattern: str
    instead: str
    paths: tuple[str, ...] = EVERYWHERE
    but: tuple[str, ...] = ()


RULES = (
    Rule(r"(?i)\bskew watchdog\b", "desync watchdog"),
    Rule(r"(?i)\bput(s|ting)?[ _]((it|them)[ _])?aside\b", "quarantined"),
    Rule(r"(?i)\bta(ke|kes|ken|king) (it|them) away\b", "removes", (*PACKAGES, "docs/")),
    Rule(r"(?i)\bsays? so\b", "warns, is documented", (*PACKAGES, "docs/")),
    Rule(r"(?i)\bwhatever it was\b", "the condition, such as: under any dtype"),
    Rule(r"(?i)\bwas saved it is\b", "the order subject, verb, object"),
    Rule(r"(?i)\bby the way of\b", "by, with"),
    Rule(r"(?i)\b(training|(a|the) run) (goes|that goes) on\b", "continues", PACKAGES),
    Rule(r"^ +\w+: Whose\b", "a noun: the family whose names", PACKAGES),
    Rule(r"(?i): At most so (many|much)\b", "upper bound, maximum number", PACKAGES),
    Rule(r"^ +\w+: In evaluation mode\b", "the model, in evaluation mode", PACKAGES),
    Rule(r"(?i)\bbegun differently\b", "started with different options"),
    Rule(r"(?i)\ba word of it\b", "a warning"),
    Rule(r"(?i)\bits card has\b", "the model card lists"),
    Rule(r"(?<!there )\bis none\b(?! of)", "is invalid, does not exist", PACKAGES),
    Rule(r"(?i)\b(tells|told)\b", "prints, logs, reports", PACKAGES),
    Rule(r"(?i)\b(says|said)\b", "prints, logs, reports", PLAIN),
    Rule(r"(?i)\bdrawn\b", "consumed", ("genesis/data/",), ("genesis/data/inspect.py", "genesis/data/old_keys.py")),
    Rule(r"\bplaces\b", "positions, logits_to_keep", ("genesis/model/",)),
    Rule(r'"""Wh(o|at) ', "the subject itself: the client, the rank, the tensor", PLAIN),
    Rule(r"\bclass (Part|LocalPart)\b", "TensorShard, LocalShard", ("callbacks/src/",)),
    Rule(r"\bclass (Heading|Origin|Kept)\b", "RunMetadata, CommittedCheckpoint", PACKAGES),
    Rule(r"\bclass Layout\b", "AttentionMetadata", ("genesis/model/",)),
    Rule(r"\bclass Window\b", "AccumulationWindow", PACKAGES),
)


def find_phrases(name: str, text: str) -> Iterator[str]:
    """Yields a line for each phrase in the text of the file `name`, a path below the repository."""
    rules = [rule for rule in RULES if name.startswith(rule.paths) and not name.startswith((*rule.but, *SKIPPED))]
    for number, line in enumerate(text.splitlines(), 1):
        for rule in rules:
            found = re.search(rule.pattern, line)
            if found is not None and IGNORE not in line:
                yield f"{name}:{number}: {found[0]!r}: write {rule.instead}"


def list_texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yields name and text of each file that git tracks; files that are not text are skipped."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        path = root / name
        if name and path.is_file():
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def main() -> int:
    """Prints every phrase found; returns 1 if a phrase was found."""
    found = [line for name, text in list_texts(ROOT) for line in find_phrases(name, text)]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
