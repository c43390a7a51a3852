"""Reads data states that earlier versions saved in checkpoints, under keys that have been renamed since."""

from collections.abc import Mapping
from typing import Any, Final

_STATE_KEYS: Final = {
    "tokens_drawn": "tokens_consumed",
    "epochs_drawn": "epochs_consumed",
    "ledger_of_lanes": "usage_of_lanes",
}
_MIX_KEYS: Final = {"sequences_drawn": "sequences_consumed"}


def rename_old_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved data state under current keys; a state that already has them is returned with equal content.

    Example:
        >>> rename_old_keys({"tokens_drawn": {"web": 640}, "data_position": 8})
        {'tokens_consumed': {'web': 640}, 'data_position': 8}
    """
    renamed = _rename(state, _STATE_KEYS)
    order = renamed.get("order")
    # The state comes from a file: malformed parts are left for the reader of the state to refuse.
    if isinstance(order, Mapping) and isinstance(order.get("mixes"), list):
        mixes = [_rename(mix, _MIX_KEYS) if isinstance(mix, Mapping) else mix for mix in order["mixes"]]
        renamed["order"] = {**order, "mixes": mixes}
    return renamed


def _rename(content: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {keys.get(key, key): value for key, value in content.items()}
