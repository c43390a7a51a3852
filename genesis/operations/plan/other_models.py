"""The memory of what runs beside the trained model: a teacher's forward, and the answers to prompts."""

from collections import Counter
from dataclasses import dataclass, replace

from genesis.model.attend.table import MASK, TORCH_KERNEL
from genesis.model.precision import FULL
from genesis.objectives import Distillation
from genesis.operations.plan.bill import CACHE, WHOLE
from genesis.operations.plan.layout import FLOAT32_BYTES, Layout, Workload
from genesis.operations.plan.record import ACTIVATIONS, CASTS, LOSS, Bytes
from genesis.operations.plan.sections import Sections, Setting, build_sections, build_setting
from genesis.operations.plan.state import Model, build_model


@dataclass(frozen=True)
class TeacherBytes:
    """What a teacher takes on a rank.

    Args:
        weights: Its weights, which every rank holds whole.
        forward: The highest point of its forward, which keeps nothing.
        classes: The probabilities that it leaves to the student for a micro-batch.
    """

    weights: int
    forward: Bytes
    classes: int


def count_teacher(workload: Workload) -> TeacherBytes | None:
    """Returns what the teacher takes; None if none runs or its shape is not known."""
    if workload.teacher is None:
        return None
    precision = FULL if workload.teacher_bytes == FLOAT32_BYTES else "bf16-true"
    alone = Workload(
        decoder=workload.teacher,
        objective=Distillation,  # whose head computes no gradients in its forward
        teacher_top_k=workload.teacher_top_k,
        seq_len=workload.seq_len,
        micro_batch_size=workload.micro_batch_size,
        precision=precision,
        is_cpu=workload.is_cpu,
        # No fit builds its decoder, and a wide dtype has no flash kernel on a GPU.
        attention=MASK.name if precision == FULL and not workload.is_cpu else TORCH_KERNEL,
        has_documents=workload.has_documents,
    )
    model = build_model(alone)
    sections = build_sections(alone, replace(build_setting(alone, Layout()), is_trained=False))
    every = (sections.embedding, *sections.blocks, sections.head)
    # The stream exists beside every section.
    forward: Bytes = Counter({ACTIVATIONS: sections.blocks[0].input_bytes + sections.tables_bytes})
    forward.update(max((one.forward.peak for one in every), key=lambda peak: sum(peak.values())))
    weights = sum(one.num_elements * workload.teacher_bytes for one in model.parameters)
    classes = sections.head.forward.end[LOSS]
    return TeacherBytes(weights, forward, classes)


def count_answers(workload: Workload, layout: Layout, model: Model, sections: Sections, setting: Setting) -> Bytes:
    """Returns what writing answers takes beside the state: the cache, and the whole model if ranks share it.

    Where autocast keeps its copies of weights for a window (`genesis.train.precision`), it keeps them for all answers,
    the output weight's included.
    """
    found: Bytes = Counter()
    if not workload.num_answer_rows:
        return found
    num_rows, decoder = workload.num_answer_rows, workload.decoder
    element_bytes = next(one.element_bytes for one in model.parameters if one.name == "embedding.weight")
    found[CACHE] = decoder.count_cache_bytes(num_rows, workload.seq_len, element_bytes)
    found[LOSS] = 2 * num_rows * decoder.vocab_size * FLOAT32_BYTES
    if setting.is_autocast and not layout.is_sharded and layout.activation_checkpointing == "none":
        output = model.decoder.output_weight
        found[CASTS] = sum(block.cached_casts for block in sections.blocks)
        found[CASTS] += output.numel() * setting.product_dtype.itemsize if output.requires_grad else 0
    if layout.is_sharded:
        found[WHOLE] = sum(one.num_elements * one.element_bytes for one in model.parameters)
    return found
