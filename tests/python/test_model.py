"""The synchronisation protocol of comm/, checked with spin: all interleavings of small cases. tests/model/*.pml say
what is modelled and what holds; each model has variants with a known bug that spin must find, so that the models can
fail."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parents[1] / "model"
LIMIT_S = 300

for _tool in ("spin", "cc"):
    if shutil.which(_tool) is None:
        pytest.skip(f"needs {_tool} (Debian's package spin, and a C compiler)", allow_module_level=True)


def explore(folder: Path, model: str, *defines: str, optimize: str = "-O1") -> tuple[int, int, str]:
    """Errors found (0 or 1: spin stops at the first), states explored, and what spin said of all interleavings of a
    variant of a model. optimize: of the generated C, which for small cases takes longer to compile than to run."""
    flags = [f"-D{d}" for d in defines]
    generated = subprocess.run(
        ["spin", "-a", *flags, str(MODELS / f"{model}.pml")], cwd=folder, capture_output=True, text=True
    )
    assert generated.returncode == 0, generated.stdout + generated.stderr
    subprocess.run(
        ["cc", "-w", optimize, "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c"], cwd=folder, check=True
    )
    said = subprocess.run(["./pan", "-m1000000"], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S).stdout
    assert "Search not completed" not in said or "errors: 1" in said, said
    assert "max search depth too small" not in said, said
    return int(re.search(r"errors: (\d+)", said)[1]), int(float(re.search(r"(\S+) states, stored", said)[1])), said


# Together they cover all kinds of calls and places; these take seconds.
SOUND = [
    ("sleep", "RANKS=3", "STEPS=3", "BELL"),
    ("calm", "RANKS=3", "PIECES=3"),
    ("exchange", "RANKS=2", "CALLS=3", "PLACES=4", "DIE"),
    ("exchange", "RANKS=2", "CALLS=3", "PLACES=1", "ODD"),
    ("team", "RANKS=3", "CALLS=3", "BUSY"),
    ("team", "RANKS=3", "CALLS=2", "DIE"),
]
SOUND_FULL = [
    ("exchange", "RANKS=2", "CALLS=3", "PLACES=5"),
    ("sleep", "RANKS=2", "STEPS=6"),
    ("sleep", "RANKS=3", "STEPS=4"),
    ("calm", "RANKS=3", "PIECES=2"),
    ("exchange", "RANKS=2", "CALLS=3", "WAYS=3", "PLACES=3"),
    ("exchange", "RANKS=3", "CALLS=3", "PLACES=2"),
    ("team", "RANKS=3", "CALLS=3"),
    ("sleep", "RANKS=3", "STEPS=4", "FENCES"),
    ("sleep", "RANKS=4", "STEPS=3"),
    ("exchange", "RANKS=2", "CALLS=4", "PLACES=5"),
    ("exchange", "RANKS=2", "CALLS=4", "PLACES=6"),
    ("exchange", "RANKS=2", "CALLS=4", "WAYS=2", "PLACES=4"),
    ("exchange", "RANKS=2", "CALLS=4", "WAYS=2", "PLACES=5"),
    ("exchange", "RANKS=2", "CALLS=3", "WAYS=3", "PLACES=5"),
    ("exchange", "RANKS=3", "CALLS=4", "PLACES=2"),
    ("exchange", "RANKS=3", "CALLS=4", "PLACES=3"),
    ("exchange", "RANKS=4", "CALLS=3", "PLACES=3"),
    ("exchange", "RANKS=2", "CALLS=3", "WAYS=3", "PLACES=3", "DIE"),
    ("exchange", "RANKS=3", "CALLS=3", "PLACES=2", "DIE"),
    ("exchange", "RANKS=4", "CALLS=2", "WAYS=0", "PLACES=3", "DIE"),
    ("exchange", "RANKS=2", "CALLS=3", "WAYS=3", "PLACES=3", "ODD"),
    ("exchange", "RANKS=3", "CALLS=2", "PLACES=2", "ODD"),
    ("exchange", "RANKS=4", "CALLS=2", "WAYS=0", "PLACES=3", "ODD"),
    ("team", "RANKS=3", "CALLS=3", "DIE"),
    ("team", "RANKS=4", "CALLS=3"),
]
# model, what spin says, variant
BUGS = [
    ("sleep", "invalid end state", "BUG_NO_FENCE"),
    ("sleep", "invalid end state", "BUG_EARLY_FENCE"),
    ("sleep", "invalid end state", "BUG_NO_COMPARE"),
    ("sleep", "invalid end state", "BUG_WAKE_ONE", "RANKS=3"),
    ("sleep", "invalid end state", "BUG_BELL_LATE", "BELL"),
    ("calm", "assertion violated", "BUG_NO_FENCE"),
    ("calm", "assertion violated", "BUG_LOOK_FIRST"),
    ("calm", "assertion violated", "BUG_NO_WAIT"),
    ("calm", "invalid end state", "BUG_NO_DEATH"),
    ("exchange", "assertion violated", "BUG_CELL_EARLY", "PLACES=1", "CALLS=4"),
    ("exchange", "assertion violated", "BUG_SLOT_EARLY", "PLACES=3", "CALLS=4"),
    ("exchange", "assertion violated", "BUG_SMALL_EARLY", "PLACES=2", "CALLS=4"),
    ("exchange", "assertion violated", "BUG_DONE_FIRST", "PLACES=2", "CALLS=4"),
    ("exchange", "assertion violated", "BUG_LEARN_MOST", "WAYS=3", "PLACES=3", "CALLS=3"),
    ("exchange", "invalid end state", "BUG_NO_LOOK", "DIE", "PLACES=1", "CALLS=2"),
    ("exchange", "assertion violated", "BUG_CALL_ONLY", "ODD", "PLACES=1", "RANKS=3"),
    ("exchange", "assertion violated", "BUG_NO_COMPARE", "ODD", "PLACES=1"),
    ("team", "assertion violated", "BUG_PART", "CALLS=3"),
    ("team", "invalid end state", "BUG_NO_ALL", "BUSY", "CALLS=2"),
    ("team", "assertion violated", "BUG_EARLY", "CALLS=2"),
    ("team", "invalid end state", "BUG_NO_LOOK", "DIE", "CALLS=2"),
]


def name(case: tuple[str, ...]) -> str:
    return "-".join(part for part in case if " " not in part)


@pytest.mark.parametrize("case", SOUND + [pytest.param(c, marks=pytest.mark.full) for c in SOUND_FULL], ids=name)
def test_all_interleavings_are_sound(case, tmp_path, record_property):
    errors, states, said = explore(tmp_path, *case, optimize="-O2" if case in SOUND_FULL else "-O1")
    record_property("states", states)
    print(f"{name(case)}: {states} states")
    assert errors == 0, said
    assert states > 200, "a model that goes nowhere"


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in BUGS[::6] else pytest.mark.full) for c in BUGS], ids=name
)
def test_a_known_bug_is_found(case, tmp_path):
    model, expected, *variant = case
    errors, _, said = explore(tmp_path, model, *variant, optimize="-O0")
    assert errors == 1 and expected in said, said
