"""Training steps of a 25 M- or 125 M-parameter GPT-2 on 2 ranks of 1 thread: deepc against DDP, FSDP2, DeepSpeed and
one single-threaded process.

    python tests/bench/train.py --precision fp32 --rounds 5 [--contenders single ddp deepspeed-3 deepc-3]

Every contender is a pair of processes that stays alive; all take turns in bursts of a few steps, so that drift of the
machine hits all alike. Rank r runs on core r. Memory is sampled in bursts that are not timed: the sum over the ranks of
private and shared pages (PSS), where file pages (libraries) count once per pair however many other processes map
them."""

from __future__ import annotations

import argparse
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

from common import emit, paired, require_deepc, skip, version
from peers import drop_stale_locks, environment

MODELS = {
    "25M": dict(vocab_size=50257, n_positions=1024, n_embd=320, n_layer=7, n_head=5),  # 25.0 M parameters
    "125M": dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),  # 124.4 M
    "tiny": dict(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=2),
}
HYPER = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
CLIP, MICRO_BATCH, READY_S, BURST_S = 1.0, 2, 200.0, 300.0
# a contender under torch's own huge-page switch (THP_MEM_ALLOC_ENABLE=1), which deepc turns on and nobody else does
HUGE = "+huge"
SINGLE = ("single", "single-autocast", "single-deepc", "single" + HUGE, "single-autocast" + HUGE)
ALL = (
    *SINGLE,
    "independent",
    "ddp",
    "ddp-bf16-weights",
    "zero-redundancy",
    "fsdp2",
    "deepspeed-1",
    "deepspeed-2",
    "deepspeed-3",
    "ddp" + HUGE,
    "fsdp2" + HUGE,
    "deepspeed-3" + HUGE,
    "deepc-0",
    "deepc-1",
    "deepc-2",
    "deepc-3",
    "deepc-3-fused",
    "deepc-3-returned",
    "deepc-3-fp32",
)
ONLY_BF16 = ("single-autocast", "single-autocast" + HUGE, "ddp-bf16-weights", "deepc-3-fp32")
NAMES = {
    "single": "one process, 1 thread",
    "single-autocast": "one process, 1 thread, autocast",
    "single-deepc": "deepc, one process",
    "independent": "as many processes that never talk",
    "ddp": "DDP",
    "ddp-bf16-weights": "DDP, bf16 weights",
    "zero-redundancy": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    **{f"deepspeed-{s}": f"DeepSpeed ZeRO-{s}" for s in (1, 2, 3)},
    **{f"deepc-{s}": f"deepc ZeRO-{s}" for s in (0, 1, 2, 3)},
    "deepc-3-fused": "deepc ZeRO-3, deepc.fuse",
    "deepc-3-returned": "deepc ZeRO-3, freed memory returned",
    "deepc-3-fp32": "deepc ZeRO-3 in fp32",
}
MINE = ("deepc-2", "deepc-3", "deepc-3-fused")  # compared with each peer


def name_of(contender: str, precision: str) -> str:
    """As the tables call it; with autocast where that is what the contender does."""
    plain = contender.removesuffix(HUGE)
    return (
        NAMES[plain]
        + (", autocast" if plain in ("ddp", "zero-redundancy") and precision == "bf16" else "")
        + (", huge pages" if contender.endswith(HUGE) else "")
    )


# ---- contenders: each makes a function that does one step on a batch and returns the loss ----------------------------
def make_model(size: str):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        **MODELS[size], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, loss_type="ForCausalLM"
    )
    return GPT2LMHeadModel(config).train()


def autocast(precision: str):
    import torch

    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def plain(model, parameters, precision: str, cast: bool, sharded: bool = False):
    """Forward, backward, clip, fused AdamW. With cast: under autocast where precision is bf16. With sharded:
    ZeroRedundancyOptimizer around the AdamW."""
    import torch

    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, fused=True, **HYPER)
    else:
        optimizer = torch.optim.AdamW(parameters, fused=True, **HYPER)

    def step(x):
        with autocast(precision if cast else "fp32"):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def with_masters(model, wrap=lambda m: m):
    """bf16 weights, fp32 masters (the unrounded weights): the usual hand-written 16-bit loop. Gradients are widened one
    parameter at a time."""
    import torch

    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model = wrap(model.bfloat16())
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **HYPER)

    def step(x):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        for w, m in zip(weights, masters):
            m.grad, w.grad = w.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.detach()

    return step


def engine_config(precision: str, stage: int) -> dict:
    """DeepSpeed's JSON, the same for DeepSpeed and deepc."""
    hyper = {**HYPER, "betas": list(HYPER["betas"])}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": hyper},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
    }


def engine_step(engine):
    def step(x):
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def make_ddp(model, precision: str, masters: bool, sharded: bool = False):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def wrap(m):
        return torch.nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)

    if masters:
        return with_masters(model, wrap)
    ddp = wrap(model)
    return plain(ddp, list(ddp.parameters()), precision, cast=True, sharded=sharded)


def make_fsdp(model, precision: str):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return plain(model, list(model.parameters()), precision, cast=False)


