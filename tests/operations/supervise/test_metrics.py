"""Metrics, their server, alert rules and dashboard, and the alerts of a run, with real servers on loopback."""

import json
import math
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from genesis.base.errors import UserError
from genesis.operations.supervise.alerts import AlertOptions, Alerts, read_command
from genesis.operations.supervise.crashes import CrashRecord
from genesis.operations.supervise.goodput import Goodput
from genesis.operations.supervise.log_lines import build_report
from genesis.operations.supervise.metrics import MetricsServer
from genesis.operations.supervise.service_files import ServiceCommand, render_file
from genesis.operations.supervise.status import SupervisorStatus, write_status
from genesis_callbacks.heartbeats import HeartbeatRecord, write_heartbeat
from tests.operations.supervise.mirror_support import Run, sync

CRASH = CrashRecord(1, 1, "lost_rank", 1, 40, 0.0, "rank 1 was killed by SIGKILL", "restart", lost_seconds=2.5)
COMMAND = ServiceCommand(("--", "fit"), Path("runs/a"), Path("/work"))


def build_status(**changes: Any) -> SupervisorStatus:
    now = time.time()
    values: dict[str, Any] = {
        **{"state": "training", "pid": 1, "host": "node", "began_seconds": now - 100, "updated_seconds": now},
        **{"attempt": 3, "num_ranks": 2, "ends": {"lost_rank": 2}, "restarts": {"lost_rank": 2}, "step": 41},
        **{"verified_step": 40, "goodput": Goodput(trained=80.0, start=15.0, down=5.0)},
    }
    return SupervisorStatus(**{**values, **changes})


def beat(run: Path, rank: int = 0, *, age_seconds: float = 0.0, loss: float | None = 2.5, step: int = 41) -> None:
    write_heartbeat(
        run,
        HeartbeatRecord(
            *(rank, 2, 1, "node", "train", step, time.time() - age_seconds, 0.0),
            clocks={"tokens_seen": 6400, "tokens_updated": 6300},
            loss=loss,
            units_per_second=1000.0,
        ),
    )


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(server: MetricsServer) -> dict[tuple[str, ...], float]:
    status, text = get(f"{server.url}/metrics")
    assert status == 200
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def server(tmp_path: Path):
    server = MetricsServer(tmp_path / "run")
    yield server
    server.close()


def test_the_metrics_have_the_figures_of_heartbeats_snapshot_checkpoints_and_mirror(tmp_path: Path, server):
    run = Run(tmp_path / "run")
    path = run.save(40)
    sync(run, tmp_path / "mirror")
    os.utime(path / "COMMITTED", (time.time() - 50, time.time() - 50))
    beat(run.path)
    beat(run.path, 1, age_seconds=7)
    beat(run.path, 5, age_seconds=9000)  # of an attempt with more ranks
    server.on_status(build_status())
    found = scrape(server)
    assert found["genesis_crashes_total",] == 2
    assert found["genesis_restarts_total", "lost_rank"] == 2
    assert (found["genesis_steps_total",], found["genesis_step",]) == (41, 41)
    assert (found["genesis_tokens_seen",], found["genesis_tokens_updated",]) == (6400, 6300)
    assert (found["genesis_loss",], found["genesis_tokens_per_second",]) == (2.5, 1000.0)
    assert found["genesis_last_verified_step",] == 40
    assert found["genesis_checkpoint_age_seconds",] == pytest.approx(50, abs=20)
    assert found["genesis_heartbeat_age_seconds",] == pytest.approx(7, abs=6)
    assert found["genesis_time_seconds_total", "trained"] == 80
    assert (found["genesis_time_lost_seconds_total",], found["genesis_goodput_ratio",]) == (20, 0.8)
    assert found["genesis_mirror_lag_seconds", str(tmp_path / "mirror")] == 0
    assert found["genesis_mirror_failing", str(tmp_path / "mirror")] == 0
    assert (found["genesis_state", "training"], found["genesis_state", "stopped"]) == (1, 0)


def test_the_largest_step_never_goes_back_and_a_loss_of_nan_is_shown(tmp_path: Path, server):
    beat(tmp_path / "run", loss=math.nan, step=20)
    server.on_status(build_status(step=41))
    found = scrape(server)
    assert (found["genesis_steps_total",], found["genesis_step",]) == (41, 20)
    assert math.isnan(found["genesis_loss",])


