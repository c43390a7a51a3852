"""The check of a mixer on the page about extensions accepts right mixers alone."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
from code_blocks import read_blocks

from genesis.model.delta import DeltaMetadata, GatedDeltaConfig
from genesis.model.mixer import ForwardTokens, SequenceMixerConfig
from tests.commands import REPOSITORY
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


def check_mixer(config: SequenceMixerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the page's check, to which the configuration is the reader's own."""
    own = ModuleType("my_package")
    own.MyMixerConfig = lambda width: config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_package", own)
    page = (REPOSITORY / "docs/explanation/extend.md").read_text(encoding="utf-8")
    (check,) = (block.code for block in read_blocks(page) if "MyMixerConfig" in block.code and "torch" in block.code)
    exec(compile(check, "extend.md", "exec"), {})


@pytest.mark.parametrize("config", [LINEAR, LATENT], ids=["a state", "slots"])
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
