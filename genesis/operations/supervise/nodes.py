"""The loop on several nodes: a supervisor on each, which meets the others before each attempt and decides with them.

    loop of a node:  free -> meet -> agree -> fork its ranks -> watch -> tell what is left -> do what node 0 decided

A round is one attempt with the nodes that met for it (`operations.supervise.rendezvous`). Node 0 of a round decides for
all: it compares what the nodes are, names the attempt and its plan, gathers what is left of all ranks, classifies the
end by the first cause among them, records the crash and gives what follows. Any node may be node 0 of the next round,
so that each keeps what a decision needs: attempt, progress, plan; the crashes lie in the run's directory, which all
share.

Ranks of all nodes end together. They save first if a node is asked to stop or another node wants to take part; where a
node is lost they are ended, and the run continues from the newest checkpoint. Neither counts as a crash. A preempted
node leaves the others, which go on as soon as enough of them meet; Ctrl-C on any node ends the run on all of them,
because a person wants it to end. The number of nodes is not part of the recipe: a global batch is the same windows on
any number of ranks.

A supervisor that was killed and started again ends the ranks that it left, since the others have given them up, and
meets the others again. The machine of `--rdzv` must be there: without it nobody meets, and the others wait for it.
"""

import contextlib
import math
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from genesis import __version__
from genesis.base.errors import UserError
from genesis.operations.supervise.attempt import Attempt
from genesis.operations.supervise.checkpoints import newest_step
from genesis.operations.supervise.classify import Evidence, RankEnd, classify
from genesis.operations.supervise.ends import ENDS, EXIT_COMPLETE, EXIT_REQUEUE
from genesis.operations.supervise.launcher_client import LauncherClient
from genesis.operations.supervise.observers import Observer, Observers
from genesis.operations.supervise.options import NodeOptions, SuperviseOptions
from genesis.operations.supervise.plain import decode
from genesis.operations.supervise.plan import NodePlace, Plan
from genesis.operations.supervise.rendezvous import (
    Meeting,
    Messages,
    NotMetError,
    StoreLostError,
    Watch,
    describe_difference,
)
from genesis.operations.supervise.run_state import RunState
from genesis.operations.supervise.skips import Skips, choose_newest
from genesis.operations.supervise.state import read_skips
from genesis.operations.supervise.steps import finish, free, launch, prepare_restart, resolve, watch
from genesis.operations.supervise.stops import StopRequests
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.untrusted import read_text

_TOKEN_NAME: Final = "nodes.token"
_TOKEN_SECONDS: Final = 15.0
"""Shared file systems show a new file to other machines after some seconds."""
_READ_SECONDS: Final = 20.0
_OUTPUT_CHARACTERS: Final = 1 << 14

VerdictKind = Literal["completed", "membership", "restart", "stop", "interrupted"]


@dataclass(frozen=True)
class Round:
    """The nodes of an attempt.

    Args:
        messages: The messages between them.
        watch: Which of them live.
        place: Where this node stands.
        port: The port at which the ranks meet.
    """

    messages: Messages
    watch: Watch
    place: NodePlace
    port: int

    def wait(self, key: str, node: int, limit_seconds: float = math.inf) -> Any:
        """Returns a message of a node; None if the node is lost, or the limit has passed, before it comes."""
        end = time.monotonic() + limit_seconds
        return self.messages.wait(key, lambda: self.watch.is_gone(node) or time.monotonic() > end)


@dataclass(frozen=True)
class Verdict:
    """What follows an attempt on all nodes.

    Args:
        kind: What to do. After "membership" the nodes that were asked to stop end, and the others meet again; after
            "interrupted" all end.
        text: Why, for people.
        exit_status: With which status "stop" ends.
        plan: The plan of the next attempt.
    """

    kind: VerdictKind
    text: str
    exit_status: int = 0
    plan: Plan = field(default_factory=Plan)