def test_a_run_without_a_checkpoint_has_the_age_since_it_was_first_supervised(server):
    server.on_status(build_status(began_seconds=time.time() - 9000))
    assert scrape(server)["genesis_checkpoint_age_seconds",] == pytest.approx(9000, abs=30)


def test_a_scrape_before_anything_is_known_and_beside_the_supervisor(tmp_path: Path, server):
    assert scrape(server) == {("genesis_steps_total",): 0.0}
    write_status(tmp_path / "run", build_status())
    assert scrape(server)["genesis_crashes_total",] == 2


def test_the_metrics_of_one_of_several_nodes_have_its_name(tmp_path: Path, server):
    several = MetricsServer(tmp_path / "run", node="b")
    assert f'genesis_node_info{{node="b",run="{tmp_path}/run"}} 1.0' in get(f"{several.url}/metrics")[1]
    several.close()
    assert "genesis_node_info" not in get(f"{server.url}/metrics")[1]


def test_health_follows_the_supervisor(server):
    assert get(f"{server.url}/healthz")[0] == 503
    server.on_status(build_status())
    status, text = get(f"{server.url}/healthz")
    assert (status, json.loads(text)["state"]) == (200, "training")
    server.on_status(build_status(updated_seconds=time.time() - 300))
    status, text = get(f"{server.url}/healthz")
    assert status == 503
    assert "has not reported for 300 s" in json.loads(text)["reason"]
    server.on_complete(build_status(state="stopped", reason="3 ends without progress"))
    assert get(f"{server.url}/healthz")[0] == 503
    assert get(f"{server.url}/other")[0] == 404


def test_the_server_listens_on_loopback_and_a_taken_port_is_one_line(tmp_path: Path, server):
    assert server.url.startswith("http://127.0.0.1:")
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{port} \(Address already in use\)"):
        MetricsServer(tmp_path, port=port)
    with pytest.raises(UserError, match=r"cannot listen on nosuchhost\.invalid:0"):
        MetricsServer(tmp_path, host="nosuchhost.invalid")


def test_a_client_that_says_nothing_and_one_that_leaves_do_not_keep_others_waiting(server, capfd):
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address), socket.create_connection(address) as second:
        second.sendall(b"GET /metrics HTTP/1.1\r\n")
        second.close()
        assert get(f"{server.url}/other")[0] == 404
    assert capfd.readouterr().err == ""


# ---- rules and dashboard


def list_queries() -> list[str]:
    dashboard = json.loads(render_file("dashboard", COMMAND))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_rules_and_dashboard_name_only_metrics_that_exist(tmp_path: Path, server):
    run = Run(tmp_path / "run")
    run.save(1)
    sync(run, tmp_path / "mirror")
    beat(run.path)
    server.on_status(build_status())
    known = {key[0] for key in scrape(server)}
    rules = yaml.safe_load(render_file("alerts", COMMAND))["groups"][0]["rules"]
    texts = " ".join([*list_queries(), *(rule["expr"] for rule in rules)])
    used = {
        word for word in texts.replace("(", " ").replace("{", " ").replace("[", " ").split() if word[:8] == "genesis_"
    }
    used = {word.rstrip("),") for word in used}
    assert used <= known
    assert known - used <= {"genesis_heartbeat_age_seconds"}


def check_rules(directory: Path, series: dict[str, str], expected: dict[str, bool], alert: str) -> None:
    """Lets promtool evaluate an alert on series of a sample a minute, and compares when it fires."""
    (directory / "alerts.yaml").write_text(render_file("alerts", COMMAND))
    rules = yaml.safe_load(render_file("alerts", COMMAND))["groups"][0]["rules"]
    rule = next(rule for rule in rules if rule["alert"] == alert)
    fired = {
        "exp_labels": {"run": "runs/a", **rule["labels"]},
        "exp_annotations": {
            name: text.replace("{{ $labels.run }}", "runs/a") for name, text in rule["annotations"].items()
        },
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": moment, "alertname": alert, "exp_alerts": [fired] if is_firing else []}
            for moment, is_firing in expected.items()
        ],
    }
    path = directory / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "30s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


