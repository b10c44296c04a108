"""deepc.export and deepc.inference: weights out of engines at every stage and back, in each dtype, elementwise; int8
within its bound; shared weights; Hugging Face folders."""

from __future__ import annotations

import copy
import json

import deepc
import pytest
import tiny
import torch
import torch.nn.functional as F
from deepc.checkpoint import SafetensorsFile
from deepc.errors import ArgumentError, CheckpointError, DeepcError, UnsupportedError
from deepc.nn import int8
from ranks import run_quietly, run_ranks
from safetensors.torch import save_file
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Served(tiny.TinyGPT):
    """Logits without labels, so that there is something to serve; greedy generation."""

    def forward(self, x, y=None):
        if y is not None:
            return super().forward(x, y)
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.ln(h))

    def generate(self, x, count):
        for _ in range(count):
            x = torch.cat((x, self(x)[:, -1:].argmax(dim=-1)), dim=1)
        return x


def make(seed=0, **options):
    torch.manual_seed(seed)
    return Served(**options)


def _trained(rank, world, stage, precision, frozen=True):
    config = tiny.config(stage, micro=8 // world, precision=precision, deepc={"bucket_elems": 8192})
    engine, *_ = deepc.initialize(model=make(frozen=frozen), config=config)
    average = deepc.EMA(engine, 0.5)
    for step in range(2):
        x, y = tiny.make_batch(step)
        n = 8 // world
        engine.backward(engine(x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]))
        engine.step()
        average.update()
    return engine, average


def _values(engine):
    """fp32 values of everything in the state_dict."""
    trained = {id(p) for p in engine.state.trained}
    named = engine.module.named_parameters(remove_duplicate=False)
    return {n: engine.full_fp32_param(p).clone() if id(p) in trained else p.detach().float() for n, p in named}


def _export_all(rank, world, folder, stage, precision):
    engine, average = _trained(rank, world, stage, precision)
    out = {"weights": _values(engine), "average": average.state_dict()}
    for dtype in (*DTYPES, "int8"):
        deepc.export(engine, f"{folder}/{dtype}", dtype=dtype)
    deepc.export(average, f"{folder}/average", dtype="fp32")
    engine.save_checkpoint(f"{folder}/checkpoint")
    probe = tiny.make_batch(50)[0]
    served = deepc.inference(engine)
    out["logits"], out["text"] = served(probe).clone(), served.generate(probe[:1, :4], 5)
    assert engine.module.training and not out["logits"].requires_grad
    engine.destroy()
    return out


def _check_files(folder, want):
    for dtype, kind in DTYPES.items():
        with SafetensorsFile(f"{folder}/{dtype}/model.safetensors") as f:
            assert f.metadata["head.weight"] == "tok.weight" and "head.weight" not in f.tensors
            assert set(f.tensors) == set(want) - {"head.weight"}
            for n in f.tensors:
                assert torch.equal(f.tensor(n), want[n].to(kind)), (dtype, n)
    with SafetensorsFile(f"{folder}/int8/model.safetensors") as f:
        quantized = {n for n in f.tensors if f[n].dtype == torch.int8}
        linear = {n for n, m in make().named_modules() if type(m) is nn.Linear and n != "head"}
        assert quantized == {f"{n}.weight" for n in linear} | {"tok.weight"}
        assert f.metadata["head.weight"] == "tok.weight" and f.metadata["head.weight_scale"] == "tok.weight_scale"
        for n in want:
            if n in quantized:
                scale = f.tensor(n + "_scale")
                assert torch.equal(scale, want[n].abs().amax(dim=1, keepdim=True) / 127)
                assert ((f.tensor(n).float() * scale - want[n]).abs() <= (0.5 + 2**-15) * scale).all()
            elif n != "head.weight":
                assert torch.equal(f.tensor(n), want[n])


@pytest.mark.parametrize("stage", [0, 3])
def test_engines_export_their_masters_in_each_dtype(tmp_path, stage):
    for out in run_quietly(_export_all, 2, str(tmp_path), stage, "bf16"):
        _check_files(tmp_path, out["weights"])
    with SafetensorsFile(str(tmp_path / "average" / "model.safetensors")) as f:
        assert all(torch.equal(f.tensor(n), v) for n, v in out["average"].items())
    _check_inference(tmp_path, out)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 4])
