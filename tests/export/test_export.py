"""What is exported is what was saved, transformers reads it so, and nothing unproved is left."""

import hashlib
import json
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from genesis.base.errors import RunEndedError, UserError
from genesis.export import export as export_module
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.proof import run_proof
from genesis.export.staging import staged
from genesis.export.tensors import Source, iterate_blocks, plan_files, write_weights
from genesis.generate.load import load_decoder
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.huggingface.directory import INDEX_NAME
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.weights import iterate_tensors, read_file_names
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from genesis_callbacks.checkpoint import CorruptCheckpointError, read_manifest, read_tensors
from genesis_callbacks.testing import run_ranks
from tests.planted import plant_pickles
from tests.tiny_runs import build_decoder, save


def hash_files(directory: Path) -> dict[str, str]:
    """Returns the hash of every file but the card, which names the checkpoint."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.name != "README.md"
    }


def write_alone(checkpoints: list[Path], directory: Path, dtype: torch.dtype, max_file_bytes: int) -> Path:
    """Writes the weights without the proof."""
    sources = [Source(path, read_manifest(path)) for path in checkpoints]
    names = {name: LLAMA.their_name(name.removeprefix("model.decoder.")) for name in sources[0].manifest.tensors}
    directory.mkdir()
    write_weights(directory, plan_files(names, sources[0].manifest, dtype, max_file_bytes), sources, dtype)
    return directory


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    return dict(iterate_tensors(directory, read_file_names(directory)))


# ---- what comes out


@pytest.mark.slow
@pytest.mark.repeat  # an imported checkpoint holds the bits that were exported
def test_export_import_export_gives_the_same_files(exported: Path, exported_again: Path) -> None:
    assert hash_files(exported_again) == hash_files(exported)
    assert len(list(exported.glob("model-*.safetensors"))) > 1


def test_an_imported_checkpoint_holds_the_bits_that_were_exported(checkpoint: Path, imported: Path) -> None:
    before, after = read_tensors(checkpoint), read_tensors(imported / "checkpoints/step-00000000")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_greedy_text_equals_that_of_transformers_for_200_tokens(run: Path, exported: Path) -> None:
    decoder, tokenizer, *_ = load_decoder(run)
    model = AutoModelForCausalLM.from_pretrained(exported)
    fast = AutoTokenizer.from_pretrained(exported)
    greedy = GenerationConfig(max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generation_config.eos_token_id = None  # which fills what is None in another one
    prompts = [
        [tokenizer.bos_id, *tokenizer.encode(text)] for text in ("class alpha", "\u65e5\u672c \u00e9t\u00e9", "")
    ]
    options = GenerateOptions(200, SamplingOptions(temperature=0.0))
    ours: list[list[int]] = [[] for _ in prompts]
    for token in generate(decoder, prompts, options, frozenset()):
        ours[token.prompt].append(token.id)
    for text, prompt, wanted in zip(("class alpha", "\u65e5\u672c \u00e9t\u00e9", ""), prompts, ours, strict=True):
        encoded = fast(text, return_tensors="pt")
        assert encoded.input_ids.tolist() == [prompt]
        theirs = model.generate(encoded.input_ids, attention_mask=encoded.attention_mask, generation_config=greedy)
        assert theirs[0, len(prompt) :].tolist() == wanted
    assert len({tuple(text) for text in ours}) == len(prompts)
    assert min(len(set(text)) for text in ours) > 2


def test_the_proof_says_what_was_compared(exported: Path) -> None:
    proof = json.loads((exported / "proof.json").read_bytes())
    assert proof["weights"]["num_values"] == sum(tensor.numel() for tensor in load_all(exported).values())
    assert proof["tokenizer"]["num_texts"]["bytes"] == 256
    assert proof["tokenizer"]["num_texts"]["scripts"] >= 10
    assert 0.0 <= proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    assert proof["generation"]["num_equal"] == proof["generation"]["num_tokens"] > 0
    assert "transformers" in proof["versions"]


def test_the_card_names_checkpoint_manifest_clocks_and_recipe(exported: Path, checkpoint: Path) -> None:
    card = (exported / "README.md").read_text()
    assert (checkpoint / "COMMITTED").read_text() in card
    for words in ("step-00000003", "| tokens_seen | 300 |", "num_kv_heads: 2", "tokenizer_hash", "library_name"):
        assert words in card


@pytest.mark.slow
def test_two_ranks_and_one_export_to_the_same_bytes(tmp_path: Path) -> None:
    alone = save(tmp_path / "alone", 1, build_decoder(7), {})
    run_ranks(save_on_rank, 2, str(tmp_path / "sharded"))
    sharded = tmp_path / "sharded/step-00000001"
    assert read_manifest(sharded).world_size == 2
    assert len(read_manifest(sharded).tensors["model.decoder.embedding.weight"].chunks) == 2
    hashes = [
        hash_files(write_alone([path], tmp_path / path.parent.name / "out", torch.bfloat16, 60_000))
        for path in (alone, sharded)
    ]
    assert hashes[0] == hashes[1]


def save_on_rank(directory: str) -> None:
    save(Path(directory), 1, build_decoder(7), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_average_is_the_mean_in_float64_cast_once(run: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoints = [run / f"checkpoints/step-{step:08d}" for step in (1, 2, 3)]
    states = [read_tensors(path) for path in checkpoints]
    found = load_all(write_alone(checkpoints, tmp_path / "out", dtype, 1 << 30))
    for name in states[0]:
        mean = (states[0][name].double() + states[1][name].double() + states[2][name].double()) / 3
        assert torch.equal(found[LLAMA.their_name(name.removeprefix("model.decoder."))], mean.to(dtype))


def test_blocks_of_rows_are_the_whole_tensor(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.decoder.embedding.weight"
    monkeypatch.setattr("genesis.export.tensors._BLOCK_BYTES", 3000)
    blocks = list(iterate_blocks([Source(checkpoint, read_manifest(checkpoint))], name, torch.float32))
    assert len(blocks) > 50
    assert torch.equal(torch.cat(blocks), read_tensors(checkpoint, [name])[name])


def test_files_are_filled_in_order_and_no_tensor_is_cut(checkpoint: Path, exported: Path) -> None:
    sizes = {path.name: sum(t.nbytes for t in load_file(path).values()) for path in exported.glob("*.safetensors")}
    assert all(size <= 60_000 or len(load_file(exported / name)) == 1 for name, size in sizes.items())
    index = json.loads((exported / INDEX_NAME).read_bytes())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"].values()) == sizes.keys()


def test_plain_safetensors_have_our_names_and_shape(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoints([checkpoint], tmp_path / "out", ExportOptions(layout="safetensors"))
    found = load_file(tmp_path / "out/model.safetensors")
    wanted = read_tensors(checkpoint)
    assert {f"model.decoder.{name}" for name in found} == wanted.keys()
    assert all(torch.equal(tensor, wanted[f"model.decoder.{name}"]) for name, tensor in found.items())
    assert json.loads((tmp_path / "out/decoder.json").read_bytes())["num_kv_heads"] == 2
    loaded = load_decoder(tmp_path / "out").decoder
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in found.items())


# ---- whose tokenizer


@pytest.fixture
def other_tokenizer(tmp_path: Path) -> Path:
    """Fits into the vocabulary, and its bos and eos are others."""
    text = "".join(f"{n} other words, numbered {n * n}\n" for n in range(200))
    return train_tokenizer([text], TokenizerOptions(vocab_size=320), tmp_path / "other")


def test_a_tokenizer_is_refused_where_the_checkpoint_has_no_hash_of_one(tmp_path: Path, other_tokenizer: Path) -> None:
    path = save(tmp_path / "run", 1, build_decoder(7), {})
    with pytest.raises(UserError, match=r"has no tokenizer hash.*--allow_unproved_tokenizer"):
        export_checkpoints([path], tmp_path / "out", ExportOptions(tokenizer=other_tokenizer))
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_than_the_runs_is_refused_or_reported_as_unproved(
    checkpoint: Path, tmp_path: Path, other_tokenizer: Path
) -> None:
    with pytest.raises(UserError, match=r"was trained with"):
        export_checkpoints([checkpoint], tmp_path / "out", ExportOptions(tokenizer=other_tokenizer))
    options = ExportOptions(tokenizer=other_tokenizer, may_be_unproved=True, layout="safetensors")
    proof = export_checkpoints([checkpoint], tmp_path / "out", options)
    written = json.loads((tmp_path / "out/proof.json").read_bytes())
    assert proof["tokenizer_origin"] == written["tokenizer_origin"] == "unproved"
    assert "**The tokenizer is unproved**" in (tmp_path / "out/README.md").read_text()


def test_the_runs_own_tokenizer_is_proved_whatever_is_allowed(exported: Path, run: Path, tmp_path: Path) -> None:
    assert json.loads((exported / "proof.json").read_bytes())["tokenizer_origin"] == "run"
    assert "unproved" not in (exported / "README.md").read_text()
    options = ExportOptions(tokenizer=run, may_be_unproved=True, layout="safetensors")
    proof = export_checkpoints([run / "checkpoints/step-00000003"], tmp_path / "out", options)
    assert proof["tokenizer_origin"] == "run"
    with pytest.raises(UserError, match="needs --tokenizer"):
        ExportOptions(may_be_unproved=True)


# ---- memory


@pytest.mark.slow
def test_memory_stays_far_below_the_largest_tensor(tmp_path: Path) -> None:
    shape = {"vocab_size": 2_000_000, "dim": 32, "num_layers": 1, "has_tied_embeddings": True}
    decoder = build_decoder(0, **shape)
    tensor_bytes = decoder.output_weight.nbytes
    path = save(tmp_path, 1, decoder, {}, **shape)
    del decoder
    code = """
