"""A decoder and its tokenizer from a checkpoint or an export: weights only, compared with their digests or hashes."""

import logging
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genesis.base.device import read_capability
from genesis.base.errors import UserError, numbered
from genesis.base.run_directory import RunDirectory
from genesis.chat.learned import describe_other_template, find_recorded, find_stop_ids
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_template
from genesis.data.paths import TOKENIZER_PATHS, find_path, list_candidates, read_path
from genesis.generate.checkpoint_reference import read_reference
from genesis.generate.shared import SharedBases
from genesis.huggingface.directory import CONFIG_NAME, DECODER_NAME, check_files, read_json
from genesis.huggingface.family import Family
from genesis.huggingface.peft import fingerprint, read_adapters, read_peft_config
from genesis.huggingface.shape import find_names, read_shape
from genesis.huggingface.stored import list_nf4_tensors
from genesis.huggingface.weights import read_weights
from genesis.model.adapter import AdapterConfig, BaseFormat, attach_adapters, use_nf4
from genesis.model.attend.kernel import FLASH_CAPABILITY
from genesis.model.decoder import Decoder, DecoderConfig, build_model, refuse_body
from genesis.model.device_proofs import CACHED_ATTENTION_PROOF, TORCH_ATTENTION_PROOF, prepare_kernels
from genesis.model.language_model import LanguageModel
from genesis.model.recipe import DECODER_PREFIX, build_decoder_config, read_adapter_config
from genesis.model.scores import refuse_scores
from genesis.tokenizer.huggingface import TEMPLATE_NAME
from genesis.tokenizer.open import find_format, has_hash, has_tokenizer, list_file_names, open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import Manifest, read_manifest, read_tensors
from genesis_callbacks.checkpoint.tensor_places import find_base

