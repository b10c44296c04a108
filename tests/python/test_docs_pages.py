"""The Python of the pages in docs/ runs as it stands, in order, in one namespace; `before` has the names that a page
leaves to the reader (a model, data), and every folder of a disk is one of the test's. What is not run says why in
NOT_RUN. Command lines of all pages are understood, and configurations are taken."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepc import cli
from deepc.config import Config
from deepc.config.keys import KEYS
from ranks import run_ranks
from tiny import TinyGPT, make_batch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NOT_RUN = {
    "compat.md": "one import, which takes the name deepspeed (test_compat_names.py)",
    "huggingface.md": "test_hf_native.py",
    "keep-heap.md": "test_heap.py",
    "precision.md": "test_matmul.py",
    "launching.md": "recipes for Ray and notebooks; test_launch_hosts.py compiles them",
}
NOT_FOLLOWED = {"inference.md": {1}}  # which takes the name deepspeed: test_from_disk.py
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Net(nn.Module):
    """[rows, 8] to [rows, 8]; the loss where labels are given."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, y=None):
        out = self.down(F.gelu(self.up(x)))
        return out if y is None else F.mse_loss(out, y)

    def generate(self, x, max_new_tokens):
        return self(x.to(self.up.bias.dtype))  # which stands for tokens


def pairs(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, x.flip(0)) for x in torch.randn(count, 8)]


def batches(count: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, x.flip(1)) for x in torch.randn(count, 2, 8)]


def write_config(**more: Any) -> dict[str, Any]:
    Path("ds_config.json").write_text(json.dumps(CONFIG | more))
    return CONFIG | more


def loop() -> dict[str, Any]:
    write_config()
    return {"model": Net(), "data": pairs()}


def trained() -> dict[str, Any]:
    """An engine between backward and step."""
    import deepc

    model = Net()
    engine, *_ = deepc.initialize(model=model, config=CONFIG | {"zero_optimization": {"stage": 3}})
    engine.backward(engine(*batches(1)[0]))
    p = model.up.weight
    return {"model": model, "engine": engine, "p": p, "x": torch.ones_like(p), "params": [p], "rank": 0}


def access() -> dict[str, Any]:
    return trained() | {"config": CONFIG | {"zero_optimization": {"stage": 3}}, "Model": Net}


def any_model() -> dict[str, Any]:
    class Critic(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    class Both(nn.Module):
        def __init__(self, generator, critic):
            super().__init__()
            self.generator, self.critic = generator, critic

        def forward(self, z):
            return self.critic(self.generator(z))

    names = {"critic": Critic(8, 1), "generator": nn.Linear(8, 8), "Both": Both, "config": CONFIG}
    return names | {"z": torch.randn(2, 8)}


def checkpoints() -> dict[str, Any]:
    names = trained()
    names["engine"].step()
    return names


def collectives() -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # of one rank: the port is anybody's
    return {}


def compression() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(8, 8)
    fully_shard(model)
    ddp_model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    return {"grad": torch.randn(100), "group": dist.group.WORLD, "momentum": torch.randn(5000)} | locals()


def dynamic() -> dict[str, Any]:
    return {"parts": torch.randn(3, 50, 768), "query": torch.randn(2, 768)}


def fused() -> dict[str, Any]:
    x, (gate, up), q = torch.randn(2, 4, 8), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8)
    cos, sin = torch.randn(2, 4, 8).cos(), torch.randn(2, 4, 8).sin()
    return {"residual": x, "weight": torch.ones(8), "bias": torch.zeros(8), "k": q, "v": q} | locals()


def models() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, GPT2Config

    write_config()
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    hidden, labels = torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.long)
    return {"weight": torch.randn(64, 8), "AutoModelForCausalLM": AutoModelForCausalLM} | locals()


def inference() -> dict[str, Any]:
    import deepc

    deepc.export(Net(), "folder", dtype="fp32")
    return {"Model": Net, "config": None, "ids": torch.randn(2, 8), "x": torch.randn(2, 8)}


def export() -> dict[str, Any]:
    import deepc

    engine, *_ = deepc.initialize(model=Net(), config=CONFIG)
    average = deepc.EMA(engine, decay=0.9, label="ema")
    engine.save_checkpoint("checkpoints")
    for folder in ("exported", "large"):
        deepc.export(engine, folder, dtype="fp32")
    section = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}
    names = {"model": Net(), "Model": Net, "config": None, "x": torch.randn(2, 8), "ids": torch.randn(2, 8)}
    return names | locals() | {"module_or_inference_engine": Net()}


