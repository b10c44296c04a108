"""torch.ops.deepc.* on a CUDA device against the same operators on the CPU: every element has equal bits, NaN
included; attention's to rounding."""

from __future__ import annotations

import copy
import itertools
import math

import deepc
import pytest
import torch
from deepc.optim.codecs import OneBit, TopK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a CUDA build of torch"),
]

DEVICE = "cuda"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 1023, 4095, 4096, 4097, 70_001, 1_000_003]
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-45,
    -1e-40,
    3.4e38,
    -3.4e38,
    65504.0,
    65519.9,
    65520.0,
    6e-8,
    2.9e-8,
    1.00390625,
]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SUM, AVG, MIN, MAX, PROD, BAND, BOR, BXOR = range(8)


def make(n: int, dtype: torch.dtype, seed: int = 0, special: bool = True, shift: int = 0) -> torch.Tensor:
    """[n] on the CPU: numbers of many sizes, some special ones; `shift` elements off the alignment of a fresh
    tensor."""
    gen = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (n + shift,), generator=gen, dtype=dtype)[shift:]
    x = torch.randn(n + shift, generator=gen) * torch.exp2(torch.randint(-20, 20, (n + shift,), generator=gen).float())
    if special and n:
        at = torch.randint(0, n + shift, (max(1, n // 16),), generator=gen)
        x[at] = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), at.shape, generator=gen)]
    return x.to(dtype)[shift:]


def to_gpu(x: torch.Tensor) -> torch.Tensor:
    """A copy on the device, as far off alignment as x is."""
    shift = x.storage_offset()
    return torch.empty(x.numel() + shift, dtype=x.dtype, device=DEVICE)[shift:].copy_(x)


def assert_same_bits(gpu: torch.Tensor, cpu: torch.Tensor, what: str = "") -> None:
    assert gpu.dtype == cpu.dtype and gpu.shape == cpu.shape
    bits = BITS[cpu.element_size()]
    got, want = gpu.detach().cpu().contiguous().view(bits), cpu.detach().contiguous().view(bits)
    wrong = (got != want).nonzero().flatten()
    if wrong.numel():
        i = int(wrong[0])
        pytest.fail(
            f"{what}: {wrong.numel()} of {cpu.numel()} elements differ; [{i}] is {gpu[i].item()!r} ({got[i].item():#x})"
            f" on the GPU and {cpu[i].item()!r} ({want[i].item():#x}) on the CPU"
        )


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_cast(source, target):
    for n, shift, scale in itertools.product(SIZES, (0, 1), (1.0, 0.37, -65536.0)):
        src, dst = make(n, source, n, shift=shift), torch.empty(n + shift, dtype=target)[shift:]
        gpu_dst = torch.empty(n + shift, dtype=target, device=DEVICE)[shift:]
        torch.ops.deepc.cast_tensor(src, dst, scale)
        torch.ops.deepc.cast_tensor(to_gpu(src), gpu_dst, scale)
        assert_same_bits(gpu_dst, dst, f"n={n} shift={shift} scale={scale}")


