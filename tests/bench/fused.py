"""The fused operators of a transformer block beside torch's own, forward and forward with backward, on one machine in
one run.

    python tests/bench/fused.py [--threads 1 2] [--dtypes float32 bfloat16] [--rounds 15] [--rows 1024] [--no-compile]
    [--only rms_norm ...]

Shapes are those of one micro-batch of `rows` tokens: norms and GELU of GPT-2 small and medium (768, 1024; 4 times that
in the MLP), norms and SwiGLU of a Llama of 2048 by 5632, rotary embedding and causal attention of 12 heads of 64 and 16
heads of 128. Peers:
torch.nn.functional in eager mode (composed where there is no such function, as transformers composes it) and the same
function under torch.compile; ours also under torch.compile. A ratio above 1 means that ours is faster. Forward and
backward runs through autograd, so what Python and autograd cost is in it.
"""

from __future__ import annotations

import argparse
import os

from common import emit, paired, require_deepc, rounds, skip

FUNCTIONS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "swiglu", "gelu", "gelu_tanh")
FUNCTIONS += ("rotary", "attention")


def rotate_half(x):
    import torch

    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def composed_rms_norm(x, weight):
    """As transformers' LlamaRMSNorm."""
    import torch

    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def functions(name: str):
    """(ours, {peer -> function}) over the tensors of `operands`."""
    import torch.nn.functional as F
    from deepc.core import ops

    def added(norm):
        return lambda x, r, *more: (lambda s: (norm(s, *more), s))(x + r)

    def torch_rms(x, w):
        return F.rms_norm(x, (x.shape[-1],), w, 1e-6)

    def torch_layer(x, w, b):
        return F.layer_norm(x, (x.shape[-1],), w, b)

    return {
        "rms_norm": (
            ops.rms_norm,
            {"torch.nn.functional.rms_norm": torch_rms, "transformers' composition": composed_rms_norm},
        ),
        "add_rms_norm": (ops.add_rms_norm, {"add, torch.nn.functional.rms_norm": added(torch_rms)}),
        "layer_norm": (ops.layer_norm, {"torch.nn.functional.layer_norm": torch_layer}),
        "add_layer_norm": (ops.add_layer_norm, {"add, torch.nn.functional.layer_norm": added(torch_layer)}),
        "swiglu": (ops.swiglu, {"torch.nn.functional.silu * up": lambda g, u: F.silu(g) * u}),
        "gelu": (ops.gelu, {"torch.nn.functional.gelu": F.gelu}),
        "gelu_tanh": (
            lambda x: ops.gelu(x, approximate="tanh"),
            {"torch.nn.functional.gelu tanh": lambda x: F.gelu(x, approximate="tanh")},
        ),
        "rotary": (ops.rotary, {"transformers' composition": lambda x, c, s: x * c + rotate_half(x) * s}),
        "attention": (
            lambda q, k, v: ops.attention(q, k, v, is_causal=True),
            {
                "torch.nn.functional.scaled_dot_product_attention": lambda q, k, v: F.scaled_dot_product_attention(
                    q, k, v, is_causal=True
                )
            },
        ),
    }[name]


def operands(name: str, rows: int, cols: int, dtype, heads: int = 0):
    """Tensors of the call; those that need gradients need them."""
    import torch

    def random(*shape):
        return torch.randn(*shape).to(dtype).requires_grad_()

    if name == "rotary":
        x = torch.randn(1, rows, heads, cols).to(dtype).transpose(1, 2).detach().requires_grad_()
        angle = torch.outer(torch.arange(rows).float(), 10000.0 ** (-torch.arange(0, cols, 2).float() / cols))
        angle = torch.cat((angle, angle), -1)[None, None]
        return x, angle.cos().to(dtype), angle.sin().to(dtype)
    if name == "attention":
        return tuple(
            torch.randn(1, rows, heads, cols).to(dtype).transpose(1, 2).detach().requires_grad_() for _ in range(3)
        )
    count = {"swiglu": 2, "gelu": 1, "gelu_tanh": 1}.get(name, 2 if name.startswith("add") else 1)
    return (
        *(random(rows, cols) for _ in range(count)),
        *(random(cols) for _ in range({"rms": 1, "layer": 2}.get(name.removeprefix("add_").split("_")[0], 0))),
    )


def shapes(name: str) -> list[tuple[int, int]]:
    """(columns, heads)"""
    if name in ("rotary", "attention"):
        return [(64, 12), (128, 16)]
    if name == "swiglu":
        return [(2048, 0), (5632, 0)]
    return [(3072, 0), (4096, 0)] if name.startswith("gelu") else [(768, 0), (2048, 0)]


def calls(function, tensors):
    """(forward, forward and backward) as calls without arguments."""
    import torch

    frozen = [t.detach() for t in tensors]
    sample = function(*frozen)
    grads = [torch.randn_like(t) for t in (sample if isinstance(sample, tuple) else (sample,))]
    leaves = [t for t in tensors if t.requires_grad]

    def forward():
        function(*frozen)

    def both():
        out = function(*tensors)
        torch.autograd.grad(out if isinstance(out, tuple) else (out,), leaves, grads)

    return forward, both


def measure(name: str, dtype, threads: int, args) -> None:
    import torch

    ours, peers = functions(name)
    for cols, heads in shapes(name):
        tensors = operands(name, args.rows, cols, dtype, heads)
        contenders = {"deepc": ours, **peers}
        if args.compile:
            contenders |= {
                f"{n} under torch.compile": torch.compile(f, dynamic=False) for n, f in list(contenders.items())
            }
        timed = {n: calls(f, tensors) for n, f in contenders.items()}
        repeat = max(1, 2_000_000 // (args.rows * cols * max(heads, 1)))
        for k, way in enumerate(("forward", "forward and backward")):

            def run(call):
                for _ in range(repeat):
                    call()

            times = rounds({n: lambda c=c[k]: run(c) for n, c in timed.items()}, args.rounds, pause=0.002, warmup=2)
            more = {
                "rows": args.rows,
                "cols": cols,
                "heads": heads,
                "dtype": str(dtype).removeprefix("torch."),
                "threads": threads,
            }
            for n, values in times.items():
                values = times[n] = [1e3 * v / repeat for v in values]
                emit("fused", f"{name} {way}", n, "us", values, **more)
            for peer in times:
                if not peer.startswith("deepc"):
                    mine = "deepc under torch.compile" if peer.endswith("torch.compile") else "deepc"
                    emit(
                        "fused",
                        f"{name} {way}",
                        mine,
                        "us",
                        times[mine],
                        ratio=paired(times[peer], times[mine]),
                        peer=peer,
                        **more,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=FUNCTIONS, choices=FUNCTIONS)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    require_deepc()
    import torch

    for threads in args.threads:
        torch.set_num_threads(threads)
        torch.compiler.reset()  # its kernels have the number of threads in them
        for dtype in args.dtypes:
            for name in args.only:
                try:
                    measure(name, getattr(torch, dtype), threads, args)
                except torch._dynamo.exc.TorchDynamoException as exc:
                    skip("fused", f"{name} {dtype}", f"torch.compile failed: {exc}")


if __name__ == "__main__":
    main()
