"""deepc.compress.OneBitAllReduce: the two-step compressed all-reduce of 1-bit Adam against a NumPy transcription of its
formulas, on ranks and on simulated nodes; its state, its bytes, its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepc.comm.internode.compressed import carrier_of, takes
from deepc.compress import OneBitAllReduce
from deepc.errors import ArgumentError, MismatchError
from ranks import on_nodes, placed, run_ranks

BLOCK, STEPS = 64, 4


def make(n: int, step: int, rank: int) -> np.ndarray:
    return np.random.default_rng((step, rank)).standard_normal(n).astype(np.float32)


# ---- the paper's algorithm, on the workers' vectors in one process ---------------------------------------------------
def compressed(v: np.ndarray) -> np.ndarray:
    """Per block the sign times the mean magnitude. fp32 values, scales summed in fp64."""
    out = np.empty_like(v)
    for at in range(0, v.size, BLOCK):
        block = v[at : at + BLOCK]
        scale = np.float32(np.abs(block.astype(np.float64)).mean())
        out[at : at + BLOCK] = np.where(np.signbit(block), -scale, scale)
    return out


class Paper:
    """Worker errors [workers, n] and server errors [n]; x is cut into chunks, columns and slices as the docs say."""

    def __init__(self, n: int, workers: int, columns: int, chunk: int, holes: np.ndarray | None) -> None:
        self.worker, self.server = np.zeros((workers, n), np.float32), np.zeros(n, np.float32)
        self.workers, self.holes, self.spans = workers, holes, []
        for at in range(0, n, chunk):
            end = min(n, at + chunk)
            size = -(-(end - at) // (columns * workers * 64)) * 64
            self.spans += [slice(b, min(end, b + size)) for b in range(at, end, size)]

    def __call__(self, xs: np.ndarray) -> np.ndarray:
        """xs [workers, n]"""
        out = np.empty(xs.shape[1], np.float32)
        for s in self.spans:
            hole = slice(0, 0) if self.holes is None else self.holes[s]
            total = np.zeros(s.stop - s.start, np.float32)
            for i in range(self.workers):
                v = xs[i, s] + self.worker[i, s]
                v[hole] = 0
                sent = compressed(v)
                self.worker[i, s] = v - sent
                self.worker[i, s][hole] = 0
                total += sent
            u = total * np.float32(1.0 / self.workers)
            u[hole] = 0
            u = u + self.server[s]
            out[s] = compressed(u)
            self.server[s] = u - out[s]
            self.server[s][hole] = 0
            out[s][hole] = 0
        return out


# ---- ranks -----------------------------------------------------------------------------------------------------------
def same_on_all(x: torch.Tensor) -> None:
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    assert all(torch.equal(rows[0].view(torch.uint8), r.view(torch.uint8)) for r in rows)


def follows_the_paper(rank, world, nodes, hierarchical):
    """Every element of STEPS calls equal to the transcription, in 1, few and uneven chunks and slices; nothing is
    lost."""
    with on_nodes(rank, world, nodes):
        for n, chunk, masked in ((1, 128, False), (65, 128, False), (1000, 128 * 3, True), (4096, 1024, False)):
            holes = np.arange(n) % 5 == 2 if masked else None
            mask = None if holes is None else torch.from_numpy(~holes).float()
            wire = OneBitAllReduce(n, block=BLOCK, chunk=chunk, hierarchical=hierarchical, mask=mask)
            workers, per = (nodes, world // nodes) if hierarchical else (world, 1)
            assert wire.workers == workers
            paper = Paper(n, workers, per, chunk, holes)
            given, got = np.zeros(n), np.zeros(n)
            for step in range(STEPS):
                xs = np.stack([make(n, step, r) for r in range(world)])
                # a node's exact average, added in rank order
                parts = np.add.accumulate(xs.reshape(workers, per, n), axis=1)[:, -1] * np.float32(1 / per)
                x = torch.from_numpy(xs[rank].copy())
                sent = wire.all_reduce_(x)
                np.testing.assert_array_equal(x.numpy(), paper(parts))
                same_on_all(x)
                given, got = given + xs.mean(0, dtype=np.float64), got + x.numpy()
            owed = paper.worker.mean(0) + paper.server
            np.testing.assert_allclose(_owed(wire, n), owed, rtol=1e-6, atol=1e-7)
            keep = ~holes if masked else slice(None)
            np.testing.assert_allclose((got + owed)[keep], given[keep], rtol=0, atol=1e-5)
            assert sent * STEPS == wire.sent_bytes and (workers == 1) == (sent == 0)
            _resumes(wire, n, rank)


def _owed(wire: OneBitAllReduce, n: int) -> np.ndarray:
    """What the average lacks, by the errors of all ranks and their places."""
    out, state = torch.zeros(2, n), wire.state_dict()
    for row, (name, spans), share in zip(out, wire.owned().items(), (1 / wire.workers, 1.0)):
        parts = state[name].split([end - begin for begin, end in spans])
        for (begin, end), part in zip(spans, parts):
            row[begin:end] = part * share
    dist.all_reduce(out)
    return (out[0] + out[1]).numpy()


def _resumes(wire: OneBitAllReduce, n: int, rank: int) -> None:
    again = OneBitAllReduce(n, block=BLOCK, chunk=wire.chunk, hierarchical=wire.hierarchical, mask=_mask_of(wire))
    again.load_state_dict(wire.state_dict())
    a, b = (torch.from_numpy(make(n, 99, rank)) for _ in "ab")
    wire.all_reduce_(a)
    again.all_reduce_(b)
    assert torch.equal(a, b)
    left, right = wire.state_dict(), again.state_dict()
    assert left["key"] == right["key"] and all(torch.equal(left[k], right[k]) for k in ("worker", "server"))


def _mask_of(wire: OneBitAllReduce) -> torch.Tensor | None:
    return None if wire._holes is None else ~wire._holes


@pytest.mark.parametrize(
    "world, nodes, hierarchical",
    [
        (4, 2, True),
        (2, 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((1, 1, True), (1, 1, False), (2, 1, True), (2, 2, True), (4, 1, False), (4, 4, True))
        ),
    ],
)
def test_every_element_follows_the_paper(world, nodes, hierarchical):
    run_ranks(follows_the_paper, world, args=(nodes, hierarchical))


def test_one_process_without_a_group_follows_the_paper():
    wire, paper = OneBitAllReduce(1000, block=BLOCK, chunk=192), Paper(1000, 1, 1, 192, None)
    for step in range(STEPS):
        x = torch.from_numpy(make(1000, step, 0))
        assert wire.all_reduce_(x) == 0
        np.testing.assert_array_equal(x.numpy(), paper(make(1000, step, 0)[None]))


def uneven_nodes_and_kinds(rank, world):
    """Three ranks and one; bf16; a NaN; bad input, on one rank or on all."""
    import os

    os.environ["DEEPC_NODE_ID"] = "large" if rank < 3 else "small"
    try:
        n = 3000
        wire, paper = OneBitAllReduce(n, block=BLOCK, chunk=1024), Paper(n, 2, 1, 1024, None)
        for step in range(STEPS):
            xs = np.stack([make(n, step, r) for r in range(world)])
            parts = np.stack([(xs[0] + xs[1] + xs[2]) * np.float32(0.5), xs[3] * np.float32(0.5)])
            x = torch.from_numpy(xs[rank].copy())
            wire.all_reduce_(x)
            np.testing.assert_array_equal(x.numpy(), paper(parts))
        low = OneBitAllReduce(n, block=BLOCK, chunk=1024)
        wide = OneBitAllReduce(n, block=BLOCK, chunk=1024)
        for step in range(STEPS):
            x = torch.from_numpy(make(n, step, rank)).bfloat16()
            y = x.float()
            low.all_reduce_(x)
            wide.all_reduce_(y)
            assert torch.equal(x, y.bfloat16())
            same_on_all(x)
        x = torch.from_numpy(make(n, 7, rank))
        if rank == 1:
            x[70] = float("inf")
        wide.all_reduce_(x)
        assert x[64:128].isnan().all() and x[1024:].isfinite().all()
        assert all(wide.state_dict()[k].isfinite().all() for k in ("worker", "server"))
        with pytest.raises(MismatchError, match=r"numel by rank: \[5, 6, 7, 8\]"):
            OneBitAllReduce(5 + rank)
        with pytest.raises(MismatchError, match="mask differs"):
            OneBitAllReduce(5, mask=torch.arange(5) > rank)
        for bad in (torch.zeros(n + 1), torch.zeros(n).double(), torch.zeros(n, 2)[:, 0], [0.0] * n):
            with pytest.raises(ArgumentError, match="1-bit all_reduce of"):
                wire.all_reduce_(bad)
        for options in ({"block": 100}, {"chunk": 100}, {"mask": torch.ones(3)}):
            with pytest.raises(ArgumentError):
                OneBitAllReduce(n, **options)
        state = wire.state_dict()
        with pytest.raises(ArgumentError, match="workers 2 .here 4"):
            OneBitAllReduce(n, block=BLOCK, chunk=1024, hierarchical=False).load_state_dict(state)
        with pytest.raises(ArgumentError, match="'server' is"):
            wire.load_state_dict({**state, "server": torch.zeros(1)})
    finally:
        del os.environ["DEEPC_NODE_ID"]


def test_uneven_nodes_dtypes_and_bad_input():
    run_ranks(uneven_nodes_and_kinds, 4)


# ---- beside a GPU: what is carried lies apart from the working buffers -----------------------------------------------
class Apart(OneBitAllReduce):
    """On the CPU, with the copies that a GPU needs."""

    _copies = True


def _both(n, rank, dtype, **options):
    """Three calls of both kinds: equal bits of x and of errors, and as many bytes."""
    one, other = OneBitAllReduce(n, **options), Apart(n, **options)
    for step in range(3):
        if step == 2:  # a state of one goes into the other
            other.load_state_dict(one.state_dict())
        x = torch.from_numpy(make(n, step, rank)).to(dtype)
        y = x.clone()
        assert one.all_reduce_(x) == other.all_reduce_(y)
        assert torch.equal(x, y)
        assert all(torch.equal(e, other.errors[k]) for k, e in one.errors.items())
    assert torch.equal(one.owed(), other.owed())
    return other


def staged(rank, world, nodes, hierarchical):
    with placed(rank, nodes):
        for n, chunk in ((1, 128), (65, 128), (1000, 384), (4096, 1024)):
            for dtype in (torch.float32, torch.bfloat16):
                mask = torch.arange(n) % 5 != 2
                _both(n, rank, dtype, block=BLOCK, chunk=chunk, hierarchical=hierarchical)
                wire = _both(n, rank, dtype, block=BLOCK, chunk=chunk, hierarchical=hierarchical, mask=mask)
        names = {what for what, host, _ in wire._buffers if host}
        assert {"send", "got", "mine", "rows"} <= names or not wire._carries
        assert ("wide" in names) == (hierarchical and len(set(nodes)) < world)


@pytest.mark.parametrize(
    "nodes, hierarchical",
    [
        ("00", False),
        ("01", True),
        ("0011", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("000", False), ("00", True), ("001", True), ("012", True))
        ),
    ],
)
def test_copies_beside_a_gpu_change_no_bit(nodes, hierarchical):
    run_ranks(staged, len(nodes), args=(nodes, hierarchical))


def test_one_process_copies_nothing():
    assert not [key for key in _both(1000, 0, torch.float32, block=BLOCK, chunk=192)._buffers if key[1]]


def test_what_a_group_takes_goes_by_its_backends(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    for backends, carrier, on_gpus in (
        ("cuda:nccl", gpu, True),
        ("cpu:gloo,cuda:nccl", cpu, True),
        ("cpu:deepc,cuda:deepc", cpu, True),
        ("cpu:gloo", cpu, False),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, said=backends: said)
        assert carrier_of(None, gpu) == carrier and takes(None, gpu) == on_gpus


def test_tensors_on_another_device_are_refused():
    wire = OneBitAllReduce(3)
    with pytest.raises(ArgumentError, match=r"on meta; expected 3 elements .* on cpu"):
        wire.all_reduce_(torch.zeros(3, device="meta"))
    with pytest.raises(ArgumentError, match="on meta"):
        OneBitAllReduce(3, device="meta")


# ---- DDP -------------------------------------------------------------------------------------------------------------
def hooked(rank, world, nodes):
    """The hierarchical DDP hook on two buckets that DDP rebuilds: the sum of what was applied and of what is owed is
    the sum of the gradients; a state goes into a new model's hook and back."""
    from deepc import ddp_hooks
    from deepc.compress import Int8Blocks, OneBit

    with on_nodes(rank, world, nodes):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(300, 900), torch.nn.Tanh(), torch.nn.Linear(900, 300))
        exact = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        applied = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        state = ddp_hooks.register(ddp, OneBit(256), hierarchical=True)
        for step in range(5):
            x = torch.from_numpy(make(8 * 300, step, rank)).view(8, 300)
            for total, g in zip(exact, torch.autograd.grad(model(x).square().mean(), list(model.parameters()))):
                g = g.double()
                dist.all_reduce(g)
                total += g / world
            ddp(x).square().mean().backward()
            for total, p in zip(applied, ddp.parameters()):
                total += p.grad.double()
                same_on_all(p.grad)
            ddp.zero_grad()
        saved = state.state_dict(ddp)
        assert len(saved["errors"]) == 4 and (state.sent_bytes > 0) == (nodes > 1)
        for (name, _), want, got in zip(model.named_parameters(), exact, applied):
            owed = saved["errors"][name].double()
            dist.all_reduce(owed)
            assert got.abs().max() > 0
            torch.testing.assert_close(got + owed / world, want, rtol=0, atol=1e-6 * (1 + want.abs().max().item()))
        other = ddp_hooks.HookState(OneBit(256), hierarchical=True)
        other.load_state_dict(saved, ddp)
        again = other.state_dict(ddp)
        assert all(torch.equal(again["errors"][n], e) for n, e in saved["errors"].items())
        with pytest.raises(ArgumentError, match="hierarchical"):
            ddp_hooks.HookState(Int8Blocks(), hierarchical=True)


def test_the_hierarchical_ddp_hook_loses_nothing():
    run_ranks(hooked, 4, args=(2,))
