"""The C core has floors: a file calls only functions of files that stand before it. The order is that of the source
lists in ops/, zero/, offload/ and comm/CMakeLists.txt. A folder includes only headers of its own and of the folders
below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ["ops/base", "ops", "zero", "offload", "comm"]  # lowest first


def _listed(folder: str) -> list[Path]:
    """The sources of a folder's CMakeLists.txt, in its order."""
    text = re.sub(r"#.*", "", (ROOT / folder / "CMakeLists.txt").read_text(encoding="utf-8"))
    lists = re.findall(r"deepc_layer\s*\(\s*\S+([^)]*)\)", text)
    return [ROOT / folder / name for sources in lists for name in re.findall(r"[\w/]+\.c\b", sources)]


def _code(path: Path) -> str:
    """Without comments and strings."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)


NAME = r"dc_\w+"


def _defined(code: str) -> set[str]:
    """Functions and variables that other files can see, as they stand in the text (not what macros make of it)."""
    functions = re.findall(
        rf"^(?!static|typedef|extern|#|\s)[^\n;={{}}()]*?\b({NAME})\s*\([^;{{}}]*\)\s*\{{", code, flags=re.M
    )
    variables = re.findall(
        rf"^(?!static|typedef|extern|#|\s)[^\n;={{}}]*?\b({NAME})\)?(?:\[[^\]]*\])?(?:\(void\))?\s*(?:=[^;]*)?;",
        code,
        flags=re.M,
    )
    return set(functions) | set(variables)


def _order() -> list[Path]:
    order = [path for folder in ("ops", "zero", "offload", "comm") for path in _listed(folder)]
    assert len(order) == len(set(order)), "a source is listed twice"
    return order


def test_every_source_is_listed() -> None:
    listed = set(_order())
    for folder in ("zero", "offload", "comm"):
        assert {p for p in (ROOT / folder).glob("*.c")} <= listed


def test_no_file_uses_what_a_later_one_defines() -> None:
    order = _order()
    code = {path: _code(path) for path in order}
    home: dict[str, int] = {}
    for at, path in enumerate(order):
        for name in _defined(code[path]):
            assert name not in home, f"{name} is defined in {order[home[name]]} and {path}"
            home[name] = at
    assert {"dc_all_reduce", "dc__await", "dc__unfinished", "dc__serve"} <= set(home), "the search finds nothing"
    upward = [
        f"{path.relative_to(ROOT)} uses {name} of {order[home[name]].relative_to(ROOT)}"
        for at, path in enumerate(order)
        for name in sorted(set(re.findall(rf"\b{NAME}\b", code[path])))
        if home.get(name, at) > at
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("folder", FLOORS)
def test_includes_go_down(folder: str) -> None:
    allowed = FLOORS[: FLOORS.index(folder) + 1]
    for path in sorted([*(ROOT / folder).glob("*.[ch]")]):
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), flags=re.M):
            roots = [path.parent, ROOT, ROOT / "ops"]
            found = next((r / name for r in roots if (r / name).exists()), None)
            assert found is not None, f"{path.relative_to(ROOT)} includes {name}, which is nowhere"
            where = found.resolve().relative_to(ROOT)
            top = "ops/base" if where.parts[:2] == ("ops", "base") else where.parts[0]
            assert top in allowed, f"{path.relative_to(ROOT)} includes {where}"


# ---- names of statics ----------------------------------------------------------------------------------------------
STATIC_FOLDERS = [*FLOORS, "ops/cpu", "ops/ref", "ops/cuda", "shim"]


def _outside(code: str) -> str:
    """What lies outside of all braces: `int f(void) {}`."""
    depth, kept = 0, []
    for part in re.split(r"([{}])", code):
        depth -= part == "}"
        if depth == 0:
            kept.append(part)
        depth += part == "{"
    return "".join(kept)


def _statics(code: str) -> list[str]:
    """The names of a file's static functions and variables (those outside of function bodies)."""
    code = _outside(re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", "", code, flags=re.M))
    names = []
    for declaration in re.findall(r"\bstatic\b((?:\s*(?:const\s+)?struct\s*\w*\s*\{\})?[^;{=]*)", code):
        text = re.sub(r"__attribute__\s*\(\(.*?\)\)", " ", declaration, flags=re.S)
        text = re.sub(r"\b_Atomic\s*\((?:[^()]|\([^()]*\))*\)", " ", text)
        # before the first parenthesis, in it (a pointer to a function), or last
        found = re.search(r"^[^(]*?(\w+)\s*\((?!\s*\*)|^[^(]*\(\s*\*\s*(\w+)|(\w+)\s*(?:\[[^\]]*\]\s*)*$", text)
        assert found, f"no name in: static{declaration}"
        names.append(next(name for name in found.groups() if name))
    return names


def _is_short_for(prefix: str, word: str) -> bool:
    """rdv for rendezvous: the word's first letter, and more of its letters in their order."""
    letters = iter(word)
    return prefix[:1] == word[:1] and all(letter in letters for letter in prefix)


def test_the_search_for_statics_sees_every_form() -> None:
    text = """
    static const int *one(int a, int (*f)(void)) { static int inside = 1; if (a) { return 0; } return f(); }
    static inline __attribute__((always_inline)) int two(void) { return 1; }
    __attribute__((target("x"))) static int three(void) { return 1; }
    static struct thing { int a; struct { int b; } c; } four = {.a = 1};
    static const struct { int a; } five[] = { {1}, {2}, };
    static int (*six)(void **, size_t), *unused;
    static _Atomic(int (*)(void)) seven;
    static _Atomic(hook) eight;
    static header *_Atomic nine;
    static char ten[2][N + 1];
    static void eleven(int);
    template <class T> static int twelve(T t) { return 1; }
    static pthread_mutex_t thirteen = INITIALIZER;
    int not_static(void) { static int inside; return inside; }
    """
    assert _statics(text) == ("one two three four five six seven eight nine ten eleven twelve thirteen".split())


def _sources_with_statics() -> list[Path]:
    return [p for folder in STATIC_FOLDERS for p in sorted((ROOT / folder).iterdir()) if p.suffix in (".c", ".cu")]


@pytest.mark.parametrize("path", _sources_with_statics(), ids=lambda p: str(p.relative_to(ROOT)))
def test_statics_begin_with_their_files_name(path: Path) -> None:
    """coll_direct.c: direct_slice; rendezvous.c: rdv_nap. One prefix a file: a word of its name, perhaps shortened."""
    names = _statics(_code(path))
    prefixes = {name.split("_")[0] for name in names}
    assert len(prefixes) <= 1, f"{path.relative_to(ROOT)} has statics of several prefixes: {sorted(names)}"
    words = path.stem.split("_")
    for prefix in prefixes:
        assert any(_is_short_for(prefix, word) for word in words), (
            f"{path.relative_to(ROOT)}: statics begin with {prefix}_, which is no word of the file's name"
        )


def test_every_process_wide_lock_is_known_to_forks() -> None:
    """A mutex outside of functions has its own row (DC__AT_FORK) or is made anew in the child by its file's row."""
    locks, rows = set(), set()
    for folder in ("ops", "zero", "offload", "comm"):
        for path in (ROOT / folder).rglob("*.c"):
            code = _code(path)
            for found in re.finditer(r"(\.?)(\w+)\s*=\s*PTHREAD_MUTEX_INITIALIZER", code):
                owner = re.findall(r"\b(\w+)\s*=\s*\{", code[: found.start()]) if found[1] else []
                locks.add((path.name, f"{owner[-1]}.{found[2]}" if owner else found[2]))
            rows |= {(path.name, lock) for lock in re.findall(r"DC__AT_FORK\(\s*\w+,\s*\w+,\s*&([\w.]+)", code)}
    excused = {
        ("fork.c", "fork_turn"),  # the forks' own
        ("pool.c", "pool.owner"),  # made anew in the child by the row of pool.lock
        ("adafactor.c", "j.lock"),  # of one job, on the stack of the thread that forks or waits
    }
    assert len(rows) == 12 and excused < locks
    assert locks - excused == rows
