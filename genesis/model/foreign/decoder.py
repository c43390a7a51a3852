"""A causal language model of transformers, trained as it is: its own classes compute, with documents kept apart.

B  sequences of a micro-batch     S  tokens of a sequence     D  model width     V  vocabulary     P  padded rows
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils import logging

from genesis.base.errors import UserError, blaming, numbered
from genesis.model.attend.metadata import document_offsets as find_offsets
from genesis.model.attend.metadata import document_positions
from genesis.model.foreign.attention import NAME, Documents, attending_to
from genesis.model.foreign.config import TransformersConfig
from genesis.model.foreign.proof import Subject, prove
from genesis.model.language_model import BodyShape, LanguageModel, project
from genesis.model.part import EMBEDDINGS, HEAD, MATRICES, VECTORS, ParameterGroup, Statistics
from genesis_callbacks.base.json_text import MAX_LIST, find_longest_list

T = TypeVar("T")

_ROWS: Final = "set model.decoder.body.init_args.documents to rows, which gives each document a padded row of its own"
_FLOAT: Final = "__float__"
"""The only key of an object that stands for a number."""
_MOST: Final = {
    re.compile(r"(?:^|_)(?:depth|n_?(?:layer|block)s?|(?:num_)?(?:.*_)?(?:layers|blocks))$"): 1_000,
    re.compile(r"(?:^|_)(?:n_?(?:head|expert|group)s?|num_(?!.*embeddings).*)$"): 1 << 17,
}
"""The most parts of a kind by names of counts; other names are those of widths, lengths, and ids."""
_ROUTER: Final = "router"
"""The name of the statistics of all routers together."""


def own_logits(hidden: Tensor, output_weight: Tensor) -> Tensor:
    """Stands for the model's own logits, when it is given as the head of a forward."""
    raise AssertionError("the forward computes them")


def read_config(content: Mapping[str, Any]) -> Any:
    """Returns transformers' configuration of a model that can be trained, from the content of its `config.json`.

    Raises:
        UserError: transformers has no such causal model, or one whose language model cannot be trained alone.
    """
    # A warning quotes what a configuration has, once for each time that it is read; the proofs find what counts.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers'
    given = dict(content)
    kind = given.pop("model_type")
    _check_counts(content, f"config.json of {kind}")
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"transformers has no model_type {kind!r}, and code that a model brings is never run: install a version of "
            "transformers that has it"
        )
    with blaming(f"config.json of {kind}", "correct it"):
        config = CONFIG_MAPPING[kind].from_dict(_decode_floats(given))
    if config.is_encoder_decoder:
        raise UserError(
            f"{kind} has an encoder and a decoder, and here each token is predicted from those before it alone: choose "
            "a model without an encoder, or train this one with transformers itself"
        )
    is_alone = config.get_text_config(decoder=True) is config
    if type(config) not in (MODEL_FOR_CAUSAL_LM_MAPPING if is_alone else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        raise UserError(
            f"{kind} is no causal language model of transformers, and none beside a tower of images, which alone can "
            "be trained: choose another"
        )
    if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        raise UserError(
            f"{kind} has layers that read keys and values of other layers from a cache, which training has not: choose "
            "a model without num_kv_shared_layers, or train this one with transformers itself"
        )
    return config


def _check_counts(content: Any, where: str) -> None:
    """Checks the numbers of parts of which transformers makes one after the other.

    Raises:
        UserError: There are more than any model has.
    """
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        if (longest := find_longest_list(value)) > MAX_LIST:
            raise UserError(
                f"{where}: {key} has {numbered(longest, 'values')}; at most {MAX_LIST:,} are read: correct it"
            )
        most = next((most for names, most in _MOST.items() if names.search(str(key))), None)
        if type(value) is int and most is not None and value > most:
            raise UserError(f"{where}: {key} is {str(value)[:20]}; at most {most:,} are read: correct it")
        _check_counts(value, where)


def _decode_floats(value: Any) -> Any:
    """Returns JSON with numbers for what transformers writes for numbers without a form in JSON, such as infinity."""
    if isinstance(value, Mapping):
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        return {key: _decode_floats(one) for key, one in value.items()}
    return [_decode_floats(one) for one in value] if isinstance(value, list) else value


def choose_auto(config: Any) -> Any:
    """Returns transformers' class that builds and opens the models of a configuration."""
    is_alone = config.get_text_config(decoder=True) is config
    return AutoModelForCausalLM if is_alone else AutoModelForImageTextToText


def find_shape(config: Any) -> BodyShape:
    """Returns the fields of a decoder that a configuration of transformers has under its own names."""
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None) or 1 << 20
    return BodyShape(
        text.hidden_size,
        text.num_hidden_layers,
        text.vocab_size,
        min(longest, *_list_fixed_lengths(text, longest)),
        bool(getattr(config, "tie_word_embeddings", False)),
    )


