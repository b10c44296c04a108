"""Random programs of torch.distributed calls, with what must come out of them. Owns the generator and the plain
references; knows no backend.

A case is (world, seed): everything about it follows from these two numbers, on every rank alike. It is a short program
of calls on random sub-groups of the world. A Call knows its buffers before the call (`slots`), what must lie in them
afterwards (`want`), how it is made (`launch`), and how exactly the answer is fixed (`compare`).

The rule by which answers are compared:
  - movement (broadcast, gathers, scatters, all_to_all, messages) and everything that a call must leave alone: equal
    bits.
  - integers and booleans: equal bits (booleans as truth values: Gloo's sum of two True is a byte of 2).
  - sum, product, min, max of floats: equal to the reduction in rank order in fp32 (fp64 for fp64, real and imaginary
    part for complex), rounded once. NaN stands for every NaN; min and max of +0 and -0 may be either.
  - avg: within 1 ulp of the dtype of (that sum in the wide type) / ranks.
  - premultiplied sum: within 1 ulp of the dtype, plus the rounding of the wide accumulation (ranks * 2^-24 or 2^-53 of
    the sum of the magnitudes), of the fp64 reference.
  - against Gloo, where it takes the call: equal bits on 1 and 2 ranks and for everything but float reductions on more;
    there both lie within 2 * (ranks - 1) half ulps of the sum (product) of magnitudes of each other, because Gloo's
    order and roundings are its own. Left out are elements where Gloo's own answer depends on its order or overflows on
    the way: NaN in min and max, non-finite ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int8, torch.uint8, torch.int32, torch.int64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ODD = (torch.int16, torch.uint16, torch.uint32, torch.uint64, *FP8)  # Gloo takes them in messages only
DTYPES, WEIGHTS = (*FLOATS, *INTS, torch.bool, *COMPLEX, *ODD), (30, 14, 10, 8, 4, 4, 5, 5, 5, 3, 2, 3, 1, 1, 1, 2, 2)
GLOO_DTYPES = (*FLOATS, *INTS, torch.bool, *COMPLEX)
MUST_MOVE = (*GLOO_DTYPES, torch.int16, *FP8)  # what deepc may not refuse to move
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL")
_UNSIGNED = {torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_MANTISSA = {
    torch.float32: 24,
    torch.float64: 53,
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}
_LEAST = {
    torch.float32: -149,
    torch.float64: -1074,
    torch.bfloat16: -133,
    torch.float16: -24,
    torch.float8_e4m3fn: -9,
    torch.float8_e5m2: -16,
}  # exponent of the smallest subnormal


# ---- values ----------------------------------------------------------------------------------------------------------
def values(key: int, shape: Sequence[int], dtype: torch.dtype, style: str) -> torch.Tensor:
    """Random contiguous tensor. style: "plain" (-2..2), "wide" (exponents all over, integers from the whole range) or
    "special" (plain with some inf, NaN, -0, subnormals and largest values)."""
    g = torch.Generator().manual_seed(key)
    if dtype is torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if dtype.is_complex:
        part = dtype.to_real()
        return torch.complex(values(key, shape, part, "plain"), values(key + 1, shape, part, "plain"))
    if not dtype.is_floating_point:
        if style == "plain":
            return torch.randint(0 if dtype is torch.uint8 or dtype in _UNSIGNED else -5, 6, shape, generator=g).to(
                dtype
            )
        return torch.randint(-(2**63), 2**63 - 1, shape, generator=g).to(dtype)
    x = torch.rand(shape, generator=g, dtype=torch.float64) * 4 - 2
    if style == "wide":
        span = {torch.float16: 6, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}.get(dtype, 30)
        x = torch.ldexp(x, torch.randint(-span, span + 1, shape, generator=g))
    x = x.to(dtype)
    if style == "special" and dtype not in FP8:
        info = torch.finfo(dtype)
        odd = torch.tensor(
            [math.inf, -math.inf, math.nan, -0.0, 0.0, info.tiny / 4, -info.tiny / 2, info.max, -info.max], dtype=dtype
        )
        pick = torch.randint(len(odd), shape, generator=g)
        x = torch.where(torch.rand(shape, generator=g) < 0.3, odd[pick], x)
    return x


def blank(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What lies in outputs before the call, and around strided views."""
    n = math.prod(shape)
    return (
        torch.full((n * dtype.itemsize,), 0 if dtype is torch.bool else 0x5A, dtype=torch.uint8)
        .view(dtype)
        .view(tuple(shape))
    )


def as_bits(t: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize])


# ---- places ----------------------------------------------------------------------------------------------------------
LAYOUTS = ("dense", "offset", "strided", "permuted", "negated", "expanded")  # expanded: inputs only


