"""A template that computes for long, or writes very much, is refused in one line; others are rendered as before."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import genesis
from genesis.base.errors import RunEndedError, UserError
from genesis.chat import pool
from genesis.chat.pool import POOL
from genesis.chat.template import ChatTemplate, ConversationError, EndlessTemplateError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SOUND = "{{ messages[0].content }}"
POWER = "{% set x = 9 %}" + "{% set x = x**64 %}" * 9
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TIME, MEMORY, LENGTH = (
    "takes more than 0.1 s of processor time",
    r"needs more than 64 MB of memory",
    "writes more than [0-9,]+ characters",
)
IN_A_NAMESPACE = "{{% set n = namespace(s={}) %}}{{% for i in range(60) %}}{{% set n.s = {} %}}{{% endfor %}}"
DEADLINE_SECONDS = 60.0


def repeat(start: str, step: str, then: str = "") -> str:
    return IN_A_NAMESPACE.format(start, step) + then


SMALL_LIMITS = {TIME: ("SECONDS", 0.1), MEMORY: ("MEMORY_BYTES", 64 << 20), LENGTH: ("MAX_CHARS", 10_000)}
"""Everything takes more processor time on a busy machine: only what is to exceed a limit has a small one."""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (POWER, TIME),
        (ENDLESS, TIME),
        ("{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}", TIME),
        ("{% for i in range(999) %}{% set a = range(99999) | list | sort %}{% endfor %}", TIME),
        (repeat("[1]", "[n.s, n.s]", "{{ n.s }}"), TIME + "|" + MEMORY),
        (repeat("[1]", "[n.s, n.s] | map('list') | sum(start=[])"), TIME + "|" + MEMORY),
        (repeat("'ab'", "n.s ~ n.s"), MEMORY),
        ("{{ [[1]] | tojson(indent=10**9) }}", MEMORY),
        ("{{ '%1000000000d' % 1 }}", MEMORY),
        ("{% for i in range(9999) %}" + "y" * 500 + "{% endfor %}", LENGTH),
        ("{{ messages[0].content * 10**6 }}", LENGTH),
        ("{{ " + "9 ** " * 9 + "9 }}", TIME),
    ],
)
def test_a_template_beyond_a_limit_is_refused(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limits:
        for each in reason.split("|"):
            limits.setattr(pool, *SMALL_LIMITS[each])
        with pytest.raises(EndlessTemplateError, match=rf"^the chat template evil ({reason})[^\n]*; simplify it$"):
            ChatTemplate(text, "evil").render(MESSAGES)
    assert ChatTemplate(SOUND, "sound").render(MESSAGES) == "hi"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% if %}", "line 1 is not valid Jinja: "),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "is not valid Jinja: "),
        ("{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "is not valid Jinja: too many statically nested blocks"),
    ],
)
def test_what_no_interpreter_compiles_is_no_template(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"^the chat template bad,? ?{reason}[^\n]*; fix it$"):
        ChatTemplate(text, "bad")


@pytest.mark.parametrize(
    "text", ["{% set x = messages.append(1) %}", "{{ lipsum(n=10**6) }}", "{{ [].__class__.__mro__ }}"]
)
def test_the_sandbox_refuses_what_changes_or_leaves_it(text: str) -> None:
    with pytest.raises(ConversationError, match=r"^the chat template evil refuses it: [^\n]*(unsafe|undefined)"):
        ChatTemplate(text, "evil").render(MESSAGES)


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


def test_a_long_conversation_has_more_time_memory_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_CHARS", 100)
    messages = [{"role": "user", "content": "\u00e9" * 5_000_000}]
    assert ChatTemplate("{{ messages[0].content * 3 }}", "long").render(messages) == "\u00e9" * 15_000_000


def test_requests_of_one_message_have_the_answers_and_the_limits_that_each_has_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A longer text than those of a message may be is asked for by itself, with the length that its own size allows."""
    monkeypatch.setattr(pool, "MAX_CHARS", 10_000)
    template = ChatTemplate("{% if messages[0].role == 'evil' %}{{ 'y' * 10**6 }}{% endif %}" + SOUND, "mixed")

    def work(role: str, content: str) -> pool.Steps[str]:
        laid_out = yield from template.lay_out(
            [{"role": role, "content": content}], None, {}, has_spans=False, is_by_turn=False
        )
        return laid_out.text

    def refused(role: str, content: str) -> pool.Steps[str]:
        try:
            return (yield from work(role, content))
        except EndlessTemplateError as error:
            return str(error)

    found = pool.run_steps([work("user", "a"), refused("evil", "b"), work("user", "c" * 20_000), work("user", "d")])
    assert (found[0], found[2], found[3]) == ("a", "c" * 20_000, "d")
    assert re.fullmatch(r"the chat template mixed writes more than [0-9,]+ characters; simplify it", found[1])


