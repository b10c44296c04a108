"""torch.ops.deepc.*: against PyTorch elementwise, under opcheck and torch.compile, with bad input, and with proof that
C ran."""

from __future__ import annotations

import copy

import deepc
import pytest
import torch
from deepc.core import ops
from deepc.errors import ArgumentError

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 15, 64, 4097, 70_001]


def make(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adam_lists(n: int, dtype: torch.dtype, count: int = 2):
    params = [make(n, dtype, i) for i in range(count)]
    grads = [make(n, dtype, 10 + i) for i in range(count)]
    moments = [torch.zeros(n, dtype=dtype) for _ in range(count)]
    return params, grads, moments, [m.clone() for m in moments]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_cast_equals_torch(n, source, target):
    src, dst = make(n, source), torch.empty(n, dtype=target)
    before = deepc.counters()["cast_calls"]
    torch.ops.deepc.cast_tensor(src, dst, 1.0)
    assert deepc.counters()["cast_calls"] == before + 1
    assert torch.equal(dst, src.float().to(target))
    torch.ops.deepc.cast_tensor(src, dst, 0.5)
    assert torch.equal(dst, (src.float() * 0.5).to(target))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("given", FLOATS)
def test_gradients_are_added_up_as_torch_does(dtype, given):
    """In the memory of the sum; those whose layouts differ too."""
    gradient = make(70_001, given).view(1, -1)
    total = ops.add_up(None, gradient, dtype)
    assert torch.equal(total, gradient.to(dtype))
    for i, more in enumerate((make(70_001, given, 1).view(1, -1), make(140_002, given, 2).view(1, -1)[:, ::2])):
        want = total.clone().add_(more)
        again = ops.add_up(total, more, dtype)
        assert again is total and torch.equal(total, want), i
    assert torch.equal(ops.add_up(total.half(), gradient, dtype), total.half().to(dtype).add_(gradient))
    wider = torch.promote_types(dtype, given)
    want = total + gradient
    again = ops.add_up(total, gradient)
    assert torch.equal(again, want) and again.dtype == want.dtype == wider and (again is total) == (wider == dtype)


def test_a_16_bit_gradient_is_added_without_a_copy_in_fp32():
    total, gradient = make(1 << 20, torch.float32), make(1 << 20, torch.bfloat16)
    taken = []
    for add in (lambda: total.add_(gradient), lambda: ops.add_up(total, gradient, torch.float32)):
        with torch.profiler.profile(profile_memory=True) as seen:
            add()
        taken.append(sum(max(0, e.self_cpu_memory_usage) for e in seen.events()))
    assert taken[0] >= 4 << 20 and taken[1] == 0  # what torch's takes: the profiler sees it


@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_axpy_copy(dtype):
    x, y = make(5003, dtype), make(5003, torch.float32, 1)
    expected = (x.float() * 3.0).to(dtype)
    torch.ops.deepc.scale_tensor(x, 3.0)
    assert torch.equal(x, expected)
    want = torch.addcmul(y.double(), x.double(), torch.tensor(0.25, dtype=torch.float64)).float()  # 0.25 x is exact
    torch.ops.deepc.add_scaled(y, x, 0.25)
    assert torch.equal(y, want)
    z = torch.empty_like(x)
    torch.ops.deepc.copy_tensor(x, z)
    assert torch.equal(x, z)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", SIZES)
def test_norm_squared_blocks(n, dtype):
    x = make(n, dtype)
    got = torch.ops.deepc.norm_squared(x)
    assert got.dtype == torch.float64 and got.numel() == (n + 4095) // 4096
    for k, part in enumerate(x.double().split(4096) if n else []):
        torch.testing.assert_close(got[k], (part * part).sum(), rtol=1e-13, atol=0)


def test_norm_squared_shows_what_is_not_finite():
    x = make(10_000, torch.float32)
    x[5000] = float("nan")
    got = torch.ops.deepc.norm_squared(x)
    assert torch.isfinite(got).tolist() == [True, False, True]
    x[5000] = 3e38  # its square overflows fp32 but not the fp64 sum
    assert torch.isfinite(torch.ops.deepc.norm_squared(x)).all()


def test_norm_squared_gradient():
    x = make(9000, torch.float32).double().float().requires_grad_()
    torch.ops.deepc.norm_squared(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_reduce_sums_in_order(dtype):
    srcs = [(make(999, torch.float32, i) * 100).to(dtype) for i in range(3)]
    dst = torch.empty(999, dtype=dtype)
    torch.ops.deepc.reduce_tensors(dst, srcs, 0)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    assert torch.equal(dst, (srcs[0].to(wide) + srcs[1].to(wide) + srcs[2].to(wide)).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_accumulate_and_norm_in_one_pass(dtype):
    acc, srcs = make(9001, torch.float32, 7), [make(9001, dtype, i) for i in range(2)]
    partial = torch.empty(3, dtype=torch.float64)
    want = acc + (srcs[0].float() + srcs[1].float())
    torch.ops.deepc.accumulate_tensors(acc, srcs, False, partial)
    assert torch.equal(acc, want)
    assert torch.equal(partial, torch.ops.deepc.norm_squared(acc))
    torch.ops.deepc.accumulate_tensors(acc, srcs[:1], True, torch.empty(0, dtype=torch.float64))
    assert torch.equal(acc, srcs[0].float())


def packed_bytes(n: int, block: int = 128) -> torch.Tensor:
    payload = torch.zeros(4 * ((n + block - 1) // block) + n, dtype=torch.uint8)
    torch.ops.deepc.quantize_blocks(make(n, torch.float32), payload, torch.empty(0), 8, block)
    return payload


OPCHECKS = {
    "cast_tensor": lambda: (make(100, torch.float32), torch.empty(100, dtype=torch.bfloat16), 2.0),
    "scale_tensor": lambda: (make(100, torch.float32), 2.0),
    "add_scaled": lambda: (make(100, torch.float32), make(100, torch.bfloat16), 2.0),
    "copy_tensor": lambda: (make(100, torch.float32), torch.empty(100)),
    "norm_squared": lambda: (make(5000, torch.float32),),
    "reduce_tensors": lambda: (torch.empty(100), [make(100, torch.float32, i) for i in range(2)], 1),
    "accumulate_tensors": lambda: (
        make(100, torch.float32),
        [make(100, torch.float16)],
        False,
        torch.empty(1, dtype=torch.float64),
    ),
    "step_adamw": lambda: (
        *adam_lists(100, torch.float32),
        [],
        [torch.empty(100, dtype=torch.bfloat16) for _ in range(2)],
        1e-3,
        0.9,
        0.999,
        1e-8,
        0.01,
        1.0,
        1,
        True,
    ),
    "step_rule": lambda: (
        *adam_lists(100, torch.float32)[:3],
        [torch.empty(100, dtype=torch.bfloat16) for _ in range(2)],
        1,
        1e-3,
        0.9,
        0.99,
        0.0,
        0.01,
        1.0,
        1,
        False,
    ),
    "quantize_blocks": lambda: (
        make(200, torch.bfloat16),
        torch.zeros(4 * 4 + 100, dtype=torch.uint8),
        make(200, torch.float32, 1),
        4,
        64,
    ),
    "dequantize_blocks": lambda: (packed_bytes(200), torch.empty(200), 8, 128),
    "add_dequantized": lambda: (packed_bytes(200), make(200, torch.float32), 8, 128, 0.5),
    "average_signs": lambda: (
        torch.zeros(2 * 44, dtype=torch.uint8),
        torch.zeros(44, dtype=torch.uint8),
        make(200, torch.float32, 1),
        2,
        64,
        0.5,
    ),
    "select_topk": lambda: (
        make(200, torch.float16),
        torch.zeros(60, dtype=torch.uint8),
        make(200, torch.float32, 1),
        128,
        5,
    ),
    "spread_topk": lambda: (torch.zeros(60, dtype=torch.uint8), torch.empty(200), 128, 5),
    "add_topk": lambda: (torch.zeros(60, dtype=torch.uint8), make(200, torch.float32), 128, 5, 2.0),
    "rotate_blocks": lambda: (make(2200, torch.float32),),
    "gemm": lambda: (
        make(60, torch.float32).view(4, 15),
        make(90, torch.float32, 2).view(6, 15).t(),
        make(6, torch.float32, 3).expand(4, 6),
        torch.ones(4, 6),
        0.5,
        2.0,
    ),
    "cross_entropy_rows": lambda: (
        make(120, torch.float32).view(4, 30),
        torch.tensor([1, -100, 0, 28]),
        torch.ones(4),
        torch.empty(4),
        29,
        1.0,
        0.1,
        -100,
        True,
    ),
    "linear_cross_entropy": lambda: (
        make(48, torch.float32).view(6, 8),
        make(88, torch.float32, 1).view(11, 8),
        torch.tensor([1, 2, -100, 10, 0, 3]),
        make(11, torch.float32, 2),
        -100,
        0.1,
        1,
        4,
        False,
        True,
        True,
        True,
    ),
    "linear_cross_entropy_backward": lambda: (
        make(48, torch.float32).view(6, 8),
        make(88, torch.float32, 1).view(11, 8),
        torch.tensor([1, 2, -100, 10, 0, 3]),
        None,
        torch.ones(6),
        -100,
        0.0,
        4,
        True,
        True,
        False,
    ),
    "rms_norm": lambda: (make(60, torch.bfloat16).view(3, 20), make(20, torch.float32), 1e-6, 1.0),
    "add_rms_norm": lambda: (
        make(60, torch.float32).view(3, 20),
        make(60, torch.float32, 1).view(3, 20),
        torch.empty(0),
        1e-6,
        0.0,
    ),
    "layer_norm": lambda: (
        make(60, torch.float32).view(3, 20),
        make(20, torch.float32),
        make(20, torch.float32, 1),
        1e-5,
    ),
    "add_layer_norm": lambda: (
        make(60, torch.float16).view(3, 20),
        make(60, torch.float16, 1).view(3, 20),
        make(20, torch.float16),
        make(20, torch.float16, 1),
        1e-5,
    ),
    "norm_grad": lambda: (
        make(60, torch.float32).view(3, 20),
        torch.empty(0),
        make(60, torch.float32, 1).view(3, 20),
        make(20, torch.float32),
        make(3, torch.float32),
        torch.ones(3),
        0.0,
        True,
        True,
    ),
    "swiglu": lambda: (make(120, torch.float32).view(3, 40)[:, :20], make(60, torch.float32, 1).view(3, 20)),
    "swiglu_grad": lambda: (
        make(60, torch.float32).view(3, 20),
        make(60, torch.float32, 1).view(3, 20),
        make(60, torch.float32, 2).view(3, 20),
    ),
    "gelu": lambda: (make(60, torch.bfloat16).view(3, 20), make(20, torch.float32), True),
    "gelu_grad": lambda: (
        make(60, torch.float32).view(3, 20),
        make(60, torch.float32, 1).view(3, 20),
        make(20, torch.float32),
        False,
        True,
    ),
    "rotary": lambda: (
        make(240, torch.float32).view(2, 5, 3, 8).transpose(1, 2),
        make(30, torch.float32).view(5, 6),
        make(30, torch.float32, 1).view(5, 6),
        False,
    ),
    "attention": lambda: (*(_heads(k) for k in range(3)), True, 0.3),
    "attention_grad": lambda: (*(_heads(k) for k in range(5)), make(30, torch.float32, 5).view(2, 3, 5), True, 0.3),
    "block_sparse_attention": lambda: (*(_heads(k) for k in range(3)), *_blocks(), True, 0, 3, 0.3),
    "block_sparse_attention_grad": lambda: (
        *(_heads(k) for k in range(5)),
        make(30, torch.float32, 5).view(2, 3, 5),
        *_blocks(),
        True,
        0,
        3,
        0.3,
        True,
    ),
}


def _heads(seed: int) -> torch.Tensor:
    return make(240, torch.float32, seed).view(2, 5, 3, 8).transpose(1, 2)


def _blocks() -> tuple[torch.Tensor | int | float, ...]:
    """layout, block, groups of the queries and keys, slopes, bias, seed, dropout, first entry and head"""
    groups = torch.zeros(2, 5, dtype=torch.int32)
    masks = torch.ones(1, 1, 1, dtype=torch.uint8), 16, groups, groups.clone(), torch.tensor([0.5, 0.25, 0.125])
    return *masks, make(75, torch.float32, 9).view(1, 3, 5, 5), torch.tensor([7]), 0.25, 0, 0


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.deepc, name).default, OPCHECKS[name]())


def test_opcheck_covers_every_operator():
    registered = {s.split("::")[1] for s in torch._C._dispatch_get_all_op_names() if s.startswith("deepc::")}
    assert registered == set(OPCHECKS)


@pytest.mark.parametrize("name", OPCHECKS)
def test_compile_fullgraph(name):
    torch._dynamo.reset()  # all operators go through one code object, which may be compiled 8 times
    op = getattr(torch.ops.deepc, name)

    def run(*args):
        out = op(*args)
        return out if out is not None else 0

    eager, compiled = OPCHECKS[name](), OPCHECKS[name]()
    a = run(*eager)
    b = torch.compile(run, fullgraph=True, backend="aot_eager")(*compiled)
    flat = lambda args: [t for x in args for t in (x if isinstance(x, list) else [x]) if isinstance(t, torch.Tensor)]
    for x, y in zip(flat(eager), flat(compiled)):
        assert torch.equal(x, y)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: torch.ops.deepc.cast_tensor(torch.zeros(3), torch.zeros(4), 1.0), "3 elements"),
        (lambda: torch.ops.deepc.scale_tensor(torch.zeros(4, 4).t()[1:], 1.0), "not contiguous"),
        (lambda: torch.ops.deepc.scale_tensor(torch.zeros(4, dtype=torch.int32), 1.0), "(?i)int32|i32|dtype"),
        (lambda: torch.ops.deepc.scale_tensor(torch.zeros(4, dtype=torch.complex64), 1.0), "dtype"),
        (lambda: torch.ops.deepc.add_scaled(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4), 1.0), "float32"),
        (lambda: torch.ops.deepc.copy_tensor(torch.zeros(4), torch.zeros(4, dtype=torch.float16)), "cast_tensor"),
        (
            lambda: torch.ops.deepc.accumulate_tensors(torch.zeros(4), [], True, torch.empty(0, dtype=torch.float64)),
            "empty",
        ),
        (
            lambda: torch.ops.deepc.accumulate_tensors(
                torch.zeros(4), [torch.zeros(4)], True, torch.empty(7, dtype=torch.float64)
            ),
            "partial",
        ),
        (
            lambda: torch.ops.deepc.step_adamw(
                [torch.zeros(4)],
                [torch.zeros(4)],
                [torch.zeros(4)],
                [],
                [],
                [],
                0.1,
                0.9,
                0.99,
                1e-8,
                0.0,
                1.0,
                1,
                True,
            ),
            "exp_avg_sqs",
        ),
        (
            lambda: torch.ops.deepc.step_adamw(
                *adam_lists(4, torch.float32), [], [], 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 0, True
            ),
            "step",
        ),
        (
            lambda: torch.ops.deepc.step_adamw(
                *adam_lists(4, torch.float32), [], [], 0.1, 1.5, 0.99, 1e-8, 0.0, 1.0, 1, True
            ),
            "(?i)beta",
        ),
        # 64 bits of torch that are 32 of the core's: none is taken for what its lower half says
        (
            lambda: torch.ops.deepc.quantize_blocks(
                torch.zeros(128), torch.zeros(132, dtype=torch.uint8), torch.empty(0), 2**32 + 8, 128
            ),
            "'bits' = 4294967304 is outside of 32 bits",
        ),
        (lambda: torch.ops.deepc.dequantize_blocks(packed_bytes(128), torch.empty(128), 8 - 2**32, 128), "'bits'"),
        (lambda: torch.ops.deepc.add_dequantized(packed_bytes(128), torch.empty(128), 2**33 + 8, 128, 1.0), "'bits'"),
        (lambda: torch.ops.deepc.reduce_tensors(torch.zeros(4), [torch.zeros(4)], 2**32), "'op' = 4294967296"),
        (
            lambda: torch.ops.deepc.step_rule(
                [torch.zeros(4)], [torch.zeros(4)], [torch.zeros(4)], [], 2**32 + 1, 0.1, 0.9, 0.9, 0, 0, 1, 1, False
            ),
            "'rule' = 4294967297",
        ),
    ],
)
def test_bad_input_is_a_clear_error(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()


# ---- the drop-in optimizer -------------------------------------------------------------------------------------------


def pair(dtype=torch.float32, kind="AdamW", **kwargs):
    shapes = [(33,), (7, 11), (1,), (257, 129)]
    mine = [torch.nn.Parameter(make(torch.Size(s).numel(), dtype, i).view(s)) for i, s in enumerate(shapes)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    return mine, getattr(deepc.optim, kind)(mine, **kwargs), theirs, getattr(torch.optim, kind)(theirs, **kwargs)


def run_pair(mine, opt, theirs, ref, steps=5):
    for step in range(steps):
        for i, (a, b) in enumerate(zip(mine, theirs)):
            a.grad = make(a.numel(), a.dtype, 100 * step + i).view(a.shape)
            b.grad = a.grad.clone()
        opt.step()
        ref.step()


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-6, "lr": 3e-2}],
)
def test_optimizer_equals_torch(kind, options):
    mine, opt, theirs, ref = pair(kind=kind, **options)
    run_pair(mine, opt, theirs, ref)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        for name in opt.state[a]:
            torch.testing.assert_close(opt.state[a][name], ref.state[b][name], rtol=2e-6, atol=1e-8)


