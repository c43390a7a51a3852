"""The sound inputs: a model of two layers, a run of it, its mirror, a corpus and files of data."""

import csv
import gzip
import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard
from safetensors.torch import save_file

from genesis.cli.main import main
from genesis.export.importing import import_directory
from tests.chat.support import CHATML, WORDS, write_tokenizer

CONTEXT: Final = 128
ROWS: Final = [{"text": f"a text of number {number} \u00e9t\u00e9"} for number in range(40)]
CHATS: Final = [
    {"messages": [{"role": "user", "content": f"what is {number}?"}, {"role": "assistant", "content": f"{number}."}]}
    for number in range(20)
]


def write_model(directory: Path) -> None:
    """Writes a Llama of two layers in Hugging Face's layout, with a tokenizer and a chat template."""
    write_tokenizer(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(CHATML)
    text = (directory / "tokenizer.json").read_text()
    # With the endings that llama.cpp's expression of the same words has, so that a GGUF can be written.
    text = text.replace(json.dumps(WORDS)[1:], json.dumps(f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORDS}")[1:])
    (directory / "tokenizer.json").write_text(text)
    content = json.loads(text)
    vocab = 1 + max([*content["model"]["vocab"].values(), *(one["id"] for one in content["added_tokens"])])
    shape = {"vocab_size": vocab, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": CONTEXT}
    shape |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}  # type: ignore[dict-item]
    (directory / "config.json").write_text(json.dumps(shape))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    generator = torch.Generator().manual_seed(0)
    sizes = {"model.embed_tokens.weight": (vocab, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        of_layer = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (16, 16), "self_attn.v_proj": (16, 16)}
        of_layer |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16)}
        of_layer |= {"mlp.down_proj": (16, 24), "input_layernorm": (16,), "post_attention_layernorm": (16,)}  # type: ignore[dict-item]
        sizes |= {f"model.layers.{layer}.{name}.weight": size for name, size in of_layer.items()}
    tensors = {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(sizes, "model.safetensors")}
    (directory / "index.json").write_text(json.dumps(index))  # renamed by the cases of indexes


def write_data(directory: Path) -> None:
    """Writes one file of each kind that sources are read from."""
    directory.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (directory / "a.jsonl").write_text(lines)
    (directory / "a.json").write_text(json.dumps(ROWS))
    (directory / "a.txt").write_text("\n".join(row["text"] for row in ROWS))
    (directory / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (directory / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    with (directory / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([row["text"]] for row in ROWS)])
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, directory / "a.parquet")
    with pa.OSFile(str(directory / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (directory / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))


def write_all(directory: Path) -> None:
    """Writes all sound inputs into a directory that does not exist."""
    directory.mkdir(parents=True)
    write_model(directory / "model")
    write_data(directory / "data")
    (directory / "template.jinja").write_text(CHATML)
    import_directory(directory / "model", directory / "run", has_tokenizer=True, compares_models=False)
    assert main(["mirror", str(directory / "run"), str(directory / "mirror"), "--once"]) == 0
    source = f"[{{name: a, paths: [{directory}/data/a.jsonl]}}]"
    prepare = ("data", "prepare", "--name", "corpus", "--out", str(directory), "--num_workers", "1")
    assert main([*prepare, "--tokenizer", str(directory / "model"), "--sources", source]) == 0
