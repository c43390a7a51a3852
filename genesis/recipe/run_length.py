"""How long a run trains, and what an option of the command line replaces in a recipe. Pure.

One option says how long: `data.num_epochs`, `data.num_tokens`, `trainer.max_steps` or `trainer.max_epochs`. Given on
the command line, it replaces the one that the recipe has. So do the forms of a warm-up and of a decay, and the learning
rate, which is also that of adapters unless they get their own on the command line. Of two files the later one replaces
in the same way.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from genesis.base.errors import UserError

MAX_STEPS: Final = "trainer.max_steps"
_NO_NUMBER: Final = {"-1", "null", "None", "~", ""}
"""How an option says that it sets no length."""
_DATA_LENGTHS: Final = ("data.num_epochs", "data.num_tokens", "trainer.max_epochs")
_TOTAL: Final = "schedule.total_updates"
_GROUPS: Final = (
    {MAX_STEPS: "-1", "trainer.max_epochs": "-1", "data.num_epochs": "null", "data.num_tokens": "null"},
    {"schedule.warmup_updates": "null", "schedule.warmup_tokens": "null", "schedule.warmup_share": "null"},
    {"schedule.decay_updates": "null", "schedule.decay_tokens": "null", "schedule.decay_share": "null"},
)
"""Options of which only one has a value, each with the value that means none."""
_RATE: Final = ("model.optimizer.lr", "model.optimizer.adapter_lr")
OPTIONS: Final = (*(name for group in _GROUPS for name in group), _TOTAL, *_RATE)
"""All options that this module knows."""


def find_replaced(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of a recipe that the command line replaces, each with the value that means none.

    A length in epochs or tokens also replaces `schedule.total_updates`, which counts the steps of the recipe's own
    length. `trainer.max_steps` does not: a run may stop early on purpose, and be continued.

    Args:
        given: The options of the command line, with their values as text.

    Example:
        >>> find_replaced({"schedule.warmup_share": "0.1"})
        {'schedule.warmup_updates': 'null', 'schedule.warmup_tokens': 'null'}
        >>> find_replaced({"trainer.max_steps": "-1"})
        {}
    """
    has_value = {name for name, value in given.items() if value not in _NO_NUMBER}
    replaced: dict[str, str] = {}
    for group in _GROUPS:
        if has_value & group.keys():
            replaced |= group
    if has_value.intersection(_DATA_LENGTHS):
        replaced[_TOTAL] = "null"
    lr, adapter_lr = _RATE
    if lr in has_value:
        replaced[adapter_lr] = "null"
    return {name: none for name, none in replaced.items() if name not in given}


def check_lengths(given: Mapping[str, str]) -> None:
    """Refuses options of one command line of which two set the length of a run.

    Args:
        given: The options of the command line, with their values as text.

    Raises:
        UserError: Two of them do.
    """
    names = (MAX_STEPS, "data.num_epochs", "data.num_tokens")
    found = [f"{name} {given[name]}" for name in names if given.get(name, "") not in _NO_NUMBER]
    if len(found) > 1:
        raise UserError(f"{' and '.join(found)} each set how long to train: leave one out")


def replace_in_files(files: Iterable[tuple[str, Mapping[str, str]]]) -> tuple[dict[str, str], list[str]]:
    """Returns the options of files that later files replace, each with the value that means none, and lines about them.

    Args:
        files: Name and options of each file, in their order.

    Example:
        >>> replace_in_files([("a", {"trainer.max_steps": "9"}), ("b", {"data.num_epochs": "2"})])
        ({'trainer.max_steps': '-1'}, ['b: data.num_epochs 2 replaces trainer.max_steps 9 of a'])
    """
    held: dict[str, tuple[str, str]] = {}
    replaced: dict[str, str] = {}
    lines: list[str] = []
    for file, given in files:
        own = {shorten(name): value for name, value in given.items() if shorten(name) in OPTIONS}
        for name, none in find_replaced(own).items():
            if name in held:
                value, earlier = held.pop(name)
                replaced[name] = none
                by = next(each for each in own if name in find_replaced({each: own[each]}))
                lines.append(f"{file}: {by} {own[by]} replaces {name} {value} of {earlier}")
        for name in own:
            replaced.pop(name, None)
        held |= {name: (value, file) for name, value in own.items() if value not in _NO_NUMBER}
    return replaced, lines


def shorten(name: str) -> str:
    """Returns the name of an option of a class as the command line may have it, without `init_args`."""
    return name.replace(".init_args.", ".")


def count_steps_of_tokens(num_tokens: int, *, position: int, seq_len: int, global_batch_size: int) -> int:
    """Returns the number of steps from a position on until a run has trained on so many tokens, padding included.

    Example:
        >>> count_steps_of_tokens(1000, position=0, seq_len=16, global_batch_size=8)
        8
    """
    num_sequences = -(-num_tokens // seq_len) - position
    return max(0, -(-num_sequences // global_batch_size))
