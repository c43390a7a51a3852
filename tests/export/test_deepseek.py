"""What DeepSeek's own files have beside others: weights in FP8, layers behind the last one; and packed training."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from genesis.base.errors import UserError
from genesis.cli.main import main
from genesis.export import dequantise as dequantise_module
from genesis.export.dequantise import without_blocks
from genesis.export.importing import import_directory
from genesis.huggingface.directory import CONFIG_NAME, INDEX_NAME
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_weights
from genesis.model.decoder import Decoder
from genesis.model.loss import sum_cross_entropy
from tests.export.test_families import build_theirs

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LENGTHS = (40, 7, 33)


def dequantise(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies each value by the scale of its block, one after the other."""
    wanted = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row in range(weight.shape[0]):
        for column in range(0, weight.shape[1], 128):
            piece = weight[row, column : column + 128].float() * scales[row // 128, column // 128]
            wanted[row, column : column + 128] = piece.to(torch.bfloat16)
    return wanted


def write_blocks(directory: Path, name: str = "deepseek v3, as moonlight") -> dict[str, torch.Tensor]:
    """Writes a model as DeepSeek publishes it, in two files, and returns its weights in bfloat16."""
    build_theirs(name).to(torch.bfloat16).save_pretrained(directory)
    state = load_file(directory / "model.safetensors")
    stored, wanted = {}, {}
    for key, tensor in state.items():
        wanted[key] = tensor
        stored[key] = tensor
        if tensor.ndim == 2 and "layers" in key and ".gate.weight" not in key:
            scales = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) * 0.01 + 0.01
            stored[key] = (tensor.float() / 0.02).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scales
            wanted[key] = dequantise(stored[key], scales)
    (directory / "model.safetensors").unlink()
    names = sorted(stored)
    placed = {key: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, key in enumerate(names)}
    for file in set(placed.values()):
        save_file({key: stored[key] for key in names if placed[key] == file}, directory / file)
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    content = json.loads((directory / CONFIG_NAME).read_text())
    (directory / CONFIG_NAME).write_text(json.dumps(content | {"quantization_config": FP8}))
    return wanted


def test_blocks_in_fp8_become_bfloat16_rounded_once_and_the_copy_is_removed(tmp_path: Path) -> None:
    wanted = write_blocks(tmp_path / "model")
    family, config = read_shape(tmp_path / "model")
    with pytest.raises(UserError, match="weights are in FP8 with scales; `genesis import` makes them bfloat16"):
        read_weights(tmp_path / "model", config, family)
    with without_blocks(tmp_path / "model", tmp_path / "run") as plain:
        assert read_shape(plain) == (family, config)
        found = read_weights(plain, config, family)
        expected = family.to_ours(wanted, config)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_weight_of_several_pieces_is_dequantised_block_by_block(tmp_path: Path) -> None:
    weight = torch.randn(1300, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(11, 2)
    save_file({"a.weight": weight, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"quantization_config": FP8}))
    with without_blocks(tmp_path, tmp_path / "out") as plain:
        found = load_file(plain / "model.safetensors")
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], dequantise(weight, scales))


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "a.weight is in FP8, and a.weight_scale_inv is missing"),
        ({"a.weight_scale_inv": torch.ones(2, 1)}, r"a.weight_scale_inv is \[2, 1\], but a.weight has \[1, 1\] blocks"),
    ],
)
def test_a_weight_without_its_scales_is_refused(tmp_path: Path, scales: dict[str, torch.Tensor], message: str) -> None:
    save_file({"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), **scales}, tmp_path / "model.safetensors")
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"quantization_config": FP8}))
    with pytest.raises(UserError, match=message), without_blocks(tmp_path, tmp_path / "out"):
        pass
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"hidden_act": "gelu"}, "{model}/config.json: hidden_act is 'gelu'"), ({}, "{model}")],
    ids=["shape", "tokenizer"],
)
def test_what_is_refused_is_refused_before_weights_are_copied_and_by_the_name_of_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    write_blocks(tmp_path / "model")
    content = json.loads((tmp_path / "model" / CONFIG_NAME).read_text())
    (tmp_path / "model" / CONFIG_NAME).write_text(json.dumps(content | changes))
    monkeypatch.setattr(dequantise_module, "_copy", lambda *_: pytest.fail("the weights were copied"))
    with pytest.raises(UserError, match=re.escape(message.format(model=tmp_path / "model"))):
        import_directory(tmp_path / "model", tmp_path / "run", has_tokenizer=True)


@pytest.mark.slow
def test_an_import_dequantises_and_reports_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_blocks(tmp_path / "model")
    index = json.loads((tmp_path / "model" / INDEX_NAME).read_text())
    save_file({"model.layers.3.eh_proj.weight": torch.ones(32, 64)}, tmp_path / "model/mtp.safetensors")
    index["weight_map"]["model.layers.3.eh_proj.weight"] = "mtp.safetensors"
    (tmp_path / "model" / INDEX_NAME).write_text(json.dumps(index))
    content = json.loads((tmp_path / "model" / CONFIG_NAME).read_text())
    (tmp_path / "model" / CONFIG_NAME).write_text(json.dumps(content | {"num_nextn_predict_layers": 1}))
    status = main(["import", str(tmp_path / "model"), str(tmp_path / "run"), "--no_tokenizer", "--dtype", "stored"])
    printed, errors = capsys.readouterr()
    assert status == 0, errors
    assert "left out: 1 tensor whose names begin with 'model.layers.3.': layers that predict further tokens" in printed
    assert "dequantised: weights in FP8 or MXFP4 became bfloat16" in printed
    proof = json.loads((tmp_path / "run/proof.json").read_text())
    assert proof["left_out"] == {"model.layers.3.": 1}
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek v3", "deepseek v3, as moonlight", "deepseek v2", "deepseek v2 lite"])
def test_three_steps_on_packed_documents_are_those_of_transformers_on_each_alone(name: str, tmp_path: Path) -> None:
    theirs: Any = build_theirs(name)
    theirs.save_pretrained(tmp_path)
    family, config = read_shape(tmp_path)
    ours = Decoder(config)
    ours.load_state_dict(read_weights(tmp_path, config, family))
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(torch.int32)
    rates = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6}
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], **rates) for one in (ours, theirs)
    ]
    for step in range(3):
        ids = torch.randint(90, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(step))
        labels = torch.full_like(ids, -100)
        rows = torch.split(ids[0], LENGTHS)
        for place, row in zip(torch.tensor((0, *LENGTHS[:-1])).cumsum(0).tolist(), rows, strict=True):
            labels[0, place : place + len(row) - 1] = row[1:]
        found = ours(
            ids,
            document_ids=documents[None],
            head=lambda hidden, weight, labels=labels: sum_cross_entropy(hidden, weight, labels=labels),
        )
        alone = [cross_entropy(theirs(input_ids=row[None]).logits[0, :-1], row[1:], reduction="sum") for row in rows]
        wanted = torch.stack(alone).sum()
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
        for optimizer, loss in zip(optimizers, (found, wanted), strict=True):
            optimizer.zero_grad()
            (loss / sum(LENGTHS)).backward()
            optimizer.step()
    state = family.to_ours(theirs.state_dict(), config)
    for key, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, state[key], rtol=1e-3, atol=2e-5, msg=key)
