"""A tiny teacher beside a tiny corpus."""

from pathlib import Path
from typing import Any

import torch

from genesis.data.corpus_data import CorpusData
from genesis.data.loader import Ranks
from genesis.data.training_data import TrainingOptions
from genesis.export.importing import save_weights
from genesis.generate.teacher import find_teacher, load_teacher
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.objectives.teacher import Teacher
from genesis.objectives.teacher_cache import CacheIdentity, write_cache
from genesis.tokenizer.open import open_tokenizer

SEQ_LEN, TOP_K, TEMPERATURE = 16, 8, 2.0
TEACHER = DecoderConfig(vocab_size=352, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, max_seq_len=16)


def make_teacher(directory: Path, tokenizer: Path, seed: int = 7, config: DecoderConfig = TEACHER) -> Path:
    """Returns a run with one checkpoint, as an import makes it, whose choices are sharp."""
    decoder = Decoder(config)
    decoder.init_weights(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(6.0)
    directory.mkdir()
    save_weights(decoder.state_dict(), config, open_tokenizer(tokenizer), directory / "checkpoints")
    return directory


def open_data(corpus: Path, batch_size: int = 2, **options: Any) -> CorpusData:
    data = CorpusData(
        corpus,
        TrainingOptions(**{"seq_len": SEQ_LEN, "micro_batch_size": batch_size, "global_batch_size": 8, **options}),
        verify_hashes="first_touch",
        tokenizer_hash=None,
    )
    data.open(Ranks())
    return data


def load(teacher: Path, data: CorpusData, top_k: int = TOP_K, temperature: float = TEMPERATURE) -> Teacher:
    loaded, _ = load_teacher(
        find_teacher(teacher),
        tokenizer=data.path,
        vocab_size=data.vocab_size,
        seq_len=data.options.seq_len,
        top_k=top_k,
        temperature=temperature,
    )
    return loaded


def identify(teacher: Path, data: CorpusData, **changes: Any) -> CacheIdentity:
    given = {
        "teacher": find_teacher(teacher).hash,
        "teacher_dtype": "float32",
        "vocab_size": data.vocab_size,
        "top_k": TOP_K,
        "temperature": TEMPERATURE,
        "log_probs": "float32",
        "sequences": data.identify_sequences(),
        **changes,
    }
    return CacheIdentity(**given)


def make_cache(directory: Path, teacher: Path, corpus: Path, batch_size: int = 2, **changes: Any) -> Path:
    """Writes a cache; `changes` are fields of its identity."""
    data = open_data(corpus)
    identity = identify(teacher, data, **changes)
    loaded = load(teacher, data, identity.top_k, identity.temperature)
    write_cache(directory, identity, data.read_sequences, loaded.read, batch_size=batch_size)
    return directory
