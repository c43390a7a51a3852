"""On a real GPU: NF4 has the bits of the CPU, models of transformers keep documents apart, and both repeat."""

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from genesis.model.adapter import BASE_FORMATS, AdapterConfig
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.nf4 import BYTES, Nf4Linear, dequantise, quantise
from genesis.operations.doctor.fits import Size, build_trainer, random_windows
from genesis.operations.doctor.probe import Task
from genesis.optim import AdamW
from genesis.strategies import Replicated
from genesis.strategies.recompute import ActivationCheckpointing
from genesis.train.module import GenesisModule
from tests.model.foreign.models import configure, describe, make_theirs, wrap
from tests.model.test_nf4 import quantised

# Lightning warns that there is nothing to validate, and a compiler of things that are not ours.
pytestmark = [pytest.mark.cuda, pytest.mark.process, pytest.mark.filterwarnings("ignore")]
LORA = AdapterConfig(rank=8, alpha=16.0)
SHAPE = DecoderConfig(vocab_size=512, dim=256, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=512, max_seq_len=1024)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 4096}


@pytest.fixture(autouse=True)
def not_the_last_test() -> None:
    torch._dynamo.reset()


class _Fill(pl.Callback):
    """Gives a module its weights, as a restore does."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GenesisModule)
        assert pl_module.decoder is not None
        pl_module.decoder.load_state_dict(self._state, strict=False)


def fit(
    kind: str,
    directory: Path,
    module: GenesisModule,
    state: Mapping[str, Tensor],
    *,
    is_compiled: bool = False,
    checkpointing: ActivationCheckpointing = "none",
) -> dict[str, Tensor]:
    """Returns the trained weights after six steps."""
    torch._dynamo.reset()
    module.is_restored = True
    strategy = Replicated(activation_checkpointing=checkpointing, compile_blocks=is_compiled)
    task = Task(kind, "tiny", str(directory))
    trainer = build_trainer(task, strategy, 6, [_Fill(state)], deterministic=True)
    config = module.decoder_config
    trainer.fit(module, datamodule=random_windows(Size(config, 1)))
    return {name: one.detach().cpu().clone() for name, one in module.named_parameters() if one.requires_grad}


# ---- NF4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_in_nf4_has_the_bits_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    held = quantise(torch.randn(384, 1024, generator=torch.Generator().manual_seed(0)) * 0.02)
    there = {name: tensor.to(kind) for name, tensor in held.items()}
    assert torch.equal(dequantise(there, dtype).cpu(), dequantise(held, dtype))


def test_a_layer_in_nf4_has_the_bits_of_the_dense_layer_of_its_weight(kind: str) -> None:
    held = quantise(torch.randn(384, 1024, generator=torch.Generator().manual_seed(0)) * 0.02)
    layer = Nf4Linear(nn.Linear(1024, 384, bias=False))
    layer.load_state_dict(held)
    layer.to(kind)
    weight = dequantise({name: held[name].to(kind) for name in BYTES}, torch.bfloat16)
    x = torch.randn(700, 1024, device=kind, dtype=torch.bfloat16)
    one, other = (x.clone().requires_grad_() for _ in range(2))
    found, wanted = layer(one), nn.functional.linear(other, weight)
    upstream = torch.randn_like(found)
    for result in (found, wanted):
        result.backward(upstream)
    assert torch.equal(found, wanted)
    assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_adapters_on_a_base_in_nf4_end_with_the_same_bits(
    kind: str, tmp_path: Path, is_compiled: bool, checkpointing: ActivationCheckpointing
) -> None:
    if is_compiled and kind not in ("cuda", "xpu"):
        pytest.skip("inductor makes no code for the device")
    plain = Decoder(SHAPE)
    plain.init_weights(seed=0)
    state = {name: tensor for name, tensor in quantised(plain, LORA).state_dict().items() if "lora" not in name}
    found = []
    for _ in range(2):
        module = GenesisModule(SHAPE, AdamW(lr=1e-3), adapter=LORA)
        module.base_format = BASE_FORMATS["nf4"]
        found.append(fit(kind, tmp_path, module, state, is_compiled=is_compiled, checkpointing=checkpointing))
    first, second = found
    assert any(bool(tensor.any()) for name, tensor in first.items() if "lora_B" in name)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# ---- models of transformers


FAMILIES = ["llama", "gemma2", "gemma3_text", "gpt_oss", "granite", "olmo3", "phi3"]


@pytest.mark.parametrize("is_16_bits", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_keeps_documents_apart(kind: str, family: str, is_16_bits: bool) -> None:
    model = wrap(make_theirs(configure(family, **WIDE))).to(kind)
    with torch.autocast(kind, torch.bfloat16, enabled=is_16_bits):
        model.prove(1024)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_has_the_hidden_states_of_the_cpu(kind: str, family: str) -> None:
    ids = torch.randint(320, (2, 512), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(512) // 150).to(torch.int32).expand(2, -1).contiguous()
    model = wrap(make_theirs(configure(family, **WIDE)))

    def run(device: str) -> Tensor:
        found: Tensor = model.to(device)(ids.to(device), document_ids=documents.to(device), head=lambda one, _: one)
        return found.detach().float().cpu()

    wanted = run("cpu")
    with torch.autocast(kind, torch.bfloat16):
        found = run(kind)
    assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "llama"])
def test_two_equal_fits_of_a_model_of_transformers_end_with_the_same_bits(
    kind: str, tmp_path: Path, family: str, is_compiled: bool
) -> None:
    if is_compiled and kind not in ("cuda", "xpu"):
        pytest.skip("inductor makes no code for the device")
    theirs = make_theirs(configure(family, **{**WIDE, "max_position_embeddings": 1024}))
    state = wrap(theirs).state_dict()
    first, second = (
        fit(kind, tmp_path, GenesisModule(describe(theirs.config), AdamW(lr=1e-3)), state, is_compiled=is_compiled)
        for _ in range(2)
    )
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
