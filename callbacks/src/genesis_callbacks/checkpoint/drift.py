"""Finds the differences between the run that saved and the run that restores, and decides which are allowed. Pure.

A key is dotted: `trainer.max_steps` in the recipe, the plain name of an entry of the identity, `versions.torch`,
`device.copies`. A *free* key may always differ, an *allow* key only if the user names it, and a *never* key must not
differ. A policy assigns these kinds. The caller provides the policy, because only the caller knows the layout of the
recipe.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Literal

from ..base.checkpoint_errors import CheckpointError, DriftError
from ..base.errors import name_some, printable
from ..base.manifest import Manifest

Kind = Literal["free", "allow", "never"]
Verdict = Literal["free", "allowed", "warned", "refused", "never"]

IDENTITY_AREA = "identity"
VERSIONS_AREA = "package versions"
DEVICE_AREA = "device"
OTHER_AREA = "other"
_MAX_VALUE_LENGTH = 120
_MAX_SHOWN_KEYS = 5


class DriftWarning(UserWarning):
    """A run continues with other package versions than those of its checkpoint; the message lists them."""


def key_matches(key: str, patterns: Sequence[str]) -> bool:
    """Returns whether one of the globs matches `key` or one of its parents.

    Example:
        >>> key_matches("model.decoder.dim", ["model.decoder"]), key_matches("schedule.shape", ["*.shape"])
        (True, True)
    """
    return any(fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*") for pattern in patterns)


@dataclass(frozen=True)
class DriftPolicy:
    """Which keys may differ, and in which area of the report each appears.

    Args:
        rules: (kind, glob) in order: the first match decides; a key without a match is `allow`.
        areas: (area, glob) in order, for keys of the recipe.
        remedy: How a user allows a change; `{keys}` becomes a JSON list of keys.
        unify: Returns a recipe in a canonical form for comparison, if several recipes can describe the same run. The
            argument is plain JSON, possibly from an untrusted manifest. None for recipes with only one form.
        align: Returns this run's recipe, the second argument, written as the checkpoint's, the first, wherever both
            mean the same. Both are unified. None if that never depends on the other recipe.
    """

    rules: tuple[tuple[Kind, str], ...] = ()
    areas: tuple[tuple[str, str], ...] = ()
    remedy: str = "allow_changed={keys}"
    unify: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    align: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None

    def kind_of(self, key: str) -> Kind:
        """Returns the kind of `key`: free, allow or never."""
        return next((kind for kind, pattern in self.rules if key_matches(key, [pattern])), "allow")

    def area_of(self, key: str, default: str = OTHER_AREA) -> str:
        """Returns the area of a key of the recipe or the identity."""
        return next((area for area, pattern in self.areas if key_matches(key, [pattern])), default)


@dataclass(frozen=True)
class Difference:
    """One key with its value in the checkpoint and in this run, and the consequence for a restore."""

    key: str
    area: str
    before: Any
    now: Any
    verdict: Verdict

    @property
    def text(self) -> str:
        """The key with both values, in one line."""
        return f"{printable(self.key)} is {_show(self.now)} and was {_show(self.before)}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 1]}…"


def compare_mappings(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, before, now) for each value that differs; a missing value is None.

    Items of a list are compared by name if both lists have the same names in the same order.
    """
    names = _read_names(before)
    if names is not None and names == _read_names(now):
        before, now = dict(zip(names, before, strict=True)), dict(zip(names, now, strict=True))
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        if before != now:
            yield key, before, now
        return
    for name in sorted(before.keys() | now.keys()):
        yield from compare_mappings(before.get(name), now.get(name), f"{key}.{name}" if key else name)


def _read_names(value: Any) -> list[str] | None:
    """Returns the `name` of each item of a list; None if an item has no name or two items share one."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        return None
    names = [item.get("name") for item in value]
    return names if all(isinstance(name, str) for name in names) and len({*names}) == len(names) else None


def _as_json(name: str, value: Mapping[str, Any]) -> Any:
    """Returns `value` as a manifest would return it: tuples become lists, keys become strings."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the {name} for the manifest must be plain JSON: {error}") from error


