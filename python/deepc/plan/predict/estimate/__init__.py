"""How much memory a training will take, before it starts: model states by arithmetic (the plan), activations, transient
gradients and what the heap keeps of them by a dry run (dryrun.py), per tier, per rank and per node.

    print(deepc.estimate(model, "ds_config.json", batch))          # or a function that makes the model: then nothing of
    it is allocated
    deepc estimate --config ds_config.json --model train:make_model --batch 8x1024:int64

Also DeepSpeed's helpers that need parameter counts only, under their names. Assumes ranks that do the same at about the
same time. Each file imports those before it: counts, figures, states, case, options, ask, check, command."""

from __future__ import annotations

from .ask import estimate, plan_text
from .check import FirstStep, check_plan, refuse_if_too_big
from .counts import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    model_states_bytes,
)
from .figures import MemoryEstimate, Option, Row
from .states import state_rows

__all__ = [
    "FirstStep",
    "MemoryEstimate",
    "Option",
    "Row",
    "check_plan",
    "estimate",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_states_bytes",
    "plan_text",
    "refuse_if_too_big",
    "state_rows",
]
