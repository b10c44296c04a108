"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import pytest
from deepc.core import files
from deepc.core.files import atomic_write


@pytest.mark.parametrize("durable", (False, True))
def test_a_file_is_replaced_whole_with_its_permissions(tmp_path, durable):
    path = tmp_path / "there"
    path.write_text("old")
    path.chmod(0o604)
    with atomic_write(path, durable=durable) as f:
        f.write(b"new")
        f.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o604
    assert os.listdir(tmp_path) == ["there"]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")
    for path in ("beside", "link/inside"):  # no folder named; a folder behind a link
        with atomic_write(path, durable=True) as f:
            f.write(b"x")
        assert os.stat(path).st_mode == os.stat("plain").st_mode
    assert sorted(os.listdir()) == ["beside", "folder", "link", "plain"] and os.listdir("folder") == ["inside"]


def test_what_fails_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "there"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_write(path) as f:
        f.write(b"half")
        raise KeyError
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), atomic_write(path) as f:
            f.write(bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), atomic_write(tmp_path / "folder") as f:
        f.write(b"x")
    assert sorted(os.listdir(tmp_path)) == ["folder", "there"] and path.read_text() == "old"


_WRITES = """
import os, signal, sys
from deepc.core.files import atomic_write
with atomic_write(sys.argv[1]) as f:
    f.write(b"half")
    f.flush()
    print("there", flush=True)
    sys.stdin.read(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_kill_leaves_goes_with_the_next_write_of_the_name(tmp_path):
    path = tmp_path / "latest"
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITES, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "there\n"
    (left,) = os.listdir(tmp_path)
    with atomic_write(path) as f:
        f.write(b"a")
    assert sorted(os.listdir(tmp_path)) == sorted([left, "latest"])  # its writer lives
    writer.communicate("x")
    with atomic_write(tmp_path / "latest-2") as f:
        f.write(b"b")
    assert left in os.listdir(tmp_path)  # another name
    with atomic_write(path) as f:
        f.write(b"c")
    assert sorted(os.listdir(tmp_path)) == ["latest", "latest-2"] and path.read_text() == "c"


def test_a_file_of_another_host_goes_when_nobody_has_written_to_it_for_a_day(tmp_path):
    names = [f".there-{host}0123456789abcdef.tmp" for host in ("0a1b2c3d-", "")]  # also of releases before
    for name, age in zip(names, (0.5, 2)):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age * files._ABANDONED_S,) * 2)
    for age, left in ((0.5, names[:1]), (1.5, [])):
        os.utime(tmp_path / names[0], (time.time() - age * files._ABANDONED_S,) * 2)
        with atomic_write(tmp_path / "there") as f:
            f.write(b"x")
        assert sorted(os.listdir(tmp_path)) == [*left, "there"]
