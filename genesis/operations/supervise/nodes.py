"""One run on several nodes: a supervisor on each, which meets the others before each attempt and decides with them.

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
from genesis.operations.supervise.crashes import read_crashes
from genesis.operations.supervise.ends import ENDS, EXIT_COMPLETE, EXIT_REQUEUE
from genesis.operations.supervise.loop import SuperviseOptions, Supervisor, attempt_folder
from genesis.operations.supervise.metrics import MetricsServer
from genesis.operations.supervise.observers import Launch, Observer, Observers
from genesis.operations.supervise.plan import NodePlace, Plan, build_jobs
from genesis.operations.supervise.records import Records
from genesis.operations.supervise.rendezvous import (
    Meeting,
    Messages,
    NotMetError,
    StoreLostError,
    Watch,
    describe_difference,
)
from genesis.operations.supervise.skips import choose_newest
from genesis.operations.supervise.state import decode_skips, encode_skips, read_skips
from genesis.operations.supervise.status import State
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
        messages: What they tell one another.
        watch: Which of them live.
        place: Where this node stands.
        port: The port at which the ranks meet.
    """

    messages: Messages
    watch: Watch
    place: NodePlace
    port: int


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


class NodeSupervisor(Supervisor):
    """Keeps one run alive on this node, together with the supervisors of the other nodes.

    Args:
        options: The options; `nodes` is given.
        report: Prints a line.
        echo: Prints what rank 0 has printed.
        observers: What else follows the run. All but the metrics are node 0's.
    """

    def __init__(
        self,
        options: SuperviseOptions,
        report: Callable[[str], None],
        echo: Callable[[bytes], None],
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(options, report, echo, observers)
        assert options.nodes is not None
        self._nodes = options.nodes
        self._meeting = Meeting(options.nodes, report)
        self._all_observers = Observers(observers, report)
        self._local_observers = Observers([each for each in observers if isinstance(each, MetricsServer)], report)
        self._is_leader = False
        self._waits_for_lock = False  # ranks of the other nodes may train meanwhile
        self._num_rounds = 0
        self._round: Round | None = None
        self._observers = self._local_observers

    # ---- the loop

    def _supervise(self, stops: StopRequests) -> int:
        self._client.connect()  # ranks that an earlier supervisor left are freed before anything else
        self._facts = self._resolve()
        while True:
            self._free()
            try:
                status = self._go_round(stops)
            except StoreLostError:
                self._report(f"the rendezvous at {self._nodes.endpoint} is lost, waiting for it")
                self._meeting.forget()
                status = None
            finally:
                if self._round is not None:
                    self._round.watch.close()
                    self._round = None
            if status is not None:
                self._meeting.leave()
                return status

    def _go_round(self, stops: StopRequests) -> int | None:
        """Meets, trains and decides once; returns the exit status, or None to meet again."""
        self._meter.enter("waiting", time.monotonic())
        try:
            met = self._meeting.join(stops.find, self._nodes.join_seconds)
        except NotMetError as error:
            if not self._num_rounds:
                self._meeting.leave()
                raise
            return self._finish("requeued", str(error), EXIT_REQUEUE)  # what was trained is saved
        if met is None:
            return self._finish("requeued", f"{stops.find()} before the launch", self._choose_requeue_status(stops))
        messages, info = met
        watch = Watch(messages, self._nodes.peer_seconds, self._meeting.find_waiting, self._nodes.max_nodes)
        store_info = info.bootstrap_store_info
        assert store_info is not None
        interface = self._meeting.interface if info.world_size > 1 else None
        place = NodePlace(info.rank, info.world_size, store_info.master_addr, interface, messages.number)
        self._round = Round(messages, watch, place, self._options.port or store_info.master_port)
        if not self._agree(self._round):
            return None
        self._launch_round(self._round, messages.peek("go"))
        attempt = self._build_attempt(stops, is_adopted=False)
        watch.watch_growth()
        evidence = attempt.run()
        self._meter.enter("down", attempt.end_seconds)
        self._count_saves(attempt.sight)
        return self._follow(self._settle(self._round, attempt, evidence, stops), attempt, stops)

    def _follow(self, verdict: Verdict, attempt: Attempt, stops: StopRequests) -> int | None:
        """Does what was decided; returns the exit status, or None to meet again."""
        self._plan = verdict.plan
        reason = self._find_own_stop(stops)
        if reason is not None and verdict.kind in ("membership", "restart", "interrupted"):
            self._events.append("preempted", step=attempt.sight.step, text=reason)
        if verdict.kind == "completed":
            self._recover(attempt.sight)
            return self._finish("completed", "", EXIT_COMPLETE)
        if verdict.kind == "stop":
            return self._finish("stopped", verdict.text, verdict.exit_status)
        if verdict.kind == "interrupted":
            return self._finish("requeued", verdict.text, verdict.exit_status)
        if reason is not None:
            return self._finish("requeued", reason, self._choose_requeue_status(stops))
        if verdict.kind == "membership":
            self._report(f"attempt {self._state.attempt} ended, and the nodes meet again: {verdict.text}")
            self._tell("recovering", verdict.text)
        elif not self._is_leader:
            self._report(f"attempt {self._state.attempt} ended: {verdict.text}")
            self._tell("recovering", verdict.text)
        return None

    def _find_own_stop(self, stops: StopRequests) -> str | None:
        """Returns why this node shall save and stop, with the name by which the other nodes know it; or None."""
        reason = stops.find()
        return None if reason is None else f"node {self._nodes.name}: {reason}"

    # ---- before an attempt

    def _agree(self, round_: Round) -> bool:
        """Returns whether the nodes of a round can run an attempt together; node 0 has then published how.

        Raises:
            UserError: This node must not take part.
        """
        messages, watch, node = round_.messages, round_.watch, round_.place.node
        messages.put(f"hello/{node}", self._describe())
        if node == 0:
            self._lead(round_)
        token = messages.wait("token", lambda: watch.is_gone(0))
        if token is not None:
            messages.put(f"seen/{node}", self._sees(token))
        go = messages.wait("go", lambda: watch.is_gone(0))
        if go is None:
            return False
        if go["error"]:
            if node in go["guilty"]:
                raise UserError(go["error"])
            self._report(f"a node cannot take part: {go['error']}")
            return False
        return True

    def _describe(self) -> dict[str, Any]:
        facts = self._facts
        assert facts is not None
        return {
            **{"name": self._nodes.name, "version": __version__, "nodes": self._nodes.size},
            "run_dir": str(self._options.run_dir.resolve()),
            **{"recipe": facts.recipe_hash, "ranks": facts.num_ranks, "rounds": self._num_rounds},
            **{"attempt": self._state.attempt, "first_crash": self._state.first_crash},
            **{"best_step": self._state.best_step, "plan": asdict(self._plan)},
            **{"skips": encode_skips(self._skips), "may_skip_data": self._options.policy.may_skip_data},
        }

    def _lead(self, round_: Round) -> None:
        """Compares the nodes and publishes how the attempt begins, or who of them must not take part."""
        messages, watch = round_.messages, round_.watch
        token = uuid.uuid4().hex
        replace_file(self._run.supervisor / _TOKEN_NAME, token.encode())
        messages.put("token", token)
        others = range(1, messages.num_nodes)
        hellos = {0: self._describe()}
        seen = {0: True}
        for node in others:
            hello = messages.wait(f"hello/{node}", lambda node=node: watch.is_gone(node))  # type: ignore[misc]
            answer = messages.wait(f"seen/{node}", lambda node=node: watch.is_gone(node))  # type: ignore[misc]
            if hello is None or answer is None:
                messages.put("go", {"error": f"node {node} was lost before the launch", "guilty": []})
                return
            hellos[node], seen[node] = hello, answer
        # Who has trained already knows the run; a node that comes later has to fit.
        model = max(hellos, key=lambda node: (hellos[node]["rounds"], -node))
        found = {node: self._find_error(hellos[model], hellos[node], seen, model == node) for node in hellos}
        errors = {node: text for node, text in found.items() if text}
        if errors:
            is_first = not hellos[model]["rounds"]
            guilty = sorted(hellos if is_first else errors)
            messages.put("go", {"error": "; ".join(dict.fromkeys(errors.values())), "guilty": guilty})
            return
        self._waits_for_lock = True  # now no node of this round has ranks or writers
        self._free()
        self._waits_for_lock = False
        attempt = 1 + max(hello["attempt"] for hello in hellos.values())
        self._state.first_crash = max(hello["first_crash"] for hello in hellos.values())
        # Before any node launches: what is restored here, the ranks of all nodes continue from.
        self._all_observers.call(lambda each: each.before_launch(self._options.run_dir, attempt))
        self._take_restored()
        # The file is the newest, unless a full disk has not taken it.
        known = [self._skips, *(decode_skips(hello["skips"]) for hello in hellos.values())]
        self._skips = choose_newest([read_skips(self._options.run_dir), *known])
        go = {
            **{"error": "", "port": round_.port, "plan": hellos[model]["plan"], "skips": encode_skips(self._skips)},
            **{"attempt": attempt, "first_crash": self._state.first_crash},
            "best_step": max(hello["best_step"] for hello in hellos.values()),
            "names": [hellos[node]["name"] for node in sorted(hellos)],
        }
        messages.put("go", go)

    def _find_error(
        self, model: Mapping[str, Any], hello: Mapping[str, Any], seen: Mapping[int, bool], is_model: bool
    ) -> str:
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

    def _sees(self, token: str) -> bool:
        """Returns whether this node sees what node 0 has written into the run's directory."""
        deadline = time.monotonic() + _TOKEN_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if read_text(self._run.supervisor / _TOKEN_NAME) == token:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def _launch_round(self, round_: Round, go: Mapping[str, Any]) -> None:
        options, facts, state = self._options, self._facts, self._state
        assert facts is not None
        self._is_leader = round_.place.node == 0
        if self._is_leader:
            self._observers = self._all_observers
        elif self._observers is self._all_observers:
            snapshot = self._snapshot()  # another node mirrors and alerts from now on
            self._observers.call(lambda each: None if isinstance(each, MetricsServer) else each.on_complete(snapshot))
            self._observers = self._local_observers
        state.attempt, state.first_crash, state.best_step = go["attempt"], go["first_crash"], go["best_step"]
        self._repeated_until, state.saved_step = state.best_step, newest_step(options.run_dir)
        self._skips = decode_skips(go["skips"])
        self._records = Records(options.run_dir, read_crashes(options.run_dir), self._writer)
        self._plan = Plan(**go["plan"])
        self._num_rounds += 1
        if not self._is_leader:  # node 0 has done so before it let the others launch
            self._observers.call(lambda each: each.before_launch(options.run_dir, state.attempt))
        self._save_state()
        place = round_.place
        jobs = build_jobs(
            *(options.fit, options.run_dir, facts, self._plan, state.attempt, go["port"], self._mark),
            place=place,
            skips=self._skips.positions,
        )
        self._report(f"node {place.node} of {place.num_nodes} ({', '.join(go['names'])})")
        self._tell("launching" if self._unrecovered is None else "recovering", self._reason)
        self._meter.enter("start", time.monotonic())
        self._fork(state.attempt, jobs)

    def _build_attempt(self, stops: StopRequests, *, is_adopted: bool) -> Attempt:
        assert self._round is not None
        assert self._facts is not None
        watch, number = self._round.watch, self._state.attempt
        first = self._round.place.node * self._facts.num_ranks
        folder = attempt_folder(self._run, number)
        outputs = {rank: folder / f"rank-{rank}.log" for rank in range(first, first + self._facts.num_ranks)}
        self._echoed_bytes = 0

        def find_stop() -> str | None:
            own = self._find_own_stop(stops)
            if own is not None:
                watch.ask_stop(own)
            return watch.stop or own

        attempt = Attempt(
            *(self._options.run_dir, self._client, outputs, self._options.limits, find_stop),
            lambda sight: self._look(sight, outputs[first]),
            watch,
        )
        who = ", ".join(f"rank {rank} is process {pid}" for rank, pid in attempt.pids.items())
        self._report(f"attempt {number}: {who}; {self._plan.describe(self._state.saved_step)}")
        self._events.append("launched", text=f"attempt {number} on {self._nodes.name}: {who}")
        launch = Launch(self._options.run_dir, number, attempt.pids, is_adopted)
        self._observers.call(lambda each: each.on_launch(launch))
        return attempt

    # ---- after an attempt

    def _settle(self, round_: Round, attempt: Attempt, evidence: Evidence, stops: StopRequests) -> Verdict:
        """Hands over what is left of this node's ranks, and returns what node 0 has decided."""
        messages, watch, node = round_.messages, round_.watch, round_.place.node
        is_interrupted = stops.is_interrupted
        messages.put(f"end/{node}", {"evidence": encode_evidence(evidence), "is_interrupted": is_interrupted})
        if node != 0:
            content = messages.wait("verdict", lambda: watch.is_gone(0))
            messages.put(f"read/{node}", True)
            if content is None:
                return Verdict("membership", "node 0 is lost", plan=keep_size(self._plan))
            return Verdict(**{**content, "plan": Plan(**content["plan"])})
        gathered = [evidence]
        lost = []
        for other in range(1, messages.num_nodes):
            content = messages.wait(f"end/{other}", lambda other=other: watch.is_gone(other))  # type: ignore[misc]
            if content is None:
                lost.append(other)
            else:
                gathered.append(decode_evidence(content["evidence"]))
                is_interrupted = is_interrupted or content["is_interrupted"]
        verdict = self._decide(attempt, merge_evidence(gathered), lost, stops, is_interrupted=is_interrupted)
        messages.put("verdict", asdict(verdict))
        limit = time.monotonic() + _READ_SECONDS
        for other in set(range(1, messages.num_nodes)) - set(lost):  # who hosts the store must not end before
            messages.wait(
                f"read/{other}",
                lambda other=other: watch.is_gone(other) or time.monotonic() > limit,  # type: ignore[misc]
            )
        return verdict

    def _decide(
        self, attempt: Attempt, evidence: Evidence, lost: Sequence[int], stops: StopRequests, *, is_interrupted: bool
    ) -> Verdict:
        going_on = keep_size(self._plan)
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
        action = self._conclude(attempt, evidence, diagnosis)
        statuses = {end.rank: end.status for end in evidence.ranks if end.status is not None}
        self._records.set_statuses(statuses)
        if action.kind == "stop":
            text = f"{action.text}; {ENDS[diagnosis.end_class].remedy}"
            return Verdict("stop", text, action.exit_status or 1)
        self._prepare_restart(action, stops)  # the other nodes wait for the verdict meanwhile
        return Verdict("restart", f"{diagnosis.end_class}: {diagnosis.reason}", plan=self._plan)

    # ---- accounts

    def _tell(self, state: State, reason: str) -> None:
        if self._is_leader:
            super()._tell(state, reason)
            return
        # The run's snapshot is node 0's; this node's metrics have its own.
        self._status_state, self._reason, self._told_seconds = state, reason, time.monotonic()
        status = self._snapshot()
        self._observers.call(lambda each: each.on_status(status))


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
