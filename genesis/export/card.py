"""Writes the model card: the facts of the checkpoint in readable form, without the paths of this machine."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from genesis.base.errors import UserError, numbered
from genesis.base.run_directory import RunDirectory
from genesis.data.manifest import CorpusManifest, read_manifest
from genesis.data.paths import list_candidates, read_path
from genesis.data.usage import DataUsage, read_data_usage
from genesis.export.evaluation import HEADS, Finding, build_model_index, describe_finding, find_results
from genesis.export.proof import UNPROVED_TOKENIZER, Layout, TokenizerForm, TokenizerOrigin
from genesis.export.reading import Reading
from genesis.export.tensors import Source
from genesis.huggingface.directory import read_json
from genesis.huggingface.stored import list_nf4_tensors
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import describe
from genesis.model.foreign.config import TransformersConfig
from genesis.recipe.yaml import dump_yaml
from genesis.tokenizer.fast_form import CONFIG_NAME as TOKENIZER_CONFIG_NAME
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint.inventory import trace_ancestors
from genesis_callbacks.checkpoint.state import read_state

PLACE = "THIS_DIRECTORY"
"""The placeholder for the model's directory in a card."""
_LEFT_OUT = ("run_dir", "logger", "default_root_dir")
"""Keys of a recipe that only define where a run wrote and logged."""
_PATH_KEY = re.compile(r"(.*_)?(corpus|tokenizer|paths?|file|filename|directory|dir|dirpath)")
_USAGE_HEADS = ("tokens consumed", "epochs consumed")
_PATH = re.compile(r"[/~\\]|\.{1,2}/|[A-Za-z]:\\|[a-z][a-z0-9+.-]*://")
"""Beginnings of values that are paths under any key."""
_USE: dict[Layout, str] = {
    "huggingface": """```python
from transformers import AUTO_CLASS, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")
model = AUTO_CLASS.from_pretrained("THIS_DIRECTORY")
```

`proof.json` lists the comparisons with the checkpoint.""",
    "safetensors": "The tensors have genesis' own names; `decoder.json` contains the model's shape.",
    "gguf": """```text
llama-cli -m THIS_DIRECTORY/FILE.gguf
llama-server -m THIS_DIRECTORY/FILE.gguf
```

`proof.json` lists the comparisons with the checkpoint, and llama.cpp's own result if it has loaded the file.""",
}

_USE_OF_IDS: Final = """```python
from transformers import AUTO_CLASS

model = AUTO_CLASS.from_pretrained("THIS_DIRECTORY")
```

`proof.json` lists the comparisons with the checkpoint."""


_OWN_FORM: Final = (
    "transformers cannot open this tokenizer: the directory contains its own files, which genesis reads "
    '(`genesis generate THIS_DIRECTORY --prompt "..."`). With transformers, use ids as input and output.'
)


def name_auto_class(config: DecoderConfig) -> str:
    """Returns the name of transformers' class that opens an exported model."""
    if config.num_scores is not None:
        return "AutoModelForSequenceClassification"
    return config.body.auto_class if isinstance(config.body, TransformersConfig) else "AutoModelForCausalLM"