def make_deepspeed(model, precision: str, stage: int):
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return engine_step(deepspeed.initialize(model=model, config=engine_config(precision, stage))[0])


def make_deepc(model, precision: str, stage: int, fused: bool = False):
    deepc = require_deepc()
    if fused:
        deepc.fuse(model)
    return engine_step(deepc.initialize(model=model, config=engine_config(precision, stage))[0])


def make_step(contender: str, precision: str, size: str):
    model, contender = make_model(size), contender.removesuffix(HUGE)
    if contender == "deepc-3-returned":
        contender = "deepc-3"
    kind, _, stage = contender.partition("-")
    if contender == "deepc-3-fused":
        return make_deepc(model, precision, 3, fused=True)
    if contender == "deepc-3-fp32":
        return make_deepc(model, "fp32", 3)
    if contender in ("single", "independent") and precision == "bf16":
        return with_masters(model)
    if contender in ("single", "single-autocast", "independent"):
        return plain(model, list(model.parameters()), precision, cast=True)
    if contender == "single-deepc":
        return make_deepc(model, precision, 0)
    if contender == "zero-redundancy":
        return make_ddp(model, precision, masters=False, sharded=True)
    if kind == "ddp":
        return make_ddp(model, precision, masters=bool(stage))
    if kind == "fsdp2":
        return make_fsdp(model, precision)
    return (make_deepspeed if kind == "deepspeed" else make_deepc)(model, precision, int(stage))


