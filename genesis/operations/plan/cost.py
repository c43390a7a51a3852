"""Hours, energy and money; and whether interruptible machines are cheaper than those that stay."""

from dataclasses import dataclass
from typing import Final

HOUR_SECONDS: Final = 3600.0
DAY_SECONDS: Final = 24 * HOUR_SECONDS


@dataclass(frozen=True)
class Cost:
    """What a run takes.

    Args:
        hours: Time of training.
        kilowatt_hours: Energy; None without a power.
        money: In the currency of the price; None without a price.
    """

    hours: float
    kilowatt_hours: float | None
    money: float | None


def count_cost(seconds: float, num_devices: int, watts: float | None, price_per_hour: float | None) -> Cost:
    """Returns what a run of so many seconds takes.

    Args:
        seconds: Time of training.
        num_devices: Number of devices.
        watts: Power of one device, with its share of the host.
        price_per_hour: Price of one device.
    """
    hours = seconds / HOUR_SECONDS
    device_hours = hours * num_devices
    return Cost(
        hours,
        None if watts is None else device_hours * watts / 1000.0,
        None if price_per_hour is None else device_hours * price_per_hour,
    )


@dataclass(frozen=True)
class Interruptions:
    """Interruptions of a machine that can be taken away.

    Args:
        per_day: Their number in a day of the run.
        interval_seconds: Time between saves.
        mirror_lag_seconds: Time by which the copy of a checkpoint on another machine is late; 0 if the disk stays.
        restart_seconds: Time from the interruption to the next training step.
    """

    per_day: float
    interval_seconds: float
    mirror_lag_seconds: float
    restart_seconds: float

    @property
    def lost_seconds(self) -> float:
        """Time that an interruption costs on average: half an interval, the lag, and the restart."""
        return self.interval_seconds / 2.0 + self.mirror_lag_seconds + self.restart_seconds

    @property
    def lost_share(self) -> float:
        """Share of the time that interruptions take; 1 if no training would be left."""
        return min(1.0, self.per_day * self.lost_seconds / DAY_SECONDS)


@dataclass(frozen=True)
class SpotComparison:
    """An interruptible price beside a firm one.

    Args:
        interruptions: The interruptions.
        hours: Time of the run with interruptions; None if it would never end.
        spot_money: Its price.
        on_demand_money: The price of the run without interruptions.
    """

    interruptions: Interruptions
    hours: float | None
    spot_money: float | None
    on_demand_money: float

    @property
    def is_spot_cheaper(self) -> bool:
        """Whether interruptions cost less than the firm price."""
        return self.spot_money is not None and self.spot_money < self.on_demand_money


def compare_spot(
    seconds: float, num_devices: int, spot_price: float, on_demand_price: float, interruptions: Interruptions
) -> SpotComparison:
    """Returns both prices of a run that trains for so many seconds.

    Example:
        >>> calm = Interruptions(per_day=4, interval_seconds=600, mirror_lag_seconds=0, restart_seconds=300)
        >>> round(compare_spot(86_400, 1, 1.0, 2.0, calm).spot_money, 2)
        24.69
    """
    on_demand = seconds / HOUR_SECONDS * num_devices * on_demand_price
    share = interruptions.lost_share
    if share >= 1.0:
        return SpotComparison(interruptions, None, None, on_demand)
    hours = seconds / HOUR_SECONDS / (1.0 - share)
    return SpotComparison(interruptions, hours, hours * num_devices * spot_price, on_demand)
