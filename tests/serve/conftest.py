"""One server in a process of its own, for all tests that do not end or overload it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.support import Running, start

DAMAGED = "step-00000002"
MAX_CONCURRENT = 32
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson(indent=indent) }}{% endif %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content or m.name }}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}{{ last }}"
)


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """A run with three checkpoints, of which the second is damaged."""
    directory = shutil.copytree(run, tmp_path_factory.mktemp("served") / "run")
    (directory / "metrics.csv").write_text("step,train/loss,validation/loss\n1,5.5,5.4\n2,5.0,4.9\n3,4.5,4.4\n")
    shard = next((directory / "checkpoints" / DAMAGED).glob("*.distcp"))
    shard.write_bytes(bytes(byte ^ 0x55 for byte in shard.read_bytes()))
    return directory


@pytest.fixture(scope="session")
def server(served_run: Path) -> Iterator[Running]:
    template = served_run.parent / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    limits = ("--max_concurrent", str(MAX_CONCURRENT), "--max_queue", "200")
    with start(served_run, *limits, "--chat_template", template) as running:
        yield running
