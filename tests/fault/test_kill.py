"""A rank that is killed leaves nothing behind: no process, no memory, no name. Run with: pytest tests/fault"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from ranks import run_ranks

MARK = "DEEPC_TEST_MARK"


def _marked(mark: str) -> dict[int, str]:
    """Processes that were started with this mark: pid -> its memory map."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "maps").read_text()
        except OSError:
            pass
    return found


class _Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((8,), float(i))


def train_until_killed(rank, world):
    from deepc.errors import RankDiedError

    loader = torch.utils.data.DataLoader(_Data(), batch_size=2, num_workers=2, persistent_workers=True)
    dist.all_reduce(torch.zeros(8))  # the staging exists before the loaders fork
    mine = os.getpid()
    assert "memfd:deepc" in Path("/proc/self/maps").read_text()
    try:
        for i, batch in enumerate(loader):
            if i == 3:
                for pid, maps in _marked(os.environ[MARK]).items():
                    parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
                    assert "memfd:deepc" not in maps or parent != mine, f"loader {pid} holds the staging"
            if i == 5 and rank == 1:
                os.kill(mine, signal.SIGKILL)
            dist.all_reduce(batch.sum(0))
    except RankDiedError as exc:
        return str(exc)
    raise AssertionError("no error")


@pytest.mark.full
def test_kill_with_data_loaders_leaves_nothing():
    mark = uuid.uuid4().hex
    before = set(os.listdir("/dev/shm"))
    out = run_ranks(train_until_killed, 2, may_die=[1], env={MARK: mark})
    assert "rank 1 (pid" in out[0] and "died" in out[0]
    end = time.monotonic() + 60  # torch's loaders look after their parent every 5 s
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, f"processes are left: {sorted(left)}"
    assert not [n for n in set(os.listdir("/dev/shm")) - before if "deepc" in n]
