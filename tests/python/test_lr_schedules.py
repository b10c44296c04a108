"""LR schedules: exact values, recorded from DeepSpeed 0.19.8 and compared with it live where it is installed."""

from __future__ import annotations

import types

import pytest
import torch
from deepc import lr_schedules
from deepc.errors import ArgumentError, ConfigError

STEPS = 60
PICKED = (
    0,
    1,
    2,
    3,
    7,
    12,
    13,
    14,
    22,
    23,
    31,
    45,
    60,
)  # numbers of scheduler steps after which the values below were read

# (type, arguments, rate of group 1, betas[0] of group 1); an AdamW with two groups, rates 0.5 and 0.25; DeepSpeed
# 0.19.8
RECORDED = [
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 7, "lr_range_test_step_rate": 1.3},
        [
            0.0001,
            0.00011857142857142858,
            0.00013714285714285716,
            0.00015571428571428572,
            0.00022999999999999998,
            0.0003228571428571429,
            0.00034142857142857146,
            0.00036,
            0.0005085714285714285,
            0.0005271428571428572,
            0.0006757142857142858,
            0.0009357142857142858,
            0.0012142857142857142,
        ],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.0001, 0.0003],
            "lr_range_test_step_size": 5,
            "lr_range_test_step_rate": 0.7,
            "lr_range_test_staircase": True,
        },
        [
            0.0003,
            0.0003,
            0.0003,
            0.0003,
            0.0005099999999999999,
            0.0007199999999999999,
            0.0007199999999999999,
            0.0007199999999999999,
            0.00114,
            0.00114,
            0.0015599999999999998,
            0.0021899999999999997,
            0.002819999999999999,
        ],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.0001,
            "cycle_max_lr": 0.01,
            "cycle_first_step_size": 13,
            "cycle_second_step_size": 9,
            "decay_step_size": 5,
            "decay_lr_rate": 0.3,
            "decay_mom_rate": 0.01,
        },
        [
            0.0001,
            0.0008615384615384609,
            0.0016230769230769217,
            0.0023846153846153826,
            0.00543076923076923,
            0.009238461538461537,
            0.009999999999999998,
            0.008900000000000003,
            0.0001,
            9.433962264150943e-05,
            6.493506493506494e-05,
            4.201680672268908e-05,
            3.0487804878048784e-05,
        ],
        [
            0.8,
            0.8923076923076924,
            0.8846153846153847,
            0.8769230769230769,
            0.8461538461538463,
            0.8076923076923077,
            0.8,
            0.8111111111111111,
            0.9,
            0.9018,
            0.9162,
            0.9414,
            0.9684,
        ],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.0001, 0.0002],
            "cycle_max_lr": [0.01, 0.03],
            "cycle_first_step_size": 12,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 4,
            "cycle_min_mom": 0.85,
            "cycle_max_mom": 0.95,
        },
        [
            0.0002,
            0.0002,
            0.0002,
            0.0002,
            0.010133333333333333,
            0.03,
            0.02255,
            0.02255,
            0.0002,
            0.0002,
            0.0002,
            0.0002,
            0.0002,
        ],
        [0.85, 0.95, 0.95, 0.95, 0.9166666666666666, 0.85, 0.875, 0.875, 0.95, 0.95, 0.95, 0.95, 0.95],
    ),
    (
        "WarmupLR",
        {"warmup_max_lr": 0.001, "warmup_num_steps": 11},
        [
            0.0,
            0.0,
            0.0002890648263178878,
            0.00045815690999132625,
            0.0008115075629572489,
            0.001,
            0.001,
            0.001,
            0.001,
            0.001,
            0.001,
            0.001,
            0.001,
        ],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-05, "warmup_num_steps": 1, "warmup_type": "linear"},
        [1e-05, 1e-05, 0.125005, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 40, "warmup_max_lr": [0.001, 0.002], "warmup_min_lr": 1e-06, "warmup_num_steps": 10},
        [
            1e-06,
            1e-06,
            0.0006027589613322983,
            0.0009547653881846051,
            0.001690350981988499,
            0.0019333666666666665,
            0.0018667333333333331,
            0.0018000999999999998,
            0.001267033333333333,
            0.0012004,
            0.0006673333333333333,
            1e-06,
            1e-06,
        ],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 30, "warmup_num_steps": 6, "warmup_type": "linear"},
        [
            0.0,
            0.0,
            0.00016666666666666666,
            0.0003333333333333333,
            0.001,
            0.0007916666666666666,
            0.00075,
            0.0007083333333333334,
            0.000375,
            0.0003333333333333333,
            0.0,
            0.0,
            0.0,
        ],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 35, "warmup_num_steps": 8, "warmup_min_ratio": 0.02, "cos_min_ratio": 0.05},
        [
            0.0,
            0.005,
            0.08666666666666668,
            0.13443860422556111,
            0.23426731863470432,
            0.2373688760384052,
            0.2304641776052862,
            0.22221777762037861,
            0.12434530156688099,
            0.11062927890205201,
            0.025131123961594806,
            0.0125,
            0.0125,
        ],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 25, "warmup_num_steps": 5, "warmup_type": "linear"},
        [
            0.0,
            0.0,
            0.05,
            0.1,
            0.24388267633044053,
            0.1817556375861966,
            0.16363576158443874,
            0.14456485269921587,
            0.013647822058006381,
            0.006142323669559498,
            2.5e-05,
            2.5e-05,
            2.5e-05,
        ],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
]