def test_optimizer_bf16_parameters():
    mine, opt, theirs, ref = pair(torch.bfloat16)
    run_pair(mine, opt, theirs, ref, steps=1)
    for a, b in zip(
        mine, theirs
    ):  # torch rounds intermediates to bf16 on its way; one step is within one of its roundings
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_optimizer_runs_in_one_core_call_and_bumps_versions():
    mine, opt, _, _ = pair()
    for p in mine:
        p.grad = torch.ones_like(p)
    before, versions = deepc.counters(), [p._version for p in mine]
    opt.step()
    after = deepc.counters()
    assert after["adamw_calls"] == before["adamw_calls"] + 1
    assert after["adamw_elements"] == before["adamw_elements"] + sum(p.numel() for p in mine)
    assert all(p._version > v for p, v in zip(mine, versions))


def test_optimizer_state_dict_is_torchs():
    mine, opt, theirs, ref = pair()
    run_pair(mine, opt, theirs, ref, steps=2)
    ref.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.load_state_dict(copy.deepcopy(ref.state_dict()))
    assert set(opt.state_dict()) == set(ref.state_dict())
    assert {k for s in opt.state_dict()["state"].values() for k in s} == {"step", "exp_avg", "exp_avg_sq"}
    run_pair(mine, opt, theirs, ref, steps=2)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


