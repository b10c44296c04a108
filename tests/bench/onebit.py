"""The wire of the 1-bit optimizers: packing beside the memory limit, the 1-bit all-reduce between two test hosts
(network namespaces, tests/python/nethosts.py) beside Gloo and MPI in fp32, and DDP with communication hooks over a slow
link.

    python tests/bench/onebit.py pack                                 one thread, seconds
    python tests/bench/onebit.py reduce --mib 256 --rate 1gbit        a rank per host, and bytes by the interface
    python tests/bench/onebit.py train --rate 100mbit                 two ranks per host, GPT of 25 M parameters

Prints JSON lines (common.emit). The limit of packing: two reads and a write in place per element, x and the error, on
one thread in the same rounds. Bytes are those that the hosts' interfaces sent, headers included. `reduce` ends with a
run of 20 calls, 3 of them uncompressed: a warm-up of 15 %. `train` compares steps of DDP over Gloo, with torch's hooks
fp16 and PowerSGD, and with deepc's hierarchical 1-bit hook, and of a deepc engine with OneBitAdam at ZeRO 1 after its
freeze; what 1-bit gradients do to the loss is not its subject
(docs/compression.md). Needs root, ip and tc for all but `pack`; says so in a line if it can't run.
"""

from __future__ import annotations

import argparse
import ctypes
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import REPO, compiled, cpu_model, emit, paired, require_deepc, rounds, skip

sys.path.insert(0, str(REPO / "tests" / "python"))

GLOO, FP16, POWER, MINE = "DDP over Gloo", "DDP, fp16 hook", "DDP, PowerSGD hook", "DDP, 1-bit hook (deepc)"
ADAM = "OneBitAdam at ZeRO 1, after the freeze (deepc)"


# ---- packing ---------------------------------------------------------------------------------------------------------
def pack(args: argparse.Namespace) -> None:
    require_deepc()
    import torch
    from deepc.compress import OneBit

    torch.set_num_threads(1)
    n, codec, shared = args.elements // 4096 * 4096, OneBit(), {"elements": args.elements, "processor": cpu_model()}
    x, error, out, base = torch.randn(n), torch.zeros(n), torch.empty(n), torch.zeros(n)
    payload, workers = torch.empty(codec.nbytes(n), dtype=torch.uint8), 2
    codec.encode(payload, x)
    rows, server, total = payload.repeat(workers, 1), torch.zeros(n), torch.empty(n)
    path = compiled("limit.c", "limit.so", "-shared", "-fPIC")
    if path is None:
        skip("onebit", "packing beside the memory limit", "no C compiler")
        return
    limit = ctypes.CDLL(str(path)).bench_limit_pack
    limit.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def in_parts() -> None:
        codec.decode(total, rows[0])
        codec.decode_add(total, rows[1])
        total.mul_(1 / workers)
        codec.encode(payload, total, server)

    worker, served, traffic = (
        "pack, worker's error",
        "average of 2 payloads, server's error",
        "x and error, read and written",
    )
    parts = "decode, add, scale, encode"
    calls = {
        traffic: lambda: limit(x.data_ptr(), base.data_ptr(), n),
        worker: lambda: codec.encode(payload, x, error),
        served: lambda: codec.average(payload, rows, server),
        parts: in_parts,
        "unpack": lambda: codec.decode(out, payload),
    }
    times = {name: [1e6 * t / n for t in ms] for name, ms in rounds(calls, args.rounds).items()}
    for name, values in times.items():
        emit("onebit", "pack", name, "ns/element", values, **shared)
    emit(
        "onebit", "pack", worker, "ns/element", times[worker], ratio=paired(times[traffic], times[worker]), peer=traffic
    )
    emit("onebit", "pack", served, "ns/element", times[served], ratio=paired(times[parts], times[served]), peer=parts)


# ---- one tensor between hosts ----------------------------------------------------------------------------------------
def reduce_on(rank: int, world: int, numel: int, count: int) -> dict[str, list[tuple[float, int]]]:
    """(seconds, bytes that this host's interface sent) per contender and call; "run": of 20 calls, 3 in fp32."""
    import nethosts
    import torch
    import torch.distributed as dist
    from deepc.compress import OneBitAllReduce

    flat = dist.new_group(backend="gloo")
    wire, x = OneBitAllReduce(numel), torch.randn(numel)

    def dense() -> None:
        dist.all_reduce(x, group=flat)
        x.mul_(1 / world)

    def signs() -> None:
        wire.all_reduce_(x)

    def run() -> None:
        for step in range(20):
            (dense if step < 3 else signs)()

    out: dict[str, list[tuple[float, int]]] = {}
    for r in range(-1, count + 1):
        for name, call in (("Gloo, fp32", dense), ("1 bit", signs)) if r < count else (("run", run),):
            time.sleep(0.2)  # acknowledgements of what was before
            dist.barrier()
            before, begin = nethosts.traffic()[1], time.perf_counter()
            call()
            took = time.perf_counter() - begin
            dist.barrier()
            if r >= 0:
                out.setdefault(name, []).append((took, nethosts.traffic()[1] - before))
    return out


