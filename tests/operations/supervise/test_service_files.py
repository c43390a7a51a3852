"""Service files: checked by systemd, run by bash, and compared with Kubernetes' schema."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from genesis.base.errors import UserError
from genesis.operations.supervise.service_files import FILE_KINDS, ServiceCommand, render_file

WORDS = ("--grace_seconds", "5", "--", "fit", "--config", 'a recipe "x" $HOME 100%.yaml')


def build_command(directory: Path, words=WORDS, python: str = sys.executable) -> ServiceCommand:
    return ServiceCommand(words, Path("runs/My Run.1"), directory, python)


def test_every_kind_is_rendered(tmp_path: Path):
    for kind in FILE_KINDS:
        assert render_file(kind, build_command(tmp_path)).endswith("\n")
    assert build_command(tmp_path).name == "genesis-runs-my-run-1"


def test_a_line_end_in_an_argument_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="cannot stand in a service file"):
        build_command(tmp_path, ("--", "fit", "a\nExecStart=/bin/sh"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path):
    command = build_command(tmp_path)
    unit = tmp_path / f"{command.name}.service"
    unit.write_text(render_file("systemd", command))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    own = [line for line in result.stderr.splitlines() if unit.name in line]
    assert own == []
    assert result.returncode == 0, result.stderr
    assert r'"a recipe \"x\" $$HOME 100%%.yaml"' in unit.read_text()


STUB = """#!/bin/bash
printf '%s\\n' "$@" > {log}
trap 'echo USR1 >> {log}; sleep 0.3; exit 75' USR1
trap 'echo TERM >> {log}; exit 75' TERM
echo $$ > {pid}
for _ in $(seq 200); do sleep 0.05; done
exit ${{STATUS:-0}}
"""


@pytest.fixture
def job(tmp_path: Path):
    """Returns a function that starts the job script with stand-ins for genesis and for scontrol.

    The script pauses for `pause_seconds` after it has started the supervisor.
    """
    log, pid, requeued = tmp_path / "log", tmp_path / "pid", tmp_path / "requeued"
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(STUB.format(log=log, pid=pid))
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/bash\necho "$@" > {requeued}\n')
    for file in (stub, scontrol):
        file.chmod(0o755)
    script = tmp_path / "job.sh"
    text = render_file("slurm", build_command(tmp_path, python=str(stub)))
    assert text.count(" &\n") == 1

    def start(pause_seconds: float = 0, **variables: str) -> subprocess.Popen[bytes]:
        path = f"{stub.parent}:{os.environ['PATH']}"
        script.write_text(text.replace(" &\n", f" &\nsleep {pause_seconds}\n"))
        process = subprocess.Popen(["bash", str(script)], env={**os.environ, "PATH": path, **variables})
        deadline = time.monotonic() + 120
        while not pid.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    return start, log, requeued


@pytest.mark.process
def test_slurms_script_saves_at_its_signal_and_requeues_the_job(job):
    start, log, requeued = job
    process = start(SLURM_JOB_ID="4711")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(120) == 0
    assert log.read_text().splitlines() == ["-P", "-m", "genesis", "supervise", *WORDS, "USR1"]
    assert requeued.read_text() == "requeue 4711\n"


@pytest.mark.process
@pytest.mark.parametrize("pause_seconds", [0, 0.5])
def test_slurms_script_passes_the_end_and_the_status_on(job, pause_seconds: float):
    start, log, requeued = job
    process = start(pause_seconds)  # a busy machine may stop the script right after it has started the supervisor
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75  # without Slurm nobody can requeue
    assert log.read_text().endswith("TERM\n")
    assert not requeued.exists()


@pytest.mark.slow
def test_the_manifests_fit_the_schemas_of_kubernetes_which_find_a_mistake(tmp_path: Path):
    claim, work = yaml.safe_load_all(render_file("kubernetes", build_command(tmp_path)))
    for version in ("1.31", kubernetes_validate.latest_version()):
        for manifest in (claim, work):
            kubernetes_validate.validate(manifest, version, strict=True)
        for where, wrong in (("backoffLimit", "many"), ("podFailurePolicies", {})):
            broken = {**work, "spec": {**work["spec"], where: wrong}}
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(broken, version, strict=True)


def test_the_job_starts_again_exactly_after_what_may_be_repeated(tmp_path: Path):
    claim, work = yaml.safe_load_all(render_file("kubernetes", build_command(tmp_path)))
    pod = work["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == ["genesis", "supervise", *WORDS]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    rules = {
        rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in work["spec"]["podFailurePolicy"]["rules"]
    }
    assert rules["FailJob"] == [2, *range(80, 95)]
    assert rules["Ignore"] == [75]
    # What the API server checks beyond the schema.
    assert pod["restartPolicy"] == "Never"
    assert len(claim["metadata"]["name"]) <= 63
