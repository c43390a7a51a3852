"""Limits on what a chat template may compute: a template that loops for long, or writes very long texts, is refused.

Iterations, calls of macros and characters are counted, so that the same template is refused on every machine. The time
is limited, too, for templates that spend it in few but costly operations. One operation is never interrupted.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS: Final = 1_000_000
"""Iterations of loops and calls of macros in one text."""
MAX_CHARS: Final = 64_000_000
"""Characters that one text's loops, expressions and operators write."""
MAX_SECONDS: Final = 30.0
_STEPS_PER_LOOK: Final = 256


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template exceeds a limit."""


class _Spent(threading.local):
    """What the text that this thread renders has used; nothing is counted while a template is compiled."""

    is_active = False
    num_steps = 0
    num_chars = 0
    deadline = 0.0


class Counting(Extension):
    """Counts steps and characters. The calls are nodes of the extension, which no template can replace."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._spent = _Spent()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Counts from zero within the `with`, for this thread."""
        spent = self._spent
        spent.is_active, spent.num_steps, spent.num_chars = True, 0, 0
        spent.deadline = time.monotonic() + MAX_SECONDS
        try:
            yield
        finally:
            spent.is_active = False

    def step(self, num_chars: int) -> bool:
        """Counts an iteration or a call that writes so many characters of the template itself; returns True."""
        spent = self._spent
        spent.num_steps += 1
        if spent.num_steps > MAX_STEPS:
            raise TemplateLimitError(f"its loops and macros take more than {MAX_STEPS:,} steps; simplify it")
        if spent.num_steps % _STEPS_PER_LOOK == 0 and spent.is_active and time.monotonic() > spent.deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:.0f} s; simplify it")
        self.charge(num_chars)
        return True

    def charge(self, num_chars: int) -> None:
        """Counts characters."""
        if not self._spent.is_active:
            return
        self._spent.num_chars += num_chars
        if self._spent.num_chars > MAX_CHARS:
            raise TemplateLimitError(f"it writes more than {MAX_CHARS:,} characters; shorten what it repeats")

    def join(self, *parts: Any) -> str:
        """The operator `~`."""
        texts = [str(part) for part in parts]
        self.charge(sum(map(len, texts)))
        return "".join(texts)

    def insert_steps(self, template: nodes.Template) -> None:
        """Adds a step to each loop and macro of a parsed template, and replaces the operator `~`."""
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            num_chars = sum(len(data.data) for part in node.body for data in _find(part, nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(self._call("step", num_chars)))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(self._call("step", 0), node.test)
        _replace_joins(template, self)
        template.set_environment(self.environment)

    def _call(self, name: str, num_chars: int) -> nodes.Call:
        return self.call_method(name, [nodes.Const(num_chars)])


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox in which templates run, with limits."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_extension(Counting)
        self.finalize = self._charge_output

    @property
    def counting(self) -> Counting:
        """The extension that counts."""
        found = self.extensions[Counting.identifier]
        assert isinstance(found, Counting)
        return found

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        self.counting.insert_steps(source)
        return super()._generate(source, *arguments, **options)

    def _charge_output(self, value: Any) -> Any:
        self.counting.charge(len(value) if isinstance(value, str) else 1)
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator whose result may be long, if it is not too long."""
        if operator == "+":
            self.counting.charge(_length_of(left) + _length_of(right))
        elif operator == "*":
            times = next((one for one in (left, right) if isinstance(one, int)), 1)
            self.counting.charge(max(_length_of(left), _length_of(right)) * max(0, times))
        elif not (isinstance(left, int | float) and isinstance(right, int | float) and abs(right) <= _MAX_EXPONENT):
            raise TemplateLimitError(f"it computes a power with an exponent above {_MAX_EXPONENT}; write the number")
        return super().call_binop(context, operator, left, right)


_MAX_EXPONENT: Final = 64


def _length_of(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _find(node: nodes.Node, kind: type[nodes.TemplateData]) -> Iterator[nodes.TemplateData]:
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)


def _replace_joins(node: nodes.Node, counting: Counting) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            _replace_joins(value, counting)
            setattr(node, name, _replaced(value, counting))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_joins(item, counting)
                    value[index] = _replaced(item, counting)


def _replaced(node: nodes.Node, counting: Counting) -> nodes.Node:
    return counting.call_method("join", node.nodes) if isinstance(node, nodes.Concat) else node
