"""Distillation as an objective: what it asks the teacher, what it logs, and that a student learns from it."""

import pytest
import torch
from torch import Tensor

from genesis.data.window import IGNORE_INDEX, MicroBatch
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.distillation import Distillation
from genesis.objectives.objective import BYTES, TOKENS, Objective, ObjectiveSums, prepare
from genesis.objectives.teacher import Teacher, find_classes
from genesis.objectives.vocabulary import WHOLE

VOCAB, SEQ_LEN = 24, 16


def build_decoder(dim: int, seed: int) -> Decoder:
    config = DecoderConfig(
        vocab_size=VOCAB, dim=dim, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=2 * dim, max_seq_len=SEQ_LEN
    )
    decoder = Decoder(config)
    decoder.init_weights(seed)
    return decoder


def make_text(num_rows: int, seed: int) -> MicroBatch:
    """Returns rows of a chain in which four tokens may follow each token."""
    generator = torch.Generator().manual_seed(11)
    followers = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in range(VOCAB)])
    generator.manual_seed(seed)
    rows = torch.randint(VOCAB, (num_rows, SEQ_LEN + 1), generator=generator)
    chance = torch.tensor([0.5, 0.25, 0.15, 0.1])
    for position in range(SEQ_LEN):
        chosen = torch.multinomial(chance, num_rows, replacement=True, generator=generator)
        rows[:, position + 1] = followers[rows[:, position], chosen]
    return MicroBatch(rows[:, :-1], rows[:, 1:].clone(), torch.zeros(num_rows, SEQ_LEN, dtype=torch.int32))


def run(decoder: Decoder, micro_batch: MicroBatch, objective: Objective) -> tuple[Tensor, dict[str, float]]:
    """Returns the mean loss of a forward, and what the log would have."""
    ready = prepare(objective, decoder, micro_batch, WHOLE)
    head = objective.head(ready, WHOLE)
    terms, figures = decoder(ready.input_ids, document_ids=ready.document_ids, head=head)
    num_tokens = int((micro_batch.labels != IGNORE_INDEX).sum())
    sums, shown = ({name: float(value.detach()) for name, value in of.items()} for of in (terms, figures))
    measured = objective.measure(ObjectiveSums(sums, shown, {TOKENS: num_tokens, BYTES: 0}))
    return terms[TOKENS] / num_tokens, measured


def train(decoder: Decoder, objective: Objective, num_steps: int, text: MicroBatch | None = None) -> Decoder:
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-2)
    decoder.train()
    for step in range(num_steps):
        optimizer.zero_grad()
        run(decoder, text or make_text(16, seed=100 + step), objective)[0].backward()
        optimizer.step()
    return decoder.eval()


def build_objective(teacher: Decoder, **options: float) -> Distillation:
    objective = Distillation("set below", top_k=6, **{"temperature": 2.0, "teacher_share": 0.7, **options})
    objective.loaded_teacher = Teacher(teacher, vocab_size=VOCAB, top_k=6, temperature=objective.temperature)
    return objective


def test_a_student_of_a_teacher_reaches_a_lower_loss_than_without() -> None:
    """Both see the same eight rows; the teacher has seen much text, and its probabilities say more than a label."""
    teacher = train(build_decoder(32, seed=0), CrossEntropy(), 120)
    losses = {}
    for name, objective in (("alone", CrossEntropy()), ("taught", build_objective(teacher))):
        student = train(build_decoder(16, seed=1), objective, 40, text=make_text(8, seed=1))
        with torch.no_grad():
            losses[name] = run(student, make_text(64, seed=2), objective)[1]["loss"]
    assert losses["taught"] < losses["alone"] - 0.1


def test_validation_is_the_cross_entropy_and_never_runs_the_teacher() -> None:
    decoder, text = build_decoder(16, seed=1).eval(), make_text(4, seed=1)
    objective = build_objective(build_decoder(32, seed=0))
    objective.loaded_teacher = None
    assert run(decoder, text, objective)[1] == run(decoder, text, CrossEntropy())[1]


def test_a_log_line_has_the_loss_its_parts_and_the_rest() -> None:
    decoder, text = build_decoder(16, seed=1).train(), make_text(4, seed=1)
    _, measured = run(decoder, text, build_objective(build_decoder(32, seed=0)))
    expected = 0.3 * measured["cross_entropy"] + 0.7 * 4.0 * measured["teacher_divergence"]
    assert measured["loss"] == pytest.approx(expected, rel=1e-6)
    assert 0.0 < measured["teacher_rest"] < 1.0
    assert measured["perplexity"] == pytest.approx(run(decoder, text, CrossEntropy())[1]["perplexity"], rel=1e-6)


def test_the_teacher_runs_in_its_own_dtype_outside_of_the_student_s_autocast() -> None:
    decoder, text = build_decoder(16, seed=1).train(), make_text(4, seed=1)
    objective = build_objective(build_decoder(32, seed=0))
    plain = find_classes(prepare(objective, decoder, text, WHOLE))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = find_classes(prepare(objective, decoder, text, WHOLE))
    assert plain is not None
    assert mixed is not None
    assert all(torch.equal(one, other) for one, other in zip(plain, mixed, strict=True))
    assert not any(parameter.requires_grad for parameter in objective.loaded_teacher._decoder.parameters())
