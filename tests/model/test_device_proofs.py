"""The proof of attention when a fit starts: it holds, it sees wrong kernels, and then masks are used."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from genesis.model import delta_kernel, delta_proof, device_proofs, proof_memory
from genesis.model.attend import flash, flex
from genesis.model.attend.flex import BLOCK_TOKENS
from genesis.model.attend.table import FLASH
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.delta import GatedDeltaConfig, build_delta_metadata
from genesis.model.delta_rule import DeltaInputs, chunked
from genesis.model.device_proofs import TORCH_ATTENTION_PROOF, list_mixer_proofs, prepare_kernels
from genesis.model.mixer import ForwardTokens
from tests.tiny_runs import decides_decays

CPU = torch.device("cpu")


def test_attention_by_documents_and_under_a_mask_agree() -> None:
    TORCH_ATTENTION_PROOF.prove(CPU)


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_kernel_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    right = flash._attend_each_document
    monkeypatch.setattr(flash, "_attend_each_document", lambda *inputs: right(*inputs) * wrong)
    with pytest.raises(RuntimeError, match="differs from the slower way by"):
        TORCH_ATTENTION_PROOF.prove(CPU)


def test_a_kernel_whose_gradients_alone_are_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash._attend_each_document

    def change_gradients(*inputs: Any) -> Tensor:
        out = right(*inputs)
        return out + 0.3 * (out - out.detach())

    monkeypatch.setattr(flash, "_attend_each_document", change_gradients)
    with pytest.raises(RuntimeError, match="attention by flash in its backward differs from the slower way by"):
        TORCH_ATTENTION_PROOF.prove(CPU)


def test_a_kernel_that_ignores_the_window_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash._attend_each_document
    monkeypatch.setattr(flash, "_attend_each_document", lambda *inputs: right(*inputs[:4], None, inputs[5]))
    with pytest.raises(RuntimeError, match="attention by flash differs"):
        TORCH_ATTENTION_PROOF.prove(CPU)


def test_the_proof_takes_several_blocks_of_keys_and_at_most_what_a_mask_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    right = flash._attend_each_document
    monkeypatch.setattr(
        flash, "_attend_each_document", lambda *inputs: lengths.append(inputs[0].shape[1]) or right(*inputs)
    )
    TORCH_ATTENTION_PROOF.prove(CPU)
    assert min(lengths) > 4 * BLOCK_TOKENS
    monkeypatch.setattr(device_proofs, "_MAX_PROVED_TOKENS", 200)
    device_proofs.prove_kernel("flash", device_proofs.ProvedShape(num_heads=6, head_dim=16, seq_len=900), CPU)
    assert lengths[-1] == 200


def test_flex_is_proved_by_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs, "_validate_device", lambda *inputs: None)  # has no backward on the CPU
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "compile_kernel", lambda: flex.attend_blocks)
    proof = device_proofs.attention_proof("flex")
    proof.prove(CPU)
    first_seen = flex.find_first_seen
    monkeypatch.setattr(flex, "find_first_seen", lambda rows: first_seen(rows._replace(document_ids=None)))
    with pytest.raises(RuntimeError, match="attention by flex differs"):
        proof.prove(CPU)


def test_the_proof_has_blocks_of_keys_whose_partial_queries_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads a list in another order is right where the list counts up from the block itself."""
    found = []
    build = flex.build_blocks
    monkeypatch.setattr(flex, "build_blocks", lambda first_seen: found.append(build(first_seen)) or found[-1])
    monkeypatch.setattr(torchs, "_validate_device", lambda *inputs: None)
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "compile_kernel", lambda: flex.attend_blocks)
    device_proofs.attention_proof("flex").prove(CPU)
    lists, numbers = found[0].partial_queries[0, 0], found[0].num_partial_queries[0, 0]
    own = [row[:number].tolist() for row, number in zip(lists, numbers, strict=True)]
    assert any(row != list(range(block, block + len(row))) for block, row in enumerate(own) if row)


def test_where_the_proof_fails_masks_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FLASH, "_distrusted", set())
    config = AttentionConfig(num_heads=2, num_kv_heads=2)
    ids = torch.arange(2, dtype=torch.int32).repeat_interleave(64)[None]
    x = torch.zeros(1, 128, 32)
    assert build_attention_metadata(config, ForwardTokens(x, ids)).offsets is not None
    TORCH_ATTENTION_PROOF.take_slow(CPU)
    metadata = build_attention_metadata(config, ForwardTokens(x, ids))
    assert metadata.offsets is None
    assert metadata.mask is not None


