"""scripts/count.py: the last line of `make test` must not lose a failure. scripts/lib.sh: which builds have the CUDA
kernels. scripts/peers: what is installed for the tests leaves torch alone, and what can't be had stops nothing.
scripts/test: the C tests beside the Python tests are counted, and end with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
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


@pytest.mark.parametrize("broke", ["pytest_broke", "ctest_broke"])
def test_what_broke_is_a_failure(tmp_path, broke):
    assert count(tmp_path, ctest_log=GOOD, **{broke: "3\n"})[:2] == (1, "10 passed, 1 failed, 2 skipped")


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


def test_another_processor_is_another_build():
    """One folder, seen by machines whose processors differ."""
    lib = COUNT.with_name("lib.sh")
    done = subprocess.run(
        ["sh", "-euc", f'. "{lib}"; echo "$(kernels OFF) $(kernels ON)."'], capture_output=True, text=True, timeout=60
    )
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    here = [f for f in (flags[1].split() if flags else []) if f in ("avx512vl", "avx512_bf16")]
    assert (done.stdout, done.stderr) == (f"all {''.join(f + '+' for f in here)}.\n", "")


# A .venv/bin/python of the scripts: pip can get what is in HAVE (and replaces torch if REPLACES says so), and notes
# each call and its constraints.
VENV_PYTHON = """#!/bin/sh
case "$*" in
  *'m.version("torch")'*) cat torch.version ;;
  "- "*) printf '%s\\n' one "two<=2" three "four[x]" ;;
  "-m pip --version") ;;
  "-m pip install "*)
    shift 3
    for word; do
      if [ "$before" = -c ]; then cat "$word" >>constraints; fi
      case $word in --* | -c | 1 | 30 | /*) ;; *) asked="$asked $word" ;; esac
      before=$word
    done
    echo "$asked" >>calls
    [ -z "$REPLACES" ] || echo "$REPLACES" >torch.version
    for word in $asked; do case " $HAVE " in *" $word "*) ;; *) echo "ERROR: no $word"; exit 1 ;; esac; done ;;
  *) exit 9 ;;
esac
"""


def peers(folder: Path, have: str, replaces: str = "") -> tuple[subprocess.CompletedProcess[str], list[str], set[str]]:
    """scripts/peers by a user who is not root: how it ended, what pip was asked for in each call, the constraints."""
    for name in ("scripts", ".venv/bin", "bin"):
        (folder / name).mkdir(parents=True)
    for name in ("peers", "lib.sh"):
        shutil.copy(COUNT.with_name(name), folder / "scripts" / name)
    for name, text in ((".venv/bin/python", VENV_PYTHON), ("bin/id", "#!/bin/sh\necho 1000\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "torch.version").write_text("2.13.0+cpu\n")
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HAVE": have, "REPLACES": replaces}
    done = subprocess.run([folder / "scripts/peers", "quick"], env=env, capture_output=True, text=True, timeout=60)
    calls = [line.strip() for line in (folder / "calls").read_text().splitlines()]
    return done, calls, set((folder / "constraints").read_text().splitlines())


def test_peers_are_installed_in_one_go_beside_the_torch_that_is_there(tmp_path):
    done, calls, constraints = peers(tmp_path, "one two<=2 three four[x]")
    assert (done.returncode, calls) == (0, ["one two<=2 three four[x]"]), done.stderr
    assert constraints == {"torch==2.13.0+cpu"}


def test_a_peer_that_can_not_be_had_takes_no_other_along(tmp_path):
    done, calls, constraints = peers(tmp_path, "one three four[x]")
    assert (done.returncode, calls[1:]) == (0, ["one", "two<=2", "three", "four[x]"]), done.stderr
    assert "no two<=2 (ERROR: no two<=2)" in done.stderr and constraints == {"torch==2.13.0+cpu"}


def test_without_a_network_the_tests_go_on_without_peers(tmp_path):
    done, calls, _ = peers(tmp_path, "")
    assert (done.returncode, len(calls)) == (0, 1 + 3), done.stderr  # all at once, then three in a row are enough


def test_a_peer_that_replaces_torch_is_an_error(tmp_path):
    done, _, _ = peers(tmp_path, "one two<=2 three four[x]", replaces="2.13.0+cu130")
    assert done.returncode == 1 and "torch 2.13.0+cpu was replaced by 2.13.0+cu130" in done.stderr


# What scripts/test calls. cmake tells how the build of the C tests goes, ctest and Python leave results as the real do.
TOOLS = {
    "bin/g++": "",
    "bin/cc": 'while [ "$1" != -o ]; do shift; done; printf "#!/bin/sh\\n" >"$2"; chmod +x "$2"',
    "scripts/peers": "",
    "scripts/install": 'echo "install" >>order',
    "scripts/python": """case $1 in
  scripts/count.py) exec "$REAL_PYTHON" "$@" ;;
esac
echo "pytest" >>order
printf '%s' "$XML" >build/results/pytest.xml""",
    ".venv/bin/python": "",
    ".venv/bin/ninja": "",
    ".venv/bin/cmake": """case $1 in
  --build)
    echo "no such header"
    [ -z "$HANGS" ] || { echo $$ >"$HANGS.new" && mv "$HANGS.new" "$HANGS" && exec sleep 600; }
    exit "$BUILD" ;;
esac""",
    ".venv/bin/ctest": """mkdir -p build/asan/Testing/Temporary
printf '%s' "$LOG" >build/asan/Testing/Temporary/LastTest.log
echo "what ctest says"
exit 8""",
}


def start_quick(folder: Path, **env: str) -> subprocess.Popen[str]:
    """scripts/test quick with the tools above."""
    for name, text in TOOLS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    for name in ("test", "lib.sh", "count.py"):
        shutil.copy(COUNT.with_name(name), folder / "scripts" / name)
    given = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "REAL_PYTHON": sys.executable}
    given |= {"BUILD": "0", "HANGS": "", "LOG": GOOD, "XML": XML.replace("<failure", "<x").replace("<error", "<x")}
    return subprocess.Popen(
        [folder / "scripts/test", "quick"],
        env={**os.environ, **given, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "env, code, last",
    [
        ({}, 0, "13 passed, 0 failed, 3 skipped"),
        ({"LOG": GOOD + CRASH}, 1, "13 passed, 1 failed, 3 skipped"),
        ({"BUILD": "2"}, 1, "3 passed, 1 failed, 1 skipped"),
        ({"XML": XML}, 1, "11 passed, 2 failed, 3 skipped"),
    ],
)
def test_the_quick_class_counts_the_c_tests_that_run_beside_it(tmp_path, env, code, last):
    out, err = (run := start_quick(tmp_path, **env)).communicate(timeout=60)
    assert (run.returncode, out.splitlines()[-1]) == (code, last), out + err
    assert ("what ctest says" in out, "no such header" in out) == ((False, True) if "BUILD" in env else (True, False))
    assert (tmp_path / "order").read_text().split() == ["install", "pytest"]


def test_compilers_of_the_c_tests_end_with_the_run(tmp_path):
    run = start_quick(tmp_path, HANGS=str(tmp_path / "compiler"))
    deadline = time.monotonic() + 60
    while not ((tmp_path / "compiler").exists() and "pytest" in (tmp_path / "order").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    compiler = Path("/proc", (tmp_path / "compiler").read_text().strip(), "stat")
    run.terminate()
    run.communicate(timeout=60)
    while compiler.exists() and compiler.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
