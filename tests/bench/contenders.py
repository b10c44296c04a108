"""The contenders of train.py: what makes a training step, and under which allocator it runs.

A contender is a base and, behind a +, an allocator: `ddp`, `ddp+keep`. Page faults are a large part of a step on a CPU,
and deepc takes them away for its own; so each peer is measured as it comes and under what a user can give it:

    +huge      torch's own switch for huge pages (THP_MEM_ALLOC_ENABLE=1)
    +glibc     tunables of the C library: huge pages, no mmap for large blocks, nothing trimmed
    +tcmalloc  tcmalloc in place of malloc (apt-get install libtcmalloc-minimal4)
    +keep      deepc.memory.keep_heap() in a program that uses nothing else of deepc's
    +best      whichever of glibc, tcmalloc and keep a short screening finds the fastest for this peer"""

from __future__ import annotations

import os
from typing import NamedTuple

from common import require_deepc, version

MODELS = {
    "25M": dict(vocab_size=50257, n_positions=1024, n_embd=320, n_layer=7, n_head=5),  # 25.0 M parameters
    "125M": dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),  # 124.4 M
    "tiny": dict(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=2),
}
HYPER = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
CLIP, MICRO_BATCH = 1.0, 2
SMALL_BUCKET = 5_000_000  # elements; DeepSpeed's default of 5e8 stages all gradients at once

SINGLE = ("single", "single-autocast", "single-deepc")  # one process
INDEPENDENT = ("independent", "independent-autocast", "independent-matmul")  # as ranks, which never talk: the limit
BASES = {
    "single": "one process, 1 thread",
    "single-autocast": "one process, 1 thread, autocast",
    "single-deepc": "deepc, one process",
    "independent": "as many processes that never talk",
    "independent-autocast": "as many processes that never talk, autocast",
    "independent-matmul": "as many processes that never talk, fast_matmul()",
    "ddp": "DDP",
    "ddp-bf16-weights": "DDP, bf16 weights",
    "ddp-fused": "DDP, deepc.fuse",
    "ddp-matmul": "DDP, fast_matmul()",
    "ddp-deepc": 'DDP on the backend "deepc"',
    "zero-redundancy": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2-kept": "FSDP2 without resharding",
    **{f"deepspeed-{s}": f"DeepSpeed ZeRO-{s}" for s in (1, 2, 3)},
    "deepspeed-3-small": "DeepSpeed ZeRO-3, buckets of 5e6",
    **{f"deepspeed-{s}-cpu": f"DeepSpeed ZeRO-{s}, buckets of 5e6, optimizer offloaded to the CPU" for s in (2, 3)},
    "deepspeed-3-nvme": "DeepSpeed ZeRO-3, buckets of 5e6, optimizer states on disk",
    **{f"deepc-{s}": f"deepc ZeRO-{s}" for s in (0, 1, 2, 3)},
    "deepc-3-fused": "deepc ZeRO-3, deepc.fuse",
    "deepc-3-returned": "deepc ZeRO-3, freed memory returned",
    "deepc-3-whole": "deepc ZeRO-3, DEEPC_CHUNKED_LOSS=0",
    "deepc-3-fp32": "deepc ZeRO-3 in fp32",
    **{f"deepc-{s}-cpu": f"deepc ZeRO-{s}, optimizer offloaded to the CPU" for s in (2, 3)},
    "deepc-3-nvme": "deepc ZeRO-3, optimizer states on disk",
}
_SWITCHES = {"deepc-3-returned": {"DEEPC_KEEP_HEAP": "0"}, "deepc-3-whole": {"DEEPC_CHUNKED_LOSS": "0"}}
ALSO_BF16 = {"ddp": ("ddp", "ddp-bf16-weights")}  # a peer's forms in bf16 of which +best is the fastest
WITH_MATMUL = ("independent-matmul", "ddp-matmul")  # where deepc.precision.fast_matmul() has the precision's products
ONLY_BF16 = ("single-autocast", "independent-autocast", "ddp-bf16-weights", "deepc-3-fp32")
MINE = ("deepc-2", "deepc-3", "deepc-3-fused", "deepc-2-cpu", "deepc-3-cpu", "deepc-3-nvme")  # compared with each peer
_PLACES = [f"/usr/lib{place}/libtcmalloc_minimal.so.4" for place in (f"/{os.uname().machine}-linux-gnu", "64", "")]
TCMALLOC = next(filter(os.path.exists, _PLACES), _PLACES[0])
ALLOCATORS = {
    "huge": "huge pages",
    "glibc": "glibc's tunables",
    "tcmalloc": "tcmalloc",
    "keep": "keep_heap()",
}
BEST = "best"
SCREENED = ("glibc", "tcmalloc", "keep")  # of which it is the fastest
ENVIRONMENT = {
    "huge": {"THP_MEM_ALLOC_ENABLE": "1"},
    "glibc": {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
    },
    "tcmalloc": {"LD_PRELOAD": TCMALLOC, "TCMALLOC_RELEASE_RATE": "0"},
}


