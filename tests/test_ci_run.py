"""`.ci/run` runs failed tests a second time, and ends with the seconds of its stages and the flaky tests."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
PYPROJECT = f"""
    [tool.pytest.ini_options]
    pythonpath = ["{CI}"]
    addopts = ["-p", "no:cacheprovider", "-ra"]
"""
CONFTEST = """
    from pathlib import Path

    import pytest

    pytest_plugins = ["tiers", "short_ids", "second_run"]

    @pytest.fixture
    def is_first(request):
        '''Whether this test runs for the first time.'''
        counter = Path(__file__).with_name(f"{request.node.name.encode().hex()}.ran")
        was_there = counter.exists()
        counter.touch()
        return not was_there

    def pytest_configure(config):
        for name in ("early", "each", "repeat", "slow", "long", "bench", "demo"):
            config.addinivalue_line("markers", name)
"""
FLAKY = """
    import pytest

    def test_flaky(is_first):
        assert not is_first, "too busy"

    @pytest.mark.parametrize("number", range(3))
    def test_sound(number):
        pass
"""
FLAKY_IN_ALL_WAYS = """
    import os
    import signal

    import pytest

    @pytest.mark.xdist_group("words")
    @pytest.mark.parametrize("word", ["a b", "c]::d[e", "f@g"])
    def test_word(word, is_first):
        assert not is_first, f"first try of {word}"

    def test_crash(is_first):
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.fixture
    def cleaned(is_first):
        yield
        assert not is_first, "left behind"

    def test_teardown(cleaned):
        pass

    @pytest.fixture
    def prepared(is_first):
        assert not is_first, "not yet there"

    @pytest.mark.early
    def test_setup(prepared):
        pass

    def test_skipped():
        pytest.skip("never")
"""
BROKEN = """
    import pytest

    def test_broken(is_first):
        assert False, "first failure" if is_first else "second failure"

    def test_skipped_later(is_first):
        if not is_first:
            pytest.skip("the second time")
        assert False, "first failure"
"""
CRASHING = """
    import os
    import signal

    def test_crash():
        os.kill(os.getpid(), signal.SIGKILL)

    def test_after():
        pass
"""
HANGING = """
    import ctypes

    def test_hanging(is_first):
        if is_first:
            ctypes.PyDLL(None).sleep(600)  # which keeps the interpreter's lock

    def test_after():
        pass
"""
CRASHING_GROUPS = """
    import os
    import signal

    import pytest

    def pytest_generate_tests(metafunc):
        metafunc.parametrize("number", range(8))

    def test_one(number):
        if number in (2, 3, 7):
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.xdist_group("group")
    def test_group(number):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""
MANY = """
    import pytest

    @pytest.mark.parametrize("number", range(21))
    def test_broken(number):
        assert False
"""
EACH = (pytest.mark.slow, pytest.mark.each)
UNREADABLE = """
    raise RuntimeError("cannot be imported")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Returns the directory of a project of pytest without tests."""
    write_files(tmp_path, {"pyproject.toml": PYPROJECT, "conftest.py": CONFTEST})
    return tmp_path


def write_files(root: Path, texts: dict[str, str]) -> None:
    root.mkdir(exist_ok=True)
    for name, text in texts.items():
        (root / name).write_text(textwrap.dedent(text))