def write_card(
    name: str,
    sources: Sequence[Source],
    config: DecoderConfig,
    dtype: str,
    layout: Layout,
    tokenizer: TokenizerOrigin = "run",
    form: TokenizerForm = "huggingface",
    reading: str = "",
) -> str:
    """Returns the text of `README.md`.

    Args:
        name: The model's name.
        sources: The checkpoints; several were averaged.
        config: The model's shape.
        dtype: The name of the type of the exported weights.
        layout: The layout of the directory.
        tokenizer: Whether the exported tokenizer is the run's, or there is none.
        form: Which of the tokenizer's files are in the directory.
        reading: How transformers' tokenizer reads a text (`describe_reading`).
    """
    last = sources[-1]
    manifest = last.manifest
    findings = find_results(last) if len(sources) == 1 else []  # an average is a different model, without results
    sections = [
        f"# {name}",
        f"A {_name_kind(config)} of "
        f"{numbered(describe(config).num_parameters, 'parameters')} with a context of "
        f"{numbered(config.max_seq_len, 'tokens')}, exported in {dtype}.",
        (_USE_OF_IDS if layout == "huggingface" and form != "huggingface" else _USE[layout]).replace(
            "AUTO_CLASS", name_auto_class(config)
        ),
        *([reading] if reading else []),
        *([_OWN_FORM] if layout == "huggingface" and form == "own" else []),
        *(
            ["The model was trained on tokens without a tokenizer: its input and output are ids."]
            if tokenizer == "none"
            else []
        ),
        *([f"**The tokenizer is unproved**: {UNPROVED_TOKENIZER}."] if tokenizer == "unproved" else []),
        "## Where it comes from\n" + "\n".join(line for source in sources for line in _describe_source(source)),
    ]
    if len(sources) > 1:
        sections.append(
            f"The weights are the mean of these {numbered(len(sources), 'checkpoints')}; the facts below are those of "
            "the last one."
        )
    if last.scaling is not None:
        sections.append("The adapters of the checkpoint are merged into the weights of their base.")
    if list_nf4_tensors(manifest):
        sections.append(describe_nf4())
    if findings:
        sections.append(f"## Evaluation\n{_describe_evaluation(findings)}")
    identity = hide_paths(manifest.identity)
    sections += [
        "## Clocks\n" + _table(("clock", "value"), sorted(manifest.counters.items())),
        "## Data\n" + _describe_data(last),
        "## Identity\n" + _table(("what", "value"), sorted(identity.items())),
        "## Versions at the save\n" + _table(("package", "version"), sorted(manifest.versions.items())),
        f"## Recipe\n```yaml\n{dump_yaml(hide_paths(manifest.recipe))}```",
    ]
    task = "text-generation" if config.num_scores is None else "text-classification"
    return _write_head(layout, name, findings, task) + "\n\n".join(sections) + "\n"


def _name_kind(config: DecoderConfig) -> str:
    if config.num_scores is not None:
        return "reward model (a Llama-style decoder with one score)"
    return "Llama-style language model" if config.body is None else "language model of transformers"


def describe_scores(reading: Reading) -> str:
    """Returns what the score of a reward model is, and how transformers gives it."""
    if reading.learned is None and (reading.tokenizer is None or reading.tokenizer.chat_template is None):
        return "The score of a text is its logit: `model(**tokenizer(text, return_tensors='pt')).logits[0, 0]`."
    return (
        "The score of a conversation that ends with an answer is its logit: `model(**tokenizer.apply_chat_template("
        "messages, return_tensors='pt', return_dict=True)).logits[0, 0]`; for several conversations at once add "
        "`padding=True`, and take `logits[:, 0]`."
    )


def describe_nf4() -> str:
    """Returns the line of a card about weights that were trained beside, or restored from, a base in NF4."""
    return (
        "The linear layers of the base had 4 bits a weight (NF4), and adapters were trained beside these weights. The "
        "model from which that base was made has other weights: it answers differently, also with these adapters."
    )


def describe_reading(tokenizer: Tokenizer, directory: Path) -> str:
    """Returns what transformers' tokenizer in `directory` does with the beginning of a text and with symbols in it."""
    begins = "adds nothing to" if tokenizer.bos_id is None else "adds bos to"
    config = directory / TOKENIZER_CONFIG_NAME
    if config.is_file() and read_json(config).get("split_special_tokens") is True:
        symbols = "The name of a control symbol in a text is read as text (`split_special_tokens`), as in training."
    else:
        symbols = (
            "The name of a control symbol in a text is read as that symbol; training read it as text, as transformers "
            "does with `AutoTokenizer.from_pretrained(..., split_special_tokens=True)`."
        )
    return f"The tokenizer {begins} the beginning of a text. {symbols}"


