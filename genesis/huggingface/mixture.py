"""Mixtures of experts in Hugging Face's layout: the keys of `config.json`, and the tensors of single experts.

Files hold a tensor for each expert, or a stack of all of them; the decoder has a stack for each of the three weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from genesis.base.errors import UserError
from genesis.model.mixture import MixtureConfig

TRAINING_FIELDS: Final = ("balance_loss", "z_loss", "balance_bias_rate")
"""Fields of `MixtureConfig` that training alone reads, so that no `config.json` has them."""
STACKS: Final = {
    "feed_forward.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "feed_forward.experts.up": "mlp.experts.{}.up_proj.weight",
    "feed_forward.experts.down": "mlp.experts.{}.down_proj.weight",
}
"""The decoder's stack, to the name of one expert's weight."""
ROUTER: Final = {"feed_forward.router.weight": "mlp.gate.weight"}
SHARED: Final = {
    f"feed_forward.shared.{name}.weight": f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")
}
SHARED_GATE: Final = {"feed_forward.shared_gate": "mlp.shared_expert_gate.weight"}
_METHOD: Final = "topk_method"
_METHODS: Final = ("greedy", "group_limited_greedy")
_MAX_EXPERTS: Final = 100_000
_DEFAULTS: Final[dict[str, Any]] = {one.name: one.default for one in fields(MixtureConfig)}


@dataclass(frozen=True)
class MixtureTable:
    """The keys with which a family describes its mixtures.

    Args:
        num_experts: Keys of the number of experts; the first that is present counts, and all of them are written.
        ffn_dim: Key of the width inside an expert.
        dense: How layers without experts are listed: `first` by the number of first ones, `step` by a distance and a
            list; None if every layer is a mixture.
        shared_width: Key of the width of the shared expert, which has a gate; None if there is no such key.
        shared_count: Key of the number of shared experts, at least one, each as wide as a routed one; None if there is
            no such key.
        normalized: Key that switches the normalisation of weights, or its constant value.
        has_bias: Whether scores are sigmoids, with a bias and groups; otherwise they are a softmax.
        has_greedy_groups: Whether scores are a softmax with groups, each of which has the score of its best expert, if
            `topk_method` asks for them.
        default_experts: The number of experts of a `config.json` without any of the keys.
        has_biases: Whether router and experts have biases.
        gate_limit: Key of the limit of the clamped activation; None if the activation is not clamped.
    """

    num_experts: tuple[str, ...]
    ffn_dim: str
    dense: Literal["first", "step"] | None = None
    shared_width: str | None = None
    shared_count: str | None = None
    normalized: str | bool = "norm_topk_prob"
    has_bias: bool = False
    has_greedy_groups: bool = False
    default_experts: int | None = None
    has_biases: bool = False
    gate_limit: str | None = None

    def find_differences(self, config: MixtureConfig, num_layers: int) -> list[str]:
        """Returns what these keys cannot describe of a mixture, as a text for each option."""
        if config.shared_ffn_dim is None and (self.shared_count or self.shared_width):
            # transformers expects the weights of shared experts, even if there are none of them.
            others = self.find_differences(replace(config, shared_ffn_dim=config.ffn_dim), num_layers)
            wanted = "a multiple of ffn_dim" if self.shared_count else "a width"
            return [f"feed_forward.shared_ffn_dim is None, not {wanted}", *others]
        unread = [*TRAINING_FIELDS]
        if config.num_dense_layers == 0 and config.mixture_every == 1:
            unread.append("dense_ffn_dim")  # no layer has it
        plain = replace(config, **{name: _DEFAULTS[name] for name in unread})
        try:
            content = self.write(config, num_layers) | {"num_hidden_layers": num_layers}
            found = MixtureConfig(**self.read(Path("config.json"), content))
        except UserError as error:
            return [str(error)]
        names = (one.name for one in fields(config))
        return [
            f"feed_forward.{name} is {getattr(plain, name)!r}, not {getattr(found, name)!r}"
            for name in names
            if getattr(plain, name) != getattr(found, name)
        ]

    def read(self, path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of `MixtureConfig`.

        Raises:
            UserError: A key is missing or has a value that the decoder cannot represent.
        """
        key = next((key for key in self.num_experts if content.get(key) is not None), self.num_experts[0])
        content = {**content, key: content.get(key, self.default_experts)}
        found: dict[str, Any] = {
            "num_experts": _read_count(path, content, key),
            "top_k": _read_count(path, content, "num_experts_per_tok"),
            "ffn_dim": _read_count(path, content, self.ffn_dim),
            "has_normalized_weights": self._read_normalized(path, content),
        }
        if self.shared_width is not None:
            found |= {"shared_ffn_dim": _read_count(path, content, self.shared_width), "has_shared_gate": True}
        if self.shared_count is not None:
            found["shared_ffn_dim"] = _read_count(path, content, self.shared_count) * found["ffn_dim"]
        if self.has_bias or self.has_greedy_groups:
            found["routed_scale"] = _read_number(
                path, {"routed_scaling_factor": 1.0, **content}, "routed_scaling_factor"
            )
        if self.has_bias:
            found |= {"scores": "sigmoid", "has_balance_bias": True}
        if self.has_bias or (self.has_greedy_groups and self._read_is_grouped(path, content)):
            for name, key in (("num_groups", "n_group"), ("top_groups", "topk_group")):
                found[name] = _read_count(path, {**content, key: content.get(key) or 1}, key)
        if self.has_biases:
            found["has_biases"] = True
        if self.gate_limit is not None:
            found["gate_limit"] = _read_number(path, content, self.gate_limit)
        if self.has_greedy_groups and found.get("top_groups", 1) < found.get("num_groups", 1):
            found["group_top"] = 1
        return found | self._read_dense(path, content)

    @staticmethod
    def _read_is_grouped(path: Path, content: Mapping[str, Any]) -> bool:
        method = content.get(_METHOD)
        if method not in _METHODS:
            raise UserError(f"{path}: {_METHOD} is {method!r}; it must be {' or '.join(map(repr, _METHODS))}")
        return bool(method == _METHODS[1])

    def _read_normalized(self, path: Path, content: Mapping[str, Any]) -> bool:
        if isinstance(self.normalized, bool):
            return self.normalized
        value = content.get(self.normalized, False)
        if type(value) is not bool:
            raise UserError(f"{path}: {self.normalized} is {value!r}; it must be true or false")
        return value

    def _read_dense(self, path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        if self.dense is None:
            return {}
        if self.dense == "first":
            first, every = content.get("first_k_dense_replace") or 0, 1
        else:
            listed = content.get("mlp_only_layers") or []
            first, every = len(listed) if isinstance(listed, list) else 0, content.get("decoder_sparse_step", 1)
            if listed != list(range(first)):
                raise UserError(f"{path}: mlp_only_layers is {listed!r}; the layers without experts must be the first")
        for name, value in (("first_k_dense_replace", first), ("decoder_sparse_step", every)):
            if type(value) is not int or value < (name != "first_k_dense_replace"):
                raise UserError(f"{path}: {name} is {value!r}; it must be a whole number")
        if first == 0 and every == 1:
            return {}
        width = _read_count(path, content, "intermediate_size")
        return {"num_dense_layers": first, "mixture_every": every, "dense_ffn_dim": width}

    def write(self, config: MixtureConfig, num_layers: int) -> dict[str, Any]:
        """Returns the keys of `config.json`."""
        keys: dict[str, Any] = dict.fromkeys(self.num_experts, config.num_experts)
        keys |= {"num_experts_per_tok": config.top_k, self.ffn_dim: config.ffn_dim, "output_router_logits": False}
        if isinstance(self.normalized, str):
            keys[self.normalized] = config.has_normalized_weights
        if self.shared_width is not None and config.shared_ffn_dim is not None:
            keys[self.shared_width] = config.shared_ffn_dim
        if self.shared_count is not None:
            # A width that is no multiple is read back as another one, and so refused.
            keys[self.shared_count] = (config.shared_ffn_dim or 0) // config.ffn_dim
        if self.has_bias or self.has_greedy_groups:
            keys |= {"routed_scaling_factor": config.routed_scale}
            keys |= {"n_group": config.num_groups, "topk_group": config.top_groups}
        if self.gate_limit is not None:
            keys[self.gate_limit] = config.gate_limit
        if self.has_greedy_groups:
            keys[_METHOD] = _METHODS[config.top_groups < config.num_groups]
        if self.dense == "first":
            keys["first_k_dense_replace"] = config.num_dense_layers
        if self.dense == "step":
            keys["mlp_only_layers"] = list(range(min(config.num_dense_layers, num_layers)))
            keys["decoder_sparse_step"] = config.mixture_every
        if self.dense is not None:
            keys["intermediate_size"] = config.dense_ffn_dim or config.ffn_dim
        return keys


def without_dense(block_tensors: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of a block's tensors without those of its dense feed-forward part."""
    return {ours: theirs for ours, theirs in block_tensors.items() if not ours.startswith("feed_forward.")}


def _read_number(path: Path, content: Mapping[str, Any], key: str) -> float:
    value: Any = content.get(key)
    if type(value) not in (int, float):
        raise UserError(f"{path}: {key} is {value!r}; it must be a number")
    return float(value)


def _read_count(path: Path, content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if type(value) is not int or not 1 <= value <= _MAX_EXPERTS:
        raise UserError(f"{path}: {key} is {value!r}; it must be a whole number from 1 to {_MAX_EXPERTS:,}")
    return value
