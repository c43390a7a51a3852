"""The model card: what the manifest of the checkpoint says, for people."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from genesis.data.manifest import CorpusManifest, read_manifest
from genesis.errors import UserError
from genesis.export.proof import Layout
from genesis.export.tensors import Source
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import describe
from genesis_callbacks.checkpoint.manifest import dtype_name, read_committed_hash

_HEAD: dict[Layout, str] = {
    "huggingface": "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n",
    "safetensors": "",
}
_USE: dict[Layout, str] = {
    "huggingface": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")
```

A text begins with bos, which the tokenizer puts there. A text that spells a control symbol is read as text
(`split_special_tokens`), as it was in training. `proof.json` says what was compared with the checkpoint.""",
    "safetensors": "The tensors have genesis' own names; `decoder.json` is the model's shape.",
}


def write_card(name: str, sources: Sequence[Source], config: DecoderConfig, dtype: torch.dtype, layout: Layout) -> str:
    """Returns the text of `README.md`.

    Args:
        name: Of the model.
        sources: The checkpoints; several were averaged.
        config: The model's shape.
        dtype: Of the exported weights.
        layout: Of the directory.
    """
    manifest = sources[-1].manifest
    sections = [
        f"{_HEAD[layout]}# {name}",
        f"A Llama-style language model of {describe(config).num_parameters:,} parameters with a context of "
        f"{config.max_seq_len:,} tokens, exported in {dtype_name(dtype)}.",
        _USE[layout],
        "## Where it comes from\n" + "\n".join(_describe_source(source) for source in sources),
    ]
    if len(sources) > 1:
        sections.append(f"The weights are the mean of these {len(sources)} checkpoints; what follows is of the last.")
    sections += [
        "## Clocks\n" + _table(("clock", "value"), sorted(manifest.counters.items())),
        "## Data\n" + _describe_data(manifest.recipe, manifest.identity),
        "## Identity\n" + _table(("what", "value"), sorted(manifest.identity.items())),
        "## Versions at the save\n" + _table(("package", "version"), sorted(manifest.versions.items())),
        f"## Recipe\n```yaml\n{yaml.safe_dump(manifest.recipe, sort_keys=False)}```",
    ]
    return "\n\n".join(sections) + "\n"


def _describe_source(source: Source) -> str:
    return f"- `{source.path.name}`, step {source.manifest.step:,}, manifest `{read_committed_hash(source.path)}`"


def _describe_data(recipe: dict[str, Any], identity: dict[str, Any]) -> str:
    corpus = _open_corpus(recipe, identity)
    if corpus is None:
        return "The corpus was not at hand when this was written; the recipe below names what it was."
    rows = [
        (source.name, f"{source.weight:,}", f"{source.num_documents:,}", f"{source.num_tokens:,}")
        for source in corpus.train
    ]
    return f"Corpus `{corpus.name}`:\n\n" + _table(("source", "weight", "documents", "tokens"), rows)


def _open_corpus(recipe: dict[str, Any], identity: dict[str, Any]) -> CorpusManifest | None:
    """Returns the manifest of the corpus that the recipe names, if it is there and still the one."""
    data = recipe.get("data")
    path = data.get("corpus") if isinstance(data, dict) else None
    if not isinstance(path, str):
        return None
    try:
        corpus = read_manifest(Path(path))
    except UserError:
        return None
    return corpus if corpus.tokenizer_hash == identity.get("tokenizer_hash") else None


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
