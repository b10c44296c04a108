"""Predicted and measured peak memory of one training run: what test_estimate.py and tests/bench/estimate.py share.

A run is a fresh process per rank. Rank 0 asks for the prediction first; then each rank notes its resident memory, calls
initialize and trains three steps (or a case's number), and reads the kernel's own high-water mark (VmHWM, reset through
/proc/self/clear_refs). Shared pages count once. Pages of libraries count as what the estimate takes them for: they are
the system's page cache, and how many a fault maps depends on how the file came into it (a kernel maps a whole large
folio: the same run had 15 and 44 MiB of them), not on the run.
"""

from __future__ import annotations

import itertools

from ranks import run_ranks

A = dict(width=320, layers=7, vocab=50257, context=256, micro=2)  # 25 M parameters, large vocabulary
B = dict(width=512, layers=8, vocab=1000, context=512, micro=4)  # 26 M, long context
C = dict(width=768, layers=6, vocab=8192, context=256, micro=4)  # 49 M
D = dict(width=256, layers=4, vocab=32000, context=512, micro=4)  # 11 M, logits dominate
H = dict(width=512, layers=6, vocab=16384, context=256, micro=4, hf=True)  # transformers' GPT-2
P = dict(H, micro=2, gas=4)  # the same in pipelines
F = dict(H, layers=3, micro=8, vocab=50257, fuse=True)  # its head and loss by chunks
M = dict(width=384, layers=4, vocab=8192, context=256, micro=4, experts=8, k=1, capacity=1.25)  # 8 experts a block
CASES: dict[str, dict] = {
    "A stage 0, 1 rank, fp32": dict(A, stage=0),
    "A stage 0, 1 rank, bf16": dict(A, stage=0, bf16=True),
    "A stage 0, 1 rank, autocast": dict(A, stage=0, autocast=True),
    "B stage 2, 2 ranks, autocast": dict(B, stage=2, world=2, micro=2, autocast=True),
    "H stage 3, 2 ranks, autocast, accumulation 2": dict(H, stage=3, world=2, gas=2, autocast=True),
    "B stage 0, 1 rank, autocast, checkpointed": dict(
        B, stage=0, micro=8, layers=4, recompute="nonreentrant", autocast=True
    ),
    "H stage 1, 2 stages, 1f1b, autocast": dict(P, stage=1, world=2, stages=2, autocast=True),
    "A stage 3, 2 ranks, fp32": dict(A, stage=3, world=2),
    "A stage 3, 2 ranks, bf16": dict(A, stage=3, world=2, bf16=True),
    "A stage 2, 2 ranks, fp32": dict(A, stage=2, world=2),
    "A stage 2, 2 ranks, bf16": dict(A, stage=2, world=2, bf16=True),
    "A stage 1, 2 ranks, fp32, accumulation 2": dict(A, stage=1, world=2, gas=2),
    "A stage 0, 2 ranks, fp32": dict(A, stage=0, world=2),
    "A stage 3, 1 rank, fp32": dict(A, stage=3),
    "A stage 0, 1 rank, fp32, SGD": dict(A, stage=0, sgd=True),
    "A stage 2, 2 ranks, fp32, SGD": dict(A, stage=2, world=2, sgd=True),
    "A stage 3, 2 ranks, bf16, SGD, accumulation 2": dict(A, stage=3, world=2, bf16=True, sgd=True, gas=2),
    "B stage 0, 1 rank, fp32": dict(B, stage=0),
    "B stage 0, 1 rank, bf16": dict(B, stage=0, bf16=True),
    "B stage 3, 2 ranks, fp32": dict(B, stage=3, world=2, micro=2),
    "B stage 3, 2 ranks, bf16": dict(B, stage=3, world=2, bf16=True),
    "B stage 0, 1 rank, fp32, checkpointed": dict(B, stage=0, micro=8, layers=4, recompute="nonreentrant"),
    "B stage 3, 2 ranks, bf16, checkpointed": dict(B, stage=3, world=2, micro=8, bf16=True, recompute="nonreentrant"),
    "B stage 1, 2 ranks, bf16, accumulation 2": dict(B, stage=1, world=2, bf16=True, gas=2, micro=2),
    "B stage 2, 1 rank, fp32, checkpointed (reentrant), accumulation 2": dict(
        B, stage=2, layers=6, gas=2, recompute="reentrant"
    ),
    "C stage 3, 2 ranks, fp32": dict(C, stage=3, world=2),
    "C stage 0, 1 rank, bf16": dict(C, stage=0, bf16=True),
    "C stage 2, 2 ranks, fp32, checkpointed": dict(C, stage=2, world=2, recompute="nonreentrant"),
    "C stage 3, 2 ranks, fp32, accumulation 2": dict(C, stage=3, world=2, gas=2, micro=2),
    "D stage 0, 1 rank, fp32": dict(D, stage=0),
    "D stage 3, 2 ranks, bf16": dict(D, stage=3, world=2, bf16=True),
    "D stage 2, 2 ranks, fp32, SGD": dict(D, stage=2, world=2, sgd=True, micro=2),
    "H stage 3, 2 ranks, fp32": dict(H, stage=3, world=2),
    "H stage 0, 1 rank, bf16, checkpointed": dict(H, stage=0, bf16=True, recompute="nonreentrant", micro=8),
    "H stage 2, 2 ranks, fp32, accumulation 2, dropout": dict(H, stage=2, world=2, gas=2, dropout=0.1),
    "B stage 0, 1 rank, fp32, budget": dict(B, stage=0, budget="300MB"),
    "B stage 3, 2 ranks, bf16, budget, accumulation 2": dict(B, stage=3, world=2, bf16=True, gas=2, budget="150MB"),
    "H stage 1, 2 ranks, fp32, budget, dropout": dict(H, stage=1, world=2, dropout=0.1, budget="300MB"),
    "H stage 0, 1 rank, fp32, fused loss": dict(F, stage=0),
    "H stage 0, 1 rank, bf16, fused loss": dict(F, stage=0, bf16=True),
    "H stage 1, 2 tensor ranks, fp32": dict(H, stage=1, world=2, tensor=2),
    "H stage 2, 2 tensor ranks, bf16, accumulation 2": dict(H, stage=2, world=2, tensor=2, bf16=True, gas=2),
    "H stage 0, 2 stages, 1f1b, fp32": dict(P, stage=0, world=2, stages=2),
    "H stage 1, 2 stages, gpipe, bf16": dict(P, stage=1, world=2, stages=2, schedule="gpipe", bf16=True),
    "H stage 2, 2 stages, zb-h1, fp32": dict(P, stage=2, world=2, stages=2, schedule="zb-h1"),
    "H stage 0, 2 stages, zb-v, bf16": dict(P, stage=0, world=2, stages=2, schedule="zb-v", bf16=True),
    "H stage 1, 2 stages x 2 ranks, 1f1b, bf16": dict(P, stage=1, world=4, stages=2, bf16=True),
    "H stage 2, 2 stages x 2 ranks, gpipe, fp32": dict(P, stage=2, world=4, stages=2, schedule="gpipe"),
    "H stage 3, 2 stages x 2 ranks, 1f1b, fp32": dict(P, stage=3, world=4, stages=2),
    "H stage 2, 4 stages, gpipe, fp32": dict(P, stage=2, world=4, stages=4, schedule="gpipe"),
    "H stage 1, 2 stages x 2 tensor ranks, 1f1b, bf16": dict(P, stage=1, world=4, stages=2, tensor=2, bf16=True),
    "H stage 0, 2 stages x 2 tensor ranks, zb-h1, fp32": dict(
        P, stage=0, world=4, stages=2, tensor=2, schedule="zb-h1"
    ),
    "H stage 3, 2 stages x 2 ranks x 2 tensor ranks, gpipe, fp32": dict(
        P, stage=3, world=8, stages=2, tensor=2, schedule="gpipe"
    ),
    "H stage 1, 2 stages, 1f1b, fp32, budget": dict(P, stage=1, world=2, stages=2, budget="120MB"),
    "H stage 2, 2 stages x 2 ranks, gpipe, bf16, budget": dict(
        P, stage=2, world=4, stages=2, schedule="gpipe", bf16=True, budget="200MB"
    ),
    "B stage 0, 2 stages, 1f1b, fp32, budget": dict(B, stage=0, world=2, stages=2, micro=2, gas=4, budget="150MB"),
    "M stage 0, 1 rank, fp32, experts": dict(M, stage=0, micro=8),
    "M stage 2, 2 ranks, bf16, experts, top-2": dict(M, stage=2, world=2, bf16=True, k=2),
    "M stage 3, 2 ranks, fp32, experts, none dropped": dict(M, stage=3, world=2, k=2, keeps=True, micro=8),
    "M stage 2, 2 ranks, fp32, experts, top-2": dict(M, stage=2, world=2, k=2, micro=8),
    "M stage 1, 2 ranks, fp32, experts over 2": dict(M, stage=1, world=2, ep=2, micro=8),
    "M stage 2, 4 ranks, bf16, experts over 2, top-2": dict(M, stage=2, world=4, ep=2, bf16=True, k=2),
    "M stage 0, 2 stages x 2 ranks, 1f1b, fp32, experts": dict(M, stage=0, world=4, stages=2, micro=2, gas=4),
    "M stage 0, 2 stages x 2 ranks, 1f1b, fp32, experts over 2": dict(
        M, stage=0, world=4, stages=2, ep=2, micro=2, gas=4
    ),
    "B stage 0, 2 stages, 1f1b, fp32": dict(B, stage=0, world=2, stages=2, micro=2, gas=4),
    "B stage 1, 2 stages, 1f1b, bf16": dict(B, stage=1, world=2, stages=2, micro=2, gas=4, bf16=True),
    "B stage 2, 2 stages x 2 ranks, zb-h1, fp32": dict(B, stage=2, world=4, stages=2, micro=2, gas=4, schedule="zb-h1"),
    "B stage 1, 4 stages, gpipe, fp32": dict(B, stage=1, world=4, stages=4, micro=2, gas=4, schedule="gpipe"),
}


