"""Collectives on one node beside their peers: deepc's C core from a loop in C (ordinary memory and registered buffers),
deepc through torch.distributed, Gloo, MPI (OpenMPI and MPICH, from a loop in C and through mpi4py) and DeepSpeed's
shared-memory all-reduce, in interleaved rounds.

    python tests/bench/collectives.py --ranks 2 --ops all_reduce barrier --bytes 8 4096 1048576
    python tests/bench/collectives.py --ranks 2 --quick
    python tests/bench/collectives.py --ranks 4

Bytes: of the larger tensor of a call. Time: of the slowest rank. Every contender's answer is checked at every size
before it is timed. The ranks of one set of processes hold deepc, Gloo, DeepSpeed and one MPI; the second MPI has a set
of its own, which sleeps while the first works, and the rounds go across both. MPI is optional: `apt-get install
openmpi-bin mpich` and `pip install mpi4py`."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

from coll_rank import COPIES, OPS, ROOTED, TURNS, serve
from common import EXTENSIONS, HERE, die_with_parent, paired, row, skip, version
from peers import deepspeed_shm, environment

CONTENDERS = ("core", "registered", "torch", "gloo", "mpi", "mpi4py", "deepspeed", "copy")
SIZES = [8, 256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
FEWEST = 3  # rounds of a figure, however long they take
START_S = 120  # until all ranks are there
QUICK_SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
MPI_LIBRARIES = {"OpenMPI": "libmpi.so.40", "MPICH": "libmpich.so.12"}
OURS = "deepc"
INSTALL_MPI = "apt-get install openmpi-bin mpich; pip install mpi4py"


def size_name(nbytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


# ---- what must move --------------------------------------------------------------------------------------------------
def must_move(op: str, world: int) -> float | None:
    """Bytes that each rank must read and write, over what one copy of the larger tensor reads and writes (2 n), where
    every rank does an equal share and nothing is staged: a rank reduces or copies its share from the inputs where they
    lie into the outputs where they lie.
    """
    p = world
    reads, writes = {
        "all_reduce": (1, 1),  # a slice of n / p: p inputs, p outputs
        "reduce_scatter": (1, 1 / p),  # p inputs of n / p, one output
        "all_gather": (1, 1),
        "all_gather_in_place": ((p - 1) / p, (p - 1) / p),  # one's own part lies there
        "broadcast": ((p - 1) / p, (p - 1) / p),  # p - 1 copies shared by p ranks
        "all_to_all": (1, 1),
        "reduce": (1, 1 / p),  # p inputs of n and one output of n, shared by p ranks
        "gather": (1 / p, 1 / p),  # n into the root, shared by p ranks
        "scatter": (1 / p, 1 / p),
    }.get(op.removesuffix(TURNS), (0, 0))
    return (reads + writes) / 2 or None


# ---- sets of processes -----------------------------------------------------------------------------------------------
class Set:
    """The ranks of one mpirun (or started by us), each behind a connection."""

    def __init__(self, name: str, mpi: str | None, args: argparse.Namespace) -> None:
        self.name, self.mpi, self._limit = name, mpi, args.limit
        key, self._id = secrets.token_hex(16), secrets.token_hex(8)
        self._folder = tempfile.TemporaryDirectory()
        listener = Listener(("127.0.0.1", 0), backlog=args.ranks, authkey=key.encode())
        command = [
            sys.executable,
            str(HERE / "collectives.py"),
            "--set",
            name,
            "--conductor",
            str(listener.address[1]),
            "--store",
            f"{self._folder.name}/store",
            "--ranks",
            str(args.ranks),
            "--limit",
            str(args.limit),
            "--bytes",
            *map(str, args.bytes),
            "--contenders",
            *args.contenders,
            *(["--deepspeed"] if args.deepspeed else []),
            *(["--mpi", mpi] if mpi else []),
            "--rows-forced",
            *args.rows_forced,
        ]
        # DeepSpeed makes the name of its shared memory from MASTER_ADDR and MASTER_PORT; OpenMPI keeps its files under
        # TMPDIR.
        env = environment(1) | {
            "BENCH_KEY": key,
            "PYTHONWARNINGS": "ignore",
            "MASTER_ADDR": "bench",
            "MASTER_PORT": self._id,
            "TMPDIR": self._folder.name,
        }
        self._processes = self._start(command, mpi, args.ranks, env)
        self.ranks: list[Connection] = [None] * args.ranks  # type: ignore[list-item]
        self._join(listener)
        self.version = self.answers("ready")[0]

    def _join(self, listener: Listener) -> None:
        """Takes the ranks' connections; ends the bench if they don't come."""
        listener._listener._socket.settimeout(1)
        end = time.monotonic() + START_S
        with listener:
            while None in self.ranks:
                try:
                    rank = listener.accept()
                    self.ranks[rank.recv()] = rank
                except (TimeoutError, EOFError):
                    if time.monotonic() > end or any(p.poll() is not None for p in self._processes):
                        self.kill()
                        raise SystemExit(
                            f"bench: the ranks of {self.name} ({self.mpi or 'no MPI'}) did not start"
                        ) from None

    @staticmethod
    def _start(command: list[str], mpi: str | None, ranks: int, env: dict[str, str]) -> list[subprocess.Popen]:
        if mpi == "OpenMPI":
            # Ranks pin themselves. Told of more ranks than cores, OpenMPI yields while it waits, as is its default.
            mpirun = [runner(mpi), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
            return [
                subprocess.Popen(
                    mpirun + command,
                    env=env | {"MPI4PY_MPIABI": "openmpi"},
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            ]
        if mpi == "MPICH":
            # mpi4py's wheel asks for libmpi.so.12, the name of MPICH's ABI; Debian calls the same library
            # libmpich.so.12.
            folder = EXTENSIONS / "mpich"
            folder.mkdir(parents=True, exist_ok=True)
            link, target = folder / "libmpi.so.12", library_path(MPI_LIBRARIES[mpi])
            if not link.is_symlink() or os.readlink(link) != target:
                link.unlink(missing_ok=True)
                link.symlink_to(target)
            paths = os.pathsep.join(filter(None, (str(folder), env.get("LD_LIBRARY_PATH"))))
            return [
                subprocess.Popen(
                    [runner(mpi), "-bind-to", "none", "-np", str(ranks), *command],
                    env=env | {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": paths},
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            ]
        return [
            subprocess.Popen(command, env=env | {"RANK": str(r)}, start_new_session=True, preexec_fn=die_with_parent)
            for r in range(ranks)
        ]

    def ask(self, *command) -> list:
        """All ranks do `command` at once; their answers in rank order. A failure, a death or a hang ends the bench."""
        for rank in self.ranks:
            rank.send(command)
        return self.answers(command[0])

    def answers(self, expected: str) -> list:
        end = time.monotonic() + self._limit
        got: dict[int, object] = {}
        while len(got) < len(self.ranks):
            waiting = {c: r for r, c in enumerate(self.ranks) if r not in got}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                raise SystemExit(
                    f"bench: ranks {', '.join(map(str, waiting.values()))} of {self.name} did not answer '{expected}'"
                    f" within {self._limit} s"
                )
            for c in ready:
                try:
                    kind, value = c.recv()
                except EOFError:
                    raise SystemExit(f"bench: rank {waiting[c]} of {self.name} died in '{expected}'") from None
                if kind == "failed":
                    raise SystemExit(f"bench: rank {waiting[c]} of {self.name} failed in '{expected}': {value}")
                got[waiting[c]] = value
        return [got[r] for r in range(len(got))]

    def close(self) -> None:
        for rank in self.ranks:
            rank.send(("close",))
        self.answers("closed")
        for p in self._processes:
            p.wait(timeout=30)

    def kill(self) -> None:
        for signal in (15, 9):  # asked to end, mpirun removes its files
            for p in self._processes:
                if p.poll() is None:
                    try:
                        os.killpg(p.pid, signal)
                        p.wait(5)
                    except (ProcessLookupError, subprocess.TimeoutExpired):
                        pass
        for f in Path("/dev/shm").glob(f"*_bench_{self._id}_*"):  # DeepSpeed leaves its shared memory behind
            f.unlink(missing_ok=True)
        self._folder.cleanup()


def runner(mpi: str) -> str | None:
    """Its mpirun: by Debian's name for it when both are installed, else mpirun if that is it."""
    found = shutil.which({"OpenMPI": "mpirun.openmpi", "MPICH": "mpirun.mpich"}[mpi])
    if not found and (plain := shutil.which("mpirun")):
        said = subprocess.run([plain, "--version"], capture_output=True, text=True).stdout
        found = plain if {"OpenMPI": "open mpi", "MPICH": "hydra"}[mpi] in said.lower() else None
    if not found:
        return None
    folder, name = os.path.split(found)
    return os.path.join(os.path.realpath(folder), name)  # OpenMPI refuses to start from /bin


