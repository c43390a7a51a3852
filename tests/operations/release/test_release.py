"""A release holds what was proved and no more, with a card that the Hub reads, and loads as the export does."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from genesis.base.errors import UserError
from genesis.generate.load import load_decoder
from genesis.operations.release.licenses import LICENSES, check_license
from genesis.operations.release.options import ReleaseOptions
from genesis.operations.release.release import plan_release
from tests.operations.release.conftest import OPTIONS

MADE = {"README.md", "SHA256SUMS"}


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "model")
    return tmp_path / "model"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_files_are_the_exports_byte_for_byte(exported: Path, released: Path) -> None:
    assert names(released) == names(exported) | MADE
    for name in names(exported) - MADE:
        assert (released / name).read_bytes() == (exported / name).read_bytes(), name


def test_weights_are_linked_and_what_may_be_edited_is_not(exported: Path, released: Path) -> None:
    for path in exported.iterdir():
        is_link = (released / path.name).samefile(path)
        assert is_link == (path.suffix == ".safetensors"), path.name


def test_the_sums_are_those_that_sha256sum_checks(released: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=released, check=True, capture_output=True)
    lines = (released / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in lines} == names(released) - {"SHA256SUMS"}
    card = hashlib.sha256((released / "README.md").read_bytes()).hexdigest()
    assert f"{card}  README.md" in lines


def test_the_head_of_the_card_is_what_the_hub_reads(released: Path) -> None:
    data = ModelCard.load(released / "README.md").data.to_dict()
    assert data == {
        "tags": ["genesis"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "language": ["en", "code"],
        "license": "apache-2.0",
    }


def test_the_card_has_version_licence_proof_and_lineage(released: Path, checkpoint: Path) -> None:
    card = (released / "README.md").read_text()
    for words in (
        "# tiny\n",
        'from_pretrained("some-lab/tiny", revision="v1.2.0")',
        "Version 1.2.0, tag `v1.2.0`, under the licence `apache-2.0`",
        "values, each bit for bit",
        "texts, ids and decoded text",
        "greedy text: 64 of 64 tokens equal",
        (checkpoint / "COMMITTED").read_text(),
        "| tokens_seen | 300 |",
        "num_kv_heads: 2",
    ):
        assert words in card
    assert "THIS_DIRECTORY" not in card


def test_a_release_loads_here_and_in_transformers(released: Path, checkpoint: Path) -> None:
    ours, theirs = load_decoder(checkpoint).decoder, load_decoder(released).decoder
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in ours.state_dict().items())
    AutoModelForCausalLM.from_pretrained(released)
    assert len(AutoTokenizer.from_pretrained(released)) == 700


def test_what_lies_beside_the_proved_files_is_not_released(copy: Path, tmp_path: Path) -> None:
    (copy / "notes.txt").write_text("not for you")
    (copy / ".env").write_text("not for you")
    plan_release(copy, OPTIONS).write(tmp_path / "out")
    assert not {"notes.txt", ".env"} & names(tmp_path / "out")


def test_an_export_that_has_changed_is_not_released(copy: Path, tmp_path: Path) -> None:
    (copy / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json has changed since it was proved"):
        plan_release(copy, OPTIONS)


def test_bytes_that_change_while_it_is_made_are_found(copy: Path, tmp_path: Path) -> None:
    folder = plan_release(copy, OPTIONS)
    (copy / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json has changed during the release"):
        folder.write(tmp_path / "out")
    assert names(tmp_path) == {"model"}


def test_a_folder_that_is_there_is_taken_if_it_is_the_same(exported: Path, released: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in released.iterdir()}
    plan_release(exported, OPTIONS).write(released)
    assert {path.name: path.stat().st_mtime_ns for path in released.iterdir()} == before
    other = ReleaseOptions("some-lab/tiny", "mit", "1.2.0")
    with pytest.raises(UserError, match="already exists"):
        plan_release(exported, other).write(released)


def test_a_licence_of_ones_own_comes_with_its_text(exported: Path, tmp_path: Path) -> None:
    text = tmp_path / "ours.txt"
    text.write_text("Do as you like.\n")
    options = ReleaseOptions("some-lab/Tiny", "other", license_file=text)
    plan_release(exported, options).write(tmp_path / "out")
    assert (tmp_path / "out/LICENSE").read_text() == "Do as you like.\n"
    data = ModelCard.load(tmp_path / "out/README.md").data.to_dict()
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "tiny-license", "LICENSE")
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"cannot read .*ours\.txt: it is not UTF-8 text"):
        plan_release(exported, options)


def test_a_card_that_was_written_in_stays_and_one_with_a_broken_head_is_refused(copy: Path) -> None:
    card = (copy / "README.md").read_text().replace("## Clocks", "## By the way\nWords of mine.\n\n## Clocks")
    (copy / "README.md").write_text(card)
    assert b"Words of mine." in plan_release(copy, OPTIONS).texts["README.md"]
    (copy / "README.md").write_text("---\nlicense: [\n---\n# x")
    with pytest.raises(UserError, match="the head of the export's card is invalid") as error:
        plan_release(copy, OPTIONS)
    assert "\n" not in str(error.value)


def test_an_evaluation_stays_under_the_name_of_the_repository(copy: Path) -> None:
    card = ModelCard((copy / "README.md").read_text())
    found = EvalResult("text-generation", "arc", "arc", "acc_norm", 0.25, dataset_config="5-shot")
    card.data.model_name, card.data.eval_results = "before", [found]
    (copy / "README.md").write_text(str(card))
    data = ModelCard(plan_release(copy, OPTIONS).texts["README.md"].decode()).data
    assert data.model_name == "tiny"
    assert data.eval_results == [found]


def test_every_licence_of_the_hub_is_taken_and_another_is_refused_with_the_nearest() -> None:
    for name in LICENSES:
        check_license(name)
    with pytest.raises(UserError, match=r"'Apache2', which the Hub does not know; did you mean apache-2\.0"):
        check_license("Apache2")
    with pytest.raises(UserError, match="give 'other'"):
        check_license("zzzzzzz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny", "mit"), "--repo is 'tiny': give OWNER/NAME"),
        (("a/b/c", "mit"), "--repo is 'a/b/c': "),
        (("a/b c", "mit"), "--repo is 'a/b c': "),
        (("a/b", "other"), "give its text by --license_file"),
        (("a/b", "mit", "1.0"), "--version is '1.0': give three numbers"),
        (("a/b", "mit", "v1.0.0"), "--version is 'v1.0.0'"),
        (("a/b", "mit", "1.0.0-rc..1"), "--version is"),
        (("a/b", "mit", "1.0.0-rc.lock"), "--version is"),
        (("a/b", "mit", "1.0.0", ("english",)), "--language is 'english'"),
    ],
)
def test_an_option_that_the_hub_would_refuse_is_refused_here(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        ReleaseOptions(*arguments)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
