"""The first acts of a fit, before Lightning is imported: it forks the writer of checkpoints and imports torchmetrics.

The writer and this process then share one import of torch. Lightning imports torchmetrics, which imports SciPy,
transformers and Matplotlib wherever they are installed: a third of the time that a fit takes to its first step. No
metric of genesis needs them.
"""

import importlib
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import lightning_utilities.core.imports as requirements

from genesis_callbacks.base.untrusted import read_text
from genesis_callbacks.checkpoint.writer_start import start_writer, start_writer_early

_HIDDEN: Final = frozenset({"matplotlib", "regex", "scipy", "transformers"})
_NAME: Final = re.compile(r"[\w-]+")
_CLASS: Final = re.compile(r"\b([A-Za-z_]\w*)(?:\.\w+)*\.[A-Z]\w*\b")
_OURS: Final = frozenset({"genesis", "genesis_callbacks", "lightning", "torch"})
_NO_WRITER: Final = re.compile(
    r"--print_config|--fast_dev_run|--help|\bmode\b\W+(?:thread|sync)\b|fast_dev_run: *[^f\s]"
)
_MAX_PATH: Final = 4096
_CODE: Final = re.compile(r"\.py\b")


class _Requirement(requirements.RequirementCache):
    """A package that torchmetrics may want."""

    def __bool__(self) -> bool:
        name = _NAME.match(self.requirement or "")
        return (name is None or name[0] not in _HIDDEN) and super().__bool__()


def begin_fit(arguments: Sequence[str]) -> None:
    """Forks the writer, unless the arguments or recipes show that the fit needs none, and imports torchmetrics."""
    # A process that has imported torch before may have used it. Only before that, without other threads, and on Linux
    # is a fork safe.
    if "torch" not in sys.modules and not any(_NO_WRITER.search(text) for text in _read_all(arguments)):
        start = start_writer
        if sys.platform == "linux" and threading.active_count() == 1:
            start = importlib.import_module("genesis_callbacks.checkpoint.forked_writer").fork_writer
        start_writer_early(start)
    import_torchmetrics(arguments)


def import_torchmetrics(arguments: Sequence[str]) -> None:
    """Imports torchmetrics; all of it if the arguments or recipes name code of others, which may need it."""
    if "torchmetrics" in sys.modules or names_others(arguments):
        return
    before = requirements.RequirementCache, requirements.package_available
    requirements.RequirementCache = _Requirement  # type: ignore[misc]
    requirements.package_available = lambda name: name not in _HIDDEN and before[1](name)  # type: ignore[assignment]
    try:
        importlib.import_module("torchmetrics")
    finally:
        requirements.RequirementCache, requirements.package_available = before  # type: ignore[misc]


def names_others(arguments: Sequence[str]) -> bool:
    """Returns whether arguments, or files that they name, have the name of a class or a file of somebody else's code.

    Example:
        >>> names_others(["--trainer.callbacks", "mine.metrics.BertScore"])
        True
        >>> names_others(["--trainer.strategy.class_path=genesis.strategies.Sharded", "--data.seq_len", "16"])
        False
    """
    return any(_CODE.search(text) or not _OURS.issuperset(_CLASS.findall(text)) for text in _read_all(arguments))


def _read_all(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments in one text, and the texts of the files that they name."""
    words = [part for word in arguments for part in (word, word.partition("=")[2])]
    files = [path for word in words if word and len(word) < _MAX_PATH and (path := Path(word)).is_file()]
    return [" ".join(arguments), *(read_text(path, errors="replace") for path in files)]
