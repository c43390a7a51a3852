"""How far the mirrors of a run are behind, for Prometheus.

genesis_mirror_lag_seconds          time since the first commit that the `mirror` lacks; 0 if it lacks none
genesis_mirror_failing              1 if the last attempt of the `mirror` failed
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from genesis.base.errors import printable
from genesis.operations.mirror.listing import read_local_marker
from genesis.operations.mirror.status import MirrorStatus, read_mirror_statuses
from genesis.operations.supervise.checkpoints import commit_seconds, list_markers


class MirrorCollector(Collector):
    """Computes the metrics of a run's mirrors whenever a registry collects them.

    Args:
        run_dir: The run's directory.
        clock: Returns Unix time.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._run_dir, self._clock = run_dir, clock

    def collect(self) -> Iterable[Metric]:
        """Returns both metrics, with a value for each mirror."""
        name, labels = printable(str(self._run_dir)), ("run", "mirror")
        lag = GaugeMetricFamily("genesis_mirror_lag_seconds", "Time the mirror is behind", labels=labels)
        failing = GaugeMetricFamily("genesis_mirror_failing", "Whether the mirror fails", labels=labels)
        for mirror in read_mirror_statuses(self._run_dir):
            lag.add_metric((name, mirror.url), measure_lag(self._run_dir, mirror, self._clock()))
            failing.add_metric((name, mirror.url), float(bool(mirror.problem)))
        return lag, failing


def measure_lag(run_dir: Path, status: MirrorStatus, now_seconds: float) -> float:
    """Returns the seconds since the run committed the first checkpoint that the mirror lacks; 0 if it lacks none.

    The lag is measured from the run's directory, so that it grows even if the mirror's process is gone. Older
    checkpoints that the mirror's retention leaves out do not count.
    """
    missing: list[float] = []
    for marker in list_markers(run_dir).values():
        seconds = commit_seconds(marker) or 0.0
        is_newer = seconds > status.newest_created_seconds
        # Older checkpoints are not read: this is asked at each scrape.
        if is_newer and read_local_marker(marker.parent) not in (None, *status.markers):
            missing.append(seconds)
    return max(0.0, now_seconds - min(missing)) if missing else 0.0