class Contender(NamedTuple):
    base: str
    allocator: str = ""

    @classmethod
    def parse(cls, text: str) -> Contender:
        """ValueError for what is none."""
        base, _, allocator = text.partition("+")
        if base not in BASES or (allocator and (allocator not in (*ALLOCATORS, BEST) or base.startswith("deepc"))):
            raise ValueError(
                f"{text!r}: expected one of {', '.join(BASES)};"
                f" all but deepc-* may have +{', +'.join(ALLOCATORS)}, +{BEST}"
            )
        return cls(base, allocator)

    def forms(self, precision: str) -> list[Contender]:
        """What BASE+best is chosen among."""
        bases = ALSO_BF16.get(self.base, (self.base,)) if precision == "bf16" else (self.base,)
        return [Contender(base, allocator) for base in bases for allocator in SCREENED]

    def __str__(self) -> str:
        return self.base + ("+" + self.allocator if self.allocator else "")

    def title(self, precision: str) -> str:
        """As the tables call it; with autocast where that is what the contender does."""
        cast = precision == "bf16" and self.base in ("ddp", "ddp-fused", "ddp-deepc", "zero-redundancy")
        return (
            BASES[self.base]
            + (", autocast" if cast else ", bf16 weights" if precision == "bf16" and self.base == "ddp-matmul" else "")
            + (f", {ALLOCATORS[self.allocator]}" if self.allocator else "")
        )

    @property
    def mine(self) -> bool:
        return self.base.startswith("deepc")

    @property
    def fused(self) -> bool:
        """Its model went through deepc.fuse, or its products are deepc's."""
        return self.base.endswith(("-fused", "-matmul"))

    @property
    def peer(self) -> bool:
        """Does the same work as deepc: trains one model on all ranks."""
        return not self.mine and self.base not in SINGLE + INDEPENDENT

    def ranks(self, world: int) -> int:
        return 1 if self.base in SINGLE else world

    def environment(self) -> dict[str, str]:
        return ENVIRONMENT.get(self.allocator, {}) | _SWITCHES.get(self.base, {})

    def program_environment(self) -> dict[str, str]:
        """What of it a program has to start with where torch is imported first: `import deepc` sets torch's switch for
        huge pages, which torch looks at once."""
        deepc = "deepc" in self.base or self.fused or self.allocator == "keep"
        return ({"THP_MEM_ALLOC_ENABLE": "1"} if deepc else {}) | self.environment()

    def missing(self) -> str:
        """ "" or why it can't run here."""
        if version("transformers") is None:
            return "transformers is not installed (run.py --install-peers)"
        if self.base.startswith("deepspeed") and version("deepspeed") is None:
            return "deepspeed is not installed (run.py --install-peers)"
        if self.allocator == "tcmalloc" and not os.path.exists(TCMALLOC):
            return f"there is no {TCMALLOC} (apt-get install libtcmalloc-minimal4)"
        return ""


def left_out(c: Contender, precision: str) -> bool:
    """What is the same as another contender in this precision."""
    if c.base in WITH_MATMUL:
        from deepc.core.cpu import fast_products

        return not fast_products(precision)[0]
    return precision != "bf16" and c.base in ONLY_BF16


# ---- steps -----------------------------------------------------------------------------------------------------------
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


def make_ddp(model, precision: str, kind: str):
    deepc = require_deepc() if kind in ("fused", "deepc", "matmul") else None
    import torch
    import torch.distributed as dist

    if deepc and kind == "fused":
        deepc.fuse(model)
    if deepc and kind == "matmul":
        deepc.precision.fast_matmul()
    dist.init_process_group("deepc" if kind == "deepc" else "gloo")

    def wrap(m):
        return torch.nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)

    if kind == "bf16-weights" or (kind == "matmul" and precision == "bf16"):
        return with_masters(model, wrap)
    ddp = wrap(model)
    return plain(ddp, list(ddp.parameters()), precision, cast=True, sharded=kind == "redundancy")


def make_fsdp(model, precision: str, reshard: bool):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return plain(model, list(model.parameters()), precision, cast=False)


def offload(how: str) -> dict:
    """The same keys for both. The folder is DEEPC_BENCH_NVME, or here."""
    if how != "nvme":
        return {"offload_optimizer": {"device": "cpu"}} if how == "cpu" else {}
    folder = os.environ.get("DEEPC_BENCH_NVME") or os.getcwd()
    return {"offload_optimizer": {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}}


def make_deepspeed(model, precision: str, stage: int, how: str):
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = engine_config(precision, stage)
    if how:
        config["zero_optimization"] |= {"reduce_bucket_size": SMALL_BUCKET, "stage3_prefetch_bucket_size": SMALL_BUCKET}
    config["zero_optimization"] |= offload(how)
    if how == "nvme":
        config["aio"] = {"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True}
    return engine_step(deepspeed.initialize(model=model, config=config)[0])


def make_deepc(model, precision: str, stage: int, how: str = ""):
    deepc = require_deepc()
    config = engine_config(precision, stage)
    if how == "fused":
        deepc.fuse(model)
    config["zero_optimization"] |= offload(how)
    return engine_step(deepc.initialize(model=model, config=config)[0])


def make_step(contender: Contender, precision: str, size: str):
    """A function that does one step on a batch and returns the loss, in this process."""
    if contender.allocator == "keep" and not require_deepc().memory.keep_heap():
        raise RuntimeError("deepc.memory.keep_heap() has no effect here")
    model = make_model(size)
    kind, _, how = contender.base.partition("-")
    if kind in ("single", "independent"):
        if how == "deepc":
            return make_deepc(model, precision, 0)
        if how == "matmul":
            require_deepc().precision.fast_matmul()
        if precision == "bf16" and how in ("", "matmul"):
            return with_masters(model)
        return plain(model, list(model.parameters()), precision, cast=True)
    if kind in ("ddp", "zero"):
        return make_ddp(model, precision, how)
    if kind == "fsdp2":
        return make_fsdp(model, precision, reshard=how != "kept")
    stage, _, form = how.partition("-")
    if kind == "deepspeed":
        return make_deepspeed(model, precision, int(stage), form)
    return make_deepc(model, "fp32" if form == "fp32" else precision, int(stage), form)
