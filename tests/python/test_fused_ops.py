"""The fused operators: elementwise against PyTorch in fp64, gradients included, over dtypes, shapes and strides; under
opcheck and torch.compile; what they refuse; and, on a GPU, bit for bit against the CPU."""

from __future__ import annotations

import mmap

import deepc
import pytest
import torch
import torch.nn.functional as F
from deepc.core import ops
from deepc.errors import ArgumentError, UnsupportedError

MAP_NORESERVE = 0x4000  # mmap has it from Python 3.13 on
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def torch_rotary(x, cos, sin):
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), -1)


def torch_rms_norm(x, w=None, eps=1e-6, offset=0.0):
    h = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return h if w is None else h * (w + offset)


def torch_layer_norm(x, w=None, b=None, eps=1e-5):
    return F.layer_norm(x, (x.shape[-1],), w, b, eps)


def outputs(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def check(ours, exact, tensors, need=None) -> None:
    """Results and gradients of `ours` lie within some roundings of `exact` in fp64, element by element."""
    need = [t.is_floating_point() for t in tensors] if need is None else need
    mine = [t.detach().requires_grad_(n) for t, n in zip(tensors, need)]
    theirs = [t.detach().double().requires_grad_(n) for t, n in zip(tensors, need)]
    got, want = outputs(ours(*mine)), outputs(exact(*theirs))
    grads = [make(*w.shape, seed=90 + k).to(g.dtype) for k, (g, w) in enumerate(zip(got, want))]
    torch.autograd.backward(got, grads)
    torch.autograd.backward(want, [g.double() for g in grads])
    pairs = [(g, w, "result") for g, w in zip(got, want)] + [
        (m.grad, t.grad, "gradient") for m, t in zip(mine, theirs) if m.requires_grad
    ]
    for k, (g, w, what) in enumerate(pairs):
        like = got[0] if what == "result" else g
        assert g.shape == w.shape, (what, k)
        unit = ROUNDING[like.dtype]
        size = max(1.0, w.abs().max().item()) if w.numel() else 1.0
        # two roundings of the result, and of fp32 sums what their terms may leave (the largest term bounds them)
        bound = 3 * unit * w.abs() + 2e-6 * size + (2 * unit * size if len(got) > 1 else 0)
        assert ((g.double() - w).abs() <= bound).all(), (
            f"{what} {k}: off by {(g.double() - w).abs().max().item():.3g} of {size:.3g}"
        )


SHAPES = [(1, 1), (3, 16), (2, 5, 33), (70, 100), (4, 1027)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(dtype, shape):
    x, r = make(*shape, dtype=dtype), make(*shape, dtype=dtype, seed=1)
    w, b = make(shape[-1], dtype=dtype, seed=2), make(shape[-1], dtype=dtype, seed=3)
    before = deepc.counters()["norm_calls"]
    check(lambda x, w, b: ops.layer_norm(x, w, b, 1e-3), lambda x, w, b: torch_layer_norm(x, w, b, 1e-3), (x, w, b))
    assert deepc.counters()["norm_calls"] == before + 2
    check(lambda x: ops.layer_norm(x, eps=1e-3), lambda x: torch_layer_norm(x, eps=1e-3), (x,))
    check(lambda x, b: ops.layer_norm(x, None, b, 1e-3), lambda x, b: torch_layer_norm(x, None, b, 1e-3), (x, b))
    check(lambda x, w: ops.rms_norm(x, w, 1e-3), lambda x, w: torch_rms_norm(x, w, 1e-3), (x, w))
    check(lambda x, w: ops.rms_norm(x, w, 1e-3, 1.0), lambda x, w: torch_rms_norm(x, w, 1e-3, 1.0), (x, w))
    check(lambda x: ops.rms_norm(x, eps=1e-3), lambda x: torch_rms_norm(x, eps=1e-3), (x,))
    check(
        lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-3),
        lambda x, r, w: (torch_rms_norm(x + r, w, 1e-3), x + r),
        (x, r, w),
    )
    check(
        lambda x, r, w, b: ops.add_layer_norm(x, r, w, b, 1e-3),
        lambda x, r, w, b: (torch_layer_norm(x + r, w, b, 1e-3), x + r),
        (x, r, w, b),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_activations(dtype, shape):
    x, y, b = (
        make(*shape, dtype=dtype, scale=3.0),
        make(*shape, dtype=dtype, seed=1),
        make(shape[-1], dtype=dtype, seed=2),
    )
    before = deepc.counters()["activation_calls"]
    check(ops.swiglu, lambda g, u: F.silu(g) * u, (x, y))
    assert deepc.counters()["activation_calls"] == before + 2
    for form in ("none", "tanh"):
        check(lambda x: ops.gelu(x, approximate=form), lambda x: F.gelu(x, approximate=form), (x,))
        check(lambda x, b: ops.gelu(x, b, form), lambda x, b: F.gelu(x + b, approximate=form), (x, b))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotated, cols", [(64, 64), (40, 40), (16, 50), (2, 2)])
def test_rotary(dtype, rotated, cols):
    x = make(2, 7, 3, cols, dtype=dtype)  # [batch, positions, heads, cols]
    cos, sin = make(7, rotated, dtype=dtype, seed=1), make(7, rotated, dtype=dtype, seed=2)
    frozen = (True, False, False)
    for view, c, s in (
        (x.transpose(1, 2), cos, sin),
        (x.transpose(1, 2).contiguous(), cos[None, None], sin[None, None]),
        (x, cos[:, None], sin[:, None]),
        (x[0, :, 0], cos, sin),
        (x[..., 1, :][:1], cos[None], sin.expand(1, 7, rotated)),
    ):
        check(ops.rotary, torch_rotary, (view, c, s), frozen)
    out = ops.rotary(x.transpose(1, 2), cos, sin)
    assert out.stride() == x.transpose(1, 2).stride()  # lies as x does, so that no later transpose copies
    per_batch = make(2, 1, 7, rotated, dtype=dtype, seed=3)
    check(ops.rotary, torch_rotary, (x.transpose(1, 2), per_batch, per_batch.neg()), frozen)


def test_apply_rotary_takes_what_transformers_passes():
    q, k = make(2, 4, 6, 32), make(2, 2, 6, 32, seed=1)
    angle = make(1, 6, 16, seed=2)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    got = ops.apply_rotary(q, k, cos, sin)
    for g, x in zip(got, (q, k)):
        torch.testing.assert_close(g, x * cos[:, None] + rotate_half(x) * sin[:, None])
    swapped = ops.apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for g, s in zip(got, swapped):
        assert torch.equal(g, s.transpose(1, 2))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(dtype, causal):
    """Heads that share keys, queries that lie as a model has them, odd sizes; against torch's own in float64."""
    q, k, v = (
        make(2, 70, 4, 24, dtype=dtype).transpose(1, 2),
        make(2, 2, 70, 24, dtype=dtype, seed=1),
        make(2, 2, 70, 24, dtype=dtype, seed=2),
    )

    def exact(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)

    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out, want = ops.attention(*leaves, is_causal=causal, scale=0.3), exact(*wide)
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous() == leaves[0].transpose(1, 2).is_contiguous()
    upstream = make(*out.shape, dtype=dtype, seed=3)
    bound = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
    grads = torch.autograd.grad(out, leaves, upstream)
    for got, right in zip((out, *grads), (want, *torch.autograd.grad(want, wide, upstream.double()))):
        assert got.dtype == dtype and got.shape == right.shape
        assert (got.double() - right).abs().max() <= bound * right.abs().max()


EXPANDED = {
    "heads": make(2, 1, 6, 8).expand(2, 4, 6, 8),  # one head of keys for all queries
    "batch": make(1, 4, 6, 8).expand(2, 4, 6, 8),
    "batch, by rows": make(1, 6, 4, 8).transpose(1, 2).expand(2, 4, 6, 8),
    "rows": make(2, 4, 1, 8).expand(2, 4, 6, 8),
    "all but the last": make(8).expand(2, 4, 6, 8),
    "windows": make(2, 4, 13).unfold(2, 8, 1),  # rows that overlap
}


@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_tensors_are_what_their_copies_are(name):
    """Their strides don't say in which order results lie, and the last dimension lies side by side all the same."""
    x, other, cos, sin = EXPANDED[name], make(2, 4, 6, 8, seed=1), make(6, 8, seed=2), make(6, 8, seed=3)
    cases = {
        "rotary": (lambda t: ops.rotary(t, cos, sin), x),
        "queries": (lambda t: ops.attention(t, other, other), x),
        "keys": (lambda t: ops.attention(other, t, other, is_causal=True), x),
        "values": (lambda t: ops.attention(other, other, t), x),
        "masked": (lambda t: ops.block_sparse_attention(t, t, other, slopes=torch.ones(4)), x),
    }
    for case, (function, given) in cases.items():
        leaves = given.detach().requires_grad_(), given.contiguous().detach().requires_grad_()
        outs = [function(leaf) for leaf in leaves]
        grads = [torch.autograd.grad(out, leaf, make(2, 4, 6, 8, seed=4))[0] for out, leaf in zip(outs, leaves)]
        assert torch.equal(*outs) and torch.equal(*grads), case
    if name != "windows":
        real, shape_only = torch.ops.deepc.attention(x, other, other, False, 1.0), x.detach().to("meta")
        assert real[0].stride() == torch.empty_like(shape_only).stride()


def test_attention_takes_strides_beyond_2_to_the_31():
    """Of a batch of one (a long sequence out of a fused q, k, v) such a stride is never taken; on a CPU any may be."""
    far = 2**31 + 64
    pages = mmap.mmap(-1, 2 * (far + 4096), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    memory = torch.frombuffer(pages, dtype=torch.bfloat16)
    layouts = {(1, 2, 4, 16): (far, 64, 16, 1), (2, 2, 4, 16): (far, 64, 16, 1), (1, 1, 2, 16): (far, far, far, 1)}
    for size, stride in layouts.items():
        q = memory.as_strided(size, stride)
        q.copy_(make(*size))
        results = []
        for leaf in (q.detach().requires_grad_(), q.clone(memory_format=torch.contiguous_format).requires_grad_()):
            out = ops.attention(leaf, leaf, leaf, is_causal=True)
            results.append((out.detach(), *torch.autograd.grad(out, leaf, make(*size, seed=1).bfloat16())))
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


def test_inverse_rotation_comes_back():
    x, angle = make(3, 9, 64), make(9, 32, seed=1)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    there = torch.ops.deepc.rotary(x, cos, sin, False)
    torch.testing.assert_close(torch.ops.deepc.rotary(there, cos, sin, True), x)


def test_weights_may_have_another_dtype():
    x = make(5, 40, dtype=torch.bfloat16).requires_grad_()
    w, b = make(40, seed=1).requires_grad_(), make(40, seed=2).requires_grad_()
    y = ops.layer_norm(x, w, b)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(b.grad, torch.full((40,), 5.0))


def test_strides_need_no_copy_where_rows_are_even_and_get_one_elsewhere():
    whole = make(6, 5, 64)
    gate, up = whole.chunk(2, -1)
    torch.ops.deepc.swiglu(gate, up)  # no .contiguous(): the operator itself refuses what it can't take
    check(lambda t: ops.swiglu(*t.chunk(2, -1)), lambda t: F.silu(t.chunk(2, -1)[0]) * t.chunk(2, -1)[1], (whole,))
    check(lambda t: ops.rms_norm(t[..., :32]), lambda t: torch_rms_norm(t[..., :32]), (whole,))
    check(lambda t: ops.rms_norm(t.transpose(0, 1)), lambda t: torch_rms_norm(t.transpose(0, 1)), (whole,))
    check(lambda t: ops.gelu(t.transpose(0, 2)), lambda t: F.gelu(t.transpose(0, 2)), (whole,))
    check(lambda t: ops.gelu(t[:, ::2, 3:9]), lambda t: F.gelu(t[:, ::2, 3:9]), (whole,))
    check(
        lambda t: ops.rms_norm(t[:1, :1].expand(6, 5, 64)),
        lambda t: torch_rms_norm(t[:1, :1].expand(6, 5, 64)),
        (whole,),
    )
    for call in (
        lambda: torch.ops.deepc.gelu(whole.transpose(0, 2), torch.empty(0), False),
        lambda: torch.ops.deepc.swiglu(whole.transpose(0, 1), whole.transpose(0, 1)),
        lambda: torch.ops.deepc.rms_norm(whole[:, :1].expand(6, 5, 64), torch.empty(0), 1e-6, 0.0),
    ):
        with pytest.raises(RuntimeError, match="contiguous"):
            call()


def test_gradients_that_come_expanded_or_not_at_all():
    x, r, w = make(4, 32).requires_grad_(), make(4, 32, seed=1).requires_grad_(), make(32, seed=2).requires_grad_()
    ops.rms_norm(x, w).sum().backward()  # the gradient of a sum has strides 0
    ops.swiglu(x, r).sum().backward()
    ops.gelu(x, w).sum().backward()
    ops.rotary(x, r.detach(), r.detach()).sum().backward()
    y, s = ops.add_rms_norm(x, r, w)
    for out, loss in ((s, s), (y, y)):
        mine = torch.autograd.grad(loss.sum(), (x, r, w), retain_graph=True, allow_unused=True)
        z = x.detach().double() + r.detach().double()
        z.requires_grad_()
        want = torch.autograd.grad((torch_rms_norm(z, w.detach().double()) if out is y else z).sum(), z)[0]
        torch.testing.assert_close(mine[0].double(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(mine[0], mine[1])
        assert (mine[2] is None) == (out is s)


def test_frozen_weights_get_no_gradient():
    x, w, b = make(40, 32).requires_grad_(), make(32, seed=1), make(32, seed=2).requires_grad_()
    ops.layer_norm(x, w, b).sum().backward()
    assert w.grad is None and torch.equal(b.grad, torch.full((32,), 40.0))
    y = ops.layer_norm(make(3, 8), None, None)
    assert not y.requires_grad


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5)])
def test_empty_tensors(shape):
    x = torch.zeros(shape).requires_grad_()
    w = torch.zeros(shape[-1]).requires_grad_()
    for out in (
        ops.gelu(x),
        ops.swiglu(x, x),
        ops.gelu(x, w, "tanh"),
        *([ops.layer_norm(x, w, w)] if shape[-1] else []),
        ops.rotary(x, w, w.detach()[None] if len(shape) > 1 else w),
    ):
        assert out.shape == x.shape
    if shape[-1]:
        ops.layer_norm(x, w).sum().backward()
        assert torch.equal(w.grad, torch.zeros(shape[-1]))


TABLES = make(5, 8, seed=1), make(5, 8, seed=2)
CASES = {
    "rms_norm": lambda: (ops.rms_norm, (make(6, 40), make(40, seed=1))),
    "add_rms_norm": lambda: (ops.add_rms_norm, (make(6, 40), make(6, 40, seed=1), make(40, seed=2))),
    "layer_norm": lambda: (ops.layer_norm, (make(6, 40), make(40, seed=1), make(40, seed=2))),
    "add_layer_norm": lambda: (
        ops.add_layer_norm,
        (make(6, 40), make(6, 40, seed=1), make(40, seed=2), make(40, seed=3)),
    ),
    "swiglu": lambda: (ops.swiglu, (make(6, 40), make(6, 40, seed=1))),
    "swiglu of halves": lambda: (lambda t: ops.swiglu(*t.chunk(2, -1)), (make(6, 40),)),
    "gelu": lambda: (lambda x, b: ops.gelu(x, b, "tanh"), (make(6, 40), make(40, seed=1))),
    "rotary": lambda: (lambda x: ops.rotary(x.transpose(1, 2), *(t.to(x.device) for t in TABLES)), (make(2, 5, 3, 8),)),
    "attention": lambda: (
        lambda q, k, v: ops.attention(q.transpose(1, 2), k, v, is_causal=True),
        (make(2, 5, 4, 8), make(2, 2, 5, 8, seed=1), make(2, 2, 5, 8, seed=2)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_training_equals_eager(name):
    torch._dynamo.reset()
    function, tensors = CASES[name]()

    def step(*args):
        return sum((out * out).sum() for out in outputs(function(*args)))

    grads = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().requires_grad_() for t in tensors]
        run(*leaves).backward()
        grads.append([t.grad for t in leaves])
    for a, b in zip(*grads):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_opcheck_with_gradients(name):
    operator = name.split()[0]
    leaves = [t.requires_grad_() for t in CASES[name]()[1]]
    args = {
        "rms_norm": (*leaves, 1e-6, 0.0),
        "add_rms_norm": (*leaves, 1e-6, 1.0),
        "layer_norm": (*leaves, 1e-5),
        "add_layer_norm": (*leaves, 1e-5),
        "swiglu": leaves if len(leaves) == 2 else tuple(leaves[0].chunk(2, -1)),
        "gelu": (*leaves, True),
        "rotary": (leaves[0], make(3, 8, seed=1), make(3, 8, seed=2), False),
        "attention": (leaves[0].movedim(1, -2), *leaves[1:], False, 0.3),
    }[operator]
    torch.library.opcheck(getattr(torch.ops.deepc, operator).default, args)


def test_what_is_refused():
    x = make(4, 8)
    with pytest.raises(ArgumentError, match="approximate='erf'"):
        ops.gelu(x, approximate="erf")
    for call, text in (
        (lambda: ops.rms_norm(x.double()), "fp64"),
        (lambda: ops.rms_norm(x, make(7)), "7 elements"),
        (lambda: ops.layer_norm(x, make(8), make(8, dtype=torch.bfloat16)), "differ in dtype"),
        (lambda: ops.swiglu(x, make(4, 9)), "differ in shape"),
        (lambda: ops.swiglu(x, make(4, 8, dtype=torch.bfloat16)), "differ in shape or dtype"),
        (lambda: ops.rotary(x, make(4, 7), make(4, 7)), "even"),
        (lambda: ops.rotary(x, make(4, 10), make(4, 10)), "at most cols = 8"),
        (lambda: ops.rotary(x, make(3, 8), make(3, 8)), "can't be broadcast"),
        (lambda: ops.rms_norm(x, eps=-1.0), "eps = -1"),
        (lambda: ops.rotary(make(1, 1, 1, 4, 8), make(4, 8), make(4, 8)), "1 to 4"),
        (lambda: ops.attention(x, x, x), "it must have 4"),
        (lambda: ops.attention(make(1, 3, 4, 8), *2 * [make(1, 2, 4, 8)]), "heads = 3 is no multiple of kv_heads = 2"),
        (lambda: ops.attention(make(1, 2, 4, 8), *2 * [make(1, 2, 4, 9)]), "'k' and 'q' differ"),
        (lambda: ops.attention(make(1, 2, 4, 8), make(1, 2, 4, 8), make(1, 2, 5, 8)), "'v' and 'k' differ"),
        (lambda: ops.attention(*3 * [make(1, 2, 4, 300)]), "dim = 300"),
        (lambda: ops.attention(*3 * [make(1, 2, 4, 8)], scale=-1.0), "scale = -1"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def test_second_derivatives_and_gradients_of_tables_raise():
    x, y = make(4, 8).requires_grad_(), make(4, 8, seed=1).requires_grad_()
    for out in (ops.rms_norm(x), ops.swiglu(x, y), ops.gelu(x), ops.attention(*3 * [x.view(1, 1, 4, 8)])):
        (grad,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
        with pytest.raises(UnsupportedError, match="second derivative"):
            grad.sum().backward()
    with pytest.raises(UnsupportedError, match="cos and sin"):
        ops.rotary(x, y, y).sum().backward()


def test_forward_mode_derivatives_raise():
    """torch would give zeros: without requires_grad it asks no formula."""
    x, w, labels = make(2, 3, 4, 8), make(8), torch.zeros(2, 3, 4, dtype=torch.int64)
    cases = {
        "rms_norm": lambda t: ops.rms_norm(t, w),
        "weight": lambda t: ops.rms_norm(x, t[0, 0, 0]),
        "add_rms_norm": lambda t: ops.add_rms_norm(x, t)[0],
        "layer_norm": lambda t: ops.layer_norm(t),
        "add_layer_norm": lambda t: ops.add_layer_norm(x, t)[0],
        "swiglu": lambda t: ops.swiglu(x, t),
        "gelu": lambda t: ops.gelu(t, w),
        "rotary": lambda t: ops.rotary(t, x[0, 0], x[0, 0]),
        "attention": lambda t: ops.attention(x, t, x),
        "block_sparse_attention": lambda t: ops.attention(x, x, x, bias=t[..., :4]),
        "linear_cross_entropy": lambda t: deepc.linear_cross_entropy(t, make(5, 8), labels),
    }
    for function in cases.values():
        with pytest.raises(UnsupportedError, match="has no forward-mode derivative"):
            torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        ops.rms_norm(x, w)  # nothing here has a tangent
        with pytest.raises(UnsupportedError, match="has no forward-mode derivative"):
            ops.gelu(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(UnsupportedError, match="has no forward-mode derivative"):
        torch.func.jacfwd(ops.gelu)(w)


def test_threads_change_nothing():
    threads = torch.get_num_threads()
    x, w, b = make(700, 96), make(96, seed=1), make(96, seed=2)
    found = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            leaves = [t.detach().requires_grad_() for t in (x, w, b)]
            out = ops.gelu(ops.layer_norm(*leaves), leaves[2])
            out.backward(make(700, 96, seed=3))
            found.append([out.detach(), *(t.grad for t in leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for a, c in zip(found[0], other):
            assert torch.equal(a, c)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a CUDA build of torch")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "attention"])  # a GPU has torch's
def test_gpu_has_the_bits_of_the_cpu(name, dtype):
    function, tensors = CASES[name]()
    tensors = [t.repeat(300, *(1,) * (t.dim() - 1)) if t.dim() > 1 else t for t in tensors]
    found = []
    for device in ("cpu", "cuda"):
        leaves = [t.detach().to(device, dtype, copy=True).requires_grad_() for t in tensors]
        result = outputs(function(*leaves))
        torch.autograd.backward(result, [make(*r.shape, seed=7).to(r.device, r.dtype) for r in result])
        found.append([t.detach().cpu() for t in (*result, *(leaf.grad for leaf in leaves))])
    for k, (a, b) in enumerate(zip(*found)):
        assert torch.equal(a, b), f"tensor {k} differs"