EXTRA = [  # compared live only
    ("LRRangeTest", {}),
    ("LRRangeTest", {"lr_range_test_step_size": 1, "lr_range_test_staircase": True, "last_batch_iteration": 5}),
    ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 10,
            "cycle_second_step_size": 0,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "cycle_momentum": False,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 37,
            "cycle_second_step_size": 53,
            "cycle_first_stair_count": 7,
            "decay_step_size": 11,
            "decay_mom_rate": 0.02,
            "cycle_max_mom": [0.9, 0.99],
        },
    ),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 20, "last_batch_iteration": 7}),
    ("WarmupLR", {"last_batch_iteration": 30}),
    (
        "WarmupLR",
        {"warmup_max_lr": 3e-4, "warmup_min_lr": [1e-6, 2e-6], "warmup_num_steps": 2000, "warmup_type": "linear"},
    ),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 50}),
    ("WarmupDecayLR", {"total_num_steps": 300, "warmup_num_steps": 100, "warmup_max_lr": 5e-5}),
    ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 10}),
    ("WarmupCosineLR", {"total_num_steps": 400, "warmup_num_steps": 97, "cos_min_ratio": 0.0, "warmup_min_ratio": 0.3}),
    ("WarmupCosineLR", {"total_num_steps": 400, "warmup_num_steps": 1, "last_batch_iteration": 3}),
]


def optimizer(rates=(0.5, 0.25), tensor_rate=False) -> torch.optim.Optimizer:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": torch.tensor(r) if tensor_rate else r} for r in rates
    ]
    return torch.optim.AdamW(groups, foreach=False, capturable=False)


def trace(schedule, opt, steps: int) -> list[tuple]:
    """Rates and betas of all groups, before and after every step."""
    out = [tuple((g["lr"], g["betas"]) for g in opt.param_groups)]
    for _ in range(steps):
        schedule.step()
        out.append(tuple((g["lr"], g["betas"]) for g in opt.param_groups))
    return out


@pytest.mark.parametrize(
    ("kind", "params", "rates", "moms"), RECORDED, ids=[f"{k}{i}" for i, (k, *_) in enumerate(RECORDED)]
)
def test_recorded_values(kind, params, rates, moms):
    opt = optimizer()
    got = trace(lr_schedules.build_scheduler(kind, params, opt), opt, STEPS)
    assert [got[i][1][0] for i in PICKED] == rates
    assert [got[i][1][1][0] for i in PICKED] == moms


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip(
        "deepspeed.runtime.lr_schedules", reason="deepspeed is not installed: only the recorded values are compared"
    )


@pytest.mark.parametrize(("kind", "params"), [r[:2] for r in RECORDED] + EXTRA)
def test_equal_to_deepspeed(theirs, kind, params):
    a, b = optimizer(), optimizer()
    ours, real = lr_schedules.build_scheduler(kind, params, a), getattr(theirs, kind)(b, **params)
    assert trace(ours, a, 700) == trace(real, b, 700)
    assert ours.get_last_lr() == real.get_last_lr()
    assert ours.state_dict() == real.state_dict()


