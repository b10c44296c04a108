"""Training steps of a 25 M- or 125 M-parameter GPT-2 on 2 ranks of 1 thread: deepc against DDP, FSDP2, DeepSpeed and
processes that never talk. contenders.py says who they are, and under which allocators they run.

    python tests/bench/train.py --precision fp32 --rounds 5 --contenders independent+keep ddp ddp+keep deepc-3

Every contender is a pair of processes that stays alive; all take turns in bursts of a few steps, so that drift of the
machine hits all alike. Rank r runs on core r. Memory is sampled in bursts that are not timed: the sum over the ranks of
private and shared pages (PSS), where file pages (libraries) count once per pair however many other processes map
them; "resident" is the sum of the ranks' highest resident sets (VmHWM), where shared pages count for each."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import emit, paired, skip
from contenders import BASES, INDEPENDENT, MICRO_BATCH, MINE, MODELS, ONLY_BF16, SINGLE, Contender, make_step
from peers import drop_stale_locks, environment

READY_S, BURST_S = 200.0, 300.0


# ---- one rank --------------------------------------------------------------------------------------------------------
class Rank:
    """A rank's loop: a command per line on stdin ("steps N", "profile N"), a JSON line per answer on the descriptor
    BENCH_RESULT."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        if "deepc" in args.contender.base:
            import deepc  # noqa: F401

        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.rank % len(cores)]})
        torch.set_num_threads(1)
        self.out = os.fdopen(int(os.environ["BENCH_RESULT"]), "w", buffering=1)
        self.batches, self.step = self.prepare(args)
        self.done = 0
        self.say(ready=True)

    def prepare(self, args: argparse.Namespace) -> tuple[list[Any], Callable[[Any], Any]]:
        """(batches to go round in, a function that does one step on a batch and returns the loss)."""
        import torch

        tokens = torch.Generator().manual_seed(1234 + self.rank)
        shape = MICRO_BATCH, args.tokens
        batches = [torch.randint(0, MODELS[args.model]["vocab_size"], shape, generator=tokens) for _ in range(4)]
        return batches, make_step(args.contender, args.precision, args.model)

    def say(self, **answer) -> None:
        self.out.write(json.dumps(answer) + "\n")

    def steps(self, count: int) -> None:
        """One step to warm the caches after other contenders' turn, then `count` timed ones."""
        loss = self._one()
        faults, before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, _counters()
        started = time.perf_counter()
        for _ in range(count):
            loss = self._one()
        elapsed = time.perf_counter() - started
        after = _counters()
        self.say(
            seconds=elapsed,
            loss=float(loss),
            faults=resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
            done=self.done,
            resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            counters={k: after[k] - before[k] for k in after},
        )

    def profile(self, count: int) -> None:
        """`count` steps under torch's profiler: milliseconds a step of each operator itself."""
        from torch.profiler import ProfilerActivity, profile

        self._one()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            started = time.perf_counter()
            for _ in range(count):
                loss = self._one()
            elapsed = time.perf_counter() - started
        ops = {e.key: e.self_cpu_time_total / 1e3 / count for e in found.key_averages()}
        self.say(seconds=elapsed, loss=float(loss), ops=ops)

    def _one(self):
        loss = self.step(self.batches[self.done % len(self.batches)])
        self.done += 1
        return loss

    def loop(self) -> None:
        for line in sys.stdin:
            command, _, count = line.partition(" ")
            if command not in ("steps", "profile"):
                return
            getattr(self, command)(int(count))


def _counters() -> dict[str, int]:
    deepc = sys.modules.get("deepc")
    return deepc.counters() if deepc is not None else {}