def test_exports_at_every_stage(tmp_path, world, stage, precision):
    for out in run_quietly(_export_all, world, str(tmp_path), stage, precision):
        _check_files(tmp_path, out["weights"])


@pytest.mark.full
def test_exports_where_parameters_are_streamed(tmp_path):
    env = {"DEEPC_LOG_LEVEL": "WARNING", "DEEPC_STREAMED": "1"}
    for out in run_ranks(_export_all, 2, args=(str(tmp_path), 3, "bf16"), env=env):
        assert out["text"].shape == (1, 9)
    with SafetensorsFile(str(tmp_path / "bf16" / "model.safetensors")) as f:
        assert all(torch.equal(f.tensor(n), out["weights"][n].bfloat16()) for n in f.tensors)


def _check_inference(folder, out):
    """The exports run: as the engine did in its precision, and int8 within its bound of the weights."""
    probe = tiny.make_batch(50)[0]
    for path in ("bf16", "checkpoint"):
        served = deepc.inference(make(seed=9, frozen=True), checkpoint=folder / path, dtype="bf16")
        assert served.module.head.weight is served.module.tok.weight and served.dtype == torch.bfloat16
        assert torch.equal(served(probe), out["logits"])
        assert torch.equal(served.generate(probe[:1, :4], 5), out["text"])
    with torch.device("meta"):
        empty = Served(frozen=True)
    served = deepc.inference(empty, checkpoint=folder / "checkpoint", average="ema")
    assert all(torch.equal(dict(served.module.named_parameters())[n], v) for n, v in out["average"].items())
    small = deepc.inference(make(seed=9), checkpoint=folder / "int8")
    here = deepc.inference(make(seed=9), checkpoint=folder / "fp32", dtype="int8")
    assert isinstance(small.module.head, int8.Int8Linear) and isinstance(small.module.tok, int8.Int8Embedding)
    assert small.module.head.weight is small.module.tok.weight
    assert torch.equal(small(probe), here(probe))
    exact = deepc.inference(make(seed=9), checkpoint=folder / "fp32")
    assert (small(probe) - exact(probe)).abs().max() <= 0.02 * exact(probe).abs().max()
    assert small.weight_bytes() < 0.4 * exact.weight_bytes()
    deepc.export(small, folder / "again", dtype="int8")
    deepc.export(small, folder / "wide", dtype="fp32")
    with (
        SafetensorsFile(folder / "again" / "model.safetensors") as a,
        SafetensorsFile(folder / "int8" / "model.safetensors") as b,
        SafetensorsFile(folder / "wide" / "model.safetensors") as c,
    ):
        assert set(a.tensors) == set(b.tensors) and all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.tensors)
        for n in c.tensors:
            wide = int8.dequantize(b.tensor(n), b.tensor(n + "_scale")) if n + "_scale" in b.tensors else b.tensor(n)
            assert torch.equal(c.tensor(n), wide)


# ---- int8 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 300), (1500, 700)])
def test_an_int8_linear_is_within_its_bound_elementwise(shape, dtype, monkeypatch):
    g = torch.Generator().manual_seed(3)
    layer = nn.Linear(shape[1], shape[0])
    with torch.no_grad():
        layer.weight.copy_(torch.randn(shape, generator=g) * torch.rand(shape[0], 1, generator=g).pow(4))
        layer.weight[0] = 0
    x = torch.randn(5, 2, shape[1], generator=g).to(dtype)
    layer.requires_grad_(False)
    model = nn.Sequential(layer)
    want = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    int8.convert(model, dtype, int8.quantizable(model))
    model[0].bias.data = model[0].bias.data.to(dtype)
    got = model(x)
    assert got.dtype == dtype
    scale, q = model[0].weight_scale.double(), model[0].weight.double()
    bound = (0.5 + 2**-15) * scale.view(-1) * x.double().abs().sum(-1, keepdim=True)
    eps = torch.finfo(dtype).eps
    product = (shape[1] * 2.0**-23 if dtype == torch.float32 else 2 * eps) * F.linear(
        x.double().abs(), (q * scale).abs()
    )
    rounding = product + 2 * eps * (want.abs() + layer.bias.double().abs()) + 2 * torch.finfo(dtype).smallest_normal
    assert ((got.double() - want).abs() <= bound + rounding).all()
    whole = model(x)
    monkeypatch.setattr(int8, "BLOCK_BYTES", 4 * shape[1])
    assert ((model(x).double() - whole.double()).abs() <= 2 * rounding).all()  # whatever the block


