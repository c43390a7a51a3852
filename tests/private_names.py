"""Every private name of other packages that ours use, in one list, and the search for such names in the code.

A private name begins with an underscore and may change in any release. `USED` has each with its owner, and `ONLY_IN`
the versions of a name that not every tested version has. `tests/test_private_names.py` compares the list with what the
search finds, and with the packages that are installed: `make check-lowest` does so with the lowest versions.

The search reads the source: attributes, imports, and names in texts (`getattr(strategy, "_name")`). Methods that
replace a private one are found among the imported classes. The search does not find

- a private name that the class or the file which uses it also defines for itself;
- names that are put together at run time;
- names without an underscore that are private all the same, such as the attributes of FSDP2's groups of parameters.
  `UNDOCUMENTED` lists those that are known. No search checks that this list is complete.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("genesis", "callbacks/src")
PUBLIC = {
    *("_replace", "_fields", "_asdict", "_make", "_field_defaults"),  # of named tuples
    *("_exit", "_current_frames"),  # of os and sys
}
"""Names that the documentation of Python has."""


FSDP = "torch.distributed.fsdp._fully_shard"
LOOPS = "lightning.pytorch.loops"

USED: dict[str, str] = {
    # ---- torch: modules, modules' state, tensors
    "_C": "torch",
    "_apply": "torch.nn:Module",
    "_buffers": "torch.nn:Module",
    "_checkpoint_offset": "torch.serialization",
    "_dynamo": "torch",
    "_engine_run_backward": "torch.autograd.graph",
    "_foreach_add_": "torch",
    "_foreach_copy_": "torch",
    "_foreach_lerp_": "torch",
    "_foreach_mul_": "torch",
    "_foreach_norm": "torch",
    "_get_layout": "torch.serialization",
    "_metadata": "torch.nn:Module",
    "_modules": "torch.nn:Module",
    "_non_persistent_buffers_set": "torch.nn:Module",
    "_orig_mod": "torch._dynamo.eval_frame:OptimizedModule",
    "_parameters": "torch.nn:Module",
    "_pytree": "torch.utils",
    "_save_to_state_dict": "torch.nn:Module",
    "_state_dict_hooks": "torch.nn:Module",
    "_state_dict_pre_hooks": "torch.nn:Module",
    "_step_supports_amp_scaling": "torch.optim.adam:Adam",
    "_values": "torch:Tensor",
    "_version": "torch:Tensor",
    "_cdata": "torch:UntypedStorage",
    "_grouped_mm": "torch",
    "_init_fn": "torch._library.custom_ops:CustomOpDef",
    "_library": "torch",
    "_python_dispatch": "torch.utils",
    "_subclasses": "torch",
    "_to_copy": "torch.ops.aten",
    "_dump_snapshot": "torch.cuda.memory",
    # ---- torch: distributed
    "_MEM_FORMAT_ENCODING": "torch.distributed.checkpoint.metadata",
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_all_gather_process_group": f"{FSDP}._fsdp_param_group:FSDPParamGroup",
    "_all_gather_result": f"{FSDP}._fsdp_param_group:FSDPParamGroup",
    "_checkpoint_wrapped_module": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "_device_types": "torch.distributed:ProcessGroup",
    "_distributed_c10d": "torch._C",
    "_dump_fr_trace_json": "torch._C._distributed_c10d",
    "_dump_nccl_trace_json": "torch._C._distributed_c10d",
    "_fsdp_common": FSDP,
    "_fsdp_param_group": f"{FSDP}._fsdp_state:FSDPState",
    "_fsdp_param_groups": f"{FSDP}._fsdp_state:FSDPState",
    "_fully_shard": "torch.distributed.fsdp",
    "_functional_collectives": "torch.distributed",
    "_get_backend": "torch.distributed:ProcessGroup",
    "_get_fsdp_state": "torch.distributed.fsdp:FSDPModule",
    "_local_tensor": "torch.distributed.tensor:DTensor",
    "_set_pg_timeout": "torch.distributed.distributed_c10d",
    "_sharded_param_data": f"{FSDP}._fsdp_param:FSDPParam",
    "_spec": "torch.distributed.tensor:DTensor",
    "_stop_heartbeats": "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler",
    "_timeout": "torch.distributed.ProcessGroupGloo:_Options",
    "_unflatten": "torch.distributed.device_mesh:DeviceMesh",
    "_unsharded_param": f"{FSDP}._fsdp_param:FSDPParam",
    # ---- Lightning
    "_BaseProgress": f"{LOOPS}.progress",
    "_first_loop_iter": "lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector",
    "_logger_connector": "lightning.pytorch:Trainer",
    "_Loop": f"{LOOPS}.loop",
    "_save_distributed_checkpoint": "lightning.pytorch.strategies:ModelParallelStrategy",
    "_SubprocessScriptLauncher": "lightning.pytorch.strategies.launchers.subprocess_script",
    "_batches_that_stepped": f"{LOOPS}.training_epoch_loop:_TrainingEpochLoop",
    "_broadcast_sigterm_tensor": f"{LOOPS}.training_epoch_loop:_TrainingEpochLoop",
    "_CheckpointConnector": "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "_call_children_scripts": "lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher",
    "_combined_loader": f"{LOOPS}.fit_loop:_FitLoop",
    "_combined_loader_states_to_load": f"{LOOPS}.fit_loop:_FitLoop",
    "_configure_launcher": "lightning.pytorch.strategies:Strategy",
    "_current_fx_name": "lightning.pytorch:LightningModule",
    "_data_fetcher": f"{LOOPS}.fit_loop:_FitLoop",
    "_ddp_kwargs": "lightning.pytorch.strategies:DDPStrategy",
    "_dump_config": "lightning.pytorch.cli:LightningCLI",
    "_generate_state_key": "lightning.pytorch:Callback",
    "_get": "lightning.pytorch.cli:LightningCLI",
    "_hparams_name": "lightning.pytorch.utilities.parsing",
    "_load_state_dicts": "lightning.pytorch.utilities.combined_loader:CombinedLoader",
    "_parse_ckpt_path": "lightning.pytorch.cli:LightningCLI",
    "_persistent": "torchmetrics:Metric",
    "_prepare_subcommand_kwargs": "lightning.pytorch.cli:LightningCLI",
    "_results": "lightning.pytorch:Trainer",
    "_run_subcommand": "lightning.pytorch.cli:LightningCLI",
    "_set_num_threads_if_needed": "lightning.fabric.utilities.distributed",
    "_set_seed": "lightning.pytorch.cli:LightningCLI",
    "_setup_distributed": "lightning.pytorch.strategies:ModelParallelStrategy",
    "_setup_model": "lightning.pytorch.strategies:DDPStrategy",
    "_state_dicts": "lightning.pytorch.utilities.combined_loader:CombinedLoader",
    # ---- others
    "_SubParsersAction": "argparse",
    "_Unpickler": "pickle",
    "_actions": "argparse:_ActionsContainer",
    "_expand_help": "argparse:HelpFormatter",
    "_get_type_str": "jsonargparse._formatters:DefaultHelpFormatter",
    "_typehint": "jsonargparse._typehints:ActionTypeHint",
    "_call_s3": "s3fs:S3FileSystem",
    "_encode_pair": "lm_eval.api.model:TemplateLM",
    "_completions": "jsonargparse",
    "_from_config": "jsonargparse",
    "_loaders_dumpers": "jsonargparse",
    "_paths": "jsonargparse",
    "_typehints": "jsonargparse",
    "_util": "jsonargparse",
    "_data": "torchao.float8.float8_training_tensor:Float8TrainingTensor",
    "_flash_attn_bwd": "flash_attn.cute.interface",
    "_flash_attn_fwd": "flash_attn.cute.interface",
    "_scale": "torchao.float8.float8_training_tensor:Float8TrainingTensor",
    "_cat_file": "fsspec.asyn:AsyncFileSystem",
    "_loglikelihood_tokens": "lm_eval.api.model:TemplateLM",
    "_ls": "s3fs:S3FileSystem",
    "_makedirs": "s3fs:S3FileSystem",
    "_option_string_actions": "argparse:_ActionsContainer",
    "_pipe_file": "fsspec.asyn:AsyncFileSystem",
    "_raise_not_found_for_status": "fsspec.implementations.http:HTTPFileSystem",
    "_rm_file": "s3fs:S3FileSystem",
    "_rmdir": "s3fs:S3FileSystem",
    "_run_for_rank": "datatrove.executor.base:PipelineExecutor",
    "_signal": "signal",
    "_strip_protocol": "fsspec:AbstractFileSystem",
    "_validators": "huggingface_hub.utils",
    # ---- transformers
    "_is_hf_initialized": "transformers.modeling_utils",
    "_keep_in_fp32_modules": "transformers.modeling_utils:PreTrainedModel",
    "_keep_in_fp32_modules_strict": "transformers.modeling_utils:PreTrainedModel",
    "_no_split_modules": "transformers.modeling_utils:PreTrainedModel",
}
"""Private names and their owners: `module`, or `module:Class`, whose methods may assign the name to an object."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "_fsdp_param_groups": ("torch 2.13",),
}
"""The tested versions that have a name, for names that not all of them have. The code that uses such a name asks."""

