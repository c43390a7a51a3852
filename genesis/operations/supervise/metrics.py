"""The figures of a supervised run for Prometheus, computed at each scrape, and the server that gives them.

    metric                              meaning; each has the label `run`
    genesis_crashes_total               ends of attempts before the run was complete
    genesis_restarts_total              restarts, by `class` of the end before them
    genesis_steps_total                 the largest step that any attempt has reached
    genesis_step                        the step of the current attempt, which begins again at a checkpoint
    genesis_tokens_seen                 valid tokens in the windows attempted
    genesis_tokens_updated              valid tokens in the steps that changed the parameters
    genesis_loss                        the last logged training loss, in nats per valid token
    genesis_tokens_per_second           valid tokens per second over all ranks
    genesis_last_verified_step          step of the newest checkpoint that verified
    genesis_checkpoint_age_seconds      age of the newest checkpoint; without any, time since the first supervision
    genesis_heartbeat_age_seconds       age of the oldest heartbeat among the ranks of the attempt
    genesis_time_seconds_total          wall time by `part`: trained, start, restore, repeated, saves, waiting, down
    genesis_time_lost_seconds_total     wall time that trained no new tokens
    genesis_goodput_ratio               the share of wall time that trained new tokens, from 0 to 1
    genesis_mirror_lag_seconds          time since the first commit that the `mirror` lacks; 0 if it lacks none
    genesis_mirror_failing              1 if the last attempt of the `mirror` failed
    genesis_attempt, genesis_ranks      number of the attempt, and of its ranks on this node
    genesis_node_info                   1, with the `node` whose supervisor answers; only with `--nodes`
    genesis_state                       1 for the `state` of the run, 0 for the others

The clocks of tokens go back with a restart, and a Prometheus counter must not: therefore they are gauges.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Final, get_args
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from genesis.base.errors import UserError, printable
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.mirror_state import measure_lag, read_mirror_statuses
from genesis.operations.supervise.observers import NullObserver
from genesis.operations.supervise.status import State, SupervisorStatus, read_status
from genesis_callbacks.base.run_directory import COMMITTED_NAME, is_checkpoint_name
from genesis_callbacks.heartbeats import HeartbeatRecord, read_heartbeats

_STALE_SECONDS: Final = 60.0
"""A supervisor writes a snapshot about once a second: a snapshot of this age means that its loop hangs."""
_UNHEALTHY: Final = ("stopped",)

StartResponse = Callable[[str, list[tuple[str, str]]], object]


class RunCollector(Collector):
    """Computes the metrics of one run whenever a registry collects them.

    Args:
        run_dir: The run's directory.
        name: The value of the label `run`.
        read: Returns the supervisor's snapshot; None for none so far.
        clock: Returns Unix time.
        node: The name of this node; None for a run on one node.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        read: Callable[[], SupervisorStatus | None],
        clock: Callable[[], float] = time.time,
        node: str | None = None,
    ) -> None:
        self._run_dir, self._name, self._read, self._clock = run_dir, printable(name), read, clock
        self._node = None if node is None else printable(node)

    def collect(self) -> Iterable[Metric]:
        """Returns all metrics; one that is unknown is left out."""
        status = self._read()
        heartbeats = list(read_heartbeats(self._run_dir).values())
        newest = max(heartbeats, key=lambda record: record.time_seconds, default=None)
        yield from self._collect_progress(status, newest)
        yield from self._collect_ages(status, heartbeats, newest)
        if status is not None:
            yield from self._collect_status(status)
        if self._node is not None:
            info = GaugeMetricFamily("genesis_node_info", "The node of this supervisor", labels=("run", "node"))
            info.add_metric((self._name, self._node), 1.0)
            yield info
        yield from self._collect_mirrors()

    def _collect_progress(
        self, status: SupervisorStatus | None, newest: HeartbeatRecord | None
    ) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        steps = [*([status.step] if status is not None else []), *([newest.step] if newest is not None else [])]
        yield self._counter("genesis_steps", "The largest step that any attempt has reached", max(steps, default=0))
        if newest is None:
            return
        yield self._gauge("genesis_step", "Step of the current attempt", newest.step)
        for clock in ("tokens_seen", "tokens_updated"):
            if clock in newest.clocks:
                yield self._gauge(f"genesis_{clock}", f"The run's clock {clock}", newest.clocks[clock])
        if newest.loss is not None:
            yield self._gauge("genesis_loss", "Last logged training loss in nats per valid token", newest.loss)
        if newest.units_per_second is not None:
            yield self._gauge("genesis_tokens_per_second", "Valid tokens per second", newest.units_per_second)

    def _collect_ages(
        self, status: SupervisorStatus | None, heartbeats: list[HeartbeatRecord], newest: HeartbeatRecord | None
    ) -> Iterator[GaugeMetricFamily]:
        now = self._clock()
        committed = find_newest_commit(self._run_dir)
        begin = committed if committed is not None else status.began_seconds if status is not None else None
        if begin is not None:
            yield self._gauge("genesis_checkpoint_age_seconds", "Age of the newest checkpoint", max(0.0, now - begin))
        if newest is not None:
            # Ranks of an earlier attempt with more ranks have left their files.
            live = [record for record in heartbeats if record.rank < newest.world_size]
            oldest = min(record.time_seconds for record in live)
            yield self._gauge("genesis_heartbeat_age_seconds", "Age of the oldest heartbeat", max(0.0, now - oldest))

    def _collect_status(self, status: SupervisorStatus) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield self._counter("genesis_crashes", "Ends of attempts before the run was complete", status.num_crashes)
        restarts = CounterMetricFamily("genesis_restarts", "Restarts by class of the end", labels=("run", "class"))
        for name, count in status.restarts.items():
            restarts.add_metric((self._name, name), count)
        yield restarts
        if status.verified_step is not None:
            yield self._gauge("genesis_last_verified_step", "Newest verified checkpoint", status.verified_step)
        parts = CounterMetricFamily("genesis_time_seconds", "Wall time by use", labels=("run", "part"))
        for part, seconds in asdict(status.goodput).items():
            parts.add_metric((self._name, part), seconds)
        yield parts
        yield self._counter("genesis_time_lost_seconds", "Wall time without new tokens", status.lost_seconds)
        yield self._gauge("genesis_goodput_ratio", "Share of wall time that trained new tokens", status.goodput.share)
        yield self._gauge("genesis_attempt", "Number of the attempt", status.attempt)
        yield self._gauge("genesis_ranks", "Number of ranks on this node", status.num_ranks)
        states = GaugeMetricFamily("genesis_state", "State of the run", labels=("run", "state"))
        for state in get_args(State):
            states.add_metric((self._name, state), float(state == status.state))
        yield states

    def _collect_mirrors(self) -> Iterator[GaugeMetricFamily]:
        lag = GaugeMetricFamily("genesis_mirror_lag_seconds", "Time the mirror is behind", labels=("run", "mirror"))
        failing = GaugeMetricFamily("genesis_mirror_failing", "Whether the mirror fails", labels=("run", "mirror"))
        for mirror in read_mirror_statuses(self._run_dir):
            lag.add_metric((self._name, mirror.url), measure_lag(self._run_dir, mirror, self._clock()))
            failing.add_metric((self._name, mirror.url), float(bool(mirror.problem)))
        yield lag
        yield failing

    def _counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help_text, labels=("run",))
        family.add_metric((self._name,), value)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help_text, labels=("run",))
        family.add_metric((self._name,), value)
        return family


