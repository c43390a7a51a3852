"""Exports of adapters beside imported mixtures of each family: PEFT loads them beside transformers' own class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from genesis.base.errors import UserError
from genesis.export.adapter import AdapterExportOptions, export_adapter
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import import_directory
from genesis.generate.load import load_decoder
from genesis.model.adapter import AdapterConfig
from genesis.model.recipe import dump_decoder_config
from genesis.train.adapter_base import find_adapter_base, read_start
from genesis_callbacks.checkpoint import list_committed, read_manifest
from tests.huggingface.test_peft_experts import FAMILIES, IDS
from tests.huggingface.test_peft_experts import SHAPE as THEIR_SHAPE
from tests.tiny_runs import SHAPE, save_adapted

pytestmark = [
    pytest.mark.slow,
    # PEFT asks transformers for a property that is deprecated.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
ADAPTER: dict[str, Any] = {"rank": 3, "alpha": 6.0, "include_experts": ["*"]}
EXCLUDED = {key: ["*.shared.*"] for key in ("dots1", "glm4_moe", "deepseek_v2", "deepseek_v3")}
"""Layers that PEFT takes for experts: exports with adapters on them are refused."""


def adapt_import(tmp_path: Path, model_type: str, **adapter: Any) -> tuple[Path, Path, Path]:
    """Returns transformers' model, its import, and a checkpoint of adapters beside the import."""
    torch.manual_seed(0)
    shape: Any = AutoConfig.for_model(model_type, **(THEIR_SHAPE | FAMILIES[model_type]))
    build: Any = AutoModelForCausalLM.from_config
    build(shape).save_pretrained(tmp_path / "theirs")
    import_directory(tmp_path / "theirs", tmp_path / "base", has_tokenizer=False, compares_models=False)
    ((base, _),) = list_committed(tmp_path / "base/checkpoints")
    decoder = load_decoder(base).decoder
    described = {**dict.fromkeys(SHAPE, None), **dump_decoder_config(decoder.config)}
    directory = tmp_path / "tuned/checkpoints"
    return tmp_path / "theirs", base, save_adapted(directory, base, decoder, {}, shape=described, **ADAPTER, **adapter)


def read_logits(directory: Path, adapter: Path) -> torch.Tensor:
    """Returns the logits of transformers' model in a directory with PEFT's adapters."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        return torch.as_tensor(adapted(input_ids=IDS).logits)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_of_experts_are_exported_for_the_class_of_each_family(model_type: str, tmp_path: Path) -> None:
    excluded = EXCLUDED.get(model_type, [])
    theirs, base, checkpoint = adapt_import(tmp_path, model_type, exclude=excluded)
    assert read_manifest(base).identity["imported_as"] == model_type
    proof = export_adapter(checkpoint, tmp_path / "adapter", AdapterExportOptions())
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    assert proof["logits"]["largest_change_by_the_adapters"] > 100 * proof["logits"]["tolerance"]
    held = load_decoder(checkpoint).decoder
    with torch.no_grad():
        wanted = held(IDS)
    tolerance = 1e-4 * float(wanted.abs().max())
    if model_type != "qwen3_next":
        torch.testing.assert_close(read_logits(theirs, tmp_path / "adapter"), wanted, rtol=0, atol=tolerance)
    export_checkpoints([base], tmp_path / "exported", ExportOptions())
    found = read_logits(tmp_path / "exported", tmp_path / "adapter")
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    export_checkpoints([checkpoint], tmp_path / "merged", ExportOptions(is_merged=True))
    with torch.no_grad():
        merged = load_decoder(tmp_path / "merged").decoder(IDS)
    torch.testing.assert_close(merged, wanted, rtol=0, atol=tolerance)
    options = {**ADAPTER, "exclude": excluded, "start": str(tmp_path / "adapter")}
    started = read_start(AdapterConfig(**options), held.config, find_adapter_base(str(base), None))
    assert any("experts" in name for name in started)
    assert all(torch.equal(tensor, held.get_parameter(name)) for name, tensor in started.items())


def test_adapters_beside_an_imported_qwen3_next_name_the_only_base_that_they_fit(tmp_path: Path) -> None:
    """PEFT loads them beside Qwen3-Next's own files without a warning, and leaves out those of projections."""
    theirs, base, checkpoint = adapt_import(tmp_path, "qwen3_next", exclude=["*.shared.*"])
    with pytest.raises(UserError, match=r"a model of type qwen3_next, and the adapters fit one of .* qwen3_5_moe_text"):
        export_adapter(checkpoint, tmp_path / "adapter", AdapterExportOptions(base_name=str(theirs)))
    export_checkpoints([base], tmp_path / "exported", ExportOptions())
    proof = export_adapter(checkpoint, tmp_path / "adapter", AdapterExportOptions(base_name=str(tmp_path / "exported")))
    assert proof["base"] == {"model_type": "qwen3_5_moe_text", "imported_as": "qwen3_next"}
    card = (tmp_path / "adapter/README.md").read_text()
    assert "beside a frozen base of type `qwen3_5_moe_text`" in card
    assert "not the `qwen3_next` model that the base was\nimported from" in card
    with torch.no_grad():
        wanted = load_decoder(checkpoint).decoder(IDS)
    largest = float(wanted.abs().max())
    found = read_logits(tmp_path / "exported", tmp_path / "adapter")
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * largest)
    assert float((read_logits(theirs, tmp_path / "adapter") - wanted).abs().max()) > 1e-3 * largest
