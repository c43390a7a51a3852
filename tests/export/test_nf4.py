"""A base in NF4 from import to export: its bytes are proved, and transformers and PEFT read what was trained on it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from genesis.base.errors import RunEndedError, UserError
from genesis.export import importing
from genesis.export.adapter import AdapterExportOptions, export_adapter
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import import_directory
from genesis.generate.load import load_decoder
from genesis.model.adapter import AdapterConfig
from genesis.model.nf4 import BYTES, dequantise
from genesis.model.recipe import dump_decoder_config
from genesis.train.adapter_base import find_adapter_base, read_start
from genesis_callbacks.checkpoint import read_manifest, read_tensors
from tests.huggingface.test_directory import write_llama
from tests.tiny_runs import save_adapted

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
IDS = torch.randint(90, (2, 30), generator=torch.Generator().manual_seed(3))
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "llama"
    write_llama(directory, **WIDE).float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "run"
    proof = import_directory(model, out, has_tokenizer=False, is_nf4=True)
    assert proof["weights"]["num_quantised"] > 0.5 * proof["weights"]["num_values"]
    assert proof["nf4"]["largest_difference"] > 0.0
    assert 0.05 < proof["nf4"]["largest_relative_error"]["error"] < 0.15
    return out


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = base / "checkpoints/step-00000000"
    decoder = load_decoder(checkpoint).decoder
    shape = dump_decoder_config(decoder.config)
    directory = tmp_path_factory.mktemp("tuned") / "checkpoints"
    return save_adapted(directory, checkpoint, decoder, {}, shape=shape, rank=4, alpha=8.0)


def test_an_import_writes_bytes_for_linear_layers_and_keeps_the_rest(base: Path) -> None:
    found = find_adapter_base(str(base), None)
    assert (found.format.dtype, found.format.is_nf4) == (torch.float32, True)
    records = read_manifest(found.path).tensors
    held = {name.rpartition(".")[2] for name, record in records.items() if record.torch_dtype == torch.uint8}
    assert held == set(BYTES)
    assert records["model.decoder.blocks.0.attention.query.packed"].shape == (64, 32)
    decoder = load_decoder(base).decoder
    with torch.no_grad():
        assert bool(decoder(IDS).isfinite().all())


def test_beside_bytes_a_model_in_bfloat16_keeps_its_type(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", **WIDE)
    import_directory(tmp_path / "llama", tmp_path / "run", has_tokenizer=False, is_nf4=True, compares_models=False)
    records = read_manifest(tmp_path / "run/checkpoints/step-00000000").tensors
    assert {record.dtype for record in records.values()} == {"uint8", "bfloat16"}


def test_a_byte_that_is_not_that_of_the_model_fails_the_proof(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = importing.quantise

    def spoil(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        held = honest(weight)
        held["scales"][0, 0] ^= 1
        return held

    monkeypatch.setattr(importing, "quantise", spoil)
    with pytest.raises(RunEndedError, match=r"scales of model\.decoder\.blocks\.\d\..* is not what its weights"):
        import_directory(model, tmp_path / "run", has_tokenizer=False, is_nf4=True, compares_models=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_merged_weights_are_the_dequantised_ones_with_the_adapters(tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    proof = export_checkpoints([tuned], out, ExportOptions(is_merged=True))
    assert proof["adapters"]["largest_difference"] <= proof["adapters"]["tolerance"]
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours = load_decoder(tuned, dtype=torch.float32).decoder
    with torch.no_grad():
        logits = ours(IDS)
        torch.testing.assert_close(theirs(IDS).logits, logits, rtol=0.0, atol=1e-4 * float(logits.abs().max()))
    assert "4 bits" in (out / "README.md").read_text()


@pytest.mark.slow
def test_peft_has_the_logits_of_adapters_beside_the_exported_base(base: Path, tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    checkpoint = base / "checkpoints/step-00000000"
    export_checkpoints([checkpoint], out, ExportOptions())
    held = read_tensors(checkpoint, prefix="model.decoder.blocks.0.attention.query.")
    expected = dequantise({name.rpartition(".")[2]: tensor for name, tensor in held.items()}, torch.float32)
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(load_decoder(out).decoder.blocks[0].attention.query.weight, expected)
    assert theirs.config.hidden_size == 64
    proof = export_adapter(tuned, tmp_path / "peft", AdapterExportOptions(base_name=str(out)))
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    assert "4 bits" in (tmp_path / "peft/README.md").read_text()


@pytest.mark.slow
def test_experts_in_4_bits_are_proved_and_their_adapters_are_merged(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 64}
    torch.manual_seed(0)
    theirs: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**sizes, **heads, **experts))
    theirs.save_pretrained(tmp_path / "theirs")
    proof = import_directory(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False, is_nf4=True)
    assert proof["weights"]["num_quantised"] > 2 * 4 * 3 * 64 * 64, "experts and linear layers"
    checkpoint = tmp_path / "run/checkpoints/step-00000000"
    records = read_manifest(checkpoint).tensors
    assert records["model.decoder.blocks.0.feed_forward.experts.down.packed"].shape == (4, 64, 32)
    assert records["model.decoder.blocks.0.feed_forward.router.weight"].torch_dtype == torch.float32
    decoder = load_decoder(checkpoint).decoder
    adapter = {"rank": 4, "alpha": 8.0, "include_experts": ["*"]}
    shape = dict.fromkeys(("num_heads", "num_kv_heads", "ffn_dim")) | dump_decoder_config(decoder.config)
    tuned = save_adapted(tmp_path / "tuned/checkpoints", checkpoint, decoder, {}, shape=shape, **adapter)
    merged = export_checkpoints([tuned], tmp_path / "merged", ExportOptions(is_merged=True))
    assert merged["adapters"]["largest_difference"] <= merged["adapters"]["tolerance"]
    export_checkpoints([checkpoint], tmp_path / "base", ExportOptions())
    peft = export_adapter(tuned, tmp_path / "peft", AdapterExportOptions(base_name=str(tmp_path / "base")))
    assert peft["logits"]["largest_change_by_the_adapters"] > 100 * peft["logits"]["tolerance"]


@pytest.mark.slow
def test_adapters_of_one_format_of_a_base_are_refused_beside_another(
    model: Path, base: Path, tuned: Path, tmp_path: Path
) -> None:
    proof = export_adapter(tuned, tmp_path / "peft", AdapterExportOptions(compares_models=False))
    assert json.loads((tmp_path / "peft/proof.json").read_text())["base"] == proof["base"]
    import_directory(model, tmp_path / "plain", has_tokenizer=False, compares_models=False)
    config = AdapterConfig(rank=4, alpha=8.0, start=str(tmp_path / "peft"))
    own = find_adapter_base(str(base), None)
    assert read_start(config, load_decoder(base).decoder.config, own)
    other = find_adapter_base(str(tmp_path / "plain"), None)
    with pytest.raises(UserError, match=r"beside a base with .* \(in NF4\), .*: give the base that they belong to"):
        read_start(config, load_decoder(base).decoder.config, other)
    with pytest.raises(UserError, match=r"belong to the base \S+ in NF4 with manifest .*: give that base"):
        find_adapter_base(str(tmp_path / "plain"), tuned)


def test_a_width_that_has_no_blocks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", hidden_size=32, intermediate_size=128)
    with pytest.raises(UserError, match=r"NF4 takes widths that are multiples of 64, and .* reads 32: import it with"):
        import_directory(tmp_path / "llama", tmp_path / "run", has_tokenizer=False, is_nf4=True)
    assert not (tmp_path / "run").exists()