def _list_fixed_lengths(config: Any, longest: int) -> list[int]:
    """Returns up to which length rotary frequencies do not depend on the longest document of a batch.

    With `longrope` and `dynamic`, transformers chooses them by that one, so that a longer document would change others.
    """
    given = getattr(config, "rope_parameters", None) or {}
    of_layers = [given] if "rope_type" in given else [one for one in given.values() if isinstance(one, Mapping)]
    own = getattr(config, "original_max_position_embeddings", None)
    return [longest] + [
        one.get("original_max_position_embeddings") or own or longest
        for one in of_layers
        if one.get("rope_type") in ("longrope", "dynamic")
    ]


def _build_theirs(body: TransformersConfig, config: Any) -> Any:
    # Eager code is right for any rule if each row is one document, and every model has it.
    attention = NAME if body.documents == "packed" else "eager"
    options = {"dtype": torch.float32, "experts_implementation": body.experts, "trust_remote_code": False}
    with blaming(f"config.json of {config.model_type}", "correct it"):
        try:
            return choose_auto(config).from_config(config, attn_implementation=attention, **options)
        except KeyError as error:
            if error.args != (NAME,):
                raise
            raise UserError(
                f"the attention of {config.model_type} asks no interface of transformers, so that it cannot keep "
                f"packed documents apart: {_ROWS}"
            ) from error


