"""The documentation: generated pages are current, the menu is complete, links lead somewhere, and the site builds
without a warning."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))

sys.path.insert(0, str(ROOT / "scripts"))
import errors_page


def nav() -> list[str]:
    return re.findall(r"^\s+- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M)


def test_generated_pages_are_current(capsys):
    assert errors_page.main(["--check"]) == 0, capsys.readouterr().err


def test_statuses_are_those_of_the_library():
    from deepc.core import lib as _lib

    i, seen = 0, {}
    name, value = ctypes.c_char_p(), ctypes.c_int()
    while _lib.C.dc_status_at(i, ctypes.byref(name), ctypes.byref(value)) == 0:
        seen[name.value.decode()] = (value.value, _lib.C.dc_status_text(value.value).decode())
        i += 1
    assert seen == {n: (v, text) for n, v, text, _ in errors_page.statuses()}
    raised = {n: e for n, _, _, e in errors_page.statuses()}
    assert {n: e.__name__ for n, e in _lib._EXCEPTIONS.items()} == {n: raised[n] for n in _lib._EXCEPTIONS}


def test_every_exception_is_listed():
    from deepc import errors

    ours = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.DeepcError)}
    listed = {e.name for e in errors_page.errors()}
    assert ours <= listed
    assert all(e.fix for e in errors_page.errors() if e.module == "errors.py")


def test_messages_show_values_as_an_ellipsis():
    found = {(m.error, m.text) for m in errors_page.messages()}
    assert ("ArgumentError", "initialize needs model=, a torch.nn.Module, got …") in found
    page = errors_page.on_page_markdown(f"before\n{errors_page.MARK}\nafter")
    assert page.startswith("before") and page.endswith("after") and "initialize needs model=" in page


def test_every_page_is_in_the_menu_once():
    listed = nav()
    assert sorted(listed) == sorted(set(listed)), "a page stands twice in mkdocs.yml"
    assert not set(listed) - set(PAGES), f"mkdocs.yml lists pages that do not exist: {sorted(set(listed) - set(PAGES))}"
    assert not set(PAGES) - set(listed), f"mkdocs.yml lacks {sorted(set(PAGES) - set(listed))}"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages(page):
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", link):
            target = (DOCS / page).parent / link.partition("#")[0]
            assert target.resolve().is_relative_to(DOCS), (
                f"{page}: {link} leads out of docs/, where the site has nothing"
            )
            assert target.exists(), f"{page}: {link} leads nowhere"


def test_the_public_names_are_in_the_reference():
    import deepc

    listed = set(
        re.findall(r"^::: ([\w.]+)$", "\n".join((DOCS / p).read_text() for p in PAGES if p[:4] == "api/"), re.M)
    )
    names = {f"deepc.{n}" for n in deepc.__all__} | {f"deepc.optim.{n}" for n in deepc.optim.__all__}
    elsewhere = {
        "deepc.DeepcError",  # errors.md
        "deepc.counters",  # for tests: `deepc doctor` prints them
        "deepc.estimate",  # under its module's name
        "deepc.notebook",  # its launch
        "deepc.offload",  # its classes
        "deepc.optim",
        "deepc.profile",  # profiling.md
        "deepc.utils",  # deepc.compat.helpers.safe
    }
    assert sorted(names - listed) == sorted(elsewhere)


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (pip install '.[docs]')")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "initialize needs model=" in (tmp_path / "site" / "messages.html").read_text(encoding="utf-8")
    assert "sample_batch" in (tmp_path / "site" / "api" / "training.html").read_text(encoding="utf-8")
