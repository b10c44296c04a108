"""A training whose optimizer states have a format, with states and parameters in memory and on disk: equal bits."""

from __future__ import annotations

import tiny
import torch
from ranks import for_this_job


def values(engine) -> dict[str, torch.Tensor]:
    """Masters and states by name."""
    import deepc

    named = dict(engine.module.named_parameters())
    out = {n: engine.full_fp32_param(p).clone() for n, p in named.items()}
    for n, p in named.items():
        out |= {f"{n} {name}": state.clone() for name, state in deepc.view(p).state.items()}
    return out


def train_on_tiers(rank: int, world: int, make_config, form: str, folder: str) -> bool:
    """make_config(zero): the configuration with this section. Four steps on each tier, the last two from a checkpoint
    of the run in memory."""
    import deepc
    from deepc.zero.step.across import stored
    from deepc.zero.streamed import state

    for_this_job(stored, "PART", 512)  # a matrix is in several parts, whose edges are not those of its blocks
    for_this_job(state, "CELL_ELEMS", 4096)
    nvme = {"device": "nvme", "nvme_path": folder}
    tiers = {
        "memory": {"stage": 2},
        "disk": {"stage": 2, "offload_optimizer": nvme, "sub_group_size": 5000},
        "all": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme, "sub_group_size": 5000},
        "parameters": {"stage": 3, "offload_param": nvme},
    }
    found = {}
    for tier, zero in tiers.items():
        engine, *_ = deepc.initialize(model=tiny.make_model(), config=make_config(zero))
        for step in range(4):
            if step == 2:
                found[tier, 2] = values(engine)
                if tier == "memory":
                    engine.save_checkpoint(f"{folder}/saved")
                else:
                    engine.load_checkpoint(f"{folder}/saved")
            x, y = (t.chunk(world)[rank] for t in tiny.make_batch(step, 8))
            engine.backward(engine(x, y))
            engine.step()
        found[tier, 4] = values(engine)
        if tier == "disk":
            fp32 = 4 * engine.plan.owned_elems * engine.plan.disk.arrays
            assert engine.plan.bytes["disk"] < 0.8 * fp32, "the disk has codes: blocks of 4 KiB of each cell's"
            assert f"{form} optimizer states" in engine.plan.describe()
        engine.destroy()
    for (tier, step), those in found.items():
        for n, v in those.items():
            assert torch.equal(v, found["memory", step][n]), (form, tier, step, n)
    return any(v.any() for n, v in found["memory", 4].items() if " " in n)
