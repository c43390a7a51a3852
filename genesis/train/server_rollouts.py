"""Rollouts by a server: which weights write which answers, when they are asked for, and what is on the disk before.

With S steps in a rollout, and a server that is asked `ahead` rollouts before they are trained:

    before step j * S    the weights are written into the run's directory, if they write any rollout
                         the answers of rollout j + ahead are asked for, by the weights after update u(j + ahead)
                         the answers of rollout j are awaited; they are on the disk before a step trains on them
    during the steps     a thread sends the requests of the next rollouts and keeps their answers

u(r) is `RolloutOptions.plan_update`, and an answer's seed follows from its place: what is asked for, of which weights,
depends on no time. So a run that is killed asks for what it has not got, and finds the rest in `answer_journal`. The
weights stay on the disk until all of their rollouts are; the answers, until no checkpoint is left that would train on
them. The names of the weights are part of the data's state.

References:
    Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025. Espeholt et al., IMPALA,
    arXiv:1802.01561 (truncated importance weights).
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from blake3 import blake3
from lightning.pytorch.utilities import rank_zero_warn

from genesis.base.errors import RunEndedError, UserError
from genesis.base.model_server import read_key
from genesis.base.run_directory import RunDirectory
from genesis.data.prompt_data import PromptData
from genesis.data.rollout_options import KEY_VARIABLE
from genesis.generate.batch import Request
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder
from genesis.strategies.layout import layout_strategy
from genesis.strategies.whole import gather_decoder
from genesis.train.answer_journal import AnswerJournal, Completion
from genesis.train.openai_client import OpenAIClient
from genesis.train.served_weights import Texts, Weights, find_weights, read_update, remove_weights, write_weights
from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.checkpoint import list_committed, read_manifest
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.phases import note_progress

_WAIT_SECONDS: Final = 1.0
_KEY_CHARS: Final = 32


class ServerRollouts:
    """Gets the answers of rollouts from a server. All ranks make the same calls. Communicates.

    Args:
        data: The prompts.
        trainer: The Trainer of the fit.
        plan: Returns this rank's requests for the answers at positions of the data.

    Raises:
        UserError: The run has no directory, the server takes adapters alone, or its key is invalid.
    """

    def __init__(
        self, data: PromptData, trainer: pl.Trainer, plan: Callable[[Sequence[int]], Sequence[Request]]
    ) -> None:
        self._data, self._trainer, self._plan = data, trainer, plan
        self._options, self._steps = data.prompt_options.writer, data.prompt_options.steps_per_rollout
        checkpoints = [one for one in vars(trainer)["callbacks"] if isinstance(one, AsyncProcessCheckpoint)]
        if not checkpoints:
            raise UserError("data.prompts.rollouts.by is openai, which needs the run's directory: set checkpoint")
        self._run, scope = RunDirectory(checkpoints[0].directory.parent), checkpoints[0].scope
        self._headers = read_key(KEY_VARIABLE)
        module: Any = trainer.lightning_module
        self._adapter: AdapterConfig | None = module.adapter_config
        self._base = None if scope is None or scope.base is None else read_manifest(Path(scope.base))
        if self._options.reload == "vllm" and self._adapter is None:
            raise UserError(
                "data.prompts.rollouts.reload is vllm, whose server loads adapters alone while it runs: train adapters "
                "by model.adapter, or let `genesis serve` write the answers (reload: genesis)"
            )
        self._journal = AnswerJournal(self._run.served_answers, trainer.global_rank)
        self._client: OpenAIClient | None = None
        self._thread = _EventLoop()
        self._current: int | None = None
        self._answers: dict[int, dict[str, Completion]] = {}
        self._pending: dict[int, Future[None]] = {}

    @property
    def _positions_per_rollout(self) -> int:
        return self._data.options.global_batch_size * self._steps

    def find_rollout(self, position: int) -> int:
        """Returns the number of the rollout that a position belongs to."""
        return position // self._positions_per_rollout

    def count_lag(self, position: int) -> int:
        """Returns how many updates the weights of a position's answers were behind the step that trains on it."""
        update = self._options.plan_update(self.find_rollout(position), self._steps)
        if (name := self._data.served.get(update)) is not None:
            update = read_update(name)  # another one where the weights were lost
        return position // self._data.options.global_batch_size - update

    def advance(self, position: int) -> None:
        """Writes the weights of this step if they are needed, and asks for the answers of the next rollouts."""
        rollout = self.find_rollout(position)
        if rollout == self._current:
            return
        self._forget(rollout, position)
        self._current = rollout
        if position % self._positions_per_rollout == 0 and self._writes_weights(rollout):
            self._write(position)
        for number in range(rollout, rollout + self._options.count_ahead(self._steps) + 1):
            if number not in self._pending:
                self._begin(number, position)

    def answer(self, rollout: int, requests: Sequence[Request]) -> list[Completion]:
        """Returns the answers to requests of a rollout, in their order; they are on the disk.

        Raises:
            RunEndedError: The server gives none, or the disk is full.
        """
        if (pending := self._pending.get(rollout)) is not None:
            self._wait(pending)
        self._wait(self._submit(rollout, requests))
        weights = self._find_weights(rollout)
        return [self._answers[rollout][_name(weights, request)] for request in requests]

    def close(self) -> None:
        """Ends the thread and its requests."""
        self._thread.end()
        self._journal.close()

    # ---- weights

    def _writes_weights(self, rollout: int) -> bool:
        """Returns whether the weights before a rollout's first step write any rollout."""
        return self._options.reload != "none" and rollout % self._options.reload_every == 0

    def _write(self, position: int, update: int | None = None) -> None:
        """Writes the weights of this step, under the number of an update."""
        step = position // self._data.options.global_batch_size
        layout = layout_strategy(self._trainer.strategy).layout
        module: Any = self._trainer.lightning_module
        decoder: Decoder = module.decoder
        whole = gather_decoder(decoder, self._adapter, layout.pipeline_process_group)
        texts = Texts(self._data.tokenizer, self._data.template_file)
        written: Weights | None = None
        failure: Exception | None = None
        if self._trainer.global_rank == 0:
            try:
                root = self._run.served_weights
                written = write_weights(root, step, whole, self._adapter, texts, base=self._base)
            except (UserError, OSError) as error:  # raised below, when the others know of it
                failure = error
        del whole
        written = next((one for one in HostGroup().gather(written) if one is not None), None)
        if failure is not None:
            raise failure
        if written is None:
            raise RunEndedError("rank 0 could not write the weights for the server; its error has the reason")
        self._data.served[step if update is None else update] = written.name

    def _find_weights(self, rollout: int) -> Weights:
        if self._options.reload == "none":
            assert self._options.model is not None, "checked by the options"
            return Weights(self._options.model)
        name = self._data.served[self._options.plan_update(rollout, self._steps)]
        return find_weights(self._run.served_weights, name) or Weights(name)

    def _forget(self, rollout: int, position: int) -> None:
        """Drops what no rollout from this one on needs; on the disk, what no checkpoint would need."""
        for number in [one for one in self._answers if one < rollout]:
            del self._answers[number]
            self._pending.pop(number, None)
        self._journal.close(before=rollout)
        update = self._options.plan_update(rollout, self._steps)
        gone = [one for one in self._data.served if one < update]
        if self._client is not None:
            for name in (self._data.served[one] for one in gone):
                self._thread.run(self._client.forget(name))
        for one in gone:
            del self._data.served[one]
        if self._trainer.global_rank == 0:
            remove_weights(self._run.served_weights, update)
            oldest = min((manifest.step for _, manifest in list_committed(self._run.path)), default=0)
            back = (self._trainer.global_step - oldest) * self._data.options.global_batch_size
            self._journal.remove(before=self.find_rollout(max(0, position - back)))

    # ---- answers

    def _begin(self, rollout: int, position: int) -> None:
        """Asks for the answers of a rollout that are not known, or notes that there is none to ask for."""
        positions = self._list_positions(rollout, position)
        requests = self._plan(positions) if positions else []
        self._answers[rollout] = self._journal.read(rollout)
        self._check_weights(rollout, position, requests)
        self._pending[rollout] = self._submit(rollout, requests)

    def _check_weights(self, rollout: int, position: int, requests: Sequence[Request]) -> None:
        """Lets the current weights answer where those that should have are gone, as in a copy of a checkpoint."""
        if self._options.reload == "none":
            return
        update = self._options.plan_update(rollout, self._steps)
        name = self._data.served.get(update)
        is_lost = name is None and bool(requests)
        if name is not None and find_weights(self._run.served_weights, name) is None:
            is_lost = any(_name(Weights(name), one) not in self._answers[rollout] for one in requests)
        (num_lost,) = HostGroup().sum((int(is_lost),)).wait()
        if num_lost:
            rank_zero_warn(
                f"the weights after update {update}, which write rollout {rollout}, are not in "
                f"{self._run.served_weights}: those of this step write it"
            )
            self._write(position, update)

    def _list_positions(self, rollout: int, position: int) -> list[int]:
        """Returns this rank's positions of a rollout whose answers are not known, up to the end of the run."""
        data, size, step = self._data, self._positions_per_rollout, self._data.options.global_batch_size
        ends = [(rollout + 1) * size]
        if data.cursor.last_position is not None:
            ends.append(data.cursor.last_position)
        if self._trainer.max_steps >= 0:
            ends.append(position + (self._trainer.max_steps - self._trainer.global_step) * step)
        batches = range(max(rollout * size, position), min(ends), step)
        return [own for batch in batches for own in data.own_positions(batch) if own not in data.groups]

    def _submit(self, rollout: int, requests: Sequence[Request]) -> "Future[None]":
        """Asks for those answers that are not known."""
        answers = self._answers[rollout]
        if not requests:
            return self._thread.run(asyncio.sleep(0))
        weights = self._find_weights(rollout)
        named = {_name(weights, request): request for request in requests}
        missing = {key: request for key, request in named.items() if key not in answers}
        keys = list(missing)

        def take(index: int, answer: Completion) -> None:
            self._journal.append(rollout, keys[index], answer)
            answers[keys[index]] = answer

        return self._thread.run(self._ask(weights, list(missing.values()), take))

    async def _ask(self, weights: Weights, requests: list[Request], take: Callable[[int, Completion], None]) -> None:
        if self._client is None:  # here, because it belongs to the loop
            vocab_size, directory = self._count_ids(), Path(self._run.served_weights)
            self._client = OpenAIClient(self._options, self._headers, directory, vocab_size, self._data.stop_ids)
        try:
            await self._client.ask(weights, requests, take)
        finally:
            self._journal.sync()

    def _count_ids(self) -> int:
        module: Any = self._trainer.lightning_module
        vocab_size: int = module.decoder_config.vocab_size
        return vocab_size

    def _wait(self, future: "Future[None]") -> None:
        while True:
            try:
                future.result(_WAIT_SECONDS)
                return
            except TimeoutError:
                if future.done():
                    raise
            except OSError as error:
                raise RunEndedError(f"the answers of the server cannot be written: {error}") from None
            note_progress(self._trainer)


def _name(weights: Weights, request: Request) -> str:
    """Returns the key of the answer to a request by weights."""
    asked = f"{weights.name} {request.seed} {request.max_new_tokens} {request.sampling} {list(request.prompt)}"
    return blake3(asked.encode()).hexdigest()[:_KEY_CHARS]


class _EventLoop:
    """Runs coroutines in a thread of its own, which ends with this object and with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a run that fails must not wait for a server.
        thread = threading.Thread(target=_run_loop, args=(self._loop,), name="rollouts", daemon=True)
        thread.start()
        self.end = weakref.finalize(self, _end_loop, self._loop, thread)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> "Future[None]":
        """Starts a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
