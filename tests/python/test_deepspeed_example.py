"""The example of DeepSpeed's introductions, unchanged but for the import."""

from __future__ import annotations

import torch
from ranks import run_ranks


def _introduction(rank, world):
    import deepc as deepspeed

    ds_config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))

    model_engine, optimizer, data_loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config, training_data=data
    )
    losses = []
    for _ in range(4):
        for step, (inputs, labels) in enumerate(data_loader):
            # forward() method
            loss = torch.nn.functional.cross_entropy(
                model_engine(inputs.to(model_engine.device).half()).float(), labels.to(model_engine.device)
            )
            # runs backpropagation
            model_engine.backward(loss)
            # weight update
            model_engine.step()
            losses.append(loss.item())
    assert model_engine.train_micro_batch_size_per_gpu() == 2 and model_engine.gradient_accumulation_steps() == 2
    assert model_engine.global_steps == len(losses) // 2
    return (
        losses,
        model_engine.get_lr(),
        [(k.key, k.reason) for k in model_engine._config.inert],
        type(optimizer.base).__name__,
    )


def test_the_introductions_example_runs_unchanged():
    for losses, lr, inert, kind in run_ranks(_introduction, 2, env={"DEEPC_LOG_LEVEL": "WARNING"}):
        assert lr == [1e-3] and kind == "AdamW"
        assert sum(losses[-8:]) < sum(losses[:8])
        assert any(key.startswith("zero_optimization.offload_optimizer") for key, _ in inert)
