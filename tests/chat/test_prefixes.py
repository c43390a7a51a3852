"""The beginnings of a conversation, measured at once, are what rendering each of them gives."""

from datetime import date

import pytest

from genesis.chat import turns
from genesis.chat.sandbox import SandboxedTemplate
from genesis.chat.template import ConversationError
from tests.chat.support import CHATML, SMOLLM2, TRL, WRITTEN

LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
HOSTILE = {
    "its number": "{{ messages | length }}" + LOOP + PROMPT,
    "whether it is short": "{% if messages | length < 4 %}short{% endif %}" + LOOP + PROMPT,
    "its last message": "{{ messages[-1].role }}" + LOOP + PROMPT,
    "the next message": "{% for m in messages %}{{ m.content }}{{ loop.nextitem.role }}</s>{% endfor %}" + PROMPT,
    "the message after": "{% for m in messages %}{{ m.content }}{{ messages[loop.index0 + 1].role }}</s>{% endfor %}",
    "whether it is the last": "{% for m in messages %}{{ m.content }}{% if loop.last %}.{% endif %}</s>{% endfor %}",
    "equality": "{% if messages[1:] == [messages[1]] %}two{% endif %}" + LOOP + PROMPT,
    "its text": "{{ (messages | string | length) > 200 }}" + LOOP + PROMPT,
    "membership": "{{ {'role': 'user', 'content': 'b3'} in messages }}" + LOOP + PROMPT,
    "a loop before": "{% for m in messages if m.content == 'b3' %}seen{% endfor %}" + LOOP + PROMPT,
    "the prompt in its loop": LOOP.replace("</s>", "{{ add_generation_prompt }}</s>") + PROMPT,
    "the prompt before its loop": "{{ add_generation_prompt }}" + LOOP + PROMPT,
    "the prompt by a letter before its loop": "{{ 'A' if add_generation_prompt else 'B' }}" + LOOP + PROMPT,
    "a tail of few": LOOP + "{% if messages | length < 7 %}!{% endif %}" + PROMPT,
    "a tail that counts": "{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}" + PROMPT,
    "a tail of the number": LOOP + "{{ messages | length }}" + PROMPT,
    "a tail of the last": LOOP + "{% if messages[-1].role == 'user' %}!{% endif %}" + PROMPT,
    "a tail of what the loop left": "{% set ns = namespace(n='') %}"
    + LOOP.replace("</s>", "</s>{% set ns.n = m.role %}")
    + "{% if add_generation_prompt %}{{ ns.n }}{% endif %}",
    "a step out of the loop": LOOP.replace("</s>", "</s>{% if loop.index > 3 %}{% continue %}{% endif %}") + PROMPT,
    "an end of the loop": LOOP.replace("</s>", "</s>{% if loop.index > 3 %}{% break %}{% endif %}") + PROMPT,
    "an order": "{% for m in messages | reverse %}{{ m.content }}</s>{% endfor %}" + PROMPT,
    "two at once": "{% for pair in messages | batch(2) %}{{ pair[0].content }}{{ pair[1].content }}</s>{% endfor %}",
    "a variable of the tail": LOOP + "{% set m = 'x' %}" + PROMPT,
    "names of ours": "{% set genesis_prefixes_seen = 3 %}" + LOOP + PROMPT,
    "marks of ours": "\ue0100\ue013" + LOOP + PROMPT,
}
OF_TRL = {path.stem: path.read_text() for path in sorted(TRL.glob("*.jinja"))}
FORMS = {"plain": LOOP + PROMPT, **HOSTILE, **WRITTEN, **OF_TRL}
IN_ORDER = ("plain", "chatml", "smollm2", "llama3", "gemma", "qwen2_5")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def converse(num_turns: int, has_system: bool = False, has_calls: bool = False):
    messages = [{"role": "system", "content": "Be brief."}] if has_system else []
    for number in range(num_turns):
        messages.append({"role": "user", "content": f"a{number}"})
        if has_calls and number % 2:
            messages.append({"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "a1b2c3d4e"}]})
            messages.append({"role": "tool", "content": "r", "name": "f", "tool_call_id": "a1b2c3d4e"})
        content = ("b", "<think>\nh\n</think>\n\nb")[number % 3 == 2]
        messages.append({"role": "assistant", "content": f"{content}{number}"})
    return messages


def compile_template(text):
    return SandboxedTemplate(text, "of a test", date(2026, 1, 31))


@pytest.mark.parametrize("name", FORMS)
def test_the_spans_are_those_of_a_rendering_for_each_turn(monkeypatch, name):
    template = compile_template(FORMS[name])
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    for messages in (converse(2), converse(4), converse(4, has_system=True), converse(4, has_calls=True)):
        found = []
        for least in (1, 1000):
            monkeypatch.setattr(turns, "_MANY_TURNS", least)
            try:
                found.append(turns._find_turns(template, messages, None, variables))
            except ConversationError as error:
                found.append(str(error))
        assert found[0] == found[1]


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_conversation_of_any_number_of_turns_is_rendered_a_few_times(monkeypatch, name):
    numbers = []
    for num_turns in (10, 100):
        template = compile_template(FORMS[name])
        number = 0
        write = template._write

        def count(*arguments, write=write):
            nonlocal number
            number += 1
            return write(*arguments)

        monkeypatch.setattr(template, "_write", count)
        variables = {"bos_token": "<s>", "eos_token": "</s>"}
        turns.lay_out(template, converse(num_turns), None, variables, has_spans=True, is_by_turn=False)
        numbers.append(number)
    assert numbers[0] == numbers[1] <= 5


def test_calls_of_tools_in_many_turns_are_found_by_one_rendering(monkeypatch):
    text = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    )
    numbers = []
    for num_turns in (10, 50):
        template = compile_template(text)
        messages = converse(num_turns, has_calls=True)
        shown, number = template.render(messages), 0

        def render(*arguments, render=template.render, **options):
            nonlocal number
            number += 1
            return render(*arguments, **options)

        monkeypatch.setattr(template, "render", render)
        turns._check_nothing_dropped(template, shown, messages, None, {})
        numbers.append(number)
    assert numbers[0] == numbers[1] == 1
    silent, messages = compile_template(SMOLLM2), converse(2, has_calls=True)
    with pytest.raises(ConversationError, match="leaves out the tool_calls of turn 4"):
        turns._check_nothing_dropped(silent, silent.render(messages), messages, None, {})
