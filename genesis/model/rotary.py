"""Rotary positions: the angles by which queries and keys turn, and their scaling for longer contexts.

B  sequences of a micro-batch     S  tokens of a sequence     F  frequencies, half of the rotated dimensions of a head
H  heads                          E  width of a head
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genesis.base.errors import UserError, numbered
from genesis.model.part import check_counts

_NEEDED: Final = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_seq_len"),
    "linear": (),
    "dynamic": ("original_seq_len",),
    "yarn": ("original_seq_len",),
    "longrope": ("original_seq_len", "short_factors", "long_factors"),
}
"""The kinds of scaling, and the options that each needs beside its factor."""
_ALLOWED: Final = {
    "yarn": ("beta_fast", "beta_slow", "has_whole_bounds", "attention_factor"),
    "longrope": ("attention_factor",),
}
"""The other options that a kind has."""
_BY_LENGTH: Final = ("dynamic", "longrope")
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary wavelengths for contexts beyond the original one.

    The kinds have the names and the arithmetic that transformers has. `llama3`: wavelengths above `original_seq_len /
    low_freq_factor` are multiplied by `factor`, those below `original_seq_len / high_freq_factor` are kept, and between
    the two the frequency is interpolated. `linear`: all are multiplied by `factor`. `yarn`: those that turn less than
    `beta_slow` times in the original context are multiplied, those that turn more than `beta_fast` times are kept, and
    between the two frequencies are mixed by the number of their dimension. `dynamic`: in a text that is longer than the
    original context, the base of the wavelengths grows with the length of the text. `longrope`: each wavelength has a
    factor of its own, another one in texts that are longer than the original context.

    With `dynamic` and `longrope` a text is a document, or a row of a cache with the tokens that it has so far: what a
    cache holds of a text while it is short stays as it is when the text grows longer.

    Args:
        factor: The factor of long wavelengths, at least 1. `longrope` derives its default `attention_factor` from it.
        low_freq_factor: The original context divided by the shortest wavelength that `llama3` multiplies by `factor`.
        high_freq_factor: The original context divided by the longest wavelength that `llama3` keeps.
        original_seq_len: The original context in tokens; None for `linear` alone.
        kind: `llama3`, `linear`, `dynamic`, `yarn` or `longrope`.
        beta_fast: The least number of turns of wavelengths that `yarn` keeps; None for 32.
        beta_slow: The greatest number of turns of wavelengths that `yarn` multiplies; None for 1.
        has_whole_bounds: Whether the bounds between which `yarn` mixes are rounded to whole dimensions.
        attention_factor: The factor of rotated queries and keys; None for 0.1 ln(`factor`) + 1 with `yarn`, and the
            root of 1 + ln(`factor`) / ln(`original_seq_len`) with `longrope`.
        short_factors: The factor of each wavelength with `longrope`, from the shortest to the longest.
        long_factors: The same for texts that are longer than the original context.

    Raises:
        UserError: A value is invalid, is missing, or belongs to another kind.

    References:
        Peng et al., YaRN, arXiv:2309.00071, section 3. Ding et al., LongRoPE, arXiv:2402.13753.
    """

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_seq_len: int | None = None
    kind: str = "llama3"
    beta_fast: float | None = None
    beta_slow: float | None = None
    has_whole_bounds: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_counts(self)
        if self.kind not in _NEEDED:
            raise UserError(f"kind is {self.kind!r}: it must be {', '.join(map(repr, _NEEDED))}")
        if not 1.0 <= self.factor < math.inf:
            raise UserError(f"factor is {self.factor}: it must be at least 1 and finite")
        needed = _NEEDED[self.kind]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in needed and value is None:
                raise UserError(f"{field.name} is missing: the kind {self.kind!r} needs it")
            is_known = field.name in ("kind", *needed, *_ALLOWED.get(self.kind, ()))
            if not is_known and value != field.default:
                raise UserError(f"{field.name} is {value!r}, which the kind {self.kind!r} does not have: remove it")
        self._check_pair("low_freq_factor", "high_freq_factor", self.low_freq_factor, self.high_freq_factor)
        slow, fast = self._betas
        if not 0.0 < slow == fast < math.inf:  # some models have one number of turns for both
            self._check_pair("beta_slow", "beta_fast", slow, fast)
        if self.attention_factor is not None and not 0.0 < self.attention_factor < math.inf:
            raise UserError(f"attention_factor is {self.attention_factor}: it must be above 0 and finite")
        if self.kind == "longrope" and self.original_seq_len == 1:
            raise UserError("original_seq_len is 1: it must be at least 2")
        for name in ("short_factors", "long_factors"):
            self._check_factors(name)

    @staticmethod
    def _check_pair(low_name: str, high_name: str, low: float | None, high: float | None) -> None:
        if low is not None and high is not None and not 0.0 < low < high < math.inf:
            raise UserError(f"{low_name} {low} and {high_name} {high} must be above 0, the latter the larger")

    def _check_factors(self, name: str) -> None:
        factors: Any = getattr(self, name)
        if factors is None:
            return
        is_list = isinstance(factors, list | tuple) and all(type(one) in (int, float) for one in factors)
        if not is_list or not all(0.0 < one < math.inf for one in factors):
            raise UserError(f"{name} is {factors!r}: it must be a list of finite numbers above 0")
        object.__setattr__(self, name, tuple(map(float, factors)))  # YAML and JSON give lists

    @property
    def _betas(self) -> tuple[float, float]:
        """The numbers of turns between which `yarn` mixes frequencies, the smaller one first."""
        slow, fast = self.beta_slow, self.beta_fast
        return _BETA_SLOW if slow is None else slow, _BETA_FAST if fast is None else fast

    @property
    def reads_length(self) -> bool:
        """Whether the angles of a token depend on the length of its text."""
        return self.kind in _BY_LENGTH

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        if self.kind == "longrope":
            assert self.original_seq_len is not None
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_seq_len))
        return 1.0

    def check(self, num_frequencies: int) -> None:
        """Checks that there is a factor for each of so many wavelengths.

        Raises:
            UserError: There are more or fewer factors.
        """
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != num_frequencies:
                raise UserError(
                    f"rope_scaling.{name} has {numbered(len(factors), 'factors')}: it must have one for each of the "
                    f"{numbered(num_frequencies, 'wavelengths')}, which are half of the rotated dimensions of a head"
                )

    def scale(
        self, periods: Float[Tensor, " F"], theta: float, lengths: Int64[Tensor, "B T"]
    ) -> Float[Tensor, " F"] | Float[Tensor, "B T F"]:
        """Returns the scaled rotary frequencies in radians per token.

        Args:
            periods: The wavelengths divided by 2 pi, in tokens, the shortest first: powers of `theta`.
            theta: The base of the wavelengths.
            lengths: The number of tokens of each token's text, read if `reads_length`.
        """
        frequencies = 1.0 / periods
        if self.kind == "linear":
            return frequencies / self.factor
        assert self.original_seq_len is not None
        if self.kind == "llama3":
            assert self.low_freq_factor is not None
            assert self.high_freq_factor is not None
            turns = frequencies * (self.original_seq_len / (2.0 * math.pi))  # wavelengths per original context
            span = self.high_freq_factor - self.low_freq_factor
            kept_share = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
            return torch.lerp(frequencies / self.factor, frequencies, kept_share)
        if self.kind == "yarn":
            kept_share = 1.0 - self._ramp(periods, theta, self.original_seq_len)
            return 1.0 / (self.factor * periods) * (1.0 - kept_share) + frequencies * kept_share
        if self.kind == "longrope":
            is_long = (lengths > self.original_seq_len).unsqueeze(-1)
            short, long = (periods.new_tensor(one) for one in (self.short_factors, self.long_factors))
            return 1.0 / (torch.where(is_long, long, short) * periods)
        longest = lengths.clamp(min=self.original_seq_len).unsqueeze(-1).float()
        stretch = self.factor * longest / self.original_seq_len - (self.factor - 1.0)
        index = torch.arange(len(periods), device=periods.device)
        # The base of dimension pair i of n grows by stretch^(n / (n - 1)), and its frequency falls by the i/n of that.
        return frequencies * stretch ** (-index / max(len(periods) - 1, 1))

    def _ramp(self, periods: Float[Tensor, " F"], theta: float, original_seq_len: int) -> Float[Tensor, " F"]:
        """Returns for each wavelength how much of it is scaled, from 0 to 1."""
        num_dims = 2 * len(periods)

        def find_index(num_turns: float) -> float:
            """Returns the number of the dimension pair that turns so often in the original context."""
            return num_dims * math.log(original_seq_len / (num_turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

        slow, fast = self._betas
        first, last = find_index(fast), find_index(slow)
        if self.has_whole_bounds:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, num_dims - 1)
        index = torch.arange(len(periods), dtype=torch.float32, device=periods.device)
        return ((index - first) / (last - first if last != first else 1e-3)).clamp(0.0, 1.0)


def rotary_tables(
    positions: Int64[Tensor, "B S"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    lengths: Int64[Tensor, "B T"] | None = None,
    *,
    is_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the cosine and the signed sine of each position's angles, for all dimensions of a head, in float32.

    Args:
        positions: The place of each token in its text.
        head_dim: The number of rotated dimensions.
        theta: The base of the wavelengths.
        scaling: Their scaling; None for none.
        lengths: The number of tokens of each token's text, or one for each row; None if the scaling does not read it.
        is_interleaved: Whether neighbouring dimensions turn together, as in `rotate`.
    """
    # float32 even under bf16-true: bfloat16 cannot represent all positions above 256.
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    periods, magnitude = theta**exponents, 1.0
    frequencies = 1.0 / periods
    if scaling is not None:
        assert lengths is not None or not scaling.reads_length, "this scaling needs the lengths of texts"
        frequencies = scaling.scale(periods, theta, positions if lengths is None else lengths).unsqueeze(-2)
        magnitude = scaling.magnitude
    angles = positions[:, :, None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    if is_interleaved:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(
    x: Float[Tensor, "B S H E"],
    cos: Float[Tensor, "B S 1 E"],
    sin: Float[Tensor, "B S 1 E"],
    *,
    is_interleaved: bool = False,
) -> Float[Tensor, "B S H E"]:
    """Returns `x` rotated by its position; dimension i of a head pairs with i + E/2, as in Hugging Face's Llama.

    If the tables are narrower than a head, only its first dimensions are rotated.

    Args:
        x: Queries or keys.
        cos: As `rotary_tables` returns it.
        sin: The same.
        is_interleaved: Whether a dimension pairs with its neighbour instead.

    References:
        Su et al., RoFormer, arXiv:2104.09864, equation 34.
    """
    if cos.shape[-1] < x.shape[-1]:
        turning, fixed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat((rotate(turning, cos, sin, is_interleaved=is_interleaved), fixed), dim=-1)
    if is_interleaved:
        swapped = torch.stack((x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
    turned: Tensor = torch.addcmul(x * cos, swapped, sin)
    return turned.to(x.dtype)