def place(value: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(base, view): `value` laid into memory of a larger or permuted base. "expanded": one row, repeated with stride 0.
    "negated": the imaginary part of a conjugate, which torch keeps as a view with a flag."""
    shape, dtype = tuple(value.shape), value.dtype
    if layout == "offset":
        base = blank((value.numel() + 7,), dtype)
        view = base[3 : 3 + value.numel()].view(shape)
    elif layout == "strided" and shape:
        base = blank((*shape[:-1], 2 * shape[-1] + 1), dtype)
        view = base[..., 1::2]
    elif layout == "permuted" and len(shape) > 1:
        base = blank(shape[::-1], dtype)
        view = base.permute(tuple(range(len(shape)))[::-1])
    elif layout == "negated" and dtype in (torch.float32, torch.float64):
        base = torch.zeros(shape, dtype=dtype.to_complex())
        view = base.conj().imag
    elif layout == "expanded" and shape and shape[0] > 1:
        base = value[:1].clone()
        return base, base.expand(shape)
    else:
        base = value.clone()
        return base, base
    view.copy_(value)
    return base, view


class Slot(NamedTuple):
    """Buffers of one call on one rank. role: "in" (must not change), "out", "inout". how: separate, "flat" or
    "reversed" (views of one buffer in order or in reverse). layout: of each where separate."""

    role: str
    tensors: list[torch.Tensor]
    layout: str = "dense"
    how: str = "separate"


class Placed:
    """A slot in memory."""

    def __init__(self, slot: Slot, dense: bool) -> None:
        self.slot = slot
        self.bases, self.views = [], []
        if slot.how != "separate" and not dense and slot.tensors:
            flat = torch.cat([t.reshape(-1) for t in (slot.tensors if slot.how == "flat" else slot.tensors[::-1])])
            at, views = 0, []
            for t in slot.tensors if slot.how == "flat" else slot.tensors[::-1]:
                views.append(flat[at : at + t.numel()].view(t.shape))
                at += t.numel()
            self.views = views if slot.how == "flat" else views[::-1]
            return
        for t in slot.tensors:
            base, view = place(t, "dense" if dense else slot.layout)
            self.bases.append(base)
            self.views.append(view)

    def spilled(self) -> str:
        """ "" or that memory around a view has changed."""
        for base, view in zip(self.bases, self.views):
            if base is view:
                continue
            again, _ = place(view.detach().clone(), self.slot.layout)
            if not torch.equal(as_bits(base), as_bits(again)):
                return (
                    f"memory around a {self.slot.layout} {self.slot.role} tensor of shape {tuple(view.shape)} was"
                    " written"
                )
        return ""


# ---- references ------------------------------------------------------------------------------------------------------
def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16, *FP8) else dtype


def reduce_reference(parts: Sequence[torch.Tensor], op: str, factor: float) -> torch.Tensor:
    """In rank order in the wide type; avg and the premultiplied sum stay wide (fp64). All others are rounded once to
    the dtype."""
    dtype = parts[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(reduce_reference([torch.view_as_real(p) for p in parts], op, factor).contiguous())
    if dtype is torch.bool:
        op = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op, op)
    small = _UNSIGNED.get(dtype, 64)
    wide = torch.int64 if small < 64 else torch.float64 if op == "PREMUL" else wide_of(dtype)
    if dtype is torch.uint64:
        wide = torch.int64
    fn = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PREMUL": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[op]
    scale = factor if op == "PREMUL" else 1
    acc = parts[0].to(wide) * scale if op == "PREMUL" else parts[0].to(wide)
    for p in parts[1:]:
        acc = fn(acc, p.to(wide) * scale if op == "PREMUL" else p.to(wide))
    if op == "AVG":
        return acc.to(torch.float64) / len(parts)
    return acc if op == "PREMUL" else acc.to(dtype)


def gloo_takes(dtype: torch.dtype, op: str | None = None, kind: str = "") -> bool:
    """torch 2.10 to 2.13, found by asking it. op None: movement."""
    if kind == "message":
        return True
    if dtype not in GLOO_DTYPES or (kind == "gather" and dtype.is_complex):
        return False
    if op is None or op == "SUM":
        return True
    if op == "PREMUL":
        return False
    if op == "AVG":
        return dtype.is_floating_point or dtype.is_complex
    if op in ("BAND", "BOR", "BXOR"):
        return not dtype.is_floating_point and not dtype.is_complex
    return not dtype.is_complex


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of neighbours of `dtype` at |x| (fp64)."""
    exponent = torch.frexp(x.abs()).exponent.to(torch.float64)
    return torch.exp2((exponent - _MANTISSA[dtype]).clamp(min=_LEAST[dtype]))


def _first(wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor, what: str) -> str:
    at = wrong.nonzero()[0].tolist()
    return (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {tuple(at)}: {got[tuple(at)]} for"
        f" {want[tuple(at)]}"
    )


def differs(got: torch.Tensor, want: torch.Tensor, what: str, *, zeros: bool = False) -> str:
    """ "" or where they differ. Equal bits, but any NaN for any NaN, truth values, and (zeros) +0 for -0."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{what}: {got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}"
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    got, want = got.resolve_neg(), want.resolve_neg()
    a, b = as_bits(got), as_bits(want)
    if torch.equal(a, b):
        return ""
    if got.dtype is torch.bool:
        a, b = a != 0, b != 0
    wrong = a != b
    if got.dtype.is_floating_point:
        g, w = got.to(torch.float64), want.to(torch.float64)
        wrong &= ~(g.isnan() & w.isnan())
        if zeros:
            wrong &= ~((g == 0) & (w == 0))
    return _first(wrong, got, want, what) if wrong.any() else ""


def outside(got: torch.Tensor, want: torch.Tensor, margin: torch.Tensor, what: str) -> str:
    """ "" or where |got - want| > margin (fp64). Non-finite wants must be met as they are after rounding to got's
    dtype."""
    g = got.to(torch.float64)
    rounded = want.to(got.dtype).to(torch.float64)
    finite = rounded.isfinite() & want.isfinite()
    near = (g - want).abs() <= margin
    # where the reference lies within 1 ulp of overflow either answer is fine
    edge = g.isinf() & finite & (want.abs() + margin >= torch.finfo(got.dtype).max)
    wrong = torch.where(
        finite, ~(near | edge), ~((g == rounded) | (g.isnan() & rounded.isnan()) | (~rounded.isfinite() & near))
    )
    return _first(wrong, got, want, what) if wrong.any() else ""


# ---- calls -----------------------------------------------------------------------------------------------------------
class Call:
    """One call. Ranks here are group ranks; `members` are the global ranks of the group."""

    counters: tuple[str, ...] = ()  # of the C core: one of them rises by at least 1
    may_block = True  # has a blocking and a non-blocking form
    reduces = False
    object_like = False

    def __init__(self, rng: random.Random, members: tuple[int, ...], key: int, index: int) -> None:
        self.rng, self.members, self.n, self.key, self.index = rng, members, len(members), key, index
        self.dtype = rng.choices(DTYPES, WEIGHTS)[0]
        self.op, self.factor = None, 1.0
        if self.reduces:
            self.op = rng.choices(OPS, (30, 16, 10, 10, 8, 5, 5, 5, 11))[0]
            if self.op in ("BAND", "BOR", "BXOR") and rng.random() < 0.9:
                self.dtype = rng.choice((*INTS, torch.bool, torch.int16))
            elif self.op in ("AVG", "PREMUL") and rng.random() < 0.9:
                self.dtype = rng.choice((*FLOATS, *FLOATS, *COMPLEX))
            self.factor = rng.choice((0.5, 2.0, 1 / 3, -1.25, 0.0))
        self.style = rng.choices(("plain", "wide", "special"), (6, 2, 2))[0]
        if self.op == "PREMUL":
            self.style = "plain"
        self.root = rng.randrange(self.n)
        self.by_group_rank = rng.random() < 0.5
        self.layouts = [rng.choices(LAYOUTS, (14, 2, 2, 2, 1, 1))[0] for _ in members]
        self.grad = rng.random() < 0.1 and (
            self.dtype.is_floating_point or self.dtype.is_complex
        )  # tensors that require a gradient
        self.how = rng.choice(("separate", "separate", "flat", "reversed"))
        self.setup(rng)

    def setup(self, rng: random.Random) -> None: ...

    # -- what subclasses fill
    def slots(self, r: int) -> list[Slot]:
        raise NotImplementedError

    def want(self, r: int) -> list[list[torch.Tensor] | None]:
        """Per slot; None for inputs."""
        raise NotImplementedError

    def launch(self, group, r: int, views: list[list[torch.Tensor]], later: bool) -> Any:
        raise NotImplementedError

    def launch_gloo(self, group, r: int, views: list[list[torch.Tensor]]) -> None:
        self.launch(group, r, views, False)

    # -- helpers
    def shape(self, rng: random.Random, least_dims: int = 0) -> tuple[int, ...]:
        dims = rng.choices(range(5), (1, 6, 5, 3, 1))[0]
        dims = max(dims, least_dims)
        if rng.random() < 0.02:  # spans chunks of the default group's 512 KiB and of sub-groups' 256 KiB
            return (
                (rng.randrange(300_000, 1_500_000) // self.dtype.itemsize,)
                if dims < 2
                else (rng.randrange(3, 7), 40_001)
            )
        small = (0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
        shape = tuple(rng.choice(small) for _ in range(dims))
        if dims == 1 and rng.random() < 0.4:
            shape = (rng.randrange(1, 5000),)
        return shape

    def value(self, r: int, shape: Sequence[int], j: int = 0) -> torch.Tensor:
        x = values(self.key + 97 * r + 13 * j, shape, self.dtype, self.style)
        if self.layouts[r] == "expanded" and self.expands and len(shape) and shape[0] > 1:
            x = x[:1].expand(tuple(shape)).contiguous()
        return x

    expands = True  # inputs may be expanded tensors

    def layout(self, r: int, out: bool = False) -> str:
        return "dense" if out and self.layouts[r] == "expanded" else self.layouts[r]

    def redop(self):
        return dist._make_nccl_premul_sum(self.factor) if self.op == "PREMUL" else getattr(dist.ReduceOp, self.op)

    def peer(self, r: int, name: str) -> dict[str, int]:
        """src/dst as global rank or as group rank."""
        return {f"group_{name}": r} if self.by_group_rank else {name: self.members[r]}

    def gloo(self) -> bool:
        return gloo_takes(self.dtype, self.op)

    def refusable(self) -> bool:
        """deepc may refuse it, on all ranks alike."""
        if self.gloo() or (not self.reduces and self.dtype in MUST_MOVE):
            return False
        return not (self.op == "PREMUL" and self.dtype in FLOATS)

    def hopeless(self) -> bool:
        """Has no meaning: must be refused."""
        if self.op in ("BAND", "BOR", "BXOR"):
            return self.dtype.is_floating_point or self.dtype.is_complex
        return self.op in ("MIN", "MAX") and self.dtype.is_complex

    def __str__(self) -> str:
        op = f" {self.op}" if self.op else ""
        return (
            f"{type(self).__name__}{op} {self.dtype} {self.style} root {self.root} on ranks {self.members} layouts"
            f" {self.layouts} {self.how} {'with gradients ' if self.grad else ''}{self.detail()}"
        )

    def detail(self) -> str:
        return str(getattr(self, "dims", getattr(self, "dims_list", "")))

    # -- comparisons
    def reduced(self, got: torch.Tensor, parts: Sequence[torch.Tensor], what: str) -> str:
        """`got` against the reduction of the ranks' parts."""
        want = reduce_reference(parts, self.op, self.factor)
        if self.dtype.is_complex:
            got, want, parts = torch.view_as_real(got), torch.view_as_real(want), [torch.view_as_real(p) for p in parts]
        if (
            self.op == "AVG" and not got.dtype.is_floating_point
        ):  # integers: only if deepc takes them; truncated as integers divide
            return differs(got, torch.trunc(want).to(got.dtype), what)
        if self.op == "AVG":
            return outside(got, want, ulp(want, got.dtype), what)
        if self.op == "PREMUL" and not got.dtype.is_floating_point:
            return differs(got, want.to(got.dtype), what)
        if self.op == "PREMUL":
            magnitude = sum((p.to(torch.float64) * self.factor).abs() for p in parts)
            return outside(
                got, want, ulp(want, got.dtype) + len(parts) * 2.0 ** -_MANTISSA[wide_of(got.dtype)] * magnitude, what
            )
        return differs(got, want, what, zeros=self.op in ("MIN", "MAX"))

    def as_gloo(self, got: torch.Tensor, gloo: torch.Tensor, parts: Sequence[torch.Tensor], what: str) -> str:
        """`got` against Gloo's answer."""
        floats = got.dtype.is_floating_point or got.dtype.is_complex
        if not floats:
            return differs(got, gloo, what)
        if got.is_complex():
            got, gloo, parts = torch.view_as_real(got), torch.view_as_real(gloo), [torch.view_as_real(p) for p in parts]
        g, w = got.to(torch.float64), gloo.to(torch.float64)
        keep = g.isfinite() & w.isfinite() if self.n > 2 or self.op == "AVG" else torch.ones_like(g, dtype=torch.bool)
        if self.op in ("MIN", "MAX"):
            keep &= ~torch.stack([p.isnan() for p in parts]).any(0)
        if self.n <= 2 or self.op in ("MIN", "MAX"):
            return differs(torch.where(keep, got, 0), torch.where(keep, gloo, 0), what, zeros=self.op in ("MIN", "MAX"))
        stack = torch.stack([p.to(torch.float64).abs() for p in parts])
        magnitude = stack.prod(0) if self.op == "PRODUCT" else stack.sum(0)
        if self.op == "AVG":
            magnitude = magnitude / self.n
        half = 2.0 ** -_MANTISSA[got.dtype]
        least = 2.0 ** _LEAST[got.dtype]
        margin = 2 * (self.n + 1) * half * magnitude + 4 * least * stack.clamp(min=1).prod(0)
        keep &= magnitude * 4 < torch.finfo(got.dtype).max  # else Gloo's intermediate may have overflowed
        wrong = keep & ~((g - w).abs() <= margin)
        return _first(wrong, got, gloo, what) if wrong.any() else ""

    def check(self, r: int, placed: list[Placed], gloo: list[Placed] | None) -> str:
        """ "" or what is wrong with what this rank got."""
        for i, (here, want) in enumerate(zip(placed, self.want(r))):
            if bad := here.spilled():
                return bad
            for j, view in enumerate(t.detach() for t in here.views):
                what = f"{here.slot.role} {i}.{j}"
                if want is None:
                    bad = differs(view, here.slot.tensors[j], f"{what} must not change")
                elif self.reduces:
                    parts = want[j]
                    check = self.reduced if isinstance(parts, list) else differs
                    bad = check(view, parts, what + " against the reference")
                    if not bad and gloo is not None and isinstance(parts, list):
                        bad = self.as_gloo(view, gloo[i].views[j], parts, what + " against Gloo")
                else:
                    bad = differs(view, want[j], what + " against the reference")
                    if not bad and gloo is not None:
                        bad = differs(view, gloo[i].views[j], what + " against Gloo")
                if bad:
                    return bad
        return ""


class AllReduce(Call):
    counters, reduces, expands = ("coll_all_reduce",), True, False

    def setup(self, rng):
        self.dims = self.shape(rng)

    def slots(self, r):
        return [Slot("inout", [self.value(r, self.dims)], self.layout(r, True))]

    def want(self, r):
        return [[[self.value(q, self.dims) for q in range(self.n)]]]

    def launch(self, group, r, views, later):
        return dist.all_reduce(views[0][0], self.redop(), group=group, async_op=later)


class AllReduceCoalesced(Call):
    counters, reduces, expands = ("coll_all_reduce",), True, False

    def setup(self, rng):
        self.dims_list = [self.shape(rng) for _ in range(rng.randrange(1, 5))]
        self.manager = rng.random() < 0.5

    def slots(self, r):
        return [Slot("inout", [self.value(r, s, j) for j, s in enumerate(self.dims_list)], self.layout(r, True))]

    def want(self, r):
        return [[[self.value(q, s, j) for q in range(self.n)] for j, s in enumerate(self.dims_list)]]

    def launch(self, group, r, views, later):
        if not self.manager:
            return dist.all_reduce_coalesced(views[0], self.redop(), group=group, async_op=later)
        with dist._coalescing_manager(group, async_ops=later) as cm:
            for t in views[0]:
                dist.all_reduce(t, self.redop(), group=group)
        return cm if later else None


class Reduce(Call):
    counters, reduces, expands = ("coll_reduce",), True, False

    def setup(self, rng):
        self.dims = self.shape(rng)

    def slots(self, r):
        return [Slot("inout", [self.value(r, self.dims)], self.layout(r, True))]

    def want(self, r):
        mine = self.value(r, self.dims)  # Gloo scribbles on tensors that are not the root's; deepc leaves them
        return [[[self.value(q, self.dims) for q in range(self.n)] if r == self.root else mine]]

    def launch(self, group, r, views, later):
        return dist.reduce(views[0][0], op=self.redop(), group=group, async_op=later, **self.peer(self.root, "dst"))


class Broadcast(Call):
    counters, expands = ("coll_broadcast",), False

    def setup(self, rng):
        self.dims = self.shape(rng)

    def slots(self, r):
        return [Slot("inout", [self.value(r, self.dims)], self.layout(r, True))]

    def want(self, r):
        return [[self.value(self.root, self.dims)]]

    def launch(self, group, r, views, later):
        return dist.broadcast(views[0][0], group=group, async_op=later, **self.peer(self.root, "src"))


class AllGather(Call):
    counters = ("coll_all_gather",)

    def setup(self, rng):
        self.dims = self.shape(rng)

    def slots(self, r):
        return [
            Slot("in", [self.value(r, self.dims)], self.layout(r)),
            Slot("out", [blank(self.dims, self.dtype) for _ in range(self.n)], self.layout(r, True), self.how),
        ]

    def want(self, r):
        return [None, [self.value(q, self.dims) for q in range(self.n)]]

    def launch(self, group, r, views, later):
        return dist.all_gather(views[1], views[0][0], group=group, async_op=later)


class AllGatherCoalesced(Call):
    counters = ("coll_all_gather",)

    def setup(self, rng):
        self.dims_list = [self.shape(rng) for _ in range(rng.randrange(1, 4))]

    def slots(self, r):
        return [
            Slot("in", [self.value(r, s, j) for j, s in enumerate(self.dims_list)], self.layout(r)),
            Slot("out", [blank(s, self.dtype) for _ in range(self.n) for s in self.dims_list], self.layout(r, True)),
        ]

    def want(self, r):
        return [None, [self.value(q, s, j) for q in range(self.n) for j, s in enumerate(self.dims_list)]]

    def launch(self, group, r, views, later):
        k = len(self.dims_list)  # Gloo's order: output_lists[rank][input]
        return dist.all_gather_coalesced(
            [views[1][q * k : (q + 1) * k] for q in range(self.n)], views[0], group=group, async_op=later
        )


def _name(new: str, old: str):
    """torch 2.13 renamed some functions."""
    return getattr(dist, new, None) or getattr(dist, old)


class AllGatherTensor(Call):
    counters, expands = ("coll_all_gather",), True

    def setup(self, rng):
        self.dims = self.shape(rng, 1)
        self.stacked, self.in_place = rng.random() < 0.4, rng.random() < 0.25

    def out_shape(self):
        return (self.n, *self.dims) if self.stacked else (self.n * self.dims[0], *self.dims[1:])

    def slots(self, r):
        if self.in_place:
            out = blank((self.n, *self.dims), self.dtype)
            out[r].copy_(self.value(r, self.dims))
            return [Slot("inout", [out.view(self.out_shape())])]
        return [
            Slot("in", [self.value(r, self.dims)], self.layout(r)),
            Slot("out", [blank(self.out_shape(), self.dtype)], self.layout(r, True)),
        ]

    def want(self, r):
        out = torch.stack([self.value(q, self.dims) for q in range(self.n)]).view(self.out_shape())
        return [[out]] if self.in_place else [None, [out]]

    def ends(self, r, views):
        if self.in_place:
            return views[0][0], views[0][0].view(self.n, *self.dims)[r]
        return views[1][0], views[0][0]

    def launch_gloo(self, group, r, views):
        out, mine = self.ends(r, views)  # Gloo takes the concatenated form only
        dist.all_gather_into_tensor(out.view(self.n * self.dims[0], *self.dims[1:]), mine, group=group)

    def launch(self, group, r, views, later):
        return _name("all_gather_single", "all_gather_into_tensor")(*self.ends(r, views), group=group, async_op=later)


class AllGatherTensorCoalesced(Call):
    counters = ("coll_all_gather",)

    def setup(self, rng):
        self.dims_list = [self.shape(rng, 1) for _ in range(rng.randrange(1, 4))]

    def slots(self, r):
        return [
            Slot("in", [self.value(r, s, j) for j, s in enumerate(self.dims_list)], self.layout(r)),
            Slot("out", [blank((self.n * s[0], *s[1:]), self.dtype) for s in self.dims_list], self.layout(r, True)),
        ]

    def want(self, r):
        return [None, [torch.cat([self.value(q, s, j) for q in range(self.n)]) for j, s in enumerate(self.dims_list)]]

    def launch(self, group, r, views, later):
        with dist._coalescing_manager(group, async_ops=later) as cm:
            for out, t in zip(views[1], views[0]):
                _name("all_gather_single", "all_gather_into_tensor")(out, t, group=group)
        return cm if later else None


class Gather(Call):
    counters = ("coll_gather",)

    def setup(self, rng):
        self.dims = self.shape(rng)

    def slots(self, r):
        out = [blank(self.dims, self.dtype) for _ in range(self.n)] if r == self.root else []
        return [
            Slot("in", [self.value(r, self.dims)], self.layout(r)),
            Slot("out", out, self.layout(r, True), self.how),
        ]

    def want(self, r):
        return [None, [self.value(q, self.dims) for q in range(self.n)]]

    def gloo(self):
        return gloo_takes(self.dtype, kind="gather")

    def launch(self, group, r, views, later):
        return dist.gather(
            views[0][0],
            views[1] if r == self.root else None,
            group=group,
            async_op=later,
            **self.peer(self.root, "dst"),
        )


class Scatter(Call):
    counters = ("coll_scatter",)

    def setup(self, rng):
        self.dims = self.shape(rng)

    def slots(self, r):
        parts = [self.value(self.root, self.dims, j) for j in range(self.n)] if r == self.root else []
        return [
            Slot("in", parts, self.layout(r), self.how),
            Slot("out", [blank(self.dims, self.dtype)], self.layout(r, True)),
        ]

    def want(self, r):
        return [None, [self.value(self.root, self.dims, r)]]

    def launch(self, group, r, views, later):
        return dist.scatter(
            views[1][0],
            views[0] if r == self.root else None,
            group=group,
            async_op=later,
            **self.peer(self.root, "src"),
        )


class ReduceScatter(Call):
    counters, reduces = ("coll_reduce_scatter",), True

    def setup(self, rng):
        self.dims = self.shape(rng)

    def slots(self, r):
        return [
            Slot("in", [self.value(r, self.dims, j) for j in range(self.n)], self.layout(r), self.how),
            Slot("out", [blank(self.dims, self.dtype)], self.layout(r, True)),
        ]

    def want(self, r):
        return [None, [[self.value(q, self.dims, r) for q in range(self.n)]]]

    def launch(self, group, r, views, later):
        return dist.reduce_scatter(views[1][0], views[0], self.redop(), group=group, async_op=later)


class ReduceScatterTensor(Call):
    counters, reduces = ("coll_reduce_scatter",), True

    def setup(self, rng):
        self.dims = self.shape(rng, 1)
        self.stacked, self.in_place = rng.random() < 0.4, rng.random() < 0.15

    def whole(self, r):
        parts = [self.value(r, self.dims, j) for j in range(self.n)]
        return torch.stack(parts) if self.stacked or self.in_place else torch.cat(parts)

    def slots(self, r):
        if self.in_place:
            return [Slot("inout", [self.whole(r)])]
        return [
            Slot("in", [self.whole(r)], "dense" if self.layout(r) == "expanded" else self.layout(r)),
            Slot("out", [blank(self.dims, self.dtype)], self.layout(r, True)),
        ]

    def want(self, r):
        parts = [self.value(q, self.dims, r) for q in range(self.n)]
        return [None, [parts]] if not self.in_place else [[parts]]

    def check(self, r, placed, gloo):
        if not self.in_place:
            return super().check(r, placed, gloo)
        view, parts = placed[0].views[0].detach(), self.want(r)[0][0]
        bad = self.reduced(view[r], parts, "slice against the reference")
        for q in range(self.n):
            if q != r and not bad:
                bad = differs(view[q], self.value(r, self.dims, q), f"input slice {q} must not change")
        return bad

    def launch_gloo(self, group, r, views):
        whole = views[0][0].view(self.n * self.dims[0], *self.dims[1:])  # Gloo takes the concatenated form only
        dist.reduce_scatter_tensor(views[0][0][r] if self.in_place else views[1][0], whole, self.redop(), group=group)

    def launch(self, group, r, views, later):
        out, whole = (views[0][0][r], views[0][0]) if self.in_place else (views[1][0], views[0][0])
        return _name("reduce_scatter_single", "reduce_scatter_tensor")(
            out, whole, self.redop(), group=group, async_op=later
        )


class ReduceScatterTensorCoalesced(Call):
    counters, reduces = ("coll_reduce_scatter",), True

    def setup(self, rng):
        self.dims_list = [self.shape(rng, 1) for _ in range(rng.randrange(1, 4))]

    def part(self, r, i, j):
        return self.value(r, self.dims_list[i], 10 * i + j)

    def slots(self, r):
        every = range(len(self.dims_list))
        layout = "dense" if self.layout(r) == "expanded" else self.layout(r)
        return [
            Slot("in", [torch.cat([self.part(r, i, j) for j in range(self.n)]) for i in every], layout),
            Slot("out", [blank(s, self.dtype) for s in self.dims_list], self.layout(r, True)),
        ]

    def want(self, r):
        return [None, [[self.part(q, i, r) for q in range(self.n)] for i in range(len(self.dims_list))]]

    def launch(self, group, r, views, later):
        with dist._coalescing_manager(group, async_ops=later) as cm:
            for out, t in zip(views[1], views[0]):
                _name("reduce_scatter_single", "reduce_scatter_tensor")(out, t, self.redop(), group=group)
        return cm if later else None


class AllToAllSingle(Call):
    """With equal blocks, or with split sizes: rows (i, j) from rank i to rank j."""

    counters = ("coll_all_to_all", "coll_all_to_allv")

    def setup(self, rng):
        self.tail = self.shape(rng)
        self.even = rng.random() < 0.4
        if math.prod(self.tail) > 2000:
            self.tail = (rng.randrange(1, 2000),)
        same = rng.choice((0, 1, 2, 5, 64))
        big = rng.random() < 0.05
        uneven = (0, 0, 1, 2, 3, 9, 400 if big else 4)
        self.rows = [[same if self.even else rng.choice(uneven) for _ in range(self.n)] for _ in range(self.n)]
        self.no_lists = self.even and rng.random() < 0.6  # both lists left out

    def block(self, i, j):
        return values(self.key + 97 * i + 13 * j, (self.rows[i][j], *self.tail), self.dtype, self.style)

    def slots(self, r):
        layout = self.layout(r, True)
        got = sum(self.rows[i][r] for i in range(self.n))
        return [
            Slot("in", [torch.cat([self.block(r, j) for j in range(self.n)])], layout),
            Slot("out", [blank((got, *self.tail), self.dtype)], layout),
        ]

    def want(self, r):
        return [None, [torch.cat([self.block(i, r) for i in range(self.n)])]]

    def launch(self, group, r, views, later):
        splits = (None, None) if self.no_lists else ([self.rows[i][r] for i in range(self.n)], list(self.rows[r]))
        return dist.all_to_all_single(views[1][0], views[0][0], *splits, group=group, async_op=later)

    def detail(self):
        return f"{self.tail} rows {self.rows}"


class AllToAll(Call):
    counters = ("coll_all_to_all", "coll_all_to_allv")

    def setup(self, rng):
        self.even, same = rng.random() < 0.5, self.shape(rng)
        self.dims_list = [[same if self.even else self.shape(rng) for _ in range(self.n)] for _ in range(self.n)]

    def block(self, i, j):
        return values(self.key + 97 * i + 13 * j, self.dims_list[i][j], self.dtype, self.style)

    def slots(self, r):
        layout = self.layout(r, True)
        return [
            Slot("in", [self.block(r, j) for j in range(self.n)], layout, self.how),
            Slot("out", [blank(self.dims_list[i][r], self.dtype) for i in range(self.n)], layout, self.how),
        ]

    def want(self, r):
        return [None, [self.block(i, r) for i in range(self.n)]]

    def gloo(self):
        return super().gloo() and self.even  # Gloo refuses lists of different sizes; NCCL and MPI take them

    def launch(self, group, r, views, later):
        return dist.all_to_all(views[1], views[0], group=group, async_op=later)


class Barrier(Call):
    counters = ("coll_barrier",)

    def slots(self, r):
        return []

    def want(self, r):
        return []

    def refusable(self):
        return False

    def gloo(self):
        return True

    def launch(self, group, r, views, later):
        return dist.barrier(group=group, async_op=later)


class Messages(Call):
    """A few messages (a, b, tag): blocking ones in one order for all, or non-blocking, or as a batch; ring and all
    pairs among them."""

    counters = ("coll_send", "coll_recv", "p2p_sends", "p2p_recvs", "p2p_send", "p2p_recv")

    def setup(self, rng):
        self.form = rng.choice(("blocking", "blocking", "nonblocking", "batch", "ring"))
        pairs = [(a, b) for a in range(self.n) for b in range(self.n) if a != b]
        ring = [(a, (a + 1) % self.n) for a in range(self.n)]
        chosen = ring if self.form == "ring" else [rng.choice(pairs) for _ in range(rng.randrange(1, 6))]
        self.base_tag = 100 * self.index + rng.randrange(100)
        same_tag = rng.random() < 0.5
        self.messages = [
            (a, b, self.base_tag if same_tag else self.base_tag + 1 + i, self.shape(rng))
            for i, (a, b) in enumerate(chosen)
        ]
        self.any_source = self.form == "blocking" and rng.random() < 0.3
        # non-blocking ones with tags of their own may be started in any order
        self.orders = [
            (
                rng.sample(range(len(chosen)), len(chosen))
                if self.form != "blocking" and not same_tag
                else list(range(len(chosen)))
            )
            for _ in self.members
        ]

    def mine(self, r):
        return [i for i in self.orders[r] if r in self.messages[i][:2]]

    def load(self, i):
        a, _, _, dims = self.messages[i]
        return values(self.key + 13 * i + 97 * a, dims, self.dtype, self.style)

    def slots(self, r):
        layout = self.layout(r, True)
        return [
            (
                Slot("in", [self.load(i)], layout)
                if self.messages[i][0] == r
                else Slot("out", [blank(self.messages[i][3], self.dtype)], layout)
            )
            for i in self.mine(r)
        ]

    def want(self, r):
        return [None if self.messages[i][0] == r else [self.load(i)] for i in self.mine(r)]

    def gloo(self):
        return not self.any_source or all(
            math.prod(m[3]) for m in self.messages
        )  # Gloo has no empty message from anyone

    def refusable(self):
        return self.dtype not in MUST_MOVE

    def launch(self, group, r, views, later):
        works, ops = [], []
        for i, (t,) in zip(self.mine(r), views):
            a, b, tag, _ = self.messages[i]
            send, other = a == r, b if a == r else a
            peer = self.peer(other, "dst" if send else "src")
            if self.form == "batch":
                where = {"group_peer": other} if self.by_group_rank else {"peer": self.members[other]}
                ops.append(dist.P2POp(dist.isend if send else dist.irecv, t, group=group, tag=tag, **where))
            elif self.form == "blocking" and send:
                dist.send(t, group=group, tag=tag, **peer)
            elif self.form == "blocking":
                # from anyone only where nobody else could have sent: messages of one tag come from several ranks
                anyone = self.any_source and len({m[0] for m in self.messages if m[2] == tag}) == 1
                source = dist.recv(t, group=group, tag=tag, **({} if anyone else peer))
                assert source == self.members[other], (
                    f"recv says that the message came from rank {source}, expected {self.members[other]}"
                )
            else:
                works.append((dist.isend if send else dist.irecv)(t, group=group, tag=tag, **peer))
        if ops:
            works = dist.batch_isend_irecv(ops)
        if later:
            return works
        for w in works:
            w.wait()
        return None

    def detail(self):
        return f"{self.form} {'any source ' if self.any_source else ''}{self.messages}"


def _objects(key: int, count: int) -> list[Any]:
    rng = random.Random(key)
    kinds = [
        lambda: None,
        lambda: rng.randrange(10**9),
        lambda: "s" * rng.randrange(1000),
        lambda: {"a": [rng.random()], rng.randrange(9): ()},
        lambda: bytes(rng.randrange(100_000)),
        lambda: [rng.randrange(100) for _ in range(rng.randrange(300))],
    ]
    return [rng.choice(kinds)() for _ in range(count)]


class Objects(Call):
    """Object collectives; every rank's object has a size of its own. Answers are compared in launch."""

    counters = (
        "coll_all_gather",
        "coll_broadcast",
        "coll_gather",
        "coll_scatter",
        "coll_send",
        "coll_recv",
        "p2p_sends",
        "p2p_recvs",
        "p2p_send",
        "p2p_recv",
    )
    object_like = True

    def setup(self, rng):
        self.form = rng.choice(("all_gather", "gather", "scatter", "broadcast") + (("messages",) if self.n > 1 else ()))
        self.count = rng.randrange(1, 4)

    def slots(self, r):
        return []

    def want(self, r):
        return []

    def gloo(self):
        return True

    def refusable(self):
        return False

    def launch(self, group, r, views, later):
        each = [_objects(self.key + q, self.n) for q in range(self.n)]
        if self.form == "all_gather":
            got: list[Any] = [None] * self.n
            dist.all_gather_object(got, each[r][0], group=group)
            want = [e[0] for e in each]
        elif self.form == "gather":
            got = [None] * self.n if r == self.root else None
            dist.gather_object(each[r][0], got, group=group, **self.peer(self.root, "dst"))
            want = [e[0] for e in each] if r == self.root else None
        elif self.form == "scatter":
            got = [None]
            dist.scatter_object_list(
                got, each[r] if r == self.root else None, group=group, **self.peer(self.root, "src")
            )
            want = [each[self.root][r]]
        elif self.form == "broadcast":
            want = _objects(self.key, self.count)
            got = list(want) if r == self.root else [None] * self.count
            dist.broadcast_object_list(got, group=group, **self.peer(self.root, "src"))
        else:
            want = _objects(self.key, self.count)
            to = (self.root + 1) % self.n
            got = [None] * self.count if r == to else want
            if r == self.root:
                dist.send_object_list(want, group=group, **self.peer(to, "dst"))
            elif r == to:
                dist.recv_object_list(got, group=group, **self.peer(self.root, "src"))
        assert got == want, f"{self.form}_object gave {str(got)[:200]}, expected {str(want)[:200]}"

    def idle(self, r: int) -> bool:
        """This rank does nothing."""
        return self.form == "messages" and r not in (self.root, (self.root + 1) % self.n)

    def detail(self):
        return self.form


KINDS = (
    AllReduce,
    AllReduceCoalesced,
    Reduce,
    Broadcast,
    AllGather,
    AllGatherCoalesced,
    AllGatherTensor,
    AllGatherTensorCoalesced,
    Gather,
    Scatter,
    ReduceScatter,
    ReduceScatterTensor,
    ReduceScatterTensorCoalesced,
    AllToAllSingle,
    AllToAll,
    Barrier,
    Messages,
    Objects,
)
KIND_WEIGHTS = (16, 6, 7, 7, 6, 3, 7, 4, 6, 6, 6, 7, 4, 9, 6, 4, 14, 5)


class Case:
    """A program of 1 to 5 calls. `fresh`: the groups are made for it and destroyed after it."""

    def __init__(self, world: int, seed: int) -> None:
        rng = random.Random(f"{world}:{seed}")
        self.world, self.seed = world, seed
        self.fresh = rng.random() < 0.02
        self.calls: list[Call] = []
        for index in range(rng.choices((1, 2, 3, 4, 5), (50, 20, 14, 10, 6))[0]):
            size = rng.choice((world, world, *range(1, world + 1)))
            members = tuple(sorted(rng.sample(range(world), size)))
            kinds = [k for k in KINDS if len(members) > 1 or k is not Messages]
            weights = [w for k, w in zip(KINDS, KIND_WEIGHTS) if k in kinds]
            kind = rng.choices(kinds, weights)[0]
            self.calls.append(kind(rng, members, rng.randrange(2**40), index))
        if any(
            c.refusable() or c.hopeless() for c in self.calls
        ):  # alone: all ranks then compare whether it was refused
            self.calls = [next(c for c in self.calls if c.refusable() or c.hopeless())]

    def local(self, rank: int) -> random.Random:
        """For choices that may differ between ranks: blocking or not, how to wait and in which order."""
        return random.Random(f"{self.world}:{self.seed}:{rank}")

    def __str__(self) -> str:
        return f"case {self.world}:{self.seed}" + "".join(f"\n    call {c.index}: {c}" for c in self.calls)
