"""Special tokens that are added to a model and its tokenizer: what they get, and that nothing else changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from genesis.base.errors import UserError
from genesis.cli.main import main
from genesis.export.add_tokens import AddTokensOptions, add_tokens, fill_rows
from genesis.export.importing import save_weights
from genesis.export.texts import SCRIPTS
from genesis.generate.load import load_decoder
from genesis.model.decoder import DecoderConfig
from genesis.tokenizer.addition import TokenAddition
from genesis.tokenizer.files import write_files
from genesis.tokenizer.open import extend_tokenizer, open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.checkpoint import read_manifest
from genesis_callbacks.checkpoint.inventory import trace_ancestors
from tests.tiny_runs import SHAPE, build_decoder, save_adapted
from tests.tokenizer.test_huggingface import CONFIG, HARD, SPECIAL, llama2, llama3, qwen

NEW = ("<|tool|>", "<|user turn|>")
SPELLED = [*HARD, *SCRIPTS.values(), "a<|tool|>b <|user turn|> <|tool|> <|too|>", "<|tool|>"]


def build_base(directory: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """Returns a run with one checkpoint and a tokenizer, as an import makes it."""
    config = DecoderConfig(**{**SHAPE, **changes})  # type: ignore[arg-type]
    directory.mkdir()
    write_files(tokenizer.files, directory)
    decoder = build_decoder(1, **changes)
    return save_weights(decoder.state_dict(), config, tokenizer, directory / "checkpoints")


@pytest.mark.parametrize("write", [qwen, llama3, llama2])
def test_ids_of_added_tokens_are_those_that_transformers_gives(write: Any, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write(tmp_path))
    extended = extend_tokenizer(tokenizer, TokenAddition(tokens=NEW))
    (tmp_path / "new").mkdir()
    write_files(extended.files, tmp_path / "new")
    theirs, opened = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path / "new")
    theirs.add_special_tokens({"additional_special_tokens": list(NEW)})
    for text in SPELLED:
        wanted = theirs(text, add_special_tokens=False).input_ids
        assert opened(text, add_special_tokens=False).input_ids == wanted
        assert extended.encode_with_controls(text) == wanted
        assert extended.encode(text) == tokenizer.encode(text)
        for skips in (True, False):
            assert opened.decode(wanted, skip_special_tokens=skips) == theirs.decode(wanted, skip_special_tokens=skips)
    assert [extended.pieces[token] for token in range(tokenizer.vocab_size, extended.vocab_size)] == list(NEW)
    assert extended.hash != tokenizer.hash


def test_the_end_of_text_and_the_template_can_change_with_the_tokens(tmp_path: Path) -> None:
    qwen(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0], "temperature": 0.7}')
    tokenizer = open_tokenizer(tmp_path)
    addition = TokenAddition(tokens=NEW, eos=NEW[0], chat_template="{{ messages[0].content }}<|tool|>")
    extended = extend_tokenizer(tokenizer, addition)
    assert extended.eos_id == tokenizer.vocab_size
    assert extended.stop_ids == {0, 2, tokenizer.vocab_size}
    assert extended.chat_template == addition.chat_template
    (tmp_path / "new").mkdir()
    write_files(extended.files, tmp_path / "new")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert theirs.eos_token_id == extended.eos_id
    assert theirs.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|tool|>"


def test_our_own_tokenizer_gets_control_symbols(tokenizer_file: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tokenizer_file)
    extended = extend_tokenizer(tokenizer, TokenAddition(tokens=NEW))
    for text in SCRIPTS.values():
        assert extended.encode(text) == tokenizer.encode(text)
    assert extended.encode_with_controls("<|tool|>") == [tokenizer.vocab_size]
    assert extended.encode("<|tool|>") == tokenizer.encode("<|tool|>")
    fast = extended.huggingface_files(256)
    assert fast is not None
    write_files(fast, tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=False)
    assert opened("a<|tool|>", add_special_tokens=False).input_ids == extended.encode_with_controls("a<|tool|>")


@pytest.mark.parametrize("is_tied", [True, False])
def test_only_the_new_rows_are_new(is_tied: bool, tokenizer_file: Path, tmp_path: Path) -> None:
    changes = {"has_tied_embeddings": is_tied}
    base = build_base(tmp_path / "base", open_tokenizer(tokenizer_file), **changes)
    options = AddTokensOptions(multiple_of=8)
    report = add_tokens(base, tmp_path / "new", TokenAddition(tokens=NEW), options)
    assert report["added_tokens"] == {NEW[0]: 700, NEW[1]: 701}
    assert report["num_rows"] == {"before": 700, "after": 704}
    before, after = load_decoder(base), load_decoder(tmp_path / "new")
    assert after.decoder.config.vocab_size == 704
    assert after.text_tokenizer.vocab_size == 702
    ids = torch.tensor([before.text_tokenizer.encode("class alpha def beta")])
    assert torch.equal(after.decoder(ids)[..., :700], before.decoder(ids))
    for name, old in before.decoder.state_dict().items():
        new = after.decoder.state_dict()[name]
        assert torch.equal(new[: len(old)], old)
        if len(new) > len(old):
            distance = (new[700:].double() - old.double().mean(dim=0)).abs()
            assert bool((distance < 0.06 * old.double().std(dim=0)).all())
            assert len(new[700:].unique(dim=0)) == 4
    manifest = read_manifest(after.checkpoint)
    ((ancestor, state),) = trace_ancestors(after.checkpoint, manifest)
    assert ancestor.locate(after.checkpoint.parent).samefile(base)
    assert state == "there"
    again = add_tokens(base, tmp_path / "again", TokenAddition(tokens=NEW), options)
    assert again["tokenizer"] == report["tokenizer"]
    same = load_decoder(tmp_path / "again").decoder.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in after.decoder.state_dict().items())


def test_rows_that_a_model_has_in_advance_are_taken_first(tokenizer_file: Path, tmp_path: Path) -> None:
    base = build_base(tmp_path / "base", open_tokenizer(tokenizer_file), vocab_size=704)
    report = add_tokens(base, tmp_path / "new", TokenAddition(tokens=NEW), AddTokensOptions())
    assert report["num_rows"] == {"before": 704, "after": 704}
    before, after = (load_decoder(one).decoder.embedding.weight for one in (base, tmp_path / "new"))
    assert torch.equal(after[702:], before[702:])
    assert not torch.equal(after[700:702], before[700:702])


def test_a_new_row_follows_from_its_name_and_not_from_its_number() -> None:
    weight = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    first, second = weight.clone(), weight.clone()
    fill_rows(first, {8: "a", 9: "b"}, num_used=8, key="0 embedding.weight")
    fill_rows(second, {8: "b", 9: "a"}, num_used=8, key="0 embedding.weight")
    assert torch.equal(first[8], second[9])
    assert torch.equal(first[:8], weight[:8])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((), "no token to add"),
        (("",), "is empty or has spaces"),
        ((" a",), "is empty or has spaces"),
        (("<|a|>", "<|a|>"), "is given twice"),
        (("\ud800",), "is not valid Unicode"),
        (("x" * 300,), "has 300 characters"),
    ],
)
def test_what_cannot_be_a_token_is_refused(tokens: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TokenAddition(tokens=tokens)


def test_an_existing_token_becomes_the_end_of_texts_without_a_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs").mkdir()
    (qwen(tmp_path / "theirs") / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "eos_token": SPECIAL[0]}))
    base = build_base(tmp_path / "base", open_tokenizer(tmp_path / "theirs"), vocab_size=640)
    assert main(["model", "add-tokens", str(base), str(tmp_path / "new"), "--eos", "<|im_end|>"]) == 0
    out = capsys.readouterr().out
    assert "with 0 more special tokens" in out
    assert "documents and texts end with <|im_end|>" in out
    before, after = load_decoder(base), load_decoder(tmp_path / "new")
    assert after.text_tokenizer.eos_id == before.text_tokenizer.pieces.index("<|im_end|>")
    assert after.text_tokenizer.pieces == before.text_tokenizer.pieces
    for name, tensor in before.decoder.state_dict().items():
        assert torch.equal(after.decoder.state_dict()[name], tensor)


def test_tokens_that_exist_and_an_eos_that_does_not_are_refused(tmp_path: Path, tokenizer_file: Path) -> None:
    theirs, ours = open_tokenizer(qwen(tmp_path)), open_tokenizer(tokenizer_file)
    for tokenizer, token in ((theirs, "<|im_end|>"), (theirs, "<tool_call>"), (ours, "<s>")):
        with pytest.raises(UserError, match=r"has the token .* already, with the id"):
            extend_tokenizer(tokenizer, TokenAddition(tokens=(token,)))
    with pytest.raises(UserError, match=r"eos is '<\|other\|>', which is no token"):
        extend_tokenizer(theirs, TokenAddition(tokens=NEW, eos="<|other|>"))
    with pytest.raises(UserError, match="keeps its eos"):
        extend_tokenizer(ours, TokenAddition(tokens=NEW, eos=NEW[0]))


def test_a_checkpoint_with_adapters_is_refused_with_the_way_out(run: Path, tmp_path: Path) -> None:
    identity = read_manifest(run / "checkpoints/step-00000001").identity
    adapted = save_adapted(tmp_path, run / "checkpoints/step-00000001", build_decoder(1), identity, rank=2)
    with pytest.raises(UserError, match="holds adapters beside a base: add tokens to the base"):
        add_tokens(adapted, tmp_path / "new", TokenAddition(tokens=NEW), AddTokensOptions())
    assert not (tmp_path / "new").exists()


def test_the_command_prints_ids_and_how_to_train_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "add-tokens", str(run), str(tmp_path / "new"), *NEW]) == 0
    out = capsys.readouterr().out
    assert "step-00000003 with 2 more special tokens" in out
    assert "     701  <|user turn|>" in out
    assert "also_train '[embedding]'" in out
