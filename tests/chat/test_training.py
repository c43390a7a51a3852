"""Training templates: each belongs to the models whose own template writes the same, and marks what they are asked."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from genesis.base.errors import UserError
from genesis.chat.learned import build_prompt_form, find_stop_ids
from genesis.chat.options import ChatOptions
from genesis.chat.pool import run_steps
from genesis.chat.proof import check_marks, prove_template
from genesis.chat.render import open_renderer
from genesis.chat.template import ChatTemplate, ConversationError, write_defaults
from genesis.chat.training import MODES, VARIANTS, find_training_template
from genesis.data.conversations import open_chat_setup
from genesis.tokenizer.open import open_tokenizer
from tests.chat.support import CHATML, CONVERSATIONS, TRL, write_tokenizer

TODAY = date(2026, 2, 3)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
BODIES = {
    entry.name: entry.read_text(encoding="utf-8") for entry in files("genesis.chat").joinpath("templates").iterdir()
}
GOLDEN = Path(__file__).parents[1] / "golden" / "chat_templates.json"
SLOTS = {"default_system": 'You are "X".\n[THINK]', "default_system_with_tools": "You have tools."}


def list_models() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in sorted(BODIES):
        for variant in VARIANTS.get(name, ({},)):
            yield name, variant


def describe(name: str, variant: Mapping[str, Any]) -> str:
    return name + "".join(f", {key}={value}" for key, value in variant.items())


MODELS = [pytest.param(*model, id=describe(*model)) for model in list_models()]


def without_tags(text: str) -> str:
    text = text.replace("{%- generation -%}", "{%- if true -%}").replace("{%- endgeneration -%}", "{%- endif -%}")
    assert "generation -%}" not in text
    return text


def model_template(name: str, variant: Mapping[str, Any]) -> ChatTemplate:
    """A model's own template, which writes what the training template writes."""
    body = without_tags(BODIES[name])
    slots = {slot: text for slot, text in SLOTS.items() if re.search(rf"\b{slot}\b", body)}
    return ChatTemplate(write_defaults(body, {**variant, **slots}), "own", TODAY)


@pytest.mark.parametrize(("name", "variant"), MODELS)
def test_a_model_gets_the_template_that_writes_what_its_own_writes(name: str, variant: Mapping[str, Any]) -> None:
    own = model_template(name, variant)
    found = find_training_template(own, TOKENS)
    assert found.name.split(" (")[0] == describe(name, variant)
    for messages, tools in CONVERSATIONS.values():
        try:
            text = own.render(messages, tools, TOKENS)
        except ConversationError:
            continue
        assert found.render(messages, tools, TOKENS) == text