def test_equal_to_deepspeed_with_tensor_rates(theirs):
    a, b = optimizer(tensor_rate=True), optimizer(tensor_rate=True)
    held = a.param_groups[0]["lr"]
    ours = lr_schedules.WarmupCosineLR(a, total_num_steps=50, warmup_num_steps=10)
    real = theirs.WarmupCosineLR(b, total_num_steps=50, warmup_num_steps=10)
    for _ in range(60):
        ours.step(), real.step()
        assert [float(g["lr"]) for g in a.param_groups] == [float(g["lr"]) for g in b.param_groups]
    assert a.param_groups[0]["lr"] is held  # a compiled step holds on to this tensor


@pytest.mark.parametrize(("kind", "params"), [r[:2] for r in RECORDED])
@pytest.mark.parametrize("at", [0, 5, 17, 40])
def test_resume_continues_exactly(kind, params, at):
    whole_opt, first_opt = optimizer(), optimizer()
    whole = trace(lr_schedules.build_scheduler(kind, params, whole_opt), whole_opt, STEPS)
    first = lr_schedules.build_scheduler(kind, params, first_opt)
    trace(first, first_opt, at)
    second_opt = optimizer()
    second = lr_schedules.build_scheduler(kind, params, second_opt)
    second.load_state_dict(first.state_dict())
    assert trace(second, second_opt, STEPS - at)[1:] == whole[at + 1 :]


@pytest.mark.parametrize("added", [False, True])
def test_one_cycle_goes_on_with_the_momentum_after_the_optimizer_was_loaded(added):
    """torch puts other param groups in the place of those that the schedule has seen. A group that was added since
    keeps its own rate and betas."""
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    whole_opt, opt = optimizer(), optimizer()
    whole = trace(lr_schedules.OneCycle(whole_opt, **params), whole_opt, 8)
    schedule = lr_schedules.OneCycle(opt, **params)
    trace(schedule, opt, 3)
    opt.load_state_dict(opt.state_dict())
    if added:
        opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 7.0, "betas": (0.5, 0.6)})
    more = trace(schedule, opt, 5)
    assert [groups[:2] for groups in more] == whole[3:]
    assert not added or all(groups[2] == (7.0, (0.5, 0.6)) for groups in more)


def test_step_to_an_index():
    opt = optimizer()
    schedule = lr_schedules.WarmupLR(opt, warmup_max_lr=1.0, warmup_num_steps=10, warmup_type="linear")
    schedule.step(4)
    assert [g["lr"] for g in opt.param_groups] == [0.4, 0.4]
    assert schedule.last_batch_iteration == 4


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}


@pytest.mark.parametrize(
    "kind, params, name", [("OneCycle", CYCLE, "batch_iteration"), ("WarmupLR", {}, "last_batch_iteration")]
)
def test_the_index_that_step_is_given_has_deepspeeds_name(kind, params, name):
    """LRRangeTest and OneCycle take batch_iteration, the warm-ups last_batch_iteration."""
    schedule = lr_schedules.build_scheduler(kind, params, optimizer())
    lr_schedules.stepper(schedule, {name: 3}, 8)()
    assert schedule.last_batch_iteration == 3
    lr_schedules.stepper(schedule, {}, 8)()
    assert schedule.last_batch_iteration == 4
    other = ({"batch_iteration", "last_batch_iteration"} - {name}).pop()
    with pytest.raises(
        ArgumentError, match=rf"{kind}.step\(\) does not take them .*'{other}'.*its arguments are {name}"
    ):
        lr_schedules.stepper(schedule, {other: 3}, 8)


def test_a_schedule_of_samples_is_told_those_of_a_step():
    """Megatron-LM's, whose step(increment) DeepSpeed calls with its train_batch_size."""

    class Samples:
        done = 0

        def step(self, increment):
            self.done += increment

    schedule = Samples()
    lr_schedules.stepper(schedule, {}, 8)()
    lr_schedules.stepper(schedule, {"increment": 3}, 8)()
    assert schedule.done == 11


def test_a_schedule_that_follows_a_metric_is_not_told_the_samples_of_a_step():
    """ReduceLROnPlateau would see their constant number as a plateau, and lower the rate every few steps."""
    schedule = lr_schedules.build_scheduler("ReduceLROnPlateau", {"patience": 1}, optimizer())
    with pytest.raises(ArgumentError, match=r'ReduceLROnPlateau.step\(metrics\).*engine.step\(lr_kwargs={"metrics"'):
        lr_schedules.stepper(schedule, {}, 8)
    for loss in (3.0, 2.0, 1.0):
        lr_schedules.stepper(schedule, {"metrics": loss}, 8)()
    assert schedule.best == 1.0 and schedule.num_bad_epochs == 0