class Kernels:
    """Stands for `fla.ops.gated_delta_rule`, with the arguments and shapes that its documentation gives."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.names: list[str] = []

    def chunk_gated_delta_rule(self, **given: Any) -> tuple[Tensor, Tensor | None]:
        self.names.append("chunk")
        assert given["q"].dtype != torch.float32
        return self._run(**given)

    def fused_recurrent_gated_delta_rule(self, **given: Any) -> tuple[Tensor, Tensor | None]:
        self.names.append("recurrent")
        return self._run(**given)

    def _run(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        assert use_qk_l2norm_in_kernel
        assert q.dtype == k.dtype == v.dtype
        inputs = DeltaInputs(q, k, v, g, beta)
        if cu_seqlens is None:
            read, state = chunked(inputs, None, initial_state)
            return (self.factor * read).to(v.dtype), state if output_final_state else None
        assert len(v) == 1
        cuts = cu_seqlens.tolist()
        documents = [DeltaInputs(*(part[:, a:b] for part in inputs)) for a, b in pairwise(cuts)]
        return self.factor * torch.cat([chunked(document)[0] for document in documents], dim=1).to(v.dtype), None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kernels:
    kernels = Kernels()
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(delta_kernel, "find_version", lambda: "1.2.3")
    monkeypatch.setattr(delta_proof, "find_version", lambda: "1.2.3")
    monkeypatch.setattr(delta_kernel, "import_module", lambda name: kernels)
    return kernels


def test_kernels_of_linear_layers_are_proved_where_they_are_installed(installed: Kernels) -> None:
    (proof,) = list_mixer_proofs(LINEAR)
    assert proof.fast == "flash-linear-attention 1.2.3"
    proof.prove(CPU)
    assert {*installed.names} == {"chunk", "recurrent"}


def test_a_model_without_linear_layers_needs_no_proof_of_their_kernels(installed: Kernels) -> None:
    assert list_mixer_proofs(replace(LINEAR, linear_attention=None)) == []


def test_a_proof_that_held_is_not_run_again_on_the_same_machine(installed: Kernels) -> None:
    (proof,) = list_mixer_proofs(LINEAR)
    proof.prove(CPU)
    num_calls = len(installed.names)
    assert num_calls
    (again,) = list_mixer_proofs(LINEAR)
    again.prove(CPU)
    assert len(installed.names) == num_calls


def test_a_proof_that_failed_is_run_again_by_the_next_start(installed: Kernels) -> None:
    (proof,) = list_mixer_proofs(LINEAR)
    installed.factor = 1.5
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in linear layers differs from the slower way by"):
            proof.prove(CPU)
    installed.factor = 1.0
    proof.prove(CPU)


@pytest.mark.parametrize(
    "changed", ["kernels", "name_device", "read_capability", "__version__", "torch", "_DRIVERS", "choice"]
)
def test_another_device_or_version_is_proved_again(
    installed: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str
) -> None:
    (proof,) = list_mixer_proofs(LINEAR)
    proof.prove(CPU)
    num_calls = len(installed.names)
    monkeypatch.setattr(delta_kernel, "pin_triton_choices", lambda: None)
    if changed == "kernels":
        monkeypatch.setattr(delta_proof, "find_version", lambda: "1.2.4")
    elif changed == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9.9")
    elif changed == "choice":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif changed == "_DRIVERS":
        (tmp_path / "driver").write_text("580.0")
        monkeypatch.setattr(proof_memory, changed, (tmp_path / "driver",))
    else:
        other = {"name_device": lambda kind, index: "H100", "read_capability": lambda device: (9, 0)}
        monkeypatch.setattr(proof_memory, changed, other.get(changed, "9.9.9"))
    (other_proof,) = list_mixer_proofs(LINEAR)
    other_proof.prove(CPU)
    assert len(installed.names) == 2 * num_calls


def test_a_damaged_memory_of_a_proof_is_one_line_and_the_proof_runs(
    installed: Kernels, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (proof,) = list_mixer_proofs(LINEAR)
    proof.prove(CPU)
    num_calls = len(installed.names)
    (path,) = (tmp_path / "cache/proofs").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    proof.prove(CPU)
    assert caplog.messages == [f"{path} is damaged: its proof runs again"]
    assert len(installed.names) == 2 * num_calls
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_one_line_and_no_error(
    installed: Kernels, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    (proof,) = list_mixer_proofs(LINEAR)
    proof.prove(CPU)
    assert len(caplog.messages) == 2  # it can be neither read nor written
    assert "the next start proves flash-linear-attention 1.2.3 again" in caplog.messages[1]


def test_a_command_without_a_fit_proves_linear_layers_once_and_names_kernels_that_fail(
    installed: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        proved.append(arguments)
        raise RuntimeError("wrong\nin two lines")

    proved: list[object] = []
    monkeypatch.setattr(device_proofs, "prove_once", fail)
    monkeypatch.setattr(delta_kernel, "_distrusted_devices", set())
    cuda = torch.device("cuda")
    monkeypatch.setattr(device_proofs, "_proved", set())
    prepare_kernels(replace(LINEAR, linear_attention=None), cuda)
    prepare_kernels(LINEAR, CPU)
    assert proved == []
    for _ in range(2):
        prepare_kernels(LINEAR, cuda)
    assert len(proved) == 1
    assert delta_kernel._distrusted_devices == {"cuda"}
    assert caplog.messages == ["cuda: chunks instead of flash-linear-attention 1.2.3 in linear attention: wrong"]


LINEAR = DecoderConfig(
    vocab_size=31,
    dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    ffn_dim=16,
    max_seq_len=64,
    linear_attention=GatedDeltaConfig(1, 2, 8, 8, attention_every=2),
)


class Autotuner:
    """Stands for `triton.runtime.autotuner.Autotuner`: of several variants it takes the one that was fastest once."""

    configs = ("first", "fastest")

    def prune_configs(self, kwargs: dict[str, Any]) -> list[str]:
        return list(self.configs)

    def choose(self) -> str:
        return self.prune_configs({})[-1]


@pytest.mark.parametrize(("is_deterministic", "chosen"), [(True, "first"), (False, "fastest")])
def test_no_measurement_chooses_the_kernels_of_a_run_whose_kernels_repeat(
    installed: Kernels, monkeypatch: pytest.MonkeyPatch, is_deterministic: bool, chosen: str
) -> None:
    class OfThisTest(Autotuner): ...

    modules = {"triton.runtime.autotuner": SimpleNamespace(Autotuner=OfThisTest), "fla.ops.gated_delta_rule": installed}
    monkeypatch.setattr(delta_kernel, "import_module", modules.__getitem__)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    delta_kernel.pin_triton_choices.cache_clear()
    (proof,) = list_mixer_proofs(LINEAR)
    proof.prove(CPU)
    assert OfThisTest().choose() == chosen
    assert installed.names


def build_linear(dtype: torch.dtype) -> Decoder:
    decoder = Decoder(LINEAR)
    decoder.init_weights(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not decides_decays(name):
                parameter.mul_(4.0)
    return decoder.to(dtype)


IDS = torch.arange(80).view(2, 40) % 31
BFLOAT16_ERROR = 0.15
"""Of logits up to 5: kernels return bfloat16, the computation in chunks float32."""
DOCUMENT_IDS = (torch.arange(40) // 17).to(torch.int32).repeat(2, 1)


@torch.no_grad()
def compute_logits(decoder: Decoder, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits of rows, of documents in rows, and of rows by a cache with a token at a time."""
    cache = decoder.new_cache(2, 40)
    parts = []
    for start, end in ((0, 30), *((place, place + 1) for place in range(30, 40))):
        parts.append(decoder(IDS[:, start:end], cache=cache))
        cache.advance(end - start)
    return decoder(IDS), decoder(IDS, document_ids=DOCUMENT_IDS), torch.cat(parts, dim=1)


