"""deepc.compress: codecs against their definitions in plain torch; compressed collectives on Gloo and on the backend
"deepc" against plain references with derived bounds; error feedback; bytes on the wire; DDP hooks and FSDP2 in
training."""

from __future__ import annotations

import deepc
import onebit_reference
import pytest
import torch
import torch.distributed as dist
from deepc import compress
from deepc.compress import ErrorFeedback, Int4Blocks, Int8Blocks, OneBit, TopK
from deepc.errors import ArgumentError
from deepc.optim.codecs import Plain
from ranks import run_ranks

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
CODECS = [Int8Blocks(), Int8Blocks(64), Int4Blocks(), OneBit(), OneBit(128), TopK(0.05), TopK(0.2, 256)]
SIZES = [0, 1, 63, 64, 65, 2048, 5000, 70_001]
EPS = 2.0**-23


def make(n: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded(
    codec, x: torch.Tensor, error: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    payload, out = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.empty(x.numel(), dtype=dtype)
    codec.encode(payload, x, error)
    codec.decode(out, payload)
    return out


def by_block(x: torch.Tensor, block: int, fn) -> torch.Tensor:
    """fn of each block (a 1-d tensor), spread over its elements."""
    parts = x.split(block) if x.numel() else []
    return torch.cat([fn(p).expand(p.numel()) for p in parts]) if parts else x.clone()


def half_step(codec, x: torch.Tensor) -> torch.Tensor:
    """Bound on |x - decoded x| per element, from the definition of the codec. fp64."""
    x = x.double()
    if isinstance(codec, OneBit):
        mean = by_block(x, codec.block, lambda p: p.abs().mean())
        return (x.abs() - mean).abs() * (1 + EPS) + EPS * mean
    if isinstance(codec, TopK):

        def smallest_kept(p):
            return p.abs().sort(descending=True).values[min(codec.k, p.numel()) - 1]

        return torch.minimum(x.abs(), by_block(x, codec.block, smallest_kept))
    levels = 127 if codec.bits == 8 else 7
    return by_block(x, codec.block, lambda p: p.abs().max()) / levels / 2 * (1 + 4 * levels * EPS)


def assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    over = (got.double() - want.double()).abs() - bound
    if (over > 0).any():
        i = int(over.argmax())
        pytest.fail(f"{what}: element {i} is {got[i]}, expected {want[i]} +- {bound[i]}")


# ---- codecs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codec_is_within_its_bound(codec, n, dtype):
    x, before = make(n, 1, dtype), deepc.counters()
    out = coded(codec, x)
    ran = deepc.counters()
    name = "topk_calls" if isinstance(codec, TopK) else "quantize_calls"
    assert ran[name] == before[name] + 1 and ran["dequantize_calls"] == before["dequantize_calls"] + 1
    assert_within(out, x, half_step(codec, x), f"{codec} of {n}")
    assert torch.equal(coded(codec, x, dtype=dtype), out.to(dtype))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codec_equals_plain_torch(codec):
    x, error = make(9000, 2), make(9000, 3) / 8
    v, mine = x + error, error.clone()
    got = coded(codec, x, mine)
    if isinstance(codec, TopK):
        kept = [(p, p.abs().topk(min(codec.k, p.numel())).indices) for p in v.split(codec.block)]
        want = torch.cat([torch.zeros_like(p).scatter_(0, i, p[i]) for p, i in kept])
    elif isinstance(codec, OneBit):
        want = torch.where(v.signbit(), -1.0, 1.0) * by_block(v.double(), codec.block, lambda p: p.abs().mean()).float()
    else:
        levels = 127 if codec.bits == 8 else 7
        top = by_block(v, codec.block, lambda p: p.abs().max())
        want = (v * (levels / top)).round() * (top / levels)
    assert torch.equal(got, want)
    torch.testing.assert_close(mine, v - got, rtol=0, atol=4 * EPS)
    acc, payload = make(9000, 4), torch.empty(codec.nbytes(9000), dtype=torch.uint8)
    codec.encode(payload, v)
    want = acc.double() + 0.25 * coded(codec, v).double()
    codec.decode_add(acc, payload, 0.25)
    torch.testing.assert_close(acc.double(), want, rtol=EPS, atol=4 * EPS)


@pytest.mark.parametrize("n", SIZES)
def test_rotation_is_its_definition_and_its_own_inverse(n):
    x, before = make(n, 6), deepc.counters()["rotate_calls"]
    y = x.clone()
    torch.ops.deepc.rotate_blocks(y)
    assert deepc.counters()["rotate_calls"] == before + 1
    want = torch.from_numpy(onebit_reference.rotate(x.numpy()))
    torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-5)
    torch.ops.deepc.rotate_blocks(y)
    torch.testing.assert_close(y, x, rtol=0, atol=2e-5)


def test_rotation_takes_contiguous_fp32():
    with pytest.raises(RuntimeError, match="'x' must be float32"):
        torch.ops.deepc.rotate_blocks(make(64, 1, torch.bfloat16))
    with pytest.raises(RuntimeError, match="contiguous"):
        torch.ops.deepc.rotate_blocks(make(64, 1)[::2])


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_is_not_finite_arrives_and_spares_the_error(codec):
    for bad in (float("nan"), float("inf"), float("-inf")):
        x, error = make(9000, 5), torch.zeros(9000)
        x[4321] = bad
        assert not coded(codec, x, error)[4321].isfinite()
        assert error.isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_plain_is_a_cast_and_sums_of_fp16_do_not_overflow(dtype):
    codec, x, error = Plain(dtype, shares=4), make(9001, 2), make(9001, 3) / 8
    part = 4 if dtype == torch.float16 else 1
    want = ((x + error) / part).to(dtype).float() * part
    mine = error.clone()
    assert torch.equal(coded(codec, x, mine), want)
    assert torch.equal(mine, x + error - want) and codec.nbytes(9001) % 4 == 0
    payload, acc = torch.empty(codec.nbytes(9001), dtype=torch.uint8), make(9001, 4)
    codec.encode(payload, x)
    sent = coded(codec, x)
    torch.testing.assert_close(codec_sum(codec, acc.clone(), payload, 0.25), acc + 0.25 * sent)
    large = torch.full((64,), 1024.0 * 196)  # the sum of four numbers in fp16's range, which it is not
    assert torch.equal(coded(codec, large), large)
    errors = torch.zeros(64)
    assert not coded(codec, torch.full((64,), float("inf")), errors).isfinite().any() and errors.isfinite().all()


def codec_sum(codec, acc: torch.Tensor, payload: torch.Tensor, scale: float) -> torch.Tensor:
    codec.decode_add(acc, payload, scale)
    return acc


def test_sizes_of_payloads():
    assert Int8Blocks().nbytes(1 << 20) == (1 << 20) + 4 * 512
    assert Int4Blocks().nbytes(1 << 20) == (1 << 19) + 4 * 4096
    assert OneBit().nbytes(1 << 20) == (1 << 17) + 4 * 512
    assert TopK(0.01).nbytes(1 << 20) == 256 * 41 * 6
    assert all(c.nbytes(0) == 0 and c.nbytes(n) % 4 == 0 for c in CODECS for n in SIZES)
    assert Int8Blocks() == Int8Blocks(2048) != Int8Blocks(64) and len({OneBit(), OneBit(2048), Int8Blocks()}) == 2


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: Int8Blocks(100), ArgumentError, "multiple of 64"),
        (lambda: TopK(block=8192), ArgumentError, "4096"),
        (lambda: TopK(0.0), ArgumentError, "fraction"),
        (
            lambda: Int8Blocks().encode(torch.empty(7, dtype=torch.uint8), torch.zeros(4)),
            RuntimeError,
            "7 bytes; 4 elements take 8",
        ),
        (lambda: Int8Blocks().encode(torch.empty(8), torch.zeros(4)), RuntimeError, "uint8"),
        (
            lambda: Int8Blocks().encode(torch.empty(8, dtype=torch.uint8), torch.zeros(4), torch.zeros(3)),
            RuntimeError,
            "error",
        ),
        (
            lambda: Int8Blocks().encode(torch.empty(8, dtype=torch.uint8), torch.zeros(4), torch.zeros(4).bfloat16()),
            RuntimeError,
            "float32",
        ),
        (
            lambda: Int8Blocks().encode(torch.empty(8, dtype=torch.uint8), torch.zeros(4, dtype=torch.float64)),
            RuntimeError,
            "fp64",
        ),
        (lambda: Int8Blocks().encode(torch.empty(12, dtype=torch.uint8)[1:9], torch.zeros(4)), RuntimeError, "aligned"),
        (
            lambda: OneBit().decode_add(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.uint8)),
            RuntimeError,
            "float32",
        ),
        (
            lambda: compress.all_reduce(torch.ones(4), dist.GroupMember.NON_GROUP_MEMBER, Int8Blocks()),
            ArgumentError,
            "no rank of",
        ),
        (
            lambda: TopK(1.0, 64).decode(torch.zeros(1), torch.full((8,), 255, dtype=torch.uint8)),
            RuntimeError,
            "index 65535",
        ),
    ],
)
def test_bad_input_is_a_clear_error(call, error, text):
    with pytest.raises(error, match=text):
        call()


