"""The options of a release."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from genesis.base.errors import UserError
from genesis.operations.release.licenses import OTHER, check_license

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
