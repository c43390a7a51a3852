"""What differs between the run that saved and the one that restores, and which of it may differ. Pure.

A key is dotted: `trainer.max_steps` of the recipe, the plain name of an entry of the identity, `versions.torch`,
`device.copies`. A *free* key may always differ, an *allow* key only if the user names it, a *never* key not at all.
A policy decides which is which. The caller, which knows the layout of the recipe, gives it; the engine has none.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Literal

from genesis_callbacks.errors import printable

from .errors import CheckpointError, DriftError
from .manifest import Manifest

Kind = Literal["free", "allow", "never"]
Verdict = Literal["free", "allowed", "warned", "refused", "never"]

IDENTITY_AREA = "identity"
VERSIONS_AREA = "package versions"
DEVICE_AREA = "device"
OTHER_AREA = "other"
_MAX_VALUE_LENGTH = 120


class DriftWarning(UserWarning):
    """A run goes on with other package versions than it was saved with; the message names them."""


def key_matches(key: str, patterns: Sequence[str]) -> bool:
    """Says whether one of the globs names `key` or something that it lies in.

    Example:
        >>> key_matches("model.decoder.dim", ["model.decoder"]), key_matches("schedule.shape", ["*.shape"])
        (True, True)
    """
    return any(fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*") for pattern in patterns)


@dataclass(frozen=True)
class DriftPolicy:
    """Which keys may differ, and under which heading each is reported.

    Args:
        rules: (kind, glob) in order: the first that matches a key decides; a key that none matches is `allow`.
        areas: (area, glob) in order, for keys of the recipe.
        remedy: How a user allows a change; `{keys}` becomes a JSON list of keys.
        unify: Returns a recipe in the one form in which recipes are compared, where several spell the same run. It is
            given plain JSON, of a manifest that anybody may have written, too; None for recipes with one form.
    """

    rules: tuple[tuple[Kind, str], ...] = ()
    areas: tuple[tuple[str, str], ...] = ()
    remedy: str = "allow_changed={keys}"
    unify: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def kind_of(self, key: str) -> Kind:
        """Returns whether `key` is free, to be allowed, or never to change."""
        return next((kind for kind, pattern in self.rules if key_matches(key, [pattern])), "allow")

    def area_of(self, key: str, default: str = OTHER_AREA) -> str:
        """Returns the heading of a key of the recipe or the identity."""
        return next((area for area, pattern in self.areas if key_matches(key, [pattern])), default)


@dataclass(frozen=True)
class Difference:
    """One key with its value in the checkpoint and in this run, and what follows for a restore."""

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
    """Yields (dotted key, before, now) for each value that differs; what is not there is None.

    Items of a list that have names are compared by these, where both lists have the same in the same order.
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
    """Returns the `name` of each item of a list, None where they do not have one each of their own."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        return None
    names = [item.get("name") for item in value]
    return names if all(isinstance(name, str) for name in names) and len({*names}) == len(names) else None


def _as_json(name: str, value: Mapping[str, Any]) -> Any:
    """What a manifest would give back for `value`: tuples become lists, keys strings."""
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

    Recipes are compared where both have one, identities and versions where both name the same thing. An entry of the
    identity may have the key of the recipe that it repeats, and is then reported once.

    Args:
        manifest: The checkpoint's.
        identity: This run's.
        recipe: This run's; an empty one compares nothing.
        versions: Package to version, and what the device was found to do, of this process.
        policy: Which keys may differ.
        allow_changed: Globs of keys of kind `allow` that may differ this time.

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
    """Refuses a restore by what `find_drift` found.

    Raises:
        DriftError: Its first line has the remedy; the diff follows.
    """
    never = [difference for difference in differences if difference.verdict == "never"]
    refused = [difference for difference in differences if difference.verdict == "refused"]
    if not never and not refused:
        return
    remedies = ["use what it was trained with"]
    if refused:
        keys = json.dumps([difference.key for difference in refused])
        remedies.append(f"allow what you mean to change by {policy.remedy.format(keys=keys)}")
    if never:
        keys = ", ".join(printable(difference.key) for difference in never)
        remedies.append(f"start a new run for another {keys}, which cannot change within one")
    shown = [difference for difference in differences if difference.verdict in ("never", "refused", "warned")]
    raise DriftError(
        f"the checkpoint of step {manifest.step} is of another run: {'; '.join(remedies)}\n{format_differences(shown)}"
    )
