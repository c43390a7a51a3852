"""Adapters beside a base: one copy of the base in memory, and the answers of each model alone."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from genesis.base.errors import UserError
from genesis.cli.serve import _count_models, _read_adapters
from genesis.generate.load import load_decoder
from genesis.generate.shared import SharedBases
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.peft import build_adapter_config, name_adapter_tensor
from genesis.model.adapter import AdapterConfig, find_linears
from genesis.model.decoder import Decoder
from genesis.serve.catalogue import Catalogue, Entry
from genesis.serve.guard import Guard
from genesis.serve.pool import Limits
from genesis.serve.server import Server, answering, bind
from genesis_callbacks.checkpoint import read_manifest
from tests.serve.support import Running, alone, elsewhere
from tests.tiny_runs import build_decoder, save_adapted


@pytest.fixture(scope="module")
def base(run: Path) -> Path:
    return run / "checkpoints/step-00000001"


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns adapters of three kinds, and the first of them in PEFT's format."""
    directory, identity = tmp_path_factory.mktemp("adapters"), read_manifest(base).identity
    options: dict[str, dict[str, Any]] = {
        "plain": {"rank": 2, "alpha": 4.0, "include": ["*.attention.*"]},
        "dora": {"rank": 3, "alpha": 4.0, "dora": True},
        "embedding": {"rank": 2, "alpha": 4.0, "also_train": ["embedding"]},
    }
    paths = {}
    for name, chosen in options.items():
        decoder = build_decoder(1)
        paths[name] = save_adapted(directory / name / "checkpoints", base, decoder, identity, **chosen)
        if name != "dora":
            paths[f"{name} of peft"] = write_peft(directory / f"{name}-peft", decoder, AdapterConfig(**chosen))
    return paths


def write_peft(directory: Path, decoder: Decoder, config: AdapterConfig) -> Path:
    directory.mkdir()
    trained = {name: tensor.detach() for name, tensor in decoder.named_parameters() if tensor.requires_grad}
    layers = {name.rpartition(".")[0] for name in trained if name.endswith("lora_A")}
    content = build_adapter_config(
        config, LLAMA, layers=layers, linears=find_linears(decoder), is_tied=True, base_name=None
    )
    (directory / "adapter_config.json").write_text(json.dumps(content))
    tensors = {name_adapter_tensor(name, LLAMA): tensor for name, tensor in trained.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def count_bytes(decoders: list[Decoder]) -> int:
    """Returns the memory of all weights; what decoders share counts once."""
    held = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for d in decoders for one in d.parameters()
    }
    return sum(held.values())


