"""Benches of tests/bench as tests of the full class run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "bench"


def rows_of_limited(bench: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a bench that limits memory by a cgroup; skips where none can be made. out: a file for them."""
    sys.path.insert(0, str(FOLDER))
    try:
        import limited

        limited.Cgroup(0).close()
    except OSError as exc:
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    finally:
        sys.path.remove(str(FOLDER))
    subprocess.run([sys.executable, str(FOLDER / bench), *arguments, "--json", str(out)], check=True)
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows
