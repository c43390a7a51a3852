"""What a forward and its backward hold in memory, recorded without tensors: the parts of the model write on a tape.

A part's `record` calls the same operations in the same order as its `forward`. Each operation names what it keeps for
the backward and what its kernels need besides. `Tape.play` then gives the bytes at the peak and at the end, by term.
Everything is a whole number, so that the memory of a model of any size is known in milliseconds, on any machine.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from torch import Tensor, nn

ACTIVATIONS: Final = "activations"
LOSS: Final = "logits and loss"
CASTS: Final = "weights cast for products"
GRADIENTS: Final = "gradients"

FLOAT32_BYTES: Final = 4

Bytes = Counter[str]
"""Bytes by term; they may be negative."""


@dataclass(frozen=True)
class Setting:
    """What decides the size of activations, beside the model.

    Args:
        batch_size: Sequences of a micro-batch.
        seq_len: Tokens of a sequence.
        product_bytes: Bytes of an element of the matrix products.
        weight_bytes: Bytes of an element of trained weights as the forward sees them.
        is_autocast: Whether products cast what they get.
        is_cpu: Whether the device is a CPU.
        attention: The kernel of attention, by its name in `genesis.model.attend.table`.
        has_documents: Whether a sequence has several documents.
        expert_ranks: Ranks that share the experts; rows travel between them.
        rounded_to: The allocator's unit.
    """

    batch_size: int
    seq_len: int
    product_bytes: int = FLOAT32_BYTES
    weight_bytes: int = FLOAT32_BYTES
    is_autocast: bool = False
    is_cpu: bool = True
    attention: str = "flash"
    has_documents: bool = True
    expert_ranks: int = 1
    rounded_to: int = 512

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch_size * self.seq_len

    def round(self, num_bytes: int) -> int:
        """Returns the bytes that the allocator gives."""
        return -(-num_bytes // self.rounded_to) * self.rounded_to


class Value:
    """A tensor that the forward makes.

    Args:
        num_elements: Its elements.
        element_bytes: Bytes of each.
        needs_grad: Whether a gradient flows to it.
        term: The term of the bill.
        num_bytes: Its bytes, as the allocator gives them.
    """

    __slots__ = ("element_bytes", "needs_grad", "num_bytes", "num_elements", "term")

    def __init__(self, num_elements: int, element_bytes: int, needs_grad: bool, term: str, num_bytes: int) -> None:
        self.num_elements, self.element_bytes = num_elements, element_bytes
        self.needs_grad, self.term, self.num_bytes = needs_grad, term, num_bytes


class Weight(NamedTuple):
    """A parameter as an operation uses it.

    Args:
        num_elements: Its elements.
        element_bytes: Bytes of each, as the forward sees it.
        product_bytes: Bytes of an element in the product, in which its gradient is computed first.
        is_trained: Whether it gets a gradient.
    """

    num_elements: int
    element_bytes: int
    product_bytes: int
    is_trained: bool


@dataclass(frozen=True)
class Operation:
    """One operation and its backward.

    Args:
        inputs: Its inputs, to each of which a gradient may flow.
        output: Its result.
        saved: What it keeps until its backward, results of its own among them.
        forward_bytes: Bytes that its forward needs besides.
        backward_bytes: Bytes that its backward needs beside the gradients of inputs and weights.
        weights: The parameters that it uses.
        passes_gradient: Whether the gradient of the output serves as that of inputs of the same type.
        ready_gradient: The gradient of the only input, if the forward has computed it already.
    """

    inputs: tuple[Value, ...]
    output: Value
    saved: tuple[Value, ...]
    forward_bytes: int
    backward_bytes: int
    weights: tuple[Weight, ...]
    passes_gradient: bool
    ready_gradient: Value | None = None


class Course(NamedTuple):
    """How memory changes: at its highest point, and at the end, each relative to the beginning."""

    peak: Bytes
    end: Bytes


@dataclass
class Tape:
    """The operations of one section of a model, such as a block.

    Args:
        setting: What decides the sizes.
        operations: In the order of the forward.
        notes: What is only estimated.
        term: The term of what kernels need besides.
        cached_casts: Bytes of copies of weights that autocast keeps.
    """

    setting: Setting
    operations: list[Operation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    term: str = ACTIVATIONS
    cached_casts: int = 0

    def value(
        self, num_elements: int, element_bytes: int, *, needs_grad: bool = False, term: str = ACTIVATIONS
    ) -> Value:
        """Returns a tensor that the caller lists among what an operation makes or keeps."""
        rounded = self.setting.round(num_elements * element_bytes)
        return Value(num_elements, element_bytes, needs_grad, term, rounded)

    def apply(
        self,
        inputs: Sequence[Value],
        num_elements: int,
        element_bytes: int,
        *,
        saved: Iterable[Value] = (),
        saves_output: bool = False,
        forward_bytes: int = 0,
        backward_bytes: int = 0,
        weights: Sequence[Weight] = (),
        passes_gradient: bool = False,
        ready_gradient: Value | None = None,
    ) -> Value:
        """Records an operation and returns its output.

        Args:
            inputs: Its inputs.
            num_elements: Elements of the output.
            element_bytes: Bytes of each.
            saved: What is kept for the backward, if there is one.
            saves_output: Whether the output is among that.
            forward_bytes: Bytes that its forward needs besides.
            backward_bytes: Bytes that its backward needs beside the gradients.
            weights: The parameters that it uses.
            passes_gradient: Whether inputs of the output's type share its gradient.
            ready_gradient: The gradient of the only input, if the forward computes it.
        """
        needs_grad = any(value.needs_grad for value in inputs) or any(weight.is_trained for weight in weights)
        output = self.value(num_elements, element_bytes, needs_grad=needs_grad)
        own = [value for value in (output if saves_output else None, ready_gradient) if value is not None]
        self.operations.append(
            Operation(
                tuple(inputs),
                output,
                (*saved, *own) if needs_grad else (),
                forward_bytes,
                backward_bytes,
                tuple(weights),
                passes_gradient,
                ready_gradient,
            )
        )
        return output

    def cast(self, x: Value, element_bytes: int) -> Value:
        """Returns `x` in a type of so many bytes: itself, if it has that type."""
        return x if x.element_bytes == element_bytes else self.apply((x,), x.num_elements, element_bytes)

    def add(self, x: Value, update: Value) -> Value:
        """Returns the sum in the wider of the two types."""
        wider = max(x.element_bytes, update.element_bytes)
        return self.apply((x, update), x.num_elements, wider, passes_gradient=True)

    def weight(self, parameter: Tensor) -> Weight:
        """Returns a parameter as an operation uses it, which need not be a matrix product."""
        is_trained = parameter.requires_grad
        element_bytes = min(self.setting.weight_bytes, parameter.element_size())
        return Weight(parameter.numel(), element_bytes, element_bytes, is_trained)

    def linear(self, x: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
        """Returns the product of `x` with a weight of outputs and inputs."""
        own, width = self.weight(weight), weight.shape[0]
        product_bytes = self.setting.product_bytes if self.setting.is_autocast else x.element_bytes
        used = own._replace(product_bytes=product_bytes)
        num_outputs = x.num_elements // weight.shape[1] * width
        x = self.cast(x, product_bytes)
        saved = [x] if used.is_trained else []
        if used.element_bytes != product_bytes:
            # Autocast keeps its copies of trained weights until the step's last forward has ended; others are copied
            # for each product and kept by it.
            copy = self.value(used.num_elements, product_bytes, term=CASTS)
            if used.is_trained:
                self.cached_casts += copy.num_bytes
            elif x.needs_grad:
                saved.append(copy)
        weights = [used] if bias is None else [used, self.weight(bias)]
        return self.apply((x,), num_outputs, product_bytes, saved=saved, weights=weights)

    def estimate(self, x: Value, module: nn.Module) -> Value:
        """Records a module that does not describe itself: each matrix keeps its input, and the result is like `x`."""
        self.notes.append(f"{type(module).__name__} does not record its activations: estimated from its matrices")
        tokens = self.setting.num_tokens
        saved = [
            self.value(tokens * parameter.numel() // parameter.shape[-1], self.setting.product_bytes)
            for parameter in module.parameters()
            if parameter.ndim > 1
        ]
        weights = [self.weight(parameter) for parameter in module.parameters()]
        largest = max((value.num_bytes for value in saved), default=0)
        return self.apply((x,), x.num_elements, x.element_bytes, saved=saved, backward_bytes=2 * largest,
                          weights=weights)  # fmt: skip

    # ---- playing

    def forward(self, x: Value, *, is_kept: bool = True, is_recomputed: bool = False) -> Course:
        """Returns the course of the forward.

        Args:
            x: The section's input, which exists at the beginning and is freed at the end if nothing keeps it.
            is_kept: Whether what the backward needs is kept; without, only the output is there at the end.
            is_recomputed: Whether it is the second one of activation checkpointing, which stops at the last operation
                that keeps something, before that operation's own result.
        """
        last_use = {value: index for index, op in enumerate(self.operations) for value in op.inputs}
        num_run = len(self.operations)
        if is_recomputed:
            num_run = 1 + max((index for index, op in enumerate(self.operations) if op.saved), default=-1)
        saved = {value for op in self.operations for value in op.saved} if is_kept else set()
        output = self.operations[-1].output
        now: Bytes = Counter()
        peak = _Peak()
        live = {x}
        for index, op in enumerate(self.operations[:num_run]):
            is_stopped = is_recomputed and index == num_run - 1 and op.output not in op.saved
            made = [] if is_stopped else [op.output]
            made += [value for value in op.saved if value not in live and value is not op.output]
            for value in made:
                now[value.term] += value.num_bytes
                live.add(value)
            peak.see(now, {} if is_stopped else {self.term: op.forward_bytes})
            for value in {*op.inputs, *made}:
                is_needed = last_use.get(value, -1) > index or value in saved or value is output
                if not is_needed and value in live and (value is not x or is_kept):
                    now[value.term] -= value.num_bytes
                    live.discard(value)
        if is_recomputed:
            for value in live - saved:
                now[value.term] -= value.num_bytes
        return Course(peak.found, now)

    def backward(self, x: Value, *, adds_gradients: bool) -> Course:
        """Returns the course of the backward, whose saved values and gradient of the output exist at the beginning.

        Args:
            x: The section's input.
            adds_gradients: Whether gradients of weights are added to existing ones, or stay.
        """
        now: Bytes = Counter()
        peak = _Peak()
        uses = Counter(value for op in self.operations for value in dict.fromkeys(op.saved))
        gradients: dict[Value, _Buffer] = {}
        output = self.operations[-1].output
        gradients[output] = _Buffer(output.num_bytes)
        for op in reversed(self.operations):
            if not op.output.needs_grad or op.output not in gradients:
                continue
            above = gradients.pop(op.output)
            for value in dict.fromkeys(op.inputs):
                if value.needs_grad:
                    self._give(value, above, op, gradients, now, peak)
            for weight in op.weights:
                if weight.is_trained:
                    self._add_weight(weight, op, now, peak, adds_gradients=adds_gradients)
            peak.see(now, {self.term: op.backward_bytes})
            above.release(now)
            for value in dict.fromkeys(op.saved):
                uses[value] -= 1
                if not uses[value] and value is not op.ready_gradient:
                    now[value.term] -= value.num_bytes
        return Course(peak.found, now)

    def _give(
        self,
        value: Value,
        above: "_Buffer",
        op: Operation,
        gradients: dict[Value, "_Buffer"],
        now: Bytes,
        peak: "_Peak",
    ) -> None:
        if op.ready_gradient is not None:
            buffer = _Buffer(value.num_bytes)
            now[op.ready_gradient.term] -= op.ready_gradient.num_bytes
            now[ACTIVATIONS] += value.num_bytes
        elif op.passes_gradient and value.element_bytes == op.output.element_bytes:
            buffer = above.share()
        else:
            buffer = _Buffer(value.num_bytes)
            now[ACTIVATIONS] += value.num_bytes
        held = gradients.get(value)
        if held is None:
            gradients[value] = buffer
            return
        peak.see(now, {self.term: op.backward_bytes})
        if held.num_owners > 1:  # a sum in place would change the other owner's gradient
            now[ACTIVATIONS] += value.num_bytes
            peak.see(now)
            held.release(now)
            gradients[value] = _Buffer(value.num_bytes)
        buffer.release(now)

    def _add_weight(self, weight: Weight, op: Operation, now: Bytes, peak: "_Peak", *, adds_gradients: bool) -> None:
        in_product = self.setting.round(weight.num_elements * weight.product_bytes)
        own = self.setting.round(weight.num_elements * weight.element_bytes)
        is_cast = weight.product_bytes != weight.element_bytes
        peak.see(now, {GRADIENTS: in_product + (own if is_cast else 0), self.term: op.backward_bytes})
        if not adds_gradients:
            now[GRADIENTS] += own


class _Buffer:
    """The memory of a gradient, which several values may share."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.num_owners = num_bytes, 1

    def share(self) -> "_Buffer":
        self.num_owners += 1
        return self

    def release(self, now: Bytes) -> None:
        self.num_owners -= 1
        if not self.num_owners:
            now[ACTIVATIONS] -= self.num_bytes


class _Peak:
    """The highest point that was seen."""

    def __init__(self) -> None:
        self.found: Bytes = Counter()
        self._total = 0

    def see(self, now: Bytes, besides: Mapping[str, int] | None = None) -> None:
        total = sum(now.values()) + (sum(besides.values()) if besides else 0)
        if total > self._total:
            self._total = total
            self.found = Counter(now)
            self.found.update(besides or {})
