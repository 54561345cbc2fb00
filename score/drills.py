"""What stallwatch says of the conditions of `stallwatch drill`, live: real processes, while `record` writes them down.

The end-to-end tests of the drills write what they saw to the file that STALLWATCH_DRILL_RESULTS names, one line of
JSON each.  `python -m score --drills` runs them and keeps the lines as drills.jsonl; `python -m score.drills FILE`
compares those of another run with it.  No times are kept: drills run sped up, on whatever machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "drills.jsonl"
VARIABLE = "STALLWATCH_DRILL_RESULTS"
SELECTED = "is_what_it_says"

CAUSES: Mapping[str, str] = {}
"""Condition that is not right in what was kept -> why; tests/test_score.py sees to it that none is left out."""

_ALARMS = ("stalled", "suspect", "failed", "unknown")


@dataclass(frozen=True, slots=True)
class Drilled:
    """One condition: what should be said in the end, what was, and every state on the way."""

    condition: str
    should: str
    said: str
    states: tuple[str, ...]
    twin: str = ""

    @property
    def is_right(self) -> bool:
        return self.should == self.said and not (set(self.states) & set(_ALARMS)) - {self.should.partition(" ")[0]}


def words(state: str, reason: str, rank: str | None) -> str:
    """`stalled idle_wait TP3`; of what is no alarm only the state, for its reason may change with what is read."""
    return " ".join(filter(None, (state, reason, rank))) if state in _ALARMS else state


def note(result: Drilled) -> None:
    """Called by the end-to-end tests; does nothing where nobody asked for results."""
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def load(path: Path = KEPT) -> dict[str, Drilled]:
    """Condition -> result, in the order of the names; empty where nothing was kept yet."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [Drilled(**{**row, "states": tuple(row["states"])}) for row in rows]
    return {result.condition: result for result in sorted(found, key=lambda result: result.condition)}


def table(found: Mapping[str, Drilled]) -> Iterator[str]:
    right = sum(result.is_right for result in found.values())
    alarms = sum(result.should.startswith(_ALARMS) for result in found.values())
    yield f"{len(found)} conditions, {alarms} of them with an alarm to come: {right} right."
    yield ""
    yield "| condition | should say | said | right | twin |"
    yield "| --- | --- | --- | --- | --- |"
    for result in found.values():
        twin = f"`{result.twin}`" if result.twin else ""
        yield f"| `{result.condition}` | {result.should} | {result.said} | {_right(result)} | {twin} |"


def _right(result: Drilled) -> str:
    if result.is_right:
        return "yes"
    return f"**no**, {' and '.join(result.states)}: {CAUSES.get(result.condition, 'cause unknown')}"


def run() -> int:
    """The end-to-end tests of the drills; what they saw is kept.  The exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "drills.jsonl")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "e2e", "-k", SELECTED, "tests/e2e/test_drills.py"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, VARIABLE: str(results)}, check=False)
        keep(load(results).values())
    return done.returncode


def keep(found: Iterable[Drilled]) -> None:
    KEPT.write_text("".join(json.dumps(asdict(result)) + "\n" for result in found), encoding="utf-8")


def differences(kept: Mapping[str, Drilled], found: Mapping[str, Drilled]) -> list[str]:
    """What another run said differently.  A condition it had to skip (no cgroup, no compiler) is no difference."""
    return [
        f"{name}: {found[name].said}, kept is {kept[name].said if name in kept else 'nothing'}"
        for name in found
        if name not in kept or (kept[name].should, kept[name].said) != (found[name].should, found[name].said)
    ]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    found = load(Path(arguments[0]))
    wrong = differences(load(), found)
    print(f"drills: {len(found)} run, {len(wrong)} other than kept", *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
