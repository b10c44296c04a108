"""Groups of many ranks: opening, small and large calls, descriptors, resident memory; several builds in turn.

    python tests/bench/many_ranks.py [--ranks 16,32,64] [--rounds 5] [--seconds 0.3]
        [--build NAME=SOURCES,LIBRARIES[,VARIABLE=VALUE...] ...]

A build is a checkout and the folder of its libdeepc.so; the environment variables are set for it alone. Without one:
this tree and DEEPC_LIBRARY_DIR (or build/lib). Builds take turns within a round, and all but the first one are compared
with the first one. Ranks are not bound, and there may be more of them than cores."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from common import HERE, REPO, emit, machine, paired, skip

BENCH = "many_ranks"
UNIT = {
    "open": "ms",
    "descriptors of a rank": "",
    "arena resident after open": "MiB",
    "arena resident after calls": "MiB",
}


class Build(NamedTuple):
    name: str
    sources: Path
    libraries: Path
    environment: tuple[tuple[str, str], ...]


def parse_build(text: str) -> Build:
    """NAME=SOURCES,LIBRARIES[,VARIABLE=VALUE...]"""
    name, _, rest = text.partition("=")
    sources, libraries, *variables = rest.split(",")
    return Build(
        name,
        Path(sources).resolve(),
        Path(libraries).resolve(),
        tuple((v.split("=", 1)[0], v.split("=", 1)[1]) for v in variables),
    )


def compile_for(build: Build, folder: Path) -> Path | None:
    """The helper, against this build's headers and library; None without a C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    out = folder / f"many_ranks.{build.name}"
    command = [compiler, "-O2", "-std=gnu17", f"-I{build.sources}", f"-I{build.sources / 'ops'}"]
    command += [str(HERE / "many_ranks.c"), "-o", str(out), f"-L{build.libraries}", "-ldeepc"]
    subprocess.run([*command, f"-Wl,-rpath,{build.libraries}"], check=True)
    return out


def run_once(program: Path, build: Build, ranks: int, args: argparse.Namespace) -> dict[str, float]:
    """One group, opened and closed."""
    command = [str(program), str(ranks), str(args.slots), str(args.slot_bytes), str(args.seconds)]
    done = subprocess.run(
        command, env=os.environ | dict(build.environment), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"bench: {build.name} with {ranks} ranks failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def measure(programs: dict[Build, Path], ranks: int, args: argparse.Namespace) -> None:
    """Emits every figure of every build for one number of ranks."""
    found: dict[str, list[dict[str, float]]] = {b.name: [] for b in programs}
    for _ in range(args.rounds):
        for build, program in programs.items():
            found[build.name].append(run_once(program, build, ranks, args))
    first = next(iter(found))
    for figure in found[first][0]:
        of = {name: [run[figure] for run in runs] for name, runs in found.items()}
        for name, values in of.items():
            against = {"ratio": paired(of[first], values), "peer": first} if name != first and all(values) else {}
            emit(BENCH, figure, name, UNIT.get(figure, "us"), values, ranks=ranks, **against)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="16,32,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each kind of call and round")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--slot-bytes", type=int, default=256 << 10)
    parser.add_argument(
        "--build", action="append", type=parse_build, metavar="NAME=SOURCES,LIBRARIES[,VARIABLE=VALUE...]"
    )
    args = parser.parse_args()
    here = Build("deepc", REPO, Path(os.environ.get("DEEPC_LIBRARY_DIR", REPO / "build" / "lib")), ())
    with tempfile.TemporaryDirectory() as folder:
        programs = {}
        for build in args.build or [here]:
            program = compile_for(build, Path(folder))
            if program is None:
                return skip(BENCH, "all", "no C compiler")
            programs[build] = program
        print(json.dumps({"bench": BENCH, "machine": machine()}), flush=True)
        for ranks in (int(n) for n in args.ranks.split(",")):
            measure(programs, ranks, args)


if __name__ == "__main__":
    main()
