"""What several nodes agree on, without processes: options, evidence, service files."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from genesis.base.errors import UserError
from genesis.base.processes import Mark
from genesis.cli import supervise
from genesis.operations.supervise.classify import Evidence, RankEnd, classify
from genesis.operations.supervise.nodes import decode_evidence, encode_evidence, keep_size, merge_evidence
from genesis.operations.supervise.options import read_nodes
from genesis.operations.supervise.plan import NodePlace, Plan, RecipeFacts, build_jobs
from genesis.operations.supervise.rendezvous import describe_difference, find_interface
from genesis.operations.supervise.service_files import ServiceCommand, render_file
from genesis.operations.supervise.skips import Blame, find_blame


@pytest.mark.parametrize(
    ("nodes", "rdzv", "text"),
    [
        ("0", "a:1", "--nodes 0: the least number must be at least 1"),
        ("2:1", "a:1", "--nodes 2:1: the least number"),
        ("two", "a:1", "--nodes two: give a number"),
        ("1:", "a:1", "--nodes 1:: give a number"),
        ("2", "a", "--rdzv a: give HOST:PORT"),
        ("2", "a:0", "--rdzv a:0: give HOST:PORT"),
        ("2", "a:99999", "--rdzv a:99999: give HOST:PORT"),
        ("2", "a b:1", "--rdzv a b:1: give HOST:PORT"),
        ("2", None, "belong together"),
        (None, "a:1", "belong together"),
    ],
)
def test_a_mistake_in_the_nodes_is_one_line(nodes: str | None, rdzv: str | None, text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_nodes(nodes, rdzv, None, 1.0, 1.0)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nodes_have_sizes_and_names() -> None:
    options = read_nodes("1:2", "[::1]:29400", "a", 1.0, 1.0)
    assert options is not None
    assert (options.min_nodes, options.max_nodes, options.host, options.port) == (1, 2, "::1", 29400)
    assert read_nodes(None, None, None, 1.0, 1.0) is None
    with pytest.raises(UserError, match=r"--node_name \.\./x"):
        read_nodes("2", "a:1", "../x", 1.0, 1.0)


def test_ranks_have_the_numbers_of_all_nodes(tmp_path: Path) -> None:
    facts = RecipeFacts(str(tmp_path), 2, 1, 4)
    place = NodePlace(1, 3, "10.0.0.1", "eth7")
    jobs = build_jobs(["fit"], tmp_path, facts, Plan(), 5, 4711, Mark("M", "x"), place)
    assert [job.rank for job in jobs] == [2, 3]
    variables = jobs[1].environment
    assert [variables[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")] == ["3", "1", "1", "6"]
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "4711")
    assert variables["GLOO_SOCKET_IFNAME"] == "eth7"
    assert jobs[0].arguments[-2:] == ["--trainer.num_nodes", "3"]


def test_the_first_cause_wins_across_nodes() -> None:
    gone = RankEnd(0, 1, 12.0, "RuntimeError: Connection closed by peer")
    killed = RankEnd(3, -signal.SIGKILL, 11.0)
    ours = Evidence([gone], has_trained=True)
    theirs = decode_evidence(encode_evidence(Evidence([killed], has_trained=True)))
    assert abs(theirs.ranks[0].moment_seconds - 11.0) < 0.5
    diagnosis = classify(merge_evidence([ours, theirs]))
    assert (diagnosis.end_class, diagnosis.rank) == ("lost_rank", 3)


def test_the_longest_silence_is_the_hang() -> None:
    found = [Evidence([], True, hung_rank=rank, hung_seconds=seconds) for rank, seconds in ((0, 6.0), (1, 7.0))]
    merged = merge_evidence([*found, Evidence([], False)])
    assert (merged.hung_rank, merged.hung_seconds, merged.has_trained) == (1, 7.0, True)


def test_what_a_rank_of_another_node_reported_at_its_failure_is_evidence() -> None:
    end = RankEnd(1, 1, 11.0, failed_step=14, failed_clocks={"data_position": 112, "last_update_step": 11})
    (theirs,) = decode_evidence(encode_evidence(Evidence([end], has_trained=True))).ranks
    assert find_blame("non_finite", theirs.failed_step, theirs.failed_clocks, 8) == Blame(88, 112, 8, 11)


def test_a_change_of_nodes_keeps_the_size_of_micro_batches_alone() -> None:
    assert keep_size(Plan(from_step=4, micro_batch_divisor=2, is_fresh=True)) == Plan(micro_batch_divisor=2)


def test_nodes_that_differ_are_named_with_what_differs() -> None:
    mine = {"name": "a", "version": "1", "nodes": "2", "ranks": 1, "recipe": "x"}
    assert describe_difference(mine, {**mine, "name": "b"}) == ""
    text = describe_difference(mine, {**mine, "name": "b", "version": "2", "recipe": "y"})
    assert text == "the version of genesis (2 on b, 1 on a), the recipe (on b and a)"
    text = describe_difference({**mine, "may_skip_data": 0}, {**mine, "name": "b", "may_skip_data": 3})
    assert text == "--may_skip_data (3 on b, 0 on a)"


def test_the_loopback_interface_is_found_by_its_address() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.1") is None


WORDS = ("--nodes", "2", "--rdzv", "node0:29400", "--", "fit", "--config", "a b.yaml")


def build_command(directory: Path, python: str = sys.executable) -> ServiceCommand:
    return ServiceCommand(WORDS, Path("runs/My Run.1"), directory, python, max_nodes=2, min_nodes=2)


@pytest.mark.process
def test_slurms_script_starts_a_supervisor_per_node_which_meet_at_the_first(tmp_path: Path) -> None:
    log, binaries = tmp_path / "log", tmp_path / "bin"
    binaries.mkdir()
    (binaries / "scontrol").write_text("#!/bin/bash\nprintf 'n7\\nn8\\n'\n")
    (binaries / "srun").write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > {log}\n")
    for file in binaries.iterdir():
        file.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(render_file("slurm", build_command(tmp_path, "python")))
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, str(script)], env={"PATH": f"{binaries}:/usr/bin:/bin"}, check=True, timeout=120)
    expected = ["python", "-P", "-m", "genesis", "supervise", "--rdzv", "n7:29400", "--nodes", "2", *WORDS[4:]]
    assert log.read_text().splitlines()[2:] == expected
    assert "#SBATCH --nodes=2\n" in script.read_text()


def test_kubernetes_gets_an_indexed_job_whose_pods_meet_at_the_first(tmp_path: Path) -> None:
    claim, service, job = yaml.safe_load_all(render_file("kubernetes", build_command(tmp_path)))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    name = job["metadata"]["name"]
    assert pod["containers"][0]["command"][2:4] == ["--rdzv", f"{name}-0.{name}:29400"]


def test_the_manifests_of_several_nodes_fit_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    for manifest in yaml.safe_load_all(render_file("kubernetes", build_command(tmp_path))):
        kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_the_command_refuses_half_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="belong together"):
        supervise.main(["--nodes", "2", "--", "fit"])
