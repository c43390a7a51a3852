"""The training step: one accumulation window from count to update.

    logged                     unit and meaning
    validation/loss            nats per valid token of the validation set, over all ranks; validation/perplexity and
                               validation/bits_per_byte with it; another objective than cross-entropy has its own values

`TrainingLog`, a callback that the module adds, logs the training metrics. Clocks and schedule are callbacks of the run
(`TokenCounters`, `SkipAwareLR`) with metrics of their own.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from genesis.base.determinism import UNREPEATABLE
from genesis.base.device import is_host, read_capability
from genesis.base.errors import RunEndedError, UserError
from genesis.data.training_data import TrainingData
from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model.adapter import AdapterConfig, attach_adapters, fill_trained, init_adapters, is_adapter_tensor
from genesis.model.attend.kernel import Place
from genesis.model.attend.table import AttentionName, resolve_kernel
from genesis.model.balance import has_balance_biases, split_loads, update_balance_biases
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.float8 import Float8Options
from genesis.model.initial import is_unset, mark_unset
from genesis.model.precision import product_dtype
from genesis.model.statistics import name_figures
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.objective import TOKENS, HeadResult, Objective, ObjectiveSums
from genesis.objectives.preference import DPO
from genesis.optim import GroupedOptimizer, OptimizerOptions, build_optimizer
from genesis.strategies.agree import agree_on_kernel, attempt_on_all
from genesis.strategies.host_memory import HostOffload
from genesis.strategies.layout import LayoutStrategy, layout_strategy
from genesis.strategies.wrap import free_gathered_parameters
from genesis.train.data_module import CorpusDataModule
from genesis.train.float8 import apply_float8, prepare_float8
from genesis.train.flops import WindowFlops
from genesis.train.gradients import measure_gradients
from genesis.train.lightning_signals import leave_signals_to_votes
from genesis.train.logged_values import log_exactly
from genesis.train.metrics import SumsOverRanks
from genesis.train.offload_log import OffloadLog
from genesis.train.precision import prepare_precision
from genesis.train.reference_pass import fill_reference
from genesis.train.repeat_proof import check_repeats, is_proof_needed, repeat_pass
from genesis.train.training_log import PART_PREFIX, TrainingLog, WindowFigures, join_sums
from genesis_callbacks.gradient_health import find_gradient_health
from genesis_callbacks.host_group import Pending
from genesis_callbacks.step_parts import timing


def seed_of_step(seed: int, step: int, data_rank: int) -> int:
    """Returns the 63-bit seed of one step on one rank (for dropout), a function of its arguments without state.

    SplitMix64's finalizer over the three, so that neighbouring steps and ranks have unrelated seeds
    (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    mask = (1 << 64) - 1
    value = 0
    for part in (seed, step, data_rank):
        value = (value + part + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value >> 1


def find_place(trainer: pl.Trainer, decoder: DecoderConfig) -> Place:
    """Returns the place of a decoder's attention on a Trainer's device, under its precision."""
    device = trainer.strategy.root_device
    return Place(device.type, read_capability(device), product_dtype(str(trainer.precision)), decoder.head_dim)


class GenesisModule(pl.LightningModule):
    """A decoder and its training step.

    The batch is an `AccumulationWindow`: this rank's micro-batches between two optimizer steps. The gradient of a
    window is the sum of the gradients of all valid tokens, over all ranks and micro-batches, divided by their
    number. A window without a valid token, with a non-finite gradient or with a scaler's overflow is skipped by all
    ranks alike: no parameter and no optimizer state changes, and `skip_reason` says why.

    Args:
        decoder: The model's shape.
        optimizer: The optimizer and its peak learning rate.
        seed: The seed of the initial weights and of dropout.
        adapter: Adapters on the frozen weights of a base; None to train all weights.
        objective: What training minimises; None for the cross-entropy of the next token.
        attention: The kernel of attention: `fa4` (FlashAttention-4: Hopper and Blackwell, with the package
            flash-attn-4), `flex` (torch's FlexAttention: GPUs since Ampere), `flash` (torch's flash kernels: GPUs since
            Ampere in 16 bits, and the CPU) or `mask` (everywhere); `auto` for the first of them that the device has.
            Kernels round differently; a run that continues keeps its own.
        float8: Which linear layers of the blocks train with float8 products, by torchao; None for none. Parameters stay
            what they are, so that a checkpoint does not depend on it.

    Attributes:
        base_dtype: The dtype of the base's tensors if there are adapters; set it before a fit.
        attention_failure: Why this rank has no kernel of attention after its proofs; None if it has one.
        count_batch_flops: Returns the operations of a window on this rank, for `Throughput`.
        start: Adapter tensors by name with which a fit on a base starts; set them before the fit.

    Set `is_restored` before a fit or a validation that starts from a checkpoint: then no initial weights are generated.
    Weights are NaN until the restore; without a restore, they are generated when training or validation starts.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        optimizer: OptimizerOptions | None = None,
        seed: int = 0,
        adapter: AdapterConfig | None = None,
        objective: Objective | None = None,
        attention: AttentionName = "auto",
        float8: Float8Options | None = None,
    ) -> None:
        super().__init__()
        self.decoder_config = decoder
        self.optimizer_options = optimizer or OptimizerOptions()
        self.seed = seed
        self.adapter_config = adapter
        self.objective = objective or CrossEntropy()
        self.float8 = float8
        self.base_dtype = torch.float32
        self.start: Mapping[str, Tensor] = {}
        self.decoder: Decoder | None = None
        self.is_restored = False
        self._has_unset_weights = False
        self.attention: str = attention
        self.attention_failure: str | None = None
        self._skip_reason: str | None = None
        self._empty_reason: str | None = None
        self._counts: dict[str, int] = {TOKENS: 0}
        self._grad_norm = math.nan
        self._window_sums: dict[str, Tensor] = {}
        self._must_repeat = False
        self._sum_names: list[str] = []
        self._sums_of_ranks: Pending[float] | None = None
        self._training_log = TrainingLog(self._end_window, self.objective.measure)
        self.validation_sums = SumsOverRanks()
        self.count_batch_flops = WindowFlops(decoder, adapter).count

    # ---- building

    def setup(self, stage: str) -> None:
        """Checks that the decoder supports corpus, precision and options, before it is built."""
        self._strategy.check_options(self.decoder_config, self.optimizer_options.name if stage == "fit" else None)
        prepare_precision(self.trainer.strategy)
        agree_on_kernel(self.attention, self.attention_failure)  # Lightning calls this after the proofs of callbacks
        self.attention = resolve_kernel(self.attention, find_place(self.trainer, self.decoder_config))
        data = vars(self.trainer).get("datamodule")
        training = data.training if isinstance(data, CorpusDataModule) else None
        if self.float8 is not None:
            prepare_float8(
                self.trainer.strategy,
                self.objective,
                has_adapter=self.adapter_config is not None,
                seq_len=None if training is None else training.options.seq_len,
            )
        if isinstance(data, CorpusDataModule):
            _check_fits(self.decoder_config, data.training)
            _check_pairs(self.objective, data.training)

    def configure_model(self) -> None:
        """Builds the decoder under the strategy's wrappers. The weights are the same under every strategy.

        Lightning does not report here whether a restore follows; `is_restored` does.
        """
        if self.decoder is not None:
            return
        with torch.device("meta"):
            decoder = Decoder(self.decoder_config)
            decoder.attention_kernel = self.attention
            if self.adapter_config is not None:
                attach_adapters(decoder, self.adapter_config, self.base_dtype)

        def wrap() -> None:
            if self.float8 is not None:
                apply_float8(decoder, self.float8, self.trainer.strategy.root_device)
            self._strategy.apply_to(decoder)

        attempt_on_all(wrap)
        self._strategy.allocate(decoder)
        self._has_unset_weights = self.is_restored
        if self.is_restored:
            for parameter in decoder.parameters():
                mark_unset(parameter)
        else:
            decoder.init_weights(self.seed)
        self.decoder = decoder

    def _draw_what_was_not_restored(self) -> None:
        """Generates the initial weights if a restore was expected but did not happen. Does not communicate.

        A restore from a base gives no values to the adapters; then only these are generated.
        """
        if not self._has_unset_weights:
            return
        self._has_unset_weights = False
        unset = {name: is_unset(parameter) for name, parameter in self._model.named_parameters()}
        left = [name for name, is_left in unset.items() if is_left]
        is_from_base = all(is_adapter_tensor(name) == is_left for name, is_left in unset.items() if is_left is not None)
        if False in unset.values() and left and is_from_base:
            init_adapters(self._model, self.seed)
            fill_trained(self._model, self.start)
        elif False in unset.values() and left:
            raise RunEndedError(
                f"the restore left {len(left)} of {len(unset)} parameters without values, such as {left[0]}: the "
                "checkpoint is of another model"
            )
        elif left:
            self._model.init_weights(self.seed)

    def configure_optimizers(self) -> Optimizer:
        """Builds the optimizer; the schedule is a callback's."""
        return build_optimizer(self._model, self.optimizer_options)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Returns the log of transfers if the strategy keeps something on the host, and that of the training steps.

        Lightning runs these after the callbacks of the trainer, and before those that save. The log of the training
        steps is the last, because it writes what all of them have logged.
        """
        offload = vars(self.trainer.strategy).get("offload")
        if isinstance(offload, HostOffload) and offload.is_active:
            return [OffloadLog(offload.traffic, has_disk=offload.has_disk), self._training_log]
        return [self._training_log]

    @property
    def _model(self) -> Decoder:
        assert self.decoder is not None, "configure_model builds the decoder"
        return self.decoder

    @property
    def _strategy(self) -> LayoutStrategy:
        return layout_strategy(self.trainer.strategy)

    def on_fit_start(self) -> None:
        """Rejects options of the Trainer that would break the step's arithmetic."""
        if self.trainer.accumulate_grad_batches != 1:
            raise UserError(
                f"trainer.accumulate_grad_batches is {self.trainer.accumulate_grad_batches}; a window is accumulated "
                "inside one step, set data.global_batch_size and data.micro_batch_size instead"
            )
        leave_signals_to_votes(self.trainer)

    def on_train_start(self) -> None:
        """Generates the weights if no restore has filled them, and finds the reference of preferences."""
        self._draw_what_was_not_restored()
        self._fill_reference()
        self._must_repeat = is_proof_needed(self.device)
        if not self._must_repeat and not is_host(self.device.type):
            rank_zero_info(UNREPEATABLE)

    def _fill_reference(self) -> None:
        data = vars(self.trainer).get("datamodule")
        if isinstance(self.objective, DPO) and isinstance(data, CorpusDataModule):
            fill_reference(self.objective, self._model, self.trainer, data)

    # ---- the step

    def training_step(self, window: AccumulationWindow, batch_idx: int) -> dict[str, Tensor]:
        """Runs one window's micro-batches; Lightning runs the last backward, in which gradients are reduced."""
        strategy, layout = self._strategy, self._strategy.layout
        # Every rank needs the global count before its first backward, so this sum is awaited. It runs on gloo between
        # hosts: on nccl it would wait for the device's queue.
        counts = self.objective.count(window)
        with timing(self.trainer, "communication"):
            totals = layout.token_group.sum(list(counts.values())).wait()
        self._counts = dict(zip(counts, totals, strict=True))
        self._empty_reason = None if self._counts[TOKENS] else "no_valid_tokens"
        if window.is_skipped:
            self._empty_reason = "skipped_data"  # which `TokenCounters` does not take for a fault
        # The reduction of gradients sums over ranks, and may divide that sum (DDP does). 0 keeps an empty window's
        # graph connected: every rank runs the same forwards and backwards, even without valid tokens.
        scales = {unit: layout.gradient_divisor / count if count else 0.0 for unit, count in self._counts.items()}
        if self._must_repeat and self._counts[TOKENS]:
            self._prove_repeats(window.micro_batches[0], scales)
        self._begin_step()
        loss, sums, part_sums = strategy.train_micro_batches(self._model, window.micro_batches, self.objective, scales)
        self._window_sums = join_sums(sums, part_sums)
        return {"loss": loss, "loss_sum": next(iter(sums.terms.values()))}

    def _begin_step(self) -> None:
        # Here and not in `optimizer_zero_grad`: Lightning calls that after `training_step`, when the window's earlier
        # micro-batches have run backward.
        self._remove_gradients()
        # A seed for each step, so that a resumed run has the same dropout masks, independent of earlier random numbers.
        torch.manual_seed(seed_of_step(self.seed, self.trainer.global_step, self._strategy.layout.data_rank))

    def _prove_repeats(self, micro_batch: MicroBatch, scales: Mapping[str, float]) -> None:
        """Computes a micro-batch twice, and ends all ranks if the gradients of one of them differ. Communicates."""

        def run() -> Tensor:
            self._begin_step()
            loss, *_ = self._strategy.train_micro_batches(self._model, (micro_batch,), self.objective, scales)
            with torch.autocast(self.device.type, enabled=False):  # as in the step's other backwards
                self.trainer.strategy.backward(loss, None)
            return loss

        found = repeat_pass(run, dict(self._model.named_parameters()))
        attempt_on_all(lambda: check_repeats(found, self.device))
        self._must_repeat = False
        rank_zero_info(
            f"the first micro-batch gave the same loss and {len(found.names) - 1} equal gradients when it was computed "
            f"again ({found.seconds:.1f} s)"
        )

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Takes the norm of the synchronised gradient once, then clips, or vetoes by removing every gradient."""
        norm = measure_gradients(
            self.parameters(),
            self.trainer.strategy.root_device,
            num_stage_ranks=len(self._strategy.layout.stage_ranks),
            world_size=self.trainer.world_size,
        )
        # Everything that the host reads of this window, so that it waits for the device once in a step.
        self._grad_norm, *figures = _read_together([norm, *self._window_sums.values()])
        self._sum_window(figures)
        # The norm and the token count are the same on all ranks, so all ranks come to the same decision without a
        # further reduction. Gradients of None leave Adam's state and the weight decay alone; zeros would not.
        self._skip_reason = self._find_skip_reason()
        health = find_gradient_health(self.trainer) if self._skip_reason == "nonfinite_gradient" else None
        if health is not None:
            health.look(self)  # on all ranks: they have the same norm
        if self._skip_reason is not None:
            self._remove_gradients()
        elif gradient_clip_val and self._grad_norm > gradient_clip_val:
            # Under ZeRO-1 the gradients of parameters that other ranks update stay as they are: nobody reads them.
            # ZeroRedundancyOptimizer has it. Its module, which compiles ten optimizers by TorchScript, is not imported.
            local = getattr(optimizer, "optim", optimizer)
            assert isinstance(local, GroupedOptimizer)
            local.scale_gradients(gradient_clip_val / self._grad_norm)

    def _remove_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    @property
    def logged_loss(self) -> float | None:
        """The training loss of the last log line, for `Heartbeat`; None before."""
        return self._training_log.last_loss

    @property
    def skip_reason(self) -> str | None:
        """The reason why the last window was skipped, or None."""
        return self._skip_reason

    @property
    def has_valid_tokens(self) -> bool:
        """Whether the last window had a valid token on any rank."""
        return self._counts[TOKENS] > 0

    def _find_skip_reason(self) -> str | None:
        if self._empty_reason is not None:
            return self._empty_reason
        if not math.isfinite(self._grad_norm):
            return "scaler_overflow" if self._gradient_scaler() is not None else "nonfinite_gradient"
        return None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Does nothing, because Lightning calls it when earlier micro-batches have already run backward."""

    def _gradient_scaler(self) -> Any | None:
        plugin = self.trainer.precision_plugin
        return plugin.scaler if isinstance(plugin, MixedPrecision) else None

    # ---- figures of the window

    def _sum_window(self, figures: Sequence[float]) -> None:
        """Starts to sum the objective's sums and the parts' statistics over all ranks while the optimizer steps."""
        if self._sums_of_ranks is not None:
            self._sums_of_ranks.wait()  # a repeated window: gloo needs the wait, and the first sums are dropped
        self._sums_of_ranks = self._strategy.layout.token_group.sum_floats(figures)
        self._sum_names = name_figures(self._window_sums)
        self._window_sums = {}

    def _end_window(self) -> WindowFigures:
        """Returns the figures of the last window, and changes the balance biases by its loads."""
        assert self._sums_of_ranks is not None
        values = self._sums_of_ranks.wait()
        self._sums_of_ranks = None
        if self._skip_reason is None and self._has_balance_biases:
            loads = split_loads(self._sum_names, torch.tensor(values, dtype=torch.float64), prefix=PART_PREFIX)
            update_balance_biases(self._model, loads)
        return WindowFigures.of(
            self._sum_names,
            values,
            counts=self._counts,
            grad_norm=self._grad_norm,
            scale_factor=self._strategy.layout.gradient_divisor / max(self._counts[TOKENS], 1),
            is_skipped=self._skip_reason is not None,
        )

    @cached_property
    def _has_balance_biases(self) -> bool:
        return has_balance_biases(self._model)

    def repeat_forward(self, batch: AccumulationWindow) -> None:
        """Runs the forwards of a window without gradients, so that `GradientHealth` can look at each output."""
        self._strategy.sum_losses(self._model, batch.micro_batches, self.objective)
        free_gathered_parameters(self)

    # ---- validation

    def on_validation_start(self) -> None:
        """Generates the weights if no restore has filled them, and finds the reference of preferences."""
        self._draw_what_was_not_restored()
        self._fill_reference()

    def validation_step(self, window: AccumulationWindow, batch_idx: int) -> None:
        """Adds one batch of the validation set; all ranks run the same number of batches, without a gather."""
        if window.figures:  # known without a forward
            values = {name: torch.tensor(value, device=self.device) for name, value in window.figures.items()}
            sums = HeadResult({}, values)
        else:
            sums = self._strategy.sum_losses(self._model, window.micro_batches, self.objective)
        self.validation_sums.update(sums, self.objective.count(window))

    def on_validation_epoch_end(self) -> None:
        """Logs the figures of the whole set, and frees parameters that the last forward left gathered."""
        # The group exists only once the ranks have met, after the metric was built.
        self.validation_sums.process_group = self._strategy.layout.token_process_group
        sums = ObjectiveSums(*self.validation_sums.compute())
        measured = self.objective.measure(sums) if sums.counts.get(TOKENS) else {"loss": math.nan}
        log_exactly(self, {f"validation/{name}": value for name, value in measured.items()})
        self.validation_sums.reset()
        free_gathered_parameters(self)


def _check_pairs(objective: Objective, data: TrainingData) -> None:
    if objective.needs_pairs and data.pairs is None:
        raise UserError(
            f"{type(objective).__name__} learns from pairs of answers, and the data have none: give data.corpus, made "
            "by `genesis data prepare` of sources with chat: pairs"
        )
    if not objective.needs_pairs and data.pairs is not None:
        raise UserError(
            "data.corpus has pairs of answers, half of which are not to be learned: give model.objective, such as "
            "genesis.objectives.DPO, or a corpus of conversations"
        )


def _check_fits(decoder: DecoderConfig, data: TrainingData) -> None:
    vocab_size = data.vocab_size
    if vocab_size > decoder.vocab_size:
        raise UserError(
            f"model.decoder.vocab_size is {decoder.vocab_size}, but {data.vocabulary_owner} has a vocabulary of "
            f"{vocab_size}; set model.decoder.vocab_size to {vocab_size} or more"
        )
    seq_len = data.options.seq_len
    if seq_len > decoder.max_seq_len:
        raise UserError(
            f"data.seq_len is {seq_len}, longer than model.decoder.max_seq_len {decoder.max_seq_len}; lower "
            "seq_len or raise max_seq_len"
        )


def _read_together(tensors: Sequence[Tensor]) -> list[float]:
    """Returns all numbers of `tensors`, in order. Waits for the device once if all of them are on the same device."""
    numbers: list[float] = []
    for _, there in groupby(tensors, key=lambda tensor: tensor.device):
        # float64 holds every float32, and the counts of tokens exactly.
        numbers += torch.cat([tensor.detach().flatten().double() for tensor in there]).cpu().tolist()
    return numbers
