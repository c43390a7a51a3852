"""A teacher's tokenizer beside the student's: compared by their ids, whatever else is in their files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genesis.base.errors import UserError
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.generate.teacher import check_teacher_fits, find_teacher, load_teacher
from genesis.model.decoder import Decoder
from genesis.objectives.teacher import Teacher
from genesis.tokenizer.files import write_files
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from tests.chat.support import write_tokenizer
from tests.objectives.teachers import TEACHER, make_teacher


def make_family(tmp_path: Path) -> tuple[Path, Tokenizer]:
    """Returns a teacher's run, and the tokenizer that it has."""
    files = write_tokenizer(tmp_path / "teachers")
    tokenizer = open_tokenizer(files)
    config = replace(TEACHER, vocab_size=tokenizer.vocab_size + 8)
    run = make_teacher(tmp_path / "teacher", files, config=config)
    write_files(tokenizer.files, run)  # as an import does
    return run, tokenizer


def test_a_teacher_of_the_same_family_with_other_files_is_taken_with_its_own(tmp_path: Path) -> None:
    run, tokenizer = make_family(tmp_path)
    files = write_tokenizer(tmp_path / "student", "{{ messages }}", model_max_length=77)
    student = open_tokenizer(files)
    assert student.hash != tokenizer.hash
    found = find_teacher(run)
    found.check_tokenizer(student.hash, "the corpus", files)
    teacher, dtype = load_teacher(
        found, tokenizer=files, vocab_size=student.vocab_size, seq_len=16, top_k=4, temperature=1.0
    )
    assert isinstance(teacher, Teacher)
    assert dtype == "float32"


@pytest.mark.parametrize("name", ["student", "nowhere"])
def test_a_teacher_with_another_id_or_without_its_files_is_refused(tmp_path: Path, name: str) -> None:
    run, _ = make_family(tmp_path)
    files = write_tokenizer(tmp_path / "student", model_max_length=77)
    if name == "student":
        content = json.loads((files / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
        (files / "tokenizer.json").write_text(json.dumps(content))
    else:
        content = json.loads((files / "tokenizer.json").read_text())
        content["added_tokens"] = content.get("added_tokens", [])[:-1]
        (files / "tokenizer.json").write_text(json.dumps(content))
        (run / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="give a teacher with the student's tokenizer") as refused:
        find_teacher(run).check_tokenizer(open_tokenizer(files).hash, "the corpus", files)
    assert ("cannot be compared" in str(refused.value)) is (name == "nowhere")


@pytest.mark.parametrize("kind", ["run", pytest.param("export", marks=pytest.mark.slow)])
def test_a_teacher_larger_than_the_memory_is_refused_before_it_is_read(
    kind: str, tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = make_teacher(tmp_path / "run", tiny_corpus)
    num_elements = sum(parameter.numel() for parameter in Decoder(TEACHER).parameters())
    if kind == "export":
        options = ExportOptions(tokenizer=tiny_corpus)
        export_checkpoints([teacher / "checkpoints/step-00000000"], tmp_path / "export", options)
        teacher = tmp_path / "export"
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    available, on_device = [4 * num_elements - 1, 4 * num_elements - 1]
    monkeypatch.setattr("genesis.generate.teacher.available_memory", lambda: available)
    monkeypatch.setattr("genesis.generate.teacher.read_free_memory", lambda *_: (on_device, 2 * on_device))
    with pytest.raises(
        UserError, match=r"the weights of the teacher .* take .* GB, and this machine has .*--device cpu"
    ):
        check_teacher_fits(teacher, cpu)
    check_teacher_fits(teacher, cpu, "bfloat16")
    available += 10**6  # the headers of an export's files
    check_teacher_fits(teacher, cpu)
    with pytest.raises(UserError, match="and cuda has"):
        check_teacher_fits(teacher, cuda)
    check_teacher_fits(teacher, cuda, "bfloat16")
    on_device += 10**6
    check_teacher_fits(teacher, cuda)
