"""Whether DDP adds the gradients of three or more ranks in another order after its first step.

DDP sorts gradients into other buckets once it has seen in which order they become ready. A gradient's place in its
bucket decides in which order gloo and NCCL add the ranks' values. A resumed run starts with the first buckets again, so
its first step can differ in the last bit from the same step of a run that was never killed. Two ranks have one sum.
"""

from lightning.pytorch.strategies import DDPStrategy, Strategy

from ._compat import read_ddp_options


def describe_bucket_order(strategy: Strategy, world_size: int) -> str | None:
    """Returns a notice for people who compare a resumed run with one that was never killed; None if both are equal."""
    # A sum of two values does not depend on their order; a sum of three floats does.
    if world_size <= 2 or not isinstance(strategy, DDPStrategy):
        return None
    # DDP never rebuilds its buckets with this option, because a parameter may be unused in the next step.
    if read_ddp_options(strategy).get("find_unused_parameters"):
        return None
    return (
        f"DDP changes the order in which it adds the gradients of {world_size} ranks after its first step: a resumed "
        "run can differ in the last bits from one that was never stopped. DDPStrategy(find_unused_parameters=True) "
        "makes it exact."
    )
