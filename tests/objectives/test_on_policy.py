"""On-policy distillation: its losses equal slow references and TRL's, and its two forms have one gradient."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.base.errors import RunEndedError, UserError
from genesis.data.window import IGNORE_INDEX, MicroBatch
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.objectives import OnPolicyDistillation
from genesis.objectives.objective import TOKENS, ObjectiveSums
from genesis.objectives.on_policy import HIDDEN, TEACHER_LOG_PROB
from genesis.objectives.policy_gradient import ANSWERS, COUNT_OF, NUM_ASKED, OLD_TOKEN_LOG_PROB, TEMPERATURE
from genesis.objectives.reverse_kl import sum_reverse_kl
from genesis.objectives.teacher import Teacher
from genesis.objectives.teacher_server import TeacherServer
from genesis.objectives.vocabulary import WHOLE
from genesis.tokenizer.open import open_tokenizer
from tests.chat.support import write_tokenizer
from tests.objectives.test_gspo import LENGTHS, D, S, V
from tests.objectives.test_policy_gradient import assert_same_gradients, make_answers

E = 7
"""Width of the teacher."""


class GivenTeacher:
    """Has an output weight of more rows than the student's, as a padded vocabulary."""

    def __init__(self) -> None:
        self.output_weight = torch.randn(V + 2, E, generator=torch.Generator().manual_seed(9)) * 0.7


def make_case(temperature: float = 1.0) -> tuple[Tensor, Tensor, MicroBatch, Tensor]:
    """Returns hidden states, an output weight, answers, and the teacher's logits of each token."""
    hidden, weight, micro_batch = make_answers(temperature)
    inputs = micro_batch.labels.clamp(min=0).roll(1, 1)  # each label is the next input
    of_teacher = torch.randn(len(LENGTHS), S, E, generator=torch.Generator().manual_seed(8))
    logits = of_teacher.double() @ GivenTeacher().output_weight[:V].double().t()
    log_probs = (logits / temperature).log_softmax(-1)
    targets = micro_batch.labels.clamp(min=0)
    given = log_probs.gather(-1, targets[..., None]).squeeze(-1).masked_fill(micro_batch.labels == IGNORE_INDEX, 0.0)
    extra = {**micro_batch.extra, HIDDEN: of_teacher, TEACHER_LOG_PROB: given.float()}
    return hidden, weight, replace(micro_batch, input_ids=inputs, extra=extra), logits


def build(divergence: Any = "exact", **options: Any) -> OnPolicyDistillation:
    objective = OnPolicyDistillation("given", divergence=divergence, **options)
    objective.loaded_teacher = GivenTeacher()  # type: ignore[assignment]
    return objective


def run_in(objective: OnPolicyDistillation, hidden: Tensor, weight: Tensor, micro_batch: MicroBatch, *size: int) -> Any:
    """Returns the loss of a window in micro-batches of these sizes, and the sums of its terms and figures."""
    counts = {TOKENS: sum(LENGTHS), ANSWERS: len(LENGTHS)}
    total, start, sums = torch.zeros(()), 0, ObjectiveSums({}, {}, counts)
    for rows in size:
        own = slice(start, start + rows)
        extra = {
            name: tensor[own] if len(tensor) == len(LENGTHS) else tensor for name, tensor in micro_batch.extra.items()
        }
        part = MicroBatch(micro_batch.input_ids[own], micro_batch.labels[own], None, extra=extra)
        result = objective.head(part, WHOLE)(hidden[own], weight)
        shown = ({name: float(value.detach()) for name, value in of.items()} for of in result)
        sums += ObjectiveSums(*shown)
        for unit, term in result.terms.items():
            total = total + term / counts[unit]
        start += rows
    return total, sums


