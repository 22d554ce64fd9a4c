"""The command-line options of `bigtrain checkpoint` and of its actions."""

from __future__ import annotations

from bigtrain.job.command_parser import CommandParser

OWN_CHECKPOINTS = "a checkpoint (step-N), a run's folder, or its checkpoints/"
"""Help text: the paths that the checkpoint commands accept for a checkpoint of bigtrain."""


def checkpoint_parser() -> CommandParser:
    """Return the parser of `bigtrain checkpoint` and its actions."""
    parser = CommandParser(
        prog="bigtrain checkpoint",
        description="Inspect, verify, convert, export or compare checkpoints.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str) -> CommandParser:
        made = actions.add_parser(name, help=summary, description=summary)
        made.add_argument(
            "--json",
            dest="as_json",
            action="store_true",
            help="print one JSON document on standard output",
        )
        return made

    inspect = action("inspect", "list the contents of a checkpoint")
    inspect.add_argument("path", metavar="PATH", help=OWN_CHECKPOINTS)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = action("verify", "compare every file with its hashes; exit status 1 if one is damaged")
    verify.add_argument("path", metavar="PATH", help=OWN_CHECKPOINTS)
    _add_convert_arguments(
        action("convert", "convert a checkpoint of another library, or an older one of bigtrain")
    )
    _add_export_arguments(
        action("export", "write the tensors of a checkpoint to a file, or to a folder of the Hub")
    )
    diff = action("diff", "print the largest differences of two checkpoints, by tensor")
    diff.add_argument("first", metavar="A", help=OWN_CHECKPOINTS)
    diff.add_argument("second", metavar="B", help=OWN_CHECKPOINTS)
    diff.add_argument(
        "--exit-code", action="store_true", help="exit status 1 if they differ, as git diff"
    )
    return parser


def _add_convert_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="its file or folder; docs/checkpoints.md lists the formats"
    )
    parser.add_argument(
        "target", metavar="TARGET", help="the new checkpoint: step-N, or the folder to put it in"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="optimizer steps that the model was trained for"
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="samples that it was trained on: the data continue after them",
    )
    parser.add_argument(
        "--tie",
        action="append",
        default=[],
        metavar="NAME=OTHER",
        help="NAME is tied to OTHER and left out: lm_head.weight=transformer.wte.weight",
    )
    parser.add_argument(
        "--key", metavar="NAME", help="key of the model in the file of a trainer: ema, nets.g"
    )
    parser.add_argument(
        "--strip",
        metavar="PREFIX",
        help="convert tensors whose names begin with PREFIX, and drop it from the names",
    )


def _add_export_arguments(parser: CommandParser) -> None:
    parser.add_argument("path", metavar="PATH", help=OWN_CHECKPOINTS)
    parser.add_argument(
        "output",
        metavar="OUT",
        help="a .safetensors file, a .pt file for torch.load, or for a model of transformers a new "
        "folder for from_pretrained",
    )
    parser.add_argument(
        "--part",
        choices=("model", "optimizer"),
        default="model",
        help="which tensors (default model)",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp64", "fp32", "fp16", "bf16"),
        help="dtype of floating-point tensors (default: as saved)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add adapters (model.lora) to the weights; without it a folder has them alone",
    )
