"""Counts tests in result files: prints 'passed failed skipped'.

ctest RESULTS.xml GTEST_DIRECTORY   a program that wrote GTEST_DIRECTORY/NAME.xml counts by its tests, another as one
pytest RESULTS.xml
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def _kind(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return FAILED
    # ctest and GoogleTest say it by attribute as well as by element, depending on their versions.
    if case.find("skipped") is not None or case.get("result") in ("skipped", "suppressed"):
        return SKIPPED
    return SKIPPED if case.get("status") in ("notrun", "disabled") else PASSED


def _cases(path: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(path).getroot().iter("testcase"))


def count_pytest(results: Path) -> Counter[str]:
    return Counter(_kind(case) for case in _cases(results))


def count_ctest(results: Path, gtest_directory: Path) -> Counter[str]:
    total: Counter[str] = Counter()
    for program in _cases(results):
        detail = gtest_directory / f"{program.get('name')}.xml"
        inner = Counter(_kind(case) for case in _cases(detail)) if detail.exists() else Counter()
        failed_as_a_whole = program.get("status") == "fail" or _kind(program) == FAILED
        if not inner:
            inner[FAILED if failed_as_a_whole else _kind(program)] += 1
        elif failed_as_a_whole and not inner[FAILED]:
            inner[FAILED] += 1  # a sanitizer's report or a crash after the tests
        total += inner
    return total


def main() -> int:
    kind, results, *rest = sys.argv[1:]
    total = count_pytest(Path(results)) if kind == "pytest" else count_ctest(Path(results), Path(rest[0]))
    print(total[PASSED], total[FAILED], total[SKIPPED])
    return 0


if __name__ == "__main__":
    sys.exit(main())