def slow_loss(hidden: Tensor, weight: Tensor, micro_batch: MicroBatch, logits: Tensor, divergence: str) -> Tensor:
    temperature, losses = float(micro_batch.extra[TEMPERATURE]), []
    for row, place in (micro_batch.labels != IGNORE_INDEX).nonzero().tolist():
        log_probs = torch.log_softmax(weight @ hidden[row, place] / temperature, 0)
        log_teacher = torch.log_softmax(logits[row, place] / temperature, 0)
        if divergence == "exact":
            losses.append(sum(q.exp() * (q - p) for q, p in zip(log_probs, log_teacher, strict=True)))
            continue
        token = int(micro_batch.labels[row, place])
        ratio = torch.exp(log_probs[token] - micro_batch.extra[OLD_TOKEN_LOG_PROB][row, place].double())
        losses.append(ratio * (log_probs[token] - log_teacher[token]).detach())
    return torch.stack([torch.as_tensor(loss) for loss in losses]).mean()


@pytest.mark.parametrize("divergence", ["exact", "sampled"])
def test_loss_and_gradients_equal_a_slow_reference_in_any_micro_batches(divergence: str) -> None:
    hidden, weight, micro_batch, logits = make_case(0.7)
    slow = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    expected = slow_loss(*slow, micro_batch, logits, divergence)
    expected.backward()
    for sizes in ((4,), (1, 3)):
        own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss, sums = run_in(build(divergence), *own, micro_batch, *sizes)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        assert_same_gradients(own, slow)
        measured = build(divergence).measure(sums)
        assert measured["loss"] == measured["reverse_kl"] == pytest.approx(expected.item(), abs=1e-5)
        assert measured["answer_tokens"] == sum(LENGTHS) / len(LENGTHS)
        assert measured["finished"] == 0.75


@pytest.mark.parametrize("rewards", [None, "grpo"])
def test_episodes_and_replaced_prompts_are_counted_with_rewards_and_without(rewards: Any) -> None:
    hidden, weight, micro_batch, _ = make_case()
    counts = {f"{COUNT_OF}turns": torch.tensor([1.0, 2.0, 2.0, 3.0]), NUM_ASKED: torch.tensor([1.0, 1.0, 3.0, 1.0])}
    micro_batch = replace(micro_batch, extra={**micro_batch.extra, **counts})
    objective = build(rewards=rewards)
    _, sums = run_in(objective, hidden, weight, micro_batch, 1, 3)
    measured = objective.measure(sums)
    assert (measured["turns"], measured["asked"]) == (2.0, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.filterwarnings("ignore")
def test_the_exact_loss_and_its_gradients_equal_those_of_trl(temperature: float) -> None:
    hidden, weight, micro_batch, logits = make_case(temperature)
    own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss, _ = run_in(build(), *own, micro_batch, 1, 3)
    loss.backward()
    other = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    trainer = import_module("trl.experimental.gkd").GKDTrainer
    wanted = trainer.generalized_jsd_loss(
        other[0] @ other[1].t(), logits.float(), labels=micro_batch.labels, beta=1.0, temperature=temperature
    )
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    assert_same_gradients(own, other)


def test_the_sampled_gradient_is_the_exact_one_in_expectation_over_the_token() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, D, generator=generator).double(), torch.randn(V, D, generator=generator).double()
    log_teacher = torch.randn(V, generator=generator).double().log_softmax(0)
    old = (hidden[0] @ weight.t() + torch.randn(V, generator=generator) * 0.3).log_softmax(0)
    own, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    log_probs = (own[0] @ weight.t()).log_softmax(0)
    (log_probs.exp() * (log_probs - log_teacher)).sum().backward()
    from_module = import_module("genesis.objectives.on_policy").lose_sampled
    log_probs = (other[0] @ weight.t()).log_softmax(0)
    (old.exp() * from_module(log_probs, old, log_teacher)).sum().backward()
    torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("precision", ["bf16", "frozen"])
