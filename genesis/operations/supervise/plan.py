"""What an attempt starts with: the arguments of `genesis fit`, the environment of each rank, and the recipe's facts."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.base.processes import Mark
from genesis.base.run_directory import RunDirectory
from genesis.data.skipped import Ranges, merge
from genesis.operations.supervise.decide import Action
from genesis.operations.supervise.launch_protocol import Job
from genesis.operations.supervise.plain import count, read_object, read_positions, text
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.run_directory import checkpoint_name
from genesis_callbacks.base.untrusted import open_file

FACTS_NAME: Final = "recipe.json"
_FIT: Final = "genesis.cli.main:main"
_STALL_COLUMN: Final = "checkpoint/stall_seconds"


@dataclass(frozen=True)
class RecipeFacts:
    """What the supervisor needs of the resolved recipe.

    Args:
        run_dir: The run's directory.
        num_ranks: Number of ranks on this node.
        num_nodes: Number of nodes.
        micro_batch_size: Sequences in a micro-batch.
        recipe_hash: Hash of the resolved recipe without the number of nodes; all nodes must have the same.
        global_batch_size: Sequences of a step; 0 if unknown.
        unskippable: What its data are of, if they cannot be skipped: pairs or prompts; empty if they can.
        skip_positions: The positions that the recipe itself skips.
        note: A line for the user about what the recipe gives up; empty if there is nothing.
    """

    run_dir: str
    num_ranks: int
    num_nodes: int
    micro_batch_size: int
    recipe_hash: str = ""
    global_batch_size: int = 0
    unskippable: str = ""
    skip_positions: Ranges = ()
    note: str = ""

    def check(self, run_dir: Path, *, has_nodes: bool = False, may_skip_data: int = 0) -> None:
        """Refuses a recipe that this supervisor cannot run.

        Args:
            run_dir: The supervisor's run.
            has_nodes: Whether `--nodes` is given, which replaces the recipe's number.
            may_skip_data: How many windows of data may be skipped.

        Raises:
            UserError: The recipe needs several nodes, names another directory, or has data that cannot be skipped.
        """
        if may_skip_data and self.unskippable:
            raise UserError(
                f"--may_skip_data is {may_skip_data}, but this run trains on {self.unskippable}, which cannot be "
                "skipped: leave it out"
            )
        if self.num_nodes != 1 and not has_nodes:
            raise UserError(
                f"trainer.num_nodes is {self.num_nodes}: run the supervisor on each node with --nodes {self.num_nodes} "
                "and --rdzv HOST:PORT"
            )
        if Path(self.run_dir).resolve() != run_dir.resolve():
            raise UserError(f"the recipe's run_dir is {self.run_dir}, not {run_dir}: give it by --run_dir after --")


def read_facts(directory: Path) -> RecipeFacts | None:
    """Returns the facts that `write_facts` wrote; None without valid ones."""
    content = read_object(directory / FACTS_NAME)
    try:
        return None if content is None else _decode(content)
    except (ValueError, LookupError):
        return None


def _decode(content: Mapping[str, Any]) -> RecipeFacts:
    return RecipeFacts(
        run_dir=text(content["run_dir"]),
        num_ranks=count(content["num_ranks"]),
        num_nodes=count(content["num_nodes"]),
        micro_batch_size=count(content["micro_batch_size"]),
        recipe_hash=text(content.get("recipe_hash", "")),
        global_batch_size=count(content.get("global_batch_size", 0)),
        unskippable=text(content.get("unskippable", "")),
        skip_positions=read_positions(content.get("skip_positions", [])),
        note=text(content.get("note", "")),
    )


@dataclass(frozen=True)
class Plan:
    """How the next attempt differs from the first.

    Args:
        from_step: Step of the checkpoint to start from; None for the newest.
        micro_batch_divisor: By what the size of micro-batches is divided.
        is_fresh: Whether earlier checkpoints are moved aside first.
    """

    from_step: int | None = None
    micro_batch_divisor: int = 1
    is_fresh: bool = False

    @staticmethod
    def follow(before: "Plan", action: Action, steps: Sequence[int]) -> "Plan":
        """Returns the plan after an action; smaller micro-batches stay until the supervisor ends. Pure.

        Args:
            before: The plan of the last attempt.
            action: What was decided.
            steps: Steps of the committed checkpoints, oldest first.
        """
        divisor = max(before.micro_batch_divisor, action.micro_batch_divisor)
        plan = Plan(micro_batch_divisor=divisor, is_fresh=action.is_fresh)
        if action.checkpoints_back and steps:
            # A roll back supersedes newer checkpoints, so that the second begins at what the first left.
            limit = action.before_step
            usable = [step for step in steps if limit is None or step <= limit]
            if not usable and limit == 0:
                return replace(plan, is_fresh=True)  # no step changed a weight before the storm
            usable = usable or [steps[0]]  # retention has left none: the oldest has the weights from before the storm
            return replace(plan, from_step=usable[max(0, len(usable) - 1 - action.checkpoints_back)])
        return plan

    def describe(self, newest: int) -> str:
        """Returns what the attempt starts from, for people."""
        step = newest if self.from_step is None else self.from_step
        smaller = f", micro-batches of 1/{self.micro_batch_divisor}" if self.micro_batch_divisor > 1 else ""
        return (f"from step {step}" if step and not self.is_fresh else "from the beginning") + smaller


@dataclass(frozen=True)
class NodePlace:
    """Where a node stands among those of an attempt.

    Args:
        node: Its number, from 0.
        num_nodes: Number of nodes.
        address: The address of node 0, as all nodes reach it.
        interface: The network interface for gloo; None to let gloo choose.
        start: What the ranks of one start have in common, and no others; empty for the run's mark.
    """

    node: int = 0
    num_nodes: int = 1
    address: str = "127.0.0.1"
    interface: str | None = None
    start: str = ""


ONE_NODE: Final = NodePlace()


def build_jobs(
    fit: Sequence[str],
    run_dir: Path,
    facts: RecipeFacts,
    plan: Plan,
    attempt: int,
    port: int,
    mark: Mark,
    place: NodePlace | None = None,
    skips: Ranges = (),
) -> list[Job]:
    """Returns a job for each of this node's ranks in an attempt, and makes the directory of their outputs."""
    run = RunDirectory(run_dir)
    start = "latest" if plan.from_step is None else str(run.checkpoints / checkpoint_name(plan.from_step))
    arguments = [*fit, "--run_dir", str(run_dir), "--ckpt_path", start]
    if plan.micro_batch_divisor > 1:
        size = max(1, facts.micro_batch_size // plan.micro_batch_divisor)
        arguments += ["--data.micro_batch_size", str(size)]
    if place is not None:
        arguments += ["--trainer.num_nodes", str(place.num_nodes)]
    place = place or ONE_NODE
    first = place.node * facts.num_ranks
    folder = run.supervisor / f"attempt-{attempt:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    if skips:
        # A file, because a run may skip data in more places than arguments or a launcher's packet have room for.
        recipe = {"data": {"skip_positions": [list(each) for each in merge(facts.skip_positions, skips)]}}
        path = folder / f"skips-rank-{first}.yaml"  # one for each node
        replace_file(path, json.dumps(recipe).encode() + b"\n")
        arguments += ["--config", str(path.absolute())]
    return [
        Job(
            rank=rank,
            target=_FIT,
            arguments=arguments,
            environment=build_environment(rank - first, facts.num_ranks, attempt, port, mark, place),
            directory=str(Path.cwd()),
            output=str(folder / f"rank-{rank}.log"),
            stacks=str(folder / f"rank-{rank}.stacks"),
        )
        for rank in range(first, first + facts.num_ranks)
    ]


def build_environment(
    local_rank: int, num_ranks: int, attempt: int, port: int, mark: Mark, place: NodePlace = ONE_NODE
) -> dict[str, str]:
    """Returns the environment of a rank; several ranks have that of torch's elastic agent, which Lightning knows."""
    environment = {**os.environ, mark.name: mark.value}
    world_size = num_ranks * place.num_nodes
    if world_size > 1:
        local, number, size = str(local_rank), str(place.node * num_ranks + local_rank), str(world_size)
        nodes = str(place.num_nodes)
        environment |= {
            **{"RANK": number, "LOCAL_RANK": local, "GROUP_RANK": str(place.node), "ROLE_RANK": number},
            **{"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_WORLD_SIZE": nodes},
            **{"ROLE_WORLD_SIZE": size, "MASTER_ADDR": place.address, "MASTER_PORT": str(port)},
            **{"TORCHELASTIC_RUN_ID": place.start or mark.value, "TORCHELASTIC_RESTART_COUNT": str(attempt)},
        }
    if place.interface is not None:
        # Where a machine's name leads to its loopback address, gloo would offer that one to the other nodes.
        environment.setdefault("GLOO_SOCKET_IFNAME", place.interface)
    return environment


def build_probe(target: str, arguments: Sequence[str], directory: Path, mark: Mark) -> Job:
    """Returns a job that is no training."""
    output = directory / "job.log"
    output.write_bytes(b"")
    environment = {**os.environ, mark.name: mark.value}
    return Job(0, target, list(arguments), environment, str(Path.cwd()), str(output), str(directory / "job.stacks"))


def write_facts(path: Path, facts: RecipeFacts) -> None:
    """Writes the facts for the supervisor."""
    path.write_text(json.dumps(vars(facts)), encoding="utf-8")


def save_stalls(metrics: Path, after_step: int) -> float:
    """Returns how long training waited for saves in the rows of a log after a step; 0 if nothing is logged."""
    try:
        with io.TextIOWrapper(open_file(metrics), encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
        return sum(
            float(row[_STALL_COLUMN]) for row in rows if int(row["step"]) > after_step and row.get(_STALL_COLUMN)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
