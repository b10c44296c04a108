"""AdamW steps in fp32: deepc as a drop-in and inside the engine, torch fused and foreach, DeepSpeedCPUAdam, and the
machine's limit.

    python tests/bench/adamw.py --case 64M --threads 2 --rounds 9      one process per case and number of threads, as
    run.py starts them

"as it comes": parameters and gradients from torch.randn, states as each optimizer allocates them. "huge": parameter,
gradient and moments on deepc's memory (huge pages, staggered start addresses), the very same bytes for everyone. The
engine steps on that memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial

from common import Limit, fastest, gpt2_shapes, numel, report, require_deepc, rounds, skip

HYPER = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
CASES = {
    "64M": [(64 << 20,)],
    "256M": [(256 << 20,)],
    "GPT-2": gpt2_shapes(),
    "smoke": [(300, 1000), (1000,), (77, 1031)],
}


class Flat:
    """Parameters, gradients and moments of all tensors on four staggered huge-page arrays, as deepc's engine keeps
    them."""

    def __init__(self, shapes, low: bool = False) -> None:
        import torch
        from deepc import memory

        self.spans, at = [], 0
        for shape in shapes:
            self.spans.append((at, shape))
            at += (numel(shape) + 63) // 64 * 64
        self.total = (at + 4095) // 4096 * 4096
        self.p, self.g, self.m, self.v = (memory.zeros(self.total, torch.float32, color) for color in (0, 1, 2, 3))
        self.low = memory.zeros(self.total, torch.bfloat16, 6) if low else None
        for flat, scale in ((self.p, 0.02), (self.g, 1e-2)):
            for at, shape in self.spans:  # padding stays zero, as in the engine
                flat[at : at + numel(shape)].normal_(0, scale)

    def views(self, flat) -> list:
        return [flat[at : at + numel(shape)].view(shape) for at, shape in self.spans]

    def parameters(self) -> list:
        import torch

        made = [torch.nn.Parameter(p) for p in self.views(self.p)]
        for p, g in zip(made, self.views(self.g)):
            p.grad = g
        return made

    def core_step(self):
        """The engine's step: one C call over the whole flat share."""
        import torch
        from deepc.core.lib import AdamWArgs, C, check
        from deepc.core.ops import code

        a = AdamWArgs.array(1)
        t = a[0]
        t.param, t.grad, t.exp_avg, t.exp_avg_sq, t.n = (
            self.p.data_ptr(),
            self.g.data_ptr(),
            self.m.data_ptr(),
            self.v.data_ptr(),
            self.total,
        )
        t.lr, (t.beta1, t.beta2), t.eps, t.weight_decay, t.grad_scale, t.flags = (
            HYPER["lr"],
            HYPER["betas"],
            HYPER["eps"],
            HYPER["weight_decay"],
            1.0,
            1,
        )
        t.param_dtype = t.grad_dtype = t.state_dtype = code(torch.float32)
        if self.low is not None:
            t.lowp, t.lowp_dtype = self.low.data_ptr(), code(self.low.dtype)

        def step(grad_scale: float = 1.0) -> None:
            t.step += 1
            t.grad_scale = grad_scale
            check(C.dc_adamw(a, 1))

        step.keep = self
        return step

    def limits(self, walk: Limit) -> dict[str, Callable[[], None]]:
        p, g, m, v = (x.data_ptr() for x in (self.p, self.g, self.m, self.v))
        low = self.low.data_ptr() if self.low is not None else None
        return {way: partial(walk, p, g, m, v, self.total, low, way) for way in Limit.WAYS}


def on_flat(optimizer, params, flat: Flat):
    """Puts the optimizer's states on the flat memory. Names and step counters as torch's and DeepSpeed's AdamW have
    them."""
    for p, m, v in zip(params, flat.views(flat.m), flat.views(flat.v)):
        state = optimizer.state[p]
        if not state:
            raise RuntimeError("the optimizer has made no state in its first step")
        state["exp_avg"], state["exp_avg_sq"] = m, v
    return optimizer


def deepspeed_adam(params):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **HYPER)


def user_tensors(shapes) -> list:
    """Parameters with gradients, in memory as it comes."""
    import torch

    made = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape) * 0.02)
        p.grad = torch.randn(shape) * 1e-2
        made.append(p)
    return made


def run(case: str, threads: int, count: int, foreach: bool) -> None:
    import torch

    deepc = require_deepc()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shapes = CASES[case]
    figure = f"{case} fp32, {threads} thread{'s' * (threads > 1)}"
    user = user_tensors(shapes)
    flat = Flat(shapes)
    on_huge = flat.parameters()
    optimizers = {
        "torch fused, as it comes": torch.optim.AdamW(user, fused=True, **HYPER),
        "deepc drop-in, as it comes": deepc.optim.AdamW(user, **HYPER),
        "torch fused, huge": torch.optim.AdamW(on_huge, fused=True, **HYPER),
        "deepc drop-in, huge": deepc.optim.AdamW(on_huge, **HYPER),
    }
    if foreach:
        optimizers["torch foreach, as it comes"] = torch.optim.AdamW(user, foreach=True, **HYPER)
    try:
        optimizers["DeepSpeed, as it comes"] = deepspeed_adam(user)
        optimizers["DeepSpeed, huge"] = deepspeed_adam(on_huge)
    except (ImportError, RuntimeError) as exc:
        skip("adamw", f"DeepSpeedCPUAdam, {figure}", str(exc).splitlines()[0])
    contenders = {name: o.step for name, o in optimizers.items() if name.endswith("as it comes")}
    for name, o in optimizers.items():
        o.step()  # states are made here
        if name.endswith("huge"):
            on_flat(o, on_huge, flat)
            contenders[name] = o.step
    contenders["deepc kernel, the engine's memory"] = flat.core_step()
    from deepc.core.lib import C

    try:
        contenders |= flat.limits(Limit(C))
    except FileNotFoundError as exc:
        skip("adamw", f"limit, {figure}", str(exc))
    times = rounds(contenders, count)
    best = fastest(times, "limit")
    elements = sum(numel(s) for s in shapes)
    as_comes, on_same = ["torch fused, as it comes", "DeepSpeed, as it comes"], ["torch fused, huge", "DeepSpeed, huge"]
    report(
        "adamw",
        figure,
        "ms",
        times,
        {
            "deepc kernel, the engine's memory": [as_comes, on_same],
            "deepc drop-in, as it comes": [as_comes, ["torch foreach, as it comes"]],
            "deepc drop-in, huge": [on_same],
        },
        limit=best,
        elements=elements,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--foreach", action="store_true", help="torch's foreach form as well (it needs 3 more copies of the model)"
    )
    args = parser.parse_args()
    if int(os.environ.get("OMP_NUM_THREADS", args.threads)) != args.threads:
        sys.exit("bench: OMP_NUM_THREADS differs from --threads")
    run(args.case, args.threads, args.rounds, args.foreach)
    return 0


if __name__ == "__main__":
    sys.exit(main())
