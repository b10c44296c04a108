"""Scripts for Hugging Face's Trainer and Accelerate that tests run on ranks, on deepc or on a real DeepSpeed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "examples" / "huggingface" / "trainer.py"
KEYS = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")


def use(library: str) -> None:
    """Makes `import deepspeed` give `library`, before anything of Hugging Face is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        ACCELERATE_LOG_LEVEL="error",
    )
    if library == "deepc":
        importlib.import_module("deepc.compat.deepspeed")
        return
    deepspeed = importlib.import_module("deepspeed")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: (
        None
    )  # it would be compiled here, and only changes how sums travel
    deepspeed.init_distributed("gloo")  # Trainer does not with use_cpu, and zero.Init then counts one rank
    state = importlib.import_module("accelerate.state").PartialState
    choose = state._prepare_backend
    # Accelerate takes CPU ranks for worlds of one each; deepc.compat answers for it, a real DeepSpeed does not.
    state._prepare_backend = lambda self, *args, **kwargs: (lambda found: (found[0] or "gloo", found[1]))(
        choose(self, *args, **kwargs)
    )


def example(name: str = "trainer") -> Any:
    spec = importlib.util.spec_from_file_location(f"hf_{name}_example", EXAMPLE.with_name(name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ds_config(
    stage: int, warmup: str = "linear", *, scheduler: str = "WarmupDecayLR", optimizer: bool = True, **more: Any
) -> dict[str, Any]:
    """A configuration as Trainer's documentation has it: everything that TrainingArguments know is "auto"."""
    out: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            **more.pop("zero", {}),
        },
        **more,
    }
    if optimizer:
        out["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        }
        params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": warmup}
        out["scheduler"] = {
            "type": scheduler,
            "params": {**params, **({"total_num_steps": "auto"} if scheduler == "WarmupDecayLR" else {})},
        }
    return out


def arguments(folder: str, config: str | dict, **more: Any) -> list[str]:
    """Command line of the example: 6 steps of 2 x 4 samples a rank, with evaluation and a checkpoint after 3."""
    import json

    if isinstance(config, dict):
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder, f"ds_config.{os.environ['RANK']}.json")
        path.write_text(json.dumps(config))
        config = str(path)
    options = {
        "deepspeed": config,
        "output_dir": folder,
        "max_steps": 6,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "warmup_steps": 3,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "report_to": "none",
        "disable_tqdm": True,
        **more,
    }
    return [text for key, value in options.items() for text in (f"--{key}", str(value))]


def history(trainer: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if k in KEYS} for entry in trainer.state.log_history]


def train(rank: int, world: int, library: str, folder: str, cases: list[tuple[str, dict, dict]]) -> dict[str, Any]:
    """Runs the example for every case (name, configuration, arguments), then again from its checkpoint of step 3. By
    case: both histories, and the sum of the saved model's weights."""
    use(library)
    script, out = example(), {}
    for name, config, more in cases:
        where = f"{folder}/{library}-{name}"
        first = script.main(arguments(where, config, **more))
        again = script.main(arguments(where + "-again", config, resume_from_checkpoint=f"{where}/checkpoint-3", **more))
        out[name] = history(first), history(again), sorted(os.listdir(f"{where}/checkpoint-6"))
        for trainer in (first, again):
            trainer.model_wrapped.destroy()
    return out


def weights(folder: str, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder, name))


