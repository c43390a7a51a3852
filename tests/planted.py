"""A stranger's checkpoint: whole by its hashes, with pickles in it that run code where somebody unpickles."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

from genesis_callbacks.base.hashing import hash_bytes


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def plant_pickles(path: Path, proof: Path) -> None:
    """Puts pickles that run code into `.metadata` and at the head of each chunk of the shard; all hashes are right."""
    payload = pickle.dumps(Payload(proof))
    (path / ".metadata").write_bytes(payload)
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name, record in manifest["tensors"].items():
        for chunk in record["chunks"]:
            shard = bytearray((path / chunk["file"]).read_bytes())
            assert chunk["data_offset"] - chunk["byte_offset"] >= len(payload), name
            shard[chunk["byte_offset"] : chunk["byte_offset"] + len(payload)] = payload
            (path / chunk["file"]).write_bytes(shard)
    for record in manifest["files"]:
        data = (path / record["name"]).read_bytes()
        record["num_bytes"], record["hash"] = len(data), hash_bytes(data, "blake3")
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_bytes(b"blake3:" + hash_bytes(data, "blake3").encode())


def plant_code(directory: Path, marker: Path) -> None:
    """Puts Python files that would leave a mark into a model's directory, and names them in its configurations."""
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    for kind, name in (
        *(("configuration", "PlantedConfig"), ("modeling", "PlantedModel")),
        *(("tokenization", "PlantedTokenizer"), ("generation", "PlantedCache")),
    ):
        (directory / f"{kind}_planted.py").write_text(f"{code}class {name}:\n    pass\n")
    (directory / "custom_generate").mkdir(exist_ok=True)
    (directory / "custom_generate/generate.py").write_text(f"{code}def generate(*_, **__):\n    pass\n")
    tokenizer = ["tokenization_planted.PlantedTokenizer", "tokenization_planted.PlantedTokenizer"]
    model = {"AutoConfig": "configuration_planted.PlantedConfig", "AutoTokenizer": tokenizer}
    model["AutoModelForCausalLM"] = "modeling_planted.PlantedModel"
    for file, keys in (
        ("config.json", {"auto_map": model}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": tokenizer}, "tokenizer_class": "PlantedTokenizer"}),
        ("generation_config.json", {"custom_generate": str(directory)}),
    ):
        path = directory / file
        content = json.loads(path.read_bytes()) if path.exists() else {}
        path.write_text(json.dumps(content | keys | {"trust_remote_code": True}))
