"""The whole update of a 16-bit step on GPT-2's 148 tensors: unscale, global norm, clip, AdamW on fp32 masters, bf16
write-back.

    python tests/bench/update.py --threads 2 --rounds 9

Everyone starts from summed fp32 gradients (scaled by 1024, to be averaged over 2 ranks and clipped to norm 1) and ends
with new masters, moments and bf16 parameters. deepc: the norm is a pass of its own here ("norm pass") or came out of
the gradient reduction, as it does in the engine ("norm from the reduction"; the reduction is not timed, for nobody).
Gradients are refilled before each round, since torch unscales in place. "engine.step()" is all of deepc's engine in
bf16 (one process, stage 0) behind a backward that gives these gradients, with nothing left out: the norm's exchange,
the groups, the schedule, the events.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

from adamw import CASES, HYPER, Flat, deepspeed_adam
from common import Limit, fastest, numel, report, require_deepc, skip

UNIT, CLIP = 1.0 / (2 * 1024.0), 1.0


class Deepc:
    """What deepc's engine does after the last backward, in the engine's memory."""

    def __init__(self, shapes, norm_pass: bool) -> None:
        import torch
        from deepc.core.lib import C, check

        self.flat, self.norm_pass = Flat(shapes, low=True), norm_pass
        self.partial = torch.zeros(self.flat.total // 4096, dtype=torch.float64)
        self._step, self._c, self._check = self.flat.core_step(), C, check
        self.grads = self.flat.views(self.flat.g)

    def prepare(self) -> None:
        if not self.norm_pass:
            self._norm()

    def _norm(self) -> None:
        self._check(self._c.dc_sqnorm(self.flat.g.data_ptr(), 0, self.flat.total, self.partial.data_ptr()))

    def run(self) -> float:
        if self.norm_pass:
            self._norm()
        norm = math.sqrt(self._c.dc_sum_partials(self.partial.data_ptr(), self.partial.numel())) * UNIT
        self._step(UNIT * min(1.0, CLIP / (norm + 1e-6)))
        return norm


class Engine:
    """deepc's engine as users have it: step() behind an untimed backward that gives the gradients, averaged already."""

    def __init__(self, shapes) -> None:
        import torch

        class Give(torch.autograd.Function):
            @staticmethod
            def forward(ctx, grads, *params):
                ctx.grads = grads
                return torch.zeros(())

            @staticmethod
            def backward(ctx, _):
                return None, *ctx.grads

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.all = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(s) * 0.02) for s in shapes])

            def forward(self, grads):
                return Give.apply(grads, *self.all)

        hyper = {**HYPER, "betas": list(HYPER["betas"])}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": hyper},
            "bf16": {"enabled": True},
        }
        self.engine = require_deepc().initialize(model=Model(), config=config)[0]
        self.grads = [torch.empty(s) for s in shapes]

    def prepare(self) -> None:
        self.engine.backward(self.engine([(g * UNIT).bfloat16() for g in self.grads]))

    def run(self) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm())


class Torch:
    """fp32 masters as user tensors, clip_grad_norm_ and an optimizer's step, as a training loop writes it."""

    def __init__(self, shapes, kind: str) -> None:
        import torch

        self.params = [torch.nn.Parameter(torch.randn(s) * 0.02) for s in shapes]
        for p in self.params:
            p.grad = torch.empty_like(p)
        self.grads = [p.grad for p in self.params]
        self.low = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes]
        self.kind = kind
        self.optimizer = (
            deepspeed_adam(self.params)
            if kind.startswith("DeepSpeed")
            else torch.optim.AdamW(self.params, fused=True, **HYPER)
        )

    def prepare(self) -> None:
        pass

    def run(self) -> float:
        import torch

        with torch.no_grad():
            if (
                self.kind == "torch, scale inside the step"
            ):  # the fewest passes that torch can do: the fused step divides by grad_scale
                norm = torch.nn.utils.get_total_norm(self.grads, foreach=True) * UNIT
                self.optimizer.grad_scale = 1.0 / (UNIT * torch.clamp(CLIP / (norm + 1e-6), max=1.0))
                self.optimizer.found_inf = torch.zeros(())
                self.optimizer.step()
            else:
                torch._foreach_mul_(self.grads, UNIT)
                norm = torch.nn.utils.clip_grad_norm_(self.params, CLIP, foreach=True)
                self.optimizer.step()
            torch._foreach_copy_(self.low, self.params)
            return float(norm)


