"""A template that computes for long, or writes very much, is refused in one line; others are rendered as before."""

import time

import pytest

from genesis.chat import limits, operations
from genesis.chat.template import ChatTemplate, ConversationError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
NESTED = "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
NESTING = "it nests lists of more than"
STEPS, CHARS = "its loops and macros take more than", "it writes more than"


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STEPS", 20_000)
    monkeypatch.setattr(limits, "MAX_CHARS", 100_000)
    monkeypatch.setattr(operations, "MAX_RESULT_CHARS", 100_000)
    monkeypatch.setattr(operations, "_MAX_PARTS", 10_000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", STEPS),
        ("{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}", STEPS),
        ("{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}", STEPS),
        ("{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}", STEPS),
        ("{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", CHARS),
        ("{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", CHARS),
        ("{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", CHARS),
        ("{{ 'a' * 10**10 }}", CHARS),
        ("{{ ('a' * 1000)[:0] }}{% for i in range(9999) %}{{ messages[0].content * 50 }}{% endfor %}", CHARS),
        ("{% set x %}{% for i in range(9999) %}" + "y" * 500 + "{% endfor %}{% endset %}", CHARS),
        ("{{ 2 ** 100000000 }}", "it computes a power"),
        ("{% set x = messages.append(1) %}", "not safely callable|unsafe"),
        # Single operations, which nothing interrupts: reported as mitsuhiko/minijinja#924 and ollama/ollama#17035.
        ("{{ 'x' | center(10**9) }}", "it calls center with a number above 100,000"),
        ("{{ 'x'.ljust(10**9) }}", "it calls ljust with a number"),
        ("{{ [[1]] | tojson(indent=10**9) }}", "it calls tojson with a number"),
        ("{{ [1] | batch(10**9, 0) | list }}", "it calls batch with a number"),
        ("{{ '%1000000000d' % 1 }}", "it formats with a width"),
        ("{{ '%*d' % (10**9, 1) }}", "it formats with a width"),
        ("{{ '{:>1000000000}'.format(1) }}", "it formats with a width"),
        ("{{ '%1000000000s' | format('x') }}", "it formats with a width"),
        ("{% set f = '{:>{}}'.format %}{{ f(1, 10**9) }}", "it formats with a width"),
        (
            "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s.replace('a', 'aa') %}{% endfor %}",
            CHARS,
        ),
        ("{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}", CHARS),
        ("{{ ('a' * 9999).replace('a', 'b' * 9999) }}", "its replace writes more than"),
        ("{{ range(9999) | map('string') | join('b' * 9999) }}", "its join writes more than"),
        (NESTED + "{{ n.s }}", NESTING),
        (NESTED + "{{ n.s | tojson }}", NESTING),
        (NESTED + "{% set x = n.s ~ '' %}", NESTING),
        (NESTED + "{% set m = n.s %}" + NESTED + "{{ m == n.s }}", NESTING),
        (
            "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
            "a number of more",
        ),
        (
            "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s ** 64 %}{% endfor %}",
            "it computes a power",
        ),
        ("{{ lipsum(n=10**6) }}", "'lipsum' is undefined"),
    ],
)
def test_a_template_beyond_a_limit_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConversationError, match=rf"^the chat template evil refuses it: .*({reason})[^\n]*$"):
        ChatTemplate(text, "evil").render(MESSAGES)


def test_the_time_is_limited_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000_000, 20))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    with pytest.raises(ConversationError, match=r"it takes more than 10 s"):
        ChatTemplate("{% for a in range(9999) %}{% endfor %}", "slow").render(MESSAGES)


def test_a_template_within_the_limits_is_rendered_as_by_jinja() -> None:
    text = (
        "{% macro say(m, n=2) %}{{ m.role ~ ':' ~ m.content * n }}{% endmacro %}"
        "{% for m in messages if m.content %}{{ loop.index }}/{{ loop.length }} {{ say(m) }}"
        "{% if not loop.last %}, {% endif %}{% generation %}g{% endgeneration %}{% else %}none{% endfor %}"
        "{{ 1 + 2 }}{{ [1] + [2] }}{{ none }}{{ missing }}{{ 2 ** 3 }}"
    )
    template = ChatTemplate(text, "plain")
    wanted = "1/2 user:hihi, g2/2 assistant:yoyog3[1, 2]None8"
    assert template.render(MESSAGES) == wanted
    assert template.render_marked(MESSAGES)[0] == wanted
    assert template.has_generation_tags


def test_each_text_is_counted_from_zero() -> None:
    template = ChatTemplate("{% for a in range(9999) %}{% endfor %}ok", "long")
    assert [template.render(MESSAGES) for _ in range(5)] == ["ok"] * 5
