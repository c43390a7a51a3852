"""The embedding, the blocks and the head of a decoder, each with the courses of its forward and backward."""

from dataclasses import dataclass, replace
from typing import Final

from genesis.model.decoder import Block, Decoder
from genesis.model.loss import CHUNK_LOGITS_BYTES_CPU, CHUNK_LOGITS_BYTES_GPU, MIN_CHUNK_TOKENS
from genesis.model.tape import FLOAT32_BYTES, GRADIENTS, LOSS, Course, Setting, Tape, Value
from genesis.operations.plan.layout import Layout, Workload, forward_weight_bytes, product_bytes

_CPU_ROUNDING, _GPU_ROUNDING = 64, 512
"""The units of torch's allocators."""
IDS_BYTES: Final = 8 + 8 + 4
"""Bytes of a token of the batch: id, label, and number of its document."""


@dataclass(frozen=True)
class Section:
    """A part of the decoder that runs in one piece.

    Args:
        forward: The course of a forward that keeps what its backward needs.
        forward_without: That of one that keeps nothing.
        recompute: That of a second forward, in the backward of a block whose first one has kept nothing.
        backward: The course of the backward, whose gradients of weights stay.
        backward_added: That of one whose gradients are added to existing ones.
        gradient_bytes: Bytes of the gradients of its weights.
        input_bytes: Bytes of its input.
        cached_casts: Bytes of the copies of its weights that autocast keeps.
        weight_gradient_bytes: Bytes of the gradient of the output weight, which the timeline holds.
        has_late_gradient: Whether the backward computes that gradient, not the forward.
    """

    forward: Course
    forward_without: Course
    recompute: Course
    backward: Course
    backward_added: Course
    gradient_bytes: int
    input_bytes: int
    cached_casts: int
    weight_gradient_bytes: int = 0
    has_late_gradient: bool = False


@dataclass(frozen=True)
class Sections:
    """All sections of a decoder.

    Args:
        embedding: The embedding.
        blocks: The blocks in order; equal ones are one object.
        head: The last norm and the loss.
        tables_bytes: Bytes of the rotary tables and the mask, which all blocks share.
        notes: What is only estimated.
    """

    embedding: Section
    blocks: tuple[Section, ...]
    head: Section
    tables_bytes: int
    notes: tuple[str, ...]


def build_setting(workload: Workload, layout: Layout) -> Setting:
    """Returns what decides the size of activations."""
    product, weight_bytes = product_bytes(workload, layout), forward_weight_bytes(workload, layout)
    return Setting(
        batch_size=workload.micro_batch_size * workload.rows_per_sequence,
        seq_len=workload.seq_len,
        product_bytes=product,
        weight_bytes=weight_bytes,
        # Where FSDP2 gathers in the products' type there is no autocast.
        is_autocast=workload.precision.endswith("mixed") and weight_bytes != product,
        is_cpu=workload.is_cpu,
        attention=workload.attention,
        has_documents=workload.has_documents,
        expert_ranks=layout.expert_parallel,
        rounded_to=_CPU_ROUNDING if workload.is_cpu else _GPU_ROUNDING,
    )


def build_sections(decoder: Decoder, workload: Workload, setting: Setting) -> Sections:
    """Returns the sections of a decoder on the meta device."""
    embedding, stream = _record_embedding(decoder, setting)
    blocks: list[Section] = []
    notes: list[str] = []
    known: dict[object, Section] = {}
    for block in decoder.blocks:
        assert isinstance(block, Block)
        tape = Tape(setting)
        entering = _copy(tape, stream)
        leaving = block.record(tape, entering)
        signature = _sign(tape)
        if signature not in known:
            known[signature] = _finish(tape, entering)
        blocks.append(known[signature])
        notes += [note for note in tape.notes if note not in notes]
        stream = leaving
    head = _record_head(decoder, workload, setting, stream)
    return Sections(embedding, tuple(blocks), head, _count_tables(decoder, setting), tuple(notes))


def _copy(tape: Tape, value: Value) -> Value:
    return tape.value(value.num_elements, value.element_bytes, needs_grad=value.needs_grad)


def _sign(tape: Tape) -> object:
    """Returns what is equal for blocks that take the same memory."""
    numbers: dict[Value, int] = {}

    def number(value: Value) -> tuple[int, int, int, bool]:
        which = numbers.setdefault(value, len(numbers))
        return which, value.num_elements, value.element_bytes, value.needs_grad

    return tuple(
        (
            *(number(value) for value in (*op.inputs, op.output, *op.saved)),
            *(op.forward_bytes, op.backward_bytes, op.weights, op.passes_gradient),
        )
        for op in tape.operations
    )


