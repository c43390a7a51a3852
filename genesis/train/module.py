"""The module that Lightning trains: builds the model, and calls the training step of `step.py`.

    logged                     unit and meaning
    validation/loss            nats per valid token of the validation set, over all ranks; validation/perplexity and
                               validation/bits_per_byte with it; another objective than cross-entropy has its own values

`TrainingLog`, a callback that the module adds, logs the training metrics. Clocks and schedule are callbacks of the run
(`TokenCounters`, `SkipAwareLR`) with metrics of their own.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from genesis.base.determinism import UNREPEATABLE
from genesis.base.device import is_host, read_capability
from genesis.base.errors import RunEndedError, UserError, numbered
from genesis.data.training_data import TrainingData
from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model.adapter import (
    AdapterConfig,
    BaseFormat,
    attach_adapters,
    fill_trained,
    init_adapters,
    is_adapter_tensor,
    use_format,
)
from genesis.model.attend.kernel import Place
from genesis.model.attend.table import AttentionName, resolve_kernel
from genesis.model.balance import has_balance_biases
from genesis.model.decoder import DecoderConfig, build_model, refuse_body
from genesis.model.float8 import Float8Options
from genesis.model.initial import is_unset, mark_unset
from genesis.model.language_model import LanguageModel
from genesis.model.precision import product_dtype
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.objective import TOKENS, HeadResult, Objective, ObjectiveSums
from genesis.objectives.run_options import RunOptions
from genesis.optim import AdamW, Algorithm, build_optimizer
from genesis.strategies.agree import agree_on_kernel, attempt_on_all
from genesis.strategies.host_memory import HostOffload
from genesis.strategies.layout import LayoutStrategy, layout_strategy
from genesis.strategies.pipeline import StageClock
from genesis.strategies.wrap import free_gathered_parameters
from genesis.train.communication_log import CommunicationLog
from genesis.train.data_module import CorpusDataModule
from genesis.train.float8 import apply_float8, prepare_float8
from genesis.train.flops import WindowFlops
from genesis.train.lightning_signals import leave_signals_to_votes
from genesis.train.logged_values import log_exactly
from genesis.train.metrics import SumsOverRanks
from genesis.train.offload_log import OffloadLog
from genesis.train.pipeline_log import PipelineLog
from genesis.train.precision import prepare_precision
from genesis.train.reference_pass import score_pairs
from genesis.train.repeat_proof import check_repeats, is_proof_needed, repeat_pass
from genesis.train.step import Outcome, Scales, Step, seed_of_step, start_gradients, train_window
from genesis.train.training_log import TrainingLog, WindowFigures


def find_place(trainer: pl.Trainer, decoder: DecoderConfig) -> Place:
    """Returns the place of a decoder's attention on a Trainer's device, under its precision."""
    device, heads = trainer.strategy.root_device, decoder.attention_heads
    head_dim, has_sinks = (0, False) if heads is None else (heads.head_dim, heads.has_sinks)
    return Place(device.type, read_capability(device), product_dtype(str(trainer.precision)), head_dim, has_sinks)


class GenesisModule(pl.LightningModule):
    """A decoder and its training step.

    The batch is an `AccumulationWindow`: this rank's micro-batches between two optimizer steps. The gradient of a
    window is the sum of the gradients of all valid tokens, over all ranks and micro-batches, divided by their
    number. A window without a valid token, with a non-finite gradient or with a scaler's overflow is skipped by all
    ranks alike: no parameter and no optimizer state changes, and `skip_reason` says why.

    Args:
        decoder: The model's shape.
        optimizer: How parameters are updated; None for AdamW.
        seed: The seed of the initial weights and of dropout.
        adapter: Adapters on the frozen weights of a base; None to train all weights.
        objective: What training minimises; None for the cross-entropy of the next token.
        attention: The kernel of attention: `fa4` (FlashAttention-4: Hopper and Blackwell, with the package
            flash-attn-4), `flex` (torch's FlexAttention: GPUs since Ampere), `flash` (torch's flash kernels: GPUs since
            Ampere in 16 bits, and the CPU) or `mask` (everywhere); `auto` for the first of them that the device has.
            Kernels round differently; a run that continues keeps its own.
        float8: Which linear layers of the blocks train with float8 products, by torchao; None for none. Parameters stay
            what they are, so that a checkpoint does not depend on it.
        keeps_dropout: Whether `genesis fit` keeps the recipe's dropout for an objective that compares two forwards, as
            DPO, KTO and GSPO do. By default it switches dropout off: a model would differ from its own reference.

    Attributes:
        base_format: How the base of adapters, or a base that is validated alone, stores its weights; set it before.
        attention_failure: Why this rank has no kernel of attention after its proofs; None if it has one.
        count_batch_flops: Returns the operations of a window on this rank, for `Throughput`.
        start: Adapter tensors by name with which a fit on a base starts; set them before the fit.

    Set `is_restored` before a fit or a validation that starts from a checkpoint: then no initial weights are generated.
    Weights are NaN until the restore; without a restore, they are generated when training or validation starts.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        optimizer: Algorithm | None = None,
        seed: int = 0,
        adapter: AdapterConfig | None = None,
        objective: Objective | None = None,
        attention: AttentionName = "auto",
        float8: Float8Options | None = None,
        keeps_dropout: bool = False,
    ) -> None:
        super().__init__()
        self.decoder_config = decoder
        self.algorithm = optimizer or AdamW()
        self.seed = seed
        self.adapter_config = adapter
        self.objective = objective or CrossEntropy()
        self.float8 = float8
        self.keeps_dropout = keeps_dropout
        self.base_format = BaseFormat()
        self.start: Mapping[str, Tensor] = {}
        self.decoder: LanguageModel | None = None
        self.is_restored = False
        self._has_unset_weights = False
        self.attention: str = attention
        self.attention_failure: str | None = None
        self._must_repeat = False
        self._step: Step | None = None
        self._outcome = Outcome()
        self._training_log = TrainingLog(self._end_window, self.objective.measure)
        self.validation_sums = SumsOverRanks()
        self.count_batch_flops = WindowFlops(decoder, adapter).count

    # ---- building

    def setup(self, stage: str) -> None:
        """Checks that the decoder supports corpus, precision and options, before it is built."""
        self.check_strategy(vars(self.trainer).get("datamodule"), self.trainer.strategy, is_training=stage == "fit")
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

    def check_strategy(self, data: object, strategy: pl.strategies.Strategy, *, is_training: bool) -> None:
        """Refuses options of a strategy that do not fit this module and its data. It needs no process group.

        Raises:
            UserError: Ranks cannot share the run.
        """
        options = data.training.options if isinstance(data, CorpusDataModule) else None
        if self.objective.learns_from == "prompts":
            refuse_body(self.decoder_config)  # which has no cache to write answers with
        run = RunOptions(
            self.decoder_config,
            type(self.objective),
            whole_matrices=self.algorithm.whole_name if is_training else None,
            seq_len=None if options is None else options.seq_len,
            batch_sizes=data.batch_sizes if is_training and isinstance(data, CorpusDataModule) else None,
            has_float8=self.float8 is not None,
            has_nf4=self.base_format.is_nf4,
            row_block=self.algorithm.find_row_block(self.adapter_config) if is_training else 1,
        )
        layout_strategy(strategy).check_options(run)
        needs_fixed_rows = getattr(strategy, "needs_fixed_rows", False)
        if needs_fixed_rows and isinstance(data, CorpusDataModule) and data.has_ragged_pairs:
            raise UserError(
                "data.pads_pairs is false, and ranks that share the tokens of rows, or a pipeline, need rows of one "
                "length: remove it"
            )

    def build_decoder(self) -> LanguageModel:
        """Returns the model with its adapters on the meta device, as each rank builds it.

        Raises:
            UserError: The model cannot be built, cannot have the adapters, or does not fit the objective.
        """
        with torch.device("meta"):
            decoder = build_model(self.decoder_config)
            if decoder.softcap is not None and not self.objective.bounds_logits:
                raise UserError(
                    f"the model bounds its logits by {decoder.softcap:g}, which the losses of "
                    f"{type(self.objective).__name__} do not: train it by CrossEntropy or DPO"
                )
            if self.adapter_config is not None:
                attach_adapters(decoder, self.adapter_config, self.base_format)
            else:
                use_format(decoder, self.base_format)
        return decoder

    def configure_model(self) -> None:
        """Builds the decoder under the strategy's wrappers. The weights are the same under every strategy.

        Lightning does not report here whether a restore follows; `is_restored` does.
        """
        if self.decoder is not None:
            return
        decoder = self.build_decoder()
        decoder.attention_kernel = self.attention

        def wrap() -> None:
            if self.float8 is not None:
                apply_float8(decoder, self.float8, self.trainer.strategy.root_device)
            self._strategy.apply_to(decoder)

        attempt_on_all(wrap)
        self._strategy.allocate(decoder)
        decoder.fill_buffers()
        self._has_unset_weights = self.is_restored
        if self.is_restored:
            for parameter in decoder.parameters():
                mark_unset(parameter)
        else:
            decoder.init_weights(self.seed)
        self.decoder = decoder

    def _draw_what_was_not_restored(self) -> None:
        """Generates the initial weights if a restore was expected but did not happen. Communicates for DoRA.

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
                f"the restore left {len(left):,} of {numbered(len(unset), 'parameters')} without values, such as "
                f"{left[0]}: the checkpoint is of another model"
            )
        elif left:
            self._model.init_weights(self.seed)

    def configure_optimizers(self) -> Optimizer:
        """Builds the optimizer; the schedule is a callback's."""
        return build_optimizer(self._model, self.algorithm)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Returns the log of the training steps, and those of offload, pipeline and axes if there are any.

        Lightning runs these after the callbacks of the trainer, and before those that save. The log of the training
        steps is the last, because it writes what all of them have logged.
        """
        logs: list[pl.Callback] = [self._training_log]
        offload, clock = (vars(self.trainer.strategy).get(name) for name in ("offload", "stage_clock"))
        if isinstance(clock, StageClock):
            logs.insert(0, PipelineLog(clock))
        if isinstance(offload, HostOffload) and offload.is_active:
            logs.insert(0, OffloadLog(offload.traffic))
        traffic = vars(self.trainer.strategy).get("traffic")
        if traffic:
            logs.insert(0, CommunicationLog(traffic))
        return logs

    @property
    def _model(self) -> LanguageModel:
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
        """Generates the weights if no restore has filled them, and starts the objective."""
        self._draw_what_was_not_restored()
        self._prove_model()
        self._start_objective()
        self._must_repeat = is_proof_needed(self.device)
        if not self._must_repeat and not is_host(self.device.type):
            rank_zero_info(UNREPEATABLE)

    def _prove_model(self) -> None:
        """Lets the model prove itself on a row as long as those of the fit. Communicates."""
        data = vars(self.trainer).get("datamodule")
        if self.decoder_config.body is not None and isinstance(data, CorpusDataModule):
            with self.trainer.precision_plugin.forward_context():
                self._model.prove(data.training.options.seq_len)
            free_gathered_parameters(self)

    def _start_objective(self) -> None:
        data = vars(self.trainer).get("datamodule")
        if isinstance(data, CorpusDataModule):
            score = partial(score_pairs, decoder=self._model, trainer=self.trainer, data=data)
            # Not from the layers of this rank: a stage of a pipeline may have none with an adapter.
            self.objective.start(has_adapters=self.adapter_config is not None, score_pairs=score)

    # ---- the step: `train_window` has its arithmetic, and each hook resumes it

    def training_step(self, window: AccumulationWindow, batch_idx: int) -> dict[str, Tensor]:
        """Runs one window's micro-batches; Lightning runs the last backward, in which gradients are reduced."""
        self._step = train_window(
            window,
            self._outcome,
            module=self,
            decoder=self._model,
            objective=self.objective,
            seed=self.seed,
            is_balanced=self._has_balance_biases,
            prove=self._prove_repeats if self._must_repeat else None,
        )
        output = next(self._step)
        assert isinstance(output, dict)
        return output

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Takes the norm of the synchronised gradient once, then clips, or vetoes by removing every gradient."""
        assert self._step is not None
        self._step.send((optimizer, gradient_clip_val))

    def _end_window(self) -> WindowFigures:
        """Returns the figures of the last window, and changes the balance biases by its loads."""
        assert self._step is not None
        figures, self._step = next(self._step), None
        assert isinstance(figures, WindowFigures)
        return figures

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Does nothing, because Lightning calls it when earlier micro-batches have already run backward."""

    def _prove_repeats(self, micro_batches: Sequence[MicroBatch], scales: Scales) -> None:
        """Computes micro-batches twice, and ends all ranks if the gradients of one of them differ. Communicates."""
        seed = seed_of_step(self.seed, self.trainer.global_step, *self._strategy.layout.seed_place)

        def run() -> Tensor:
            start_gradients(self, seed)
            loss, *_ = self._strategy.train_micro_batches(self._model, micro_batches, self.objective, scales)
            with torch.autocast(self.device.type, enabled=False):  # as in the step's other backwards
                self.trainer.strategy.backward(loss, None)
            return loss

        found = repeat_pass(run, dict(self._model.named_parameters()))
        attempt_on_all(lambda: check_repeats(found, self.device))
        self._must_repeat = False
        rank_zero_info(
            f"the first micro-batch gave the same loss and {numbered(len(found.names) - 1, 'equal gradients')} when it "
            f"was computed again ({found.seconds:.1f} s)"
        )

    @property
    def logged_loss(self) -> float | None:
        """The training loss of the last log line, for `Heartbeat`; None before."""
        return self._training_log.last_loss

    @property
    def skip_reason(self) -> str | None:
        """The reason why the last window was skipped, or None."""
        return self._outcome.skip_reason

    @property
    def has_valid_tokens(self) -> bool:
        """Whether the last window had a valid token on any rank."""
        return self._outcome.counts[TOKENS] > 0

    @cached_property
    def _has_balance_biases(self) -> bool:
        return has_balance_biases(self._model)

    # ---- validation

    def repeat_forward(self, batch: AccumulationWindow) -> None:
        """Runs the forwards of a window without gradients, so that `GradientHealth` can look at each output."""
        self._strategy.sum_losses(self._model, batch.micro_batches, self.objective)
        free_gathered_parameters(self)

    def on_validation_start(self) -> None:
        """Generates the weights if no restore has filled them, and starts the objective."""
        self._draw_what_was_not_restored()
        if not self.trainer.training:  # a fit has proved it
            self._prove_model()
        self._start_objective()

    def validation_step(self, window: AccumulationWindow, batch_idx: int) -> None:
        """Adds one batch of the validation set; all ranks run the same number of batches, without a gather."""
        reports_rows = self._strategy.layout.reports_rows
        if window.figures:  # known without a forward
            values = {
                name: torch.tensor(value * reports_rows, device=self.device) for name, value in window.figures.items()
            }
            sums = HeadResult({}, values)
        else:
            sums = self._strategy.sum_losses(self._model, window.micro_batches, self.objective)
        counts = self.objective.count(window)
        self.validation_sums.update(sums, counts if reports_rows else dict.fromkeys(counts, 0))

    def on_validation_epoch_end(self) -> None:
        """Logs the figures of the whole set, and frees parameters that the last forward left gathered."""
        sums = ObjectiveSums(*self.validation_sums.compute())
        measured = self.objective.measure(sums) if sums.counts.get(TOKENS) else {"loss": math.nan}
        log_exactly(self, {f"validation/{name}": value for name, value in measured.items()})
        self.validation_sums.reset()
        free_gathered_parameters(self)


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