def test_optimizer_stays_adamw_with_states_of_adam():
    """As in torch: which of the two it is belongs to the object, not to what it loads."""
    mine, opt, theirs, ref = pair(weight_decay=0.1)
    params, source, *unused = pair(kind="Adam", weight_decay=0.1)
    run_pair(params, source, *unused, steps=2)
    for one in (opt, ref):
        one.load_state_dict(copy.deepcopy(source.state_dict()))
    run_pair(mine, opt, theirs, ref, steps=2)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


def test_optimizer_works_with_schedulers_and_groups():
    mine = [torch.nn.Parameter(torch.ones(10)), torch.nn.Parameter(torch.ones(10))]
    opt = deepc.optim.AdamW([{"params": mine[:1], "lr": 0.1}, {"params": mine[1:], "weight_decay": 0.0}], lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for p in mine:
        p.grad = torch.ones(10)
    opt.step()
    schedule.step()
    assert opt.param_groups[0]["lr"] == 0.05 and opt.param_groups[1]["lr"] == 0.005


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -1.0}])
def test_optimizer_refuses_bad_arguments(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        deepc.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **options)


def test_optimizer_refuses_sparse_gradients():
    p = torch.nn.Parameter(torch.zeros(4, 2))
    p.grad = torch.zeros(4, 2).to_sparse()
    with pytest.raises(ArgumentError, match="sparse"):
        deepc.optim.AdamW([p]).step()


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True, "lr": 3e-2}])
def test_optimizer_of_float64_parameters_is_torchs_to_the_bit(kind, options):
    """Beside float32 ones of the same group, and with a state that came from torch's."""
    mine, opt, theirs, ref = pair(torch.float64, kind=kind, **options)
    extra = [torch.nn.Parameter(make(9, torch.float32, 7)) for _ in range(2)]
    opt.param_groups[0]["params"].append(extra[0])
    ref.param_groups[0]["params"].append(extra[1])
    run_pair([*mine, extra[0]], opt, [*theirs, extra[1]], ref, steps=3)
    opt.load_state_dict(copy.deepcopy(ref.state_dict()))
    run_pair([*mine, extra[0]], opt, [*theirs, extra[1]], ref, steps=2)
    for a, b in zip(mine, theirs):
        assert a.dtype == torch.float64 and torch.equal(a, b)
        assert all(torch.equal(opt.state[a][name], ref.state[b][name]) for name in ref.state[b])
    torch.testing.assert_close(extra[0], extra[1], rtol=2e-6, atol=2e-7)