def shared(
    rank: int, world: int, folder: str, tensor: int, stage: int, sequence: int = 1, adapters: bool = False
) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Trainer on a Llama that `tensor` ranks share, or on sequences that `sequence` ranks share: its history, that of a
    run from its checkpoint of step 2, and what it saved. adapters: LoRA's are trained."""
    use("deepc")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 61, (64, 16), generator=draw)
    data = [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(16)} for ids in rows]
    section = {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}

    def run(where: str, **more: Any) -> Any:
        torch.manual_seed(3)
        sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=2, **sizes))
        if adapters:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
        options = {
            "output_dir": where,
            "max_steps": 4,
            "logging_steps": 1,
            "per_device_train_batch_size": 8 * tensor * sequence // world,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 4,
        }
        if sequence > 1:
            from accelerate import ParallelismConfig
            from accelerate.utils import DeepSpeedSequenceParallelConfig

            handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
            options["parallelism_config"] = ParallelismConfig(
                sp_backend="deepspeed", sp_size=sequence, dp_replicate_size=world // sequence, sp_handler=handler
            )
        args = TrainingArguments(**options, deepspeed=ds_config(stage, **section))
        trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])
        trainer.train(**more)
        return trainer

    first = run(folder)
    first.save_model(folder + "/end")
    again = run(folder + "-again", resume_from_checkpoint=f"{folder}/checkpoint-2")
    saved = "adapter_model.safetensors" if adapters else "model.safetensors"
    found = history(first), history(again), weights(folder + "/end", saved) if rank == 0 else {}
    for trainer in (first, again):
        trainer.model_wrapped.destroy()
    return found


# ---- what else Trainer does ------------------------------------------------------------------------------------------
def features(rank: int, world: int, folder: str) -> dict[str, Any]:
    """By feature: True, or what went wrong."""
    import traceback

    use("deepc")
    out: dict[str, Any] = {}
    for name, check in (
        ("seq2seq", _seq2seq),
        ("lora", _lora),
        ("recompute", _recompute),
        ("offload", _offload),
        ("own optimizer", _own_optimizer),
        ("evaluate only", _evaluate_only),
    ):
        try:
            out[name] = check(f"{folder}/{name.replace(' ', '-')}")
        except Exception:
            out[name] = traceback.format_exc()
            break  # ranks may have parted here
    return out


def _falls(trainer: Any) -> bool:
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    return len(losses) == trainer.args.max_steps and losses[-1] < losses[0]