class DeepSpeedFlat:
    """As DeepSpeed's ZeRO engine does on its own flat partition: norm, one multiplication for unscale and clip, CPU
    Adam, copy."""

    def __init__(self, shapes) -> None:
        import torch

        n = sum(numel(s) for s in shapes)
        self.flat = torch.nn.Parameter(torch.randn(n) * 0.02)
        self.flat.grad = torch.empty(n)
        self.low = torch.zeros(n, dtype=torch.bfloat16)
        at, self.grads = 0, []
        for s in shapes:
            self.grads.append(self.flat.grad[at : at + numel(s)].view(s))
            at += numel(s)
        self.optimizer = deepspeed_adam([self.flat])

    def prepare(self) -> None:
        pass

    def run(self) -> float:
        import torch

        with torch.no_grad():
            norm = float(self.flat.grad.norm()) * UNIT
            self.flat.grad.mul_(UNIT * min(1.0, CLIP / (norm + 1e-6)))
            self.optimizer.step()
            self.low.copy_(self.flat)
            return norm


def run(case: str, threads: int, count: int) -> None:
    import torch

    require_deepc()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shapes = CASES[case]
    source = [torch.randn(s) * 2.0 for s in shapes]
    contenders = {
        "deepc, norm from the reduction": Deepc(shapes, False),
        "deepc, norm pass": Deepc(shapes, True),
        "deepc, engine.step()": Engine(shapes),
        "torch": Torch(shapes, "torch"),
        "torch, scale inside the step": Torch(shapes, "torch, scale inside the step"),
    }
    try:
        contenders["DeepSpeed"] = Torch(shapes, "DeepSpeed")
        contenders["DeepSpeed, flat"] = DeepSpeedFlat(shapes)
    except (ImportError, RuntimeError) as exc:
        skip("update", "DeepSpeedCPUAdam", str(exc).splitlines()[0])
    walks = {}
    from deepc.core.lib import C

    try:
        walks = contenders["deepc, norm pass"].flat.limits(Limit(C))
        walks = {way.replace("3 writes", "3 writes, bf16 write"): walk for way, walk in walks.items()}
    except FileNotFoundError as exc:
        skip("update", "limit", str(exc))
    times: dict[str, list[float]] = {n: [] for n in (*contenders, *walks)}
    norms: dict[str, float] = {}
    for r in range(-1, count):
        for name, c in contenders.items():
            torch._foreach_copy_(c.grads, source)
            c.prepare()
            time.sleep(0.02)
            started = time.perf_counter()
            norms[name] = c.run()
            if r >= 0:
                times[name].append(1e3 * (time.perf_counter() - started))
        for name, walk_once in walks.items():
            started = time.perf_counter()
            walk_once()
            if r >= 0:
                times[name].append(1e3 * (time.perf_counter() - started))
    # The peers sum in fp32, whose error grows with the tensor (1 % on 39 M elements in one flat sum, measured); deepc
    # sums in fp64, the engine of gradients that are rounded to bf16.
    truth = math.sqrt(sum(float(g.double().square().sum()) for g in source)) * UNIT
    allowed = {n: 1e-3 if n.endswith("step()") else 1e-6 if n.startswith("deepc") else 5e-2 for n in norms}
    if not all(math.isclose(n, truth, rel_tol=allowed[name]) for name, n in norms.items()):
        raise RuntimeError(f"the contenders disagree about the norm: {norms}")
    peers = [n for n in contenders if not n.startswith("deepc")]
    ours = {n: [peers] for n in contenders if n not in peers}
    report(
        "update",
        f"{case}, bf16 with fp32 masters, {threads} thread{'s' * (threads > 1)}",
        "ms",
        times,
        ours,
        limit=fastest(times, "limit"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="GPT-2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    run(args.case, args.threads, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
