"""A plain argument parser whose mistakes are one line."""

import argparse
import difflib
import re
from typing import NoReturn

from genesis.errors import UserError


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print, with the nearest option where one is unknown."""

    def error(self, message: str) -> NoReturn:
        """Raises.

        Raises:
            UserError: Always.
        """
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        options = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[1], options, n=1) if unknown else []
        raise UserError(f"{self.prog}: {message}{f'; did you mean {near[0]}?' if near else ''} (--help tells all)")
