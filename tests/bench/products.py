"""Products of matrices on one CPU: deepc's dc_gemm beside torch's (fp32: MKL; bf16: oneDNN, and by panels of fp32, as
deepc has them where there is no bf16 arithmetic) and oneDNN's, GFLOP/s.

    python tests/bench/products.py --threads 1 --rounds 7 [--precision bf16] [--cases 512x384x1536 2048x2048x2048]

A case is rows x depth x columns. For each: "forward", x w.t() as nn.Linear has it; "of x", g w; "of w", g.t() x.
Contenders take turns in one process, on memory that is kept (memory.keep_heap). Says whether deepc's engines take
their own kernel on this processor (precision.fast_matmul)."""

from __future__ import annotations

import argparse
import json
import os

from common import emit, machine, paired_row, require_deepc, rounds

CASES = ["512x384x1536", "512x1536x384", "512x384x50257", "256x256x256", "128x128x128", "2048x2048x2048"]


def contenders(a, b) -> dict:
    """Name -> a b, for matrices of torch."""
    import torch
    from deepc.core.cpu import has_instructions
    from deepc.nn.aten import matmul

    out = a.new_empty(a.shape[0], b.shape[1])
    onednn = torch.ops.mkldnn._linear_pointwise
    found = {"deepc": lambda: torch.ops.deepc.gemm(a, b, out, out, 0.0, 1.0)}
    if a.dtype == torch.float32 or has_instructions("bf16"):  # otherwise a reference loop
        found["torch"] = lambda: torch.mm(a, b, out=out)
    if a.dtype == torch.float32:
        found["oneDNN"] = lambda: onednn(a, b.t(), None, "none", [], "")
    else:
        found["torch, fp32 panels"] = lambda: matmul.through_fp32(out, a, b, None, 0.0, 1.0)
    return found


def measure(name: str, what: str, a, b, count: int) -> None:
    flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
    calls = max(1, int(2e8 / flops))  # 1 ms and more

    def often(one):
        return lambda: [one() for _ in range(calls)]

    times = rounds({k: often(one) for k, one in contenders(a, b).items()}, count)
    speeds = {k: [calls * flops / ms / 1e6 for ms in v] for k, v in times.items()}
    figure, mine = f"{name} {what}", speeds["deepc"]
    for who, speed in speeds.items():
        emit("products", figure, who, "GFLOP/s", speed)
    for peer in (who for who in speeds if who != "deepc"):
        emit("products", figure, "deepc", "GFLOP/s", mine, peer=peer, **paired_row(mine, speeds[peer]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--cases", nargs="+", default=CASES)
    args = parser.parse_args()
    os.environ["DEEPC_MATMUL"] = "0"  # torch's are to be torch's
    require_deepc()
    import torch
    from deepc import memory
    from deepc.core.cpu import fast_products

    torch.set_num_threads(args.threads)
    memory.keep_heap()
    engines = fast_products(args.precision)
    print(json.dumps({"bench": "products", **machine(), "threads": args.threads, "engines": engines}), flush=True)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    for name in args.cases:
        m, k, n = map(int, name.split("x"))
        x, w, g = (torch.randn(*shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))
        measure(name, "forward", x, w.t(), args.rounds)
        measure(name, "of x", g, w, args.rounds)
        measure(name, "of w", g.t(), x, args.rounds)


if __name__ == "__main__":
    main()