def test_sound_requests_are_answered_beside_an_endless_one() -> None:
    endless, sound = ChatTemplate(ENDLESS, "endless"), ChatTemplate(SOUND, "sound")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(endless.render, MESSAGES)
        assert [sound.render(MESSAGES) for _ in range(20)] == ["hi"] * 20
        assert not waiting.done()
        kill_workers()
        # A killed worker may have been the machine's doing: the request gets another one.
        assert sound.render(MESSAGES) == "hi"
        assert not waiting.done()
        POOL.end()
        with pytest.raises(RunEndedError, match="the command ends"):
            waiting.result(DEADLINE_SECONDS)
    assert sound.render(MESSAGES) == "hi"


def test_requests_that_wait_for_a_worker_end_with_the_workers() -> None:
    endless = ChatTemplate(ENDLESS, "endless")
    with ThreadPoolExecutor(9) as threads:
        waiting = [threads.submit(endless.render, MESSAGES) for _ in range(9)]
        wait_until(lambda: len(list_workers()) == 4)
        POOL.end()
        for one in waiting:
            with pytest.raises(RunEndedError, match="the command ends"):
                one.result(DEADLINE_SECONDS)
    assert list_workers() == []


def test_workers_that_were_killed_while_idle_are_replaced() -> None:
    sound = ChatTemplate(SOUND, "sound")
    POOL.end()
    idle = [POOL._take(POOL._num_ends) for _ in range(4)]
    for worker in idle:
        POOL._give_back(worker, is_idle=True)
    kill_workers()
    assert sound.render(MESSAGES) == "hi"
    assert len(list_workers()) == 1


def test_a_worker_outlives_the_thread_that_asked_it_first() -> None:
    template = ChatTemplate(SOUND, "sound")
    POOL.end()
    thread = threading.Thread(target=template.render, args=(MESSAGES,))
    thread.start()
    thread.join()
    workers = list_workers()
    time.sleep(0.2)  # for a signal of the kernel
    assert template.render(MESSAGES) == "hi"
    assert list_workers() == workers


PROGRAM = """
import os, sys, threading
from genesis.chat.pool import POOL
from genesis.chat.template import ChatTemplate
from genesis.chat import pool
pool.SECONDS = 300.0
template = ChatTemplate(sys.argv[1], "evil")
child = os.fork()
if child == 0:
    assert ChatTemplate("own", "own").render([]) == "own"
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(POOL._free[0].process.pid, flush=True)
template.render([])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_worker_ends_with_its_parent_in_the_midst_of_an_operation(number: signal.Signals) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, POWER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    worker = int(program.stdout.readline())
    wait_until(lambda: read_seconds(worker) > 0.3)
    program.send_signal(number)
    _, err = program.communicate(timeout=DEADLINE_SECONDS)
    assert program.returncode == -number
    assert err == "" or err.endswith("KeyboardInterrupt\n")
    wait_until(lambda: read_seconds(worker) == 0)


def test_a_worker_imports_little() -> None:
    program = "import json, sys, genesis.chat.worker; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, check=True).stdout
    assert not {"torch", "numpy", "lightning", "transformers", "tokenizers"}.intersection(json.loads(found))


def test_only_a_worker_compiles_a_chat_template() -> None:
    """Pages, service files and lm-eval's tasks have templates of their own."""
    root = Path(genesis.__file__).parent
    others = {"operations/report/page.py", "operations/supervise/service_files.py", "evaluate/task_template.py"}
    found = {
        str(file.relative_to(root)): re.findall(r"^(?:from|import) (jinja2|genesis\.chat\.sandbox)\b", text, re.M)
        for file in root.rglob("*.py")
        if "jinja2" in (text := file.read_text()) or "chat.sandbox" in text
    }
    users = {name for name, modules in found.items() if modules} - others
    assert users == {"chat/sandbox.py", "chat/worker.py", "chat/turns.py", "chat/prefixes.py"}
    assert not [
        name
        for name in root.rglob("*.py")
        if re.search(r"genesis\.chat\.(?:turns|prefixes)\b", name.read_text())
        and name.stem not in ("worker", "turns", "sandbox")
    ]


def list_workers() -> list[int]:
    return [worker.process.pid for worker in (*POOL._free, *POOL._lent)]


def kill_workers() -> None:
    for worker in list_workers():
        os.kill(worker, signal.SIGKILL)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_seconds(pid: int) -> float:
    """Returns a process's processor time; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return 0.0 if fields[0] == "Z" else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
