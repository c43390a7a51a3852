"""Forged chat templates for `genesis data prepare`."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.chat.support import WRITTEN
from tests.forged.operators import ALIEN, Case, forge_files, rewrite

_NAME: Final = Path("template.jinja")
_FREEZES: Final = (
    "{% set ns = namespace(x=9) %}{% for i in range(9) %}{% set ns.x = ns.x**64 %}{% endfor %}{{ ns.x }}",
    "{{ 9**9**9 }}",
    "{{ 'a' * 10**9 }}",
    "{{ ['a'] * 10**9 }}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% for a in range(9999) %}" * 3 + "x" + "{% endfor %}" * 3,
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a' | indent(10**9) }}",
    "{{ 'aaaaaaaaaaaaaaaa'.replace('a', 'a' * 9999).replace('a', 'a' * 9999).replace('a', 'a' * 9999) }}",
    "{{ range(10**9) | list }}",
    "{{ range(10**9) | sum }}",
    "{{ range(99999) | map('string') | join('a' * 99999) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ (1 << 10**10) }}",
    "{{ 1 / 0 }}",
    "{{ 10**5000 }}",
    "{{ (10**4000) | string }}",
    "{{ lipsum(n=10**6) }}",
    "{{ cycler(*range(10**8)) }}",
    "{{ [1, 2] | batch(10**9, 'x') | list }}",
    "{{ 'a' | wordwrap(10**9) }}{{ dict(a=1) | dictsort | xmlattr }}",
    "{{ strftime_now('%Y' * 10**7) }}",
)
_ESCAPES: Final = (
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{{ ('%s' | attr('format')).__self__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__}' | format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ self._TemplateReference__context }}",
    "{{ namespace(__class__=1) }}",
    f"{{{{ raise_exception({ALIEN!r}) }}}}",
    "{{ raise_exception('x' * 100000) }}",
    "{{ messages[0][0][0] }}",
    "{{ undefined.a.b }}",
    "{% for m in messages %}",
    "{{ '\\ud800' }}",
    "{" * 5000 + "}" * 5000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 3000,
    "{{ 1" + "+1" * 50_000 + " }}",
    "{{ [" + "[" * 300 + "]" * 300 + "] }}",
    "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}",
    "{{ " + "a" * 100_000 + " }}",
)


def iterate_cases(seed: int, mark: Path) -> Iterator[Case]:
    """Yields the cases; code that runs creates the file `mark`."""
    source = "[{name: a, paths: [../in/data/chat.jsonl], chat: auto}]"
    command = (
        *("data", "prepare", "--name", "corpus", "--out", "../out", "--num_workers", "1", "--sources", source),
        *("--tokenizer", "../in/run", "--chat.template", f"../in/{_NAME}"),
    )
    sound = "".join(WRITTEN["chatml"])
    for number, text in enumerate((*_FREEZES, *_ESCAPES)):
        for where, whole in (("alone", text), ("in a sound one", sound + text)):
            data = whole.replace("MARK", str(mark)).encode("utf-8", "surrogatepass")
            yield Case("template", f"{number} {where}", rewrite(_NAME, lambda _, d=data: d), command)  # type: ignore[misc]
    for name, forge in forge_files([str(_NAME)], seed):
        yield Case("template", name, forge, command)
    for number in range(20):
        data = _mutate(random.Random(f"{seed} {number}")).encode()
        yield Case("template", f"change {number}", rewrite(_NAME, lambda _, d=data: d), command)  # type: ignore[misc]


def _mutate(chooser: random.Random) -> str:
    """Returns a template of a known family with words taken out, doubled and exchanged."""
    words = re.findall(r"\{%-?|-?%\}|\{\{|\}\}|\w+|.", WRITTEN[chooser.choice(sorted(WRITTEN))], re.DOTALL)
    for _ in range(chooser.choice((1, 3, 9))):
        place, other = chooser.randrange(len(words)), chooser.randrange(len(words))
        words[place : place + 1] = chooser.choice(([], [words[place]] * 2, [words[other]]))
    return "".join(words)