TRAINING = 'genesis_state{run="runs/a",state="training"}'
STEP = 'genesis_step{run="runs/a"}'


@pytest.mark.process
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("series", "expected"),
    [
        pytest.param(
            {STEP: "0+5x20 100x40 105+5x20", TRAINING: "1x90"},
            {"20m": False, "34m": False, "37m": True, "60m": True, "63m": False, "80m": False},
            id="a stall and its end",
        ),
        pytest.param({STEP: "7x60", TRAINING: "1x60"}, {"9m": False, "14m": False, "16m": True}, id="since the start"),
        pytest.param({STEP: "0+5x20 100x60", TRAINING: "1x20 0x60"}, {"40m": False, "75m": False}, id="not training"),
        pytest.param({STEP: "0+1x90", TRAINING: "1x90"}, {"5m": False, "16m": False, "80m": False}, id="slow steps"),
    ],
)
def test_a_stalled_step_is_an_alert_after_fifteen_minutes_of_training_and_ends_with_the_next_step(
    tmp_path: Path, series: dict[str, str], expected: dict[str, bool]
):
    check_rules(tmp_path, series, expected, "GenesisStepStalled")


def start_prometheus(directory: Path, target: str, rules: str = "") -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:  # Prometheus has no option for any free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (directory / "alerts.yaml").write_text(rules or render_file("alerts", COMMAND))
    scrape_config = {"job_name": "genesis", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(directory / "alerts.yaml")],
        "scrape_configs": [scrape_config],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        *("prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    return process, f"http://127.0.0.1:{port}"


def wait_for(condition: Callable[[], Any], limit_seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def ask(url: str, path: str) -> Any:
    try:
        return json.loads(get(f"{url}/api/v1/{path}")[1])["data"]
    except (OSError, ValueError):  # it starts
        return None


def firing(url: str) -> set[str]:
    alerts = (ask(url, "alerts") or {}).get("alerts", [])
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_scrapes_fires_the_rules_and_answers_every_query_of_the_dashboard(tmp_path: Path, server):
    run = Run(tmp_path / "run")
    path = run.save(1)
    sync(run, tmp_path / "mirror")
    beat(run.path)
    server.on_status(build_status(ends={}))
    process, url = start_prometheus(tmp_path, server.url)
    try:
        wait_for(lambda: (ask(url, "query?query=genesis_crashes_total") or {}).get("result"))
        assert firing(url) == set()
        server.on_status(build_status(ends={"lost_rank": 9}))
        os.utime(path / "COMMITTED", (time.time() - 7300, time.time() - 7300))
        wait_for(lambda: {"GenesisCrashesOften", "GenesisCheckpointOld"} <= firing(url))
        for query in list_queries():
            answer = ask(url, f"query?query={urllib.parse.quote(query.replace('$run', '.*'))}")
            assert answer is not None, query
            assert answer["result"], query
        server.on_complete(build_status(state="completed", ends={"lost_rank": 9}))
        wait_for(lambda: "GenesisCheckpointOld" not in firing(url))
    finally:
        process.terminate()
        process.wait()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_fires_for_a_run_that_finishes_no_step_until_it_finishes_one(tmp_path: Path, server):
    rules = render_file("alerts", COMMAND)
    for long, short in (("10m", "3s"), ("for: 5m", "for: 1s")):  # minutes of a real run
        assert long in rules
        rules = rules.replace(long, short)
    run, numbers, is_moving, has_ended = tmp_path / "run", iter(range(1, 1 << 20)), threading.Event(), threading.Event()

    def train() -> None:
        while not has_ended.wait(0.2):
            if is_moving.is_set():
                beat(run, step=next(numbers))
            server.on_status(build_status())

    thread = threading.Thread(target=train)
    is_moving.set()
    thread.start()
    process, url = start_prometheus(tmp_path, server.url, rules)
    try:
        moved = "query?query=changes(genesis_step[3s])%3E0"
        wait_for(lambda: (ask(url, f"{moved}%20and%20genesis_step%20offset%203s") or {}).get("result"))
        assert "GenesisStepStalled" not in firing(url)
        is_moving.clear()
        wait_for(lambda: "GenesisStepStalled" in firing(url))
        (alert,) = [
            each for each in ask(url, "alerts")["alerts"] if each["labels"]["alertname"] == "GenesisStepStalled"
        ]
        assert alert["annotations"]["summary"].startswith(str(run))
        is_moving.set()
        wait_for(lambda: "GenesisStepStalled" not in firing(url))
    finally:
        has_ended.set()
        thread.join()
        process.terminate()
        process.wait()


# ---- alerts


class Hook:
    """A server that keeps what is posted to it; `mode` is a status, or "hang"."""

    def __init__(self) -> None:
        self.mode: int | str = 200
        self.posts: list[dict[str, Any]] = []
        self.ended = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if hook.mode == "hang":
                    hook.ended.wait()
                    return
                hook.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(int(hook.mode))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = "http://{}:{}/secret".format(*self.server.server_address)

    def __enter__(self) -> "Hook":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.setattr("genesis.operations.supervise.alerts._PAUSE_SECONDS", 0.01)
    with Hook() as hook:
        yield hook


def tell(options: AlertOptions) -> list[str]:
    """Sends the alerts of a crash, a recovery and the end, and returns the lines that were printed."""
    lines: list[str] = []
    alerts = Alerts(Path("runs/a"), options, lines.append)
    begin = time.monotonic()
    alerts.on_end(CRASH)
    alerts.on_recovered(CRASH)
    assert time.monotonic() - begin < 1.0  # the supervisor does not wait
    alerts.on_complete(build_status(state="completed"))
    return lines


def test_a_webhook_hears_of_crash_recovery_and_end_in_order(hook):
    assert tell(AlertOptions(webhook=hook.url)) == []
    assert [post["event"] for post in hook.posts] == ["crash", "recovery", "end"]
    crash = hook.posts[0]
    assert (crash["run"], crash["class"], crash["rank"], crash["step"]) == ("runs/a", "lost_rank", 1, 40)
    assert crash["text"].startswith("runs/a crashed at step 40: lost_rank, rank 1 first: rank 1 was killed")
    assert hook.posts[2]["state"] == "completed"


def test_a_webhook_that_fails_hangs_or_is_gone_is_a_line_without_its_secret(hook):
    hook.mode = 500
    lines = tell(AlertOptions(webhook=hook.url))
    assert len(hook.posts) == 9  # three attempts for each
    hook.mode = "hang"
    lines += tell(AlertOptions(webhook=hook.url, limit_seconds=0.1))
    lines += tell(AlertOptions(webhook="http://127.0.0.1:9/secret"))
    assert len(lines) == 9
    assert all("is not delivered: 127.0.0.1" in line and "secret" not in line for line in lines)


def test_a_command_gets_the_alert_and_one_that_hangs_is_killed_with_its_children(tmp_path: Path):
    out = tmp_path / "out"
    command = ["sh", "-c", f'echo "$GENESIS_EVENT" >> {out}; cat >> {out}; echo >> {out}']
    assert tell(AlertOptions(command=command)) == []
    words = out.read_text().splitlines()
    assert words[::2] == ["crash", "recovery", "end"]
    assert [json.loads(line)["event"] for line in words[1::2]] == ["crash", "recovery", "end"]
    lines = tell(AlertOptions(command=["sh", "-c", "sleep 60 & sleep 60"], limit_seconds=0.2))
    assert len(lines) == 3
    assert "sh was killed after 0.2 s" in lines[0]
    assert "cannot be started" in tell(AlertOptions(command=["/no/such/program"]))[0]
    assert "ended with status 3" in tell(AlertOptions(command=["sh", "-c", "exit 3"]))[0]


def test_mistakes_in_the_options_are_one_line():
    for webhook in ("ftp://host/x", "nonsense", "http://"):
        with pytest.raises(UserError, match="is no address of the web"):
            AlertOptions(webhook=webhook)
    with pytest.raises(UserError, match="is empty"):
        AlertOptions(command=read_command(""))
    with pytest.raises(UserError, match="No closing quotation"):
        read_command("notify 'x")


def test_lines_are_text_or_json(tmp_path: Path, capsys):
    build_report("text", Path("runs/a"))("attempt 1: 2 ranks")
    build_report("json", Path("runs/a"))("a \x1b line")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "supervise: attempt 1: 2 ranks"
    content = json.loads(second)
    assert (content["run"], content["message"]) == ("runs/a", "a \\x1b line")