def find_drift(
    manifest: Manifest,
    *,
    identity: Mapping[str, Any],
    recipe: Mapping[str, Any],
    versions: Mapping[str, str],
    policy: DriftPolicy,
    allow_changed: Sequence[str] = (),
) -> list[Difference]:
    """Returns every difference between a checkpoint and a run, by area.

    Recipes are compared if both sides have one; identities and versions are compared for the keys that both sides have.
    If an entry of the identity repeats a key of the recipe, its difference is reported once.

    Args:
        manifest: The checkpoint's manifest.
        identity: This run's identity.
        recipe: This run's recipe; an empty one is not compared.
        versions: Package to version in this process, and the results of the device's proofs.
        policy: Which keys may differ.
        allow_changed: Globs of keys of kind `allow` that may differ in this restore.

    Raises:
        CheckpointError: The run's recipe or identity is not plain JSON.
    """

    def judge(key: str) -> Verdict:
        kind = policy.kind_of(key)
        if kind == "allow":
            return "allowed" if key_matches(key, allow_changed) else "refused"
        return kind

    same_things = {key: value for key, value in _as_json("identity", identity).items() if key in manifest.identity}
    was = {key: manifest.identity[key] for key in same_things}
    found = [
        Difference(key, policy.area_of(key, IDENTITY_AREA), before, now, judge(key))
        for key, before, now in compare_mappings(was, same_things)
    ]
    if recipe and manifest.recipe:
        recipes: tuple[Any, Any] = manifest.recipe, _as_json("recipe", recipe)
        if policy.unify is not None:
            recipes = policy.unify(recipes[0]), policy.unify(recipes[1])
        if policy.align is not None:
            recipes = recipes[0], policy.align(*recipes)
        reported = {difference.key for difference in found}
        found += [
            Difference(key, policy.area_of(key), before, now, judge(key))
            for key, before, now in compare_mappings(*recipes)
            if key not in reported
        ]
    for package in sorted(manifest.versions.keys() & versions.keys()):
        before, now = manifest.versions[package], versions[package]
        if before != now:
            is_device = package.partition(".")[0] == DEVICE_AREA
            key = package if is_device else f"versions.{package}"
            verdict = _judge_version(key, before, now, allow_changed)
            found.append(Difference(key, DEVICE_AREA if is_device else VERSIONS_AREA, before, now, verdict))
    order = [IDENTITY_AREA, *dict.fromkeys(area for area, _ in policy.areas), OTHER_AREA, VERSIONS_AREA, DEVICE_AREA]
    return sorted(found, key=lambda difference: order.index(difference.area))


def _judge_version(key: str, before: str, now: str, allow_changed: Sequence[str]) -> Verdict:
    if before.partition("+")[0] == now.partition("+")[0]:
        return "free"  # the same release, built for other hardware
    return "allowed" if key_matches(key, allow_changed) else "warned"


def format_differences(differences: Sequence[Difference]) -> str:
    """Returns indented lines: each area with its differences."""
    lines: list[str] = []
    for area, members in groupby(differences, key=lambda difference: difference.area):
        lines += [f"  {area}", *(f"    {member.text}" for member in members)]
    return "\n".join(lines)


def check_drift(manifest: Manifest, differences: Sequence[Difference], policy: DriftPolicy) -> None:
    """Refuses a restore if `find_drift` found a difference that is not allowed.

    Raises:
        DriftError: The first line names what has changed; all changes with both values follow, then what to do.
    """
    never = [difference for difference in differences if difference.verdict == "never"]
    refused = [difference for difference in differences if difference.verdict == "refused"]
    if not never and not refused:
        return
    shown = [difference for difference in differences if difference.verdict in ("never", "refused", "warned")]
    lines = [
        f"the checkpoint of step {manifest.step} is of another run: {_join([*never, *refused])} changed",
        format_differences(shown),
        "to continue the run as it was: set the values back to those that they were",
    ]
    if never:
        lines.append(f"to train with another {_join(never)}: start a new run, because a run cannot change this")
    if refused:
        keys = json.dumps([difference.key for difference in refused])
        which = "the other changes" if never else "these changes"
        lines.append(f"to continue the run with {which}: add {policy.remedy.format(keys=keys)}")
    raise DriftError("\n".join(lines))


def _join(differences: Sequence[Difference]) -> str:
    """Returns the keys for a line, of many only the first."""
    return name_some([printable(difference.key) for difference in differences], _MAX_SHOWN_KEYS)
