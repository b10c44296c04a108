"""Collectives over shared memory: torch.distributed on backend deepc, the C core alone, and Gloo, in the same processes and the same rounds.

    python tests/bench/collectives.py --ranks 2 --bytes 4096 1048576 --rounds 9

bytes: of the larger tensor of a call (input of all_reduce, reduce_scatter, all_to_all and broadcast; output of all_gather), fp32. Time: of the
slowest rank. "copy": one copy of those bytes by every rank at once, for scale."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time

from common import emit, paired, require_deepc
from peers import environment

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
TARGET_S = 0.02  # of one timed loop of small calls


def calls(op: str, nbytes: int, group, comm, gloo) -> dict:
    """Functions that do one call each: deepc through torch.distributed, the C core alone, Gloo, and a copy."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    n = max(world, nbytes // 4 // world * world)
    big, other, part = torch.ones(n), torch.ones(n), torch.ones(n // world)

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has new names
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def over(pg):
        return {"all_reduce": lambda: dist.all_reduce(big, group=pg), "reduce_scatter": lambda: scatter(part, big, group=pg),
                "all_gather": lambda: gather(big, part, group=pg), "broadcast": lambda: dist.broadcast(big, 0, group=pg),
                "all_to_all": lambda: dist.all_to_all_single(other, big, group=pg), "barrier": lambda: dist.barrier(pg)}[op]

    core = {"all_reduce": lambda: comm.all_reduce(big), "reduce_scatter": lambda: comm.reduce_scatter(part, big), "all_gather": lambda: comm.all_gather(big, part),
            "broadcast": lambda: comm.broadcast(big), "all_to_all": lambda: comm.all_to_all(other, big), "barrier": comm.barrier}[op]
    out = {"deepc": over(group), "deepc, C core alone": core, "Gloo": over(gloo)}
    if op != "barrier":
        out["copy"] = lambda: other.copy_(big)
    out["refill"] = lambda: big.fill_(1.0)  # sums must not overflow; never timed
    return out


def timed(call, loops: int) -> float:
    started = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - started) / loops


def bench(op: str, nbytes: int, count: int, group, comm, gloo) -> None:
    import torch
    import torch.distributed as dist

    contenders = calls(op, nbytes, group, comm, gloo)
    refill = contenders.pop("refill")
    loops: dict[str, int] = {}
    for name, call in contenders.items():  # rank 0 decides how often
        call()
        comm.barrier()
        once = torch.tensor([timed(call, 3)], dtype=torch.float64)
        comm.broadcast(once)
        loops[name] = max(1, min(1000, int(TARGET_S / max(1e-7, float(once)))))
    mine = torch.zeros(len(contenders), count, dtype=torch.float64)
    for r in range(count):
        for c, (name, call) in enumerate(contenders.items()):
            refill()
            comm.barrier()
            mine[c, r] = timed(call, loops[name])
    everyone = torch.empty(dist.get_world_size() * mine.numel(), dtype=torch.float64)
    comm.all_gather(everyone, mine.view(-1))
    if dist.get_rank():
        return
    slowest = everyone.view(-1, *mine.shape).amax(0) * 1e6
    times = {name: slowest[c].tolist() for c, name in enumerate(contenders)}
    figure = f"{op}{'' if op == 'barrier' else ' ' + size_name(nbytes)}, {dist.get_world_size()} ranks"
    for name, values in times.items():
        ours = name.startswith("deepc")
        emit("collectives", figure, name, "us", values, ratio=paired(times["Gloo"], values) if ours else None, peer="Gloo" if ours else None, bytes=nbytes)


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def rank_main(args: argparse.Namespace) -> int:
    import datetime

    import torch
    import torch.distributed as dist

    require_deepc()
    from deepc import node
    from deepc.process_group import DEFAULT_STAGING

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("deepc")
    group, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    slot_bytes, slots = DEFAULT_STAGING
    store = dist.PrefixStore("bench", dist.distributed_c10d._get_default_store())
    comm = node.open_comm(store, rank, world, label="bench", timeout=datetime.timedelta(seconds=120), slot_bytes=slot_bytes, slots=slots)
    for op in args.ops:
        for nbytes in args.bytes if op != "barrier" else [4096]:
            bench(op, nbytes, args.rounds if nbytes < 128 << 20 else max(3, args.rounds // 2), group, comm, gloo)
    comm.close()
    dist.destroy_process_group()
    return 0


def launch(args: argparse.Namespace) -> int:
    """Starts the ranks; the first that fails ends the others."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for r in range(args.ranks):
        env = {**environment(1), "RANK": str(r), "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": str(r), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    try:
        while any(p.poll() is None for p in ranks):
            if failed := [p.returncode for p in ranks if p.poll()]:
                return failed[0]
            time.sleep(0.1)
        return max(abs(p.returncode) for p in ranks)
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
            p.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return launch(args)
    return rank_main(args)


if __name__ == "__main__":
    sys.exit(main())
