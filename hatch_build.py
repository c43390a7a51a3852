"""Puts the recipes of `configs/` into the wheel; an editable installation finds them in the checkout."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RecipesHook(BuildHookInterface):
    """Adds `configs/` as `genesis/configs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the folder to a wheel; `version` is "standard" or "editable"."""
        if version == "standard":
            build_data["force_include"]["configs"] = "genesis/configs"