def test_mixed_precision_and_a_frozen_output_weight_change_what_they_must(precision: str) -> None:
    hidden, weight, micro_batch, _ = make_case()
    teacher, labels = GivenTeacher().output_weight[:V], micro_batch.labels
    arguments = (labels, micro_batch.extra[HIDDEN], teacher, micro_batch.extra[TEMPERATURE])
    own = hidden.clone().requires_grad_()
    exact = sum_reverse_kl(own, weight.clone().requires_grad_(), *arguments)
    exact.divergence.backward()
    if precision == "frozen":
        other = hidden.clone().requires_grad_()
        found = sum_reverse_kl(other, weight, *arguments)
        found.divergence.backward()
        assert torch.equal(found.divergence, exact.divergence)
        assert torch.equal(own.grad, other.grad)
        return
    with torch.autocast("cpu", torch.bfloat16):
        found = sum_reverse_kl(hidden.clone().requires_grad_(), weight, *arguments)
    assert found.divergence.item() == pytest.approx(exact.divergence.item(), rel=2e-2)
    assert found.divergence.item() != exact.divergence.item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"neither of model\.objective\.teacher and model\.objective\.url is given"),
        ({"teacher": "a", "url": "http://b", "model": "c"}, r"both of model\.objective\.teacher and"),
        ({"url": "http://b"}, r"model is None; a server needs the teacher's name"),
        ({"teacher": "a", "model": "c"}, "a teacher that is loaded here has none"),
        ({"url": "http://b", "model": "c", "divergence": "exact"}, "divergence is exact, but a server gives"),
        ({"url": "http://b", "model": "c", "teacher_dtype": "float16"}, "teacher_dtype is float16, but a server"),
        ({"url": "file:///etc/passwd", "model": "c"}, r"url is file:///etc/passwd; give the address of a server"),
        ({"teacher": "a", "teacher_weight": 0.0}, r"teacher_weight is 0\.0; it must be a number above 0"),
        ({"url": "http://b", "model": "c", "num_requests": 0}, "num_requests is 0; it must be at least 1"),
        ({"url": "http://b", "model": "c", "request_seconds": 0.0}, r"request_seconds is 0\.0; it must be"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OnPolicyDistillation(**options)


def test_a_teacher_with_fewer_rows_than_the_student_is_refused() -> None:
    def build_decoder(vocab_size: int) -> Decoder:
        return Decoder(
            DecoderConfig(
                vocab_size=vocab_size, dim=8, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=8, max_seq_len=16
            )
        )

    objective = OnPolicyDistillation("given")
    objective.loaded_teacher = Teacher(build_decoder(V), vocab_size=V, top_k=1, temperature=1.0)
    _, _, micro_batch, _ = make_case()
    with pytest.raises(
        UserError, match=rf"the teacher has {V} rows in its vocabulary, fewer than the student's {V + 1},"
    ):
        objective.prepare(build_decoder(V + 1), micro_batch, WHOLE)


# ---- a server


DRIPPING, DRIP_BYTES = 201, 8


@contextmanager
def serving(answer: Any) -> Iterator[str]:
    """Yields the address of a server that gives an answer, or what a function makes of the request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked["key"] = self.headers["Authorization"]
            status, content = answer(asked) if callable(answer) else answer
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            with suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Location", "/v1/other")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                for start in range(0, len(body), DRIP_BYTES) if status == DRIPPING else (0,):
                    self.wfile.write(body[start : start + DRIP_BYTES] if status == DRIPPING else body)
                    time.sleep(0.05 * (status == DRIPPING))

        def log_message(self, *arguments: Any) -> None:
            """Prints nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def score_all(asked: dict[str, Any]) -> tuple[int, Any]:
    """Gives the token id -id / 100."""
    ids = asked["prompt"]
    found = {"tokens": [str(one) for one in ids], "token_logprobs": [None, *(-one / 100 for one in ids[1:])]}
    return 200, {"choices": [{"index": 0, "text": "", "logprobs": found}]}


def score_by(number: Any) -> Any:
    """Gives all tokens a log-probability."""

    def answer(asked: dict[str, Any]) -> tuple[int, Any]:
        _, content = score_all(asked)
        content["choices"][0]["logprobs"]["token_logprobs"][1:] = [number] * (len(asked["prompt"]) - 1)
        return 200, content

    return answer


def score_one(url: str) -> list[Tensor]:
    _, _, micro_batch, _ = make_case()
    return TeacherServer(url, "teacher", 5.0, 2).score([micro_batch], lambda values: values)


def test_each_label_gets_the_log_probability_of_its_token() -> None:
    with serving(score_all) as url:
        (found,) = score_one(url)
    _, _, micro_batch, _ = make_case()
    expected = torch.where(micro_batch.labels == IGNORE_INDEX, 0.0, -micro_batch.labels / 100)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"<html>"), r"gave no log-probability for each token of a prompt \('<html>'\)"),
        ((200, {"choices": []}), "gave no log-probability for each token"),
        ((200, {"choices": [{"logprobs": None}]}), "must support echo and logprobs of completions"),
        ((200, {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [None]}}]}), "for each token of a prompt"),
        (
            lambda asked: (
                200,
                {"choices": [{"logprobs": {"tokens": ["a"] * 99, "token_logprobs": [float("nan")] * 99}}]},
            ),
            "gave no log-probability for each token",
        ),
        *((score_by(number), "gave no log-probability") for number in ("-0.5", True, 12.5, -1e300, None)),
        ((200, b" " * (1 << 19)), r"answers with more than \d+,\d+ bytes; start"),
        ((307, {}), r"answered with status 307 .*: correct model\.objective"),
        ((401, {}), r"answered with status 401 .*GENESIS_TEACHER_KEY is not set"),
        ((404, {"error": "no such model"}), r"the teacher teacher at .* answered with status 404 \(.*no such model"),
    ],
)
def test_what_a_server_answers_wrongly_is_one_line(answer: Any, message: str) -> None:
    with serving(answer) as url, pytest.raises((RunEndedError, UserError), match=message):
        score_one(url)


