"""Files that start `genesis supervise` under systemd, Slurm or Kubernetes, written from its own command line.

All three use the documented exit statuses: 75 starts the run again without a count of failures, 2 and the classes at
which a supervisor gives up do not start it again, and a supervisor that was killed is started again and finds its run.
"""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, Literal, get_args

import jinja2

from genesis.base.errors import UserError

FileKind = Literal["systemd", "slurm", "kubernetes", "alerts", "dashboard"]
FILE_KINDS: Final = get_args(FileKind)
_FILES: Final = {
    **{"systemd": "systemd.service.j2", "slurm": "slurm.sh.j2", "kubernetes": "kubernetes.yaml.j2"},
    **{"alerts": "alerts.yaml", "dashboard": "dashboard.json"},
}
"""Templates of Jinja and whole files, in `files`."""


REQUEUE_STATUS: Final = 75
GAVE_UP_STATUSES: Final = (2, *range(80, 95))
_STOP_SECONDS: Final = 180
"""More than the time that a supervisor takes to save and to end its ranks."""
_MAX_NAME: Final = 50


@dataclass(frozen=True)
class ServiceCommand:
    """The command that a service file runs.

    Args:
        words: What follows `genesis supervise`, with `--` and the training.
        run_dir: The run's directory.
        directory: The working directory, an absolute path.
        python: The interpreter that has genesis.
        max_nodes: Number of nodes that take part at most; 1 for a supervisor of its own. The files of Slurm and
            Kubernetes give `--rdzv` themselves, from what they know of the nodes.
        min_nodes: The least number of nodes.
    """

    words: Sequence[str]
    run_dir: Path
    directory: Path
    python: str = sys.executable
    max_nodes: int = 1
    min_nodes: int = 1

    def __post_init__(self) -> None:
        for word in (*self.words, str(self.directory), self.python):
            if not word.isprintable():
                raise UserError(f"{word!r} cannot stand in a service file: it has line ends or control characters")

    @property
    def name(self) -> str:
        """A name of small letters, digits and dashes, from the run's directory."""
        words = re.sub(r"[^a-z0-9]+", "-", self.run_dir.as_posix().lower()).strip("-")
        return f"genesis-{words}"[:_MAX_NAME].rstrip("-")

    @property
    def start(self) -> list[str]:
        """The beginning of the command line."""
        return [self.python, "-P", "-m", "genesis", "supervise"]


def render_file(kind: FileKind, command: ServiceCommand) -> str:
    """Returns the text of a file.

    Args:
        kind: "systemd" (a unit), "slurm" (a job script), "kubernetes" (manifests), "alerts" (rules for Prometheus) or
            "dashboard" (for Grafana).
        command: The command that the first three run.

    Raises:
        UserError: A word cannot stand in such a file.
    """
    if kind in ("alerts", "dashboard"):
        return (resources.files(__package__) / "files" / _FILES[kind]).read_text(encoding="utf-8")
    port, rest = ("", list(command.words)) if command.max_nodes == 1 else _split_rdzv(command.words)
    least, most = command.min_nodes, command.max_nodes
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "files"), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {
        **{"shell_word": shlex.quote, "systemd_word": _quote_systemd, "yaml_word": _quote_yaml},
        "percents": lambda text: text.replace("%", "%%"),
    }
    return environment.get_template(_FILES[kind]).render(
        name=command.name,
        run_dir=command.run_dir.as_posix(),
        directory=str(command.directory),
        start=command.start,
        command=[*command.start, *command.words],
        rest=rest,
        port=port,
        nodes=str(most) if least == most else f"{least}-{most}",
        max_nodes=most,
        requeue_status=REQUEUE_STATUS,
        gave_up_statuses=GAVE_UP_STATUSES,
        stop_seconds=_STOP_SECONDS,
    )


def _quote_systemd(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[A-Za-z0-9_./:=@,+%$-]+", escaped) and escaped != "--" else f'"{escaped}"'


def _quote_yaml(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)  # a text of JSON is one of YAML; pairs of surrogates would be none


def _split_rdzv(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the port of `--rdzv HOST:PORT`, and the other words."""
    for place, word in enumerate(words):
        if word == "--rdzv" or word.startswith("--rdzv="):
            end = place + (2 if word == "--rdzv" else 1)
            return words[end - 1].rpartition(":")[2], [*words[:place], *words[end:]]
    raise ValueError("several nodes without --rdzv")
