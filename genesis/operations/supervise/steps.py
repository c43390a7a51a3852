"""The acts of which both loops consist: free, resolve, launch, watch, prepare a restart, finish.

`RunState` is what the supervisor knows, `LauncherClient` what it starts processes with; each act is given both.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from genesis.base.errors import RunEndedError
from genesis.operations.supervise.attempt import Attempt, Peers, Sight, read_from
from genesis.operations.supervise.checkpoints import list_steps, move_aside
from genesis.operations.supervise.cleanup import Scene, wait_until_free
from genesis.operations.supervise.decide import Action
from genesis.operations.supervise.goodput import describe_goodput, format_seconds
from genesis.operations.supervise.launcher_client import LauncherClient
from genesis.operations.supervise.observers import Launch
from genesis.operations.supervise.plan import NodePlace, Plan, attempt_folder, build_jobs, read_facts
from genesis.operations.supervise.run_state import RunState
from genesis.operations.supervise.space import wait_for_space
from genesis.operations.supervise.status import State
from genesis.operations.supervise.stops import StopRequests
from genesis_callbacks.base.event_reader import EventFollower

_HELD_SECONDS: Final = 180.0


def free(run: RunState, client: LauncherClient, *, has_lock: bool = True) -> None:
    """Waits until nothing of the last attempt is held.

    Args:
        run: The run.
        client: The connection to the launcher.
        has_lock: Whether the run's lock must be free, too: ranks of other nodes may hold it.

    Raises:
        RunEndedError: Something does not become free.
    """
    pids = [] if client.state is None else [child.pid for child in client.state.children]
    client.end_children()  # those of a supervisor that was killed, if they are not watched again
    spared = {os.getpid(), *([] if client.pid is None else [client.pid])}
    scene = Scene(run.options.run_dir, run.mark, spared, pids, run.options.port, has_lock=has_lock)
    run.meter.enter("waiting", time.monotonic())
    left = wait_until_free(scene, _HELD_SECONDS, run.report)
    run.meter.enter("start", time.monotonic())
    foreign = [each for each in left if not each.text.startswith("port ")]  # a taken port is an end of its own
    if foreign:
        text = ", ".join(each.text for each in foreign)
        raise RunEndedError(f"the run cannot be launched, because {text} is not free after {_HELD_SECONDS:g} s")


def resolve(run: RunState, client: LauncherClient, *, has_lock: bool = True) -> None:
    """Reads what the recipe says, which a child of the launcher resolves as `genesis fit` does.

    Raises:
        RunEndedError: The recipe cannot be resolved; the exit status is the child's.
        UserError: This supervisor cannot run the recipe.
    """
    free(run, client, has_lock=has_lock)
    options = run.options
    out = options.directory / "recipe.json"
    out.unlink(missing_ok=True)
    client.call("genesis.cli.supervise_recipe:main", [str(out), *options.fit])
    facts = read_facts(options.directory)
    if facts is None:
        raise RunEndedError(f"the recipe was not resolved (see {options.directory / 'job.log'})")
    facts.check(options.run_dir, has_nodes=options.nodes is not None, may_skip_data=options.policy.may_skip_data)
    if facts.note:
        run.report(facts.note)
    run.facts = facts


def launch(run: RunState, client: LauncherClient, port: int, place: NodePlace | None = None) -> EventFollower:
    """Starts the ranks of the attempt that `run.memory` names, and returns what follows its events.

    Raises:
        RunEndedError: No rank can be started.
    """
    assert run.facts is not None
    options, attempt = run.options, run.memory.attempt
    run.save()
    jobs = build_jobs(
        *(options.fit, options.run_dir, run.facts, run.plan, attempt, port, run.mark), place, run.skips.positions
    )
    run.tell("launching" if run.unrecovered is None else "recovering", run.reason)
    run.meter.enter("start", time.monotonic())
    # Before the fork, or an event of a quick rank would be missed; from now on, because clocks of several machines, and
    # of one machine before and after a reboot, cannot be compared with those of earlier events.
    events = EventFollower(options.run_dir, is_from_now=True)
    client.launch(attempt, jobs)
    return events


def watch(
    run: RunState,
    client: LauncherClient,
    find_stop: Callable[[], str | None],
    echo: Callable[[bytes], None],
    *,
    events: EventFollower | None,
    first_rank: int = 0,
    peers: Peers | None = None,
) -> Attempt:
    """Returns the attempt whose ranks the launcher has, after letting the observers know of it.

    Args:
        run: The run.
        client: The connection to the launcher.
        find_stop: Returns why the ranks shall save and stop, or None.
        echo: Prints what this node's first rank has printed.
        events: What follows the attempt's events; None for ranks that were found running.
        first_rank: This node's first rank.
        peers: The other nodes; None on one node.
    """
    assert run.facts is not None
    options, number = run.options, run.memory.attempt
    folder = attempt_folder(run.paths, number)
    ranks = range(first_rank, first_rank + run.facts.num_ranks)
    outputs = {rank: folder / f"rank-{rank}.log" for rank in ranks}
    output = outputs[first_rank]
    num_echoed = output.stat().st_size if events is None and output.exists() else 0

    def look(sight: Sight) -> None:
        nonlocal num_echoed
        run.follow(sight)
        news = read_from(output, num_echoed)
        num_echoed += len(news)
        if news:
            echo(news)

    followed = events or EventFollower(options.run_dir)
    attempt = Attempt(options.run_dir, client, outputs, options.limits, find_stop, look, followed, peers)
    who = ", ".join(f"rank {rank} is process {pid}" for rank, pid in attempt.pids.items())
    where = "" if options.nodes is None else f" on {options.nodes.name}"
    run.report(f"attempt {number}: {who}; {run.plan.describe(run.memory.saved_step)}")
    run.events.append("launched", text=f"attempt {number}{where}: {who}")
    run.observers.call(lambda each: each.on_launch(Launch(options.run_dir, number, attempt.pids, events is None)))
    return attempt


def prepare_restart(
    run: RunState, client: LauncherClient, action: Action, stops: StopRequests, *, has_lock: bool = True
) -> None:
    """Does what was decided before the next attempt: plans it, waits, moves checkpoints aside.

    Raises:
        RunEndedError: The disk stays full, or something that the last attempt held does not become free.
    """
    run.plan = Plan.follow(run.plan, action, list_steps(run.options.run_dir))
    if action.skips and run.facts is not None:  # saved before the launch, so that none is skipped uncounted
        run.change_skips(run.skips.add(action.skips, run.facts.global_batch_size))
    if action.delay_seconds:
        run.report(f"  waiting {format_seconds(action.delay_seconds)}: no progress between the last ends")
        run.meter.enter("waiting", time.monotonic())
        stops.wait(action.delay_seconds)
    if action.waits_for_space:
        run.meter.enter("waiting", time.monotonic())
        run.tell("waiting", "disk space")
        wait_for_space(run.options.run_dir, run.options.wait_seconds, stops, run.report)
    if run.plan.is_fresh:
        free(run, client, has_lock=has_lock)
        move_aside(run.options.run_dir)
        run.memory.best_step = 0
        if action.is_fresh:  # the positions are of a run that is over; the count stays
            run.change_skips(replace(run.skips, positions=()))


def finish(run: RunState, client: LauncherClient, state: State, reason: str, status: int) -> int:
    """Ends the supervision, lets everybody know, and returns the exit status."""
    run.memory.is_over = True
    run.save()
    run.check_saved()
    run.tell(state, reason)
    client.leave()
    final = run.snapshot()
    run.events.append("completed" if state == "completed" else "stopped", step=final.step, text=reason)
    run.report(f"{state}: step {final.step}, crashes {final.num_crashes}" + (f"; {reason}" if reason else ""))
    for line in [] if state == "completed" else run.records.describe_tried(run.memory.first_crash):
        run.report(line)
    run.report(describe_goodput(final.goodput))
    run.observers.call(lambda each: each.on_complete(final))
    return status