@dataclass
class Party:
    """What this node brings to each round.

    Args:
        run: What it knows of the run.
        client: The connection to its launcher.
        meeting: Its end of the rendezvous.
        stops: Why it shall stop.
        nodes: How it meets the others.
        observers: Those of the whole run: node 0 has all of them, the others only those that are local.
        num_rounds: Number of attempts that it has taken part in.
    """

    run: RunState
    client: LauncherClient
    meeting: Meeting
    stops: StopRequests
    nodes: NodeOptions
    observers: Sequence[Observer]
    num_rounds: int = 0

    def find_own_stop(self) -> str | None:
        """Returns why this node shall save and stop, with the name by which the other nodes know it; or None."""
        reason = self.stops.find()
        return None if reason is None else f"node {self.nodes.name}: {reason}"

    def finish(self, kind: Literal["completed", "stopped", "requeued"], reason: str, status: int) -> int:
        """Ends the supervision on this node."""
        return finish(self.run, self.client, kind, reason, status)


def supervise_nodes(
    options: SuperviseOptions,
    report: Callable[[str], None],
    echo: Callable[[bytes], None],
    observers: Sequence[Observer] = (),
) -> int:
    """Supervises a run on this node, together with the supervisors of the other nodes; returns the exit status.

    Args:
        options: The options; `nodes` is given.
        report: Prints a line.
        echo: Prints what this node's first rank has printed.
        observers: What else follows the run. All but the local ones are node 0's.

    Raises:
        RunEndedError: Something that the last attempt held did not become free, or no rank can be started.
        UserError: The nodes did not meet, or this one must not take part.
    """
    assert options.nodes is not None
    run = RunState(options, report, _choose_local(observers))
    run.is_leader = False
    client = LauncherClient(options.directory, run.mark)
    stops = StopRequests(options.preempt_file, options.preempt_url)
    party = Party(run, client, Meeting(options.nodes, report), stops, options.nodes, observers)
    with stops.watching():
        try:
            return _supervise(party, echo)
        finally:
            client.leave()
            run.close()


def _choose_local(observers: Sequence[Observer]) -> list[Observer]:
    return [each for each in observers if each.is_local]


def _supervise(party: Party, echo: Callable[[bytes], None]) -> int:
    run, client, meeting = party.run, party.client, party.meeting
    client.connect()  # ranks that an earlier supervisor left are freed before anything else
    # The run's lock need not be free: ranks of the other nodes may train meanwhile.
    resolve(run, client, has_lock=False)
    while True:
        free(run, client, has_lock=False)
        met: Round | int | None = None
        status: int | None = None
        try:
            met = _meet(party)
            status = met if isinstance(met, int) else _go_round(party, met, echo)
        except StoreLostError:
            run.report(f"the rendezvous at {party.nodes.endpoint} is lost, waiting for it")
            meeting.forget()
        finally:
            if isinstance(met, Round):
                met.watch.close()
        if status is not None:
            meeting.leave()
            return status


def _meet(party: Party) -> Round | int:
    """Waits for the other nodes, and returns the round, or the exit status if this node shall not take part."""
    run, meeting, nodes, stops = party.run, party.meeting, party.nodes, party.stops
    run.meter.enter("waiting", time.monotonic())
    try:
        met = meeting.join(stops.find, nodes.join_seconds)
    except NotMetError as error:
        if not party.num_rounds:
            meeting.leave()
            raise
        return party.finish("requeued", str(error), EXIT_REQUEUE)  # what was trained is saved
    if met is None:
        return party.finish("requeued", f"{stops.find()} before the launch", stops.requeue_status)
    messages, info = met
    store_info = info.bootstrap_store_info
    assert store_info is not None
    interface = meeting.interface if info.world_size > 1 else None
    place = NodePlace(info.rank, info.world_size, store_info.master_addr, interface, messages.number)
    watch = Watch(messages, nodes.peer_seconds, meeting.find_waiting, nodes.max_nodes)
    return Round(messages, watch, place, run.options.port or store_info.master_port)


