"""The command line: `bigtrain train` and `bigtrain strategies`.

Only argparse is imported here; everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from bigtrain.arguments import train_arguments


def main(arguments: list[str] | None = None) -> int:
    """The `bigtrain` command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="bigtrain",
        description="Name a strategy; the same model trains to the same numbers in less memory.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("train", help="train a model under a strategy", add_help=False)
    listing = commands.add_parser("strategies", help="list the strategies")
    listing.add_argument("--json", action="store_true", help="one JSON document")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "train":
        return _train(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _strategies(as_json=options.json)


def _train(arguments: list[str]) -> int:
    options = train_arguments(arguments, starts_ranks=True)
    words = _without_num_ranks(arguments)
    if options.num_ranks is None:
        from bigtrain import run_guarded, train

        return run_guarded(lambda: train.main(words))
    from bigtrain.errors import BigtrainError
    from bigtrain.launch import start_ranks

    script = Path(__file__).parent / "train.py"
    try:
        return start_ranks(options.num_ranks, words, script)
    except BigtrainError as error:
        print(f"bigtrain: {error}", file=sys.stderr)
        return error.exit_status


def _without_num_ranks(arguments: list[str]) -> list[str]:
    """The arguments that the ranks themselves get."""
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-n", "--num-ranks"):
            rest.pop(0)
        elif not re.fullmatch(r"(--num-ranks=|-n=?)-?\d+", word):
            kept.append(word)
    return kept


def _strategies(*, as_json: bool) -> int:
    from bigtrain.listing import strategy_list

    rows = strategy_list()
    if as_json:
        import json

        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:{width}}  {row['summary']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
