"""Opens models and tokenizers by transformers: no code that a model brings runs, and nothing is downloaded.

A directory may name Python files, in it or on the Hub, that transformers would run if it were allowed to. It is not,
and it opens a directory with neither these files nor the keys that name them.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from genesis.base.errors import UserError, blaming
from genesis.huggingface.directory import CODE_KEYS, CODE_NAMES, CONFIG_NAME, DATA_SUFFIXES, read_json
from genesis.huggingface.mxfp4 import is_mxfp4, join_mxfp4
from genesis.huggingface.shape import is_scoring
from genesis.huggingface.weights import iterate_tensors, read_file_names

# Commands show stages of their own.
logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'

_LEFT_OUT: Final = CODE_KEYS | {"num_labels", "id2label", "label2id"}
"""Keys that are not passed on: those of code, and classes of a classifier, of which transformers makes any number."""


def leave_out(content: Any) -> Any:
    """Returns the content of a configuration without the keys that are not passed on, at any depth."""
    if isinstance(content, dict):
        return {key: leave_out(value) for key, value in content.items() if key not in _LEFT_OUT}
    return [leave_out(value) for value in content] if isinstance(content, list) else content


def load_tokenizer(directory: Path, **options: Any) -> Any:
    """Returns transformers' tokenizer of a directory; the options are its own."""
    with _without_code(directory) as data:
        load: Any = AutoTokenizer.from_pretrained
        return load(data, **options, trust_remote_code=False, local_files_only=True)


def load_model(directory: Path, auto: Any = None) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' model of a directory in float32, and what transformers reports about its tensors.

    Args:
        directory: The directory.
        auto: The class of transformers that opens it. None for the text model of its type alone, for the whole model
            where transformers has none, as of `mistral3`, and for a reward model.
    """
    options: dict[str, Any] = {}
    with _without_code(directory) as data:
        if auto is None:
            content = read_json(directory / CONFIG_NAME)
            if is_mxfp4(content):
                return _load_dequantised(data, content)
            has_text_alone = content.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            auto = AutoModelForCausalLM if has_text_alone else AutoModelForImageTextToText
            if is_scoring(content):
                auto, options["num_labels"] = AutoModelForSequenceClassification, 1  # `read_shape` reads no others
        closed = {"trust_remote_code": False, "local_files_only": True, "use_safetensors": True} | options
        try:
            model, report = auto.from_pretrained(data, dtype=torch.float32, output_loading_info=True, **closed)
        except ImportError as error:  # of a package that a configuration asks for
            raise UserError(f"transformers cannot open {directory} ({error}): correct its {CONFIG_NAME}") from None
    return model, report


def _load_dequantised(directory: Path, content: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a model whose weights are in MXFP4, in float32: transformers itself asks for packages to read them."""
    plain = {key: value for key, value in content.items() if key not in ("quantization_config", "dtype", "torch_dtype")}
    build: Any = AutoModelForCausalLM.from_config
    model = build(CONFIG_MAPPING[content["model_type"]].from_dict(plain), dtype=torch.float32, trust_remote_code=False)
    state = dict(join_mxfp4(iterate_tensors(directory, read_file_names(directory)), None))
    missing, unexpected = model.load_state_dict(state, strict=False)
    return model, {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": []}


@contextmanager
def _without_code(directory: Path) -> Iterator[Path]:
    """Yields a directory with links to the files that hold data, and with configurations that name no code.

    Meanwhile transformers prints no warnings, which quote what files have: the proofs find what counts.
    """
    verbosity = logging.get_verbosity()
    with TemporaryDirectory() as name, ExitStack() as stack:
        stack.callback(logging.set_verbosity, verbosity)
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        data = Path(name)
        for file in directory.iterdir():
            kept = None
            if file.name in CODE_NAMES:
                with blaming(file, "correct it"):
                    content = read_json(file)
                    kept = leave_out(content)
                    kept = None if kept == content else json.dumps(kept)
            if kept is not None:
                (data / file.name).write_text(kept, encoding="utf-8")
            elif file.suffix in DATA_SUFFIXES:
                (data / file.name).symlink_to(file.absolute())
        yield data