def test_every_half_and_bfloat16_value_survives_the_way_up_and_back():
    for dtype in (torch.bfloat16, torch.float16):
        src = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
        for target in FLOATS:
            dst, gpu_dst = torch.empty(src.shape, dtype=target), torch.empty(src.shape, dtype=target, device=DEVICE)
            torch.ops.deepc.cast_tensor(src, dst, 1.0)
            torch.ops.deepc.cast_tensor(to_gpu(src), gpu_dst, 1.0)
            assert_same_bits(gpu_dst, dst, f"{dtype} to {target}")


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_rounding_of_random_bit_patterns(target):
    gen = torch.Generator().manual_seed(3)
    src = torch.randint(-(2**31), 2**31 - 1, (2_000_003,), generator=gen, dtype=torch.int32).view(torch.float32)
    dst, gpu_dst = torch.empty(src.shape, dtype=target), torch.empty(src.shape, dtype=target, device=DEVICE)
    torch.ops.deepc.cast_tensor(src, dst, 1.0)
    torch.ops.deepc.cast_tensor(to_gpu(src), gpu_dst, 1.0)
    assert_same_bits(gpu_dst, dst)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scale(dtype):
    for n, shift in itertools.product(SIZES, (0, 3)):
        x = make(n, dtype, n, shift=shift)
        gpu = to_gpu(x)
        torch.ops.deepc.scale_tensor(gpu, 0.1)
        torch.ops.deepc.scale_tensor(x, 0.1)
        assert_same_bits(gpu, x, f"n={n} shift={shift}")


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_scaled(dtype):
    for n, shift in itertools.product(SIZES, (0, 1)):
        y, x = make(n, torch.float32, n, shift=shift), make(n, dtype, n + 1, shift=shift)
        gpu = to_gpu(y)
        torch.ops.deepc.add_scaled(gpu, to_gpu(x), -0.3)
        torch.ops.deepc.add_scaled(y, x, -0.3)
        assert_same_bits(gpu, y, f"n={n} shift={shift}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("special", [False, True])
def test_norm_squared(dtype, special):
    for n, shift in itertools.product([*SIZES, 8 * 4096, 9 * 4096 + 1], (0, 1)):
        x = make(n, dtype, n, special=special, shift=shift)
        assert_same_bits(
            torch.ops.deepc.norm_squared(to_gpu(x)), torch.ops.deepc.norm_squared(x), f"n={n} shift={shift}"
        )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, *INTEGERS])
def test_copy(dtype):
    for n, shift in itertools.product(SIZES, (0, 1)):
        src = make(n, dtype, n, shift=shift)
        dst = torch.zeros(n, dtype=dtype, device=DEVICE)
        torch.ops.deepc.copy_tensor(to_gpu(src), dst)
        assert_same_bits(dst, src, f"n={n} shift={shift}")


def reduce_cases():
    for dtype in [*FLOATS, torch.float64]:
        for op in (SUM, AVG, MIN, MAX, PROD):
            yield dtype, op
    for dtype in INTEGERS:
        for op in (SUM, MIN, MAX, PROD, BAND, BOR, BXOR):
            yield dtype, op


@pytest.mark.parametrize("dtype,op", list(reduce_cases()))
def test_reduce(dtype, op):
    for n, count, shift in itertools.product((0, 1, 5, 16, 17, 4097, 20_011), (1, 2, 8, 9), (0, 1)):
        srcs = [make(n, dtype, n + k, special=k > 0, shift=shift) for k in range(count)]
        dst, gpu_dst = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype, device=DEVICE)
        torch.ops.deepc.reduce_tensors(dst, srcs, op)
        torch.ops.deepc.reduce_tensors(gpu_dst, [to_gpu(s) for s in srcs], op)
        assert_same_bits(gpu_dst, dst, f"n={n} count={count} shift={shift}")


