"""What is uploaded arrives byte for byte, tagged; what goes wrong is one line, and the folder stays."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from genesis.base.errors import UserError
from genesis.operations.release.options import ReleaseOptions
from genesis.operations.release.upload import upload
from tests.operations.release.conftest import OPTIONS
from tests.operations.release.hub import TOKEN, Hub, serve_hub

NEXT = ReleaseOptions("some-lab/tiny", "apache-2.0", "1.3.0")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


def read(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_a_release_arrives_byte_for_byte_in_one_commit_with_its_tag(hub: Hub, released: Path) -> None:
    url = upload(released, OPTIONS, "model", is_private=True)
    assert url == f"{hub.url}/some-lab/tiny"
    repository = hub.repositories["models/some-lab/tiny"]
    assert repository.files == read(released)
    assert repository.commits == ["Version 1.2.0"]
    assert repository.tags == {"v1.2.0": f"{1:040x}"}
    assert repository.is_private


# What huggingface_hub asks of its HTTP library is theirs to fix.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_large_files_arrive_by_their_own_protocol(hub: Hub, released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.large_suffixes = (".safetensors", ".model")
    upload(released, OPTIONS, "model", is_private=False)
    assert hub.repositories["models/some-lab/tiny"].files == read(released)
    assert len(hub.objects) == len([*released.glob("*.safetensors"), *released.glob("*.model")])
    assert not hub.repositories["models/some-lab/tiny"].is_private


def test_the_next_version_takes_the_place_of_what_would_be_loaded_and_of_nothing_else(hub: Hub, released: Path) -> None:
    upload(released, OPTIONS, "model", is_private=False)
    files = hub.repositories["models/some-lab/tiny"].files
    files |= {"model-00009-of-00009.safetensors": b"old", "picture.png": b"mine", ".gitattributes": b""}
    upload(released, NEXT, "model", is_private=False)
    assert files == read(released) | {"picture.png": b"mine", ".gitattributes": b""}
    assert hub.repositories["models/some-lab/tiny"].tags.keys() == {"v1.2.0", "v1.3.0"}


def test_a_version_that_is_there_is_left_and_another_is_not_written_over_it(
    hub: Hub, released: Path, tmp_path: Path
) -> None:
    url = upload(released, OPTIONS, "model", is_private=False)
    hub.requests.clear()
    assert upload(released, OPTIONS, "model", is_private=False) == url
    shutil.copytree(released, tmp_path / "other")
    (tmp_path / "other/SHA256SUMS").write_text("other")
    with pytest.raises(UserError, match=r"already has a different version 1\.2\.0: give another one by --version"):
        upload(tmp_path / "other", OPTIONS, "model", is_private=False)
    assert not [request for request in hub.requests if "/commit/" in request or "/tag/" in request]


def test_an_upload_that_broke_off_before_its_tag_goes_on(hub: Hub, released: Path) -> None:
    upload(released, OPTIONS, "model", is_private=False)
    hub.repositories["models/some-lab/tiny"].tags.clear()
    upload(released, OPTIONS, "model", is_private=False)
    assert hub.repositories["models/some-lab/tiny"].tags.keys() == {"v1.2.0"}


def test_a_space_is_made_for_docker(hub: Hub, released: Path) -> None:
    url = upload(released, OPTIONS, "space", is_private=False)
    assert url == f"{hub.url}/spaces/some-lab/tiny"
    assert hub.repositories["spaces/some-lab/tiny"].sdk == "docker"
    assert hub.repositories["spaces/some-lab/tiny"].files == read(released)


def test_a_wrong_token_a_bad_card_and_no_network_are_one_line(
    hub: Hub, released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("# no head")
    with pytest.raises(UserError, match=f"{hub.url} refuses: .*no license.*{tmp_path.name} is complete") as bad_card:
        upload(tmp_path, OPTIONS, "model", is_private=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN[::-1])
    with pytest.raises(UserError, match=f"{hub.url} refuses: .*Invalid credentials.*is complete") as bad_token:
        upload(released, OPTIONS, "model", is_private=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 cannot be reached: .*the same command") as no_network:
        upload(released, OPTIONS, "model", is_private=False)
    assert all("\n" not in str(error.value) for error in (bad_card, bad_token, no_network))
    assert TOKEN[::-1] not in str(bad_token.value)
