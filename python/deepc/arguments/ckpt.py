"""Of `deepc ckpt`."""

from __future__ import annotations

import argparse

from ..core import dtypes

_EXAMPLES = {
    "ls": (
        "list the checkpoints of a folder",
        "Tags, sizes, steps; * marks the latest.",
        "deepc ckpt ls checkpoints",
        "0, or 1 if one is damaged",
    ),
    "info": (
        "show what is in a checkpoint",
        "Tensors by kind, files, the engine's state.",
        "deepc ckpt info checkpoints\n  deepc ckpt info checkpoints/step100 --tensors",
        "0",
    ),
    "verify": (
        "read every byte and check every checksum",
        "Reads every byte and compares it with the checksums that were stored; damage is named by file and tensor.",
        "deepc ckpt verify checkpoints --all",
        "0 whole, 1 damaged",
    ),
    "export": (
        "write the weights as Hugging Face safetensors",
        (
            "The counterpart of DeepSpeed's zero_to_fp32.py: whole weights in fp32, bf16 or fp16, in model.safetensors"
            " (and an index if there are\nseveral files). Needs no GPU and no ranks."
        ),
        (
            "deepc ckpt export checkpoints model-folder --dtype bf16\n  deepc ckpt export checkpoints/step100 out"
            " --max-shard-size 2GB"
        ),
        "0",
    ),
    "diff": (
        "compare two checkpoints",
        "Checkpoints of any number of ranks and any stage, or a model's safetensors files against one.",
        "deepc ckpt diff runs/a/step100 runs/b/step100\n  deepc ckpt diff checkpoints model-folder --tolerance 0.01",
        "0 the same, 1 different",
    ),
    "clean": (
        "remove what is superfluous",
        (
            "Removes what saves that were killed left behind and, with --keep, old checkpoints. Says what it would"
            " remove; --yes removes it."
        ),
        "deepc ckpt clean checkpoints --keep 3\n  deepc ckpt clean checkpoints --keep 3 --yes",
        "0",
    ),
    "import": (
        "make a checkpoint of one that DeepSpeed saved",
        (
            "Reads what DeepSpeed's save_checkpoint wrote (ZeRO stages 0 to 3, any number of ranks): weights in fp32,"
            " the moments and steps of Adam and\nAdamW, counts, loss scale, LR schedule, client_state; and writes"
            " OUT/TAG, which engine.load_checkpoint(OUT) takes at any stage and number of\nranks. Needs no DeepSpeed,"
            " and runs nothing of what is in the files."
        ),
        "deepc ckpt import deepspeed-run checkpoints\n  deepc ckpt import deepspeed-run/global_step500 checkpoints",
        "0",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """checkpoint.tool runs what they say."""
    commands = parser.add_subparsers(dest="ckpt_command", metavar="COMMAND", required=True)
    made = {}
    for name, (short, long, example, codes) in _EXAMPLES.items():
        made[name] = p = commands.add_parser(
            name,
            help=short,
            description=long,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"examples:\n  {example}\n\nexit code: {codes}; 2: there is no such checkpoint",
        )
        if name == "diff":
            p.add_argument(
                "a", metavar="A", help="a checkpoint folder (its latest), FOLDER/TAG, or a model's safetensors"
            )
            p.add_argument("b", metavar="B", help="the other")
        else:
            p.add_argument(
                "path",
                metavar="PATH",
                help="the folder given to save_checkpoint"
                + ("" if name in ("ls", "clean") else " (its latest), or FOLDER/TAG"),
            )
        if name in ("info", "verify", "export", "import"):
            p.add_argument("-t", "--tag", help="default: the latest")
        if name in ("ls", "info"):
            p.add_argument("--json", action="store_true", help="for programs")
    made["info"].add_argument("--tensors", action="store_true", help="a line per tensor")
    made["verify"].add_argument("--all", action="store_true", help="every checkpoint of the folder")
    made["export"].add_argument("output", metavar="OUT", help="folder for model.safetensors")
    made["export"].add_argument(
        "--dtype", choices=dtypes.TRAINED_NAMES, default="fp32", help="of floating-point tensors (fp32)"
    )
    made["export"].add_argument(
        "--max-shard-size", "--max_shard_size", default="5GB", metavar="SIZE", help="of one file (5GB)"
    )
    made["export"].add_argument("--no-buffers", action="store_true", help="parameters only")
    made["import"].add_argument("output", metavar="OUT", help="folder for the new checkpoint")
    made["import"].add_argument(
        "--no-optimizer", action="store_true", help="without optimizer states: then an optimizer may be any"
    )
    made["diff"].add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="largest difference, relative to the tensor's largest value, that counts as none (0: equal bits)",
    )
    made["diff"].add_argument("-n", type=int, default=20, metavar="N", help="tensors to show (20)")
    made["clean"].add_argument("--keep", type=int, metavar="N", help="keep the newest N checkpoints (default: all)")
    made["clean"].add_argument("--yes", action="store_true", help="remove; without it nothing is touched")
