"""Ranks: how they find each other and what they tell each other, inside a node (shared memory) and between nodes.

Users' part is re-exported here; the torch.distributed backend "deepc" lies in c10d/."""

from .start import (
    configure,
    default_device,
    empty_registered,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    init_distributed,
    log_summary,
    reset_log,
)

__all__ = [
    "configure",
    "default_device",
    "empty_registered",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "init_distributed",
    "log_summary",
    "reset_log",
]
