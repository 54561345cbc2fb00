"""Last line of CI: how many end-to-end cases ran; fails when no case with the real vLLM did.

`summary.py RESULTS…`, JUnit files that pytest wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

VLLM_MODULE = "test_vllm"


def main(arguments: list[str]) -> int:
    files = [ElementTree.parse(Path(argument)) for argument in arguments]  # noqa: S314  # pytest's own
    cases = [case for file in files for case in file.iter("testcase")]
    skipped = [case for case in cases if case.find("skipped") is not None]
    real = [case for case in cases if VLLM_MODULE in case.get("classname", "") and case not in skipped]
    print(f"end-to-end: {len(cases) - len(skipped)} run, {len(skipped)} skipped")
    if not real:
        print("end-to-end: every case with the real vLLM was skipped", file=sys.stderr)
    return 0 if real else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
