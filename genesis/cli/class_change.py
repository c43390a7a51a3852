"""What jsonargparse keeps of an algorithm's options where a later file, or the command line, names another one."""

import inspect
from typing import Any, Final

from jsonargparse import Namespace, _typehints

from genesis.optim import Algorithm

_HINTS: Final[Any] = _typehints
_discard: Final = _HINTS.discard_init_args_on_class_path_change


def guard_class_changes() -> None:
    """Puts the function of this module in the place of that of jsonargparse."""
    _HINTS.discard_init_args_on_class_path_change = _discard_options


def _discard_options(parser: Any, before: Any, now: Any) -> None:
    """Discards the options of an algorithm that another one replaces: a rate for one is none for the other.

    jsonargparse keeps what both classes have, defaults included. That is right for strategies, which share options.
    """
    if before and before.get("init_args") and before["class_path"] != now["class_path"]:
        replaced = _HINTS.import_object(before["class_path"])
        if inspect.isclass(replaced) and issubclass(replaced, Algorithm):
            before["init_args"] = Namespace()  # type: ignore[no-untyped-call]  # jsonargparse's
    _discard(parser, before, now)