_MAX_REASON = 2000
_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A loaded decoder, with its tokenizer and the directory that it came from.

    Args:
        model: The model, in evaluation mode.
        tokenizer: The tokenizer; None if the model was trained on ids without a tokenizer and the user named none.
        checkpoint: The directory of the checkpoint or the export.
        shared_bytes: The bytes of those weights that were in memory already, because another decoder has the same base.
        learned: The file of the chat template that the model was trained with; None for the tokenizer's own, if any.
        chosen: The file of the chat template that the user chose instead.
    """

    model: LanguageModel
    tokenizer: Tokenizer | None
    checkpoint: Path
    shared_bytes: int = 0
    learned: Path | None = None
    chosen: Path | None = None

    @property
    def decoder(self) -> Decoder:
        """Returns the model where only a decoder of Genesis was allowed."""
        assert isinstance(self.model, Decoder), "`load_decoder` refuses others unless they are allowed"
        return self.model

    @property
    def stop_ids(self) -> frozenset[int]:
        """Returns the tokens that end a text; none without a tokenizer."""
        return frozenset() if self.tokenizer is None else find_stop_ids(self.tokenizer, self.learned, self.chosen)

    @property
    def chat_template(self) -> str | None:
        """Returns the text of the model's chat template; None without one."""
        if self.tokenizer is None or not (self.chosen or self.learned or self.tokenizer.chat_template):
            return None
        return open_template(self.tokenizer, ChatOptions(template=self.chosen), self.learned).text

    @property
    def text_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, for callers that need text.

        Raises:
            UserError: There is no tokenizer.
        """
        return require_tokenizer(self.tokenizer, self.checkpoint)


def load_decoder(
    path: Path,
    tokenizer: Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    adapter: Path | None = None,
    bases: SharedBases | None = None,
    chat_template: Path | None = None,
    allows_body: bool = False,
    allows_scores: bool = False,
) -> Loaded:
    """Returns the decoder of a checkpoint or an export, in evaluation mode, and its tokenizer. Nothing is unpickled.

    Adapters stay separate from the weights of their base; the checkpoint's reference names the base.

    Args:
        path: A run, a checkpoint or an export, in any form that `checkpoint_reference` reads. Of a run, the
            newest valid checkpoint is loaded, and damaged checkpoints stay in their place.
        tokenizer: A tokenizer's file or directory; None for the one that `load_tokenizer` finds, or the export's own.
        device: The device of the decoder.
        dtype: The dtype of the weights; None for the dtype in the files.
        adapter: A directory with adapters in PEFT's format that are used beside the weights of the checkpoint.
        bases: Weights that are in memory: the decoder shares those of its base, so that they must not be changed. None
            to read all weights.
        chat_template: The file of a chat template to use instead of the model's; a warning is logged if the model has
            learned another one.
        allows_body: Whether the checkpoint may be of a model that another library defines, which has no cache.
        allows_scores: Whether it may be a reward model, which writes no text.

    Raises:
        UserError: The checkpoint does not exist or is damaged, its tokenizer is missing or a different one, an export
            has changed since it was proved, or the adapters belong to another base.
    """
    reference = read_reference(path)
    prepare_device(torch.device(device))
    if reference.kind == "export":
        if adapter is not None:
            raise UserError(
                f"{path} is an export, beside which no adapters are loaded; convert it with `genesis import`"
            )
        config, state, found = _read_export(reference.path, tokenizer, allows_scores=allows_scores)
        learned = _find_exported_template(reference.path, found)
        decoder = _fill_decoder(build_empty_decoder(config, len(state), reference.path), state, reference.path)
        prepare_kernels(config, torch.device(device))
        _note_choice(chat_template, learned)
        decoder = decoder.to(device=device, dtype=dtype).eval()
        return Loaded(decoder, found, reference.path, learned=learned, chosen=chat_template)
    checkpoint = reference.find_checkpoint(level="quick")
    manifest = read_manifest(checkpoint)
    found = load_tokenizer(tokenizer, manifest, checkpoint)
    learned = find_learned_template(checkpoint, manifest)
    _note_choice(chat_template, learned)
    bases = bases or SharedBases()
    base_hash = read_committed_hash(checkpoint) if manifest.base is None else manifest.base.manifest_hash
    key = f"{base_hash} {device} {dtype}"
    with bases.loading(key) as shared:
        config = _read_run_config(checkpoint, manifest)
        if not allows_body:
            refuse_body(config)
        if not allows_scores:
            refuse_scores(config, checkpoint)
        decoder, in_base = _read_checkpoint(checkpoint, manifest, config, adapter, shared)
        prepare_kernels(config, torch.device(device))
        decoder = decoder.to(device=device, dtype=dtype).eval()
        bases.add(key, decoder, in_base)
    shared_bytes = sum(shared[name].nbytes for name in in_base & shared.keys())
    return Loaded(decoder, found, checkpoint, shared_bytes, learned, chat_template)


def find_learned_template(checkpoint: Path, manifest: Manifest) -> Path | None:
    """Returns the file of the chat template that a checkpoint was trained with; None if it has learned none.

    Args:
        checkpoint: The checkpoint's directory. Its run records the template; for the runs of earlier versions, which
            did not, the corpus has it. Adapters that learned no template have that of their base.
        manifest: The checkpoint's manifest.
    """
    run_dir = RunDirectory.of(checkpoint).path
    named = read_path(manifest.recipe, "data", "corpus")
    corpora = () if named is None else list_candidates(named, run_dir, manifest.recipe)
    found = (find_recorded(path) for path in (run_dir, *(candidate.path for candidate in corpora)))
    file = next(filter(None, found), None)
    if file is None and manifest.base is not None:
        return find_learned_template(*find_base(checkpoint, manifest.base))
    return file


def has_chat_template(path: Path, tokenizer: Path | None = None) -> bool:
    """Returns whether a checkpoint or an export has a chat template; otherwise as `find_texts`."""
    found, learned = find_texts(path, tokenizer)
    return found is not None and (learned is not None or found.chat_template is not None)


def find_texts(path: Path, tokenizer: Path | None = None) -> tuple[Tokenizer | None, Path | None]:
    """Returns the tokenizer of a checkpoint or an export, and the template that it has learned; reads no weights.

    Args:
        path: As in `load_decoder`.
        tokenizer: A tokenizer's file or directory; None for the model's own.

    Raises:
        UserError: There is no such model, or its tokenizer is missing or a different one.
    """
    reference = read_reference(path)
    if reference.kind == "export":
        own = tokenizer if find_format(reference.path) is None else reference.path
        found = None if own is None else open_tokenizer(own)
        return found, _find_exported_template(reference.path, found)
    checkpoint = reference.find_checkpoint(level="quick")
    manifest = read_manifest(checkpoint)
    return load_tokenizer(tokenizer, manifest, checkpoint), find_learned_template(checkpoint, manifest)


def _find_exported_template(directory: Path, tokenizer: Tokenizer | None) -> Path | None:
    """Returns the template of an export whose tokenizer is of a kind that holds none."""
    file = directory / TEMPLATE_NAME
    return file if tokenizer is not None and tokenizer.chat_template is None and file.is_file() else None


def _note_choice(chosen: Path | None, learned: Path | None) -> None:
    line = describe_other_template(chosen, learned)
    if line is not None:
        _log.warning("%s", line)


def _fill_decoder(decoder: LanguageModel, state: dict[str, Tensor], checkpoint: Path) -> LanguageModel:
    try:
        decoder.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise _another_decoder(checkpoint, error) from None
    decoder.fill_buffers()
    return decoder


def prepare_device(device: torch.device) -> None:
    """Selects the attention kernels of this process on a CUDA device; does nothing on other devices.

    cuDNN's attention is not used: it plans each shape when it first sees it, for 20 to 400 ms. Texts that grow, and
    prompts of any length, bring a new shape with nearly every forward. Training, whose shapes repeat, still uses it.

    Kernels that give wrong results on a few test tokens are not used, either; a warning names each of them.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    _prove_attention(device.type, has_flash=(read_capability(device) or (0, 0)) >= FLASH_CAPABILITY)


