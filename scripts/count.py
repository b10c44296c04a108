"""Adds up the results of ctest and pytest. The last line is 'N passed, N failed, N skipped'; before it what was
skipped, and why.

Usage: count.py FOLDER CLASS. FOLDER holds ctest.log, ctest.thread.log and ctest.levels.log (ctest's LastTest.log),
pytest.xml (JUnit), skipped.tsv (kind, number, reason), pytest.broke (the exit code of a pytest that ended otherwise
than by its tests), ctest.broke (of C tests that could not be built); each may be missing. GoogleTest's own cases are
counted, not its executables."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def count_ctest(text: str) -> tuple[Counter, Counter]:
    """(passed, failed, skipped) of LastTest.log, and the reasons of the skipped. A suite that failed without naming a
    case (crash, sanitizer, time-out) is one failure."""
    total, reasons = Counter(), Counter()
    for suite in re.split(r"^\d+/\d+ Testing: ", text, flags=re.M)[1:]:
        found = Counter(
            {
                word.lower(): int(n)
                for word, n in re.findall(r"^\[ +(PASSED|FAILED|SKIPPED) +\] (\d+) tests?[.,]", suite, flags=re.M)
            }
        )
        ended_well = re.search(r"^Test Passed\.", suite, flags=re.M)
        if not ended_well and not found["failed"]:
            found["failed"] = 1
        elif ended_well and not found:  # not a GoogleTest program
            found["passed"] = 1
        total += found
        reasons.update(re.findall(r"^\S+:\d+: Skipped\n(.+)", suite, flags=re.M))
    return total, reasons


def count_pytest(path: Path) -> tuple[Counter, Counter]:
    """(passed, failed, skipped), and the reasons of the skipped. An error in set-up or collection is a failure."""
    total, reasons = Counter(), Counter()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            total["failed"] += 1
        elif (skipped := case.find("skipped")) is not None:
            total["skipped"] += 1
            reasons[skipped.get("message", "no reason given")] += 1
        else:
            total["passed"] += 1
    return total, reasons


def main(folder: Path, test_class: str) -> int:
    total: Counter = Counter()
    reasons: Counter = Counter()
    for name, what in (
        ("ctest.log", "C"),
        ("ctest.thread.log", "C under ThreadSanitizer"),
        ("ctest.levels.log", "C at instruction sets that this processor has not"),
    ):
        if not (log := folder / name).exists():
            continue
        c, why = count_ctest(log.read_text(errors="replace"))
        print(f"{what}: {c['passed']} passed, {c['failed']} failed, {c['skipped']} skipped")
        total, reasons = total + c, reasons + why
    if (xml := folder / "pytest.xml").exists():
        p, why = count_pytest(xml)
        print(f"Python: {p['passed']} passed, {p['failed']} failed, {p['skipped']} skipped")
        total, reasons = total + p, reasons + why
    for name, what in (("pytest.broke", "pytest itself"), ("ctest.broke", "the build of the C tests")):
        if (broke := folder / name).exists():
            print(f"{what} ended with exit code {broke.read_text().strip()}")
            total["failed"] += 1
    if (tsv := folder / "skipped.tsv").exists():
        for line in tsv.read_text().splitlines():
            kind, n, why = line.split("\t")
            total["skipped"] += int(n)
            reasons[f"{kind}: {why}"] += int(n)
    for why, n in reasons.most_common():
        print(f"skipped {n}: {why}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    nothing = not total["passed"] and not (test_class == "gpu" and total["skipped"])
    return 1 if total["failed"] or nothing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
