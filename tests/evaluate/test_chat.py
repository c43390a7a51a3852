"""Tasks as conversations: the same contexts and answers as lm-eval's `hf` backend with the same template."""

import json
import shutil
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from genesis.base.errors import UserError
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_renderer
from genesis.chat.template import ConversationError
from genesis.cli.evaluate import main
from genesis.evaluate.model import GenesisLM
from genesis.evaluate.questions import ChatQuestion
from genesis.evaluate.task_question import TaskQuestion
from genesis.evaluate.tasks import load_tasks
from genesis.generate.load import build_empty_decoder
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_weights
from genesis.tokenizer.open import open_tokenizer
from tests.evaluate.support import write_choices, write_generation, write_rolling
from tests.tokenizer.test_huggingface import qwen

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("open") / "model"
    directory.mkdir()
    qwen(directory)
    torch.manual_seed(0)
    config: Any = Qwen2Config(
        vocab_size=640,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def ours(model: Path) -> GenesisLM:
    return _build_ours(model)


def _build_ours(model: Path) -> GenesisLM:
    family, config = read_shape(model)
    state = read_weights(model, config, family)
    decoder = build_empty_decoder(config, len(state), model)
    decoder.load_state_dict(state, assign=True)
    tokenizer = open_tokenizer(model)
    return GenesisLM(decoder.eval(), tokenizer, chat=open_renderer(tokenizer, ChatOptions(), is_training=False))


@pytest.fixture(scope="module")
def theirs(model: Path) -> HFLM:
    return HFLM(str(model), device="cpu", dtype="float32", batch_size=1)


def _ask(lm: Any, spec: str, num_fewshot: int | None, *, is_multiturn: bool) -> list[dict[str, Any]]:
    loaded = load_tasks(spec, num_fewshot)
    for task in loaded.tasks["tasks"].values():
        task.set_fewshot_seed(seed=1234)
    found: dict[str, Any] = lm_eval.evaluator.evaluate(
        lm,
        loaded.tasks,
        bootstrap_iters=0,
        system_instruction="Be brief.",
        apply_chat_template=True,
        fewshot_as_multiturn=is_multiturn,
    )
    (items,) = found["samples"].values()
    return list(items)


@pytest.mark.parametrize(("num_fewshot", "is_multiturn"), [(0, False), (2, True), (2, False)])
def test_choices_are_answered_as_by_hf_in_the_same_conversation(
    ours: GenesisLM, theirs: HFLM, tmp_path: Path, num_fewshot: int, is_multiturn: bool
) -> None:
    spec = write_choices(tmp_path / "choices", num_rows=4)
    here, there = (_ask(lm, spec, num_fewshot, is_multiturn=is_multiturn) for lm in (ours, theirs))
    assert len(here) == len(there) > 0
    for item, other in zip(here, there, strict=True):
        assert item["arguments"] == other["arguments"]
        assert "<|im_start|>" in item["arguments"][0][0]
        for (answer,), (other_answer,) in zip(item["resps"], other["resps"], strict=True):
            assert answer == (pytest.approx(other_answer[0], abs=TOLERANCE), other_answer[1])


def test_a_context_has_the_ids_of_transformers(ours: GenesisLM, theirs: HFLM) -> None:
    history = [{"role": "system", "content": "a"}, {"role": "user", "content": "<|im_end|> ?"}]
    text = ours.apply_chat_template(history)
    assert text == theirs.apply_chat_template(history)
    assert ours.tok_encode(text) == theirs.tok_encode(text)


@pytest.mark.parametrize("content", ["The answer is", "  The answer is", "The answer is "])
def test_the_last_message_goes_on_as_in_transformers(ours: GenesisLM, theirs: HFLM, content: str) -> None:
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
    text = ours.apply_chat_template(history, add_generation_prompt=False)
    assert text == theirs.apply_chat_template(history, add_generation_prompt=False)


def test_text_is_generated_as_by_hf(ours: GenesisLM, theirs: HFLM, tmp_path: Path) -> None:
    spec = write_generation(tmp_path / "text", until=["\n\n"], max_gen_toks=8)
    here, there = (_ask(lm, spec, 0, is_multiturn=False) for lm in (ours, theirs))
    assert [item["resps"] for item in here] == [item["resps"] for item in there]


def test_a_mixture_generates_text_as_by_hf(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    qwen(directory)
    torch.manual_seed(0)
    config: Any = MixtralConfig(
        vocab_size=640,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
    )
    MixtralForCausalLM(config).save_pretrained(directory)
    theirs = HFLM(str(directory), device="cpu", dtype="float32", batch_size=1)
    spec = write_generation(tmp_path / "text", until=["\n\n"], max_gen_toks=8)
    here, there = (_ask(lm, spec, 0, is_multiturn=False) for lm in (_build_ours(directory), theirs))
    assert [item["resps"] for item in here] == [item["resps"] for item in there]
    assert any(answer for item in here for (answer,) in item["resps"])


def test_texts_begin_with_a_named_bos_that_the_tokenizer_does_not_add_as_for_hf(model: Path, tmp_path: Path) -> None:
    named = shutil.copytree(model, tmp_path / "named")
    settings = json.loads((named / "tokenizer_config.json").read_text())
    (named / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|im_start|>"}))
    for directory, prefix in ((model, None), (named, "<|im_start|>")):
        ours, theirs = _build_ours(directory), HFLM(str(directory), device="cpu", dtype="float32", batch_size=1)
        assert ours.prefix_token_id == theirs.prefix_token_id
        assert ours.eot_token_id == theirs.eot_token_id
        assert (theirs.tok_decode([theirs.prefix_token_id], skip_special_tokens=False) == prefix) == bool(prefix)
        assert ours.tok_encode("a b") == theirs.tok_encode("a b")
        (task,) = load_tasks(write_rolling(tmp_path / f"rolling-{prefix is None}")).tasks["tasks"].values()
        task.build_all_requests(limit=None, rank=0, world_size=1)
        found, wanted = (lm.loglikelihood_rolling(task.instances, disable_tqdm=True) for lm in (ours, theirs))
        assert found == pytest.approx(wanted, abs=TOLERANCE)


def test_another_template_or_system_message_is_another_question(model: Path, tmp_path: Path) -> None:
    tasks = load_tasks(write_choices(tmp_path / "choices", num_rows=2), 0)
    tokenizer = open_tokenizer(model)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    chats = [
        None,
        ChatQuestion(ChatOptions()),
        ChatQuestion(ChatOptions(), system="Be brief."),
        ChatQuestion(ChatOptions(), is_multiturn=False),
        ChatQuestion(ChatOptions(template=tmp_path / "own.jinja")),
    ]
    manifest: Any = None
    described = [json.dumps(TaskQuestion(tasks, 5, chat).describe(manifest, tokenizer, None)) for chat in chats]
    assert len(set(described)) == len(chats)
    assert TaskQuestion(tasks, 5, chats[0]).name == "choices-limit5"
    assert TaskQuestion(tasks, 5, chats[1]).name == "choices-chat-limit5"


def test_a_last_message_that_the_template_changes_cannot_go_on(model: Path) -> None:
    tokenizer = open_tokenizer(model)
    (model / "upper.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    renderer = open_renderer(tokenizer, ChatOptions(template=model / "upper.jinja"), is_training=False)
    with pytest.raises(ConversationError, match="changes the last message"):
        renderer.prompt_text([{"role": "user", "content": "abc"}], continues_last=True)


def test_options_of_a_template_without_one_are_refused(checkpoint: Path) -> None:
    for options in (["--system_instruction", "a"], ["--chat_template_date", "2026-01-31"], ["--no_multiturn"]):
        with pytest.raises(UserError, match="add --apply_chat_template"):
            main([str(checkpoint), "--tasks", "hellaswag", *options])
