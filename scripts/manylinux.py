"""Names a wheel by what its libraries need of the system: manylinux_2_N for the newest glibc symbol in them.

Usage: manylinux.py WHEEL. Renames the wheel in place of the one that was built (platform tag linux_*) and prints its
new name. Fails, and leaves the wheel, if a library needs what no manylinux system promises. Standard library only;
reads ELF itself, because the tools that do (auditwheel, readelf) are not on every machine that builds."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

FLOOR = (2, 28)  # torch's own wheels need this glibc, so an older name would promise nothing
# What the manylinux policies let a library ask the system for, as far as C and CUDA's host code need it.
ALLOWED = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libstdc++.so.6",
    "libgcc_s.so.1",
}
CXX = {"CXXABI_1.3", "GCC_3.0"}  # nothing but the oldest of the C++ runtime


class Needs(NamedTuple):
    """Of one ELF file: the libraries that it is linked to, and per library the symbol versions that it asks for."""

    libraries: list[str]
    versions: dict[str, set[str]]


class _Elf:
    """A little-endian 64-bit ELF file, by its section headers."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian 64-bit ELF file")
        self.data = data
        at, size, count = struct.unpack_from("<Q", data, 0x28)[0], *struct.unpack_from("<HH", data, 0x3A)
        # (type, offset, size, link, info) of each section
        rows = [struct.unpack_from("<IIQQQQIIQQ", data, at + i * size) for i in range(count)]
        self.sections = [(r[1], r[4], r[5], r[6], r[7]) for r in rows]

    def text(self, strings: int, offset: int) -> str:
        at = self.sections[strings][1] + offset
        return self.data[at : self.data.index(b"\0", at)].decode()


def elf_needs(data: bytes) -> Needs:
    """What the dynamic loader will ask for (sections .dynamic and .gnu.version_r; System V ABI, and the LSB for
    versions)."""
    elf = _Elf(data)
    libraries: list[str] = []
    versions: dict[str, set[str]] = {}
    for kind, offset, size, link, info in elf.sections:
        if kind == 6:  # SHT_DYNAMIC
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<qQ", data, at)
                if tag == 1:  # DT_NEEDED
                    libraries.append(elf.text(link, value))
        elif kind == 0x6FFFFFFE:  # SHT_GNU_verneed
            at = offset
            for _ in range(info):
                _, count, file, aux, after = struct.unpack_from("<HHIII", data, at)
                asked = versions.setdefault(elf.text(link, file), set())
                entry = at + aux
                for _ in range(count):
                    _, _, _, name, step = struct.unpack_from("<IHHII", data, entry)
                    asked.add(elf.text(link, name))
                    entry += step
                at += after
    return Needs(libraries, versions)


def libraries_of(wheel: Path) -> dict[str, bytes]:
    """The shared libraries in a wheel, by their path in it."""
    with zipfile.ZipFile(wheel) as z:
        return {n: z.read(n) for n in z.namelist() if re.search(r"\.so(\.\d+)*$", n)}


def glibc_needed(needs: Needs) -> tuple[int, int]:
    """(2, N): the newest glibc version in `needs`. ValueError for any other version (GLIBC_PRIVATE, GLIBCXX_*)."""
    newest = (2, 0)
    for version in sorted({v for asked in needs.versions.values() for v in asked} - CXX):
        found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
        if not found:
            raise ValueError(f"it needs {version}, which is no public version of glibc")
        newest = max(newest, (int(found[1]), int(found[2])))
    return newest


def glibc_of(wheel: Path) -> tuple[int, int]:
    """The oldest glibc on which all libraries of the wheel load, at least FLOOR. ValueError names a library that asks
    for more than glibc."""
    libraries = libraries_of(wheel)
    own = {Path(n).name for n in libraries}
    newest = FLOOR
    for name, data in libraries.items():
        try:
            needs = elf_needs(data)
            if foreign := sorted(set(needs.libraries) - ALLOWED - own):
                raise ValueError(f"it is linked to {', '.join(foreign)}, which not every system has")
            newest = max(newest, glibc_needed(needs))
        except ValueError as exc:
            raise ValueError(f"{wheel.name}: {name}: {exc}") from None
    return newest


def _retag(text: str, new: str) -> str:
    return re.sub(r"^(Tag: [^-\n]+-[^-\n]+-)linux_", rf"\1{new}_", text, flags=re.M)


def rename(wheel: Path) -> Path:
    """Writes the wheel under its manylinux name, with the tag in WHEEL and its line in RECORD, and removes the one
    under the old name."""
    found = re.fullmatch(r"(.+-)linux_(\w+)\.whl", wheel.name)
    if not found:
        raise ValueError(
            f"{wheel.name} has no platform tag linux_*: it is named already, or it is no wheel of this project"
        )
    tag = "manylinux_{}_{}".format(*glibc_of(wheel))
    new = wheel.with_name(f"{found[1]}{tag}_{found[2]}.whl")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as out:
        info = next(n for n in old.namelist() if n.endswith(".dist-info/WHEEL"))
        content = _retag(old.read(info).decode(), tag).encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        for item in old.infolist():
            data = old.read(item)
            if item.filename == info:
                data = content
            elif item.filename.endswith(".dist-info/RECORD"):
                data = re.sub(
                    rf"^{re.escape(info)},.*$", f"{info},sha256={digest},{len(content)}", data.decode(), flags=re.M
                ).encode()
            out.writestr(item, data, zipfile.ZIP_DEFLATED)
    wheel.unlink()
    return new


def main() -> int:
    try:
        print(rename(Path(sys.argv[1])))
    except (ValueError, OSError) as exc:
        print(f"deepc: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