def _go_round(party: Party, round_: Round, echo: Callable[[bytes], None]) -> int | None:
    """Agrees, trains and decides once; returns the exit status, or None to meet again."""
    run, peers = party.run, round_.watch
    if not _agree(party, round_):
        return None
    go = round_.messages.peek("go")
    _take_over(party, round_, go)
    events = launch(run, party.client, go["port"], round_.place)

    def find_stop() -> str | None:
        own = party.find_own_stop()
        if own is not None:
            peers.ask_stop(own)
        return peers.stop or own

    assert run.facts is not None
    first = round_.place.node * run.facts.num_ranks
    attempt = watch(run, party.client, find_stop, echo, events=events, first_rank=first, peers=peers)
    peers.watch_growth()
    evidence = attempt.run()
    run.count_time(attempt.sight)
    return _follow(party, _settle(party, round_, attempt, evidence), attempt)


def _follow(party: Party, verdict: Verdict, attempt: Attempt) -> int | None:
    """Does what was decided; returns the exit status, or None to meet again."""
    run = party.run
    run.plan = verdict.plan
    reason = party.find_own_stop()
    if reason is not None and verdict.kind in ("membership", "restart", "interrupted"):
        run.events.append("preempted", step=attempt.sight.step, text=reason)
    if verdict.kind == "completed":
        run.recover(attempt.sight)
        return party.finish("completed", "", EXIT_COMPLETE)
    if verdict.kind == "stop":
        return party.finish("stopped", verdict.text, verdict.exit_status)
    if verdict.kind == "interrupted":
        return party.finish("requeued", verdict.text, verdict.exit_status)
    if reason is not None:
        return party.finish("requeued", reason, party.stops.requeue_status)
    if verdict.kind == "membership":
        run.report(f"attempt {run.memory.attempt} ended, and the nodes meet again: {verdict.text}")
        run.tell("recovering", verdict.text)
    elif not run.is_leader:
        run.report(f"attempt {run.memory.attempt} ended: {verdict.text}")
        run.tell("recovering", verdict.text)
    return None


# ---- before an attempt


def _agree(party: Party, round_: Round) -> bool:
    """Returns whether the nodes of a round can run an attempt together; node 0 has then published how.

    Raises:
        UserError: This node must not take part.
    """
    messages, node = round_.messages, round_.place.node
    messages.put(f"hello/{node}", _describe(party))
    if node == 0:
        _lead(party, round_)
    token = round_.wait("token", 0)
    if token is not None:
        messages.put(f"seen/{node}", _sees(party.run, token))
    go = round_.wait("go", 0)
    if go is None:
        return False
    if go["error"]:
        if node in go["guilty"]:
            raise UserError(go["error"])
        party.run.report(f"a node cannot take part: {go['error']}")
        return False
    return True


def _describe(party: Party) -> dict[str, Any]:
    run = party.run
    facts, options, memory = run.facts, run.options, run.memory
    assert facts is not None
    return {
        **{"name": party.nodes.name, "version": __version__, "nodes": party.nodes.size},
        "run_dir": str(options.run_dir.resolve()),
        **{"recipe": facts.recipe_hash, "ranks": facts.num_ranks, "rounds": party.num_rounds},
        **{"attempt": memory.attempt, "first_crash": memory.first_crash},
        **{"best_step": memory.best_step, "plan": asdict(run.plan)},
        **{"skips": asdict(run.skips), "may_skip_data": options.policy.may_skip_data},
    }