@cache  # once per process
def _prove_attention(device_type: str, *, has_flash: bool) -> None:
    device = torch.device(device_type)
    # Attention by documents or lengths is for devices with flash kernels.
    for proof in (TORCH_ATTENTION_PROOF, CACHED_ATTENTION_PROOF) if has_flash else ():
        try:
            proof.prove(device)
        except Exception as error:  # a missing or wrong kernel is no error, because torch has other kernels
            proof.take_slow(device)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            _log.warning("%s: %s instead of %s for attention: %s", device, proof.slow, proof.fast, reason)


def build_empty_decoder(
    config: DecoderConfig,
    num_tensors: int,
    checkpoint: Path,
    adapter: AdapterConfig | None = None,
    *,
    is_nf4: bool = False,
) -> LanguageModel:
    """Returns the model of an untrusted recipe on the meta device.

    Args:
        config: The decoder's shape in the recipe.
        num_tensors: The number of the decoder's tensors in the checkpoint.
        checkpoint: The checkpoint's directory.
        adapter: The adapters in the recipe.
        is_nf4: Whether the checkpoint has the linear layers of the blocks in NF4.

    Raises:
        UserError: The recipe has more layers than the checkpoint has tensors, or sizes that torch cannot represent.
    """
    # Building a layer takes time even on the meta device, so a recipe with a huge number of layers would hang here.
    if config.num_layers > num_tensors:
        raise UserError(
            f"{checkpoint} has a recipe of {numbered(config.num_layers, 'layers')}, but "
            f"{numbered(num_tensors, 'tensors')} of a decoder"
        )
    try:
        with torch.device("meta"):
            decoder = build_model(config)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise _another_decoder(checkpoint, error) from None
    if adapter is not None:
        attach_adapters(decoder, adapter, BaseFormat(is_nf4=is_nf4))
    elif is_nf4:
        use_nf4(decoder)
    return decoder


def _another_decoder(checkpoint: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:_MAX_REASON]
    return UserError(f"{checkpoint} does not match the decoder in its recipe: {reason}")


def require_tokenizer(tokenizer: Tokenizer | None, checkpoint: Path) -> Tokenizer:
    """Returns the tokenizer.

    Raises:
        UserError: There is no tokenizer.
    """
    if tokenizer is None:
        raise UserError(f"{checkpoint} was trained on tokens without a tokenizer; for text give one by --tokenizer")
    return tokenizer


def load_tokenizer(path: Path | None, manifest: Manifest, checkpoint: Path) -> Tokenizer | None:
    """Returns the tokenizer that a checkpoint was trained with; None if there was none and `path` is None.

    Args:
        path: The tokenizer's file or directory. None searches the run's directory, where an import stores it, for
            adapters that of their base, and then the corpus that the recipe names (`genesis.data.paths` documents where
            a corpus is searched).
        manifest: The checkpoint's manifest.
        checkpoint: The checkpoint's directory.

    Raises:
        UserError: The tokenizer is not found, or is a different one.
    """
    run_dir = RunDirectory.of(checkpoint).path
    wanted = manifest.identity.get("tokenizer_hash")
    if path is None and find_format(run_dir) is not None:
        path = run_dir
    if path is None and not wanted:
        return None
    if path is None and manifest.base is not None:
        base_dir = RunDirectory.of(find_base(checkpoint, manifest.base)[0]).path
        path = base_dir if wanted and has_tokenizer(base_dir, wanted) else None
    if path is None:
        found = (read_path(manifest.recipe, *keys) for keys in TOKENIZER_PATHS)
        named = next(filter(None, found), None)
        if named is None:
            raise UserError(f"the recipe in {checkpoint} names no corpus; give --tokenizer")
        path = find_path(named, run_dir, manifest.recipe, what="the tokenizer in", remedy="give --tokenizer")
    if not path.exists():
        raise UserError(f"the tokenizer of {checkpoint} was in {path}, which does not exist; give --tokenizer")
    tokenizer = open_tokenizer(path)
    if wanted and not has_hash(tokenizer, wanted):  # a corpus of ids has no tokenizer
        raise _another_tokenizer(path, tokenizer, checkpoint, wanted)
    return tokenizer