# ---- collectives -----------------------------------------------------------------------------------------------------
class moved:
    """Counts the bytes that collectives of torch.distributed really take from this rank to others, on their uint8
    tensors."""

    def __enter__(self):
        self.bytes, self.was = 0, (dist.all_to_all_single, compress._gather)

        def all_to_all(out, x, **kw):
            assert out.dtype == x.dtype == torch.uint8 and out.numel() == x.numel()
            self.bytes += x.numel() // dist.get_world_size() * (dist.get_world_size() - 1)
            return self.was[0](out, x, **kw)

        def gather(out, x, **kw):
            assert out.dtype == x.dtype == torch.uint8
            self.bytes += x.numel() * (dist.get_world_size() - 1)
            return self.was[1](out, x, **kw)

        dist.all_to_all_single, compress._gather = all_to_all, gather
        return self

    def __exit__(self, *exc):
        dist.all_to_all_single, compress._gather = self.was


def same_on_all(x: torch.Tensor, what: str) -> None:
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    assert all(torch.equal(rows[0].view(torch.uint8), r.view(torch.uint8)) for r in rows), f"{what}: ranks differ"


def gathers(rank, world, codec):
    for dtype in FLOATS:
        for n in (1, 65, 5000):
            xs = [make(n, 10 + r, dtype) for r in range(world)]
            out = torch.empty(world * n, dtype=dtype)
            out[rank * n : (rank + 1) * n] = xs[rank]  # also as FSDP does it: the input lies in the output
            compress.reset_traffic()
            with moved() as wire:
                sent = compress.all_gather(out, out[rank * n : (rank + 1) * n], None, codec)
            assert sent == wire.bytes == (world - 1) * codec.nbytes(n)
            size = dtype.itemsize
            assert compress.traffic() == dict.fromkeys(
                ("all_gather", "total"), compress.Traffic(1, sent, (world - 1) * n * size)
            )
            for r in range(world):
                assert torch.equal(out[r * n : (r + 1) * n], coded(codec, xs[r], dtype=dtype)), (
                    f"{codec} {dtype} n={n} of rank {r}"
                )
            same_on_all(out, f"all_gather {dtype}")