def find_newest_commit(run_dir: Path) -> float | None:
    """Returns the Unix time of the newest commit of a run; None without any."""
    times = []
    try:
        for path in RunDirectory(run_dir).checkpoints.iterdir():
            if is_checkpoint_name(path.name):
                times.append((path / COMMITTED_NAME).stat().st_mtime)
    except OSError:  # there is no directory yet, or retention removes a checkpoint at this moment
        return max(times, default=None)
    return max(times, default=None)


class MetricsServer(NullObserver):
    """Answers `/metrics` for Prometheus and `/healthz`, in threads of its own, as an observer of the supervisor.

    `/healthz` answers with status 200 while the supervisor's loop works, else with 503 and the reason.

    Args:
        run_dir: The run's directory.
        host: Address to listen on; the default can be reached from this machine alone.
        port: Port; 0 takes a free one.

    Attributes:
        url: The address, as "http://127.0.0.1:9464".

    Raises:
        UserError: The address cannot be listened on.
    """

    def __init__(self, run_dir: Path, host: str = "127.0.0.1", port: int = 0, node: str | None = None) -> None:
        self._run_dir = run_dir
        self._status: SupervisorStatus | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(RunCollector(run_dir, str(run_dir), self._read, node=node))
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            kind = _Server if family == socket.AF_INET else _Server6
            self._server = make_server(host, port, self._answer, server_class=kind, handler_class=_Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"the metrics cannot listen on {host}:{port} ({reason}); give another --metrics_port or --metrics_host"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def on_status(self, status: SupervisorStatus) -> None:
        """Keeps the snapshot for the next scrape."""
        self._status = status

    def on_complete(self, status: SupervisorStatus) -> None:
        """Keeps the last snapshot; the server answers until `close`."""
        self._status = status

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _read(self) -> SupervisorStatus | None:
        return self._status if self._status is not None else read_status(self._run_dir)

    def _answer(self, environment: dict[str, Any], start_response: StartResponse) -> list[bytes]:
        path = environment.get("PATH_INFO", "/")
        if environment.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return []
        if path == "/metrics":
            start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
            return [generate_latest(self._registry)]
        if path == "/healthz":
            is_healthy, content = describe_health(self._read(), time.time())
            start_response(
                "200 OK" if is_healthy else "503 Service Unavailable", [("Content-Type", "application/json")]
            )
            return [json.dumps(content).encode() + b"\n"]
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"/metrics and /healthz are here\n"]


def describe_health(status: SupervisorStatus | None, now_seconds: float) -> tuple[bool, dict[str, Any]]:
    """Returns whether a supervisor works, and its description. Pure."""
    if status is None:
        return False, {"state": None, "reason": "the supervisor has not reported yet"}
    age_seconds = max(0.0, now_seconds - status.updated_seconds)
    content = {
        "state": status.state,
        "step": status.step,
        "age_seconds": round(age_seconds, 1),
        "reason": status.reason,
    }
    if age_seconds > _STALE_SECONDS and status.state != "completed":
        return False, {**content, "reason": f"the supervisor has not reported for {age_seconds:.0f} s"}
    return status.state not in _UNHEALTHY, content


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 32

    def server_bind(self) -> None:
        # WSGIServer looks the host's name up, which may take as long as a name server does not answer.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: the client has gone."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10  # a client that sends nothing does not keep a thread

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: a scrape every few seconds is no news."""