def refusal(room: int, **given) -> str:
    """What initialize says of a run where `room` bytes are available; "" if it takes it."""
    import deepc
    from deepc import memory
    from deepc.errors import OutOfMemoryError

    memory.available, real = lambda: room, memory.available
    try:
        deepc.initialize(**given)
    except OutOfMemoryError as exc:
        return str(exc)
    finally:
        memory.available = real
    return ""


def make_model(case: dict):
    import torch

    torch.manual_seed(0)
    if case.get("experts"):
        return mixture(case)
    if not case.get("hf"):
        from tiny import TinyGPT

        return TinyGPT(
            width=case["width"],
            layers=case["layers"],
            vocab=case["vocab"],
            context=case["context"],
            recompute=case.get("recompute"),
        )
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = case.get("dropout", 0.0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=case["vocab"],
            n_positions=case["context"],
            n_embd=case["width"],
            n_layer=case["layers"],
            use_cache=False,
            n_head=case["width"] // 64,
            loss_type="ForCausalLM",
            resid_pdrop=drop,
            embd_pdrop=drop,
            attn_pdrop=drop,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).train()
    if case.get("recompute"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def mixture(case: dict):
    """TinyGPT with a mixture of experts in the place of every block's network; losses of balance are handed on, as
    pipelines want it."""
    import torch
    import torch.nn.functional as F
    from deepc.parallel.expert import MoE
    from tiny import Block, TinyGPT
    from torch import nn

    class Mixed(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            del self.up, self.down
            network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            options = dict(ep_size=case.get("ep", 1), k=case["k"], capacity_factor=case["capacity"])
            self.moe = MoE(width, network, case["experts"], drop_tokens=not case.get("keeps", False), **options)

        def forward(self, x, balance):
            b, t, c = x.shape
            q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
            x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
            out, l_aux, _ = self.moe(self.ln2(x))
            return x + out, balance + l_aux

    class Mixture(TinyGPT):
        def __init__(self, width: int, layers: int, **options) -> None:
            super().__init__(width, layers, **options)
            self.blocks = nn.ModuleList(Mixed(width) for _ in range(layers))

        @property
        def dummy_inputs(self):  # by which pipelines cut it, as transformers' models
            return make_batch({**case, "micro": 1})

        def forward(self, x, y):
            h, balance = self.tok(x) + self.pos(torch.arange(x.shape[1])), torch.zeros(())
            for block in self.blocks:
                h, balance = block(h, balance)
            return F.cross_entropy(self.head(self.ln(h)).float().flatten(0, 1), y.flatten()) + 0.01 * balance

    return Mixture(case["width"], case["layers"], vocab=case["vocab"], context=case["context"])


def make_config(case: dict) -> dict:
    out = {
        "train_micro_batch_size_per_gpu": case["micro"],
        "gradient_accumulation_steps": case.get("gas", 1),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case["stage"]},
    }
    if not case.get("sgd"):
        out["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
    if case.get("budget"):
        out["activation_checkpointing"] = {"budget": case["budget"]}
    if case.get("tensor"):
        out["tensor_parallel"] = {"autotp_size": case["tensor"]}
    if case.get("stages"):
        out["pipeline"] = {"stages": case["stages"]}
        out["deepc"] = {"pipeline": {"schedule": case.get("schedule", "1f1b")}}
    if case.get("fuse"):
        out.setdefault("deepc", {})["fuse"] = "auto"
    if case.get("bf16"):
        out["bf16"] = {"enabled": True}
    if case.get("autocast"):
        out["torch_autocast"] = {"enabled": True}
    return out


def make_optimizer(case: dict):
    import torch

    return (lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)) if case.get("sgd") else None


def make_batch(case: dict):
    import torch

    x = torch.randint(case["vocab"], (case["micro"], case["context"] + 1))
    return dict(input_ids=x[:, :-1], labels=x[:, :-1]) if case.get("hf") else (x[:, :-1], x[:, 1:])


def resident() -> dict[str, int]:
    """This process's memory by kind, and its high-water mark, in bytes."""
    names = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")
    with open("/proc/self/status") as f:
        return {k: int(v.split()[0]) * 1024 for k, _, v in (line.partition(":") for line in f) if k in names}


def part_of_shared() -> int:
    """Bytes of shared memory, of each page the part of one of those that have it."""
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss_Shmem:"))


def together_shared() -> int:
    """part_of_shared() while all ranks are here: over them, what they share counts once. Collective."""
    import torch.distributed as dist

    dist.barrier()
    out = part_of_shared()
    dist.barrier()
    return out


def rank(index: int, world: int, case: dict, predict: bool = True) -> dict:
    """One rank's part of a run."""
    import deepc
    from deepc.plan.predict.dryrun import call_model, loss_of

    model, batch = make_model(case), make_batch(case)
    out: dict = {}
    if predict and index == 0:
        out["predicted"] = deepc.estimate(
            model, make_config(case), batch, ranks_per_node=world, optimizer=make_optimizer(case)
        ).to_dict()
    spread = case.get("stages") or case.get("ep")  # ranks with different stages or experts share different memory
    shared_before = together_shared() if spread else 0
    before = resident()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    # a model with dummy inputs is cut by what its parameters say, others by the time of a sample
    sample = batch if case.get("stages") and not hasattr(model, "dummy_inputs") else None
    engine = deepc.initialize(
        model=model, config=make_config(case), optimizer=make_optimizer(case), sample_batch=sample
    )[0]
    out["initialized"] = resident()
    for _ in range(case.get("steps", 3)):
        if case.get("stages"):
            engine.train_batch(itertools.repeat(batch))
            continue
        for _ in range(case.get("gas", 1)):
            loss = loss_of(call_model(engine, batch), batch, None)
            engine.backward(loss)
            del loss
            engine.step()
    out["after"], out["before"], out["plan"] = resident(), before, dict(engine.plan.bytes)
    if spread:
        out["part_of_shared"] = together_shared() - shared_before
    engine.destroy()
    return out


def run(case: dict, executes: bool = True) -> dict:
    """Bytes of the node: "predicted", "measured" and what they are made of. executes: or ranks are forked, whose shared
    pages count as their own before and after."""
    from deepc.plan.predict.estimate.states import LIBRARY_BYTES

    world = case.get("world", 1)
    ranks = run_ranks(rank, world, args=(case,), fresh=True, executes=executes, limit_s=600)
    if "part_of_shared" in ranks[0]:
        shared = sum(r["part_of_shared"] for r in ranks)
    else:
        shared = max(r["after"]["RssShmem"] - r["before"]["RssShmem"] for r in ranks)
    private = [
        (r["after"]["VmHWM"] - r["after"]["RssShmem"] - r["after"]["RssFile"])
        - (r["before"]["VmRSS"] - r["before"]["RssShmem"] - r["before"]["RssFile"])
        + LIBRARY_BYTES
        for r in ranks
    ]
    told = ranks[0]["predicted"]
    return {
        "predicted": told["node_peak"],
        "measured": sum(private) + shared,
        "predicted_rank": told["rank_peak"],
        "measured_rank": max(private),
        "predicted_shared": told["shared"],
        "measured_shared": shared,
        "live_peak": told["live_peak"],
        "heap_peak": told["heap_peak"],
        "files": max(r["after"]["RssFile"] - r["before"]["RssFile"] for r in ranks),
        "estimate": told,
        "ranks": ranks,
    }


def compiled(rank: int, world: int) -> tuple[float, float]:
    """Of a model in zero.Init's shared memory whose forward is the first to import torch's compiler: MiB of a rank's
    peak, as initialize predicts and the engine measures it."""
    import sys

    import deepc
    from deepc.plan.predict.estimate.states import LIBRARY_BYTES
    from tiny import TinyGPT, config, make_batch

    with deepc.zero.Init(config_dict_or_path=config(3, micro=4)):
        model = TinyGPT(width=512, layers=2, vocab=8192, recompute="nonreentrant")
    batch, before = make_batch(0, 4), resident()
    engine = deepc.initialize(model=model, config=config(3, micro=4), sample_batch=batch)[0]
    assert "torch._dynamo" not in sys.modules  # as a script's process: nothing has imported it
    engine.backward(engine(*batch))
    engine.step()
    assert "torch._dynamo" in sys.modules
    files = resident()["RssFile"] - before["RssFile"]
    measured, predicted = engine.first_step.measured - files + LIBRARY_BYTES, engine.memory_plan.rank_peak
    engine.destroy()
    return predicted / 2**20, measured / 2**20
