"""Training steps of a 25 M- or 125 M-parameter GPT-2 on 2 ranks of 1 thread: deepc against DDP, FSDP2, DeepSpeed and
processes that never talk. contenders.py says who they are, and under which allocators they run.

    python tests/bench/train.py --precision fp32 --rounds 5 --contenders independent+keep ddp ddp+keep deepc-3

Every contender is a pair of processes that stays alive; all take turns in bursts of a few steps, so that drift of the
machine hits all alike. Rank r runs on core r. Memory is sampled in bursts that are not timed: the sum over the ranks of
private and shared pages (PSS), where file pages (libraries) count once per pair however many other processes map
them. Beside it stands the sum of the ranks' highest resident sets (VmHWM): the kernel keeps it, so that no peak escapes
it, initialize() included; pages that ranks share count for each of them, and file pages too.

--contenders may come several times: each time a group that takes turns. `ddp+best` is DDP under the allocator that a
short screening before finds the fastest for it. --budget says after how many seconds no round begins any more.
Losses of deepc are compared with the peers' at the end of every burst, and the rows say how far the peers part from
each other."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from common import emit, free_port, paired_row, skip, status_mib
from contenders import BASES, BEST, INDEPENDENT, MICRO_BATCH, MINE, MODELS, SINGLE, Contender, left_out, make_step
from nursery import FILES, Nursery, serve
from peers import drop_stale_locks, environment
from training import LOSSES, PSS, RESIDENT, SCREENING, SPEED

READY_S, BURST_S = 200.0, 300.0
LEAST_ROUNDS = 3  # of a group, whatever the budget


# ---- one rank --------------------------------------------------------------------------------------------------------
class Rank:
    """A rank's loop: a command per line on stdin ("steps N", "profile N"), a JSON line per answer on the descriptor
    BENCH_RESULT."""

    settle = 1  # steps that are not timed, at the begin of each burst

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        if "deepc" in args.contender.base:
            import deepc  # noqa: F401

        self.files = float(os.environ.get(FILES, 0.0))
        self.settle = getattr(args, "settle", self.settle)
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
        """Some to warm the caches after other contenders' turn, then `count` timed ones."""
        loss = 0.0
        for _ in range(self.settle):
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
            resident=status_mib("self", "VmHWM") + max(0.0, self.files - status_mib("self", "RssFile")),
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
        own = ["--precision", args.precision, "--tokens", str(args.tokens), "--model", args.model]
        return [*own, "--settle", str(getattr(args, "settle", Rank.settle))]

    def __init__(self, contender: Any, args: argparse.Namespace, nursery: Nursery | None = None) -> None:
        """nursery: forks the ranks (only for train.py's own); else each is a program of its own."""
        self.contender, self.name, self.world = contender, str(contender), contender.ranks(args.ranks)
        self.log = tempfile.TemporaryFile("w+b")
        port = free_port()
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
            command = ["--contender", self.name, *self.options(args)]
            self.ranks.append(
                nursery.fork(contender.program_environment(), command, env, self.log, write)
                if nursery
                else subprocess.Popen(
                    [sys.executable, self.program, *command],
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
                peak[0] = max(peak[0], sum(pss_mib(p.pid, self.world, getattr(p, "files", 0.0)) for p in self.ranks))
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


def pss_mib(pid: int, world: int, files: float = 0.0) -> float:
    """PSS as it is when only the `world` ranks of this contender live on the machine: anonymous memory whole (nobody
    else maps it, or only the process that a rank was forked from, which an ordinary rank has not), shared memory as the
    kernel divides it, and 1/world of the file pages, which all processes of the bench share. files: MiB of
    them that a rank of a nursery would have mapped by its imports, had it made them itself."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as f:
            shared = sum(int(line.split()[1]) for line in f if line.startswith("Pss_Shmem:")) / 1024
        return shared + status_mib(pid, "RssAnon") + max(files, status_mib(pid, "RssFile")) / world
    except (OSError, ValueError, KeyError):
        return 0.0  # it ends


# ---- the driver ------------------------------------------------------------------------------------------------------
def measure(args: argparse.Namespace) -> None:
    began = time.monotonic()
    with Nursery() if args.fork else contextlib.nullcontext() as nursery:
        groups: list[tuple[argparse.Namespace, int, list[Contender], set[Contender]]] = []
        found: dict[Contender, Contender | None] = {}
        for precision in args.precision:
            own = argparse.Namespace(**{**vars(args), "precision": precision})
            wanted = dict.fromkeys(c for group in args.contenders for c in group if c.allocator == BEST)
            for c in wanted:
                if not left_out(c, precision):
                    before = found.get(c)
                    found[c] = screen(own, c, nursery, before.allocator if before else "")
            for i, group in enumerate(args.contenders):
                chosen = (found.get(c, c) for c in group if not left_out(c, precision))
                groups.append((own, i, [c for c in dict.fromkeys(chosen) if c], {c for c in found.values() if c}))
        for done, (own, i, chosen, best) in enumerate(groups):
            now = time.monotonic()
            own.until = now + (began + args.budget - now) / (len(groups) - done) if args.budget else None
            told = take_turns("train", Pair, chosen, lambda c: title_of(c, own.precision), own, nursery)
            Told(own, *told, group=i, best=best).all()


def title_of(contender: Contender, precision: str) -> str:
    return f"{contender.title(precision)}, {precision}"


def screen(
    args: argparse.Namespace, wanted: Contender, nursery: Nursery | None, allocator: str = ""
) -> Contender | None:
    """Which of its forms stands for BASE+best: the one with the shortest step, of the third alone where forms are many,
    of the third to fifth where they are few. None: none can run. allocator: that it was the fastest with in another
    precision; what pages cost it does not depend on that."""
    rounds = 3 if allocator else 1
    short = argparse.Namespace(
        **{**vars(args), "settle": 1, "warmup": 0, "sampled": 0, "rounds": rounds, "steps": 1, "until": None}
    )
    forms = [c for c in wanted.forms(args.precision) if not allocator or c.allocator == allocator]
    if allocator and len(forms) == 1:
        return forms[0]
    bursts, _ = take_turns("train", Pair, forms, lambda c: title_of(c, args.precision), short, nursery)
    if not bursts:
        return None
    seconds = {c: min(burst["seconds"] for burst in rounds[-short.rounds :]) for c, rounds in bursts.items()}
    best = min(seconds, key=seconds.__getitem__)
    for c, took in seconds.items():
        what = c.title(args.precision)
        emit("train", figure_of(args), what, SCREENING, [took], chosen=c == best, of=str(wanted))
    return best


def figure_of(args: argparse.Namespace) -> str:
    return f"GPT-2 {args.model.replace('M', ' M')} {args.precision}, {args.ranks} ranks"


def take_turns(
    bench: str,
    kind: type[Pair],
    contenders: Sequence[Any],
    title: Callable[[Any], str],
    args: argparse.Namespace,
    nursery: Nursery | None = None,
) -> tuple[dict[Any, list[dict]], dict[Any, float]]:
    """(bursts of each contender, in the order of the rounds; MiB), of those that are there and start. args: also how
    many steps to warm up (0: the sampling of memory does it, or one step) and to sample memory in (0: it is not), and,
    where it is limited, until when rounds begin."""
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
            pairs.append(kind(contender, args, nursery))
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
        for p in pairs if args.warmup or not args.sampled else ():
            p.burst(args.warmup)
        memory = {p.contender: p.peak_memory(args.sampled) for p in pairs if args.sampled}
        bursts: dict[Any, list[dict]] = {p.contender: [] for p in pairs}
        for number in range(args.rounds):
            began = time.monotonic()
            for p in pairs:
                bursts[p.contender].append(p.burst(args.steps))
            now = time.monotonic()
            if getattr(args, "until", None) and number + 1 >= LEAST_ROUNDS and now + (now - began) > args.until:
                break
    finally:
        for p in pairs:
            p.dismiss()
        for p in pairs:
            p.end()
    return bursts, memory


class Told:
    """The rows of one group. bursts: of each contender, in the order of the rounds; memory: MiB; best: which of them a
    screening chose."""

    def __init__(
        self,
        args: argparse.Namespace,
        bursts: dict[Contender, list[dict]],
        memory: dict[Contender, float],
        group: int = 0,
        best: Collection[Contender] = (),
    ):
        self.args, self.bursts, self.memory, self.group, self.best = args, bursts, memory, group, best
        self.figure = figure_of(args)
        tokens = args.steps * MICRO_BATCH * args.tokens
        self.speed = {c: [tokens * c.ranks(args.ranks) / b["seconds"] for b in rounds] for c, rounds in bursts.items()}
        self.resident = {c: rounds[-1]["resident"] for c, rounds in bursts.items()}

    def all(self) -> None:
        for c in self.speed:
            self.own(c)
        for mine in (c for c in self.speed if c.base in MINE):
            for limit, what in self.limits():
                self.speed_ratio(mine, limit, what)
            for c in self.speed:
                if c.peer:
                    self.against(mine, c)
                elif c.base == "deepc-3-fp32":
                    self.speed_ratio(mine, self.speed[c], BASES[c.base])
        self.check_losses()

    def tell(self, c: Contender, unit: str, values: Sequence[float], **more) -> None:
        emit("train", self.figure, c.title(self.args.precision), unit, values, group=self.group, **more)

    def own(self, c: Contender) -> None:
        rounds = self.bursts[c]
        more = {
            "loss": round(rounds[-1]["loss"], 5),
            "faults_per_step": round(statistics.median(b["faults"] for b in rounds) / self.args.steps),
            "allocator": c.allocator or "as it comes",
        }
        if c.mine:
            more["gather_bytes"] = rounds[-1]["counters"]["gather_bytes"]
        self.tell(c, SPEED, self.speed[c], **more)
        self.tell(c, PSS, [self.memory[c]])
        self.tell(c, RESIDENT, [self.resident[c]])

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

    def speed_ratio(self, mine: Contender, other: list[float], peer: str, **more) -> None:
        self.tell(mine, SPEED, self.speed[mine], peer=peer, **paired_row(self.speed[mine], other), **more)

    def against(self, mine: Contender, c: Contender) -> None:
        """mine beside a peer in speed and in both measures of memory."""
        peer = c.title(self.args.precision)
        more = {"peer_allocator": c.allocator, "peer_fused": c.fused, "peer_is_best": c in self.best}
        self.speed_ratio(mine, self.speed[c], peer, **more)
        for unit, of in ((PSS, self.memory), (RESIDENT, self.resident)):
            self.tell(mine, unit, [of[mine]], ratio=of[c] / of[mine], peer=peer, **more)

    def check_losses(self) -> None:
        """All did the same steps on the same data: at the end of every burst deepc's loss lies within `allowed_gap` of
        the middle of the peers'. Raises RuntimeError."""
        peers = [c for c in self.bursts if c.peer]
        mine = [c for c in self.bursts if c.mine and c.base not in SINGLE]
        among = peers or mine
        apart, from_middle = [], []
        for i in range(min(map(len, self.bursts.values())) if among and mine else 0):
            losses = {c.base: self.bursts[c][i]["loss"] for c in among}  # allocators change no bit
            middle, allowed = allowed_gap(list(losses.values()), self.args.precision)
            gaps = {str(c): abs(self.bursts[c][i]["loss"] - middle) for c in mine}
            if wrong := {c: gap for c, gap in gaps.items() if not gap <= allowed}:
                raise RuntimeError(f"burst {i + 1}: losses differ by more than {allowed:g} from {middle:.6f}: {wrong}")
            apart.append((max(losses.values()) - min(losses.values())) / abs(middle))
            from_middle.append(max(gaps.values()) / abs(middle))
        if apart:
            emit("train", self.figure, "the peers from each other", LOSSES, apart, group=self.group)
            emit("train", self.figure, "deepc from the peers' middle", LOSSES, from_middle, group=self.group)


def allowed_gap(losses: Sequence[float], precision: str) -> tuple[float, float]:
    """(middle of the peers' losses, how far deepc's may lie from it). losses: one of each way to train. They part by
    rounding alone (Adam's first steps are full steps of gradients that are nothing but noise): so from three ways on it
    is 3 times what they part from each other, and never less than 1e-5 (fp32) or 1e-3 (bf16) of it. Fewer ways say too
    little of that: 1e-4 or 1 %."""
    middle, spread = statistics.median(losses), max(losses) - min(losses)
    few, many = (1e-4, 1e-5) if precision == "fp32" else (1e-2, 1e-3)
    return middle, max(3 * spread, (many if len(losses) >= 3 else few) * abs(middle))


def contender(text: str) -> Contender:
    try:
        return Contender.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32"])
    parser.add_argument(
        "--contenders",
        nargs="+",
        action="append",
        type=contender,
        metavar="BASE[+ALLOCATOR]",
        help="default: all as they come; see contenders.py. Several times: groups, one after the other",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per burst")
    parser.add_argument("--settle", type=int, default=Rank.settle, help="steps before them that are not timed")
    parser.add_argument("--warmup", type=int, default=1, help="0: the sampling of memory does it")
    parser.add_argument("--sampled", type=int, default=2, help="steps of the burst in which memory is sampled")
    parser.add_argument(
        "--budget", type=float, help=f"seconds after which no round begins; {LEAST_ROUNDS} rounds there are anyhow"
    )
    parser.add_argument(
        "--fork",
        action="store_true",
        help="fork the ranks from processes that have imported torch and transformers: they start in a second",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="length of a sequence; a micro-batch has 2")
    parser.add_argument(
        "--model", choices=tuple(MODELS), default="25M", help="tiny: a toy, to see that everything runs"
    )
    parser.add_argument("--contender", type=contender, help=argparse.SUPPRESS)
    args = parser.parse_args(serve())
    if args.contender:
        args.precision = args.precision[0]
        Rank(args).loop()
        return 0
    args.contenders = args.contenders or [[Contender(base) for base in BASES]]
    measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