class TransformersDecoder(LanguageModel):
    """A model of transformers; see `TransformersConfig`. Its tensors have transformers' names behind `model.`.

    Of a model that also reads images, the language model is trained. The other towers are in every checkpoint, frozen.

    Args:
        body: Its configuration.
        shape: What the recipe's decoder says about it.

    Raises:
        UserError: The model has another shape, or one that cannot be trained.
    """

    router_names = ("router", "gate", "shared_expert_gate")

    def __init__(self, body: TransformersConfig, shape: BodyShape) -> None:
        config = read_config(body.config)
        self.theirs = config.get_text_config(decoder=True)
        super().__init__(self.theirs.num_hidden_layers, shape.max_seq_len)
        self.body_config = body
        _check_shape(shape, find_shape(config))
        self.model = model = _build_theirs(body, config)
        self._names = {module: name for name, module in self.named_modules()}
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UserError(
                f"the output weight of {config.model_type} has a bias, which the losses do not add: choose another "
                "model, or train this one with transformers itself"
            )
        table.padding_idx = None  # else its row gets no gradient as an input; labels decide what is padding
        self._table = self._names[table]
        self._head = self._names[head]
        if head.weight is table.weight:  # one name for one tensor: allocation, FSDP2 and checkpoints would see two
            parent, _, last = self._head.rpartition(".")
            owner = self.get_submodule(parent)
            delattr(owner, last)
            vars(owner)[last] = _TiedHead(table)
            self._head = self._table
        body = model.get_decoder()
        if body is model:  # of Llama 4's text model, whose class names another module
            body = getattr(model, "model", model)
        self._body = self._names[body]
        self._blocks_name = self._find_blocks()
        self._of_text = ("",) if self.theirs is config else (f"{self._body}.", f"{self._head}.", f"{self._table}.")
        for name, parameter in self.named_parameters():
            if not name.startswith(self._of_text):  # text does not reach it
                parameter.requires_grad_(False)
        self._takes = set(inspect.signature(self.get_submodule(self._body).forward).parameters)
        self._scale, self.softcap = _find_head_form(self.theirs)
        self._mark_float32()

    def _find_blocks(self) -> str:
        body = self.get_submodule(self._body)
        kinds = {*(self.model._no_split_modules or ()), *(getattr(body, "_no_split_modules", None) or ())}
        found: list[str] = [
            self._names[module]
            for module in body.modules()
            if isinstance(module, nn.ModuleList) and len(module) and all(type(one).__name__ in kinds for one in module)
        ]
        if len(found) != 1:
            raise UserError(
                f"{type(self.model).__name__} has {len(found)} lists of blocks, and one is needed, which is sharded "
                "and recomputed block by block: train it with transformers itself"
            )
        (name,) = found
        return name

    def _mark_float32(self) -> None:
        """Makes the modules that transformers keeps in float32, and all buffers, keep their dtype when it is cast."""
        kept = {*(self.model._keep_in_fp32_modules or ()), *(self.model._keep_in_fp32_modules_strict or ())}
        for name, module in self.named_modules():
            own = [f"{name}.{one}" for one, _ in module.named_parameters(recurse=False)]
            is_kept = bool(own) and all(any(re.search(rf"\.{key}(\.|$)", one) for key in kept) for one in own)
            if is_kept:
                module.keeps_float32 = True  # read by strategies, as that of a `Part`
            if is_kept or any(True for _ in module.buffers(recurse=False)):
                vars(module)["_apply"] = partial(_apply_precisely, module, is_kept)

    def list_float32(self) -> set[str]:
        """Returns the names of the parameters that stay in float32, and of the buffers that a checkpoint has."""
        buffers = {name for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        return super().list_float32() | (buffers & self.state_dict().keys())

    # ---- the modules

    @property
    def blocks_name(self) -> str:
        """The canonical name of the module whose children are the blocks, under their numbers."""
        return self._blocks_name

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The weight that turns hidden states into logits."""
        weight: Tensor = self.get_submodule(self._head).weight  # type: ignore[assignment]
        return weight

    @property
    def idle_modules(self) -> list[nn.Module]:
        """The towers that text does not reach; of a list, which has no forward, each module."""
        idle = {one for name, one in self.named_parameters() if not name.startswith(self._of_text)}
        found = []
        for module in self.modules():
            own = set(module.parameters())
            if own and own <= idle and not isinstance(module, nn.ModuleList):
                found.append(module)
                idle -= own
        return found

    def draws_random_numbers(self, block: nn.Module) -> bool:
        """Returns whether the block has dropout, of attention or in layers of its own or of adapters."""
        of_attention = any("dropout" in key or "pdrop" in key for key, value in self.theirs.to_dict().items() if value)
        return of_attention or any(part.draws_random_numbers for part in self.parts.values())

    # ---- values

    def init_weights(self, seed: int) -> None:
        """Refuses a start without weights.

        Raises:
            UserError: Always: transformers' own initial values would depend on how the model is sharded.
        """
        raise UserError(
            "a model of transformers starts from weights: give --ckpt_path, a checkpoint that `genesis import --as "
            "transformers` writes"
        )

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Computes rotary frequencies, scales of embeddings and the like by transformers' own code."""
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:  # weights were assigned, without an allocation
                    module.register_buffer(
                        name,
                        torch.empty_like(buffer, device=self.output_weight.device),
                        persistent=name not in module._non_persistent_buffers_set,
                    )
        saved = self.model.state_dict().keys()
        for parameter in self.model.parameters():
            parameter._is_hf_initialized = True
        for name, buffer in self.model.named_buffers():
            buffer._is_hf_initialized = name in saved
        for module in self.model.modules():
            vars(module).pop("_is_hf_initialized", None)
        self.model.initialize_weights()

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the groups by rule: tables, the head and routers, vectors and biases, and all other matrices."""
        groups = {name: self._choose_group(name, parameter) for name, parameter in self.named_parameters()}
        for name, part in self.parts.items():  # adapters
            groups |= {f"{name}.{own}": group for own, group in part.parameter_groups().items()}
        return groups

    def _choose_group(self, name: str, parameter: Tensor) -> ParameterGroup:
        path, _, last = name.rpartition(".")
        if path == self._table:
            return EMBEDDINGS
        if parameter.ndim not in (2, 3) or "bias" in last or "conv" in path:
            return VECTORS
        is_router = path.rpartition(".")[2] in self.router_names or "Router" in type(self.get_submodule(path)).__name__
        return HEAD if path == self._head or is_router else MATRICES

    # ---- a forward

    def forward(
        self,
        input_ids: Int64[Tensor, "B S"],
        *,
        document_ids: Int32[Tensor, "B S"] | None = None,
        document_offsets: Int32[Tensor, " num_documents+1"] | None = None,
        head: Callable[[Tensor, Tensor], T] = project,  # type: ignore[assignment]  # a default cannot bind T
        has_statistics: bool = False,
        counted: Bool[Tensor, "B S"] | None = None,
    ) -> T | tuple[T, dict[str, Statistics]]:
        """Returns the result of `head`; see `LanguageModel.forward`. `own_logits` gives the model's own logits."""
        if document_ids is None:
            document_ids = torch.zeros_like(input_ids, dtype=torch.int32)
        offsets = find_offsets(document_ids) if document_offsets is None else document_offsets
        documents = Documents(document_ids, document_positions(document_ids), offsets)
        asks_loss = has_statistics and self.body_config.router_loss > 0.0
        options = {"use_cache": False, "output_router_logits": True if asks_loss else None}
        options = {name: value for name, value in options.items() if value is not None}
        run = self.model if head is own_logits else self.get_submodule(self._body)
        if self.body_config.documents == "packed":
            with attending_to(documents):
                ones = torch.ones_like(input_ids)
                out = self._call(run, input_ids, documents.positions, attention_mask=ones, **options)
            found = out.logits if head is own_logits else out.last_hidden_state
        else:
            rows = _Rows.of(documents)
            out = self._call(run, rows.spread(input_ids), rows.positions, **options)
            found = rows.gather(out.logits if head is own_logits else out.last_hidden_state)
            counted = None if counted is None else rows.spread(counted)
        if head is own_logits:
            logits: T = found
            return logits
        if self._scale != 1.0:
            found = found * self._scale
        result = head(found, self.output_weight)
        if head is project and self.softcap is not None:
            whole: Any = result
            result = self.softcap * torch.tanh(whole / self.softcap)  # type: ignore[assignment]  # logits
        if not has_statistics:
            return result
        return result, self._measure_routers(out.router_logits, counted) if asks_loss else {}

    def _call(self, run: Any, input_ids: Tensor, positions: Tensor, **options: Any) -> Any:
        if "position_ids" in self._takes:
            options["position_ids"] = positions
        return run(input_ids=input_ids, **options)

    def _measure_routers(self, logits: Any, counted: Tensor | None) -> dict[str, Statistics]:
        measure = vars(sys.modules[type(self.model).__module__]).get("load_balancing_loss_func")
        # The classes of models that also read images leave the numbers to the configuration of the language model.
        owners = (self.model, self.theirs)
        num_experts, top_k = (
            next((getattr(one, name) for one in owners if hasattr(one, name)), None)
            for name in ("num_experts", "num_experts_per_tok")
        )
        if measure is None or not logits or num_experts is None or top_k is None:
            raise UserError(
                f"body.router_loss is {self.body_config.router_loss}, and transformers has no auxiliary loss for "
                f"{self.theirs.model_type}: set it to 0"
            )
        loss = measure(logits, num_experts, top_k, counted)
        num_tokens = logits[0].shape[0] if counted is None else counted.sum()
        return {_ROUTER: Statistics({}, (self.body_config.router_loss * loss * num_tokens).float())}

    def prove(self, seq_len: int) -> None:
        """Checks documents, order and head on a row of `seq_len` tokens. All ranks call it together.

        Raises:
            UserError: Training would compute something else than the model.
        """
        remedy = _ROWS
        if self.body_config.documents == "rows":
            remedy = "each document has a row of its own already, train it with transformers itself"
        prove(Subject(self, self.theirs.model_type, self.theirs.vocab_size, own_logits, remedy), seq_len)

    # ---- costs

    @property
    def flops_per_token(self) -> int:
        """An estimate: six for each weight in a matrix that a token multiplies."""
        groups = self.parameter_groups()
        in_matrices = sum(
            one.numel()
            for name, one in self.named_parameters()
            if groups[name] not in (VECTORS, EMBEDDINGS) and name.startswith(self._of_text)
        )
        tied = self.output_weight.numel() if self._head == self._table else 0
        return 6 * (in_matrices + tied - self.num_inactive_parameters)

    def context_flops_per_token(self, context: int) -> int:
        """Returns an estimate: the products of all layers' heads, within a window where the model has one."""
        config, total = self.theirs, 0
        heads = getattr(config, "num_attention_heads", 0)
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
        window = getattr(config, "sliding_window", None) or context
        for kind in getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers:
            if "attention" in kind and "linear" not in kind:
                total += 12 * width * (min(context, window) if kind == "sliding_attention" else context)
        return total

    @property
    def num_inactive_parameters(self) -> int:
        """The weights of the stacks of experts that do not see a token, by the configuration."""
        stacks = [one for name, one in self.named_parameters() if one.ndim == 3 and name.startswith(self._of_text)]
        active = getattr(self.theirs, "num_experts_per_tok", None)
        return sum(one.numel() // len(one) * max(0, len(one) - active) for one in stacks) if active else 0

    def name_part(self, parameter: str) -> str:
        """Returns the name of the block's module that has the parameter, `embedding`, `output` or `norms`."""
        path = parameter.rpartition(".")[0]
        if path in (self._table, self._head):
            return "embedding" if path == self._table else "output"
        if "norm" in path:
            return "norms"
        inner = path.removeprefix(f"{self._blocks_name}.")
        return inner.split(".")[1] if inner != path and "." in inner else inner


class _TiedHead(SimpleNamespace):
    """The output layer of a model whose output weight is its table: no module, so that the tensor has one name."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__(table=table)

    @property
    def weight(self) -> Any:
        """The table."""
        return self.table.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits."""
        return linear(hidden, self.weight)


class _Rows:
    """One padded row for each document.

    Args:
        index: The token of the flattened batch at each position of the rows; any token where there is padding.
        place: The position in the flattened rows of each token.
        shape: The shape of the batch.
    """

    def __init__(self, index: Int64[Tensor, "P L"], place: Int64[Tensor, " B*S"], shape: torch.Size) -> None:
        self._index, self._place, self._shape = index, place, shape
        self.positions = torch.arange(index.shape[1], device=index.device).expand_as(index)

    @classmethod
    def of(cls, documents: Documents) -> "_Rows":
        starts, lengths = documents.offsets[:-1].long(), documents.offsets.diff().long()
        longest = int(lengths.max())
        column = torch.arange(longest, device=starts.device)
        is_token = column < lengths[:, None]
        # A document that is a single token is one row of it: padding repeats the document's last token.
        index = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
        return cls(index, is_token.flatten().nonzero().flatten(), documents.ids.shape)

    def spread(self, values: Tensor) -> Tensor:
        """Returns the values of the tokens in the rows; padding counts nowhere."""
        found = values.flatten()[self._index]
        if values.dtype == torch.bool:
            is_token = torch.zeros(found.numel(), dtype=torch.bool, device=found.device)
            is_token[self._place] = True
            return found & is_token.view_as(found)
        return found

    def gather(self, x: Float[Tensor, "P L D"]) -> Float[Tensor, "B S D"]:
        """Returns the tokens of the rows in the order of the batch."""
        return x.flatten(0, 1)[self._place].view(*self._shape, -1)


def _apply_precisely(
    module: nn.Module, is_kept: bool, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Does what `module._apply` does, but for casts of buffers, and of parameters that are kept in float32."""
    precise = {
        id(one) for one in (*module.buffers(recurse=False), *(module.parameters(recurse=False) if is_kept else ()))
    }

    def apply(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return tensor.to(moved.device) if id(tensor) in precise and moved.dtype != tensor.dtype else moved

    applied: nn.Module = type(module)._apply(module, apply, recurse)  # type: ignore[no-untyped-call]  # torch's
    return applied


def _check_shape(given: BodyShape, found: BodyShape) -> None:
    for name, value, wanted in zip(BodyShape._fields, given, found, strict=True):
        if value != wanted and not (name == "max_seq_len" and value < wanted):
            raise UserError(
                f"model.decoder.{name} is {value}, and the config of its body has {wanted}: take the recipe of the "
                "import"
            )


def _find_head_form(config: Any) -> tuple[float, float | None]:
    """Returns the factor of hidden states, and the bound of logits; `prove` compares them with the model's own."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    names = ("final_logit_softcapping", "logits_soft_cap")
    return scale, next((float(cap) for name in names if (cap := getattr(config, name, None))), None)
