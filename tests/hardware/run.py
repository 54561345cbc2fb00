"""`make hardware`: the `gpu` collector against the real driver.  Without a GPU it says so and exits 3.

    python -m hardware.run [--out FILE]      a machine with a GPU; what was found replaces the results in the page
    python -m hardware.run --stand-in        the same checks against the stand-in driver, with pretended work

Exits 1 when something differs from nvidia-smi or from what was done, 0 when nothing does.  It needs a GPU that nobody
uses for about three minutes, and some hundred MiB of its memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from stallwatch.drill.nvml_standin import StandIn, build
from stallwatch.sources.gpus.nvml_child import Absent, Answer, Nvml, Unanswered

from .checks import DIFFERS, NOT_RUN, Found, run
from .machines import Machine, Pretended, Real

PAGE = Path(__file__).parents[2] / "docs/HARDWARE.md"
MARK = "<!-- Below: written by make hardware -->\n"
NO_GPU = 3
START_SECONDS = 60.0

ABSENCE = {
    "library": "there is no libnvidia-ml.so.1",
    "binding": "nvidia-ml-py is not installed",
    "driver": "the driver is not loaded",
    "cards": "the driver finds no card",
}


def why_absent(driver: Nvml) -> str:
    """Why no GPU can be used here; "" when one can."""
    until = time.monotonic() + START_SECONDS
    answer: Answer | Absent | Unanswered = driver.ask(False, False)
    while isinstance(answer, Unanswered) and time.monotonic() < until:
        time.sleep(0.1)
        answer = driver.ask(False, False)
    if isinstance(answer, Absent):
        return ABSENCE[answer.why]
    if isinstance(answer, Unanswered):
        return f"the driver does not answer ({answer.call})"
    if answer.code:
        return f"the driver says {answer.code}"
    return "" if answer.cards else "no card answers"


def page(title: str, driver: str, results: Iterable[tuple[str, list[Found]]]) -> Iterator[str]:
    """Lines of the results."""
    yield f"## Results\n\nOn {time.strftime('%Y-%m-%d', time.gmtime())}, with {title}, {driver}:\n"
    for heading, found in results:
        yield f"### {heading}\n\n| what | verdict | said |\n| --- | --- | --- |"
        yield from (f"| {one.check} | {one.verdict} | {one.said} |" for one in found)
        yield ""


def identity() -> str:
    """Driver and kinds of cards, without anything that belongs to one machine alone."""
    driver = Nvml()
    try:
        if absent := why_absent(driver):
            raise LookupError(absent)
        answer = driver.ask(False, False)
    finally:
        driver.close()
    cards = answer.cards if isinstance(answer, Answer) else ()
    kinds = sorted({card.name for card in cards})
    return f"driver {answer.driver if isinstance(answer, Answer) else '?'}, {len(cards)} of: {', '.join(kinds)}"


def write(out: Path, text: str) -> None:
    """In the place of the results before."""
    head, mark, _ = out.read_text().partition(MARK) if out.exists() else ("", "", "")
    out.write_text(f"{head}{mark or MARK}\n{text}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make hardware", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stand-in", action="store_true", help="no GPU: the checks themselves are tried")
    parser.add_argument("--library", type=Path, help="the stand-in driver, if it is built already")
    parser.add_argument("--out", type=Path, help="the page the results go to (default: docs/HARDWARE.md with a GPU)")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        machine: Machine = Real()
        if given.stand_in:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cards = StandIn(folder, given.library or build(folder))
            os.environ.update(cards.environment())
            machine = Pretended(cards)
        try:
            driver = identity()
        except LookupError as why:
            print(f"No NVIDIA GPU can be used here: {why}.", file=sys.stderr)
            return NO_GPU
        results = list(run(machine))
        text = "\n".join(page(machine.title, driver, results)) + "\n"
        out = given.out or (None if given.stand_in else PAGE)
        if out is not None:
            write(out, text)
        print(text)
        found = [one for _, several in results for one in several]
        print(f"{len(found)} findings, {count(found, DIFFERS)} differ, {count(found, NOT_RUN)} not run")
        return 1 if count(found, DIFFERS) else 0


def count(found: Iterable[Found], verdict: str) -> int:
    return sum(one.verdict == verdict for one in found)


if __name__ == "__main__":
    sys.exit(main())
