"""Discards an algorithm's options where a later file, or the command line, names another algorithm."""

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
    """Discards the options of an algorithm that another one replaces: Lion does not learn at AdamW's rate.

    jsonargparse keeps the options that both classes have, defaults included. That is right for strategies.
    """
    path = before.get("class_path") if isinstance(before, Namespace) else None
    if path is not None and before.get("init_args") and path != now["class_path"]:
        replaced = _HINTS.import_object(path)
        if inspect.isclass(replaced) and issubclass(replaced, Algorithm):
            before["init_args"] = Namespace()  # type: ignore[no-untyped-call]  # jsonargparse's
    _discard(parser, before, now)