def test_a_server_that_is_slow_or_gone_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.objectives.teacher_server._WAITS_SECONDS", (0.01,))
    release = threading.Event()
    with serving(lambda asked: (release.wait(20), {})) as url:
        server = TeacherServer(url, "teacher", 0.2, 1)
        _, _, micro_batch, _ = make_case()
        with pytest.raises(RunEndedError, match=r"took longer than model\.objective\.request_seconds 0\.2; start"):
            server.score([micro_batch], lambda values: values)
        release.set()
    with serving((DRIPPING, b" " * 400)) as url, pytest.raises(RunEndedError, match=r"request_seconds 0\.2; start"):
        TeacherServer(url, "teacher", 0.2, 1).score([make_case()[2]], lambda values: values)
    with pytest.raises(RunEndedError, match=r"cannot be asked .*start the server again"):
        score_one(url)
    with pytest.raises(RunEndedError, match="another rank got no log-probabilities"), serving(score_all) as url:
        TeacherServer(url, "teacher", 5.0, 1).score([make_case()[2]], lambda values: [1.0])


def test_the_key_goes_to_the_server_and_nothing_to_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("GENESIS_TEACHER_KEY", "a-key")
    keys, noted = [], []

    def answer(asked: dict[str, Any]) -> tuple[int, Any]:
        keys.append(asked["key"])
        return score_all(asked)

    with serving(answer) as url:
        server = TeacherServer(url, "teacher", 5.0, 2)
        server.note = lambda: noted.append(1)
        server.score([make_case()[2]], lambda values: values)
    assert keys == ["Bearer a-key"] * len(LENGTHS)
    assert len(noted) == len(LENGTHS)


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.objectives.teacher_server._WAITS_SECONDS", (0.01, 0.01))
    seen = iter([(503, {}), (429, {})])
    with serving(lambda asked: next(seen, None) or score_all(asked)) as url:
        assert len(score_one(url)) == 1


def test_another_temperature_than_the_servers_is_refused() -> None:
    _, _, micro_batch, _ = make_case(0.7)
    with pytest.raises(UserError, match=r"data\.prompts\.temperature is 0\.7, and a server gives"):
        TeacherServer("http://127.0.0.1:1/v1", "teacher", 5.0, 1).score([micro_batch], lambda values: values)


def test_a_server_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    own = open_tokenizer(tmp_path)

    def answer(asked: dict[str, Any], shift: int = 0) -> tuple[int, Any]:
        status, content = score_all(asked)
        names = [own.decode([(one + shift) % own.vocab_size]) for one in asked["prompt"]]
        content["choices"][0]["logprobs"]["tokens"] = names
        return status, content

    with serving(answer) as url:
        TeacherServer(url, "teacher", 5.0, 1).check(tmp_path, 400)
    with serving(lambda asked: answer(asked, 1)) as url, pytest.raises(UserError, match="the student's tokenizer '"):
        TeacherServer(url, "teacher", 5.0, 1).check(tmp_path, 400)
