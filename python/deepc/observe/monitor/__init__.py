"""What a run says while it trains and leaves behind: the log line, the live line, metrics.jsonl and run.json,
TensorBoard, W&B, Comet, CSV.

    engine.log({"accuracy": 0.93})            # your own scalars, to all of them
    engine.monitor.set_total_steps(10_000)    # for the ETA, where no schedule tells
    engine.monitor.last                       # the last step as a dict

See docs/logging.md. `MonitorMaster(config).write_events([(tag, value, samples)])` is DeepSpeed's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .experiments import CometMonitor, Monitor, MonitorMaster, TensorBoardMonitor, WandbMonitor, csvMonitor
    from .meter import Meter

__all__ = ["CometMonitor", "Meter", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]


def __getattr__(name: str) -> Any:
    if name == "Meter":
        from .meter import Meter

        return Meter
    if name in __all__:
        from . import experiments

        return getattr(experiments, name)
    raise AttributeError(f"module 'deepc.monitor' has no attribute '{name}'")
