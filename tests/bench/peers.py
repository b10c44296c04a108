"""The peers: which are installed, how to install them, and their compiled ops built once, before anything is timed.

python tests/bench/peers.py            builds DeepSpeed's ops (about 2 minutes the first time)
python tests/bench/peers.py --install  installs the peers into the running environment first; torch stays as it is"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from common import EXTENSIONS, version

REQUIREMENTS = ("deepspeed==0.19.8", "transformers", "mpi4py", "ninja", "setuptools")
BUILD_LIMIT_S = 900


def environment(threads: int) -> dict[str, str]:
    """Environment of a process that may use DeepSpeed, with `threads` threads."""
    env = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "DEEPC_LOG_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    env.pop("THP_MEM_ALLOC_ENABLE", None)  # importing deepc sets it, for its own process: peers run as they come
    env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env.get("PATH", "")  # ninja of the environment
    return env


def drop_stale_locks() -> None:
    """Removes the lock files of builds that were killed: torch's extension loader waits for them for ever. One that is
    younger than a build may take stays."""
    for lock in EXTENSIONS.glob("**/lock"):
        try:
            if time.time() - lock.stat().st_mtime > BUILD_LIMIT_S:
                lock.unlink()
        except OSError:
            pass  # its owner was faster


def install() -> None:
    """pip-installs the peers; a constraint keeps the torch that is here. Raises CalledProcessError if pip fails."""
    torch = version("torch")
    if torch is None:
        sys.exit("bench: torch is not installed")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        constraint.write(f"torch=={torch}\n")
        constraint.flush()
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", constraint.name, *REQUIREMENTS], check=True)
    if version("torch") != torch:
        sys.exit(f"bench: pip replaced torch {torch} by {version('torch')}; install {torch} again")


def deepspeed_ops() -> str:
    """ "" if DeepSpeed's CPU Adam and fused Adam can be loaded, else why not. They are built if need be, also again
    where the processor is another than they were built for, and so is the all-reduce that its engines load if they can.
    """
    if version("deepspeed") is None:
        return "deepspeed is not installed (run.py --install-peers)"
    return _build(
        "from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder\n"
        "CPUAdamBuilder().load(verbose=False)\nFusedAdamBuilder().load(verbose=False)\n"
        "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder\n"
        "try: ShareMemCommBuilder().load(verbose=False)\n"
        "except Exception: pass\n"
    )


def deepspeed_shm() -> str:
    """ "" if DeepSpeed's shared-memory all-reduce is built (it is if need be), else why not."""
    if version("deepspeed") is None:
        return "deepspeed is not installed (run.py --install-peers)"
    if (EXTENSIONS / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").exists():
        return ""
    return _build(
        "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder\nShareMemCommBuilder().load(verbose=False)\n"
    )


def _build(code: str) -> str:
    EXTENSIONS.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(2), capture_output=True, text=True, timeout=BUILD_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"DeepSpeed's ops did not build within {BUILD_LIMIT_S} s; remove {EXTENSIONS.name}/ and try again"
    return (
        ""
        if done.returncode == 0
        else "DeepSpeed's ops can't be built: " + (done.stderr.strip().splitlines() or ["no message"])[-1]
    )


if __name__ == "__main__":
    if "--install" in sys.argv[1:]:
        install()
    why = deepspeed_ops()
    print(why or "DeepSpeed's ops are built")
    sys.exit(bool(why))
