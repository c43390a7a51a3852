"""`genesis data clean`: what it prints, recipes that are mistaken, and its jobs on a stand-in for Slurm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.cli.clean import build_stage
from genesis.cli.main import main
from genesis.data.clean.plan import STAGES
from tests.cli.conftest import Genesis
from tests.data.corpus_support import write_jsonl

REPOSITORY = Path(__file__).parents[2]
TEXTS = [f"document number {number} has {number} more words than the one before it " * 2 for number in range(8)]

SBATCH = f"""#!{sys.executable}
# Runs a job's script for each index of its array, at once, and remembers what it was asked.
import os, re, subprocess, sys
from pathlib import Path

log = Path(os.environ["FAKE_SLURM"])
number = 100 + len(log.read_text().splitlines()) if log.exists() else 100
script = Path(sys.argv[-1]).read_text()
(last,) = re.findall(r"^#SBATCH --array=0-(\\d+)", script, re.M)
for index in range(int(last) + 1):
    environment = dict(os.environ, SLURM_ARRAY_TASK_ID=str(index), SLURM_NODELIST="here", RUN_OFFSET="0")
    subprocess.run(["bash", sys.argv[-1]], env=environment, stdout=2, check=True)
with log.open("a") as file:
    print(re.findall(r"--job-name=(\\S+)", script)[0], *sys.argv[1:-1], file=file)
print("Submitted batch job", number)
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done\nexec "$@"\n'
SCONTROL = "#!/bin/bash\necho here\n"
SQUEUE = '#!/bin/bash\n[ -e "$FAKE_SLURM.running" ] && echo 101\nexit 0\n'


SLURM = ("--executor", "slurm", "--slurm.partition", "cpu", "--slurm.time", "00:10:00")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "web.jsonl", [*TEXTS, TEXTS[2], "short"])
    path = tmp_path / "clean.yaml"
    path.write_text(
        f"sources: [{{name: web, paths: [{tmp_path}/web.jsonl]}}]\n"
        f"out: {tmp_path}/out\n"
        "tasks: 2\n"
        "local: {workers: 1}\n"
        "stages: [{filter: length, min_words: 5}, {filter: exact_duplicates}]\n"
    )
    return path


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts Slurm's commands on the path; returns the file that remembers what sbatch was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    python = f'#!/bin/bash\nexec "{sys.executable}" -c "from datatrove.tools.{{0}} import main; main()" "$@"\n'
    for name in ("launch_pickled_pipeline", "merge_stats"):
        (folder / name).write_text(python.format(name))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "slurm.log"))
    return tmp_path / "slurm.log"


def test_the_report_tells_what_each_filter_kept(recipe: Path, genesis: Genesis) -> None:
    outcome = genesis("data", "clean", "--config", str(recipe))
    assert (outcome.status, outcome.err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines() if line.strip()}
    num_characters = sum(map(len, TEXTS))
    num_read = num_characters + len(TEXTS[2]) + len("short")
    assert rows["(read)"] == ["10", f"{num_read:,}", "100.0%"]
    assert rows["01-length"][:4] == ["10", "1", "9", f"{num_read - 5:,}"]
    assert rows["01-length"][5:] == ["too_few_words", "1"]
    assert rows["02-exact_duplicates"][:4] == ["9", "1", "8", f"{num_characters:,}"]
    assert rows["web"][:3] == ["10", "8", f"{num_characters:,}"]
    again = genesis("data", "clean", "--config", str(recipe))
    rest = [line for line in again.out.splitlines() if not line.startswith("nothing to do: ")]
    assert len(rest) == len(again.out.splitlines()) - 1
    assert [line for line in outcome.out.splitlines() if not line.startswith("phase ")] == rest