@pytest.fixture
def suited(installed: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The kernels, which the CPU uses as CUDA does."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        "genesis.model.delta.suits_kernel", lambda device, dtype: delta_kernel.suits_kernel(cuda, dtype)
    )
    return installed


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_model_with_kernels_has_the_logits_of_one_without(
    suited: Kernels, is_autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16
    decoder = build_linear(torch.float32 if is_autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=is_autocast):
        found = compute_logits(decoder, dtype)
        assert (suited.names.count("chunk"), suited.names.count("recurrent")) == (3, 10)
        monkeypatch.setattr(delta_kernel, "_distrusted_devices", {"cuda"})
        wanted = compute_logits(decoder, dtype)
    assert len(suited.names) == 13
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=BFLOAT16_ERROR)
    # Logits of documents and those of whole rows differ far more, so that a lost border would be seen.
    assert float((wanted[0] - wanted[1]).abs().max()) > 10 * BFLOAT16_ERROR


def test_a_model_in_float32_computes_without_kernels_which_refuse_it(suited: Kernels) -> None:
    decoder = build_linear(torch.float32)
    rows, documents, by_cache = compute_logits(decoder, torch.float32)
    assert suited.names == []
    torch.testing.assert_close(by_cache, rows, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(documents[:, 17:34], decoder(IDS[:, 17:34]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_documents_without_offsets_are_left_to_the_computation_in_chunks(suited: Kernels) -> None:
    layer = build_linear(torch.bfloat16).blocks[0].linear_attention
    x = torch.ones(2, 40, 16, dtype=torch.bfloat16)
    metadata = build_delta_metadata(ForwardTokens(x, DOCUMENT_IDS))
    layer(x, metadata)
    assert suited.names == ["chunk"]
    layer(x, metadata._replace(offsets=None))
    assert suited.names == ["chunk"]


def test_without_the_package_there_is_no_proof_and_no_kernel() -> None:
    if delta_kernel.find_version() is not None:
        pytest.skip("flash-linear-attention is installed")
    assert list_mixer_proofs(LINEAR) == []
    assert not delta_kernel.suits_kernel(torch.device("cuda"), torch.bfloat16)
