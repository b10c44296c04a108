"""scripts/count.py: the last line of `make test` must not lose a failure. scripts/lib.sh: which builds have the CUDA
kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = Path(__file__).resolve().parents[2] / "scripts" / "count.py"

GOOD = """1/3 Testing: test_zero
[----------] Global test environment tear-down
[==========] 12 tests from 2 test suites ran. (7 ms total)
[  PASSED  ] 10 tests.
[  SKIPPED ] 2 tests, listed below:
[  SKIPPED ] A.B
/src/tests/c/test_zero.cpp:33: Skipped
nvcc is missing here
Test Passed.
"""
BAD = """2/3 Testing: test_ops
[  PASSED  ] 4 tests.
[  FAILED  ] 2 tests, listed below:
[  FAILED  ] C.D
[  FAILED  ] C.E
Test Failed.
"""
LEAK = """2/3 Testing: test_ops
[  PASSED  ] 4 tests.
==12==ERROR: LeakSanitizer: detected memory leaks
Test Failed.
"""
CRASH = "3/3 Testing: test_comm\n[ RUN      ] X.Y\nSEGV\nTest Failed.\n"
XML = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="no"/></testcase><testcase name="c"><error message="set-up"/></testcase>
<testcase name="d"><skipped message="no GPU"/></testcase></testsuite></testsuites>"""  # noqa: E501


def count(folder: Path, test_class: str = "quick", **files: str) -> tuple[int, str, str]:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    done = subprocess.run(
        [sys.executable, str(COUNT), str(folder), test_class], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()[-1], done.stdout


@pytest.mark.parametrize(
    "log, code, last",
    [
        (GOOD, 0, "10 passed, 0 failed, 2 skipped"),
        (GOOD + BAD, 1, "14 passed, 2 failed, 2 skipped"),
        (GOOD + LEAK, 1, "14 passed, 1 failed, 2 skipped"),
        (GOOD + CRASH, 1, "10 passed, 1 failed, 2 skipped"),
        ("", 1, "0 passed, 0 failed, 0 skipped"),
    ],
)
def test_ctest(tmp_path, log, code, last):
    assert count(tmp_path, ctest_log=log)[:2] == (code, last)


def test_all_together_with_reasons(tmp_path):
    code, last, text = count(tmp_path, ctest_log=GOOD, pytest_xml=XML, skipped_tsv="sanitizers\t1\tdo not work here\n")
    assert (code, last) == (1, "11 passed, 2 failed, 4 skipped")
    for reason in ("no GPU", "nvcc is missing here", "sanitizers: do not work here"):
        assert reason in text


def test_races_count(tmp_path):
    code, last, text = count(tmp_path, ctest_log=GOOD, ctest_thread_log=GOOD + CRASH)
    assert (code, last) == (1, "20 passed, 1 failed, 4 skipped")
    assert "C under ThreadSanitizer: 10 passed, 1 failed" in text


def test_a_pytest_that_broke_is_a_failure(tmp_path):
    assert count(tmp_path, ctest_log=GOOD, pytest_broke="3\n")[:2] == (1, "10 passed, 1 failed, 2 skipped")


def test_no_gpu_is_no_failure_of_the_gpu_class(tmp_path):
    xml = '<testsuite><testcase name="d"><skipped message="no GPU"/></testcase></testsuite>'
    assert count(tmp_path, "gpu", pytest_xml=xml)[:2] == (0, "0 passed, 0 failed, 1 skipped")
    assert count(tmp_path, "quick", pytest_xml=xml)[0] == 1


@pytest.mark.parametrize(
    "gpu, said, choice",
    [
        ("true", None, "AUTO"),
        ("false", None, "OFF"),
        ("false", "", "OFF"),
        ("false", "ON", "ON"),
        ("true", "OFF", "OFF"),
    ],
)
def test_cuda_kernels_are_built_where_there_is_a_gpu_or_on_request(gpu, said, choice):
    lib = COUNT.with_name("lib.sh")
    env = {k: v for k, v in os.environ.items() if k != "DEEPC_CUDA"} | ({} if said is None else {"DEEPC_CUDA": said})
    done = subprocess.run(
        ["sh", "-euc", f'. "{lib}"; has_gpu() {{ {gpu}; }}; cuda_choice'],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == (f"{choice}\n", "")