def test_anything_with_param_groups():
    opt = types.SimpleNamespace(param_groups=[{"lr": 1.0}])
    schedule = lr_schedules.build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, opt)
    schedule.step(), schedule.step()
    assert opt.param_groups[0]["lr"] == 0.5


def test_one_cycle_without_betas_cycles_the_rate_only():
    opt = types.SimpleNamespace(param_groups=[{"lr": 1.0}])
    schedule = lr_schedules.OneCycle(opt, 0.1, 1.0, cycle_first_step_size=4)
    schedule.step()
    assert schedule.get_mom() is None
    assert set(opt.param_groups[0]) == {"lr"}


def test_get_last_lr_needs_a_step():
    schedule = lr_schedules.OneCycle(optimizer(), 0.1, 1.0)
    with pytest.raises(ConfigError, match="before the first step"):
        schedule.get_last_lr()


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_no_steps_of_warm_up_are_two(kind):
    """Hugging Face's Trainer fills in 0 for "auto" where its warmup_steps is not set (DeepSpeed 0.19.8's WarmupLR, made
    by hand, refuses it)."""
    rates = []
    for steps in (0, 2):
        opt = optimizer()
        params = {"warmup_num_steps": steps} | ({} if kind == "WarmupLR" else {"total_num_steps": 9})
        rates.append(trace(lr_schedules.build_scheduler(kind, params, opt), opt, 12))
    assert rates[0] == rates[1]


def test_torch_schedules_by_name():
    opt = optimizer()
    schedule = lr_schedules.build_scheduler("CosineAnnealingLR", {"T_max": 10}, opt)
    assert isinstance(schedule, torch.optim.lr_scheduler.CosineAnnealingLR)


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        ("WarmupLr", {}, 'Did you mean "WarmupLR"'),
        ("Cosine", {}, "neither one of LRRangeTest"),
        ("_LRScheduler", {}, "neither one of"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps = -1 must be an integer >= 0"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps = 2.5"),
        ("WarmupLR", {"warmup_num_steps": float("inf")}, "warmup_num_steps = inf"),
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type = 'cubic' must be one of log, linear"),
        (
            "WarmupLR",
            {"warmup_min_lr": [1.0, 2.0, 3.0]},
            "warmup_min_lr has 3 values, the optimizer has 2 parameter groups",
        ),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": "100"}, "total_num_steps = '100' must be a finite number"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0},
            "cycle_first_step_size = 0",
        ),
        ("LRRangeTest", {"lr_range_test_step_size": -1}, "lr_range_test_step_size = -1"),
        ("LRRangeTest", {"lr_range_test_staircase": "false"}, "lr_range_test_staircase = 'false' must"),
        ("OneCycle", CYCLE | {"cycle_momentum": "false"}, "cycle_momentum = 'false' must be true or false"),
        ("OneCycle", CYCLE | {"cycle_first_stair_count": "5"}, "cycle_first_stair_count = '5'"),
        ("OneCycle", CYCLE | {"decay_step_size": "10"}, "decay_step_size = '10' must be a finite number"),
        ("OneCycle", CYCLE | {"decay_step_size": -5, "decay_lr_rate": 1.0}, "decay_step_size = -5 must be >= 0"),
        ("OneCycle", CYCLE | {"decay_lr_rate": None}, "decay_lr_rate = None"),
        ("LRRangeTest", {"step_size": 1}, "does not take"),
        ("StepLR", {}, "does not take"),
    ],
)
def test_wrong_arguments(kind, params, text):
    with pytest.raises(ConfigError) as error:
        lr_schedules.build_scheduler(kind, params, optimizer())
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        ("OneCycle", CYCLE | {"decay_step_size": "10"}, "scheduler.params.decay_step_size = '10'"),
        ("WarmupLR", {"warmup_min_lr": []}, "scheduler.params.warmup_min_lr has 0 values"),
    ],
)
def test_wrong_arguments_of_a_configuration(kind, params, text):
    with pytest.raises(ConfigError) as error:
        lr_schedules.check_params(kind, params)
    assert text in str(error.value)


def test_no_param_groups():
    with pytest.raises(ConfigError, match="param_groups"):
        lr_schedules.WarmupLR(object())
