"""Generation by a model that is a multiple of the memory: weights on NVMe, in a memory cgroup, beside the same model in
memory without a limit (the tokens must be equal) and with the limit.

    sudo python tests/bench/generate_beyond_memory.py --folder /nvme [--ratio 5] [--ranks 1] [--json out]

The model is a Llama of transformers with random weights, which a process of its own writes to the folder first.

    disk      deepc.inference(model on the meta device, checkpoint=folder, zero=section)
    deepspeed DeepSpeed's form: from_pretrained under an HfDeepSpeedConfig, deepspeed.initialize without an optimizer
    memory    transformers alone, no limit
    mapped    the same with the limit: its weights are pages of the files, which the kernel drops and reads again
    limited   the same with disable_mmap=True: the weights are in memory

All generate with the key-value cache, every rank for its own prompt. Before each the files leave the page cache. The
limit is weights / ratio for all ranks together. Needs root: a cgroup (v1 or v2) is made and removed. A row has the
median of the seconds per token behind the second (the first reads the prompt, the second learns the order), what was
read of the disk per token and second, and the peak that the kernel counted (with cached pages of files)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from limited import run_limited


def llama(a):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=a.vocab,
        hidden_size=a.hidden,
        intermediate_size=4 * a.hidden,
        num_hidden_layers=a.layers,
        num_attention_heads=a.hidden // 64,
        num_key_value_heads=a.hidden // 64,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def write(a) -> None:
    """The model in bf16, in files of 1 GB, one layer after the other."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = Path(a.source)
    folder.mkdir()
    llama(a).save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in AutoModelForCausalLM.from_config(llama(a)).named_parameters()}
    generator, where, part, size, total = torch.Generator().manual_seed(0), {}, {}, 0, 0

    def flush() -> None:
        name = f"model-{len(set(where.values())):05d}.safetensors"
        where.update(dict.fromkeys(part, name))
        save_file(part, folder / name, metadata={"format": "pt"})
        part.clear()

    for name, shape in shapes.items():
        ones = name.endswith("norm.weight")
        part[name] = (torch.ones(shape) if ones else 0.05 * torch.randn(shape, generator=generator)).bfloat16()
        size, total = size + part[name].nbytes, total + part[name].nbytes
        if size > 1e9:
            flush()
            size = 0
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def child(a) -> None:
    import deepc
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(a.threads)
    rank = int(os.environ["RANK"])
    begin = time.monotonic()
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": a.folder}}
    if a.work == "disk":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(llama(a), dtype=torch.bfloat16)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its buffers are not stored
        engine = deepc.inference(model, checkpoint=a.source, dtype="bf16", zero=zero).trainer
    elif a.work == "deepspeed":
        import deepc.compat.deepspeed as deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        cfg = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
        living = HfDeepSpeedConfig(cfg)  # noqa: F841  # alive while the model is made
        model = AutoModelForCausalLM.from_pretrained(a.source, dtype=torch.bfloat16)
        engine = deepspeed.initialize(model=model, config=cfg)[0]
    else:
        options = {"disable_mmap": True} if a.work == "limited" else {}
        model = AutoModelForCausalLM.from_pretrained(a.source, dtype=torch.bfloat16, **options)
    model.eval()
    out: dict = {"set-up s": round(time.monotonic() - begin, 1)}
    times: list[float] = []

    class Clock(BaseStreamer):
        def put(self, value) -> None:
            times.append(time.monotonic())

        def end(self) -> None:
            pass

    def read() -> int:
        return deepc.counters()["disk_bytes_read"] if a.work in ("disk", "deepspeed") else 0

    prompt = torch.randint(a.vocab, (a.batch, a.prompt), generator=torch.Generator().manual_seed(rank))
    before = read()
    text = model.generate(prompt, max_new_tokens=a.tokens, do_sample=False, synced_gpus=False, streamer=Clock())
    took = [z - y for y, z in zip(times, times[1:])]
    out["text"] = text[:, a.prompt :].tolist()
    out["s per token"] = round(statistics.median(took[2:] or took), 3)
    if a.work in ("disk", "deepspeed"):
        out["GB per token"] = round((read() - before) / a.tokens / 1e9, 3)
        out["units"] = engine.state.streamed.stats()
    Path(f"{a.result}.{rank}").write_text(json.dumps(out))


def run(a, work: str, limit: int) -> dict:
    """All ranks of one run; {"ended": "fine", "killed" or the codes, "peak": bytes, "texts": of all ranks, ...}."""
    for file in Path(a.source).iterdir():
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result"
        own = ["--work", work, "--result", str(result), "--source", a.source]
        ended, peak = run_limited(limit, own, a.ranks, a.port)
        row = {"work": work, "limit": limit, "weights": weights(a), "ended": ended, "peak": peak}
        files = [Path(f"{result}.{r}") for r in range(a.ranks)]
        if ended == "fine":
            told = [json.loads(f.read_text()) for f in files]
            row |= {k: v for k, v in told[0].items() if k != "text"}
            row["texts"] = [t["text"] for t in told]
            if "GB per token" in row and row["s per token"]:
                row["GB/s"] = round(sum(t["GB per token"] for t in told) / row["s per token"], 2)
    return row


def weights(a) -> int:
    """Bytes in bf16."""
    return 2 * (a.layers * (4 * a.hidden**2 + 12 * a.hidden**2 + 2 * a.hidden) + 2 * a.vocab * a.hidden + a.hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="on the disk to be measured")
    parser.add_argument("--ratio", type=float, default=5)
    for name, default in (
        ("ranks", 1),
        ("threads", 2),
        ("layers", 24),
        ("hidden", 2048),
        ("vocab", 8192),
        ("batch", 1),
        ("prompt", 8),
        ("tokens", 12),
        ("port", 29513),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="disk,deepspeed,memory,mapped,limited")
    for name in ("json", "work", "result", "source"):
        parser.add_argument(f"--{name}", default="")
    a = parser.parse_args()
    if a.work == "write":
        return write(a)
    if a.work:
        return child(a)
    limit = int(weights(a) / a.ratio) // 4096 * 4096
    print(f"weights {weights(a) / 2**20:,.0f} MiB in bf16, limit {limit / 2**20:,.0f} MiB", flush=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=a.folder) as scratch:
        a.source = f"{scratch}/model"
        own = ["--work", "write", "--source", a.source]
        subprocess.run([sys.executable, __file__, *sys.argv[1:], *own], check=True)
        for work in a.only.split(","):
            row = run(a, work, 0 if work == "memory" else limit)
            rows.append(row)
            print(json.dumps(row | {"peak": f"{row['peak'] / 2**20:,.0f} MiB"}), flush=True)
    texts = {json.dumps(row["texts"]) for row in rows if "texts" in row}
    print("tokens are", "equal" if len(texts) == 1 else "DIFFERENT")
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
