"""Last lines of CI: how many end-to-end cases ran, and which passed only when they ran once more.

Fails when no case with the real vLLM ran.  `summary.py RESULTS…`, JUnit files that pytest wrote; `NAME.again.xml` holds
those cases of `NAME.xml` that had failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

VLLM_MODULE = "test_vllm"
AGAIN = ".again.xml"

Case = ElementTree.Element


def main(arguments: list[str]) -> int:
    again = cases_of(argument for argument in arguments if argument.endswith(AGAIN))
    cases = cases_of(argument for argument in arguments if not argument.endswith(AGAIN))
    ran = [case for case in cases if case.find("skipped") is None]
    print(f"end-to-end: {len(ran)} run, {len(cases) - len(ran)} skipped")
    for case in again:
        how = "failed twice" if failed(case) else "passed only when it ran once more, alone"
        print(f"{how}: {case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
    if any(VLLM_MODULE in case.get("classname", "") for case in ran):
        return 0
    print("end-to-end: every case with the real vLLM was skipped", file=sys.stderr)
    return 1


def cases_of(results: Iterable[str]) -> list[Case]:
    files = [ElementTree.parse(Path(result)) for result in results]  # noqa: S314  # pytest's own
    return [case for file in files for case in file.iter("testcase")]


def failed(case: Case) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