def build_environ(**variables: str) -> dict[str, str]:
    """Returns an environment without this session of pytest, and without installed plugins, which load slowly."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GENESIS_"))}
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | variables


def pytest_command(directory: Path, workers: int = 1, *options: str) -> str:
    """Returns the command that runs the tests in the current directory as the Makefile does."""
    workers_options = f"-p xdist.plugin -n {workers} --dist loadgroup"
    return f"{sys.executable} -m pytest -q {workers_options} --basetemp={directory}/base {' '.join(options)}"


def run_stages(root: Path, **recipes: str) -> tuple[int, str]:
    """Runs the program that CI runs, on a Makefile with these recipes; returns exit status and output."""
    process = start_stages(root, **recipes)
    output = process.communicate()[0]
    return process.returncode, output


def start_stages(root: Path, **recipes: str) -> subprocess.Popen[str]:
    targets = dict.fromkeys(("install", "check", "docs", "test-ci"), "true")
    targets |= {name.replace("_", "-"): recipe for name, recipe in recipes.items()}
    (root / "Makefile").write_text("".join(f"{name}:\n\t@{recipe}\n" for name, recipe in targets.items()))
    (root / ".ci").mkdir()
    for name in ("run", "stages.py"):
        shutil.copy(CI / name, root / ".ci")
    # A browser that need not be installed.
    (root / "bin").mkdir()
    (root / "bin/chromium").symlink_to("/bin/true")
    environ = build_environ(PATH=f"{root}/bin:{os.environ['PATH']}", PYTHON=sys.executable)
    return subprocess.Popen(
        [root / ".ci/run"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def run_session(root: Path, *options: str) -> tuple[int, str]:
    """Runs a session of pytest that CI has started, without its stages."""
    environ = build_environ(GENESIS_CI_NOTES=str(root / "notes"))
    command = pytest_command(root, 1, *options).split()
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout


def read_table(output: str) -> list[str]:
    """Returns the names of the stages in the table of seconds."""
    return re.findall(r"^ +\d+ s  (.*)$", output, re.MULTILINE)


ALL_STAGES = ["browser", "make install", "make check docs", "make test-ci", "total"]


def test_what_passes_alone_is_flaky_and_ends_the_output_with_its_first_traceback(project: Path) -> None:
    write_files(project / "tests", {"test_busy.py": FLAKY})
    status, output = run_stages(project, test_ci=pytest_command(project))
    assert status == 0
    stages, end = output.split("      0 s  browser")
    assert "1 failed, 3 passed in " in stages
    assert "1 passed in " in stages
    assert re.fullmatch(
        r".* s  total\n"
        r"\nFLAKY tests/test_busy.py::test_flaky: it failed beside other tests, and passed alone. Its first failure:\n"
        r".*AssertionError: too busy\n.*"
        r"\nall sessions: 4 passed, 1 flaky in \d+\.\d\ds\n",
        end,
        re.DOTALL,
    )
    assert read_table(output) == ALL_STAGES


def test_a_failure_that_repeats_fails_the_run_and_the_table_ends_there(project: Path) -> None:
    write_files(project / "tests", {"test_broken.py": BROKEN, "test_busy.py": FLAKY})
    status, output = run_stages(project, test_ci=pytest_command(project))
    assert status == 2
    assert "second failure" in output
    assert "FAILED TWICE tests/test_broken.py::test_broken\n" in output
    # A test that is skipped the second time has proved nothing.
    assert "FAILED TWICE tests/test_broken.py::test_skipped_later\n" in output
    assert "FLAKY tests/test_busy.py::test_flaky: " in output
    assert read_table(output) == [*ALL_STAGES[:4], "total"]
    assert re.fullmatch(r"all sessions: 4 passed, 2 failed, 1 flaky in .*s", output.splitlines()[-1])


@pytest.mark.slow
def test_crashed_workers_and_errors_of_fixtures_are_failures_and_ids_may_have_any_characters(project: Path) -> None:
    write_files(
        project / "sub", {"pyproject.toml": PYPROJECT, "conftest.py": CONFTEST, "test_ways.py": FLAKY_IN_ALL_WAYS}
    )
    write_files(project, {"test_busy.py": FLAKY})
    test = f"{pytest_command(project)} test_busy.py && cd sub && {pytest_command(project, 2)}"
    status, output = run_stages(project, test_ci=test)
    assert status == 0
    flaky = re.findall(r"^FLAKY (.*): it failed", output, re.MULTILINE)
    # In the order of collection, which begins with early tests.
    assert flaky == [
        "test_busy.py::test_flaky",
        *(
            f"sub/test_ways.py::{name}"
            for name in ("test_setup", "test_word[a b]", "test_word[c]::d[e]", "test_word[f@g]")
        ),
        *(f"sub/test_ways.py::{name}" for name in ("test_crash", "test_teardown")),
    ]
    end = output.split(" s  total")[1]
    for text in ("crashed while running", "left behind", "not yet there", "first try of c]::d[e", "too busy"):
        assert text in end
    assert re.fullmatch(r"all sessions: 10 passed, 1 skipped, 7 flaky in .*s", end.splitlines()[-1])


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (UNREADABLE, (), "nothing is run a second time: the collection failed"),
        pytest.param(MANY, (), "nothing is run a second time: 21 tests failed, more than 20", marks=EACH),
        pytest.param(CRASHING, ("--max-worker-restart=0",), "1 tests did not run at all", marks=EACH),
    ],
    ids=["collection", "many", "missed"],
)
def test_nothing_runs_twice_where_passing_would_prove_too_little(
    project: Path, text: str, options: tuple[str, ...], expected: str
) -> None:
    write_files(project, {"test_it.py": text})
    status, output = run_session(project, *options)
    assert status == 1
    assert expected in output


@pytest.mark.slow
def test_a_test_that_kills_the_second_run_has_failed_twice(project: Path) -> None:
    write_files(project, {"test_it.py": CRASHING})
    status, output = run_session(project)
    assert status == 1
    assert "FAILED TWICE test_it.py::test_crash" in output


@pytest.mark.slow
@pytest.mark.parametrize("is_always", [False, True])
def test_a_test_that_native_code_never_leaves_is_a_failure_and_holds_nothing_up(project: Path, is_always: bool) -> None:
    write_files(project, {"test_it.py": HANGING.replace("is_first:", "True:") if is_always else HANGING})
    status, output = run_session(project, "-o faulthandler_timeout=2", "-o faulthandler_exit_on_timeout=true")
    assert status == is_always
    assert f"{'FAILED TWICE' if is_always else 'FLAKY'} test_it.py::test_hanging" in output


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_crash_of_a_worker_fails_one_test_and_all_others_run(project: Path, workers: int) -> None:
    write_files(project, {"test_it.py": CRASHING_GROUPS})
    command = pytest_command(project, workers).split()
    done = subprocess.run(command, cwd=project, env=build_environ(), capture_output=True, text=True)
    assert "\n4 failed, 12 passed in " in done.stdout


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize(("options", "expected"), [(("-k", "nothing"), 5), (("--no-such-option",), 4)])
def test_other_ends_of_pytest_keep_their_status(project: Path, options: tuple[str, ...], expected: int) -> None:
    write_files(project, {"test_it.py": FLAKY})
    status, output = run_session(project, *options)
    assert status == expected
    assert "second" not in output


def test_without_ci_a_flaky_test_fails(project: Path) -> None:
    write_files(project, {"test_it.py": FLAKY})
    command = pytest_command(project).split()
    done = subprocess.run(command, cwd=project, env=build_environ(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "second" not in done.stdout


def test_a_stage_that_is_killed_fails_the_run_with_its_seconds(project: Path) -> None:
    status, output = run_stages(project, check="kill -9 $$PPID")
    assert status == 128 + signal.SIGKILL
    assert read_table(output) == [*ALL_STAGES[:3], "total"]


def test_a_run_that_is_ended_from_outside_ends_its_stage_and_prints_its_seconds(project: Path) -> None:
    process = start_stages(project, test_ci="echo started; sleep 1000")
    assert process.stdout is not None
    for line in process.stdout:
        if line == "started\n":
            break
    process.terminate()
    # The end of the output: the sleeping stage, which holds it open, has ended.
    output = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert read_table(output) == [*ALL_STAGES[:4], "total"]
