"""cross_entropy by chunks of rows (nn/aten/cross_entropy): torch's bits, its errors, and how many arrays there are."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepc.core.foreign import patches
from deepc.errors import ArgumentError
from deepc.nn.aten import cross_entropy
from programs import run_python
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

ROWS, CLASSES = 41, 1009


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as m:
        m.delenv("DEEPC_CHUNKED_LOSS", raising=False)
        cross_entropy.install()
    yield
    cross_entropy._library._destroy()  # no other test's loss is made so
    cross_entropy._library = None
    patches.undone("cross-entropy")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 8 * CLASSES * 4)
    monkeypatch.setattr(cross_entropy, "LEAST_BYTES", 1)


def plainly(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `run` gives with torch's own kernel."""
    with monkeypatch.context() as m:
        m.setattr(cross_entropy, "LEAST_BYTES", 1 << 60)
        return run()


@contextlib.contextmanager
def taken(times: int) -> Iterator[None]:
    before = cross_entropy.calls
    yield
    assert cross_entropy.calls - before == times


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_profile_counts_what_torchs_own_loss_costs(
    dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepc.profile import get_model_profile

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(8, CLASSES, dtype=dtype)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x), y, reduction=reduction) + 1.0

    batch = torch.ones(ROWS, 8, dtype=dtype), torch.arange(ROWS)

    def profile() -> Any:
        return get_model_profile(Model(), args=batch, print_profile=False, as_string=False, warm_up=0)

    with taken(2):  # one for the count, one for the time
        got = profile()
    assert got == plainly(profile, monkeypatch)


def alike(got: Any, wanted: Any) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()


def of(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, CLASSES, generator=generator).mul_(4).to(dtype)
    return logits.requires_grad_(), torch.randint(1, CLASSES, (ROWS,), generator=generator)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("threads", (1, 3))