def _seq2seq(folder: str) -> bool:
    """T5 from_pretrained under zero.Init (stage 3), generate in evaluation, whole weights saved and loadable."""
    import torch.distributed as dist
    from transformers import (
        AutoModelForSeq2SeqLM,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    if dist.get_rank() == 0:
        torch.manual_seed(5)
        T5ForConditionalGeneration(config).save_pretrained(folder + "/start")
    dist.barrier()
    start = weights(folder + "/start")
    options = dict(
        output_dir=folder,
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    args = Seq2SeqTrainingArguments(
        **options, deepspeed=ds_config(3), predict_with_generate=True, eval_strategy="steps", eval_steps=4
    )
    model = AutoModelForSeq2SeqLM.from_pretrained(folder + "/start")
    if not all(hasattr(p, "ds_id") for p in model.parameters()):
        return "not built under zero.Init"
    for name, p in model.named_parameters():
        if name in start and not torch.equal(p, start[name]):
            return f"{name} differs after from_pretrained"
    data = [{"input_ids": torch.arange(2, 10) + i % 40, "labels": torch.arange(3, 7) + i % 40} for i in range(64)]
    seen: list[tuple] = []
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data[:16],
        compute_metrics=lambda p: seen.append(p.predictions.shape) or {"rows": len(p.predictions)},
    )
    trainer.train()
    trainer.save_model(folder + "/end")
    dist.barrier()  # rank 0 writes
    rows = [e["eval_rows"] for e in trainer.state.log_history if "eval_rows" in e]
    end = weights(folder + "/end")
    same = end.keys() == start.keys() and any(not torch.equal(end[n], start[n]) for n in end)
    fell = _falls(trainer)
    trainer.model_wrapped.destroy()
    return (rows == [16] and seen[0][1] > 1 and same and fell) or f"{rows} {seen} {same} {fell}"


def _gpt2(folder: str, config: dict, model: Any = None, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments

    script = example()
    options = {
        "output_dir": folder,
        "max_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        **more,
    }
    args = TrainingArguments(deepspeed=config, **options)
    torch.manual_seed(3)
    if model is None:
        model = AutoModelForCausalLM.from_config(
            GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=62, eos_token_id=63)
        )
    trainer = Trainer(
        model=model() if callable(model) and not isinstance(model, torch.nn.Module) else model,
        args=args,
        train_dataset=script.Sequences(64),
        eval_dataset=script.Sequences(16, seed=1),
    )
    return trainer


def _lora(folder: str) -> Any:
    """LoRA over a stage-3 base: only adapters train and are saved."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=62, eos_token_id=63)

    def make() -> Any:
        return get_peft_model(
            AutoModelForCausalLM.from_config(config),
            LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
        )

    trainer = _gpt2(folder, ds_config(3), make, save_strategy="steps", save_steps=2, max_steps=4)
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    moved = [n for n, p in trainer.model.named_parameters() if n in frozen and not torch.equal(p, frozen[n])]
    trainer.save_model(folder + "/end")
    torch.distributed.barrier()  # rank 0 writes
    files = sorted(os.listdir(folder + "/end"))
    from safetensors.torch import load_file

    saved = load_file(folder + "/end/adapter_model.safetensors")
    trainer.model_wrapped.destroy()
    ok = (
        not moved
        and "adapter_model.safetensors" in files
        and len(saved) == 4
        and all(v.abs().sum() > 0 for v in saved.values())
    )
    return ok or f"{moved} {files} {list(saved)}"


def fused(rank: int, world: int, folder: str) -> dict[str, tuple[list[float], list[str]]]:
    """deepc.fuse in the configuration, which Accelerate reads too: by model and value the losses, and the classes of
    fused modules while it trains."""
    use("deepc")
    from deepc.nn.fuse import _Fused
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=64, max_position_embeddings=32, **shape)
    lora = LoraConfig(r=4, target_modules=["q_proj", "gate_proj"], task_type="CAUSAL_LM")
    makers = {
        "whole": lambda: AutoModelForCausalLM.from_config(config),
        "lora": lambda: get_peft_model(AutoModelForCausalLM.from_config(config), lora),
    }
    out = {}
    for name, make in makers.items():
        for value in (False, "auto"):
            trainer = _gpt2(f"{folder}/{name}{value}", ds_config(3, deepc={"fuse": value}), make)
            trainer.train()
            kinds = sorted({type(m).__name__ for m in trainer.model.modules() if isinstance(m, _Fused)})
            trainer.evaluate()
            out[f"{name} {value}"] = ([e["loss"] for e in trainer.state.log_history if "loss" in e], kinds)
            trainer.model_wrapped.destroy()
    return out


def grpo(rank: int, world: int, folder: str) -> list[list[tuple]]:
    """TRL's GRPO with a reference model at stage 3, parameters that stay and parameters that come and go: loss, norm
    and distance to the reference of each step."""
    use("deepc")
    import torch.distributed as dist
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    if rank == 0:
        words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))])}
        words_of = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        words_of.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(
            tokenizer_object=words_of, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ).save_pretrained(folder)
        shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(vocab_size=64, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **shape)
        ).save_pretrained(folder)
    dist.barrier()
    out = []
    for streamed in "01":
        os.environ["DEEPC_STREAMED"] = streamed
        args = GRPOConfig(
            output_dir=f"{folder}/{streamed}",
            deepspeed=ds_config(3, optimizer=False, zero={"stage3_param_persistence_threshold": 0}),
            max_steps=3,
            logging_steps=1,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=8,
            learning_rate=1e-3,
            beta=0.04,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            bf16=False,
        )
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(32)]}),
        )
        trainer.train()
        assert (trainer.model_wrapped.plan.mode == "streamed") == (streamed == "1")
        out.append([(e["loss"], e["grad_norm"], e["kl"]) for e in trainer.state.log_history if "loss" in e])
        trainer.ref_model.destroy()
        trainer.model_wrapped.destroy()
    del os.environ["DEEPC_STREAMED"]
    return out


def _recompute(folder: str) -> Any:
    """gradient_checkpointing=True gives the losses of a run without."""
    losses = []
    for on in (False, True):
        trainer = _gpt2(folder, ds_config(3), gradient_checkpointing=on)
        trainer.train()
        losses.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
        trainer.model_wrapped.destroy()
    return losses[0] == losses[1] or str(losses)


def _offload(folder: str) -> Any:
    trainer = _gpt2(folder, ds_config(2, zero={"offload_optimizer": {"device": "cpu"}}), max_steps=6)
    trainer.train()
    fell = _falls(trainer)
    trainer.model_wrapped.destroy()
    return fell


def _own_optimizer(folder: str) -> Any:
    """Neither optimizer nor scheduler in the configuration: Trainer makes AdamW and a cosine schedule; under offload
    Accelerate makes DeepSpeedCPUAdam of it, with the groups' own betas. Saved and resumed."""
    betas = []
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
        more = dict(
            adam_beta2=0.95,
            lr_scheduler_type="cosine",
            warmup_steps=1,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
        )
        trainer = _gpt2(f"{folder}{len(zero)}", ds_config(1, optimizer=False, zero=zero), **more)
        trainer.train()
        betas.append([g["betas"] for g in trainer.optimizer.param_groups])
        told = [{k: e[k] for k in ("loss", "learning_rate")} for e in trainer.state.log_history if "loss" in e]
        trainer.model_wrapped.destroy()
        again = _gpt2(f"{folder}{len(zero)}", ds_config(1, optimizer=False, zero=zero), **more)
        again.train(resume_from_checkpoint=f"{folder}{len(zero)}/checkpoint-2")
        tail = [{k: e[k] for k in ("loss", "learning_rate")} for e in again.state.log_history if "loss" in e]
        again.model_wrapped.destroy()
        if told != tail:
            return f"{told} != {tail}"
    return all(b == [(0.9, 0.95)] * 2 for b in betas) or str(betas)


def _evaluate_only(folder: str) -> Any:
    """trainer.evaluate() without training at stage 3: an engine without an optimizer."""
    trainer = _gpt2(folder, ds_config(3, optimizer=False))
    loss = trainer.evaluate()["eval_loss"]
    trainer.model_wrapped.destroy()
    return 4.0 < loss < 4.4 or str(loss)


# ---- 16 bits ---------------------------------------------------------------------------------------------------------
def precision_case(precision: str, stage: int, power: int = 16) -> tuple[str, dict, dict]:
    """A case of `train` in bf16, or in fp16 with a first loss scale of 2^power; on CPUs TrainingArguments want use_cpu
    beside it."""
    section = {
        "enabled": "auto",
        **({"initial_scale_power": power, "loss_scale_window": 1000} if precision == "fp16" else {}),
    }
    return f"{precision}-{stage}-{power}", ds_config(stage, **{precision: section}), {precision: True, "use_cpu": True}


def moves(rank: int, world: int, folder: str, stage: int) -> dict[str, Any]:
    """What scripts do with the model of a trainer that has trained: evaluate it again, move it, unwrap it, save it,
    evaluate it with another Trainer. By name: an evaluation loss, after each."""
    use("deepc")
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    trainer = _gpt2(
        folder, ds_config(stage, optimizer=False), torch_compile=stage == 2, torch_compile_backend="aot_eager"
    )
    trainer.train()
    out = {"at first": trainer.evaluate()["eval_loss"]}
    trainer.model.to(trainer.args.device)
    trainer.model.cpu().float()
    out["moved"] = trainer.evaluate()["eval_loss"]
    out["predicted"] = trainer.predict(trainer.eval_dataset).metrics["test_loss"]
    unwrapped = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    assert unwrapped is trainer.model
    out["prepared"] = _loss(trainer.accelerator.prepare_model(unwrapped, evaluation_mode=True), trainer)
    trainer.save_model(folder + "/end")
    torch.distributed.barrier()  # rank 0 writes
    unset_hf_deepspeed_config()
    out["saved"] = _loss(AutoModelForCausalLM.from_pretrained(folder + "/end"), trainer)
    if stage == 3:  # Trainer evaluates without training at stage 3 only
        other = _gpt2(folder + "/other", ds_config(stage, optimizer=False), unwrapped)
        assert other.evaluate()["eval_loss"] == out["at first"]
        other.deepspeed.destroy()
    trainer.deepspeed.backward(trainer.deepspeed(**_rows(trainer)).loss)
    out["step"] = trainer.deepspeed.step().applied
    trainer.deepspeed.destroy()
    return out


def _rows(trainer: Any) -> dict[str, torch.Tensor]:
    rows = torch.stack([row["input_ids"] for row in trainer.eval_dataset])
    return {"input_ids": rows, "labels": rows}


@torch.no_grad()
def _loss(model: torch.nn.Module, trainer: Any) -> float:
    return model.eval()(**_rows(trainer)).loss.item()


# ---- Accelerate ------------------------------------------------------------------------------------------------------
def accelerate_loop(rank: int, world: int, library: str, folder: str, cases: list[list[str]]) -> list[Any]:
    """For every case (arguments of the example, which gets the launcher's as well): what each step printed, the same
    after load_state, and the sum of the saved weights."""
    import torch.distributed as dist

    use(library)
    from accelerate.state import AcceleratorState

    script, out = example("accelerate_loop"), []
    for i, options in enumerate(cases):
        runs = []
        for more in ([], ["--resume"]):
            AcceleratorState._reset_state(reset_partial_state=True)
            runs.append(
                script.main([f"--local_rank={rank}", *options, *more, "--output_dir", f"{folder}/{library}{i}"])
            )
            dist.barrier()
        saved = weights(f"{folder}/{library}{i}")
        out.append((*runs, sum(float(t.double().sum()) for t in saved.values())))
    return out


# ---- Trainer and Accelerate on deepc's engine, without the name deepspeed --------------------------------------------
def _native_trainer(folder: str, config: dict, *, dropout: float = 0.0, kind: Any = None, **more: Any) -> Any:
    from deepc.integrations.hf import EngineTrainer
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    script = example()
    options = dict(
        output_dir=folder,
        use_cpu=True,
        max_steps=6,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        warmup_steps=3,
        learning_rate=3e-3,
        weight_decay=0.1,
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(42)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=62,
            eos_token_id=63,
            pad_token_id=63,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )
    return (kind or EngineTrainer)(
        model=model,
        args=TrainingArguments(**{**options, **more}),
        train_dataset=script.Sequences(512),
        eval_dataset=script.Sequences(64, seed=1),
        deepc_config=config,
    )


def _without_names() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")


def native(
    rank: int, world: int, folder: str, stage: int, config: dict | None = None, more: dict | None = None
) -> tuple[list, list, int]:
    """The example's training with EngineTrainer, then again from its checkpoint of step 3: both histories, and how many
    tensors were saved."""
    _without_names()
    out = []
    for resume in (None, f"{folder}/checkpoint-3"):
        trainer = _native_trainer(
            folder if resume is None else folder + "-again",
            {"zero_optimization": {"stage": stage}, **(config or {})},
            **(more or {}),
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        out.append(history(trainer))
        trainer.engine.destroy()
    return out[0], out[1], len(weights(folder))


def native_odd(rank: int, world: int, folder: str, stage: int) -> dict[str, Any]:
    """What else Trainer does: by name, what came of it."""
    _without_names()
    import deepc
    from deepc.integrations.hf import EngineTrainer
    from transformers import EarlyStoppingCallback

    config, out = {"zero_optimization": {"stage": stage}}, {}
    trainer = _native_trainer(f"{folder}/again", config, save_strategy="no", max_steps=2, eval_strategy="no")
    out["evaluated first"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    out["once"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    out["twice"] = trainer.evaluate()["eval_loss"]
    other = _native_trainer(f"{folder}/other", config, save_strategy="no", eval_strategy="no")
    other.model = other.model_wrapped = trainer.model
    out["other"] = other.evaluate()["eval_loss"]
    try:
        other.train()
    except deepc.DeepcError as error:
        out["trained by two"] = str(error)
    trainer.engine.destroy()

    trainer = _native_trainer(
        f"{folder}/best",
        config,
        max_steps=8,
        learning_rate=0.2,
        eval_steps=1,
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        warmup_steps=0,
    )
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    out["best"] = trainer.state.best_metric, trainer.evaluate()["eval_loss"], trainer.state.global_step
    trainer.engine.destroy()

    class Short(EngineTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return super().training_step(model, inputs, *args)

    losses = {}
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    for name, kind, more in (
        ("smoothed", None, {"label_smoothing_factor": 0.1}),
        ("compiled", None, compiled),
        ("plain", None, {}),
        ("smaller", Short, {"auto_find_batch_size": True}),
    ):
        trainer = _native_trainer(
            f"{folder}/{name}", config, kind=kind, save_strategy="no", max_steps=2, eval_strategy="no", **more
        )
        trainer.train()
        losses[name] = (
            [e["loss"] for e in trainer.state.log_history if "loss" in e],
            trainer.engine.train_micro_batch_size_per_gpu(),
        )
        trainer.engine.destroy()
    return {**out, **losses}


def accelerate_native(rank: int, world: int, folder: str, options: list[str]) -> tuple[list, list, int]:
    """The example's steps, the same after --resume, and how many tensors were saved."""
    _without_names()
    script, where = example("accelerate_native"), ["--output_dir", folder, *options]
    return script.main(where), script.main([*where, "--resume"]), len(weights(folder))


class Features(torch.nn.Module):
    """A model of floating-point inputs, which does not cast them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.lin(x)
        return {"loss": torch.nn.functional.cross_entropy(out.float(), labels), "logits": out}


def trials(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Of a trainer that makes its model anew for each train(): losses, and whether it is the engine's; and of a
    configuration that says something else than TrainingArguments."""
    _without_names()
    from deepc.errors import CheckpointError, ConfigError, UnsupportedError
    from deepc.integrations.hf import EngineTrainer
    from transformers import TrainingArguments

    draw = torch.Generator().manual_seed(3)
    data = [{"x": x, "labels": int(x.sum() > 0)} for x in torch.randn(32, 4, generator=draw)]
    args = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, bf16=True, use_cpu=True, report_to=[], save_strategy="no",
        learning_rate=0.1, logging_steps=1, lr_scheduler_type="constant", disable_tqdm=True,
    )  # fmt: skip
    trainer = EngineTrainer(model_init=Features, args=args, train_dataset=data, eval_dataset=data, deepc_config={})
    out: dict[str, Any] = {"losses": [], "evaluated": [], "own": []}
    for _ in range(2):
        trainer.train()
        out["losses"].append([e["loss"] for e in trainer.state.log_history if "loss" in e])
        out["evaluated"].append(trainer.evaluate()["eval_loss"])
        out["own"].append(trainer.engine.module is trainer.model)
    Path(folder, "a file").write_text("")
    try:
        trainer.save_model(f"{folder}/a file")
    except CheckpointError as error:
        out["not written"] = str(error)
    torch.distributed.barrier()  # nobody waits for the other
    trainer.engine.destroy()
    for key, section in (("sequence_parallel_size", 2), ("tensor_parallel", {"autotp_size": 2})):
        other = EngineTrainer(
            model=Features(), args=args, train_dataset=data, eval_dataset=data, deepc_config={key: section}
        )
        for use in (other.train, other.evaluate):
            try:
                use()
            except UnsupportedError as error:
                out[f"{key} {use.__name__}"] = str(error)
    for key, value in (("gradient_accumulation_steps", 8), ("train_micro_batch_size_per_gpu", 2)):
        other = EngineTrainer(model=Features(), args=args, train_dataset=data, deepc_config={key: value})
        try:
            other.train()
        except ConfigError as error:
            out[key] = str(error)
    return out
