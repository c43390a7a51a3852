"""Panics of the library `tokenizers`: no `Exception` in Python, and printed on standard error by Rust itself."""

import contextlib
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

from genesis.base.errors import UserError, is_panic

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner")
_STDERR = 2


def refusing_panics(
    method: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """Turns a panic of a tokenizer's method into a UserError about the text that it was given."""

    @functools.wraps(method)
    def call(self: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if is_panic(error):
                raise UserError(f"its library fails on a text ({error}); use another tokenizer") from None
            raise

    return call


@contextlib.contextmanager
def without_panics_printed() -> Iterator[None]:
    """Drops what the process prints on standard error within the block if it ends with an error.

    The lines of a panic come from Rust and cannot be turned off: they would stand above the line of the error. After a
    block without an error all that was printed follows. A thread beside the main one drops nothing.
    """
    if threading.current_thread() is not threading.main_thread():  # others may start programs, which inherit the stream
        yield
        return
    with tempfile.TemporaryFile() as held:
        before = os.dup(_STDERR)
        os.dup2(held.fileno(), _STDERR)
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            os.dup2(before, _STDERR)
            os.close(before)
            held.seek(0)
            if not has_failed and (printed := held.read()):
                os.write(_STDERR, printed)
