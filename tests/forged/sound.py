"""The sound inputs: a model of two layers, a run of it, its mirror, a corpus and files of data."""

import csv
import gzip
import importlib
import json
import struct
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
import torch
import zstandard
from safetensors.torch import save_file

from genesis.cli.main import main
from genesis.export.importing import import_directory
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from tests.chat.support import CHATML, TEXTS, WORDS, write_tokenizer

CONTEXT: Final = 128
PAIRS_NAME, GOOD_NAME = "pairs.jsonl", "good.jsonl"
FAMILIES: Final = ("deepseek v3", "gpt-oss", "gemma 3", "qwen3.5 with experts")
"""Names of models in `tests.export.test_families`."""
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
    shape = {"vocab_size": vocab, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": CONTEXT}
    shape |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}  # type: ignore[dict-item]
    (directory / "config.json").write_text(json.dumps(shape))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    generator = torch.Generator().manual_seed(0)
    sizes = {"model.embed_tokens.weight": (vocab, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        of_layer = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64)}
        of_layer |= {"self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64)}
        of_layer |= {"mlp.down_proj": (64, 128), "input_layernorm": (64,), "post_attention_layernorm": (64,)}  # type: ignore[dict-item]
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
    pairs = [{"prompt": f"what is {number}?", "chosen": f"{number}.", "rejected": "0"} for number in range(1, 20)]
    good = [{**row, "good": number % 2 == 0} for number, row in enumerate(CHATS)]
    for name, rows in (("chat.jsonl", CHATS), (PAIRS_NAME, pairs), (GOOD_NAME, good)):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_adoptable(directory: Path) -> None:
    """Writes the same tokens in each format that `data adopt` reads."""
    directory.mkdir()
    documents = [[*range(3, 3 + number % 7), 0] for number in range(40)]
    tokens = np.array([token for document in documents for token in document], np.uint16)
    ends = np.cumsum([len(document) for document in documents])
    np.save(directory / "a.npy", tokens)
    for name in ("b.bin", "c.ds"):
        tokens.tofile(directory / name)
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1) + sizes.tobytes()
    index += (2 * (ends - sizes)).astype(np.int64).tobytes() + np.arange(len(sizes) + 1, dtype=np.int64).tobytes()
    (directory / "b.idx").write_bytes(index)
    ends.astype(np.uint64).tofile(directory / "c.ds.index")
    (directory / "c.ds.metadata").write_text("a|2\n40\n")
    (directory / "d").mkdir()
    (directory / "d/state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})
    with pa.OSFile(str(directory / "d/data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def write_all(directory: Path, *, has_families: bool = False) -> None:
    """Writes all sound inputs into a directory that does not exist."""
    directory.mkdir(parents=True)
    if has_families:
        write_families(directory)
    write_model(directory / "model")
    write_data(directory / "data")
    write_adoptable(directory / "adopt")
    (directory / "template.jinja").write_text(CHATML)
    import_directory(directory / "model", directory / "run", has_tokenizer=True, compares_models=False)
    assert main(["mirror", str(directory / "run"), str(directory / "mirror"), "--once"]) == 0
    source = f"[{{name: a, paths: [{directory}/data/a.jsonl]}}]"
    prepare = ("data", "prepare", "--name", "corpus", "--out", str(directory), "--num_workers", "1")
    assert main([*prepare, "--tokenizer", str(directory / "model"), "--sources", source]) == 0


def write_families(directory: Path) -> None:
    """Writes a model of each of `FAMILIES`, one with images, and two tokenizers of SentencePiece."""
    # Their imports take seconds that other kinds of cases need not wait for.
    families = importlib.import_module("tests.export.test_families")
    for name in FAMILIES:
        families.build_theirs(name).save_pretrained(directory / "families" / name)
    images = importlib.import_module("tests.model.foreign.models")
    images.make_theirs(images.configure("gemma3")).save_pretrained(directory / "families/with images")
    texts = [*TEXTS, *(row["text"] for row in ROWS)]
    train_tokenizer(texts, TokenizerOptions(vocab_size=350), directory / "tokenizers/pieces")
    (directory / "tokenizers/unigram").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(directory / "tokenizers/unigram/tokenizer"),
        vocab_size=350,
        model_type="unigram",
        hard_vocab_limit=False,
    )