import re, sys, torch
from pathlib import Path
from tests.export.test_export import write_alone
def peak():  # not ru_maxrss: a process inherits its parent's
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = peak()
write_alone([Path(sys.argv[1])] * 2, Path(sys.argv[2]), torch.bfloat16, 1 << 40)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert tensor_bytes == 256_000_000
    assert 0 < int(done.stdout) < tensor_bytes * 0.9


# ---- what goes wrong


def test_a_weight_that_is_not_the_checkpoints_fails_the_proof(checkpoint: Path, exported: Path) -> None:
    with pytest.raises(RunEndedError, match=r"the proof failed.*values of .* differ from the checkpoint's"):
        run_proof(exported, [checkpoint.with_name("step-00000002")], exported / "tokenizer.model", "huggingface")


def turn_faster(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_bytes())
    config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 100.0
    (directory / "config.json").write_text(json.dumps(config))


def merge_backwards(directory: Path) -> None:
    fast = json.loads((directory / "tokenizer.json").read_bytes())
    fast["model"]["merges"].reverse()
    (directory / "tokenizer.json").write_text(json.dumps(fast))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (turn_faster, "logits differ by .*, more than the rounding tolerance"),
        pytest.param(merge_backwards, "no exact fast form", marks=pytest.mark.slow),
    ],
)
def test_a_model_or_a_tokenizer_that_differs_fails_the_proof(
    change: Callable[[Path], None], message: str, checkpoint: Path, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "other")
    change(tmp_path / "other")
    with pytest.raises(RunEndedError, match=message):
        run_proof(tmp_path / "other", [checkpoint], exported / "tokenizer.model", "huggingface")