# ---- one rank --------------------------------------------------------------------------------------------------------
class Rank:
    """A rank's loop: a command per line on stdin ("steps N"), a JSON line per answer on the descriptor BENCH_RESULT."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        if "deepc" in args.contender:
            import deepc  # noqa: F401

        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.rank % len(cores)]})
        torch.set_num_threads(1)
        self.out = os.fdopen(int(os.environ["BENCH_RESULT"]), "w", buffering=1)
        tokens = torch.Generator().manual_seed(1234 + self.rank)
        self.batches = [
            torch.randint(0, MODELS[args.model]["vocab_size"], (MICRO_BATCH, args.tokens), generator=tokens)
            for _ in range(4)
        ]
        self.step = make_step(args.contender, args.precision, args.model)
        self.done = 0
        self.say(ready=True)

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
            counters={k: after[k] - before[k] for k in after},
        )

    def _one(self):
        loss = self.step(self.batches[self.done % len(self.batches)])
        self.done += 1
        return loss

    def loop(self) -> None:
        for line in sys.stdin:
            command, _, count = line.partition(" ")
            if command != "steps":
                return
            self.steps(int(count))


def _counters() -> dict[str, int]:
    deepc = sys.modules.get("deepc")
    return deepc.counters() if deepc is not None else {}


# ---- a contender, seen from the driver -------------------------------------------------------------------------------
class Contender:
    """The processes of one contender. Raises RuntimeError with the end of their output when one fails or hangs."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.world = name, 1 if name in SINGLE else args.ranks
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
            if name.endswith(HUGE):
                env["THP_MEM_ALLOC_ENABLE"] = "1"
            if name == "deepc-3-returned":
                env["DEEPC_KEEP_HEAP"] = "0"
            command = [
                sys.executable,
                __file__,
                "--contender",
                name,
                "--precision",
                args.precision,
                "--tokens",
                str(args.tokens),
                "--model",
                args.model,
            ]
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

    def send_steps(self, count: int) -> None:
        for p in self.ranks:
            try:
                p.stdin.write(f"steps {count}\n".encode())
                p.stdin.flush()
            except BrokenPipeError:
                raise RuntimeError(f"{self.name} failed:\n{self.tail()}") from None

    def burst(self, count: int) -> dict:
        """`count` timed steps: seconds of the slowest rank, mean loss, faults and counters of rank 0."""
        self.send_steps(count)
        ranks = self.answers(BURST_S)
        return {
            **ranks[0],
            "seconds": max(a["seconds"] for a in ranks),
            "loss": statistics.fmean(a["loss"] for a in ranks),
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

    def end(self) -> None:
        for p in self.ranks:
            try:
                p.stdin.close()
                p.wait(timeout=10)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                pass
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
def missing(contender: str) -> str:
    """ "" or why a contender can't run here."""
    if version("transformers") is None:
        return "transformers is not installed (run.py --install-peers)"
    if contender.startswith("deepspeed") and version("deepspeed") is None:
        return "deepspeed is not installed (run.py --install-peers)"
    return ""


def measure(args: argparse.Namespace) -> None:
    chosen = []
    for name in args.contenders:
        if name in ONLY_BF16 and args.precision != "bf16":
            continue
        if why := missing(name):
            skip("train", f"{name_of(name, args.precision)}, {args.precision}", why)
        else:
            chosen.append(name)
    pairs: list[Contender] = []
    drop_stale_locks()
    try:
        for name in chosen:
            pairs.append(Contender(name, args))
        for c in list(pairs):
            try:
                c.answers(READY_S)
            # a peer that does not start (DeepSpeed compiles for minutes the first time) takes nobody else's figures
            # along
            except RuntimeError as exc:
                if c.name.startswith("deepc"):
                    raise
                skip("train", f"{name_of(c.name, args.precision)}, {args.precision}", f"did not start: {exc}")
                c.end()
                pairs.remove(c)
        for c in pairs:
            c.burst(args.warmup)
        memory = {c.name: c.peak_memory(2) for c in pairs}
        bursts: dict[str, list[dict]] = {c.name: [] for c in pairs}
        for _ in range(args.rounds):
            for c in pairs:
                bursts[c.name].append(c.burst(args.steps))
    finally:
        for c in pairs:
            c.end()
    tell(args, bursts, memory)


def tell(args: argparse.Namespace, bursts: dict[str, list[dict]], memory: dict[str, float]) -> None:
    figure = f"GPT-2 {args.model.replace('M', ' M')} {args.precision}, {args.ranks} ranks"
    per_burst = args.steps * MICRO_BATCH * args.tokens
    speed = {
        n: [per_burst * (1 if n in SINGLE else args.ranks) / b["seconds"] for b in all_] for n, all_ in bursts.items()
    }
    loss = {n: all_[-1]["loss"] for n, all_ in bursts.items()}
    singles = [n for n in ("single", "single-autocast") if n in speed]
    ideal = [args.ranks * max(row) for row in zip(*(speed[n] for n in singles))] if singles else None
    for n, values in speed.items():
        last = bursts[n][-1]
        more = {
            "loss": round(loss[n], 5),
            "faults_per_step": round(statistics.median(b["faults"] for b in bursts[n]) / args.steps),
        }
        if n.startswith("deepc"):
            more["gather_bytes"] = last["counters"]["gather_bytes"]
        ratio = paired(values, ideal) if ideal and n not in SINGLE else None
        emit(
            "train",
            figure,
            name_of(n, args.precision),
            "tokens/s",
            values,
            ratio=ratio,
            peer="ideal: the ranks' number times one process" if ratio else None,
            **more,
        )
        emit("train", figure, name_of(n, args.precision), "MiB, sum over ranks", [memory[n]])
    huge = [n for n in ("single" + HUGE, "single-autocast" + HUGE) if n in speed]
    if huge:  # the stricter ideal: one process that has deepc's huge pages too
        strict = [args.ranks * max(row) for row in zip(*(speed[n] for n in huge))]
        for mine in (n for n in speed if n in MINE):
            emit(
                "train",
                figure,
                name_of(mine, args.precision),
                "tokens/s",
                speed[mine],
                ratio=paired(speed[mine], strict),
                peer="ideal with huge pages: the ranks' number times one process",
            )
    if (
        "independent" in speed
    ):  # what the machine lets that many processes do at once: their shared memory bus is no one's communication
        for mine in (n for n in speed if n in MINE):
            emit(
                "train",
                figure,
                name_of(mine, args.precision),
                "tokens/s",
                speed[mine],
                ratio=paired(speed[mine], speed["independent"]),
                peer=NAMES["independent"],
            )
    for mine in (n for n in speed if n in MINE):
        for peer in (n for n in speed if not n.startswith("deepc") and n not in SINGLE and n != "independent"):
            emit(
                "train",
                figure,
                name_of(mine, args.precision),
                "tokens/s",
                speed[mine],
                ratio=paired(speed[mine], speed[peer]),
                peer=name_of(peer, args.precision),
            )
            emit(
                "train",
                figure,
                name_of(mine, args.precision),
                "MiB, sum over ranks",
                [memory[mine]],
                ratio=memory[peer] / memory[mine],
                peer=name_of(peer, args.precision),
            )
        if "deepc-3-fp32" in speed:
            emit(
                "train",
                figure,
                name_of(mine, args.precision),
                "tokens/s",
                speed[mine],
                ratio=paired(speed[mine], speed["deepc-3-fp32"]),
                peer=NAMES["deepc-3-fp32"],
            )
    check_losses(args, {n: all_[0]["loss"] for n, all_ in bursts.items() if n not in SINGLE and n != "independent"})


def check_losses(args: argparse.Namespace, loss: dict[str, float]) -> None:
    """All contenders did the same steps on the same data: at the end of the first timed burst fp32 losses agree to
    1e-4, bf16 ones to 1 %. Later ones part by rounding alone: Adam's first steps make full steps of gradients that are
    nothing but noise (125 M after 17 steps: DDP and FSDP2 by 7e-5).
    """
    if not loss:
        return
    middle, allowed = statistics.median(loss.values()), 1e-4 if args.precision == "fp32" else 1e-2
    if wrong := {n: v for n, v in loss.items() if not abs(v - middle) <= allowed * abs(middle)}:
        raise RuntimeError(
            f"losses after the same steps differ by more than {allowed:g} from their median {middle:.6f}: {wrong}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--contenders", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per burst")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="length of a sequence; a micro-batch has 2")
    parser.add_argument(
        "--model", choices=tuple(MODELS), default="25M", help="tiny: a toy, to see that everything runs"
    )
    parser.add_argument("--contender", choices=ALL, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        Rank(args).loop()
    else:
        measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
