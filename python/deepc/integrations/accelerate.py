"""`python -m deepc.integrations.accelerate launch ...`: Accelerate's command line, in which DeepSpeed is deepc: for the
launcher, which looks for it, and for the script in its ranks, without a line of it changed. `accelerate` itself says
that DeepSpeed is not installed, as nothing of that name lies on disk."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from ..compat import deepspeed
from ..core.telemetry import speak
from ..errors import DeepcError, UnsupportedError
from ..launch.mpi import RANK

_Launcher = Callable[[argparse.Namespace], Any]


def under_the_name(launcher: _Launcher) -> _Launcher:
    """Accelerate's launcher of DeepSpeed, whose ranks begin as those of `deepc run --as-deepspeed` do."""

    def start(args: argparse.Namespace) -> Any:
        if args.num_machines > 1 and args.deepspeed_multinode_launcher != "standard":
            raise UnsupportedError(
                f"num_machines {args.num_machines} with deepspeed_multinode_launcher"
                f" {args.deepspeed_multinode_launcher or 'pdsh'} is started by DeepSpeed's own program, which deepc has"
                " not: start this on each machine with --deepspeed_multinode_launcher standard, or start the script"
                " with `deepc run --hostfile HOSTS --as-deepspeed`"
            )
        if args.no_python:
            raise UnsupportedError(
                "--no_python: an executable's imports can't be changed from outside. Give the Python script itself, or"
                " write `import deepc.compat.deepspeed` at its top"
            )
        kind = "module" if args.module else "script"
        args.training_script_args = [kind, args.training_script, *args.training_script_args]
        args.training_script, args.module = RANK, False
        os.environ["DEEPC_AS_DEEPSPEED"] = deepspeed.__name__
        return launcher(args)

    return start


def main() -> int:
    """Exit codes are Accelerate's; 2 for what does not exist."""
    from accelerate.commands import accelerate_cli
    from accelerate.commands import launch as accelerates

    accelerates.deepspeed_launcher = under_the_name(accelerates.deepspeed_launcher)
    try:
        accelerate_cli.main()
    except DeepcError as exc:
        speak.tell(f"accelerate: error: {exc}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