def test_each_model_answers_as_it_does_alone_and_the_base_is_in_memory_once(
    base: Path, adapters: dict[str, Path]
) -> None:
    bases, texts = SharedBases(), {"alone": "def alpha", "base": "class beta"}

    def load(entry: Entry) -> Any:
        beside = None if entry.base is None else entry.path
        return load_decoder(entry.base or entry.path, adapter=beside, bases=bases)

    async def ask() -> tuple[list[Any], Any]:
        limits = Limits(max_models=8)
        server = Server(Catalogue([base], adapters), load, Guard(), limits)
        with bind("127.0.0.1", 0) as sock:
            async with answering(server, sock):
                running = Running(sock.getsockname()[1])
                bodies = [
                    {"model": model, "prompt": texts["base"], "max_tokens": 8, "temperature": 0.0, "logprobs": 0}
                    for model in (base.name, *adapters) * 2
                ]
                asked = [elsewhere(running.ask, "/v1/completions", body) for body in bodies]
                answers = await asyncio.gather(*asked)
                return answers, (await elsewhere(running.ask, "/api/status"))[1]

    answers, status = asyncio.run(ask())
    wanted = {base.name: alone(load_decoder(base), texts["base"], 8)}
    for name, path in adapters.items():
        beside = {"adapter": path} if name.endswith("peft") else {}
        wanted[name] = alone(load_decoder(base if beside else path, **beside), texts["base"], 8)
    assert len({tuple(token.id for token in tokens) for tokens in wanted.values()}) >= 3
    for (code, answer, _), model in zip(answers, (base.name, *adapters) * 2, strict=True):
        assert code == 200, answer
        (choice,) = answer["choices"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([one.log_prob for one in wanted[model]], abs=1e-5)
    for name in ("plain", "embedding"):
        assert [token.id for token in wanted[name]] == [token.id for token in wanted[f"{name} of peft"]]
    base_bytes = count_bytes([load_decoder(base).decoder])
    memory = {one["id"]: (one["weights_bytes"], one["shared_bytes"]) for one in status["models"]}
    assert memory.keys() == {base.name, *adapters}
    # Models load side by side. The first shares nothing; one with an embedding of its own shares the rest; and where
    # such a one came first, the next model that needs the embedding of the base reads it.
    embedding_bytes = 700 * 32 * 4
    rest = base_bytes - embedding_bytes
    assert [shared for _, shared in memory.values()].count(0) == 1
    plain = [shared for name, (_, shared) in memory.items() if not name.startswith("embedding")]
    assert sorted(plain)[1:] == [base_bytes] * (len(plain) - 1)
    assert min(plain) in (0, rest)
    assert {memory[name][1] for name in ("embedding", "embedding of peft")} <= {0, rest}
    total = sum(weights - shared for weights, shared in memory.values())
    own = sum(weights - base_bytes for name, (weights, _) in memory.items()) + 3 * embedding_bytes
    assert total <= base_bytes + own


def test_decoders_share_the_weights_of_their_base_and_free_them_together(base: Path, adapters: dict[str, Path]) -> None:
    bases = SharedBases()
    alone_bytes = count_bytes([load_decoder(base).decoder])
    first = load_decoder(adapters["plain"], bases=bases)
    second = load_decoder(base, bases=bases)
    third = load_decoder(adapters["dora"], bases=bases)
    assert (first.shared_bytes, second.shared_bytes, third.shared_bytes) == (0, alone_bytes, alone_bytes)
    together = count_bytes([first.decoder, second.decoder, third.decoder])
    own = sum(
        parameter.nbytes
        for loaded in (first, third)
        for name, parameter in loaded.decoder.named_parameters()
        if "lora" in name
    )
    assert together == alone_bytes + own
    weight = second.decoder.blocks[0].attention.query.weight.clone()
    del second
    gc.collect()
    assert torch.equal(third.decoder.blocks[0].attention.query.weight, weight)
    del first, third
    gc.collect()
    assert load_decoder(base, bases=bases).shared_bytes == 0


def test_another_dtype_shares_nothing(base: Path, adapters: dict[str, Path]) -> None:
    bases = SharedBases()
    kept = load_decoder(base, bases=bases)
    other = load_decoder(adapters["plain"], dtype=torch.bfloat16, bases=bases)
    assert other.shared_bytes == 0
    assert kept.decoder.embedding.weight.dtype == torch.float32


def test_adapters_of_another_base_are_refused_before_the_server_starts(
    run: Path, base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    other = run / "checkpoints/step-00000002"
    with pytest.raises(UserError, match=r"--adapter poet: .* has adapters for the base .*give adapters for it"):
        Catalogue([other], {"poet": adapters["plain"]})
    with pytest.raises(UserError, match=r"--adapter poet: .* holds no adapters"):
        Catalogue([base], {"poet": other})
    with pytest.raises(UserError, match=r"has the name 'latest', which a model has already"):
        Catalogue([base], {"latest": adapters["plain"]})
    changed = write_peft(tmp_path / "changed", load_decoder(adapters["plain"]).decoder, AdapterConfig(rank=2))
    content = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps(content | {"rank_pattern": {"q_proj": 4}}))
    with pytest.raises(UserError, match=r"rank_pattern is \{'q_proj': 4\}"):
        Catalogue([base], {"poet": changed})


@pytest.mark.parametrize("value", ["poet", "=runs/poet", "poet="])
def test_an_adapter_without_name_or_path_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="give NAME=PATH"):
        _read_adapters([value])
    with pytest.raises(UserError, match="the name 'a' twice"):
        _read_adapters(["a=b", "a=c"])


def test_all_adapters_fit_in_memory_unless_a_limit_is_given() -> None:
    assert [_count_models(None, 0), _count_models(None, 5), _count_models(3, 5)] == [2, 6, 3]
