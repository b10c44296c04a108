"""A training loop of one's own: Accelerate for data, ranks, gathering and trackers, deepc's engine for model, gradients
and optimizer.

    deepc run --num_gpus 2 examples/huggingface/accelerate_native.py --stage 3 --output_dir out
    torchrun --nproc_per_node 2 examples/huggingface/accelerate_native.py --output_dir out          # or plain python,
    for one rank

Nothing here is named deepspeed. What `accelerator.prepare`, `backward`, `accumulate` and `clip_grad_norm_` do to a
model is the engine's part; prepare gets the loaders alone. --resume continues from the last checkpoint at the sample
where that was written."""

import argparse
import sys

import deepc
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from deepc.engine import Engine
from transformers import AutoModelForCausalLM, GPT2Config

sys.path.insert(0, __file__.rpartition("/")[0] or ".")
from trainer import Sequences


def make_engine(args: argparse.Namespace, steps: int) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": args.bf16},
    }
    shape = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=62,
        eos_token_id=63,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # no dropout: a resumed run gives the same numbers without the state of the random generators
    model = AutoModelForCausalLM.from_config(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    return deepc.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[
        0
    ]  # engine.step() steps the schedule


@torch.no_grad()
def evaluate(accelerator: Accelerator, engine: Engine, loader: torch.utils.data.DataLoader) -> float:
    """Mean loss over the samples of `loader`; what evens the last batch out among the ranks counts once."""
    engine.eval()
    losses = [accelerator.gather_for_metrics(engine(**batch).loss.repeat(len(batch["labels"]))) for batch in loader]
    engine.train()
    return torch.cat(losses).float().mean().item()


def main(arguments: list[str] | None = None) -> list[tuple[float, float, float]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="continue from output_dir/state")
    args = parser.parse_args(arguments)
    deepc.init_distributed()  # before Accelerator, which takes the ranks as it finds them
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(7)
    engine = make_engine(args, args.steps)
    loader, held_out = accelerator.prepare(
        torch.utils.data.DataLoader(Sequences(256), batch_size=4),
        torch.utils.data.DataLoader(Sequences(22, seed=1), batch_size=4),
    )
    state = engine.load_checkpoint(args.output_dir + "/state")[1] if args.resume else {}
    told, total = [], 0.0
    for batch in accelerator.skip_first_batches(loader, state.get("batches", 0)):
        loss = engine(**batch).loss
        engine.backward(loss)
        result = engine.step()  # updates at every second micro-batch
        total += accelerator.gather(loss.detach().reshape(1)).float().mean().item() / 2
        if result.reason == "accumulating":
            continue
        told.append((total, result.grad_norm, engine.get_lr()[0]))
        accelerator.print(f"step {engine.global_steps} loss {total:.6f} norm {told[-1][1]:.5f} lr {told[-1][2]:.6g}")
        total = 0.0
        if engine.global_steps == args.steps // 2 and not args.resume:
            engine.save_checkpoint(args.output_dir + "/state", client_state={"batches": engine.micro_steps})
        if engine.global_steps == args.steps:
            break
    accelerator.print(f"held out: loss {evaluate(accelerator, engine, held_out):.6f}")
    weights = engine.module_state_dict()  # whole, at every stage; collective
    if accelerator.is_main_process:
        engine.module.save_pretrained(args.output_dir, state_dict=weights)
    accelerator.wait_for_everyone()
    engine.destroy()
    return told


if __name__ == "__main__":
    main()
