"""`genesis upcycle`."""

from pathlib import Path

from genesis.base.arguments import Parser
from genesis.base.errors import numbered
from genesis.base.run_directory import RunDirectory
from genesis.export.staging import check_is_new
from genesis.export.upcycle import UpcycleOptions, upcycle
from genesis.generate.checkpoint_reference import find_checkpoint
from genesis.model.mixture import SCORES

_DESCRIPTION = """Makes a mixture of experts from a dense model: each expert begins as a copy of the dense feed-forward
part, and routers begin at random. The mixture gives the logits of the dense model, which is proved before it is
committed. The result is a run's directory like that of an import.
Example: genesis upcycle runs/demo runs/mixture --experts 8 --top_k 2"""


def main(argv: list[str]) -> int:
    """Runs `genesis upcycle` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    check_is_new(arguments.out)
    options = UpcycleOptions(
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        scores=arguments.scores,
        num_dense_layers=arguments.num_dense_layers,
        mixture_every=arguments.mixture_every,
        has_balance_bias=arguments.balance_bias,
        balance_loss=arguments.balance_loss,
        z_loss=arguments.z_loss,
        noise=arguments.noise,
        seed=arguments.seed,
    )
    checkpoint = find_checkpoint(arguments.model)
    report = upcycle(checkpoint, arguments.out, options)
    logits = report["logits"]
    print(
        f"{arguments.out}: {checkpoint} as a mixture of {numbered(options.num_experts, 'experts')}, top {options.top_k}"
    )
    print(f"logits: largest difference {logits['largest_difference']:.1e} of the largest logit")
    if options.noise:
        print(f"  with noise: {logits['largest_difference_with_noise']:.1e}")
    print(f"train on: genesis fit --config {RunDirectory(arguments.out).imported_recipe} --data.corpus CORPUS")
    return 0


def _build_parser() -> Parser:
    parser = Parser(prog="genesis upcycle", description=_DESCRIPTION)
    add = parser.add_argument
    add("model", type=Path, help="a dense run (its newest checkpoint), RUN/best, RUN/STEP, or a checkpoint's path")
    add("out", type=Path, help="the run's directory to create; it must not exist")
    add("--experts", type=int, required=True, help="number of experts")
    add("--top_k", type=int, required=True, help="number of experts that see a token, 2 or more")
    add("--scores", choices=SCORES, default="softmax", help="the router's scores (default %(default)s)")
    add("--num_dense_layers", type=int, default=0, help="number of first layers that stay dense (default 0)")
    add("--mixture_every", type=int, default=1, help="make a mixture of every n-th of the other layers (default 1)")
    add(
        "--balance_bias",
        action="store_true",
        help="balance the experts by a bias, too; such a mixture has no export for transformers",
    )
    add("--balance_loss", type=float, default=0.01, help="factor of the balance loss (default %(default)s)")
    add("--z_loss", type=float, default=0.0, help="factor of the z-loss (default 0)")
    add(
        "--noise",
        type=float,
        default=0.0,
        help="deviation of noise on each expert's weights, as a share of the weights' own; the logits then differ "
        "(default 0)",
    )
    add("--seed", type=int, default=0, help="seed of routers and noise (default 0)")
    return parser