def library_path(soname: str) -> str | None:
    """Where the loader finds `soname`, or None."""
    code = (
        f"import ctypes\nctypes.CDLL('{soname}')\nprint(next(l.split()[-1] for l in open('/proc/self/maps') if"
        f" '{soname}' in l))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or None


def available_mpis(wanted: list[str]) -> list[str]:
    """The MPIs that can be used; says what is missing and how to get it."""
    if version("mpi4py") is None:
        skip("collectives", "MPI", f"mpi4py is not installed ({INSTALL_MPI})")
        return []
    found = []
    for mpi in wanted:
        if runner(mpi) is None or library_path(MPI_LIBRARIES[mpi]) is None:
            skip("collectives", mpi, f"its mpirun or {MPI_LIBRARIES[mpi]} is not installed ({INSTALL_MPI})")
        else:
            found.append(mpi)
    return found


# ---- measuring -------------------------------------------------------------------------------------------------------
class Conductor:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        mpis = available_mpis(args.mpi) if {"mpi", "mpi4py"} & set(args.contenders) else []
        self.sets: list[Set] = []
        try:
            self.sets.append(Set("main", mpis[0] if mpis else None, args))
            for mpi in mpis[1:]:
                self.sets.append(Set(mpi, mpi, args))
        except BaseException:
            self.kill()
            raise
        self.versions = {s.mpi: s.version for s in self.sets if s.mpi}
        self.rows: list[dict] = []
        self._skipped: set[tuple[str, str, str]] = set()

    def kill(self) -> None:
        for s in self.sets:
            s.kill()

    def close(self) -> None:
        for s in self.sets:
            s.close()

    def contenders(self, op: str, dtype: str, nbytes: int) -> dict[str, Set]:
        """Those that can do the call, each checked."""
        names = [(name, s) for s in self.sets for name in s.ask("prepare", op, dtype, nbytes)[0]]
        return {name: s for name, s in names if self.verify(name, s, op, dtype, nbytes)}

    def verify(self, name: str, s: Set, op: str, dtype: str, nbytes: int) -> bool:
        """Whether the contender does the call; a wrong answer ends the bench."""
        said = s.ask("verify", name)
        wrong = [f"rank {r}: {t}" for r, t in enumerate(said) if t.startswith("wrong")]
        if wrong:
            raise SystemExit(
                f"bench: {name}, {op} of {size_name(nbytes)} {dtype} on {self._args.ranks} ranks gives a wrong answer:"
                f" {'; '.join(wrong)}"
            )
        if said[0] and (op, name, said[0]) not in self._skipped:
            self._skipped.add((op, name, said[0]))
            skip(
                "collectives", f"{name}, {op.replace(TURNS, ', root in turns')}", said[0].removeprefix("unsupported: ")
            )
        return not said[0]

    def measure(self, op: str, dtype: str, nbytes: int, seconds: float) -> None:
        """seconds: after which no round is begun, but for the first few."""
        contenders = self.contenders(op, dtype, nbytes)
        target = (
            self._args.target_ms / 1e3 * max(1, self._args.ranks // len(os.sched_getaffinity(0)))
        )  # of ranks that share cores: several turns
        loops = {}
        for name, s in contenders.items():
            once = max(s.ask("run", name, 1, 1))
            if once < target:
                once = min(max(s.ask("run", name, 10, 0)) for _ in range(3)) / 10
            loops[name] = max(1, min(100_000, int(target / max(1e-8, once))))
            if op == "all_reduce" and nbytes > 1 << 20:
                loops[name] = min(loops[name], 50)  # more would overflow the sums
        times: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        end = time.monotonic() + seconds
        for r in range(self._args.rounds):
            if r >= FEWEST and time.monotonic() > end:
                break  # the rows say how many rounds there were
            for name in names[r % len(names) :] + names[: r % len(names)]:  # nobody is always behind the same neighbour
                took = max(contenders[name].ask("run", name, loops[name], 1 if nbytes <= 16 << 20 else 0))
                times[name].append(1e6 * took / loops[name] / (2 if op == "send_recv" else 1))
        if nbytes <= 1 << 20:  # and still right after all those calls
            for name, s in contenders.items():
                self.verify(name, s, op, dtype, nbytes)
        self.report(op, dtype, nbytes, times)

    def report(self, op: str, dtype: str, nbytes: int, times: dict[str, list[float]]) -> None:
        world = self._args.ranks
        figure = (
            f"{op.replace(TURNS, ', root in turns,')}{'' if op == 'barrier' else f' {size_name(nbytes)} {dtype}'},"
            f" {world} ranks"
        )
        more = {"op": op, "bytes": nbytes, "dtype": dtype, "ranks": world}
        rows = []
        for name, values in times.items():
            if not name.startswith(OURS):
                rows.append(
                    row(
                        "collectives",
                        figure,
                        name,
                        "us",
                        values,
                        **more,
                        **({"version": self.versions[name]} if name in self.versions else {}),
                    )
                )
                continue
            compare = smallest if self._args.best else paired
            rivals = {p: compare(times[p], values) for p in peers_of(name, times)}
            best = min(rivals, key=rivals.get) if rivals else None
            limits = {
                key: limit(op, world, name, times, whose)
                for key, whose in (("of_limit", ""), ("of_peer_limit", " of a peer's"))
            }
            fractions = {key: round(compare(v, values), 3) for key, v in limits.items() if v}
            rows.append(
                row("collectives", figure, name, "us", values, ratio=rivals.get(best), peer=best, **more, **fractions)
            )
        self.rows += rows
        if self._args.table:
            print(
                f"{figure}: " + ", ".join(f"{r['what']} {r['median']:.4g} ({r['min']:.4g})" for r in rows), flush=True
            )
        else:
            for r in rows:
                print(json.dumps(r), flush=True)


def smallest(of: list[float], over: list[float]) -> float:
    """Ratio of the smallest times: says something even while other programs disturb."""
    return min(of) / min(over)


def limit(op: str, world: int, name: str, times: dict[str, list[float]], whose: str) -> list[float] | None:
    """Per round the time of what must move, at the rate of the faster copy on memory of the same kind (or of what a
    peer has just written)."""
    share, where = must_move(op, world), ", registered" if name.endswith("registered") else ""
    copies = [times[c + whose + where] for c in COPIES if c + whose + where in times]
    return [share * min(c) for c in zip(*copies)] if share and copies else None


def peers_of(name: str, times: dict[str, list[float]]) -> list[str]:
    """Whom a contender of ours is measured against: those who have no more Python in their loop than it has.
    Registered: also MPI on that memory."""

    def fits(peer: str) -> bool:
        if peer.startswith((OURS, *COPIES)):
            return False
        if name == "deepc" and (peer in MPI_LIBRARIES or peer.endswith("registered")):
            return peer in MPI_LIBRARIES and f"mpi4py ({peer})" not in times
        return not peer.endswith("registered") or name.endswith("registered")

    return [p for p in times if fits(p)]


# ---- summary ---------------------------------------------------------------------------------------------------------
def summary(rows: list[dict]) -> list[str]:
    """What the JSON lines of runs say, in lines, per number of ranks."""
    out = [f"{r['what']}: {r['version']}" for r in {r["what"]: r for r in rows if "version" in r}.values()]
    for ranks in dict.fromkeys(r["ranks"] for r in rows):
        some = [r for r in rows if r["ranks"] == ranks]
        ours = [r for r in some if r["what"].startswith(OURS)]
        for what in dict.fromkeys(r["what"] for r in ours):
            out += against_peers(what, [r for r in ours if r["what"] == what and r["ratio"] is not None], some)
        out += small_calls(some) + of_limits(
            [r for r in ours if r["what"].endswith("registered") and r["bytes"] >= 1 << 20 and "of_limit" in r]
        )
    return out


def against_peers(what: str, mine: list[dict], rows: list[dict]) -> list[str]:
    if not mine:
        return []
    medians = {(r["figure"], r["what"]): r["median"] for r in rows}
    out = [f"{what}, {mine[0]['ranks']} ranks: time of the best peer / ours (above 1: deepc is faster)"]
    for op in dict.fromkeys(r["op"] for r in mine):
        some = [r for r in mine if r["op"] == op]
        worst = min(some, key=lambda r: r["ratio"])
        out.append(
            f"  {op:20} geometric mean {statistics.geometric_mean([r['ratio'] for r in some]):6.2f}   worst"
            f" {worst['ratio']:6.2f} ({size_name(worst['bytes'])} {worst['dtype']}, {worst['peer']})"
        )
    low = sorted((r for r in mine if r["ratio"] < 0.95), key=lambda r: r["ratio"])
    return (
        out
        + [f"  rows below 0.95: {len(low)} of {len(mine)}"]
        + [
            f"    {r['figure']}: {r['ratio']:.2f} ({r['median']:.4g} us; {r['peer']}"
            f" {medians[r['figure'], r['peer']]:.4g} us)"
            for r in low
        ]
    )


def small_calls(rows: list[dict]) -> list[str]:
    some = [
        r
        for r in rows
        if (r["op"] == "barrier" or (r["op"] == "all_reduce" and r["bytes"] == 4096))
        and not r["what"].startswith(tuple(COPIES))
    ]
    return (["small calls (us)"] if some else []) + [
        f"  {figure}: " + ", ".join(f"{r['what']} {r['median']:.3g}" for r in some if r["figure"] == figure)
        for figure in dict.fromkeys(r["figure"] for r in some)
    ]


def of_limits(rows: list[dict]) -> list[str]:
    if not rows:
        return []
    out = [
        f"registered, {rows[0]['ranks']} ranks, 1 MiB and more: fraction of the limit (what must move, at the rate of a"
        " copy of one's own memory; in brackets: of memory that a peer has just written)"
    ]
    for op in dict.fromkeys(r["op"] for r in rows):
        out.append(
            f"  {op:20} "
            + ", ".join(
                f"{size_name(r['bytes'])} {r['dtype']} {r['of_limit']:.2f} ({r.get('of_peer_limit', 0):.2f})"
                for r in rows
                if r["op"] == op
            )
        )
    return out


# ---- command line ----------------------------------------------------------------------------------------------------
def plan(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(op, dtype, bytes) to measure. Quick: bf16 and the largest size only where they tell something of their own."""
    out = []
    for op in args.ops:
        if op == "barrier":
            out.append((op, "fp32", 8))
            continue
        for dtype in args.dtypes:
            if args.quick and dtype == "bf16" and op not in ("all_reduce", "reduce_scatter"):
                continue
            if op in ROOTED:
                out += [(op + TURNS, dtype, b) for b in args.bytes if b <= 64 << 10]
            out += [
                (op, dtype, b)
                for b in args.bytes
                if not args.quick
                or b < 64 << 20
                or (dtype == "fp32" and op in ("all_reduce", "reduce_scatter", "all_gather"))
            ]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes, rounds and dtypes: at most 3 minutes on 2 ranks"
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--bytes", type=int, nargs="+", help="default: 8 B to 256 MiB")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, help="default: 7; quick: 5")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="default: all")
    parser.add_argument(
        "--mpi",
        nargs="*",
        choices=list(MPI_LIBRARIES),
        default=list(MPI_LIBRARIES),
        help="the first shares deepc's processes",
    )
    parser.add_argument(
        "--target-ms", type=float, help="length of one timed loop of small calls; default: 10, quick: 4"
    )
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds that the whole may take before figures get fewer rounds; default: none, quick: 120",
    )
    parser.add_argument("--limit", type=int, default=120, help="seconds until a command that hangs ends the bench")
    parser.add_argument("--rows", type=Path, help="also keep the JSON lines in this file")
    parser.add_argument(
        "--table", action="store_true", help="one line per figure (median and smallest us) instead of JSON lines"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="ratios of the smallest times, for tuning on a busy machine; not for results",
    )
    for hidden in ("--set", "--conductor", "--store"):
        parser.add_argument(hidden, type=int if hidden == "--conductor" else str, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows-forced", nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.bytes = args.bytes or (QUICK_SIZES if args.quick else SIZES)
    args.rounds = args.rounds or (5 if args.quick else 7)
    args.budget = args.budget or (120.0 if args.quick else None)
    args.target_ms = args.target_ms or (4.0 if args.quick else 10.0)
    if args.set:
        args.mpi = args.mpi[0] if "--mpi" in sys.argv else None
        return serve(args)
    if "deepspeed" in args.contenders:
        why = deepspeed_shm()
        args.deepspeed = not why
        if why:
            skip("collectives", "DeepSpeed", why)
    started = time.monotonic()
    conductor = Conductor(args)
    try:
        figures = plan(args)
        for i, figure in enumerate(figures):
            left = args.budget - (time.monotonic() - started) if args.budget else float("inf")
            conductor.measure(*figure, seconds=left / (len(figures) - i))
        conductor.close()
    finally:
        conductor.kill()
    if args.rows:
        args.rows.write_text("".join(json.dumps(r) + "\n" for r in conductor.rows))
    for line in summary(conductor.rows):
        print(line)
    print(f"collectives: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