def test_a_failed_proof_leaves_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_flipped(directory: Path, *rest: object) -> None:
        write_weights(directory, *rest)  # type: ignore[arg-type]
        path = directory / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(export_module, "write_weights", write_flipped)
    with pytest.raises(RunEndedError, match="the proof failed") as error:
        export_checkpoints([checkpoint], tmp_path / "out", ExportOptions(layout="safetensors"))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_kill_leaves_nothing_that_looks_finished(checkpoint: Path, tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from genesis.export import export
export.run_proof = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
export.export_checkpoints([Path(sys.argv[1])], Path(sys.argv[2]), export.ExportOptions())
"""
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint), str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.staging-")
    assert not (left / "proof.json").exists()


def test_the_next_attempt_deletes_what_a_killed_one_left_and_nothing_of_one_that_runs(tmp_path: Path) -> None:
    out, left = tmp_path / "out", tmp_path / "out.staging-0123abcd"
    (left / "weights").mkdir(parents=True)
    of_another = tmp_path / "out2.staging-0123abcd"
    of_another.mkdir()
    slow = staged(out, 1)
    first = slow.__enter__()
    assert not left.exists()
    with staged(out, 1) as second:
        assert first.is_dir()
        (second / "whole").touch()
    with pytest.raises(UserError, match="already exists"):
        slow.__exit__(None, None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", of_another.name]
    assert (out / "whole").exists()


def test_nothing_is_written_into_a_checkpoint(checkpoint: Path) -> None:
    out = checkpoint / "deep" / "out"
    with pytest.raises(UserError, match=f"lies in the checkpoint {checkpoint}, which is removed with all"):
        export_checkpoints([checkpoint], out, ExportOptions())
    assert not out.parent.exists()


def test_bytes_that_change_after_the_verification_are_found_while_reading(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / checkpoint.name
    other.mkdir()
    for path in checkpoint.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    record = read_manifest(other).tensors["model.decoder.norm.weight"].chunks[0]
    content = bytearray((other / record.file).read_bytes())
    content[record.data_offset] ^= 1
    (other / record.file).write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"model\.decoder\.norm\.weight"):
        write_alone([other], tmp_path / "out", torch.float32, 1 << 30)
    with pytest.raises(CorruptCheckpointError, match="bytes have changed"):
        export_checkpoints([other], tmp_path / "whole", ExportOptions())


def test_a_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    decoder = build_decoder(0)
    with torch.no_grad():
        decoder.norm.weight[3] = 1e6
    path = save(tmp_path, 1, decoder, {})
    with pytest.raises(UserError, match=r"norm\.weight has values beyond float16: .*bfloat16"):
        write_alone([path], tmp_path / "out", torch.float16, 1 << 30)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs .* bytes, but .* free"), staged(tmp_path / "out", 1 << 60):
        raise AssertionError("nothing may be written")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_runs_full_while_it_is_written_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    unshare = [shutil.which("unshare") or "unshare", "-rm", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    program = (
        "import pathlib, sys; from genesis.export.staging import staged; out = pathlib.Path(sys.argv[1])\n"
        "with staged(out, 1000) as staging: (staging / 'weights').write_bytes(bytes(2 << 20))"
    )
    command = f'{mount} && "$0" "$@"; ls -A {tmp_path}'
    asked = [*unshare, command, sys.executable, "-c", program, str(tmp_path / "out")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=False)
    assert f"UserError: the disk of {tmp_path} ran full while" in done.stderr
    assert done.stdout == ""


def test_what_appears_at_out_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already exists"), staged(tmp_path / "out", 0):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_checkpoints_of_other_shapes_are_not_averaged(checkpoint: Path, tmp_path: Path) -> None:
    other = save(tmp_path, 1, build_decoder(0, num_layers=1), read_manifest(checkpoint).identity, num_layers=1)
    with pytest.raises(UserError, match="different shapes or tokenizers"):
        export_checkpoints([other, checkpoint], tmp_path / "out", ExportOptions())


@pytest.mark.slow
def test_a_strangers_checkpoint_runs_nothing_of_it(checkpoint: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    stranger, marker = tmp_path / "checkpoints" / checkpoint.name, tmp_path / "it-ran"
    shutil.copytree(checkpoint, stranger)
    plant_pickles(stranger, marker)
    export_checkpoints([stranger], tmp_path / "out", ExportOptions(tokenizer=tokenizer_file, may_be_unproved=True))
    assert (tmp_path / "out" / "proof.json").exists()
    assert not marker.exists()
    pickle.loads((stranger / ".metadata").read_bytes())  # the payload does work, where somebody unpickles
    assert marker.exists()