# ---- a contender, seen from the driver -------------------------------------------------------------------------------
class Pair:
    """The processes of one contender. Raises RuntimeError with the end of their output when one fails or hangs."""

    program = __file__  # what a rank runs

    def options(self, args: argparse.Namespace) -> list[str]:
        """Of a rank's program, besides --contender."""
        return ["--precision", args.precision, "--tokens", str(args.tokens), "--model", args.model]

    def __init__(self, contender: Any, args: argparse.Namespace) -> None:
        self.contender, self.name, self.world = contender, str(contender), contender.ranks(args.ranks)
        self.log = tempfile.TemporaryFile("w+b")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.ranks, self.results = [], []
        for r in range(self.world):
            read, write = os.pipe()
            env = {
                **environment(1),
                "RANK": str(r),
                "LOCAL_RANK": str(r),
                "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(self.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "BENCH_RESULT": str(write),
                "PYTHONWARNINGS": "ignore",
            }
            env |= contender.environment()
            command = [sys.executable, self.program, "--contender", self.name, *self.options(args)]
            self.ranks.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=self.log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[write],
                    start_new_session=True,
                )
            )
            os.close(write)
            self.results.append(os.fdopen(read))

    def answers(self, limit_s: float) -> list[dict]:
        """One answer of every rank."""
        out, end = [], time.monotonic() + limit_s
        for f in self.results:
            if not select.select([f], [], [], max(0.0, end - time.monotonic()))[0]:
                raise RuntimeError(f"{self.name} gave no answer within {limit_s:.0f} s:\n{self.tail()}")
            line = f.readline()
            if not line:
                raise RuntimeError(f"{self.name} failed:\n{self.tail()}")
            out.append(json.loads(line))
        return out

    def tail(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-3000:]

    def send(self, command: str, count: int) -> None:
        for p in self.ranks:
            try:
                p.stdin.write(f"{command} {count}\n".encode())
                p.stdin.flush()
            except BrokenPipeError:
                raise RuntimeError(f"{self.name} failed:\n{self.tail()}") from None

    def burst(self, count: int) -> dict:
        """`count` timed steps: seconds of the slowest rank, mean loss, faults and counters of rank 0."""
        self.send("steps", count)
        ranks = self.answers(BURST_S)
        return {
            **ranks[0],
            "seconds": max(a["seconds"] for a in ranks),
            "loss": statistics.fmean(a["loss"] for a in ranks),
            "resident": sum(a["resident"] for a in ranks),
        }

    def peak_memory(self, count: int) -> float:
        """Highest sum of the ranks' PSS in MiB during a burst that nobody times."""
        stop, peak = threading.Event(), [0.0]

        def watch() -> None:
            while not stop.is_set():
                peak[0] = max(peak[0], sum(pss_mib(p.pid, self.world) for p in self.ranks))
                time.sleep(0.002)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            self.burst(count)
        finally:
            stop.set()
            thread.join()
        return peak[0]

    def dismiss(self) -> None:
        """The ranks end by themselves; `end` waits for that."""
        for p in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                p.stdin.close()

    def end(self) -> None:
        self.dismiss()
        for p in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(timeout=10)
            try:  # the rank and what it started; it leads its own session
                os.killpg(p.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            p.wait()
        for f in self.results:
            f.close()
        self.log.close()


def pss_mib(pid: int, world: int) -> float:
    """PSS as it is when only the `world` ranks of this contender live on the machine: anonymous and shared memory as
    the kernel counts them (nobody else maps them), and 1/world of the file pages, which all processes of the bench
    share."""
    fields: dict[str, int] = {}
    try:
        for path in ("smaps_rollup", "status"):
            with open(f"/proc/{pid}/{path}") as f:
                for line in f:
                    key, _, value = line.partition(":")
                    if key in ("Pss_Anon", "Pss_Shmem", "RssFile"):
                        fields[key] = int(value.split()[0])
    except (OSError, ValueError):
        return 0.0
    return (fields.get("Pss_Anon", 0) + fields.get("Pss_Shmem", 0) + fields.get("RssFile", 0) / world) / 1024


# ---- the driver ------------------------------------------------------------------------------------------------------
def measure(args: argparse.Namespace) -> None:
    def title(contender: Contender) -> str:
        return f"{contender.title(args.precision)}, {args.precision}"

    chosen = [c for c in args.contenders if c.base not in ONLY_BF16 or args.precision == "bf16"]
    Told(args, *take_turns("train", Pair, chosen, title, args)).all()


def take_turns(
    bench: str, kind: type[Pair], contenders: Sequence[Any], title: Callable[[Any], str], args: argparse.Namespace
) -> tuple[dict[Any, list[dict]], dict[Any, float]]:
    """(bursts of each contender, in the order of the rounds; MiB), of those that are there and start. args: also how
    many steps to warm up (0: the sampling of memory does it) and to sample memory in."""
    chosen = []
    for contender in contenders:
        if why := contender.missing():
            skip(bench, title(contender), why)
        else:
            chosen.append(contender)
    pairs: list[Pair] = []
    drop_stale_locks()
    try:
        for contender in chosen:
            pairs.append(kind(contender, args))
        for p in list(pairs):
            try:
                p.answers(READY_S)
            # a peer that does not start (DeepSpeed compiles for minutes the first time) takes nobody else's figures
            # along
            except RuntimeError as exc:
                if p.contender.mine:
                    raise
                skip(bench, title(p.contender), f"did not start: {exc}")
                p.end()
                pairs.remove(p)
        for p in pairs if args.warmup else ():
            p.burst(args.warmup)
        memory = {p.contender: p.peak_memory(args.sampled) for p in pairs}
        bursts: dict[Any, list[dict]] = {p.contender: [] for p in pairs}
        for _ in range(args.rounds):
            for p in pairs:
                bursts[p.contender].append(p.burst(args.steps))
    finally:
        for p in pairs:
            p.dismiss()
        for p in pairs:
            p.end()
    return bursts, memory


class Told:
    """The rows of one run. bursts: of each contender, in the order of the rounds; memory: MiB."""

    def __init__(self, args: argparse.Namespace, bursts: dict[Contender, list[dict]], memory: dict[Contender, float]):
        self.args, self.bursts, self.memory = args, bursts, memory
        self.figure = f"GPT-2 {args.model.replace('M', ' M')} {args.precision}, {args.ranks} ranks"
        tokens = args.steps * MICRO_BATCH * args.tokens
        self.speed = {c: [tokens * c.ranks(args.ranks) / b["seconds"] for b in rounds] for c, rounds in bursts.items()}

    def all(self) -> None:
        for c in self.speed:
            self.own(c)
        for mine in (c for c in self.speed if c.base in MINE):
            for limit, what in self.limits():
                self.speed_ratio(mine, limit, what)
            for base in dict.fromkeys(c.base for c in self.speed if c.peer):
                self.against(mine, base)
            for c in self.speed:
                if c.base == "deepc-3-fp32":
                    self.speed_ratio(mine, self.speed[c], BASES[c.base])
        self.check_losses()

    def own(self, c: Contender) -> None:
        rounds = self.bursts[c]
        more = {
            "loss": round(rounds[-1]["loss"], 5),
            "faults_per_step": round(statistics.median(b["faults"] for b in rounds) / self.args.steps),
            "allocator": c.allocator or "as it comes",
        }
        if c.mine:
            more["gather_bytes"] = rounds[-1]["counters"]["gather_bytes"]
        title = c.title(self.args.precision)
        emit("train", self.figure, title, "tokens/s", self.speed[c], **more)
        emit(
            "train", self.figure, title, "MiB, sum over ranks", [self.memory[c]], resident=round(rounds[-1]["resident"])
        )

    def limits(self) -> list[tuple[list[float], str]]:
        """What deepc can reach without any communication: as many processes at the same time, with deepc's memory."""
        there = [c for c in self.speed if c.base in INDEPENDENT and c.allocator == "keep"]
        if not there:
            return []
        return [
            (
                [max(row) for row in zip(*(self.speed[c] for c in there))],
                "limit: processes that never talk, keep_heap()",
            )
        ]

    def speed_ratio(self, mine: Contender, other: list[float], peer: str) -> None:
        values = self.speed[mine]
        emit(
            "train",
            self.figure,
            mine.title(self.args.precision),
            "tokens/s",
            values,
            ratio=paired(values, other),
            peer=peer,
        )

    def against(self, mine: Contender, base: str) -> None:
        """The peer as it comes, and with the allocator that is best for it."""
        forms = [c for c in self.speed if c.base == base]
        best = max(forms, key=lambda c: statistics.median(self.speed[c]))
        for c in dict.fromkeys([*(c for c in forms if not c.allocator), best]):
            peer = c.title(self.args.precision) + (" (best)" if c == best and len(forms) > 1 else "")
            self.speed_ratio(mine, self.speed[c], peer)
            emit(
                "train",
                self.figure,
                mine.title(self.args.precision),
                "MiB, sum over ranks",
                [self.memory[mine]],
                ratio=self.memory[c] / self.memory[mine],
                peer=peer,
            )

    def check_losses(self) -> None:
        """All did the same steps on the same data. At the end of every burst deepc's loss lies no farther from the
        middle of the peers' than 3 times their own spread (they part by rounding alone: Adam's first steps make full
        steps of gradients that are nothing but noise), or than 1e-4 (fp32) or 1 % (bf16) of it, which is more where
        peers are few. Raises RuntimeError."""
        peers = [c for c in self.bursts if c.peer]
        mine = [c for c in self.bursts if c.mine and c.base not in SINGLE]
        among = peers or mine
        for i in range(self.args.rounds if among else 0):
            losses = [self.bursts[c][i]["loss"] for c in among]
            middle, spread = statistics.median(losses), max(losses) - min(losses)
            allowed = max(3 * spread if peers else 0.0, (1e-4 if self.args.precision == "fp32" else 1e-2) * abs(middle))
            if wrong := {
                str(c): b[i]["loss"] for c in mine if not abs((b := self.bursts[c])[i]["loss"] - middle) <= allowed
            }:
                raise RuntimeError(f"burst {i + 1}: losses differ by more than {allowed:g} from {middle:.6f}: {wrong}")


def contender(text: str) -> Contender:
    try:
        return Contender.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--contenders",
        nargs="+",
        type=contender,
        metavar="BASE[+ALLOCATOR]",
        default=[Contender(base) for base in BASES],
        help="default: all as they come; see contenders.py",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per burst")
    parser.add_argument("--warmup", type=int, default=1)
    parser.set_defaults(sampled=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="length of a sequence; a micro-batch has 2")
    parser.add_argument(
        "--model", choices=tuple(MODELS), default="25M", help="tiny: a toy, to see that everything runs"
    )
    parser.add_argument("--contender", type=contender, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        Rank(args).loop()
    else:
        measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
