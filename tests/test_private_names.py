"""Private names of torch, Lightning and others: the list has all that the search finds, and the packages have them."""

import importlib
import inspect
import pkgutil
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import genesis
import genesis_callbacks

from .private_names import ONLY_IN, ONLY_WITH_NCCL, TESTED, TEXTS, USED, find_uses, is_private, read_sources

REPOSITORY = Path(__file__).parent.parent
OWN = (genesis.__name__, genesis_callbacks.__name__)
OVERRIDDEN = {"_configure_launcher", "_get_type_str", "_setup_model", "_parse_ckpt_path", "_loglikelihood_tokens"}
"""Names that no line reads: methods of ours that replace those of a base."""
HIDDEN = {"_parameters", "_buffers"}
"""Names of torch that `_state_dicts.py` also has for itself, so that the search does not find them."""
OF_PYTHON = {"_abc_impl", "_backward_cls", "_member_map_", "_generate_next_value_", "_value_repr_"} | {
    *("_is_protocol", "_is_runtime_protocol"),
}
"""Names that a metaclass of Python or torch gives every class."""
OF_TORCH_AND_LIGHTNING = sorted(name for name, owner in USED.items() if owner.startswith(("torch", "lightning")))


@pytest.mark.slow
def test_the_list_has_every_private_name_that_the_search_finds() -> None:
    uses = [use for use in find_uses(read_sources(REPOSITORY)) if use.name not in TEXTS]
    unknown = [f"{use.file}:{use.line}: {use.name}" for use in uses if use.name not in USED]
    assert not unknown, "list them in tests/private_names.py with their owners, or use a public name"
    assert {use.name for use in uses} | OVERRIDDEN | HIDDEN == USED.keys(), "remove what is no longer used"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *(("def f(x):\n    return x._one", "_one"), ("from torch._inductor import config", "_inductor")),
        *(("import torch._one.two", "_one"), ("def f(x):\n    return getattr(x, '_one')", "_one")),
        ("class A(B):\n    def f(self):\n        return self._one", "_one"),
        ("class A(B):\n    def _one(self):\n        return super()._one()", "_one"),
        (
            "class C:\n    def f(self):\n        self._one = 1\nclass A(B):\n    def f(self):\n        self._one()",
            "_one",
        ),
    ],
)
def test_every_spelling_is_found(source: str, name: str) -> None:
    assert name in {use.name for use in find_uses({"a.py": source})}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        self._one = 1\n    def g(self, other):\n        return other._one",
        "class A:\n    _one = 1\nclass B(A):\n    def f(self):\n        return self._one",
        "from genesis.model import attend\nattend._one",
        "def f(place):\n    return place._replace(a=1)",
        '"""`x._one` of a docstring."""',
    ],
)
def test_names_of_ours_are_not(source: str) -> None:
    assert not list(find_uses({"a.py": source}))


@pytest.mark.parametrize("name", OF_TORCH_AND_LIGHTNING)
def test_the_installed_versions_have_each_name_as_the_list_has_it(name: str) -> None:
    assert has_name(name) == is_expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(USED.keys() - set(OF_TORCH_AND_LIGHTNING)))
def test_other_packages_have_each_name(name: str) -> None:
    pytest.importorskip(USED[name].partition(":")[0].split(".")[0])
    assert has_name(name)


@pytest.mark.slow
def test_no_class_replaces_a_private_method_that_the_list_lacks() -> None:
    found = set()
    for package in (genesis, genesis_callbacks):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                found |= find_overrides(importlib.import_module(module.name))
    assert found > OVERRIDDEN
    assert found <= USED.keys() | OF_PYTHON


def find_overrides(module: ModuleType) -> set[str]:
    """Returns the private names of others' classes that the classes of a module define again."""
    classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    return {
        name
        for one in classes
        for name in filter(is_private, vars(one))
        for base in one.__mro__[1:]
        if name in vars(base) and base.__module__.split(".")[0] not in OWN
    }


def is_expected(name: str) -> bool:
    """Returns whether the list has a name for the installed version; for a version that is not tested, it has all."""
    if name in ONLY_WITH_NCCL:
        return dist.is_nccl_available()
    package = USED[name].split(".")[0].partition(":")[0]
    installed = f"{package} {'.'.join(version(package).split('.')[:2])}"
    return name not in ONLY_IN or installed in ONLY_IN[name] or installed not in TESTED


def has_name(name: str) -> bool:
    """Returns whether the owner has a name: itself, or in the source of its class, whose methods may assign it."""
    module_name, _, class_name = USED[name].partition(":")
    try:
        owner = importlib.import_module(module_name)
    except ModuleNotFoundError:
        outer, _, inner = module_name.rpartition(".")
        owner = getattr(importlib.import_module(outer), inner)
    if class_name:
        owner = getattr(owner, class_name)
    if hasattr(owner, name):
        return True
    sources = [inspect.getsource(one) for one in (owner.__mro__ if class_name else [owner]) if has_source(one)]
    return any(re.search(rf"(\.|['\"]){name}\b", source) for source in sources)


def has_source(owner: object) -> bool:
    """Returns whether the source of a class or module is a file of Python."""
    try:
        inspect.getsource(owner)  # type: ignore[arg-type]
    except (TypeError, OSError):
        return False
    return True