def memory_plan() -> dict[str, Any]:
    write_config()
    x, y = batches(1)[0]
    return {"model": Net(), "make_model": Net, "x": x, "y": y}


def moe() -> dict[str, Any]:
    return {"width": 8, "network": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))}


def onebit() -> dict[str, Any]:
    import deepc  # noqa: F401

    model, ddp = nn.Linear(8, 8), nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    return {"loss_fn": F.mse_loss, "batches": batches()} | locals()


def packing() -> dict[str, Any]:
    class Language(TinyGPT):
        def forward(self, input_ids, labels, position_ids):
            return types.SimpleNamespace(loss=super().forward(input_ids[:, :16], labels[:, :16].clamp(min=0)))

    lengths = [3, 9, 5, 4] * 16
    dataset = [{"input_ids": [1] * n} for n in lengths]
    return {"model": Language(), "config": CONFIG, "lengths": lengths, "dataset": dataset, "pad": list}


def pipeline() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    write_config(gradient_accumulation_steps=8, pipeline={"stages": 2})
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=4, n_head=2, n_positions=16, use_cache=False)
    ids = make_batch(0, samples=2)[0]
    batch = {"input_ids": ids, "labels": ids}
    names = {"config": config, "batch": batch, "GPT2LMHeadModel": GPT2LMHeadModel, "steps": 1}
    return names | {"data": iter([batch] * 8)}


def layers() -> dict[str, Any]:
    """For the other blocks of pipeline.md: models as lists of layers."""

    class Block(nn.Linear):
        def __init__(self, width):
            super().__init__(width, width)

    write_config(gradient_accumulation_steps=8)
    inputs, labels = make_batch(0, samples=2)
    names = {"Embedding": nn.Embedding, "Block": Block, "vocabulary": 61, "width": 8, "steps": 1}
    listed = {"layers": [nn.Linear(8, 8), nn.Linear(8, 8)], "loss_fn": F.mse_loss, "cross_entropy": F.cross_entropy}
    sample = {"inputs": torch.randn(2, 8), "labels": torch.randn(2, 8)}  # of the list; data is of the model
    return names | listed | sample | {"data": itertools.repeat((inputs, labels))}


def schedules() -> dict[str, Any]:
    Path("mine.csv").write_text("0F0 0B0\n")
    return {}


def profiling() -> dict[str, Any]:
    model = nn.Sequential(nn.Conv2d(3, 2, 16, 16), nn.Flatten(), nn.Linear(2 * 14 * 14, 4))
    batch = torch.randn(2, 3, 224, 224)
    return {"model": model, "batch": batch, "loader": [batch], "augment": torch.relu}


def sequence() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    write_config(sequence_parallel_size=2, zero_optimization={"stage": 3})
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    ids = make_batch(0, samples=2)[0]
    q = k = v = torch.randn(2, 8, 2, 8)
    loader = [{"input_ids": ids, "labels": ids}]
    attention = F.scaled_dot_product_attention
    return {"LlamaForCausalLM": LlamaForCausalLM, "local_attention": attention} | locals()


def several() -> dict[str, Any]:
    import deepc

    deepc.export(Net(), "teacher", dtype="fp32")
    config, trunk = CONFIG, nn.Linear(8, 8)

    class On(nn.Module):
        def __init__(self, trunk, head):
            super().__init__()
            self.trunk, self.head = trunk, head

        def forward(self, x):
            return self.head(self.trunk(x))

    heads = {"policy_head": nn.Linear(8, 4), "value_head": nn.Linear(8, 1), "Actor": On, "Critic": On}
    losses = {"critic_loss": lambda a, b: (a - b).mean(), "fooled": torch.mean, "loss": F.mse_loss}
    losses |= {"value_loss": F.mse_loss, "policy_loss": F.cross_entropy, "returns": torch.randn(2, 1)}
    x, actions = torch.randn(2, 8), torch.tensor([0, 3])
    noise, real = torch.randn(2, 8), torch.randn(2, 8)
    models = {"critic_module": nn.Linear(8, 1), "generator_module": nn.Linear(8, 8), "student": nn.Linear(8, 8)}
    return heads | losses | models | {"nn": nn, "data": torch.randn(2, 2, 8), "teacher_module": Net()} | locals()


def sparse() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2))
    q = k = v = torch.randn(1, 2, 128, 16)
    return {"model": model, "q": q, "k": k, "v": v, "layout": torch.ones(1, 2, 2, dtype=torch.int64).tril()}


