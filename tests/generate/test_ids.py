"""A model that was trained on tokens without a tokenizer is continued, exported and read again by ids."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from genesis.base.errors import UserError
from genesis.cli.generate import main
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.proof import Layout
from genesis.generate.ids import parse_ids
from genesis.generate.load import load_decoder
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from tests.tiny_runs import build_decoder, save

PROMPT = (5, 17, 300)


@pytest.fixture(scope="module")
def run_of_ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ids") / "run"
    save(directory / "checkpoints", 1, build_decoder(5), {})
    return directory


def continue_ids(run: Path, num_tokens: int) -> list[int]:
    options = GenerateOptions(num_tokens, SamplingOptions(temperature=0.0))
    return [token.id for token in generate(load_decoder(run).decoder, [PROMPT], options, frozenset())]


def test_ids_are_continued_by_ids(run_of_ids: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(run_of_ids), "--temperature", "0", "--max_new_tokens", "9", "--device", "cpu"]
    wanted = continue_ids(run_of_ids, 9)
    assert main([*words, "--prompt_ids", "5, 17 300"]) == 0
    assert capsys.readouterr().out == " ".join(map(str, (*PROMPT, *wanted))) + "\n"
    assert main([*words, "--prompt_ids", "5 17 300", "--eos_id", str(wanted[2])]) == 0
    end = wanted.index(wanted[2]) + 1
    assert capsys.readouterr().out == " ".join(map(str, (*PROMPT, *wanted[:end]))) + "\n"


def test_a_model_with_a_tokenizer_is_continued_by_ids_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(run), "--temperature", "0", "--max_new_tokens", "4", "--eos_id", "699", "--device", "cpu"]
    assert main([*words, "--prompt_ids", "5 17 300"]) == 0
    assert capsys.readouterr().out == " ".join(map(str, (*PROMPT, *continue_ids(run, 4)))) + "\n"


@pytest.mark.parametrize("text", ["", " , ", "5 x", "-1", "700", "5.0", "99999999999"])
def test_what_is_no_id_of_the_model_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"prompt ids hold .*give ids from 0 to 699"):
        parse_ids(text, 700)


def test_text_for_a_model_without_tokenizer_is_refused_with_the_remedy(run_of_ids: Path) -> None:
    with pytest.raises(UserError, match="trained on tokens without a tokenizer; give --prompt_ids, or --tokenizer"):
        main([str(run_of_ids), "--prompt", "a", "--device", "cpu"])
    with pytest.raises(UserError, match="give one of them"):
        main([str(run_of_ids), "--prompt", "a", "--prompt_ids", "5", "--device", "cpu"])
    with pytest.raises(UserError, match="for text give one by --tokenizer"):
        assert load_decoder(run_of_ids).text_tokenizer


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("layout", ["safetensors", "huggingface"])
def test_a_model_without_tokenizer_is_exported_and_read_again(layout: Layout, run_of_ids: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    proof = export_checkpoints([run_of_ids / "checkpoints/step-00000001"], out, ExportOptions(layout=layout))
    assert proof["tokenizer_origin"] == "none"
    assert proof["weights"]["num_different"] == 0
    assert not [path.name for path in out.iterdir() if "tokenizer" in path.name]
    assert "its input and output are ids" in (out / "README.md").read_text()
    assert "AutoTokenizer" not in (out / "README.md").read_text()
    assert load_decoder(out).tokenizer is None
    assert continue_ids(out, 9) == continue_ids(run_of_ids, 9)
    if layout == "huggingface":
        assert proof["generation"]["num_equal"] == proof["generation"]["num_tokens"] > 0
        assert json.loads((out / "config.json").read_bytes())["bos_token_id"] is None
        model = AutoModelForCausalLM.from_pretrained(out)
        ids = torch.tensor([PROMPT])
        assert model.config.eos_token_id is None
        assert int(model(ids).logits[0, -1].argmax()) == continue_ids(out, 1)[0]