@pytest.mark.parametrize(("name", "variant"), MODELS)
def test_marks_begin_after_the_prompts_and_texts_are_the_recorded_ones(name: str, variant: Mapping[str, Any]) -> None:
    template = find_training_template(model_template(name, variant), TOKENS)
    assert check_marks(template, TOKENS) is None
    shown = {}
    for case, (messages, tools) in CONVERSATIONS.items():
        try:
            (laid_out,) = run_steps([template.lay_out(messages, tools, TOKENS, has_spans=True, is_by_turn=True)])
        except ConversationError:
            continue
        text = laid_out.text
        for span in reversed(laid_out.spans):
            text = f"{text[: span.start]}⟦{text[span.start : span.end]}⟧{text[span.end :]}"
        shown[case] = text
        before = iter(number for number, message in enumerate(messages) if message["role"] == "assistant")
        for number, span in zip(before, laid_out.spans, strict=True):
            prompts = [template.render(messages[:number], tools, {**TOKENS, **mode}, has_prompt=True) for mode in MODES]
            assert laid_out.text[: span.start] in prompts, case
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    if os.environ.get("GENESIS_UPDATE_GOLDEN"):
        recorded[describe(name, variant)] = shown
        GOLDEN.write_text(json.dumps(recorded, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    assert shown == recorded[describe(name, variant)]


OF_TRL = {
    "deepseek_r1_distill": "deepseek_r1.jinja",
    "deepseekv3": "deepseek_r1.jinja",
    "gemma": "gemma.jinja, has_system=False",
    "gemma3": "gemma.jinja",
    "glm4moe": "glm4.jinja",
    "gptoss": "gptoss.jinja",
    "llama3": "llama3.jinja",
    "llama3_1": "llama3_1.jinja",
    "llama3_2": "llama3_1.jinja, prints_today=True",
    "phi3": "phi3.jinja",
    "phi3_5": "phi3.jinja",
    "qwen2_5": "chatml.jinja",
    "qwen3": "qwen3.jinja",
    "qwen3_5_nothink": "qwen3_5.jinja, thinks=False",
    "qwen3_5_think": "qwen3_5.jinja",
    "qwen3_6": "qwen3_5.jinja, has_json_values=True",
    "qwen3_instruct_2507": "chatml.jinja",
}


@pytest.mark.parametrize("name", sorted(OF_TRL))
def test_each_turn_is_what_the_model_s_own_template_writes_for_a_last_turn(name: str) -> None:
    own = ChatTemplate((TRL / f"{name}.jinja").read_text(encoding="utf-8"), name, TODAY)
    found = find_training_template(own, TOKENS)
    assert found.name.split(" (")[0] == OF_TRL[name]
    num_compared = 0
    for messages, tools in CONVERSATIONS.values():
        given = [
            {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message
            for message in messages
        ]
        try:
            ((text, spans, _),) = run_steps([found.lay_out(given, tools, TOKENS, has_spans=True, is_by_turn=True)])
        except ConversationError:
            continue
        numbers = (number for number, message in enumerate(given) if message["role"] == "assistant")
        end = 0
        for number, span in zip(numbers, spans, strict=True):
            whole = own.render(given[: number + 1], tools, TOKENS)
            prompts = [own.render(given[:number], tools, {**TOKENS, **mode}, has_prompt=True) for mode in MODES]
            assert any(prompt.endswith(text[end : span.start]) for prompt in prompts)
            marked, end = text[span.start : span.end], span.end
            turns = [whole[len(prompt) :] for prompt in prompts if whole.startswith(prompt)]
            if turns:
                rests = [re.sub(r"^\s*(</s>|<\|return\|>)?$", "", cut(turn, marked)) for turn in turns]
                assert "" in rests, (marked, turns)
                num_compared += 1
    assert num_compared >= 1 or name.startswith("deepseek")  # which writes no turn as it asks for it


def cut(turn: str, marked: str) -> str:
    """What the model writes behind the marked text; GLM's turns have no end of their own, and get one."""
    return turn.removeprefix(marked) if turn.startswith(marked) else re.sub(r"<\|\w+\|>$", "", marked).replace(turn, "")


def test_no_template_of_another_family_gets_a_training_template() -> None:
    for name in ("cohere2", "lfm2", "nemotron_3_nano", "qwen3_8", "muse_glimmer"):
        own = ChatTemplate((TRL / f"{name}.jinja").read_text(encoding="utf-8"), name, TODAY)
        assert find_training_template(own, TOKENS) is own


def test_a_template_that_writes_more_than_the_training_template_is_kept() -> None:
    named = CHATML.replace("{{ m.role }}", "{{ m.role }}{{ ' ' ~ m.name if m.name }}")
    for text, variables in ((named, {}), (CHATML + "{{ mood }}", {"mood": "glad"})):
        own = ChatTemplate(text, "own", TODAY)
        assert find_training_template(own, {**TOKENS, **variables}) is own
    assert find_training_template(ChatTemplate(CHATML, "own"), TOKENS).name.startswith("chatml.jinja")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("<tool_response>", "<result>", r"at turn 3 \(tool\).* own writes 'result>.*FILE writes 'tool_res"),
        (
            "'}\\n</tool_call>'",
            "'}</tool_call>'",
            r"at turn 2 \(assistant\) of.* own writes '</tool_call>.*writes '\\n</too",
        ),
    ],
)
def test_a_changed_template_gets_no_training_template_and_a_user_s_a_line_with_the_change(
    old: str, new: str, line: str
) -> None:
    text = without_tags(BODIES["qwen3.jinja"])
    assert old in text
    own = ChatTemplate(text.replace(old, new), "own", TODAY)
    assert find_training_template(own, TOKENS) is own
    (warning,) = prove_template(ChatTemplate(text, "FILE", TODAY), own, TOKENS, is_given=True)
    assert re.search(line, warning)


def tagged(before: str, inner: str, after: str = "") -> str:
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{before}{{% generation %}}{inner}{{% endgeneration %}}{after}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


HEADER, CONTENT = "<|im_start|>assistant\n", "{{ m.content }}<|im_end|>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            tagged("<|im_start|>model\n", CONTENT),
            r"turn 2 .* 'model.nA place.*, and the prompt for the turn has 'assistant",
        ),
        (tagged(HEADER + "{{ m.content[:3] }}", "{{ m.content[3:] }}<|im_end|>"), r"turn 2 .* as 'lace.*is 'A place"),
        (
            tagged(HEADER, "{{ m.content }}{% if loop.last %}<|im_end|>{% else %}<|end|>{% endif %}"),
            r"turn 3 .*as 'A place.<\|end\|>', and as the last turn it is 'A place.<\|im_end\|>",
        ),
    ],
)
def test_a_user_s_template_that_marks_other_text_is_refused_with_turn_and_text(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=re.compile(reason, re.DOTALL)):
        prove_template(ChatTemplate(text, "FILE", TODAY), None, TOKENS, is_given=True)


