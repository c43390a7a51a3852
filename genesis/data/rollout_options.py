"""Who writes the answers of a rollout: the model that trains, or a server with weights that it gets from the run."""

from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from genesis.base.errors import UserError

KEY_VARIABLE: Final = "GENESIS_ROLLOUTS_KEY"
"""The environment variable with the server's key. A recipe, which may come from anyone, cannot name another one."""


@dataclass(frozen=True)
class RolloutOptions:
    """Who writes the answers to prompts in training, and by which weights.

    Rollout r has the answers to the prompts of `steps_per_rollout` steps. It is written by the weights after the update
    that `plan_update` returns, a function of r and these options alone.

    Args:
        by: `local` for the model that trains, or `openai` for a server with OpenAI's `/v1/completions`, whose key is
            in the environment variable GENESIS_ROLLOUTS_KEY.
        url: The server's address, such as http://127.0.0.1:8000.
        reload: How the server gets new weights: `genesis` for `genesis serve --weights RUN/served/weights`, `vllm` for
            vLLM's calls for adapters, or `none` for a server whose weights stay.
        model: The name of the server's weights with `reload: none`.
        max_lag: How many updates an answer's weights may be behind the step that trains on it. By default as few as
            possible; with more, the server writes the next rollouts while this one is trained.
        reload_every: Rollouts by the same weights.
        max_ratio: The bound of the ratio between the trainer's and the server's probability of a token, by which the
            loss is corrected.
        num_concurrent: Requests of a rank at a time, of all rollouts.
        request_seconds: How long the server may take for an answer, or to load weights, and may be full.
        retry_seconds: How long a server that cannot be reached, or fails, is asked again.
    """

    by: Literal["local", "openai"] = "local"
    url: str | None = None
    reload: Literal["genesis", "vllm", "none"] = "genesis"
    model: str | None = None
    max_lag: int | None = None
    reload_every: int = 1
    max_ratio: float = 2.0
    num_concurrent: int = 32
    request_seconds: float = 600.0
    retry_seconds: float = 300.0

    def __post_init__(self) -> None:
        where = "data.prompts.rollouts"
        if (self.by == "openai") != (self.url is not None):
            raise UserError(f"{where}.url is {self.url}; by: openai needs the server's address, and local has none")
        if self.url is not None:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
                raise UserError(
                    f"{where}.url is no address such as http://127.0.0.1:8000, without a name, a key or a query; the "
                    f"key is in the environment variable {KEY_VARIABLE}"
                )
        if (self.reload == "none") != (self.model is not None):
            raise UserError(
                f"{where}.model is {self.model}; reload: none needs the name of the server's weights, and other "
                "servers get weights with names of their own"
            )
        for name in ("num_concurrent", "reload_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{where}.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("request_seconds", "retry_seconds"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise UserError(f"{where}.{name} is {getattr(self, name)}; it must be a number above 0")
        if not 1.0 <= self.max_ratio < float("inf"):
            raise UserError(f"{where}.max_ratio is {self.max_ratio}; it must be a number of at least 1")

    @property
    def is_remote(self) -> bool:
        """Returns whether a server writes the answers."""
        return self.by == "openai"

    def check(self, steps_per_rollout: int, temperature: float) -> None:
        """Refuses what does not fit the other options of the prompts.

        Raises:
            UserError: `max_lag` is below the least lag, or the temperature is not 1.
        """
        least = steps_per_rollout * self.reload_every - 1
        if self.max_lag is not None and (not self.is_remote or self.reload == "none" or self.max_lag < least):
            raise UserError(
                f"data.prompts.rollouts.max_lag is {self.max_lag}; it must be at least {least}, which is "
                f"steps_per_rollout {steps_per_rollout} times reload_every {self.reload_every} less 1, and by: local "
                "and reload: none have none"
            )
        if self.is_remote and temperature != 1.0:
            raise UserError(
                f"data.prompts.temperature is {temperature}, and servers give log-probabilities without it: set it to "
                "1, or let the model that trains answer (rollouts.by: local)"
            )

    def count_ahead(self, steps_per_rollout: int) -> int:
        """Returns how many rollouts are asked for while an earlier one is trained.

        >>> RolloutOptions("openai", "http://a", max_lag=7).count_ahead(4)
        1
        """
        if self.max_lag is None:
            return 0
        return (self.max_lag + 1 - steps_per_rollout * self.reload_every) // steps_per_rollout

    def plan_update(self, rollout: int, steps_per_rollout: int) -> int:
        """Returns the number of steps that were trained into the weights that write a rollout.

        >>> options = RolloutOptions("openai", "http://a", max_lag=11, reload_every=2)
        >>> [options.plan_update(rollout, 4) for rollout in range(6)]
        [0, 0, 0, 8, 8, 16]
        """
        first = max(0, rollout - self.count_ahead(steps_per_rollout))
        return steps_per_rollout * (first - first % self.reload_every)
