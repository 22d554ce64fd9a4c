"""The argument parser of all commands, which suggests the nearest word for an unknown one."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from bigtrain.errors import did_you_mean

_PARTS = ("record", "pace")
"""Internal commands, which other commands run."""


class CommandParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that accepts no abbreviated options.

    The message for an unknown word suggests the nearest known one.
    """

    def __init__(self, **keys: object) -> None:
        keys.setdefault("allow_abbrev", False)
        super().__init__(**keys)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print the usage and the complaint with the nearest word, and exit with status 2.

        Raises:
            SystemExit: 2, in any case.
        """
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        if choice is not None:
            known = [word.strip("' ") for word in choice[2].split(",")]
            known = [word for word in known if word not in _PARTS]
            hint = did_you_mean(choice[1], known)
            message = f"there is no {choice[1]!r}{hint} Known: {', '.join(known)}"
        unknown = re.fullmatch(r"unrecognized arguments: (-\S*)(.*)", message)
        if unknown is not None:
            message = f"there is no option {unknown[1]}{self._nearest(unknown[1])}"
        super().error(message)

    def refuse_unknown(self, words: list[str]) -> None:
        """Refuse words that look like options among the keys of a job.

        Raises:
            SystemExit: 2, if a word looks like an option.
        """
        for word in words:
            if word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit()):
                option = word.partition("=")[0]
                self.error(
                    f"there is no option {option}{self._nearest(option)} Keys of the job are given "
                    "as KEY=VALUE"
                )

    def _nearest(self, word: str) -> str:
        parsers: list[argparse.ArgumentParser] = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
        actions = (action for parser in parsers for action in parser._actions)
        return did_you_mean(word, [name for action in actions for name in action.option_strings])
