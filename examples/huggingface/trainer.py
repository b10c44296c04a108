"""A language model with Hugging Face's Trainer: train, evaluate, save, resume. The script knows nothing of deepc.

    deepc run --num_gpus 2 --as-deepspeed examples/huggingface/trainer.py --deepspeed examples/huggingface/ds_zero3.json
    --output_dir out
    torchrun --nproc_per_node 2 examples/huggingface/trainer.py --deepspeed ... --output_dir out      # with the line
    below instead of the flag

The model is a GPT-2 made from a configuration and the text is generated, so it runs offline. All arguments are
TrainingArguments' own.
"""

# import deepc.compat.deepspeed          # the one line, where the script is not started with --as-deepspeed

import sys

import torch
from transformers import AutoModelForCausalLM, GPT2Config, HfArgumentParser, Trainer, TrainingArguments, set_seed


class Sequences(torch.utils.data.Dataset):
    """Arithmetic sequences modulo 61: (start + step * i) % 61. A model that learns the rule has a low loss."""

    def __init__(self, count: int, length: int = 32, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 61, (count, 1), generator=g)
        step = torch.randint(1, 8, (count, 1), generator=g)
        self.rows = (start + step * torch.arange(length)) % 61

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def main(arguments: list[str] | None = None) -> Trainer:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=62, eos_token_id=63, pad_token_id=63
    )
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(model=model, args=args, train_dataset=Sequences(512), eval_dataset=Sequences(64, seed=1))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if args.process_index == 0:
        for entry in trainer.state.log_history:
            shown = {
                k: v
                for k, v in entry.items()
                if k in ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")
            }
            print("history:", shown)
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
