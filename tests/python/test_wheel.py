"""What is shipped: libraries that load on old systems, a wheel named by what they need, a typed package, one version,
and a source distribution that builds without torch and trains in an environment of its own."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import manylinux

LIBRARIES = ["libdeepc.so", "libdeepc_torch.so"]


def built(name: str) -> bytes:
    from deepc.core.lib import library_dir

    return (library_dir() / name).read_bytes()


@pytest.mark.parametrize("name", [*LIBRARIES, "libdeepc_cuda.so"])
def test_libraries_need_only_old_glibc(name):
    try:
        needs = manylinux.elf_needs(built(name))
    except FileNotFoundError:
        if name in LIBRARIES:
            raise
        pytest.skip("built without CUDA kernels")
    assert manylinux.glibc_needed(needs) <= manylinux.FLOOR, needs.versions
    assert not set(needs.libraries) - manylinux.ALLOWED - set(LIBRARIES)
    cxx = {v for asked in needs.versions.values() for v in asked if v.startswith(("GLIBCXX", "CXXABI"))}
    assert not cxx - (set() if name in LIBRARIES else manylinux.CXX), "the core has no C++; CUDA's runtime has a little"


def test_names_of_newer_headers_become_old_ones(tmp_path):
    """Headers of glibc 2.38 rename strtol and scanf where _GNU_SOURCE is defined: as if these were that new."""
    calls = {"strtol": 3, "strtoll": 3, "strtoul": 3, "strtoull": 3, "sscanf": 2, "fscanf": 2}
    arguments = {2: "(const void *, const char *, ...)", 3: "(const char *, char **, int)"}
    source = "".join(f'long {name}{arguments[n]} __asm__("__isoc23_{name}");\n' for name, n in calls.items())
    source += "long f(const char *s, char **e) {\n  return " + " + ".join(
        f"{name}({'s, e, 10' if n == 3 else 's, s, e'})" for name, n in calls.items()
    )
    (tmp_path / "a.c").write_text(source + ";\n}\n")
    header = str(ROOT / "ops" / "base" / "glibc.h")
    command = ["cc", "-w", "-shared", "-fPIC", "-O1", "-s", "-include", header, "-o", "a.so", "a.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode or sysconfig.get_platform() != "linux-x86_64":
        pytest.skip(f"no shared library of x86-64 is made here: {done.stderr[-200:]}")
    library = (tmp_path / "a.so").read_bytes()
    assert b"isoc23" not in library
    assert manylinux.glibc_needed(manylinux.elf_needs(library)) == (2, 7)


def test_elf_needs_agrees_with_the_linker(tmp_path):
    (tmp_path / "a.c").write_text(
        "#include <pthread.h>\n#include <math.h>\nint f(pthread_t *t, void *(*g)(void *), double x)"
        " { return pthread_create(t, 0, g, 0) + (int)exp(x); }\n"
    )
    done = subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(tmp_path / "a.so"), str(tmp_path / "a.c"), "-lm", "-lpthread"],
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("cc makes no shared library here")
    needs = manylinux.elf_needs((tmp_path / "a.so").read_bytes())
    assert "libc.so.6" in needs.libraries and "libm.so.6" in needs.libraries
    assert any(v.startswith("GLIBC_2.") for v in needs.versions["libm.so.6"])
    if shutil.which("readelf"):
        text = subprocess.run(
            ["readelf", "-VW", str(tmp_path / "a.so")], capture_output=True, text=True, check=True
        ).stdout
        assert {v for asked in needs.versions.values() for v in asked} == set(re.findall(r"Name: (\S+)", text))


@pytest.mark.parametrize(
    "versions, expected",
    [({"libc.so.6": {"GLIBC_2.2.5", "GLIBC_2.25"}}, (2, 25)), ({"libm.so.6": {"GLIBC_2.34"}}, (2, 34))],
)
def test_newest_version_counts(versions, expected):
    assert manylinux.glibc_needed(manylinux.Needs([], versions)) == expected


@pytest.mark.parametrize("version", ["GLIBC_PRIVATE", "GLIBCXX_3.4.30", "GLIBC_ABI_DT_RELR"])
def test_what_no_system_promises_is_refused(version):
    with pytest.raises(ValueError, match=version):
        manylinux.glibc_needed(manylinux.Needs([], {"x": {version}}))


def fake_wheel(folder: Path, library: bytes) -> Path:
    tag = b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"
    path = folder / "deepc_torch-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("deepc/lib/libdeepc.so", library)
        z.writestr("deepc_torch-0.1.0.dist-info/WHEEL", tag)
        z.writestr(
            "deepc_torch-0.1.0.dist-info/RECORD",
            "deepc_torch-0.1.0.dist-info/WHEEL,sha256=x,1\ndeepc_torch-0.1.0.dist-info/RECORD,,\n",
        )
    return path


def test_the_wheel_is_named_by_its_libraries(tmp_path):
    old = fake_wheel(tmp_path, built("libdeepc.so"))
    new = manylinux.rename(old)
    assert new.name == "deepc_torch-0.1.0-py3-none-manylinux_2_28_x86_64.whl" and not old.exists()
    with zipfile.ZipFile(new) as z:
        tag, record = (z.read(f"deepc_torch-0.1.0.dist-info/{n}") for n in ("WHEEL", "RECORD"))
    assert b"Tag: py3-none-manylinux_2_28_x86_64\n" in tag
    digest = base64.urlsafe_b64encode(hashlib.sha256(tag).digest()).rstrip(b"=").decode()
    assert record.decode().splitlines()[0] == f"deepc_torch-0.1.0.dist-info/WHEEL,sha256={digest},{len(tag)}"
    with pytest.raises(ValueError, match="named already"):
        manylinux.rename(new)


def test_a_library_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="libdeepc.so: not a little-endian"):
        manylinux.rename(fake_wheel(tmp_path, b"\x7fELF no more than that"))
    assert list(tmp_path.glob("*linux_x86_64.whl")), "the wheel that was built is still there"


def test_one_version_everywhere():
    import deepc

    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.M)[1]
    cmake = re.search(r"^project\(deepc VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), flags=re.M)[1]
    assert project == cmake == deepc.__version__


def test_the_package_says_that_it_is_typed():
    import deepc

    assert (Path(deepc.__file__).parent / "py.typed").exists()


TRAIN = """
import torch, deepc
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
engine, *_ = deepc.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}})
for _ in range(3):
    loss = engine(torch.ones(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
print("trained", engine.global_steps, deepc.__file__)
"""  # noqa: E501


@pytest.mark.full
def test_sdist_builds_a_wheel_that_trains(tmp_path):
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DEEPC_LIBRARY_DIR")}
    env |= {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "CMAKE_ARGS": "-DDEEPC_CUDA=OFF -DCMAKE_C_FLAGS_RELEASE=-O1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(*command: object, cwd: Path = tmp_path, **more: str) -> str:
        done = subprocess.run(
            [str(c) for c in command],
            cwd=cwd,
            env={**env, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}"
        return done.stdout

    run(sys.executable, "-c", f"import scikit_build_core.build as b; b.build_sdist({str(tmp_path)!r})", cwd=ROOT)
    sdist = next(tmp_path.glob("deepc_torch-*.tar.gz"))
    # torch can't be imported while it builds: the first torch on the path raises
    (tmp_path / "without" / "torch").mkdir(parents=True)
    (tmp_path / "without" / "torch" / "__init__.py").write_text("raise ImportError('the build must not need torch')\n")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        tmp_path,
        sdist,
        PYTHONPATH=str(tmp_path / "without"),
    )
    wheel = manylinux.rename(next(tmp_path.glob("*.whl")))
    clean = tmp_path / "venv"
    venv.create(clean, with_pip=False)
    site = next((clean / "lib").glob("python*/site-packages"))
    run(sys.executable, "-m", "pip", "--python", clean / "bin" / "python", "install", "--no-index", "--no-deps", wheel)
    (site / "torch-from-outside.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # comes after the environment's own packages
    assert "All is well." in run(clean / "bin" / "deepc", "doctor")
    (tmp_path / "train.py").write_text(TRAIN)
    out = run(clean / "bin" / "deepc", "run", "--num_gpus", "2", "train.py")
    assert f"trained 3 {site}" in out, out