@pytest.mark.parametrize("largest", [1e-6, 1e-3, 0.1, 1.0, 100.0])
def test_an_int8_linear_of_large_fp16_activations_overflows_where_its_result_does(largest):
    """One activation times 127 is beyond fp16 from 516 on, however small the weights are."""
    g = torch.Generator().manual_seed(5)
    layer = nn.Linear(64, 8, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.rand(8, 64, generator=g) * largest)
    layer.weight[:, 0] = largest
    x = torch.rand(2, 64, generator=g).half()
    x[0, 0], x[1, 0] = 1500.0, 60000.0
    want = F.linear(x.double(), layer.weight.double())
    served = deepc.inference(nn.Sequential(layer), dtype="int8").module
    got = served(x)
    fits = want.abs() < 0.99 * 65504
    assert got.dtype == torch.float16 and torch.isfinite(got[fits]).all()
    bound = 0.6 / 127 * largest * x.double().abs().sum(-1, keepdim=True) + 2.0**-10 * want.abs() + 2.0**-24
    assert ((got.double() - want).abs() <= bound)[fits].all()
    if largest == 100.0:
        assert got[~fits].isinf().all() and (~fits).any()


def test_a_model_keeps_the_dtypes_that_it_came_in(tmp_path):
    """Some of its weights are fp32 on purpose (a router's), and its tables with them."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4))
    model.register_buffer("angles", torch.rand(4))
    kept = copy.deepcopy(model.state_dict())
    deepc.inference(model)
    assert {n: t.dtype for n, t in model.state_dict().items()} == {n: t.dtype for n, t in kept.items()}
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())
    with pytest.raises(UnsupportedError, match="several dtypes.*pass dtype='bfloat16'"):
        disk = {"device": "nvme", "nvme_path": str(tmp_path)}
        deepc.inference(copy.deepcopy(model), zero={"stage": 3, "offload_param": disk})
    save_file(kept, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4))
        empty.register_buffer("angles", torch.rand(4))
    deepc.inference(empty, checkpoint=str(tmp_path))
    assert all(torch.equal(t, kept[n]) and t.dtype == kept[n].dtype for n, t in empty.state_dict().items())
    deepc.inference(model, dtype="bf16")
    assert torch.equal(model.angles, kept["angles"]) and model.angles.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_tables_of_a_16_bit_model_on_the_meta_device_stay_fp32(tmp_path):
    """As those of the same model in memory do, with the dtype asked for or not."""
    model = torch.nn.Linear(4, 4).bfloat16()
    model.register_buffer("angles", torch.rand(4, dtype=torch.float32))
    save_file(kept := copy.deepcopy(model.state_dict()), tmp_path / "model.safetensors")
    for device in ("cpu", "meta"):
        for dtype in (None, "bf16"):
            again = copy.deepcopy(model).to(device)
            deepc.inference(again, dtype=dtype, checkpoint=str(tmp_path))
            assert all(torch.equal(t, kept[n]) and t.dtype == kept[n].dtype for n, t in again.state_dict().items())


class Counting(nn.Linear):
    seen, mean = 0, torch.zeros(2)

    def get_extra_state(self):
        return {"seen": self.seen, "mean": self.mean}

    def set_extra_state(self, state):
        self.seen, self.mean = state["seen"], state["mean"]


def test_extra_states_come_from_checkpoints(tmp_path, caplog):
    model = nn.Sequential(nn.ReLU(), Counting(4, 4))
    model[1].set_extra_state({"seen": 3, "mean": torch.tensor([1.0, 2.0])})
    engine, *_ = deepc.initialize(model=model, config={"train_batch_size": 1})
    engine.save_checkpoint(tmp_path / "checkpoint")
    assert "extra state" not in caplog.text
    deepc.export(engine, tmp_path / "exported")
    assert "export writes tensors alone, without the extra state of the modules: 1._extra_state" in caplog.text
    engine.destroy()
    for folder, seen in (("checkpoint", 3), ("exported", 0)):
        caplog.clear()
        served = deepc.inference(nn.Sequential(nn.ReLU(), Counting(4, 4)), checkpoint=tmp_path / folder).module[1]
        assert served.seen == seen and torch.equal(served.weight, model[1].weight)
        assert ("which keep theirs: ['1._extra_state']" in caplog.text) == (seen == 0)
        assert served.mean.tolist() == ([1.0, 2.0] if seen else [0.0, 0.0])


def _a_pipeline_is_not_served(rank, world):
    from deepc.pipe import PipelineModule

    model = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 1)], num_stages=2)
    engine, *_ = deepc.initialize(model=model, config={"train_batch_size": 1})
    with pytest.raises(UnsupportedError, match="of a pipeline: each rank has the layers of its stages alone"):
        deepc.inference(engine)


def test_a_pipeline_is_not_served():
    run_quietly(_a_pipeline_is_not_served, 2)


def test_an_int8_embedding_refuses_what_an_embedding_refuses():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5, bias=False))
    model[1].weight = model[0].weight
    words = deepc.inference(model, dtype="int8").module[0]
    assert isinstance(words, int8.Int8Embedding)
    ids = torch.tensor([[0, 4], [2, 2]])
    assert torch.equal(words(ids), int8.dequantize(words.weight, words.weight_scale)[ids])
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            words(torch.tensor([0, wrong]))


def test_quantised_values_at_the_edges():
    w = torch.tensor([[0.0, 0.0], [1.0, -1.0], [1e-45, 0.0], [3e38, 1e38], [0.5, -0.003937]])
    q, scale = int8.quantize(w, 0)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert ((q.double() * scale.double() - w.double()).abs() <= (0.5 + 2**-15) * scale.double()).all()
    assert q[1].tolist() == [127, -127] and q[0].tolist() == [0, 0]
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="'?layer'? has a value that is not finite"):
            int8.quantize(torch.tensor([[1.0, bad]]), 0, "layer")


class Odd(nn.Module):
    """Linear weights that can not be int8 (read past the layer, tied to a convolution's), and one that can; an encoder
    with a fused path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.plain, self.renormed, self.alone = nn.Linear(8, 8), nn.Embedding(4, 8, max_norm=1.0), nn.Embedding(4, 8)
        self.tied = nn.Linear(8, 4, bias=False)
        self.tied.weight = self.renormed.weight
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        h = self.plain(self.alone(x) + self.renormed(x))
        return self.tied(self.encoder(h + self.attention(h, h, h)[0]))


def test_which_weights_become_int8(tmp_path):
    torch.manual_seed(1)
    model = Odd().eval()
    names = {id(p): n for n, p in model.named_parameters()}
    chosen = {names[i] for i in int8.quantizable(model, keep=["*.linear2.*"])}
    assert chosen == {"plain.weight", "encoder.linear1.weight"}
    for keep, told in (
        (["plan.weight"], r"'plan.weight'. Did you mean \"plain.weight\""),
        ("plain.*", r"keep=\['plain"),
    ):
        for make in (
            lambda k: deepc.inference(copy.deepcopy(model), dtype="int8", keep=k),
            lambda k: deepc.export(model, tmp_path, dtype="int8", keep=k),
        ):
            with pytest.raises(ArgumentError, match=told):
                make(keep)
    x = torch.tensor([[0, 1, 2, 3]])
    want = model(x)
    served = deepc.inference(copy.deepcopy(model), dtype="int8")
    assert isinstance(served.module.encoder.linear2, int8.Int8Linear)
    got = served(x)
    assert not torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=0, atol=0.05 * float(want.detach().abs().max()))
    with pytest.raises(ArgumentError, match="is a Linear itself"):
        deepc.inference(nn.Linear(2, 2), dtype="int8")


