"""Files that start `genesis supervise` under systemd, Slurm or Kubernetes, written from its own command line.

All three use the documented exit statuses: 75 starts the run again without a count of failures, 2 and the classes at
which a supervisor gives up do not start it again, and a supervisor that was killed is started again and finds its run.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, get_args

import yaml

from genesis.base.errors import UserError

FileKind = Literal["systemd", "slurm", "kubernetes", "alerts", "dashboard"]
FILE_KINDS: Final = get_args(FileKind)

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
    def all_words(self) -> list[str]:
        """The whole command line."""
        return [self.python, "-m", "genesis", "supervise", *self.words]


def render_file(kind: FileKind, command: ServiceCommand) -> str:
    """Returns the text of a file.

    Args:
        kind: "systemd" (a unit), "slurm" (a job script), "kubernetes" (manifests), "alerts" (rules for Prometheus) or
            "dashboard" (for Grafana).
        command: The command that the first three run.

    Raises:
        UserError: A word cannot stand in such a file.
    """
    if kind == "systemd":
        return _render_systemd(command)
    if kind == "slurm":
        return _render_slurm(command) if command.max_nodes == 1 else _render_slurm_nodes(command)
    if kind == "kubernetes":
        return _render_kubernetes(command)
    name = "alerts.yaml" if kind == "alerts" else "dashboard.json"
    return (resources.files("genesis.operations.supervise") / "files" / name).read_text(encoding="utf-8")


def _render_systemd(command: ServiceCommand) -> str:
    words = " ".join(map(_quote_systemd, command.all_words))
    statuses = " ".join(map(str, GAVE_UP_STATUSES))
    return f"""\
# Install: save as /etc/systemd/system/{command.name}.service (add User=), or as a user's unit in
# ~/.config/systemd/user/{command.name}.service; then `systemctl [--user] enable --now {command.name}`.
[Unit]
Description=genesis supervise: {command.run_dir.as_posix().replace("%", "%%")}
# A machine that starts again and again must not stop the run for good.
StartLimitIntervalSec=0

[Service]
Type=exec
WorkingDirectory={str(command.directory).replace("%", "%%")}
ExecStart={words}
Restart=on-failure
RestartSec=5
RestartForceExitStatus={REQUEUE_STATUS}
RestartPreventExitStatus={statuses}
# SIGTERM reaches the supervisor alone, which saves and ends its ranks; whatever is left is killed afterwards.
KillMode=mixed
TimeoutStopSec={_STOP_SECONDS}
SuccessExitStatus={REQUEUE_STATUS}

[Install]
WantedBy=default.target
"""


def _quote_systemd(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[A-Za-z0-9_./:=@,+%$-]+", escaped) and escaped != "--" else f'"{escaped}"'


def _render_slurm(command: ServiceCommand) -> str:
    return f"""\
#!/bin/bash
#SBATCH --job-name={command.name}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={command.name}-%j.log
# Add what the cluster asks for, such as --partition, --time, --cpus-per-task and --gpus-per-node.

cd {shlex.quote(str(command.directory))} || exit 2
# Slurm sends USR1 two minutes before the limit of time, and TERM when the job is cancelled or preempted. The traps come
# before the start: a signal right after it would end this script and leave the supervisor without it.
pass_on() {{
    if [ -z "$!" ]; then exit 143; fi
    kill -"$1" "$!"
}}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
{shlex.join(command.all_words)} &
supervisor=$!
# A signal ends `wait` early, so that it is repeated while the supervisor saves.
while kill -0 "$supervisor" 2>/dev/null; do
    wait "$supervisor"
done
wait "$supervisor"
status=$?
if [ "$status" -eq {REQUEUE_STATUS} ] && [ -n "$SLURM_JOB_ID" ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
"""


def _render_slurm_nodes(command: ServiceCommand) -> str:
    words, port = _split_rdzv(command.words)
    size = (
        str(command.max_nodes) if command.min_nodes == command.max_nodes else f"{command.min_nodes}-{command.max_nodes}"
    )
    start = shlex.join([command.python, "-m", "genesis", "supervise"])
    return f"""\
#!/bin/bash
#SBATCH --job-name={command.name}
#SBATCH --nodes={size}
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={command.name}-%j.log
# Add what the cluster asks for, such as --partition, --time, --cpus-per-task and --gpus-per-node.

cd {shlex.quote(str(command.directory))} || exit 2
# One supervisor per node; they meet at the first node of the list.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Slurm sends USR1 two minutes before the limit of time, and TERM when the job is cancelled or preempted. They go
# to the supervisors, which a signal to srun itself would not reach.
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
srun --ntasks-per-node=1 --kill-on-bad-exit=0 {start} --rdzv "$host:{port}" {shlex.join(words)} &
step=$!
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
done
wait "$step"
status=$?
if [ "$status" -eq {REQUEUE_STATUS} ] && [ -n "$SLURM_JOB_ID" ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
"""


def _split_rdzv(words: Sequence[str]) -> tuple[list[str], str]:
    """Returns the words without `--rdzv HOST:PORT`, and the port."""
    for place, word in enumerate(words):
        if word == "--rdzv" or word.startswith("--rdzv="):
            end = place + (2 if word == "--rdzv" else 1)
            return [*words[:place], *words[end:]], words[end - 1].rpartition(":")[2]
    raise ValueError("several nodes without --rdzv")


def _render_kubernetes(command: ServiceCommand) -> str:
    """Returns a claim for the working directory, and a Job; for several nodes an indexed one, and a headless service.

    A pod of an indexed job has a name of its own, its number, by which the others reach it through the service.
    """
    words = ["genesis", "supervise", *command.words]
    if command.max_nodes > 1:
        rest, port = _split_rdzv(command.words)
        words = ["genesis", "supervise", "--rdzv", f"{command.name}-0.{command.name}:{port}", *rest]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _STOP_SECONDS,
        "containers": [
            {
                "name": "genesis",
                "image": "genesis:latest",
                "command": words,
                "workingDir": "/work",
                "volumeMounts": [{"name": "work", "mountPath": "/work"}, {"name": "memory", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": command.name}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [REQUEUE_STATUS]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(GAVE_UP_STATUSES)}},
    ]
    labels = {"app.kubernetes.io/name": "genesis", "app.kubernetes.io/instance": command.name}
    is_one = command.max_nodes == 1
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": command.name, "labels": labels},
        "spec": {
            "accessModes": ["ReadWriteOnce" if is_one else "ReadWriteMany"],
            "resources": {"requests": {"storage": "100Gi"}},
        },
    }
    job: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": command.name, "labels": labels},
        "spec": {
            "backoffLimit": 20,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    manifests: list[dict[str, Any]] = [claim, job]
    if not is_one:
        pod["subdomain"] = command.name
        job["spec"] |= {
            "completionMode": "Indexed",
            "completions": command.max_nodes,
            "parallelism": command.max_nodes,
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": command.name, "labels": labels},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": command.name},
            },
        }
        manifests.insert(1, service)
    return (
        "# Change `image` to one that has genesis, and the size of the claim, which holds the working directory:\n"
        "# recipes, corpora and runs. Add `resources.limits` for GPUs.\n"
        + yaml.safe_dump_all(manifests, sort_keys=False)
    )
