"""`genesis generate`, from a checkpoint that the engine wrote."""

import io
import json
import random
import shutil

import pytest
import torch

from genesis.base.errors import UserError
from genesis.cli.generate import Printer, main
from genesis.generate.load import load_decoder
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import Ranks, RunMetadata, SaveTarget, Snapshot, save_blocking

WORDS = ["alpha", "beta", "gamma", "delta", "def", "return", "class", "\u00e9t\u00e9", "\u65e5\u672c"]
SHAPE = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 64,
    "vocab_size": 350,
}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    chooser = random.Random(0)
    texts = [" ".join(chooser.choice(WORDS) + str(chooser.randrange(1000)) for _ in range(300)) for _ in range(20)]
    return train_tokenizer(texts, TokenizerOptions(vocab_size=350), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer_file):
    """A run's directory with two checkpoints, of different weights."""
    directory = tmp_path_factory.mktemp("run")
    corpus = directory / "corpus"
    corpus.mkdir()
    shutil.copy(tokenizer_file, corpus)
    (directory / "checkpoints").mkdir()
    recipe = json.loads(json.dumps({"model": {"decoder": SHAPE}, "data": {"corpus": str(corpus)}}))
    identity = {"tokenizer_hash": open_tokenizer(tokenizer_file).hash}
    target = SaveTarget(directory / "checkpoints", Ranks(), origin=RunMetadata(identity, recipe))
    for step in (1, 2):
        decoder = build(seed=step)
        parts = [
            part
            for name, tensor in decoder.state_dict().items()
            for part in local_shards(f"model.decoder.{name}", tensor, "parameter")
        ]
        parts += local_shards("optimizer.0.decoder.embedding.weight.exp_avg", torch.ones(3), "state")
        save_blocking(target, lambda step=step, parts=parts: Snapshot(step, {}, parts, {}))
    return directory


def build(seed):
    decoder = Decoder(DecoderConfig(**SHAPE))
    decoder.init_weights(seed)
    return decoder


def test_a_run_gives_its_newest_checkpoint_and_a_checkpoint_itself(run):
    ids = torch.arange(20).view(1, 20)
    for path, seed in ((run, 2), (run / "checkpoints", 2), (run / "checkpoints/step-00000001", 1)):
        loaded = load_decoder(path)
        assert loaded.checkpoint.name == f"step-{seed:08d}"
        assert not loaded.decoder.training
        assert torch.equal(loaded.decoder(ids), build(seed)(ids))


def test_weights_may_be_loaded_in_bfloat16(run):
    assert {p.dtype for p in load_decoder(run, dtype=torch.bfloat16).decoder.parameters()} == {torch.bfloat16}


def test_the_command_prints_prompt_and_text_the_same_with_and_without_cache(run, capsys):
    arguments = [str(run), "--prompt", "class beta", "--max_new_tokens", "20", "--temperature", "0", "--device", "cpu"]
    assert main(arguments) == 0
    cached = capsys.readouterr().out
    assert cached.startswith("class beta")
    assert len(cached) > len("class beta\n")
    assert main([*arguments, "--no_cache"]) == 0
    assert capsys.readouterr().out == cached


def test_several_prompts_are_labelled_in_order(run, capsys):
    assert main([str(run), "--prompt", "alpha", "--prompt", "def", "--max_new_tokens", "4", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("--- prompt 1 of 2\nalpha")
    assert "\n--- prompt 2 of 2\ndef" in out


def test_the_printer_streams_the_first_text_and_keeps_the_second_for_its_turn(tokenizer_file):
    tokenizer, out = open_tokenizer(tokenizer_file), io.StringIO()
    first, second = tokenizer.encode("alpha12"), tokenizer.encode("\U0001f600 beta")
    printer = Printer(["a:", "b:"], tokenizer, out)
    printer.feed(1, second[0], is_last=False)
    assert out.getvalue() == "--- prompt 1 of 2\na:"
    for token in first[:-1]:
        printer.feed(0, token, is_last=False)
    assert out.getvalue() == "--- prompt 1 of 2\na:" + tokenizer.decode(first[:-1])
    printer.feed(0, first[-1], is_last=True)
    assert out.getvalue() == "--- prompt 1 of 2\na:alpha12\n--- prompt 2 of 2\nb:"
    for token in second[1:]:
        printer.feed(1, token, is_last=token == second[-1])
        assert "\ufffd" not in out.getvalue()
    assert out.getvalue().endswith("b:\U0001f600 beta\n")


def test_a_character_that_never_came_whole_is_marked(tokenizer_file):
    tokenizer, out = open_tokenizer(tokenizer_file), io.StringIO()
    printer = Printer([""], tokenizer, out)
    ids = tokenizer.encode("\U0001f600")
    assert len(ids) > 1
    printer.feed(0, ids[0], is_last=False)
    assert out.getvalue() == ""
    printer.feed(0, ids[1], is_last=True)
    assert out.getvalue() == "\ufffd\n"


def test_tokens_that_only_the_model_has_are_no_text(tokenizer_file):
    tokenizer, out = open_tokenizer(tokenizer_file), io.StringIO()
    printer = Printer(["a"], tokenizer, out)
    for token in (tokenizer.vocab_size, *tokenizer.encode("beta"), tokenizer.vocab_size + 9):
        printer.feed(0, token, is_last=token == tokenizer.vocab_size + 9)
    assert out.getvalue() == "abeta\n"


def bad_tokenizer(run, tmp_path):
    train_tokenizer(["other words than before " * 50], TokenizerOptions(vocab_size=290), tmp_path)
    return [str(run), "--tokenizer", str(tmp_path)]


def damaged(run, tmp_path):
    shutil.copytree(run / "checkpoints/step-00000001", tmp_path / "step-00000001")
    shard = next((tmp_path / "step-00000001").glob("*.distcp"))
    shard.write_bytes(bytes(byte ^ 0x55 for byte in shard.read_bytes()))
    return [str(tmp_path / "step-00000001")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda run, tmp_path: [str(tmp_path / "nowhere")], "no such directory: .*nowhere"),
        (lambda run, tmp_path: [str(tmp_path)], "has no committed checkpoint"),
        (lambda run, tmp_path: [str(run), "--max_new_tokens", "64"], "ask for at most 63 new tokens"),
        (lambda run, tmp_path: [str(run), "--temperature", "-1"], "temperature is -1"),
        (lambda run, tmp_path: [str(run), "--temprature", "1"], "did you mean --temperature"),
        (lambda run, tmp_path: [str(run), "--tokenizer", str(tmp_path / "none")], "none, which does not exist"),
        (bad_tokenizer, "was trained with"),
        (damaged, "its bytes have changed"),
    ],
)
def test_bad_input_is_one_line_with_the_value(arguments, message, run, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        main([*arguments(run, tmp_path), "--device", "cpu"])
    assert "\n" not in str(error.value)


def test_a_text_follows_the_schema_in_a_file(run, tmp_path, capsys):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}')
    command = [str(run), "--prompt", "alpha", "--json_schema", str(schema), "--max_new_tokens", "55", "--seed", "3"]
    assert main([*command, "--min_p", "0.1", "--repetition_penalty", "1.1"]) == 0
    text = capsys.readouterr().out.strip().removeprefix("alpha").lstrip()
    assert text.startswith("{")
    for content, message in (
        ("[1]", "is no JSON object"),
        ('{"type": "wizard"}', "Invalid type: wizard"),
        ("{", "cannot read"),
    ):
        schema.write_text(content)
        with pytest.raises(UserError, match=message):
            main(command)