def test_reduce_in_place():
    a, b = make(5001, torch.bfloat16, 1), make(5001, torch.bfloat16, 2)
    gpu_a, gpu_b = to_gpu(a), to_gpu(b)
    torch.ops.deepc.reduce_tensors(a, [b, a], SUM)
    torch.ops.deepc.reduce_tensors(gpu_a, [gpu_b, gpu_a], SUM)
    assert_same_bits(gpu_a, a)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_accumulate(dtype, assign, norm):
    for n, count, shift in itertools.product((0, 1, 5, 4095, 4096, 4097, 100_003), (1, 3, 10), (0, 1)):
        srcs = [make(n, dtype, n + k, special=n % 2 == 1, shift=shift) for k in range(count)]
        acc = make(n, torch.float32, n + 50, special=False, shift=shift)
        partial = torch.zeros((n + 4095) // 4096 if norm else 0, dtype=torch.float64)
        gpu_acc, gpu_partial = to_gpu(acc), to_gpu(partial)
        torch.ops.deepc.accumulate_tensors(gpu_acc, [to_gpu(s) for s in srcs], assign, gpu_partial)
        torch.ops.deepc.accumulate_tensors(acc, srcs, assign, partial)
        assert_same_bits(gpu_acc, acc, f"n={n} count={count} shift={shift}")
        assert_same_bits(gpu_partial, partial, f"partials of n={n} count={count} shift={shift}")


def adamw_state(sizes, param, grad, state, lowp, amsgrad, special, shift):
    """The six lists of step_adamw on the CPU."""
    params = [make(n, param, 10 * n, special=special, shift=shift) for n in sizes]
    grads = [make(n, grad, 10 * n + 1, special=special, shift=shift) for n in sizes]
    avgs = [make(n, state, 10 * n + 2, special=False, shift=shift) for n in sizes]
    squares = [make(n, state, 10 * n + 3, special=False, shift=shift).abs_() for n in sizes]
    largest = [make(n, state, 10 * n + 4, special=False, shift=shift).abs_() for n in sizes] if amsgrad else []
    low = [make(n, lowp, 10 * n + 5, special=False, shift=shift) for n in sizes] if lowp else []
    return params, grads, avgs, squares, largest, low


@pytest.mark.parametrize(
    "param,grad,state,lowp",
    [
        (torch.float32, torch.float32, torch.float32, None),
        (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float16, torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, None),
        (torch.float16, torch.float32, torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adamw(param, grad, state, lowp, amsgrad, decoupled):
    sizes = [*SIZES[:-1], *(100 + k for k in range(60))]  # more tensors than one launch takes
    for special, shift in ((False, 0), (True, 0), (False, 1)):
        cpu = adamw_state(sizes, param, grad, state, lowp, amsgrad, special, shift)
        gpu = [[to_gpu(x) for x in tensors] for tensors in cpu]
        for step in (1, 2, 1000):
            scalars = (1e-3, 0.9, 0.999, 1e-8, 0.1, -0.125 if step == 2 else 1.0, step, decoupled)
            torch.ops.deepc.step_adamw(*cpu, *scalars)
            torch.ops.deepc.step_adamw(*gpu, *scalars)
        for name, mine, theirs in zip(
            ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "lowps"), gpu, cpu
        ):
            for k, (x, y) in enumerate(zip(mine, theirs)):
                assert_same_bits(x, y, f"{name}[{k}] of {sizes[k]} elements, special={special} shift={shift}")


def test_runs_on_the_current_stream():
    x = make(4_000_037, torch.float32, 1)
    gpu, want = to_gpu(x), x.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            torch.ops.deepc.scale_tensor(gpu, 0.9)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(20):
        torch.ops.deepc.scale_tensor(want, 0.9)
    assert_same_bits(gpu, want)


def test_in_a_cuda_graph():
    x = make(100_003, torch.float32, 1, special=False)
    gpu = to_gpu(x)
    torch.ops.deepc.scale_tensor(gpu, 1.0)  # loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.deepc.scale_tensor(gpu, 0.5)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(gpu, x * 0.125)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_arrays_of_a_device_that_is_not_current():
    x = make(70_001, torch.float32, 1)
    gpu = x.to("cuda:1")
    with torch.cuda.device(0):
        torch.ops.deepc.scale_tensor(gpu, 0.1)
        assert torch.cuda.current_device() == 0
    torch.ops.deepc.scale_tensor(x, 0.1)
    assert_same_bits(gpu, x)


def test_bad_input_is_refused_and_the_device_stays_usable():
    gpu, cpu = torch.ones(8, device=DEVICE), torch.ones(8)
    with pytest.raises(RuntimeError, match="device"):
        torch.ops.deepc.add_scaled(gpu, cpu, 1.0)
    with pytest.raises(RuntimeError, match="overlap"):
        torch.ops.deepc.copy_tensor(gpu[:6], gpu[2:])
    with pytest.raises(RuntimeError, match="average"):
        torch.ops.deepc.reduce_tensors(gpu.int(), [gpu.int()], AVG)
    with pytest.raises(RuntimeError, match="step"):
        torch.ops.deepc.step_adamw([gpu], [gpu], [gpu], [gpu], [], [], 1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 0, True)
    torch.ops.deepc.scale_tensor(gpu, 3.0)
    assert gpu.cpu().tolist() == [3.0] * 8


@pytest.mark.full
def test_more_elements_than_one_pass_of_the_largest_grid():
    n = 3 * (1 << 16) * 256 + 5  # three elements for each of the most threads that a grid has, unaligned
    x = torch.randn(n + 1, generator=torch.Generator().manual_seed(5))[1:]
    gpu = to_gpu(x)
    torch.ops.deepc.scale_tensor(gpu, 0.3)
    torch.ops.deepc.scale_tensor(x, 0.3)
    assert_same_bits(gpu, x)
    assert_same_bits(torch.ops.deepc.norm_squared(gpu), torch.ops.deepc.norm_squared(x))


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_blockwise_codecs(dtype, bits):
    ops = torch.ops.deepc
    for n, block, shift, fed in itertools.product(SIZES, (64, 2048), (0, 1), (False, True)):
        size, what = 4 * -(-n // block) + -(-n * bits // 32) * 4, f"n={n} block={block} shift={shift} fed={fed}"
        x = make(n, dtype, n, special=n % 2 == 1, shift=shift)
        error = make(n, torch.float32, n + 1, special=False, shift=shift) if fed else torch.empty(0)
        gpu_x, gpu_error = to_gpu(x), to_gpu(error)
        payload = torch.full((size,), 0xA5, dtype=torch.uint8)
        gpu_payload = to_gpu(payload)
        ops.quantize_blocks(x, payload, error, bits, block)
        ops.quantize_blocks(gpu_x, gpu_payload, gpu_error, bits, block)
        assert_same_bits(gpu_payload, payload, what)
        assert_same_bits(gpu_error, error, what)
        out, acc = torch.empty_like(x), make(n, torch.float32, n + 2, shift=shift)
        gpu_out, gpu_acc = torch.empty_like(gpu_x), to_gpu(acc)
        ops.dequantize_blocks(payload, out, bits, block)
        ops.dequantize_blocks(gpu_payload, gpu_out, bits, block)
        assert_same_bits(gpu_out, out, what)
        ops.add_dequantized(payload, acc, bits, block, -0.75)
        ops.add_dequantized(gpu_payload, gpu_acc, bits, block, -0.75)
        assert_same_bits(gpu_acc, acc, what)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_average_of_signs(count):
    codec = OneBit()
    for n, shift in itertools.product(SIZES[1:], (0, 1)):
        rows = torch.zeros(count, codec.nbytes(n) + 4 * (count - 1), dtype=torch.uint8)
        for k in range(count):
            codec.encode(rows[k, : codec.nbytes(n)], make(n, torch.float32, n + k, special=k == 1))
        error, payload = make(n, torch.float32, 99, special=False, shift=shift), torch.empty(codec.nbytes(n)).byte()
        gpu_error, gpu_payload = to_gpu(error), to_gpu(payload)
        codec.average(payload, rows, error)
        codec.average(gpu_payload, rows.to(DEVICE), gpu_error)
        assert_same_bits(gpu_payload, payload, f"n={n} count={count}")
        assert_same_bits(gpu_error, error, f"n={n} count={count}")


def test_rotation():
    sizes = [*range(41), 63, 64, 65, 127, 130, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 3 * 2048 + 1234, 1_000_003]
    for n, shift, special in itertools.product(sizes, (0, 1, 2), (False, True)):
        x = make(n, torch.float32, n, special, shift)
        gpu = to_gpu(x)
        torch.ops.deepc.rotate_blocks(x)
        torch.ops.deepc.rotate_blocks(gpu)
        assert_same_bits(gpu, x, f"n={n} shift={shift} special={special}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("special", [False, True])
def test_lamb(dtype, special):
    from deepc.optim import Lamb

    cpu = [torch.nn.Parameter(make(n, dtype, n, special=False, shift=n % 2)) for n in SIZES]
    gpu = [torch.nn.Parameter(to_gpu(p.detach())) for p in cpu]
    pairs = [Lamb(params, lr=0.01, weight_decay=0.1, eps=1e-6) for params in (cpu, gpu)]
    for step in range(5):
        for k, (p, q) in enumerate(zip(cpu, gpu)):
            p.grad = make(p.numel(), dtype, 100 * step + k, special=special and step == 3)
            q.grad = p.grad.to(DEVICE)
        for opt in pairs:
            opt.step()
        assert pairs[1].get_lamb_coeffs() == pairs[0].get_lamb_coeffs()
    for p, q in zip(cpu, gpu):
        assert_same_bits(q.detach(), p.detach(), f"parameter of {p.numel()} elements")
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(pairs[1].state[q][name], pairs[0].state[p][name], f"{name} of {p.numel()} elements")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("special", [False, True])
def test_adafactor(dtype, special):
    """Vectors, matrices of a few and of many rows, columns and blocks of threads, many matrices, and more tensors than
    one launch takes."""
    from deepc.optim import Adafactor

    shapes = [
        (5,),
        (9000,),
        (1, 1),
        (33, 65),
        (3, 1500),
        (200, 700),
        (9000, 2),
        (700, 3, 7),
        *((20, 30 + k) for k in range(20)),
    ]
    drawn = [make(math.prod(s), dtype, k, special=False).view(s) for k, s in enumerate(shapes)]
    cpu, gpu = ([torch.nn.Parameter(t.to(device)) for t in drawn] for device in ("cpu", DEVICE))
    pairs = [Adafactor(params, lr=0.05, weight_decay=0.1) for params in (cpu, gpu)]
    for step in range(5):
        formed_step(cpu, gpu, pairs, step, special and step == 3)
    for p, q in zip(cpu, gpu):
        assert_same_bits(q.detach().view(-1), p.detach().view(-1), f"parameter of shape {tuple(p.shape)}")
    assert_same_states(pairs[1], pairs[0])


# ---- states in a format ----------------------------------------------------------------------------------------------
FORMS = ["bf16", "int8", "int4"]
FORMED = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "maximize": True},
    "Lion": {"lr": 0.002, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.2},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.25},
    "Lamb": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6},
}
FORMED_SIZES = [*SIZES[:-1], *(100 + k for k in range(40))]  # more tensors than one launch takes


def formed_pair(kind: str, form: str, dtype: torch.dtype, sizes: list[int], shapes: tuple = ()) -> tuple:
    """(parameters on the CPU, the same on the device, the optimizers of both)."""
    cpu = [torch.nn.Parameter(make(n, dtype, n, special=False, shift=n % 2)) for n in sizes]
    cpu += [torch.nn.Parameter(make(a * b, dtype, a, special=False).view(a, b)) for a, b in shapes]
    gpu = [torch.nn.Parameter(to_gpu(p.detach().view(-1)).view(p.shape)) for p in cpu]
    made = [getattr(deepc.optim, kind)(q, state_dtype=form, **FORMED.get(kind, {})) for q in (cpu, gpu)]
    return cpu, gpu, made


def formed_step(cpu: list, gpu: list, optimizers: list, seed: int, special: bool = False) -> None:
    for k, (p, q) in enumerate(zip(cpu, gpu)):
        p.grad = make(p.numel(), p.dtype, 1000 * seed + k, special=special).view(p.shape)
        q.grad = p.grad.to(DEVICE)
    for opt in optimizers:
        opt.step()


def assert_same_states(gpu: torch.optim.Optimizer, cpu: torch.optim.Optimizer) -> None:
    pairs = zip((p for g in cpu.param_groups for p in g["params"]), (p for g in gpu.param_groups for p in g["params"]))
    for p, q in pairs:
        assert cpu.state[p].keys() == gpu.state[q].keys()
        for name, mine in cpu.state[p].items():
            if name != "step":
                assert gpu.state[q][name].is_cuda
                assert_same_bits(gpu.state[q][name].view(-1), mine.view(-1), f"{name} of {p.numel()} elements")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FORMED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_states_in_a_format(dtype, kind, form):
    cpu, gpu, pair = formed_pair(kind, form, dtype, FORMED_SIZES)
    for step in range(5):
        formed_step(cpu, gpu, pair, step, special=step == 3)
    for p, q in zip(cpu, gpu):
        assert_same_bits(q.detach(), p.detach(), f"parameter of {p.numel()} elements")
    assert_same_states(pair[1], pair[0])


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_muons_states_in_a_format(form):
    """Momentum follows from gradients alone; the matrices themselves are products of torch's."""
    cpu, gpu, pair = formed_pair("Muon", form, torch.float32, [5, 1000], shapes=((96, 130), (33, 7)))
    for step in range(4):
        formed_step(cpu, gpu, pair, step)
    assert_same_states(pair[1], pair[0])
    for p, q in zip(cpu[:2], gpu[:2]):
        assert_same_bits(q.detach(), p.detach(), f"parameter of {p.numel()} elements")


@pytest.mark.parametrize("form", [None, "fp32", *FORMS])
@pytest.mark.parametrize("kind", ["AdamW", "Lamb"])
def test_states_load_into_another_format(kind, form):
    cpu, gpu, pair = formed_pair(kind, "int8", torch.float32, [1, 1000, 4097])
    for step in range(3):
        formed_step(cpu, gpu, pair, step)
    others = [getattr(deepc.optim, kind)(params, state_dtype=form, **FORMED[kind]) for params in (cpu, gpu)]
    for other, opt in zip(others, pair):
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert_same_states(others[1], others[0])
    others[1].load_state_dict(copy.deepcopy(pair[0].state_dict()))  # from the CPU
    assert_same_states(others[1], others[0])
    formed_step(cpu, gpu, others, 9)
    assert_same_states(others[1], others[0])


def test_one_call_steps_tensors_of_many_rules_and_formats():
    from deepc.core.lib import C, StepArgs, call_cuda, check
    from deepc.core.ops import code
    from deepc.optim.states.formats import make_state

    names = [None, "bf16", "int8", "int4"]

    def arrays(k: int) -> list[torch.Tensor]:
        n, form = 37 * k % 700, names[k // 4 % 4]
        out = [make(n, torch.float32, k + s, special=False) for s in range(2)]
        for _ in range(2 if k % 4 == 0 else 1):
            out += list(make_state(n, form, 64 * (k % 5))) if k // 4 % 4 > 1 else []
            out += [torch.zeros(n, dtype=torch.bfloat16 if form else torch.float32)] if k // 4 % 4 <= 1 else []
        return [*out, torch.zeros(n, dtype=torch.bfloat16)]

    def aimed(all_of: list[list[torch.Tensor]]) -> object:
        args = StepArgs.array(len(all_of))
        for k, (a, of) in enumerate(zip(args, all_of)):
            a.param, a.grad, a.lowp, a.n = (*(of[i].data_ptr() for i in (0, 1, -1)), of[0].numel())
            states, step = of[2:-1], 2 if k // 4 % 4 > 1 else 1
            for s, at in enumerate(range(0, len(states), step)):
                a.state[s] = states[at].data_ptr()
                if step == 2:
                    a.scale[s] = states[at + 1].data_ptr()
            a.rule, a.format, a.first, a.step = k % 4, k // 4 % 4, 64 * (k % 5), 3
            a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, a.grad_scale = 0.01, 0.9, 0.99, 1e-8, 0.1, 1.0
            a.param_dtype = a.grad_dtype = code(torch.float32)
            a.state_dtype, a.lowp_dtype = code(torch.bfloat16 if a.format else torch.float32), code(torch.bfloat16)
        return args

    cpu = [arrays(k) for k in range(160)]
    gpu = [[to_gpu(x) for x in of] for of in cpu]
    check(C.dc_step(aimed(cpu), len(cpu)))
    call_cuda("dc_cuda_step", aimed(gpu), len(gpu), torch.cuda.current_stream().cuda_stream)
    for k, (mine, theirs) in enumerate(zip(gpu, cpu)):
        for i, (x, y) in enumerate(zip(mine, theirs)):
            assert_same_bits(x, y, f"array {i} of tensor {k}")


def test_states_that_stay_behind_are_an_error():
    p = torch.nn.Parameter(torch.zeros(8))
    opt = deepc.optim.AdamW([p], state_dtype="int8")
    p.grad = torch.ones(8)
    opt.step()
    p.data = p.data.to(DEVICE)
    p.grad = torch.ones(8, device=DEVICE)
    with pytest.raises(deepc.errors.ArgumentError, match="its states are on cpu"):
        opt.step()


def test_lamb_refuses_with_the_cuda_librarys_text():
    from deepc.core.lib import LambArgs, call_cuda

    args = LambArgs.array(1)
    with pytest.raises(deepc.errors.ArgumentError, match="step = 0"):
        call_cuda("dc_cuda_lamb_moments", args, 1, None)


def test_topk_has_no_cuda_kernels():
    codec, x = TopK(), torch.zeros(64, device=DEVICE)
    payload = torch.zeros(codec.nbytes(64), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(RuntimeError, match="top-k has CPU kernels only"):
        codec.encode(payload, x)


# ---- attention: the definition in fp64; the CPU drops the same pairs -------------------------------------------------
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attention_results(device: str, dtype: torch.dtype, sizes: tuple[int, ...], options: dict) -> list[torch.Tensor]:
    """The result, then the gradients of q, k, v and of a float bias; on the CPU."""
    batch, heads, kv, rows, keys, dim = sizes
    gen = torch.Generator().manual_seed(5)
    shapes = [(batch, heads, rows, dim), (batch, kv, keys, dim), (batch, kv, keys, dim)]
    leaves = [torch.randn(s, generator=gen).to(dtype).to(device).requires_grad_() for s in shapes]
    dout = torch.randn(shapes[0], generator=gen).to(dtype).to(device)
    moved = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    if isinstance(options.get("groups"), tuple):
        moved["groups"] = tuple(g.to(device) for g in options["groups"])
    bias = moved.get("bias")
    if bias is not None and bias.is_floating_point():
        moved["bias"] = bias.detach().requires_grad_()
        leaves.append(moved["bias"])
    out = deepc.core.ops.block_sparse_attention(*leaves[:3], moved.pop("layout", None), moved.pop("block", 64), **moved)
    out.backward(dout)
    return [out.detach().cpu(), *(x.grad.cpu() for x in leaves)]


def attention_cases():
    gen = torch.Generator().manual_seed(9)

    def layout(heads, down, across):
        return torch.rand(heads, down, across, generator=gen) < 0.5

    yield "dense", (2, 4, 2, 130, 130, 64), {}
    yield "causal", (1, 4, 1, 200, 200, 128), {"is_causal": True}
    yield "wide heads", (1, 2, 2, 90, 90, 256), {"is_causal": True}
    yield "odd dim", (1, 2, 1, 70, 90, 33), {"is_causal": True, "diagonal": 20}
    for block in (16, 32, 48, 64, 112, 128):
        down, across = -(-300 // block), -(-420 // block)
        options = {"layout": layout(2, down, across), "block": block, "is_causal": True, "diagonal": 120}
        yield f"blocks of {block}", (1, 2, 1, 300, 420, 64), options
    groups = torch.arange(150).div(40, rounding_mode="floor").int().expand(2, -1)
    yield "packed", (2, 2, 2, 150, 150, 64), {"groups": groups, "is_causal": True}
    yield "slopes", (1, 4, 2, 100, 100, 64), {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.01]), "is_causal": True}
    yield "window", (1, 2, 1, 300, 300, 64), {"window": 70, "is_causal": True}
    yield "bias", (2, 2, 1, 90, 100, 64), {"bias": torch.randn(2, 2, 90, 100, generator=gen)}
    yield "shared bias", (2, 2, 1, 90, 100, 64), {"bias": torch.randn(1, 1, 1, 100, generator=gen)}
    yield "mask", (1, 2, 1, 90, 100, 64), {"bias": torch.rand(1, 1, 90, 100, generator=gen) < 0.7}
    yield "dropout", (2, 2, 1, 100, 100, 64), {"dropout": 0.25, "seed": 12345, "first": (3, 40), "is_causal": True}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name, sizes, options", list(attention_cases()), ids=lambda x: x if isinstance(x, str) else "")
def test_attention(dtype, name, sizes, options):
    got, want = (attention_results(d, dtype, sizes, dict(options)) for d in (DEVICE, "cpu"))
    for k, (x, y) in enumerate(zip(got, want)):
        worst = (x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-9)
        assert worst < LOOSE[dtype], f"{name}: result {k} is {worst:.2e} off"
    again = attention_results(DEVICE, dtype, sizes, dict(options))
    for x, y in zip(got, again):
        assert_same_bits(x, y, f"{name}, a second time")


def test_attention_does_not_read_what_is_hidden():
    q, k, v = (torch.randn(1, 1, 160, 64, device=DEVICE) for _ in range(3))
    layout = torch.zeros(1, 10, 10, dtype=torch.bool)
    layout[:, :, 3] = True
    k[:, :, :48] = k[:, :, 64:] = v[:, :, :48] = v[:, :, 64:] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = deepc.core.ops.block_sparse_attention(*leaves, layout, 16)
    out.sum().backward()
    assert out.isfinite().all() and all(x.grad.isfinite().all() for x in leaves)
