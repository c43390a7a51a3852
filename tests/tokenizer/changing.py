"""Tokenizers that change texts, as those of T5, XLM-R, ALBERT and BERT: each is written into a directory."""

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from genesis.export.texts import SCRIPTS
from tests.tokenizer.test_huggingface import TEXTS, save

BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT_NAMES = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
WORDS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])


@cache
def train_sentencepiece(**options: Any) -> bytes:
    """A SentencePiece model of the type unigram, which normalises by NFKC and drops unknown characters by default."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in SCRIPTS.values() for line in text.splitlines()] * 2),
        model_writer=model,
        minloglevel=2,
        **{"model_type": "unigram", "vocab_size": 480, "character_coverage": 0.98, "num_threads": 1} | options,
    )
    return model.getvalue()


def charsmap() -> bytes:
    content = sentencepiece_model_pb2.ModelProto()
    content.ParseFromString(train_sentencepiece())
    return bytes(content.normalizer_spec.precompiled_charsmap)


def train_unigram(special: list[str], unknown: str, normalizer: Any, template: str, space: Any = WORDS) -> Any:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, space
    tokenizer.decoder = decoders.Metaspace()
    latin = [text for text in TEXTS if text.isascii() or "\u00e9" in text]
    tokenizer.train_from_iterator(
        latin, trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token=unknown)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(piece, token) for token, piece in enumerate(special)]
    )
    return tokenizer


def t5(directory: Path) -> Path:
    tokenizer = train_unigram(["<pad>", "</s>", "<unk>"], "<unk>", normalizers.Precompiled(charsmap()), "$A </s>")
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return save(directory, tokenizer, {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, **names})


def xlm_roberta(directory: Path) -> Path:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = train_unigram(special, "<unk>", normalizers.Precompiled(charsmap()), "<s> $A </s>")
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    names = {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
    mask = {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}
    config = {"tokenizer_class": "XLMRobertaTokenizer", **names, "pad_token": "<pad>", "mask_token": mask}
    return save(directory, tokenizer, config)


def albert(directory: Path) -> Path:
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD()]
    steps += [normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Precompiled(charsmap())]
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = train_unigram(special, "<unk>", normalizers.Sequence(steps), "[CLS] $A [SEP]")
    names = {"bos_token": "[CLS]", "eos_token": "[SEP]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names |= {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "[MASK]"}
    return save(directory, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def unigram_of_bytes(directory: Path) -> Path:
    """As LLM-jp and other models have it: a unigram model whose unknown characters are bytes."""
    tokenizer = train_unigram(["<unk>", "<s>", "</s>"], "<unk>", None, "<s> $A", pre_tokenizers.Metaspace())
    content = json.loads(tokenizer.to_str())
    pieces = content["model"]["vocab"]
    content["model"]["vocab"] = [*pieces[:3], *([f"<0x{byte:02X}>", -20.0] for byte in range(256)), *pieces[3:]]
    content["model"]["byte_fallback"] = True
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    content["pre_tokenizer"] = None
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            *({"type": "ByteFallback"}, {"type": "Fuse"}),
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    read = tokenizers.Tokenizer.from_str(json.dumps(content))
    return save(directory, read, {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def train_wordpiece(*, is_lower: bool = True) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        [text for text in TEXTS if "\u4eba" not in text],
        trainers.WordPieceTrainer(vocab_size=600, special_tokens=list(BERT), show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def bert(directory: Path) -> Path:
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **BERT_NAMES}
    return save(directory, train_wordpiece(), config)


def cased_bert(directory: Path) -> Path:
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, **BERT_NAMES}
    return save(directory, train_wordpiece(is_lower=False), config)


def sentencepiece_unigram(directory: Path) -> Path:
    (directory / "tokenizer.model").write_bytes(train_sentencepiece())
    return directory


def xlnet(directory: Path) -> Path:
    """Spaces in a row become the mark itself, as in older conversions of SentencePiece."""
    steps = [normalizers.Precompiled(charsmap()), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer = train_unigram(
        ["<unk>", "<s>", "</s>"], "<unk>", normalizers.Sequence(steps), "$A </s>", pre_tokenizers.Metaspace()
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save(directory, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", **names})


CHANGING: dict[str, Callable[[Path], Path]] = {
    "t5": t5,
    "xlm-roberta": xlm_roberta,
    "albert": albert,
    "xlnet": xlnet,
    "unigram of bytes": unigram_of_bytes,
    "bert": bert,
    "cased bert": cased_bert,
    "sentencepiece unigram": sentencepiece_unigram,
}
