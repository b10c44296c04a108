"""torch's store, the ranks' meeting point, in a process of its own on the first host of a run: it outlives rank 0, so
the others can say who died. Usage: store.py LISTENING_FD PORT AGENT_PID. Runs until it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def main() -> None:
    fd, port, agent = (int(a) for a in sys.argv[1:])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != agent:
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    main()