def streamed() -> dict[str, Any]:
    import deepc

    model = Net()
    engine, *_ = deepc.initialize(model=model, config=CONFIG | {"zero_optimization": {"stage": 3}})
    transformers = types.SimpleNamespace(from_pretrained=Net)  # stands for the model that a folder has
    return {"engine": engine, "model": model, "AutoModelForCausalLM": transformers, "folder": "folder"}


class Page(NamedTuple):
    """before: the names that a page's blocks use and don't make. ranks: how many follow it. needs: a package. group:
    whether a default group is there. blocks: which of its blocks. change: what is made smaller, or an ellipsis that is
    filled in. Pages that need a package are of the full class: its import is most of their time."""

    before: Callable[[], dict[str, Any]] = dict
    ranks: int = 1
    needs: str = ""
    group: bool = True
    blocks: slice = slice(None)
    change: dict[str, str] = {}


RUN: dict[str, Page] = {
    "README.md": Page(loop),
    "index.md": Page(loop),
    "access.md": Page(access, change={"Model(...)": "Model()"}),
    "any-model.md": Page(any_model),
    "beyond-memory.md": Page(lambda: {"Model": Net, "config": CONFIG | NVME}),
    "checkpoints.md": Page(checkpoints),
    "collectives.md": Page(collectives, group=False),
    "compression.md": Page(compression, 2),
    "dynamic-tensors.md": Page(dynamic),
    "export.md": Page(export),
    "fused.md": Page(fused, blocks=slice(0, 1)),
    "fused.md models": Page(models, needs="transformers", blocks=slice(1, None)),
    "inference.md": Page(inference, blocks=slice(0, 1)),
    "logging.md": Page(),
    "memory-plan.md": Page(memory_plan),
    "moe.md": Page(moe, 2, change={"ep_size=4": "ep_size=2"}),
    "offload.md": Page(),
    "onebit.md": Page(onebit, 2),
    "optimizers.md": Page(lambda: {"model": nn.Linear(2, 2)}),
    "packing.md": Page(packing),
    "pipeline.md": Page(pipeline, 2, needs="transformers", blocks=slice(0, 1)),
    "pipeline.md layers": Page(layers, 2, blocks=slice(1, None)),
    "pipeline-schedules.md": Page(schedules),
    "profiling.md": Page(profiling),
    "sequence-parallel.md": Page(sequence, 2, needs="transformers"),
    "several-models.md": Page(several),
    "sparse-attention.md": Page(sparse, needs="transformers"),
    "streamed.md": Page(streamed, change={"generate(...)": "generate(torch.randn(2, 8), 1)"}),
    "tensor-parallel.md": Page(
        ranks=2,
        needs="transformers",
        change={"GPT2Config()": "GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=16)"},
    ),
    "tiers.md": Page(trained),
}
NVME = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
    }
}


def blocks(page: Path, language: str) -> list[str]:
    """What stands between fences of a page, of a language ("" for fences without one)."""
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [text for kind, text in fences if kind.split(" ")[0] == language]


def path_of(name: str) -> Path:
    name = name.partition(" ")[0]
    return ROOT / name if name == "README.md" else DOCS / name


def _follow(rank: int, world: int, name: str, folder: str) -> None:
    import deepc

    page = RUN[name]
    os.makedirs(f"{folder}/{rank}/disk")
    before = os.getcwd()
    os.chdir(f"{folder}/{rank}")
    try:
        torch.manual_seed(0)
        module = types.ModuleType("page")
        module.__dict__.update({"deepc": deepc, "torch": torch, "dist": dist, "nn": nn} | page.before())
        for number, text in enumerate(blocks(path_of(name), "python")[page.blocks]):
            for old, new in page.change.items():
                text = text.replace(old, new)
            text = re.sub(r'"/(local_nvme|nvme|tmp)\b', f'"{os.getcwd()}/disk', text)
            exec(compile(text, f"{name}, block {number} of {page.blocks}", "exec"), module.__dict__)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if RUN[n].needs else n for n in RUN])
def test_the_python_of_a_page_runs(name, tmp_path):
    page = RUN[name]
    if page.needs:
        pytest.importorskip(page.needs)
    run_ranks(_follow, page.ranks, args=(name, str(tmp_path)), backend="deepc" if page.group else None)


def test_every_page_with_python_is_run_or_says_why():
    with_python = {p.name for p in ALL if p.parent != DOCS / "tutorials" and blocks(p, "python")}
    assert with_python == {path_of(name).name for name in RUN} | set(NOT_RUN)
    for name in {path_of(name) for name in RUN}:
        followed = [i for key, page in RUN.items() if path_of(key) == name for i in range(*page.blocks.indices(99))]
        count = len(blocks(name, "python"))
        assert {*range(count)} - {*followed} == NOT_FOLLOWED.get(name.name, set()), name