def reductions(rank, world, codec):
    rounding = {torch.float32: EPS, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    for dtype in FLOATS:
        for op in ("sum", "avg"):
            share = 1.0 / world if op == "avg" else 1.0
            for n in (1, 64, 1000, 5001):
                xs = [make(world * n, 20 + r, dtype) for r in range(world)]
                total = sum(x.double() for x in xs) * share
                magnitude = sum(x.double().abs() for x in xs) * share
                out = torch.empty(n, dtype=dtype)
                with moved() as wire:
                    sent = compress.reduce_scatter(out, xs[rank].clone(), None, codec, op=op)
                assert sent == wire.bytes == (world - 1) * codec.nbytes(n)
                mine = slice(rank * n, (rank + 1) * n)
                bound = sum(half_step(codec, x[mine]) for x in xs) * share
                bound = bound + (bound + magnitude[mine]) * (world + 1) * rounding[dtype]
                assert_within(out, total[mine], bound, f"reduce_scatter {codec} {dtype} {op} n={n}")

                x, size = xs[rank].clone(), -(-(world * n) // (world * 64)) * 64
                with moved() as wire:
                    sent = compress.all_reduce(x, None, codec, op=op)
                assert sent == wire.bytes == 2 * (world - 1) * codec.nbytes(min(size, world * n))
                same_on_all(x, f"all_reduce {dtype}")
                for begin in range(0, world * n, size):  # slice by slice, since blocks begin with them
                    at = slice(begin, begin + size)
                    first = sum(half_step(codec, v[at]) for v in xs) * share
                    summed = share * sum(
                        coded(codec, v[at]).double() for v in xs
                    )  # what the slice's rank compresses again
                    second = half_step(codec, summed) + 4 * EPS * magnitude[at]
                    if isinstance(codec, TopK):  # sums that tie within rounding may change places
                        second = second + 16 * EPS * magnitude[at].max()
                    assert_within(
                        x[at],
                        total[at],
                        first + second + (first + second + magnitude[at]) * (world + 1) * rounding[dtype],
                        f"all_reduce {codec} {dtype} {op} n={n}",
                    )


def fed_sums(rank, world, codec):
    """The inputs' sum over the steps is what came out, plus what the errors hold: elementwise; and the errors don't
    grow."""
    steps, n = 60, 3000
    state, scatter_state = ErrorFeedback(), ErrorFeedback()
    given, got = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    part_given, part_got = torch.zeros(n // world, dtype=torch.float64), torch.zeros(n // world, dtype=torch.float64)
    largest = []
    for step in range(steps):
        xs = [make(n, 1000 * step + r) for r in range(world)]
        x = xs[rank].clone()
        compress.all_reduce(x, None, codec, state, op="avg")
        given += sum(v.double() for v in xs) / world
        got += x.double()
        part = torch.empty(n // world)
        compress.reduce_scatter(part, xs[rank], None, codec, scatter_state)
        part_given += sum(v.double() for v in xs).view(world, -1)[rank]
        part_got += part.double()
        largest.append(state.worker.abs().max().item())
    owed = state.folded(average=True).double()
    dist.all_reduce(owed)
    torch.testing.assert_close(got + owed / world, given, rtol=0, atol=steps * 64 * EPS)
    owed = scatter_state.worker.double()
    dist.all_reduce(owed)
    torch.testing.assert_close(part_got + owed.view(world, -1)[rank], part_given, rtol=0, atol=steps * 64 * EPS)
    if not isinstance(codec, TopK):  # top-k's reach their stationary size only after 1 / fraction steps
        assert max(largest[steps // 2 :]) < 2 * max(largest[: steps // 2])
    resumed = ErrorFeedback()
    resumed.load_state_dict(state.state_dict())
    a, b = make(n, rank), make(n, rank)
    compress.all_reduce(a, None, codec, state)
    compress.all_reduce(b, None, codec, resumed)
    assert torch.equal(a, b) and torch.equal(state.worker, resumed.worker) and torch.equal(state.server, resumed.server)
    with pytest.raises(ArgumentError, match="belongs to one tensor"):
        compress.all_reduce(make(n + 1, 0), None, codec, state)
    with pytest.raises(ArgumentError, match="'server'"):
        resumed.load_state_dict({**state.state_dict(), "server": torch.zeros(3)})


def odd_cases(rank, world):
    codec = Int8Blocks()
    with pytest.raises(ArgumentError, match="sum"):
        compress.all_reduce(torch.zeros(4), None, codec, op="max")
    with pytest.raises(ArgumentError, match="need"):
        compress.all_gather(torch.zeros(5), torch.zeros(4), None, codec)
    with pytest.raises(ArgumentError, match="need"):
        compress.reduce_scatter(torch.zeros(4), torch.zeros(5), None, codec)
    with pytest.raises(ArgumentError, match="contiguous"):
        compress.all_reduce(torch.zeros(4, 4).t()[1:], None, codec)
    assert compress.all_reduce(torch.zeros(0), None, codec) == 0
    x = make(300, 1).view(3, 100)
    compress.all_reduce(x, None, codec)
    assert x.shape == (3, 100)
    for bad in ("nan", "inf"):  # on one rank only: all see it, and the errors stay finite
        state, x = ErrorFeedback(), make(5000, rank)
        if rank == 1:
            x[17] = float(bad)
        compress.all_reduce(x, None, codec, state)
        assert not x[17].isfinite() and x[4000:].isfinite().all()
        assert state.worker.isfinite().all() and state.server.isfinite().all()
        same_on_all(x.nan_to_num(7.0), "all_reduce with " + bad)
    alone = dist.new_group([rank], use_local_synchronization=True) if dist.get_backend() == "gloo" else None
    if alone is not None:  # one rank: nothing is sent and nothing is lost
        x = make(100, 3)
        want, out = x.clone(), torch.empty(100)
        assert compress.all_reduce(x, alone, codec) == compress.all_gather(out, x, alone, codec) == 0
        assert torch.equal(out, want) and compress.reduce_scatter(out.zero_(), x, alone, codec) == 0
        assert torch.equal(x, want) and torch.equal(out, want)


def collectives(rank, world, codec):
    gathers(rank, world, codec)
    reductions(rank, world, codec)
    fed_sums(rank, world, codec)


@pytest.mark.parametrize(
    "backend, codec",
    [
        ("gloo", Int4Blocks()),
        *(pytest.param("gloo", codec, marks=pytest.mark.full) for codec in (Int8Blocks(256), OneBit(), TopK(0.05))),
        *(("deepc", codec) for codec in (Int8Blocks(256), Int4Blocks(), OneBit(), TopK(0.05))),
    ],
    ids=str,
)
def test_collectives(backend, codec):
    run_ranks(collectives, 2, args=(codec,), backend=backend)


def test_collectives_of_three_ranks():
    run_ranks(collectives, 3, args=(Int4Blocks(64),))


@pytest.mark.parametrize("backend", ["gloo", "deepc"])
def test_odd_cases(backend):
    run_ranks(odd_cases, 2, backend=backend)
