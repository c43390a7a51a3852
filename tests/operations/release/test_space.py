"""The folder of a Space, and what its Dockerfile does, done by hand: no Docker engine is needed to see that it runs.

Not done here: the base image, and what pip would fetch; that comes from this environment, by a path file.
"""

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from huggingface_hub import SpaceCard
from openai import OpenAI
from packaging.requirements import Requirement

import genesis
from genesis.base.errors import UserError
from genesis.operations.release.leaks import Machine
from genesis.operations.release.release import plan_release
from genesis.operations.release.space import plan_space, serve_command
from genesis.operations.release.wheels import pack_wheel, pin_requirements
from tests.operations.release.conftest import OPTIONS

START_SECONDS = 120.0
TORCH = f"torch=={version('torch').split('+')[0]}"


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Path:
    out = tmp_path_factory.mktemp("space") / "page"
    plan_space(plan_release(exported, OPTIONS), OPTIONS).write(out)
    return out


def dockerfile(space: Path, instruction: str) -> list[str]:
    """Returns what follows each `instruction` in the Dockerfile."""
    lines = (space / "Dockerfile").read_text().splitlines()
    return [line.removeprefix(f"{instruction} ") for line in lines if line.startswith(f"{instruction} ")]


def test_the_model_in_it_is_the_release(space: Path, released: Path) -> None:
    assert {path.name: path.read_bytes() for path in (space / "models/tiny").iterdir()} == {
        path.name: path.read_bytes() for path in released.iterdir()
    }
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=space, check=True, capture_output=True)


def test_its_head_says_docker_and_the_port_that_is_served(space: Path) -> None:
    data = SpaceCard.load(space / "README.md").data
    assert (data.sdk, data.app_port, data.license, data.models) == ("docker", 7860, "apache-2.0", ["some-lab/tiny"])
    assert dockerfile(space, "EXPOSE") == ["7860"]
    assert json.loads(dockerfile(space, "CMD")[0]) == serve_command(OPTIONS)


def test_everything_that_the_dockerfile_copies_is_there(space: Path) -> None:
    copied = [line.split()[-2] for line in dockerfile(space, "COPY")]
    assert copied == ["constraints.txt", "wheels", "models"]
    assert all((space / name).exists() for name in copied)


@pytest.mark.slow
def test_nothing_of_this_machine_is_in_it(exported: Path, tmp_path: Path) -> None:
    folder = plan_space(plan_release(exported, OPTIONS), OPTIONS)
    folder.check(Machine.read(exported, tmp_path), (OPTIONS.owner,))
    wheels = [data for name, data in folder.texts.items() if name.endswith(".whl")]
    assert len(wheels) == 2
    for data in wheels:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            for name in wheel.namelist():
                assert str(Path(genesis.__file__).parents[2]).encode() not in wheel.read(name), name


def test_the_pins_are_what_is_installed_and_satisfy_what_is_asked(space: Path) -> None:
    pins = dict(line.split("==") for line in (space / "constraints.txt").read_text().splitlines())
    assert pins == pin_requirements("genesis-lm", "genesis-callbacks")
    asked = [Requirement(line) for line in distribution("genesis-lm").requires or ()]
    for requirement in asked:
        if requirement.marker is None and requirement.name != "genesis-callbacks":
            assert requirement.specifier.contains(pins[requirement.name]), requirement
    assert "transformers" not in pins
    assert dockerfile(space, "RUN")[1] == f"pip install --no-cache-dir {TORCH}"


def test_the_build_of_torch_is_the_users_choice_and_nothing_else(exported: Path) -> None:
    release, wanted = plan_release(exported, OPTIONS), f"{TORCH} --index-url https://example.org/cpu"
    assert (
        f"RUN pip install --no-cache-dir {wanted}\n"
        in plan_space(release, OPTIONS, wanted).texts["Dockerfile"].decode()
    )
    for wrong in ("torch==1.0", f"{TORCH} && true", f"{TORCH}\nRUN true", "numpy", ""):
        with pytest.raises(UserError, match=f"give '{TORCH} --index-url ADDRESS'"):
            plan_space(release, OPTIONS, wrong)


def test_a_wheel_is_the_same_twice_and_holds_the_package(tmp_path: Path) -> None:
    name, content = pack_wheel("genesis-lm", "genesis")
    assert (name, content) == pack_wheel("genesis-lm", "genesis")
    (tmp_path / name).write_bytes(content)
    with zipfile.ZipFile(tmp_path / name) as wheel:
        assert wheel.testzip() is None
        assert wheel.read("genesis/__init__.py") == Path(genesis.__file__).read_bytes()
        assert {entry.split("/")[0] for entry in wheel.namelist()} == {
            "genesis",
            f"genesis_lm-{version('genesis-lm')}.dist-info",
        }
        assert not [entry for entry in wheel.namelist() if "__pycache__" in entry]


@contextmanager
def running(command: list[str], directory: Path) -> Iterator[str]:
    """Gives the address that a server says it answers at."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"http://0\.0\.0\.0:(\d+)/ serves", line)
        assert found, line
        timer.cancel()
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        timer.cancel()
        process.terminate()
        process.wait(START_SECONDS)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
def test_its_wheels_in_an_empty_environment_serve_the_model(space: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "environment", with_pip=False, symlinks=True)
    python = tmp_path / "environment/bin/python"
    options = ("--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--quiet")
    wheels = sorted((space / "wheels").glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *map(str, wheels)]
    subprocess.run(pip, cwd=tmp_path, check=True)
    site_packages = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = ["0" if word == "7860" else word for word in json.loads(dockerfile(space, "CMD")[0])]
    command[0] = str(python.with_name(command[0]))
    with running(command, space) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert model.id == "tiny"
        answer = client.completions.create(model=model.id, prompt="class alpha", max_tokens=8, temperature=0)
        assert len(answer.choices[0].text) > 0
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