# ---- command lines and configurations --------------------------------------------------------------------------------
def command_lines(page: Path) -> list[list[str]]:
    """The words of each `deepc COMMAND ...` of a page, in fences and in the text."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```[^\n]*\n(.*?)^```$", text, flags=re.M | re.S)
    pattern = r"^(?:\$ |[A-Z_]+=\S+ )*(?:python -m )?deepc (?=\w)(.*)$"
    lines = [line for body in fences for line in re.findall(pattern, body.replace("\\\n", " "), flags=re.M)]
    lines += re.findall(r"`deepc (?=\w)([^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    words = [shlex.split(line.partition(" || ")[0], comments=True) for line in lines]
    return [[w.strip("[]") for w in one if w not in (">", "...")] for one in words if one[0] in cli._COMMANDS]


def test_every_command_line_is_understood():
    """But those that name a command, or one of its options, and no more."""
    seen = 0
    for page in ALL:
        for words in command_lines(page):
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                assert cli.make_parser(words[0]).parse_args(words).command == words[0]
                seen += 1
            named = len([w for w in words[1:] if not w.startswith("-")]) < 2
            short = (
                words[-1] == "--help"
                or re.search("expected one argument|arguments are required", said.getvalue())
                and named
            )
            assert not said.getvalue() or short, f"{page.name}: deepc {shlex.join(words)}\n{said.getvalue()}"
    assert seen > 100


def test_every_configuration_is_taken():
    """JSON in fences, and in the text where it begins with a section of the configuration."""
    sections = {key.path.partition(".")[0] for key in KEYS}
    seen = 0
    for page in ALL:
        text = page.read_text(encoding="utf-8")
        found = [(body, True) for body in blocks(page, "json")]
        found += [(body, False) for body in re.findall(r"`(\{\"[^`]*\})`", text)]
        found += [(f"{{{body}}}", False) for body in re.findall(r"`(\"\w+\": [^`]*)`", text)]
        for body, in_fence in found:
            try:
                raw = json.loads(body.replace('"enabled": "auto"', '"enabled": true'))
            except ValueError:
                assert not in_fence, f"{page.name}: no JSON:\n{body}"
                continue
            if in_fence or set(raw) <= sections:
                batch = {} if any(key.startswith("train_") for key in raw) else {"train_micro_batch_size_per_gpu": 1}
                Config.load(batch | raw, world_size=8)
                seen += 1
    assert seen > 60


# ---- pictures and the planner's page ---------------------------------------------------------------------------------
def test_pictures_are_whole_and_shown():
    """A browser shows nothing of an SVG file that is no XML."""
    links = [
        link for page in ALL for link in re.findall(r"\]\([./]*pictures/([\w.-]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert set(links) == {p.name for p in (DOCS / "pictures").iterdir()}
    for name in links:
        assert ElementTree.parse(DOCS / "pictures" / name).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    "pictures",
    [
        ["plan-32-workers.svg", "step-32-workers.svg"],
        pytest.param(["plan-1t.svg"], marks=pytest.mark.full),
    ],
)
def test_the_planners_pictures_are_of_its_commands(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (DOCS / "planner.md").read_text(encoding="utf-8")
    command = re.findall(r"`deepc (plan --cluster [^`]*)`", page[: page.index(f"(pictures/{pictures[0]})")])[-1]
    words = shlex.split(command.partition(" --html")[0])
    assert cli.main([*words, "--html", str(tmp_path / "plan.html")]) == 0
    made = (tmp_path / "plan.html").read_text()
    for name in pictures:
        assert (DOCS / "pictures" / name).read_text().strip() in made, f"{name} is not what deepc {command} draws"
    step, used = re.search(r"step (\S+) s, .*, (\d+)% of the", capsys.readouterr().out).groups()
    assert "plan-1t.svg" not in pictures or f"finds {step} s a step ({used} % of the attainable FLOP/s)" in page


def test_the_cluster_of_the_planners_page_is_planned(tmp_path, capsys):
    pytest.importorskip("yaml")
    (tmp_path / "cluster.yaml").write_text(blocks(DOCS / "planner.md", "yaml")[0])
    assert cli.main(["plan", "--cluster", str(tmp_path / "cluster.yaml"), "--model", "gpt2", "--pp", "1"]) == 0
    assert "gpt2: 124 M parameters" in capsys.readouterr().out