def test_a_template_that_marks_the_end_of_a_prompt_gets_a_line() -> None:
    (line,) = prove_template(ChatTemplate(tagged("", HEADER + CONTENT), "FILE"), None, TOKENS, is_given=True)
    assert "its prompt ends with '<|im_start|>assistant\\n'" in line
    assert not prove_template(ChatTemplate(tagged(HEADER, CONTENT), "FILE"), None, TOKENS, is_given=True)


def test_a_user_s_template_is_kept_and_its_difference_to_the_model_s_own_is_a_line(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer", CHATML)
    file = tmp_path / "mine.jinja"
    file.write_text(tagged(HEADER, CONTENT).replace("<|im_end|>\n{% endif %}", "<|im_end|>{% endif %}"))
    lines: list[str] = []
    setup = open_chat_setup(ChatOptions(template=file), open_tokenizer(path), path, warn=lines.append)
    assert setup.name == str(file)
    assert len(lines) == 1
    assert re.search(r"at turn 1 \(user\) with the prompt after it.*tokenizer writes .*mine.jinja writes ", lines[0])


@pytest.mark.parametrize(("name", "keeps"), [("qwen3.jinja", False), ("smollm3.jinja", False), ("glm4.jinja", True)])
def test_prompts_have_the_model_s_own_template_if_it_ends_turns(tmp_path: Path, name: str, keeps: bool) -> None:
    own = model_template(name, {})
    if keeps:  # GLM's own template writes no end
        own = ChatTemplate((TRL / "glm4moe.jinja").read_text(encoding="utf-8"), "own", TODAY)
    path = write_tokenizer(tmp_path, own.text)
    tokenizer = open_tokenizer(path)
    options = ChatOptions(date="2026-02-03", variables={"enable_thinking": True})
    renderer = open_renderer(tokenizer, options)
    assert renderer.template.name.startswith(name)
    learned = write_defaults(renderer.template.text, options.variables)
    form = build_prompt_form(learned, tokenizer)
    assert form == (learned if keeps else write_defaults(own.text, options.variables))
    file = tmp_path / "learned.jinja"
    file.write_text(form)
    end = "<|user|>" if keeps else "<|im_end|>"
    assert tokenizer.pieces.index(end) in find_stop_ids(tokenizer, file)


def test_prompts_have_the_model_s_own_template_where_the_user_s_variables_chose_the_training(tmp_path: Path) -> None:
    system = "{% if messages[0].role != 'system' %}<|im_start|>system\nHi<|im_end|>\n{% endif %}"
    own = f"{{% if style == 'a {{none}}' and not off %}}{system}{CHATML}{{% else %}}other{{% endif %}}"
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, own))
    variables = {"style": "a {none}", "off": None, "list": [None, {"x": True}]}
    renderer = open_renderer(tokenizer, ChatOptions(variables=variables))
    assert renderer.template.name.startswith("chatml.jinja, has_tools=False")
    learned = write_defaults(renderer.template.text, variables)
    assert build_prompt_form(learned, tokenizer) == write_defaults(own, variables)


def test_a_template_that_prints_the_date_is_the_model_s_own_until_a_date_is_given() -> None:
    own = model_template("gptoss.jinja", {})
    undated = ChatTemplate(own.text, own.name)
    assert find_training_template(undated, TOKENS) is undated