def read_config(path: Path) -> DecoderConfig:
    """Returns the shape of the decoder of a checkpoint or an export, without reading its weights.

    Args:
        path: As in `load_decoder`.

    Raises:
        UserError: There is no such model, or its shape cannot be read.
    """
    reference = read_reference(path)
    if reference.kind == "export":
        return _read_export_config(reference.path)[0]
    checkpoint = reference.find_checkpoint(level="quick")
    return _read_run_config(checkpoint, read_manifest(checkpoint))


def _read_run_config(checkpoint: Path, manifest: Manifest) -> DecoderConfig:
    return build_decoder_config(_find(manifest.recipe, "model", "decoder"), where=f"the recipe in {checkpoint}")


def _read_export_config(directory: Path) -> tuple[DecoderConfig, Family | None]:
    """Returns the shape, and the family; None for a model in genesis's own layout."""
    if (directory / CONFIG_NAME).exists():
        family, config = read_shape(directory)
        return config, family
    return build_decoder_config(read_json(directory / DECODER_NAME), where=str(directory / DECODER_NAME)), None


def find_decoder_config(path: str | Path) -> DecoderConfig:
    """Returns the shape of a run's newest checkpoint, of a checkpoint or of an export; reads no weights.

    Raises:
        UserError: There is no such model.
    """
    reference = read_reference(path)
    if reference.kind == "export":
        return _read_export_config(reference.path)[0]
    checkpoint = reference.find_checkpoint(level=None)
    return _read_run_config(checkpoint, read_manifest(checkpoint))


_Read = tuple[DecoderConfig, dict[str, Tensor], Tokenizer | None]


def _read_checkpoint(
    checkpoint: Path,
    manifest: Manifest,
    config: DecoderConfig,
    adapter: Path | None,
    shared: Mapping[str, Tensor],
) -> tuple[LanguageModel, Set[str]]:
    """Returns the decoder of a checkpoint, and the names of its tensors that are those of its base.

    Args:
        checkpoint: The checkpoint.
        manifest: Its manifest.
        config: The shape in its recipe.
        adapter: The directory of adapters in PEFT's format to add; None for those of the checkpoint alone.
        shared: Tensors of the base that are in memory.
    """
    adapter_config = read_adapter_config(manifest.recipe, f"the recipe in {checkpoint}")
    names = {name.removeprefix(DECODER_PREFIX) for name in manifest.tensors if name.startswith(DECODER_PREFIX)}
    in_base, is_nf4 = names, bool(list_nf4_tensors(manifest))
    if manifest.base is not None:
        in_base = names & {name.removeprefix(DECODER_PREFIX) for name in manifest.base.names}
    added: dict[str, Tensor] = {}
    if adapter is not None:
        if adapter_config is not None:
            raise UserError(f"{checkpoint} holds adapters itself: give its base, beside which others can be loaded")
        adapter_config = read_peft_config(adapter, find_names(config))
        decoder = build_empty_decoder(config, len(names), checkpoint, adapter_config, is_nf4=is_nf4)
        shapes = {name: tuple(tensor.shape) for name, tensor in decoder.named_parameters() if tensor.requires_grad}
        made = fingerprint(manifest, DECODER_PREFIX)
        added = read_adapters(adapter, adapter_config, find_names(config), shapes=shapes, base_fingerprint=made)
        in_base = names - added.keys()
    else:
        decoder = build_empty_decoder(config, len(names), checkpoint, adapter_config, is_nf4=is_nf4)
    read = [name for name in sorted(names - added.keys()) if name not in in_base or name not in shared]
    found = read_tensors(checkpoint, [DECODER_PREFIX + name for name in read])
    state = {name: shared[name] for name in in_base & shared.keys()} | added
    state |= {name.removeprefix(DECODER_PREFIX): tensor for name, tensor in found.items()}
    return _fill_decoder(decoder, state, checkpoint), in_base


def _read_export(directory: Path, tokenizer: Path | None, *, allows_scores: bool) -> _Read:
    proved = check_files(directory)
    for name in list_file_names():
        if (directory / name).exists() and name not in proved:
            raise UserError(f"{directory / name} did not exist when the export was proved; remove it")
    config, family = _read_export_config(directory)
    if not allows_scores:
        refuse_scores(config, directory)
    state = read_weights(directory, config, family)
    own = open_tokenizer(directory) if find_format(directory) is not None else None
    given = None if tokenizer is None else open_tokenizer(tokenizer)
    if own is not None and tokenizer is not None and given is not None and given.hash != own.hash:
        raise _another_tokenizer(tokenizer, given, directory, own.hash)
    return config, state, own or given


def _another_tokenizer(path: Path, tokenizer: Tokenizer, checkpoint: Path, wanted: str) -> UserError:
    return UserError(
        f"{path} holds tokenizer {tokenizer.hash[:16]}, but {checkpoint} was trained with {wanted[:16]}; "
        "give the right one by --tokenizer"
    )


def _find(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content
