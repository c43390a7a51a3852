"""Decides what a mirror copies and removes. Pure: listings in, names and listings out."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from genesis.base.errors import UserError
from genesis.operations.supervise.mirror_manifest import CheckpointListing


@dataclass(frozen=True)
class MirrorRetention:
    """Which checkpoints a mirror keeps, beside the best ones of the run and the bases of the others.

    Args:
        keep_last: Number of the newest checkpoints.
        keep_every_n_steps: Checkpoints whose step is a multiple of this stay for good; None for no such rule.
    """

    keep_last: int = 2
    keep_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every_n_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: give a number of at least 1")

    def choose(self, listings: Collection[CheckpointListing], marked: Collection[str]) -> list[CheckpointListing]:
        """Returns those that stay, the newest first.

        Args:
            listings: All that there are.
            marked: The names of the best checkpoints.
        """
        in_order = sorted(listings, key=order)
        newest = {listing.marker for listing in in_order[-self.keep_last :]}
        every = self.keep_every_n_steps
        return [
            listing
            for listing in reversed(in_order)
            if listing.marker in newest or listing.name in marked or (every is not None and listing.step % every == 0)
        ]


def order(listing: CheckpointListing) -> tuple[int, int]:
    """Returns the place of a checkpoint in the lineage: its number first, because steps may be repeated."""
    return listing.sequence, listing.step


def find_superseded(run: Sequence[CheckpointListing], mirrored: Sequence[CheckpointListing]) -> set[str]:
    """Returns the markers of mirrored checkpoints that the run no longer descends from.

    A checkpoint that is merely missing in the run proves nothing: its retention may have removed it, or the disk was
    lost. It is superseded if the run has gone back before it and saved again: the run has another checkpoint of the
    same number, or a later one with a smaller number. What descends from a superseded one is superseded, too.

    Args:
        run: The committed checkpoints of the run.
        mirrored: The committed checkpoints of the mirror.
    """
    own = {listing.marker for listing in run}
    superseded = {
        old.marker
        for old in mirrored
        if old.marker not in own
        and any(
            new.sequence == old.sequence or (new.sequence < old.sequence and new.created_seconds > old.created_seconds)
            for new in run
        )
    }
    for listing in sorted(mirrored, key=order):
        if listing.previous_hash in superseded and listing.marker not in own:
            superseded.add(listing.marker)
    return superseded


def plan_copies(
    run: Sequence[CheckpointListing],
    mirrored: Sequence[CheckpointListing],
    retention: MirrorRetention,
    marked: Collection[str] = (),
) -> list[CheckpointListing]:
    """Returns the checkpoints of the run to copy, the newest first: if the disk is lost meanwhile, it matters most."""
    there = {listing.marker for listing in mirrored}
    return [listing for listing in retention.choose(run, marked) if listing.marker not in there]


def plan_mirror_removals(
    run: Sequence[CheckpointListing],
    mirrored: Sequence[CheckpointListing],
    retention: MirrorRetention,
    marked: Collection[str] = (),
) -> list[CheckpointListing]:
    """Returns the mirrored checkpoints to remove, the oldest first; none while the run's newest is not mirrored."""
    there = {listing.marker for listing in mirrored}
    if not run or max(run, key=order).marker not in there:
        return []
    superseded = find_superseded(run, mirrored)
    valid = [listing for listing in mirrored if listing.marker not in superseded]
    staying = {listing.marker for listing in retention.choose(valid, marked)}
    staying |= {listing.marker for listing in retention.choose(run, marked)}  # or it would be copied again
    staying |= bases_of(listing for listing in mirrored if listing.marker in staying)
    return [listing for listing in sorted(mirrored, key=order) if listing.marker not in staying]


def bases_of(listings: Iterable[CheckpointListing]) -> set[str]:
    """Returns the markers of the bases that checkpoints name."""
    return {listing.base.manifest_hash for listing in listings if listing.base is not None}