TESTED = ("torch 2.11", "torch 2.13", "lightning 2.6")
"""The versions with which the list is compared."""

ONLY_WITH_NCCL = ("_dump_nccl_trace_json",)
"""Names that torch has in builds with NCCL."""

UNDOCUMENTED = (
    "torch: FSDPParamGroup.fsdp_params, .wait_for_unshard, .post_backward, .reduce_grads; FSDPParam.offload_to_cpu, "
    ".sharded_param, .unsharded_param, .unsharded_accumulated_grad (genesis/strategies/host_units.py)",
)

TEXTS = {
    *(
        "_adapter",
        "_bias",
        "_blocks",
        "_calls",
        "_id",
        "_token_id",
        "_in",
        "_kept",
        "_ms",
        "_no_signal",
        "_norm",
        "_parallel",
        "_proj",
        "_reader",
        "_scale_inv",
        "_scales",
        "_sent_bytes",
        "_spread",
        "_stderr",
        "_token",
        "_worker",
        "_genesis_reward_",
    ),
    *("_data_files", "_generation_is_marked", "_local", "_action_listeners", "_begin_action", "_end_action"),
}
"""Parts of texts of ours that only look like names, and keys of files."""


class Use(NamedTuple):
    """A private name in a file of ours."""

    name: str
    file: str
    line: int


