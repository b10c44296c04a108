"""Losses of transformers in 16 bits without logits in fp32 (nn/aten/upcast): transformers' own bits and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepc.nn.aten import cross_entropy, upcast
from test_cross_entropy import CLASSES, installed, small  # noqa: F401  # fixtures

transformers = pytest.importorskip("transformers")
from transformers.loss import loss_utils
from transformers.modeling_utils import PreTrainedModel

BATCH, TOKENS = 2, 21
IGNORED = -100  # among the labels


@pytest.fixture(scope="module", autouse=True)
def put_off(request: pytest.FixtureRequest) -> Iterator[None]:
    request.getfixturevalue("installed")
    upcast.install()
    yield
    upcast.uninstall()


class Model(torch.nn.Module):
    """What PreTrainedModel does to find its loss."""

    loss_type: str | None = "ForCausalLM"
    loss_function = property(lambda self: PreTrainedModel.loss_function.fget(self))


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, TOKENS, CLASSES, generator=g).mul_(3).to(dtype)
    labels = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=g)
    labels[0, 3:9] = IGNORED
    return x.requires_grad_(), labels


def both(kind: str, dtype: torch.dtype, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(loss, gradient), with deepc and as transformers has it."""
    model = Model()
    model.loss_type = kind
    out = []
    for loss in (model.loss_function, loss_utils.LOSS_MAPPING[kind]):
        x, labels = inputs(dtype)
        got = loss(logits=x * 1, labels=labels, vocab_size=CLASSES, **options)
        (got * 7).backward()
        out.append((got.detach(), x.grad))
    return out


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("kind", ("ForCausalLM", "ForMaskedLM"))
@pytest.mark.parametrize("items", (None, 17, torch.tensor(19)))
def test_bits_are_those_of_transformers(kind: str, dtype: torch.dtype, items: Any) -> None:
    before = cross_entropy.calls
    (loss, grad), (wanted, wanted_grad) = both(kind, dtype, num_items_in_batch=items)
    assert cross_entropy.calls == before + 2
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    assert torch.equal(loss, wanted) and torch.equal(grad, wanted_grad)


@pytest.mark.parametrize("options", ({"shift_labels": True}, {"ignore_index": 5}))
def test_options_are_those_of_transformers(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "shift_labels" in options:
        options = {"shift_labels": inputs(torch.bfloat16)[1].flip(1)}
    else:
        monkeypatch.setitem(globals(), "IGNORED", options["ignore_index"])
    (loss, grad), (wanted, wanted_grad) = both("ForCausalLM", torch.bfloat16, **options)
    assert torch.equal(loss, wanted) and torch.equal(grad, wanted_grad)


def test_autocast_and_no_grad_and_inference() -> None:
    loss = Model().loss_function
    x, labels = inputs(torch.bfloat16)
    wanted = loss_utils.ForCausalLMLoss(x, labels, CLASSES).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(x, labels, CLASSES), wanted)
    with torch.no_grad():
        assert torch.equal(loss(x, labels, CLASSES), wanted)
    with torch.inference_mode():
        assert torch.equal(loss(x, labels, CLASSES), wanted)


class Wide(torch.overrides.TorchFunctionMode):
    """How often logits are cast to fp32 as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.casts += func is torch.Tensor.float and out.numel() == BATCH * TOKENS * CLASSES
        return out


def test_logits_are_never_cast_as_a_whole_and_their_gradient_takes_their_place() -> None:
    x, labels = inputs(torch.bfloat16)
    logits = x * 1
    at = logits.data_ptr()
    seen: list[int] = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    with Wide() as wide:
        loss = Model().loss_function(logits, labels, CLASSES)
    del logits
    loss.backward()
    assert wide.casts == 0
    assert seen == [at]


def test_logits_that_are_kept_stay() -> None:
    x, labels = inputs(torch.bfloat16)
    logits = x * 1
    Model().loss_function(logits, labels, CLASSES).backward()
    assert torch.equal(logits, x)
    x, labels = inputs(torch.bfloat16)
    logits = torch.tanh(x)  # whose own backward needs them
    loss = Model().loss_function(logits, labels, CLASSES)
    del logits
    loss.backward()
    plain, _ = inputs(torch.bfloat16)
    loss_utils.ForCausalLMLoss(torch.tanh(plain), labels, CLASSES).backward()
    assert torch.equal(x.grad, plain.grad)


def test_a_loss_that_computes_with_the_cast_logits_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        logits = logits.float()
        assert logits.shape == (BATCH, TOKENS, CLASSES) and logits.dtype == torch.float32
        logits = logits.view(-1, vocab_size)
        cross = F.cross_entropy(logits, labels.view(-1), label_smoothing=0.1)
        z = torch.logsumexp(logits, 1).pow(2).mean() + (logits[:, :3] / 3).sum() + F.softmax(input=logits, dim=1)[0, 0]
        return cross + 1e-3 * z + F.cross_entropy(input=logits / 3, target=labels.view(-1))

    x, labels = inputs(torch.bfloat16)
    y, _ = inputs(torch.bfloat16)
    loss, wanted = upcast._put_off(odd)(x, labels, CLASSES), odd(y, labels, CLASSES)
    loss.backward()
    wanted.backward()
    assert torch.equal(loss, wanted)
    torch.testing.assert_close(x.grad, y.grad, rtol=2**-7, atol=1e-6)  # added up in 16 bits


def test_second_derivatives() -> None:
    def run(loss: Callable[..., Any]) -> torch.Tensor:
        x, labels = inputs(torch.bfloat16)
        (grad,) = torch.autograd.grad(loss(x * 1, labels, CLASSES), x, create_graph=True)
        grad.float().pow(2).sum().backward()
        return x.grad

    torch.testing.assert_close(run(Model().loss_function), run(loss_utils.ForCausalLMLoss), rtol=0, atol=0)


def test_the_compiler_sees_what_transformers_has() -> None:
    x, labels = inputs(torch.bfloat16)
    compiled = torch.compile(Model().loss_function, backend="eager", fullgraph=True)
    loss = compiled(x, labels, CLASSES)
    assert torch.equal(loss, loss_utils.ForCausalLMLoss(x, labels, CLASSES))


def test_a_model_has_it_and_its_own_loss_stays() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=CLASSES, loss_type="ForCausalLM")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).bfloat16().eval()
    assert model.loss_function.__wrapped__ is loss_utils.ForCausalLMLoss
    _, labels = inputs(torch.bfloat16)
    before = cross_entropy.calls
    loss = model(input_ids=labels.clamp(0), labels=labels).loss
    assert cross_entropy.calls == before + 1
    loss.backward()
    got = model.transformer.wte.weight.grad.clone()
    model.zero_grad()
    model.loss_function = loss_utils.ForCausalLMLoss
    assert model.loss_function is loss_utils.ForCausalLMLoss
    wanted = model(input_ids=labels.clamp(0), labels=labels).loss
    wanted.backward()
    assert torch.equal(loss, wanted) and torch.equal(got, model.transformer.wte.weight.grad)