def _lead(party: Party, round_: Round) -> None:
    """Compares the nodes and publishes how the attempt begins, or who of them must not take part."""
    run, messages = party.run, round_.messages
    token = uuid.uuid4().hex
    replace_file(run.paths.supervisor / _TOKEN_NAME, token.encode())
    messages.put("token", token)
    others = range(1, messages.num_nodes)
    hellos = {0: _describe(party)}
    seen = {0: True}
    for node in others:
        hello = round_.wait(f"hello/{node}", node)
        answer = round_.wait(f"seen/{node}", node)
        if hello is None or answer is None:
            messages.put("go", {"error": f"node {node} was lost before the launch", "guilty": []})
            return
        hellos[node], seen[node] = hello, answer
    # A node that has trained already knows the run; a node that comes later has to fit.
    model = max(hellos, key=lambda node: (hellos[node]["rounds"], -node))
    found = {node: _find_error(hellos[model], hellos[node], seen, model == node) for node in hellos}
    errors = {node: text for node, text in found.items() if text}
    if errors:
        is_first = not hellos[model]["rounds"]
        guilty = sorted(hellos if is_first else errors)
        messages.put("go", {"error": "; ".join(dict.fromkeys(errors.values())), "guilty": guilty})
        return
    free(run, party.client)  # with the run's lock: now no node of this round has ranks or writers
    attempt = 1 + max(hello["attempt"] for hello in hellos.values())
    run.memory.first_crash = max(hello["first_crash"] for hello in hellos.values())
    # Before any node launches: what is restored here, the ranks of all nodes continue from.
    Observers(party.observers, run.report).call(lambda each: each.before_launch(run.options.run_dir, attempt))
    run.take_restored()
    # The file is the newest, unless a full disk has not taken it.
    known = [run.skips, *(decode(Skips, hello["skips"]) for hello in hellos.values())]
    run.skips = choose_newest([read_skips(run.options.run_dir), *known])
    go = {
        **{"error": "", "port": round_.port, "plan": hellos[model]["plan"], "skips": asdict(run.skips)},
        **{"attempt": attempt, "first_crash": run.memory.first_crash},
        "best_step": max(hello["best_step"] for hello in hellos.values()),
        "names": [hellos[node]["name"] for node in sorted(hellos)],
    }
    messages.put("go", go)


def _find_error(model: Mapping[str, Any], hello: Mapping[str, Any], seen: Mapping[int, bool], is_model: bool) -> str:
    if is_model:
        return ""
    # First the directories: a recipe names its own, so that recipes differ as well.
    if not all(seen.values()):
        return (
            f"{model['run_dir']} on {model['name']} and {hello['run_dir']} on {hello['name']} are different "
            "directories: give the same --run_dir on each node, on storage that all nodes share"
        )
    difference = describe_difference(model, hello)
    return f"the nodes differ in {difference}: give the same command on each node" if difference else ""


def _sees(run: RunState, token: str) -> bool:
    """Returns whether this node sees what node 0 has written into the run's directory."""
    deadline = time.monotonic() + _TOKEN_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if read_text(run.paths.supervisor / _TOKEN_NAME) == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _take_over(party: Party, round_: Round, go: Mapping[str, Any]) -> None:
    """Takes over what node 0 has published: who leads, and what is known of the run."""
    run, run_dir, memory = party.run, party.run.options.run_dir, party.run.memory
    was_leader, run.is_leader = run.is_leader, round_.place.node == 0
    if run.is_leader:
        run.observers = Observers(party.observers, run.report)
    elif was_leader:  # another node mirrors and alerts from now on
        snapshot, local = run.snapshot(), _choose_local(party.observers)
        run.observers.call(lambda each: None if each.is_local else each.on_complete(snapshot))
        run.observers = Observers(local, run.report)
    memory.attempt, memory.first_crash, memory.best_step = go["attempt"], go["first_crash"], go["best_step"]
    run.repeated_until, memory.saved_step = memory.best_step, newest_step(run_dir)
    run.skips = decode(Skips, go["skips"])
    run.read_records()
    run.plan = Plan(**go["plan"])
    party.num_rounds += 1
    if not run.is_leader:  # node 0 has done so before it let the others launch
        run.observers.call(lambda each: each.before_launch(run_dir, memory.attempt))
    run.report(f"node {round_.place.node} of {round_.place.num_nodes} ({', '.join(go['names'])})")


# ---- after an attempt


def _settle(party: Party, round_: Round, attempt: Attempt, evidence: Evidence) -> Verdict:
    """Hands over what is left of this node's ranks, and returns what node 0 has decided."""
    messages, node = round_.messages, round_.place.node
    is_interrupted = party.stops.is_interrupted
    messages.put(f"end/{node}", {"evidence": encode_evidence(evidence), "is_interrupted": is_interrupted})
    if node != 0:
        content = round_.wait("verdict", 0)
        messages.put(f"read/{node}", True)
        if content is None:
            return Verdict("membership", "node 0 is lost", plan=keep_size(party.run.plan))
        return Verdict(**{**content, "plan": Plan(**content["plan"])})
    gathered = [evidence]
    lost = []
    for other in range(1, messages.num_nodes):
        content = round_.wait(f"end/{other}", other)
        if content is None:
            lost.append(other)
        else:
            gathered.append(decode_evidence(content["evidence"]))
            is_interrupted = is_interrupted or content["is_interrupted"]
    verdict = _decide(party, attempt, merge_evidence(gathered), lost, is_interrupted=is_interrupted)
    messages.put("verdict", asdict(verdict))
    for other in set(range(1, messages.num_nodes)) - set(lost):  # the host of the store must exit last
        round_.wait(f"read/{other}", other, _READ_SECONDS)
    return verdict


