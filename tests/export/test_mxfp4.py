"""A checkpoint in MXFP4, as GPT-OSS's are published, is imported with its proof: it is the dequantised model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from genesis.base.errors import UserError
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import import_directory
from genesis.generate.load import load_decoder
from genesis.huggingface.directory import CONFIG_NAME, WEIGHTS_NAME
from genesis.huggingface.gpt_oss import GPT_OSS
from genesis.huggingface.shape import read_shape
from tests.train.test_gpt_oss import SHAPE, build_theirs


def write_both(directory: Path) -> None:
    """Writes a model twice: with its experts in MXFP4, and with what transformers makes of them."""
    theirs = build_theirs(intermediate_size=32).to(torch.bfloat16)
    theirs.save_pretrained(directory / "mxfp4")
    path = directory / "mxfp4" / WEIGHTS_NAME
    generator = torch.Generator().manual_seed(0)
    packed, plain = load_file(path), load_file(path)
    for name in [name for name in packed if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(packed, path, metadata={"format": "pt"})
    (directory / "plain").mkdir()
    save_file(plain, directory / "plain" / WEIGHTS_NAME, metadata={"format": "pt"})
    content = json.loads((directory / "mxfp4" / CONFIG_NAME).read_text())
    (directory / "plain" / CONFIG_NAME).write_text(json.dumps(content))
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "mxfp4" / CONFIG_NAME).write_text(json.dumps(content))


@pytest.mark.slow
def test_a_model_in_mxfp4_is_the_dequantised_one(tmp_path: Path) -> None:
    write_both(tmp_path)
    proof = import_directory(tmp_path / "mxfp4", tmp_path / "run", has_tokenizer=False)
    assert proof["is_dequantised"]  # which makes the command print a line
    assert proof["weights"]["num_different"] == 0
    assert proof["logits"]["largest_difference"] < 1e-4
    ours = load_decoder(tmp_path / "run").decoder
    wanted = GPT_OSS.to_ours(load_file(tmp_path / "plain" / WEIGHTS_NAME), ours.config)
    state = ours.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name].float(), tensor.float()) for name, tensor in wanted.items())
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("*/")
    export_checkpoints([checkpoint], tmp_path / "out", ExportOptions(dtype="bfloat16"))
    exported, plain = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("out", "plain"))
    assert exported.keys() == plain.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in plain.items())


def test_another_quantisation_is_refused(tmp_path: Path) -> None:
    content = {**SHAPE, "model_type": "gpt_oss", "quantization_config": {"quant_method": "awq"}}
    (tmp_path / CONFIG_NAME).write_text(json.dumps(content))
    with pytest.raises(UserError, match="quantised weights are not supported"):
        read_shape(tmp_path)