def _finish(tape: Tape, entering: Value, weight_gradient_bytes: int = 0) -> Section:
    backward = tape.backward(entering, adds_gradients=False)
    return Section(
        forward=tape.forward(entering),
        forward_without=tape.forward(entering, is_kept=False),
        recompute=tape.forward(entering, is_recomputed=True),
        backward=backward,
        backward_added=tape.backward(entering, adds_gradients=True),
        gradient_bytes=backward.end[GRADIENTS],
        input_bytes=entering.num_bytes,
        cached_casts=tape.cached_casts,
        weight_gradient_bytes=weight_gradient_bytes,
    )


def _record_embedding(decoder: Decoder, setting: Setting) -> tuple[Section, Value]:
    tape = Tape(setting)
    ids = tape.value(0, 1)
    weight = tape.weight(decoder.embedding.weight)
    leaving = tape.apply((ids,), setting.num_tokens * decoder.config.dim, weight.element_bytes, weights=[weight])
    return _finish(tape, ids), leaving


def _record_head(decoder: Decoder, workload: Workload, setting: Setting, stream: Value) -> Section:
    """Returns the last norm and the loss of `genesis.model.loss`, chunk by chunk."""
    tape = Tape(setting, term=LOSS)
    entering = _copy(tape, stream)
    hidden = decoder.norm.record(tape, entering)
    weight = tape.weight(decoder.output_weight)
    vocab_size, dim = decoder.config.vocab_size, decoder.config.dim
    in_product = setting.product_bytes if setting.is_autocast else hidden.element_bytes
    chunk = min(setting.num_tokens, _count_chunk_tokens(setting, vocab_size))
    wide = vocab_size * dim * FLOAT32_BYTES
    is_narrow = in_product != FLOAT32_BYTES
    copies = (vocab_size * dim * in_product if weight.element_bytes != in_product else 0) + (
        chunk * dim * in_product if hidden.element_bytes != in_product else 0
    )
    logits, probabilities = chunk * vocab_size * in_product, chunk * vocab_size * FLOAT32_BYTES
    is_fused = not setting.is_cpu and workload.objective.head_memory != "distributions"
    # While the probabilities are computed both exist; then either the weight's gradient is added, in a tensor of its
    # own for narrow products, or the logits of the next chunk come.
    in_softmax = logits + probabilities + (probabilities if is_narrow and setting.is_cpu else 0)
    in_products = probabilities + (logits if is_narrow else 0) + chunk * dim * 2 * in_product
    if is_fused:  # one compiled function makes the gradient of the logits, and nothing else as large
        in_softmax, in_products = 2 * logits, logits + chunk * dim * in_product
    product = 0
    if is_narrow and weight.is_trained:
        product = vocab_size * dim * in_product if setting.is_cpu else wide
    working = copies + max(in_softmax, in_products + product)
    if workload.objective.head_memory == "fused":
        own = vocab_size * dim * weight.element_bytes
        # The timeline holds the gradient of the output weight. Over the chunks it is float32; a narrow one is made of
        # it at the end.
        besides = wide if weight.is_trained and weight.element_bytes != FLOAT32_BYTES else 0
        ready = tape.value(hidden.num_elements, hidden.element_bytes, term=LOSS)
        tape.apply(
            (hidden,),
            1,
            FLOAT32_BYTES,
            ready_gradient=ready if hidden.needs_grad else None,
            forward_bytes=max(working + besides - (own if besides else 0), besides),
        )
        return _finish(tape, entering, own if weight.is_trained else 0)
    # Objectives of single tokens, and of a teacher's probabilities, compute the logits again in the backward.
    besides = 2 * probabilities if workload.objective.head_memory == "distributions" else 0
    tape.apply(
        (hidden,),
        setting.num_tokens,
        FLOAT32_BYTES,
        saved=(hidden,),
        forward_bytes=copies + (logits if is_fused else in_softmax) + besides,
        backward_bytes=working + besides + (wide if weight.is_trained else 0),
    )
    late = vocab_size * dim * weight.element_bytes if weight.is_trained else 0
    return replace(_finish(tape, entering, late), has_late_gradient=True)


def _count_chunk_tokens(setting: Setting, vocab_size: int) -> int:
    """Returns the tokens of a chunk, as `genesis.model.loss.split_tokens` does."""
    is_cpu = setting.is_cpu
    limit = CHUNK_LOGITS_BYTES_CPU if is_cpu else CHUNK_LOGITS_BYTES_GPU
    most = max(MIN_CHUNK_TOKENS, limit // (FLOAT32_BYTES * vocab_size))
    if is_cpu or setting.num_tokens <= most:
        return most
    return -(-setting.num_tokens // -(-setting.num_tokens // most))


def _count_tables(decoder: Decoder, setting: Setting) -> int:
    config = decoder.config
    return sum(mixer.count_shared_bytes(setting, config.dim) for mixer, _ in config.list_mixers())