def hide_paths(content: Any, key: str = "") -> Any:
    """Returns a recipe with only the last component of each path, and without the keys of where the run wrote.

    >>> hide_paths({"run_dir": "/home/me/runs/a", "data": {"corpus": "corpora/web"}, "monitor": "validation/loss"})
    {'data': {'corpus': 'web'}, 'monitor': 'validation/loss'}
    """
    if isinstance(content, Mapping):
        return {name: hide_paths(value, name) for name, value in content.items() if name not in _LEFT_OUT}
    if isinstance(content, list):
        return [hide_paths(value, key) for value in content]
    if isinstance(content, str) and (_PATH_KEY.fullmatch(key) or _PATH.match(content)):
        return PurePosixPath(content.replace("\\", "/")).name
    return content


def _write_head(layout: Layout, name: str, findings: Sequence[Finding], task: str) -> str:
    head: dict[str, Any] = {"tags": ["genesis"]}
    if layout == "huggingface":
        head |= {"library_name": "transformers", "pipeline_tag": task}
    if layout == "gguf":
        head |= {"library_name": "gguf", "pipeline_tag": task}
    if index := build_model_index(name, findings):
        head["model-index"] = index
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n"


def _describe_source(source: Source) -> list[str]:
    """Returns a line for the checkpoint, its predecessor, and each ancestor at which another run's lineage begins."""
    lines = [f"- `{source.path.name}`, step {source.manifest.step:,}, manifest `{read_committed_hash(source.path)}`"]
    for number, (ancestor, _) in enumerate(trace_ancestors(source.path, source.manifest)):
        if number == 0 or ancestor.directory is not None:
            where = "" if ancestor.directory is None else f" of the run `{Path(ancestor.directory).parent.name}`"
            lines.append(f"  - after `{ancestor.name}`{where}, manifest `{ancestor.manifest_hash}`")
    return lines


def _describe_evaluation(findings: Sequence[Finding]) -> str:
    dtypes = " and ".join(sorted({finding.dtype for finding in findings}))
    introduction = f"By `genesis evaluate`, on the checkpoint in {dtypes}; items are questions, or bytes of text."
    return f"{introduction}\n\n{_table(HEADS, [describe_finding(finding) for finding in findings])}"


def _describe_data(source: Source) -> str:
    """Returns the corpus's sources, if the corpus is found, with the checkpoint's data usage."""
    manifest = source.manifest
    consumed = read_data_usage(read_state(source.path, manifest))
    corpus = _open_corpus(source)
    if corpus is None:
        absent = "The corpus was not available when this card was written; its name is in the recipe below."
        rows = [(name, *_describe_usage(one)) for name, one in consumed.items()]
        return absent + ("\n\n" + _table(("source", *_USAGE_HEADS), rows) if rows else "")
    described = [
        (
            one.name,
            f"{one.weight:,}",
            f"{one.num_documents:,}",
            f"{one.num_tokens:,}",
            *_describe_usage(consumed.get(one.name)),
        )
        for one in corpus.train
    ]
    heads = ("source", "weight", "documents", "tokens", *_USAGE_HEADS)
    return f"Corpus `{corpus.name}`:\n\n{_table(heads, described)}"


def _describe_usage(consumed: DataUsage | None) -> tuple[str, str]:
    unknown = "not recorded"
    if consumed is None:
        return unknown, unknown
    return f"{consumed.tokens:,}", unknown if consumed.epochs is None else f"{consumed.epochs:.3g}"


def _open_corpus(source: Source) -> CorpusManifest | None:
    """Returns the manifest of the recipe's corpus, if it is found and has the run's tokenizer."""
    named = read_path(source.manifest.recipe, "data", "corpus")
    candidates = (
        () if named is None else list_candidates(named, RunDirectory.of(source.path).path, source.manifest.recipe)
    )
    for candidate in candidates:
        try:
            corpus = read_manifest(candidate.path)
        except UserError:
            continue
        if corpus.tokenizer_hash == source.manifest.identity.get("tokenizer_hash"):
            return corpus
    return None


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
