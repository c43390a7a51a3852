"""Rewards by name, and episodes side by side: those of the first rollout beside the newest, or of several runs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import printable
from genesis.operations.report.charts import Chart, Drawing, Line, plan_lines
from genesis.operations.report.collect import Episode, Run

_REWARD: Final = re.compile(r"train/reward_(\w+)")
_OTHERS: Final = re.compile(r"(?:.*_)?(?:spread|no_signal)")
_MAX_SHOWN: Final = 4
_TURNS: Final = (
    Line("train/turns", "turns"),
    Line("train/calls", "calls of tools"),
    Line("train/unread_calls", "calls that cannot be read"),
)
_SHARES: Final = (Line("train/finished", "finished"), Line("train/no_signal", "in groups without a signal"))


def plan_charts(runs: Sequence[Run]) -> list[Chart]:
    """Returns the charts of rewards and episodes, for runs that have trained on rewards."""
    keys = sorted({key for run in runs for key in run.log.series})
    names = [found[1] for key in keys if (found := _REWARD.fullmatch(key)) and not _OTHERS.fullmatch(found[1])]
    rewards = tuple(Line(f"train/reward_{name}", name) for name in names)
    spread = Line("train/reward_spread", "spread within groups")
    charts = [
        Chart("rewards", "Rewards by name", "before their weights", rewards),
        Chart("reward-spread", "Spread of rewards", "standard deviation", (spread,)),
        Chart("answers", "Answers", "share", _SHARES),
        Chart("turns", "Turns and calls", "per episode", _TURNS),
    ]
    return [chart for chart in charts if any(chart.is_in(run) for run in runs)]


def plan_rewards(runs: Sequence[Run]) -> list[Drawing]:
    """Returns the drawings of `plan_charts`."""
    return plan_lines(runs, plan_charts(runs))[0]


def lay_out_episodes(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the columns of episodes: headings, and rows with an episode of each column.

    Of one run the first rollout stands beside the newest; of several runs, the newest of each.
    """
    columns: list[tuple[str, Sequence[Episode]]] = []
    for run in runs:
        if run.episodes and len(runs) == 1:
            columns += [(f"position {_position(path)}", episodes) for path, episodes in run.episodes.items()]
        elif run.episodes:
            path, episodes = list(run.episodes.items())[-1]
            columns.append((f"{run.name}, position {_position(path)}", episodes))
    num_rows = min(_MAX_SHOWN, max((len(episodes) for _, episodes in columns), default=0))
    rows = [[episodes[row] if row < len(episodes) else None for _, episodes in columns] for row in range(num_rows)]
    return {"heads": [printable(head) for head, _ in columns], "rows": rows}


def _position(path: Path) -> str:
    """Returns the position of a rollout, which its file is named by."""
    return path.name.partition(".")[0].lstrip("0") or "0"