def test_an_encoder_with_int8_layers_takes_padding():
    """Which torch's own hands to a fused path that knows no such layers, in a nested tensor."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, x = nn.Sequential(nn.TransformerEncoder(layer, 2)).eval(), torch.randn(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    served = deepc.inference(copy.deepcopy(model), dtype="int8").module
    with torch.no_grad():
        got, want = (m[0](x, src_key_padding_mask=padding) for m in (served, model))
    torch.testing.assert_close(got[~padding], want[~padding], rtol=0, atol=0.05 * float(want.abs().max()))


def test_gradients_reach_the_input_of_int8_layers():
    model = deepc.inference(nn.Sequential(nn.Linear(6, 4)), dtype="int8").module
    x = torch.randn(3, 6, requires_grad=True)
    model(x).sum().backward()
    wide = int8.dequantize(model[0].weight, model[0].weight_scale)
    torch.testing.assert_close(x.grad, wide.sum(0).expand(3, 6))


# ---- shared weights --------------------------------------------------------------------------------------------------
def _shared(rank, world, folder, dtype):
    with torch.device("meta") if rank else torch.device("cpu"):  # whoever leads reads; the others need no values
        model = make(seed=9)
    served = deepc.inference(model, checkpoint=folder, dtype=dtype, stage=3)
    probe = tiny.make_batch(50)[0]
    p = served.module.blocks[1].up.weight
    places = [
        q for q in served.module.parameters() if served._home.arena is not None and not served._home.arena.holds(q)
    ]
    out = served(probe).clone()
    with pytest.raises(CheckpointError, match="missing.*ln.bias|does not fit"):
        deepc.inference(nn.Sequential(nn.Linear(3, 3)), checkpoint=folder, stage=3)
    return out, type(p).__name__, len(places)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_stage_3_holds_the_weights_once_per_node(tmp_path, dtype):
    model = make()
    deepc.export(model, tmp_path / "model", dtype="fp32")
    want = deepc.inference(make(seed=4), checkpoint=tmp_path / "model", dtype=dtype)(tiny.make_batch(50)[0])
    for got, kind, elsewhere in run_quietly(_shared, 2, str(tmp_path / "model"), dtype):
        assert torch.equal(got, want) and kind == "NodeParameter" and elsewhere == 0


# ---- files -----------------------------------------------------------------------------------------------------------
def test_parts_and_other_writers(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make()
    names = deepc.export(model, tmp_path / "parts", dtype="bf16", max_shard_bytes=20_000)
    assert len(names) > 3 and "model.safetensors.index.json" in names
    served = deepc.inference(make(seed=2), checkpoint=tmp_path / "parts")
    assert served.dtype == torch.float32  # the model's own, unless said
    assert all(torch.equal(a, b.bfloat16().float()) for a, b in zip(served.module.parameters(), model.parameters()))
    deepc.export(model, tmp_path / "one", dtype="fp32")
    theirs = load_file(tmp_path / "one" / "model.safetensors")
    save_file(theirs, tmp_path / "theirs.safetensors")
    served = deepc.inference(make(seed=2), checkpoint=tmp_path / "theirs.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(served.module.parameters(), model.parameters()))


def test_what_is_refused(tmp_path):
    model = make()
    trains, *_ = deepc.initialize(model=make(), config={"train_batch_size": 1})
    deepc.export(model, tmp_path / "int8", dtype="int8")
    for call, error, text in (
        (
            lambda: deepc.inference(make(), checkpoint=tmp_path / "int8", dtype="bf16"),
            ArgumentError,
            "holds int8 weights",
        ),
        (lambda: deepc.inference(make(), dtype="int4"), ArgumentError, "'int4'.*fp32, bf16, fp16 or int8"),
        (lambda: deepc.inference(make(), stage=1), ArgumentError, "stage=1"),
        (lambda: deepc.inference(make(), tag="a"), ArgumentError, "tag='a', .*give its folder"),
        (lambda: deepc.inference(make(), average="ema"), ArgumentError, "average='ema'.*give its folder"),
        (lambda: deepc.inference(trains, average="ema"), ArgumentError, "average, .*can't be given with it"),
        (lambda: deepc.inference(make(), checkpoint=tmp_path), CheckpointError, "holds no weights"),
        (lambda: deepc.inference(make(width=16), checkpoint=tmp_path / "int8"), CheckpointError, "has shape"),
        (lambda: deepc.inference("model"), ArgumentError, "got str"),
        (lambda: deepc.export(model, tmp_path / "x", dtype="fp8"), ArgumentError, "'fp8'"),
        (lambda: deepc.export(3, tmp_path / "x"), ArgumentError, "got int"),
        (
            lambda: deepc.export(tmp_path / "int8", tmp_path / "x", dtype="int8"),
            ArgumentError,
            "does not know which weights",
        ),
        (lambda: deepc.export(model, tmp_path / "x", tag="a"), ArgumentError, "folder of a checkpoint"),
        (lambda: deepc.inference(make()).generate_nothing, AttributeError, "generate_nothing"),
        (lambda: deepc.inference(nn.Sequential(nn.Linear(2, 2))).generate(1), UnsupportedError, "no generate"),
    ):
        with pytest.raises(error, match=text):
            call()
    with torch.device("meta"), pytest.raises(ArgumentError, match="on the meta device"):
        deepc.inference(nn.Linear(2, 2))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../evil"}}))
    with pytest.raises(CheckpointError, match="no weight_map"):
        deepc.inference(make(), checkpoint=tmp_path)
    assert issubclass(ArgumentError, DeepcError)


def test_a_failed_export_leaves_nothing_and_raises(tmp_path):
    model = make()
    with torch.no_grad():
        model.blocks[0].up.weight[0, 0] = float("nan")
    with pytest.raises(ArgumentError, match="blocks.0.up.weight has a value that is not finite"):
        deepc.export(model, tmp_path / "out", dtype="int8")
    assert not list((tmp_path / "out").glob("*"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="can't export into .*file: File exists"):
        deepc.export(model, tmp_path / "file")


# ---- Hugging Face ----------------------------------------------------------------------------------------------------
def _gpt2():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers, transformers.GPT2LMHeadModel(config)


@pytest.mark.full
def test_from_pretrained_loads_an_export(tmp_path):
    transformers, model = _gpt2()
    engine, *_ = deepc.initialize(model=model, config=tiny.config(3, micro=8, precision="bf16"))
    x = tiny.make_batch(0)[0]
    engine.backward(engine(input_ids=x, labels=x).loss)
    engine.step()
    for dtype in ("fp32", "bf16"):
        deepc.export(engine, tmp_path / dtype, dtype=dtype)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert again.dtype == DTYPES[dtype] and again.lm_head.weight is again.transformer.wte.weight
        for n, p in again.named_parameters():
            assert torch.equal(p, engine.full_fp32_param(dict(engine.module.named_parameters())[n]).to(p.dtype)), n
    deepc.export(engine, tmp_path / "int8", dtype="int8")
    with pytest.raises((OSError, ValueError), match="config.json"):  # int8 values are no weights to it
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    with pytest.raises(ArgumentError, match="has a config.json"):
        deepc.export(engine, tmp_path / "fp32", dtype="int8")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "int8" / "config")
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ArgumentError, match="meta|does not have it"):
        deepc.inference(nn.Sequential(empty), checkpoint=tmp_path / "int8")
    small = deepc.inference(transformers.GPT2LMHeadModel(config), checkpoint=tmp_path / "int8")
    exact = deepc.inference(transformers.GPT2LMHeadModel(config), checkpoint=tmp_path / "fp32")
    assert (
        type(small.module.transformer.h[0].attn.c_attn) is int8.Int8Linear
        and small.module.lm_head.weight.dtype == torch.int8
    )
    got, want = small(input_ids=x).logits, exact(input_ids=x).logits
    torch.testing.assert_close(got, want, rtol=0, atol=0.03 * float(want.abs().max()))
    assert small.generate(input_ids=x[:1, :4], max_new_tokens=5, do_sample=False).shape == (1, 9)
    engine.destroy()
