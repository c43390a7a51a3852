"""The options of a release, and the licences that the Hub accepts: by its ids, most of them SPDX ids in lower case."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from genesis.base.errors import UserError

OTHER: Final = "other"
# https://huggingface.co/docs/hub/repositories-licenses, in its order, as of October 2026.
_NAMES: Final = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
    other
"""
LICENSES: Final = tuple(_NAMES.split())

_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*(?<!\.lock))?")
"""A version that is also a valid git tag, which must not end with `.lock`."""
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")


@dataclass(frozen=True)
class ReleaseOptions:
    """The options of a release.

    Args:
        repo: The repository on the Hub, OWNER/NAME.
        license: The licence, by the Hub's id.
        version: The version, three numbers; the tag is v followed by it.
        languages: ISO 639 codes, or `code`.
        license_file: A file with the licence's text, required for a licence that the Hub does not know.
    """

    repo: str
    license: str
    version: str = "1.0.0"
    languages: tuple[str, ...] = ()
    license_file: Path | None = None

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise UserError(f"--repo is {self.repo!r}: {' '.join(str(error).split())}") from None
        if self.repo.count("/") != 1:
            raise UserError(f"--repo is {self.repo!r}: give OWNER/NAME")
        check_license(self.license)
        if self.license == OTHER and self.license_file is None:
            raise UserError(f"--license is {OTHER!r}: give its text by --license_file")
        if not _VERSION.fullmatch(self.version):
            raise UserError(f"--version is {self.version!r}: give three numbers, such as 1.0.0")
        for language in self.languages:
            if not _LANGUAGE.fullmatch(language):
                raise UserError(f"--language is {language!r}: give codes of ISO 639 such as en, or code")

    @property
    def owner(self) -> str:
        """The owner of the repository."""
        return self.repo.partition("/")[0]

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.repo.partition("/")[2]

    @property
    def tag(self) -> str:
        """The tag in the repository."""
        return f"v{self.version}"


def check_license(name: str) -> None:
    """Checks that the Hub accepts a licence.

    Raises:
        UserError: The Hub does not know the licence; the message names the nearest.
    """
    if name in LICENSES:
        return
    near = difflib.get_close_matches(name.lower(), LICENSES, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise UserError(f"--license is {name!r}, which the Hub does not know{hint}; for any other licence give {OTHER!r}")
