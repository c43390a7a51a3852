"""The loop on one node: launch from the newest checkpoint, watch, classify the end, decide, clean up; until the end."""

from collections.abc import Callable, Sequence

from genesis.base.errors import numbered
from genesis.operations.supervise.checkpoints import newest_step
from genesis.operations.supervise.classify import classify
from genesis.operations.supervise.cleanup import choose_port
from genesis.operations.supervise.ends import ENDS, EXIT_COMPLETE, EXIT_REQUEUE
from genesis.operations.supervise.launcher_client import LauncherClient
from genesis.operations.supervise.observers import Observer
from genesis.operations.supervise.options import SuperviseOptions
from genesis.operations.supervise.plan import read_facts
from genesis.operations.supervise.run_state import RunState
from genesis.operations.supervise.steps import finish, free, launch, prepare_restart, resolve, watch
from genesis.operations.supervise.stops import StopRequests
from genesis_callbacks.base.event_reader import EventFollower


def supervise(
    options: SuperviseOptions,
    report: Callable[[str], None],
    echo: Callable[[bytes], None],
    observers: Sequence[Observer] = (),
) -> int:
    """Supervises a run until it is complete, must not be restarted, or is left to its queue; returns the status.

    Args:
        options: The options.
        report: Prints a line.
        echo: Prints what rank 0 has printed.
        observers: What else follows the run.

    Raises:
        RunEndedError: Something that the last attempt held did not become free, or no rank can be started.
    """
    run = RunState(options, report, observers)
    client = LauncherClient(options.directory, run.mark)
    stops = StopRequests(options.preempt_file, options.preempt_url)
    with stops.watching():
        try:
            return _supervise(run, client, stops, echo)
        finally:
            client.leave()
            run.close()


def _supervise(run: RunState, client: LauncherClient, stops: StopRequests, echo: Callable[[bytes], None]) -> int:
    is_adopted, port = _adopt(run, client), 0
    if not is_adopted:
        resolve(run, client)
    while True:
        events: EventFollower | None = None
        if not is_adopted:
            free(run, client)
            if stops.find() is not None:
                return finish(run, client, "requeued", f"{stops.find()} before the launch", EXIT_REQUEUE)
            events, port = _launch(run, client, port)
        attempt = watch(run, client, stops.find, echo, events=events)
        is_adopted = False
        evidence = attempt.run()
        run.count_time(attempt.sight)
        diagnosis = classify(evidence)
        if diagnosis.end_class is None:
            run.recover(attempt.sight)
            return finish(run, client, "completed", "", EXIT_COMPLETE)
        action = run.conclude(attempt, evidence, diagnosis)
        if action.kind == "requeue":
            return finish(run, client, "requeued", diagnosis.reason, stops.requeue_status)
        if action.kind == "stop":
            text = f"{action.text}; {ENDS[diagnosis.end_class].remedy}"
            return finish(run, client, "stopped", text, action.exit_status or 1)
        prepare_restart(run, client, action, stops)


def _adopt(run: RunState, client: LauncherClient) -> bool:
    """Returns whether ranks that an earlier supervisor has started still run, or ended while nobody looked."""
    if not client.connect():
        return False
    state = client.state
    assert state is not None
    if state.attempt == 0 or state.attempt != run.memory.attempt or run.was_over:
        return False
    run.facts = read_facts(run.options.directory)
    if run.facts is None:
        return False
    num_running = sum(child.status is None for child in state.children)
    run.report(
        f"found attempt {state.attempt}: {num_running:,} of {numbered(len(state.children), 'ranks')} run, watched again"
    )
    return True


def _launch(run: RunState, client: LauncherClient, last_port: int) -> tuple[EventFollower, int]:
    """Launches the next attempt; returns what follows its events, and the port at which its ranks meet."""
    memory, run_dir = run.memory, run.options.run_dir
    memory.attempt += 1
    run.repeated_until = memory.best_step
    run.observers.call(lambda each: each.before_launch(run_dir, memory.attempt))
    run.take_restored()
    memory.saved_step = newest_step(run_dir)
    port = run.options.port or choose_port((last_port,))  # another one: the last may be what the ranks failed of
    return launch(run, client, port), port
