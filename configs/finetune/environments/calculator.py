"""A tool: the model answers a question, and may ask a calculator before. The answer is right or wrong."""

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARS = 100
MAX_NUMBER = 10**12
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


class Calculator:
    """Gives 1 for the answer of the record, in a turn without a call."""

    tools = (TOOL,)

    def reset(self, record: dict[str, Any], seed: int) -> None:
        """Begins an episode; the record's prompt is the question."""
        self.answer = str(record["answer"])

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        """Returns the results of calls; or, of a turn without calls, the reward, and ends the episode."""
        calls = message.get("tool_calls", ())
        if not calls:
            return [], float(message["content"].strip() == self.answer), True
        results = [calculate(json.loads(call["function"]["arguments"]).get("expression")) for call in calls]
        return (
            [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ],
            0.0,
            False,
        )


def calculate(expression: object) -> str:
    """Returns the value of an expression of numbers with + - * / and parentheses, or what is wrong with it.

    Nothing is evaluated as Python: the expression is parsed, and only these operators are applied.
    """
    if not isinstance(expression, str) or len(expression) > MAX_CHARS:
        return f"error: give an expression of at most {MAX_CHARS} characters"
    try:
        return f"{_evaluate(ast.parse(expression.strip(), mode='eval').body):.10g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error: no such expression of numbers with + - * / and parentheses"


def _evaluate(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluate(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    else:
        raise ValueError("no number and no operator")
    if not abs(value) <= MAX_NUMBER:
        raise ValueError("too large")
    return value
