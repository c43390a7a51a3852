"""One command under torchrun and under Slurm, on one node and on two: the losses of one process.

The launchers run in a network namespace of their own, where every port is free. Slurm is a stand-in: the variables that
`srun` sets, and a process for each task.
"""

import csv
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis

pytestmark = [pytest.mark.slow, pytest.mark.process]

_LIMIT_SECONDS = 400.0
_CROSSES = "tensor parallelism crosses nodes"


def build_torchrun(num_nodes: int, per_node: int) -> list[str]:
    """Returns the shell words with which each node starts its ranks."""
    agent = f"{sys.executable} -m torch.distributed.run --nproc-per-node {per_node}"
    if num_nodes == 1:
        return [f"{agent} --standalone -m"]
    meeting = "--master-addr 127.0.0.1 --master-port 29500"
    return [f"{agent} --nnodes {num_nodes} --node-rank {node} {meeting} -m" for node in range(num_nodes)]


def build_srun(num_nodes: int, per_node: int) -> list[str]:
    """Returns the shell words with which `srun` starts each task."""
    shared = {
        "SLURM_JOB_ID": 4711,
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": num_nodes * per_node,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_NNODES": num_nodes,
        "SLURM_NODELIST": "127.0.0.1",
    }
    tasks = []
    for rank in range(num_nodes * per_node):
        node, local = divmod(rank, per_node)
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node}
        words = " ".join(f"{name}={value}" for name, value in (shared | own).items())
        tasks.append(f"env {words} {sys.executable} -m")
    return tasks


LAUNCHERS = {"torchrun": build_torchrun, "slurm": build_srun}


def launch(starts: list[str], recipe: Path, log: Path) -> str:
    """Runs the same command by all starts at once, and returns what they print."""
    command = f"genesis fit --config {shlex.quote(str(recipe))}"
    lines = ["ip link set lo up", *(f'{start} {command} & pids="$pids $!"' for start in starts)]
    lines.append("status=0; for pid in $pids; do wait $pid || status=$?; done; exit $status")
    with log.open("wb") as out:
        done = subprocess.run(
            [
                "unshare",
                "--user",
                "--map-root-user",
                "--net",
                "--kill-child",
                "--pid",
                "--fork",
                "sh",
                "-c",
                "\n".join(lines),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    text = log.read_text(errors="replace")
    assert done.returncode == 0, text
    return text


@pytest.fixture(scope="module", autouse=True)
def _namespace() -> None:
    try:
        done = subprocess.run(["unshare", "-Urn", "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"network namespaces: no program {error.filename}")
    if done.returncode:
        pytest.skip(f"network namespaces are not allowed here: {done.stderr.decode().strip()}")


def read_losses(run_dir: Path) -> list[tuple[float, ...]]:
    names = ("step", "train/loss", "train/grad_norm", "counters/tokens_seen")
    with (run_dir / "metrics.csv").open() as file:
        return [tuple(float(row[name]) for name in names) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.fixture(scope="module")
def changes() -> dict[str, Any]:
    """Returns what the recipe of all runs has beside the usual."""
    return {"model.decoder.num_layers": 2, "trainer.enable_progress_bar": False}


@pytest.fixture(scope="module")
def straight(
    tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, changes: dict[str, Any]
) -> list[tuple[float, ...]]:
    directory = tmp_path_factory.mktemp("one")
    recipe = write_recipe(directory / "recipe.yaml", build_recipe(tiny_corpus, directory / "run"), changes)
    done = run_genesis("fit", "--config", recipe, cwd=directory)
    assert done.returncode == 0, done.stderr
    return read_losses(directory / "run")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("launcher", "num_nodes", "per_node", "axes"),
    [
        ("torchrun", 1, 2, {"context_parallel": 2}),
        ("torchrun", 2, 2, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("slurm", 2, 2, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("slurm", 2, 1, {"tensor_parallel": 2}),
    ],
    ids=["torchrun_cp", "torchrun_tp_pp", "slurm_tp_pp", "slurm_tp_crosses"],
)
def test_a_launcher_trains_the_losses_of_one_process_with_tensor_parallelism_in_its_node(
    tmp_path: Path,
    tiny_corpus: Path,
    straight: list[tuple[float, ...]],
    changes: dict[str, Any],
    launcher: str,
    num_nodes: int,
    per_node: int,
    axes: dict[str, int],
) -> None:
    strategy = {"class_path": "genesis.strategies.Sharded", "init_args": axes}
    further = {"trainer.devices": per_node, "trainer.num_nodes": num_nodes, "trainer.strategy": strategy}
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"), changes | further)
    printed = launch(LAUNCHERS[launcher](num_nodes, per_node), recipe, tmp_path / "log")
    for row, expected in zip(read_losses(tmp_path / "run"), straight, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert (_CROSSES in printed) == (axes.get("tensor_parallel", 1) > per_node)