def find_uses(files: dict[str, str]) -> Iterator[Use]:
    """Yields each private name that the sources use and neither the class nor the file defines.

    Args:
        files: The source of each file.
    """
    trees = {file: ast.parse(source) for file, source in files.items()}
    classes: dict[str, ast.ClassDef] = {}
    for tree in trees.values():
        classes |= {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for file, tree in trees.items():
        names = _Names(classes, _find_definitions(tree))
        names.visit(tree)
        yield from (Use(name, file, line) for name, line in sorted(set(names.found)))


def read_sources(root: Path) -> dict[str, str]:
    """Returns the sources of the two packages, by their paths below the repository."""
    return {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def is_private(name: str) -> bool:
    """Returns whether a name is private and not one of Python's."""
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None and name not in PUBLIC


def _find_definitions(tree: ast.AST) -> set[str]:
    """Returns the names that a file or a class defines: functions, classes, variables, attributes of any object."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Assign) and any(getattr(one, "id", None) == "__slots__" for one in node.targets):
            names |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    return names


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


class _Names(ast.NodeVisitor):
    """Collects the private names of a file that neither its class nor the file defines.

    Args:
        classes: All classes of ours, by name.
        of_file: What the file defines.
    """

    def __init__(self, classes: dict[str, ast.ClassDef], of_file: set[str]) -> None:
        self._classes, self._of_file = classes, of_file
        self._own: list[set[str]] = []
        self._inherited: list[set[str]] = []
        self._ours: set[str] = set()
        self._docstrings: set[int] = set()
        self.found: list[tuple[str, int]] = []

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr):
                self._docstrings.add(id(first.value))
        super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        inherited = self._inherit(node, {node.name})
        self._inherited.append(inherited)
        self._own.append(inherited | _find_definitions(node))
        self.generic_visit(node)
        self._own.pop()
        self._inherited.pop()

    def _inherit(self, node: ast.ClassDef, seen: set[str]) -> set[str]:
        """Returns what the bases of ours define."""
        names: set[str] = set()
        for base in node.bases:
            name = getattr(base, "id", getattr(base, "attr", ""))
            if name in self._classes and name not in seen:
                seen.add(name)
                names |= _find_definitions(self._classes[name]) | self._inherit(self._classes[name], seen)
        return names

    def visit_Attribute(self, node: ast.Attribute) -> None:
        defined = self._of_file
        if _is_self(node.value) and self._own:
            defined = self._own[-1]
        elif isinstance(node.value, ast.Call) and getattr(node.value.func, "id", None) == "super":
            defined = self._inherited[-1]
        elif isinstance(node.value, ast.Name) and node.value.id in self._ours:
            defined = {node.attr}
        self._note(node.attr, node, defined)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._note_path(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").split(".")[0] in ("genesis", "genesis_callbacks"):
            self._ours |= {alias.asname or alias.name for alias in node.names}
            return
        self._note_path(node.module or "", node)
        for alias in node.names:
            self._note(alias.name, node, set())

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and id(node) not in self._docstrings and not re.search(r"\s", node.value):
            for name in node.value.split("."):
                self._note(name, node, self._of_file)

    def _note_path(self, module: str, node: ast.AST) -> None:
        for name in module.split("."):
            self._note(name, node, set())

    def _note(self, name: str, node: ast.AST, defined: set[str]) -> None:
        if is_private(name) and name not in defined:
            self.found.append((name, getattr(node, "lineno", 0)))
