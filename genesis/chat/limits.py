"""Limits on what a chat template may compute: a template that loops for long, or writes very long texts, is refused.

Iterations, calls of macros and characters are counted, so that the same template is refused on every machine. The time
of the processor is limited, too, for templates that spend it in few but costly operations. One operation is never
interrupted: what a filter, a method of a text or an operator would write is bounded before it runs
(`genesis.chat.operations`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from genesis.chat.operations import (
    TemplateLimitError,
    bound_filter,
    bound_test,
    check_format,
    check_method,
    check_nesting,
    check_power,
    check_product,
)

MAX_STEPS: Final = 1_000_000
"""Iterations of loops and calls of macros in one text."""
MAX_CHARS: Final = 64_000_000
"""Characters that one text's loops, expressions and operators write."""
MAX_SECONDS: Final = 10.0


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
        spent.deadline = time.thread_time() + MAX_SECONDS
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
        self.charge(num_chars)
        return True

    def charge(self, num_chars: int) -> None:
        """Counts characters, and looks at the time."""
        if not self._spent.is_active:
            return
        if time.thread_time() > self._spent.deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:.0f} s; simplify it")
        self._spent.num_chars += num_chars
        if self._spent.num_chars > MAX_CHARS:
            raise TemplateLimitError(f"it writes more than {MAX_CHARS:,} characters; shorten what it repeats")

    def join(self, *parts: Any) -> str:
        """The operator `~`."""
        for part in parts:
            check_nesting(part)
        texts = [str(part) for part in parts]
        self.charge(sum(map(len, texts)))
        return "".join(texts)

    def bounded(self, value: Any) -> Any:
        """Returns a value that is compared, if it is not nested without end."""
        check_nesting(value)
        return value

    def insert_steps(self, template: nodes.Template) -> None:
        """Adds a step to each loop and macro of a parsed template, and replaces the operator `~`."""
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            num_chars = sum(len(data.data) for part in node.body for data in _find(part, nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(self._call("step", num_chars)))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(self._call("step", 0), node.test)
        _replace_joins(template, self)
        for compare in template.find_all(nodes.Compare):
            compare.expr = self.call_method("bounded", [compare.expr])
        template.set_environment(self.environment)

    def _call(self, name: str, num_chars: int) -> nodes.Call:
        return self.call_method(name, [nodes.Const(num_chars)])


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox in which templates run, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_extension(Counting)
        self.finalize = self._charge_output
        for name, function in self.filters.items():
            self.add_filter(name, function)
        self.tests = {name: bound_test(name, function) for name, function in self.tests.items()}
        self.globals.pop("lipsum")  # as much text as it is asked for

    @property
    def counting(self) -> Counting:
        """The extension that counts."""
        found = self.extensions[Counting.identifier]
        assert isinstance(found, Counting)
        return found

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        self.counting.insert_steps(source)
        return super()._generate(source, *arguments, **options)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Adds a filter, with a bound of what it writes."""
        self.filters[name] = bound_filter(name, function, self._charge)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns a format method in the sandbox, with a bound of what it writes; None for any other value."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(str(value.__self__), [*args, *kwargs.values()])
            result = wrapped(*args, **kwargs)
            self._charge(len(result))
            return result

        return bounded

    def _charge(self, num_chars: int) -> None:
        self.counting.charge(num_chars)

    def _charge_output(self, value: Any) -> Any:
        check_nesting(value)
        self.counting.charge(len(value) if isinstance(value, str) else 1)
        return value

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or a method of a template, if what it writes is not too long."""
        is_method = check_method(obj, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        if is_method and isinstance(result, str):
            self.counting.charge(len(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator whose result may be long, if it is not too long."""
        if operator == "+":
            self.counting.charge(_length_of(left) + _length_of(right))
        elif operator == "%":
            if isinstance(left, str):
                check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            check_product(left, right)
            times = next((one for one in (left, right) if isinstance(one, int)), 1)
            self.counting.charge(max(_length_of(left), _length_of(right)) * max(0, times))
        else:
            check_power(left, right)
        return super().call_binop(context, operator, left, right)


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