def _in_channels_last(*shape, seed):
    return make(torch.Size(shape).numel(), torch.float32, seed).view(shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "weight_decay": 0.1}])
def test_optimizer_keeps_channels_last(options):
    """The gradient lies as the parameter, or in the standard order; a loaded state in either."""
    shape = (4, 3, 5, 5)
    mine, theirs = (torch.nn.Parameter(_in_channels_last(*shape, seed=1)) for _ in range(2))
    opt, ref = deepc.optim.AdamW([mine], **options), torch.optim.AdamW([theirs], **options)
    for step in range(4):
        theirs.grad = _in_channels_last(*shape, seed=10 + step)
        mine.grad = theirs.grad.clone() if step % 2 else theirs.grad.contiguous()
        if step == 2:
            saved = copy.deepcopy(ref.state_dict())
            saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].contiguous()
            opt.load_state_dict(saved)
        opt.step()
        ref.step()
    assert mine.is_contiguous(memory_format=torch.channels_last) and not mine.is_contiguous()
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-7)
    for name in ref.state[theirs]:
        torch.testing.assert_close(opt.state[mine][name], ref.state[theirs][name], rtol=2e-6, atol=1e-8)
        assert opt.state[mine][name].stride() == ref.state[theirs][name].stride()


def test_optimizer_refuses_parameters_with_holes():
    p = torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])
    p.grad = torch.zeros(4, 3)
    with pytest.raises(ArgumentError, match=r"strides \(6, 2\) has holes"):
        deepc.optim.AdamW([p]).step()
