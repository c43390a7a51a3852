"""Shares of a model that lie in the host's memory: how options give them, and which parts they choose. Pure."""

from genesis.base.errors import UserError, check_is_named


def read_share(name: str, value: object) -> float:
    """Returns the value of an option as a share.

    Args:
        name: The option.
        value: As a recipe gives it, where it may be anything.

    Raises:
        UserError: It is no number from 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise UserError(f"{name} is {value!r}; it must be a share from 0 to 1")
    return float(value)


def read_directory(value: object, share: float) -> str | None:
    """Returns the value of `optimizer_offload_directory`; None without one.

    Args:
        value: As a recipe gives it, where it may be anything.
        share: The share that would lie there.

    Raises:
        UserError: It is no path, or nothing would lie there.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserError(f"optimizer_offload_directory is {value!r}; it must be a path")
    check_is_named(value, "optimizer_offload_directory")
    if not share:
        raise UserError(
            f"optimizer_offload_directory is {value!r}, and optimizer_offload is 0, so that nothing would lie there: "
            "set optimizer_offload, up to 1"
        )
    return value


def read_cpu_offload(value: object) -> float:
    """Returns the share that `cpu_offload` gives, where `true` is all and `false` nothing.

    Raises:
        UserError: It is no number from 0 to 1.
    """
    return float(value) if isinstance(value, bool) else read_share("cpu_offload", value)


def spread_units(num_units: int, share: float) -> list[bool]:
    """Returns for each unit whether it is chosen: at least the share of all units, at even distances.

    Neighbours of a chosen unit then compute while it is copied.

    Example:
        >>> spread_units(4, 0.5)
        [False, True, False, True]
        >>> spread_units(3, 0.5)
        [False, True, True]
    """
    # Rounded, because 0.1 * 30 is a little more than 3.
    num_chosen = -(-round(share * num_units * 1e9) // 1_000_000_000)
    return [(index + 1) * num_chosen // num_units > index * num_chosen // num_units for index in range(num_units)]