def mpi_rank(args: argparse.Namespace) -> None:
    """A rank that mpirun started: rank 0 prints the milliseconds of the slower one, a line per call."""
    import torch

    mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
    world, fp32, fp64, add, most = (
        ctypes.byref(ctypes.c_char.in_dll(mpi, f"ompi_mpi_{name}"))
        for name in ("comm_world", "float", "double", "op_sum", "op_max")
    )
    mpi.MPI_Init(None, None)
    x, rank = torch.ones(int(args.mib * (1 << 18))), ctypes.c_int()
    mpi.MPI_Comm_rank(world, ctypes.byref(rank))
    for r in range(-1, args.rounds):
        mpi.MPI_Barrier(world)
        begin = time.perf_counter()
        code = mpi.MPI_Allreduce(ctypes.c_void_p(1), ctypes.c_void_p(x.data_ptr()), x.numel(), fp32, add, world)
        mine, slower = ctypes.c_double(1e3 * (time.perf_counter() - begin)), ctypes.c_double()
        mpi.MPI_Reduce(ctypes.byref(mine), ctypes.byref(slower), 1, fp64, most, 0, world)
        if code or x[-1] != 2.0 ** (r + 2):
            raise SystemExit("MPI_Allreduce failed")
        if rank.value == 0 and r >= 0:
            print(slower.value, flush=True)
    mpi.MPI_Finalize()


def mpi_times(hosts, mib: float, count: int) -> list[float]:
    """Milliseconds of MPI_Allreduce (Open MPI, in place, over TCP) between the two hosts. mpirun reaches the second one
    through an agent that enters its network instead of ssh."""
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder, "agent")
        there = shlex.join(hosts._spaces[1].enter())
        agent.write_text(f'#!/bin/sh\nshift\nexec {there} sh -c "$*"\n')
        agent.chmod(0o755)
        settings = {
            "plm_rsh_agent": str(agent),
            "plm_rsh_no_tree_spawn": "1",
            "pml": "ob1",
            "btl": "tcp,self",
            "btl_tcp_if_include": "eth0",
            "oob_tcp_if_include": "eth0",
        }
        who = ",".join(f"{hosts.address(h)}:1" for h in (0, 1))
        command = ["mpirun", "--allow-run-as-root", "--host", who, "-np", "2"]
        command += [word for name, value in settings.items() for word in ("--mca", name, value)]
        command += [sys.executable, __file__, "mpi-rank", "--mib", str(mib), "--rounds", str(count)]
        done = subprocess.run(hosts._spaces[0].enter(*command), capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"mpirun failed: {done.stderr.strip()[-500:]}")
    return [float(line) for line in done.stdout.split()]


