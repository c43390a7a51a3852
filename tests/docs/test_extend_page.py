"""The page about extensions shows the code that is tested, and its check of a mixer accepts right mixers alone."""

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
from code_blocks import read_blocks

from genesis.model.delta import DeltaMetadata, GatedDeltaConfig
from genesis.model.mixer import ForwardTokens, SequenceMixerConfig
from tests.commands import REPOSITORY
from tests.extend.convolution import ConvolutionConfig
from tests.model.latent_attention import LatentAttentionConfig

LINEAR = GatedDeltaConfig(2, 4, 8, 12)
LATENT = LatentAttentionConfig(num_heads=4, latent_dim=16, key_dim=8, rotary_dim=4, value_dim=10)


@dataclass(frozen=True)
class MixesDocuments(GatedDeltaConfig):
    def build_metadata(self, tokens: ForwardTokens, layers: Sequence[int]) -> Sequence[DeltaMetadata]:
        return super().build_metadata(tokens._replace(document_ids=None, offsets=None), layers)


@dataclass(frozen=True)
class KeepsPadding(GatedDeltaConfig):
    def build_metadata(self, tokens: ForwardTokens, layers: Sequence[int]) -> Sequence[DeltaMetadata]:
        cached = tokens.cached and tokens.cached._replace(num_new=None)
        return super().build_metadata(tokens._replace(cached=cached), layers)


def read_page() -> list[str]:
    page = (REPOSITORY / "docs/explanation/extend.md").read_text(encoding="utf-8")
    return [block.code for block in read_blocks(page)]


def dump_without_docstrings(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [
                one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
    return ast.dump(tree)


@pytest.mark.parametrize(("name", "of_class"), [("lion", "Lion"), ("rated", "Rated"), ("convolution", "Convolution")])
def test_an_example_on_the_page_is_the_code_that_is_tested(name: str, of_class: str) -> None:
    (shown,) = (code for code in read_page() if f"\nclass {of_class}(" in code)
    tested = (REPOSITORY / f"tests/extend/{name}.py").read_text(encoding="utf-8")
    assert dump_without_docstrings(shown) == dump_without_docstrings(tested)


def check_mixer(config: SequenceMixerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the page's check, to which the configuration is the reader's own."""
    own = ModuleType("my_package")
    own.MyMixerConfig = lambda width: config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_package", own)
    (check,) = (code for code in read_page() if "MyMixerConfig" in code and "torch" in code)
    exec(compile(check, "extend.md", "exec"), {})


@pytest.mark.parametrize(
    "config", [LINEAR, LATENT, ConvolutionConfig(width=4)], ids=["a state", "slots", "the page's example"]
)
def test_the_check_of_the_page_accepts_a_right_mixer(
    config: SequenceMixerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mixer(config, monkeypatch)


@pytest.mark.parametrize("fault", [MixesDocuments, KeepsPadding])
def test_the_check_of_the_page_finds_a_mixer_that_is_wrong(
    fault: type[GatedDeltaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_mixer(fault(2, 4, 8, 12), monkeypatch)
