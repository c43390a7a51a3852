"""The symbols that close the assistant's turns follow from the template, and templates without one are refused."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from genesis.base.errors import UserError
from genesis.chat import pool
from genesis.chat.learned import (
    build_prompt_form,
    describe_other_template,
    find_recorded,
    find_stop_ids,
)
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_renderer
from genesis.chat.stops import check_ends, describe_ends, find_turn_ends
from genesis.chat.template import ChatTemplate, write_defaults
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer, find_control
from tests.chat.support import CHATML, MISTRAL, OLMO2, SMOLLM3, write_tokenizer

ASK = "{% if m.role != 'assistant' %}<|user|>{{ m.content }}\n{% else %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}" + CALLS + "{% if m.tool_calls %}<|eom_id|>{% else %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
PHI3 = "{% for m in messages %}<|user|>{{ m.content }}<|end|>\n{% endfor %}{{ eos_token }}"
ALPACA = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
ONLY_BETWEEN = (
    "{% for m in messages %}" + ASK + "{{ m.content }}{% if not loop.last %}</s>{% endif %}{% endif %}{% endfor %}"
)
UNMARKED_END = (
    "{% for m in messages %}" + ASK + "{% generation %}{{ m.content }}{% endgeneration %}</s>{% endif %}{% endfor %}"
)
MARKED_END = UNMARKED_END.replace("{% endgeneration %}</s>", "</s>{% endgeneration %}")
SYSTEM_FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message') }}{% endif %}" + CHATML
MISSING = CHATML.replace("<|im_end|>", "<|eot|>")
"""Its symbol is no token of the tokenizer, so that it is text."""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + CHATML


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A base model's: its eos is `</s>`, whatever its template writes."""
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("stops") / "tokenizer"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # Reported as huggingface/trl#2059, huggingface/open-r1#603, hiyouga/LLaMA-Factory#7454: a base with ChatML.
        (CHATML, ["<|im_end|>"]),
        (SMOLLM3, ["<|im_end|>"]),
        (MISTRAL, ["</s>"]),
        (OLMO2, ["</s>"]),
        # A call of a tool may end by a symbol of its own, as in Llama 3.1.
        (LLAMA3, ["<|eot_id|>", "<|eom_id|>"]),
        (GEMMA, ["<end_of_turn>"]),
        # hiyouga/LLaMA-Factory#9338: the template writes eos after the symbol at which the model must stop.
        (PHI3, ["<|end|>", "</s>"]),
        (MARKED_END, ["</s>"]),
        (SYSTEM_FIRST, ["<|im_end|>"]),
        # A template that always begins the assistant's next turn: <|im_start|> closes nothing.
        (CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"), ["<|im_end|>"]),
        (ALPACA, []),
        (ONLY_BETWEEN, []),
        (MISSING, []),
        ("{{ raise_exception('never') }}", []),
    ],
)
def test_turns_end_with_the_symbols_after_an_answer(tokenizer: Tokenizer, text: str, wanted: list[str]) -> None:
    ends = find_turn_ends(ChatTemplate(text, "own"), tokenizer)
    assert [tokenizer.pieces[token] for token in ends.ids] == wanted
    assert describe_ends(ends.ids, tokenizer).count("(") == len(wanted)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ALPACA, "never closes the assistant's turns: it writes nothing after an answer, and no control symbol"),
        (ONLY_BETWEEN, "it writes nothing after an answer"),
        (MISSING, r"it writes '<\|eot\|>\\n' after an answer.*`genesis model add-tokens` adds a missing symbol"),
        (UNMARKED_END, r"by </s> \(4\) outside of its {% generation %} block, so that a model would not learn to stop"),
        (ENDLESS, "takes more than 0.1 s of processor time"),
    ],
)
def test_a_template_from_which_no_model_learns_to_stop_is_refused(
    tokenizer: Tokenizer, text: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SECONDS", 0.1)
    with pytest.raises(UserError, match=f"^the chat template own .*{line}"):
        check_ends(ChatTemplate(text, "own"), tokenizer)


@pytest.mark.parametrize("text", [CHATML, MARKED_END, PHI3, "{{ raise_exception('never') }}"])
def test_other_templates_are_accepted(tokenizer: Tokenizer, text: str) -> None:
    check_ends(ChatTemplate(text, "own"), tokenizer)


def test_a_model_stops_at_what_its_own_the_learned_and_the_chosen_template_close_turns_with(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def spell(**files: Path | None) -> set[str]:
        return {tokenizer.pieces[token] for token in find_stop_ids(tokenizer, files.get("learned"), files.get("given"))}

    learned, given = tmp_path / "learned.jinja", tmp_path / "given.jinja"
    learned.write_text(GEMMA)
    given.write_text(LLAMA3)
    assert spell() == {"</s>", "<|im_end|>"}
    assert spell(learned=learned) == {"</s>", "<end_of_turn>"}
    assert spell(learned=learned, given=given) == {"</s>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>"}
    assert describe_other_template(given, learned) == (
        f"the model has learned the chat template {learned}, and {given} writes conversations in another format"
    )
    given.write_text(GEMMA)
    assert describe_other_template(given, learned) is None
    assert describe_other_template(given, None) is None


def test_texts_are_generated_without_a_template_that_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = open_tokenizer(write_tokenizer(tmp_path / "broken", template="{% if %}"))
    assert find_stop_ids(broken, None) == {broken.eos_id}
    assert "is not valid Jinja" in caplog.text
    assert "no token that ends the assistant's turns is known" in caplog.text


def test_a_template_holds_its_variables_as_defaults(tokenizer: Tokenizer) -> None:
    text = "\n  {% if thinks %}<think>{% endif %}{{ words | join(',') }}{{ count }}{{ name }}{{ missing is none }}"
    variables: dict[str, Any] = {
        "thinks": False,
        "words": ["a", {"b": '\u00e9\U0001f600\n"%}'}],
        "count": 3,
        "name": "it's",
        "missing": None,
    }
    whole = write_defaults(text, variables)
    messages = [{"role": "user", "content": "hi"}]
    wanted = ChatTemplate(text, "plain").render(messages, None, variables)
    assert ChatTemplate(whole, "whole").render(messages) == wanted
    assert ChatTemplate(whole, "whole").render(messages, None, {"thinks": True}).startswith("\n<think>")
    assert write_defaults(whole, variables) == whole
    assert write_defaults(text, {}) == text


def test_the_prompts_of_a_training_template_are_those_of_the_model(tmp_path: Path) -> None:
    chatml = open_tokenizer(write_tokenizer(tmp_path / "chatml"))
    assert build_prompt_form(GEMMA, chatml) == GEMMA
    assert build_prompt_form(write_defaults(CHATML, {"x": 1}), chatml) == write_defaults(CHATML, {"x": 1})


def test_the_learned_template_goes_before_the_tokenizers_and_after_the_users(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert find_recorded(tmp_path) is None
    learned, given = tmp_path / "chat" / "template.jinja", tmp_path / "given.jinja"
    learned.parent.mkdir()
    learned.write_text(GEMMA)
    given.write_text(LLAMA3)
    today = datetime.date(2026, 1, 2).isoformat()
    found = [
        open_renderer(tokenizer, ChatOptions(template=file, date=today), is_training=False, learned=recorded)
        for file, recorded in ((None, None), (None, find_recorded(tmp_path)), (given, find_recorded(tmp_path)))
    ]
    assert [renderer.template.text for renderer in found] == [CHATML, GEMMA, LLAMA3]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|im_end|>", ("", "<|im_end|>")),
        ("end<|im_end|>\n<|im_start|>user", ("end", "<|im_end|>")),
        ("im_end", None),
        ("<|im_end", None),
        ("<tool_call>", None),
    ],
)
def test_a_control_symbol_in_a_stop_text_is_found(
    tokenizer: Tokenizer, text: str, wanted: tuple[str, str] | None
) -> None:
    found = find_control(tokenizer, text)
    assert (None if found is None else (found[0], tokenizer.pieces[found[1]])) == wanted
