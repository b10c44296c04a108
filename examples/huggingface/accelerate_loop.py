"""A training loop of one's own with Accelerate's DeepSpeed plug-in. The script knows nothing of deepc.

    deepc run --num_gpus 2 --as-deepspeed examples/huggingface/accelerate_loop.py --output_dir out

accumulate, clip_grad_norm_, save_state, load_state, get_state_dict and unwrap_model as in Accelerate's documentation;
prints one line a step.
"""

# import deepc.compat.deepspeed          # the one line, where the script is not started with --as-deepspeed

import argparse
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from transformers import AutoModelForCausalLM, GPT2Config

sys.path.insert(0, __file__.rpartition("/")[0] or ".")
from trainer import Sequences


def main(arguments: list[str] | None = None) -> list[tuple[float, float, float]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--from_config", action="store_true", help="optimizer and schedule come from the DeepSpeed configuration"
    )
    parser.add_argument("--resume", action="store_true", help="load output_dir/state first")
    parser.add_argument("--local_rank", type=int, help="the launcher gives it, as DeepSpeed's does")
    args = parser.parse_args(arguments)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": args.stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    if args.from_config:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    set_seed(7)
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=62, eos_token_id=63)
    )
    if args.from_config:
        optimizer = DummyOptim(model.parameters(), lr=3e-3, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(Sequences(256), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.resume:
        accelerator.load_state(args.output_dir + "/state")
    told, step, total = [], 0, 0.0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += accelerator.gather(loss.detach()).mean().item() / 2
        if accelerator.sync_gradients:
            step += 1
            told.append((total, float(norm or 0.0), optimizer.param_groups[0]["lr"]))
            accelerator.print(f"step {step} loss {total:.6f} norm {told[-1][1]:.5f} lr {told[-1][2]:.6g}")
            total = 0.0
            if step == args.steps // 2 and not args.resume:
                accelerator.save_state(args.output_dir + "/state")
        if step == args.steps:
            break
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state)
    accelerator.wait_for_everyone()
    model.destroy()
    return told


if __name__ == "__main__":
    main()