def test_the_help_page_has_an_example_and_every_filter_with_its_options(genesis: Genesis) -> None:
    page = genesis("data", "clean", "--help").out
    assert "\n  stages: [{filter: length, min_words: 20}, " in page
    for name in STAGES:
        assert f"\n  {name}" in page
    assert "min_stop_words=2" in page


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"filter": "repetitions"}, "stage 3: no such filter: 'repetitions'; did you mean repetition?"),
        ({"filter": ["x", "y"]}, "stage 3: no such filter: ['x', 'y']; choose one of length, language, "),
        ({"min_words": 3}, "stage 3 has no filter; give `filter:` with one of length, "),
        ({"filter": "length", "min_word": 3}, "stage 3 (length) has no option 'min_word'; did you mean min_words?"),
        ({"filter": "exact_duplicates", "x": 3}, "stage 3 (exact_duplicates) has no option 'x'"),
        ({"filter": "length", "min_words": "many"}, "stage 3 (length): min_words is 'many', not int | None"),
        ({"filter": "length"}, "stage 3: length has no bound"),
        ({"filter": "language", "min_score": "x"}, "stage 3 (language): min_score is x: give a number"),
        ({"filter": "decontamination", "evaluation": [{"name": "a", "path": ["b"]}]}, "Option 'path' is not accepted"),
    ],
)
def test_a_mistaken_stage_is_one_line_that_names_it(stage: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        build_stage(3, stage)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--taks", "3"), "unrecognized arguments: --taks 3; did you mean tasks?"),
        (("--tasks", "many"), "tasks is many: give a whole number"),
        (("--executor", "dask"), "choose from local, slurm, ray"),
        (("--executor", "slurm"), "executor slurm needs slurm.partition"),
        (("--executor", "slurm", "--slurm.partition", "cpu"), "executor slurm needs slurm.time"),
        ((*SLURM, "--slurm.mem_per_cpu_gb", "512MB"), "slurm.mem_per_cpu_gb is 0.512: Slurm takes whole GB"),
        (
            ("--ray.mem_per_cpu_gb", "much"),
            "ray.mem_per_cpu_gb: 'much' is no size: write it as 0.5 (GB), 512MB or 512MiB",
        ),
        (("--tokenizer", "nowhere"), "cannot read the tokenizer nowhere"),
        (("--sources", "[{name: web, paths: [nowhere]}]"), "no such file: nowhere"),
    ],
)
def test_a_mistaken_option_is_one_line(
    arguments: tuple[str, ...], message: str, recipe: Path, genesis: Genesis
) -> None:
    outcome = genesis("data", "clean", "--config", str(recipe), *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_ray_that_is_not_there_is_told_with_the_extra(
    recipe: Path, genesis: Genesis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = genesis("data", "clean", "--config", str(recipe), "--executor", "ray")
    assert outcome.err == "genesis: error: executor ray needs ray; pip install 'genesis-lm[ray]'\n"


def test_without_datatrove_the_command_names_the_extra() -> None:
    program = (
        "import sys\n"
        "sys.modules['datatrove'] = None\n"
        "from genesis.cli.main import main\n"
        "sys.exit(main(['data', 'clean', '--config', 'clean/web']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("genesis: error: `genesis data clean` needs datatrove")
    assert result.stderr.endswith("pip install 'genesis-lm[clean]'\n")


@pytest.mark.slow
def test_slurm_jobs_wait_for_each_other_and_make_the_same_result(
    recipe: Path, slurm: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [*SLURM, "--tasks", "1", "--slurm.mem_per_cpu_gb", "4GB"]
    arguments = ["data", "clean", "--config", str(recipe), *asked]
    assert main(arguments) == 0
    assert "submitted Slurm jobs 100, 102, 104, 106; " in capfd.readouterr().out
    jobs = [line.split() for line in slurm.read_text().splitlines()]
    # datatrove adds a job that sums statistics up to each.
    assert [(name, [part for part in rest if "dependency" in part]) for name, *rest in jobs[::2]] == [
        ("clean-02-exact_duplicates-signatures", []),
        ("clean-02-exact_duplicates-find", ["--dependency=afterok:100"]),
        ("clean-text", ["--dependency=afterok:102"]),
        ("clean-finish", ["--dependency=afterok:104"]),
    ]
    script = (tmp_path / "out" / ".clean" / "logs" / "text" / "launch_script.slurm").read_text()
    assert "#SBATCH --partition=cpu\n" in script
    assert "#SBATCH --time=00:10:00\n" in script
    assert "#SBATCH --mem-per-cpu=4G\n" in script
    assert main(arguments) == 0  # the jobs are done: nothing is submitted
    shown = capfd.readouterr().out
    assert len(slurm.read_text().splitlines()) == len(jobs)
    assert "02-exact_duplicates" in shown
    local = [*arguments, "--executor", "local", "--out", str(tmp_path / "local")]
    assert main(local) == 0
    made, wanted = (sorted((tmp_path / out / "text").rglob("*.zst")) for out in ("out", "local"))
    assert [path.read_bytes() for path in made] == [path.read_bytes() for path in wanted]


def test_slurm_jobs_that_run_are_not_submitted_again(
    recipe: Path, slurm: Path, tmp_path: Path, genesis: Genesis
) -> None:
    work = tmp_path / "out" / ".clean"
    work.mkdir(parents=True)
    (work / "jobs.json").write_text(json.dumps(["101"]))
    Path(f"{slurm}.running").touch()
    for more in ((), ("--restart",)):
        outcome = genesis("data", "clean", "--config", str(recipe), *more)
        assert outcome.err.startswith("genesis: error: Slurm jobs 101 are running in ")
    assert not slurm.exists()


def test_without_sbatch_the_line_says_so(recipe: Path, genesis: Genesis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    asked = list(SLURM)
    outcome = genesis("data", "clean", "--config", str(recipe), *asked)
    assert outcome.err == "genesis: error: executor slurm needs the command sbatch; run this where jobs are submitted\n"
    (recipe.parent / "out" / ".clean" / "jobs.json").write_text(json.dumps(["101"]))
    outcome = genesis("data", "clean", "--config", str(recipe))
    assert outcome.err.startswith("genesis: error: Slurm job 101 was submitted, but its state is unknown")