def test_bits_are_torchs(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = of(dtype)

    def run(reduction: str, ignored: int, few: bool) -> list[torch.Tensor]:
        wanted = labels.clone()
        wanted[:: 5 if few else 1] = ignored
        loss = F.cross_entropy(logits, wanted, reduction=reduction, ignore_index=ignored)
        factors = torch.linspace(-2, 3, loss.numel(), dtype=dtype).view_as(loss)
        first = torch.autograd.grad(loss, logits, factors, retain_graph=True)
        second = torch.autograd.grad(loss, logits, factors)
        return [loss, *first, *second]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for case in itertools.product(("mean", "sum", "none"), (-100, 0, 7), (True, False)):
            with taken(1):
                got = run(*case)
            alike(got, plainly(lambda case=case: run(*case), monkeypatch))
    finally:
        torch.set_num_threads(before)


def test_what_is_not_finite_and_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = of()
    with torch.no_grad():
        logits[3, 4], logits[5, 6], logits[7] = float("nan"), float("inf"), float("-inf")
    columns = of()[0].detach().t().contiguous().t().requires_grad_()

    def run() -> list[torch.Tensor]:
        out = []
        for x in (logits, columns):
            loss = F.cross_entropy(x, labels, reduction="none")
            out += [loss, *torch.autograd.grad(loss.sum(), x)]
        return out

    with taken(2):
        got = run()
    alike(got, plainly(run, monkeypatch))


def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = of()

    def run() -> Any:
        (grad,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits, create_graph=True)
        return grad, *torch.autograd.grad(grad.pow(2).sum(), logits)

    with taken(1):
        got = run()
    alike(got, plainly(run, monkeypatch))


def test_other_losses_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = of()
    soft = torch.softmax(logits.detach(), 1)
    runs: list[Callable[[], torch.Tensor]] = [
        lambda: F.cross_entropy(logits, labels, weight=torch.arange(1.0, CLASSES + 1)),
        lambda: F.cross_entropy(logits, labels, label_smoothing=0.1),
        lambda: F.cross_entropy(logits, soft),
        lambda: F.cross_entropy(logits.view(1, ROWS, CLASSES).mT, labels[None]),
        lambda: F.cross_entropy(logits[0], labels[0]),
        lambda: torch.func.grad(lambda x: F.cross_entropy(x, labels))(logits.detach()),
        lambda: torch.func.vmap(lambda x, y: F.cross_entropy(x[None], y[None]))(logits, labels),
    ]
    for run in runs:
        with taken(0):
            got = run()
        alike([got], [plainly(run, monkeypatch)])


def test_forward_mode_and_the_compiler_have_torchs() -> None:
    logits, labels = of()
    with taken(0), forward_ad.dual_level():
        dual = forward_ad.make_dual(logits.detach(), logits.detach())
        tangent = forward_ad.unpack_dual(F.cross_entropy(dual, labels)).tangent
    (grad,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    torch.testing.assert_close(tangent, (grad * logits).sum())
    compiled = torch.compile(lambda x, y: F.cross_entropy(x, y), fullgraph=True, backend="aot_eager")
    with taken(0):
        alike(torch.autograd.grad(compiled(logits, labels), logits), [grad])


@pytest.mark.parametrize("label", (-1, CLASSES))
def test_a_label_that_is_no_class_is_torchs_error(label: int) -> None:
    logits, labels = of()
    labels[3] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        F.cross_entropy(logits, labels)


def test_autocast_has_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = of(torch.bfloat16)

    def run() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(logits, labels)
        return loss, *torch.autograd.grad(loss, logits)

    with taken(1):
        got = run()
    assert got[0].dtype == torch.float32
    alike(got, plainly(run, monkeypatch))


def test_changed_logits_are_told() -> None:
    logits, labels = of()
    changed = logits * 1
    loss = F.cross_entropy(changed, labels)
    changed.mul_(2)
    with pytest.raises(ArgumentError, match="changed in place after it.*DEEPC_CHUNKED_LOSS=0"):
        loss.backward()


class Large(TorchDispatchMode):
    """How many arrays of the logits' size are made."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in (*args, *(kwargs or {}).values()) if torch.is_tensor(a)}
        for t in tree_leaves(out):
            if torch.is_tensor(t) and t.numel() == ROWS * CLASSES and t.untyped_storage().data_ptr() not in given:
                self.made += 1
        return out


def arrays(
    hold: Callable[[torch.Tensor], Any], view: bool = True, keep: bool = False
) -> tuple[int, list[torch.Tensor]]:
    """How many arrays of the logits' size a loss and its backward make while `hold(logits)` is kept; the gradient."""
    inputs, labels = of()
    with Large() as mode:
        logits = inputs * 1
        if view:
            logits = logits.view(1, ROWS, CLASSES).view(ROWS, CLASSES)
        held = hold(logits)
        loss = F.cross_entropy(logits, labels)
        del logits
        loss.backward(retain_graph=keep)
        first = inputs.grad.clone()
        if keep:
            loss.backward()
    if keep:
        torch.testing.assert_close(inputs.grad, 2 * first, rtol=0, atol=0)
    if torch.is_tensor(held) and held.numel() == inputs.numel():
        torch.testing.assert_close(held.view_as(inputs), inputs, rtol=0, atol=0)
    return mode.made, [first]


@pytest.mark.parametrize("view", (False, True))
def test_gradients_lie_where_logits_were_that_nothing_refers_to(view: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = arrays(lambda x: None, view)
    plain = plainly(lambda: arrays(lambda x: None, view), monkeypatch)
    assert plain[0] - before[0] == 3  # the log-probabilities, their gradient and the logits'
    alike(before[1], plain[1])
    holds: dict[str, Callable[[torch.Tensor], Any]] = {
        "the logits": lambda x: x,
        "what they are a view of": lambda x: x._base if view else x,
        "another view": lambda x: x.view(-1),
        "without a graph": lambda x: x.detach(),
        "in numpy": lambda x: x.detach().numpy(),
        "their memory": lambda x: x.untyped_storage(),
        "another tensor of it": lambda x: torch.empty(0).set_(x.detach()),
        "a part": lambda x: x[3:5],
        "what another gradient needs": lambda x: x.logsumexp(1),
        "a list": lambda x: [[x]],
    }
    for name, hold in holds.items():
        made, gradients = arrays(hold, view)
        assert made == before[0] + 1, name
        alike(gradients, plain[1])
    made, gradients = arrays(lambda x: None, view, keep=True)
    assert (
        made == before[0] + 2
    )  # of the first backward alone, since the last keeps no graph; and of `inputs * 1` again
    alike(gradients, plain[1])


def test_two_losses_of_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        inputs, labels = of()
        logits = inputs * 1
        losses = [
            F.cross_entropy(logits, labels),
            logits.logsumexp(1).pow(2).mean(),
            F.cross_entropy(logits, labels.flip(0)),
        ]
        del logits
        sum(losses).backward()
        return [*losses, inputs.grad]

    with taken(2):
        got = run()
    alike(got, plainly(run, monkeypatch))


@pytest.mark.parametrize("reentrant", (False, True))
def test_recomputed_logits(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        inputs, labels = of()
        loss = checkpoint(lambda x: F.cross_entropy(x * 2, labels), inputs, use_reentrant=reentrant)
        loss.backward()
        return [loss, inputs.grad]

    alike(run(), plainly(run, monkeypatch))


def test_saved_tensors_hooks_keep_what_they_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[torch.Tensor] = []

    def run() -> list[torch.Tensor]:
        inputs, labels = of()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t) or len(packed) - 1, packed.__getitem__
        ):
            loss = F.cross_entropy(inputs * 1, labels)
        before = [t.clone() for t in packed]
        loss.backward()
        alike(packed, before)
        return [loss, inputs.grad]

    alike(run(), plainly(run, monkeypatch))


PROGRAM = """
import deepc, torch
from deepc.nn.aten import cross_entropy
from deepc.core.foreign import patches
config = {"train_batch_size": 33, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
engine = deepc.initialize(model=torch.nn.Linear(16, 1 << 17), config=config)[0]
x, y = torch.randn(33, 16), torch.arange(33)
engine.backward(torch.nn.functional.cross_entropy(engine(x), y))
engine.step()
print(cross_entropy.calls, any(p.name == "cross-entropy" for p in patches.active()))
"""


@pytest.mark.parametrize("switch, says", (("", "1 True"), ("0", "0 False")))
def test_an_engine_on_a_cpu_has_it_but_where_it_is_switched_off(switch: str, says: str) -> None:
    done = run_python("-c", PROGRAM, env={**os.environ, "DEEPC_CHUNKED_LOSS": switch})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == says