def reduce(args: argparse.Namespace) -> None:
    import nethosts
    import onebit  # this file as a module: what the ranks import

    numel = int(args.mib * (1 << 18))
    with nethosts.Hosts(2, args.rate) as hosts:
        ranks = hosts.run(onebit.reduce_on, [0, 1], args=(numel, args.rounds), limit_s=600)
        mpi = mpi_times(hosts, args.mib, args.rounds) if shutil.which("mpirun") else []
    figure, shared = f"all_reduce of {args.mib:g} MiB, 2 hosts, {args.rate}", {"processor": cpu_model()}
    times = {k: [1e3 * max(c[0] for c in row) for row in zip(*(r[k] for r in ranks))] for k in ranks[0]}
    sent = {k: [max(c[1] for c in row) for row in zip(*(r[k] for r in ranks))] for k in ranks[0]}
    dense, mine = "Gloo, fp32", "1 bit"
    emit("onebit", figure, dense, "ms", times[dense], **shared)
    emit("onebit", figure, mine, "ms", times[mine], ratio=paired(times[dense], times[mine]), peer=dense, **shared)
    if mpi:
        peer = "MPI_Allreduce, fp32"
        emit("onebit", figure, peer, "ms", mpi, **shared)
        emit("onebit", figure, mine, "ms", times[mine], ratio=paired(mpi, times[mine]), peer=peer, **shared)
    else:
        skip("onebit", "MPI_Allreduce", "needs mpirun (Open MPI)")
    emit("onebit", figure, dense, "bytes sent by a host", sent[dense])
    emit("onebit", figure, mine, "bytes sent by a host", sent[mine], ratio=paired(sent[dense], sent[mine]), peer=dense)
    whole = 20 * sorted(sent[dense])[len(sent[dense]) // 2]
    what = "20 calls, 3 of them in fp32"
    emit(
        "onebit", figure, what, "bytes sent by a host", sent["run"], ratio=whole / sent["run"][0], peer=f"20 x {dense}"
    )


# ---- training --------------------------------------------------------------------------------------------------------
def train_on(rank: int, world: int, size: str, tokens: int, count: int) -> dict[str, list[tuple[float, int]]]:
    """(seconds, bytes that this host's interface sent) per contender and step."""
    import contenders
    import deepc.ddp_hooks
    import nethosts
    import torch
    import torch.distributed as dist
    from deepc.compress import OneBit
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    flat, out = dist.new_group(backend="gloo"), {}
    for name in (GLOO, FP16, POWER, MINE):
        torch.manual_seed(0)
        model = contenders.make_model(size)
        # torch's PowerSGD starts collectives in callbacks: several buckets come in different orders on Gloo's ranks
        cap = 1000 if name == POWER else 25
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=flat, bucket_cap_mb=cap)
        if name == FP16:
            ddp.register_comm_hook(flat, default_hooks.fp16_compress_hook)
        elif name == POWER:
            state = powerSGD_hook.PowerSGDState(flat, matrix_approximation_rank=1, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == MINE:
            deepc.ddp_hooks.register(ddp, OneBit(), hierarchical=True)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
        for step in range(-3, count):  # buckets are rebuilt after the first, PowerSGD begins with the third
            batch = torch.randint(0, contenders.MODELS[size]["vocab_size"], (1, tokens))
            dist.barrier()
            before, begin = nethosts.traffic()[1], time.perf_counter()
            ddp(batch, labels=batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            took = time.perf_counter() - begin
            dist.barrier()
            if step >= 0:
                out.setdefault(name, []).append((took, nethosts.traffic()[1] - before))
    out[ADAM] = engine_on(size, tokens, count)
    return out


def engine_on(size: str, tokens: int, count: int) -> list[tuple[float, int]]:
    """The same of an engine: one step of warm-up, one to allocate what the exchange takes, then those that count."""
    import contenders
    import deepc
    import nethosts
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 1, "max_update": 1.0}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepc.initialize(model=contenders.make_model(size), config=config)
    out = []
    for step in range(-2, count):
        batch = torch.randint(0, contenders.MODELS[size]["vocab_size"], (1, tokens))
        dist.barrier()
        before, begin = nethosts.traffic()[1], time.perf_counter()
        engine.backward(engine(batch, labels=batch)[0])
        engine.step()
        took = time.perf_counter() - begin
        dist.barrier()
        if step >= 0:
            out.append((took, nethosts.traffic()[1] - before))
    engine.destroy()
    return out


def train(args: argparse.Namespace) -> None:
    import nethosts
    import onebit

    with nethosts.Hosts(2, args.rate) as hosts:
        ranks = hosts.run(
            onebit.train_on, [0, 0, 1, 1], args=(args.model, args.tokens, args.rounds), timeout_s=300, limit_s=1200
        )
    figure, shared = f"step of GPT {args.model}, 2 hosts of 2 ranks, {args.rate}", {"processor": cpu_model()}
    times = {k: [max(c[0] for c in row) for row in zip(*(r[k] for r in ranks))] for k in ranks[0]}
    for name, values in times.items():
        mib = [max(c[1] for c in row) / (1 << 20) for row in zip(*(r[name] for r in ranks))]
        emit("onebit", figure, name, "s", values, **shared)
        emit("onebit", figure, name, "MiB sent by a host", mib)
        for mine in (MINE, ADAM) if name not in (MINE, ADAM) else ():
            emit("onebit", figure, mine, "s", times[mine], ratio=paired(values, times[mine]), peer=name, **shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    what = parser.add_subparsers(dest="what", required=True)
    for name, call in (("pack", pack), ("reduce", reduce), ("train", train), ("mpi-rank", mpi_rank)):
        one = what.add_parser(name)
        one.set_defaults(call=call)
        one.add_argument("--rounds", type=int, default=9 if name == "pack" else 3)
        if name == "pack":
            one.add_argument("--elements", type=int, default=16 << 20)
        else:
            one.add_argument("--rate", default="1gbit")
    for name in ("reduce", "mpi-rank"):
        what.choices[name].add_argument("--mib", type=float, default=256)
    what.choices["train"].add_argument("--model", default="25M", choices=("25M", "tiny"))
    what.choices["train"].add_argument("--tokens", type=int, default=128, help="length of the one sequence of a batch")
    args = parser.parse_args()
    if args.what in ("reduce", "train"):
        import nethosts

        if nethosts.why_not():
            skip("onebit", args.what, nethosts.why_not())
            return
    args.call(args)


if __name__ == "__main__":
    main()