def _decide(
    party: Party, attempt: Attempt, evidence: Evidence, lost: Sequence[int], *, is_interrupted: bool
) -> Verdict:
    run = party.run
    going_on = keep_size(run.plan)
    diagnosis = classify(evidence)
    reason = ""
    if is_interrupted and not (diagnosis.end_class is None and _has_ended_well(evidence)):
        return Verdict("interrupted", diagnosis.reason, 128 + signal.SIGINT, plan=going_on)
    if lost:
        reason = f"node {', '.join(map(str, lost))} is lost"
    elif diagnosis.end_class == "preempted":
        reason = diagnosis.reason
    elif diagnosis.end_class is None and not _has_ended_well(evidence):
        reason = "the nodes have lost one another"
    if reason:
        return Verdict("membership", reason, plan=going_on)
    if diagnosis.end_class is None:
        return Verdict("completed", "", plan=going_on)
    action = run.conclude(attempt, evidence, diagnosis)
    run.records.set_statuses({end.rank: end.status for end in evidence.ranks if end.status is not None})
    if action.kind == "stop":
        text = f"{action.text}; {ENDS[diagnosis.end_class].remedy}"
        return Verdict("stop", text, action.exit_status or 1)
    # The other nodes wait for the verdict meanwhile.
    prepare_restart(run, party.client, action, party.stops, has_lock=False)
    return Verdict("restart", f"{diagnosis.end_class}: {diagnosis.reason}", plan=run.plan)


def keep_size(plan: Plan) -> Plan:
    """Returns the plan of an attempt that continues from the newest checkpoint as the last one was. Pure."""
    return Plan(micro_batch_divisor=plan.micro_batch_divisor)


def encode_evidence(evidence: Evidence) -> dict[str, Any]:
    """Returns evidence as JSON, with moments by the wall clock, which nodes have in common."""
    offset = time.time() - time.monotonic()
    ranks = [
        asdict(
            replace(
                end,
                moment_seconds=end.moment_seconds + offset,
                output=end.output[-_OUTPUT_CHARACTERS:],
            )
        )
        for end in evidence.ranks
    ]
    return {**asdict(evidence), "ranks": ranks}


def decode_evidence(content: Mapping[str, Any]) -> Evidence:
    """Returns evidence of another node, with moments by this machine's monotonic clock."""
    offset = time.time() - time.monotonic()
    ranks = [RankEnd(**{**end, "moment_seconds": end["moment_seconds"] - offset}) for end in content["ranks"]]
    return Evidence(**{**content, "ranks": ranks})


def merge_evidence(found: Sequence[Evidence]) -> Evidence:
    """Returns the evidence of all nodes as that of one attempt. Pure.

    A node whose rank was stopped is silent at the same time as the others, which wait for it: the longest
    silence counts.
    """
    hung = max((each for each in found if each.hung_seconds is not None), key=_hung_seconds, default=None)
    return Evidence(
        ranks=[end for each in found for end in each.ranks],
        has_trained=any(each.has_trained for each in found),
        hung_rank=None if hung is None else hung.hung_rank,
        hung_seconds=None if hung is None else hung.hung_seconds,
        stop_reason=next((each.stop_reason for each in found if each.stop_reason is not None), None),
        oom_kills=sum(each.oom_kills for each in found),
        is_disk_full=any(each.is_disk_full for each in found),
    )


def _has_ended_well(evidence: Evidence) -> bool:
    return all(end.status == 0 for end in evidence.ranks)


def _hung_seconds(evidence: Evidence) -> float:
    return evidence.hung_seconds or 0.0
