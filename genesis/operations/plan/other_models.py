"""The memory of what runs beside the trained model: a teacher, reward models, and the answers to prompts."""

from collections import Counter
from dataclasses import dataclass, replace

from genesis.model.attend.table import MASK, TORCH_KERNEL
from genesis.model.precision import FULL
from genesis.objectives import Distillation, RewardModel
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
    leaves_hidden = workload.objective.head_memory == "reverse_kl"
    alone = Workload(
        decoder=workload.teacher,
        # A head that computes no gradients in its forward.
        objective=workload.objective if leaves_hidden else Distillation,
        teacher_top_k=workload.teacher_top_k,
        seq_len=workload.seq_len,
        micro_batch_size=workload.micro_batch_size,
        precision=precision,
        is_cpu=workload.is_cpu,
        attention=_choose_kernel(workload, precision),
        has_documents=workload.has_documents,
    )
    num_elements, forward, classes = _count_alone(alone)
    if leaves_hidden:
        num_tokens = workload.micro_batch_size * workload.seq_len
        classes = num_tokens * workload.teacher.dim * workload.teacher_bytes
    return TeacherBytes(num_elements * workload.teacher_bytes, forward, classes)


def count_reward_models(workload: Workload) -> tuple[int, Bytes]:
    """Returns the weights of all reward models, and the highest point of the forward of one, for one answer."""
    weights, largest = 0, Counter[str]()
    for decoder in workload.reward_models:
        alone = Workload(
            decoder=decoder,
            objective=RewardModel,
            seq_len=min(workload.seq_len, decoder.max_seq_len),
            precision=FULL,
            is_cpu=workload.is_cpu,
            attention=_choose_kernel(workload, FULL),
            has_documents=False,
        )
        num_elements, forward, _ = _count_alone(alone)
        weights += num_elements * FLOAT32_BYTES
        largest = max(largest, forward, key=lambda one: sum(one.values()))
    return weights, largest


def _choose_kernel(workload: Workload, precision: str) -> str:
    # No fit builds its decoder, and a wide dtype has no flash kernel on a GPU.
    return MASK.name if precision == FULL and not workload.is_cpu else TORCH_KERNEL


def _count_alone(alone: Workload) -> tuple[int, Bytes, int]:
    """Returns the number of weights of a model that is not trained, the highest point of its forward, and its rest."""
    sections = build_sections(alone, replace(build_setting(alone, Layout()), is_trained=False))
    every = (sections.embedding, *sections.blocks, sections.head)
    # The stream exists beside every section.
    forward: Bytes = Counter({ACTIVATIONS: sections.blocks[0].input_bytes + sections.tables_bytes})
    forward.update(max((one.forward.peak for one in every), key=lambda peak: sum(peak.values())))
    num_elements = sum(one.num_elements for one in build_model(alone).parameters)
    return num_elements, forward, sections.head.forward.end[LOSS]


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
