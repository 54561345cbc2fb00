"""The document of `parse` as a report for people: fit for a bug report, without a word of the log itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ..sources.logs.kind import FALLBACK

Json = Mapping[str, Any]

MOST_ERRORS = 20
MOST_RANKS = 128
MOST_PHASES = 60
MOST_STARTS = 10
_EVENT_WORDS = {"none": "a line without meaning", "novel": "a line of a new kind", None: "a line no pattern knows"}
_TOLD_EVENTS = ("waiting", "lock_wait", "watchdog")


def format_file(one: Json) -> str:
    """One file's report; ends with a line end."""
    return "\n".join(_lines(one)) + "\n"


def _lines(one: Json) -> Iterator[str]:
    yield f"{one['file']}: {one['framework']} {one['version'] or '(version not printed)'}"
    yield f"  {_counted(one['lines'], 'line')} read; {outcome(one)}"
    for warning in one["warnings"]:
        yield f"  warning: {warning}"
    yield from _kind_lines(one)
    yield from _start_lines(one)
    yield from _phase_lines(one)
    yield from _rank_lines(one)
    yield from _silence_lines(one)
    yield from _repeat_lines(one)
    yield from _error_lines(one)
    yield f"  {_counted(one['unmatched'], 'line')} no pattern knows"


def outcome(one: Json) -> str:
    """What the log proves, in one sentence."""
    if one["failed"]:
        return f"failed at line {one['failed_line']}{_fatal(one)}; {_came(one)}"
    words = f"ready at line {one['ready_line']}" if one["ready"] else f"not ready: {_proved(one)}{_trouble(one)}"
    return f"{words}; shut down at line {one['stopped_line']}" if one["stopped_line"] else words


def _trouble(one: Json) -> str:
    """The first error behind the last progress: what a start that ended without a fatal line may have ended by."""
    last = one["last_progress"]["line"] if one["last_progress"] else 0
    found = next((error for error in one["errors"] if error["line"] > last), None)
    return f", then {found['kind']} at line {found['line']}" if found else ""


def _fatal(one: Json) -> str:
    """Kind and rank of the fatal line."""
    found = next((error for error in one["errors"] if error["line"] == one["failed_line"]), None)
    if found is None:
        return ""
    return f" ({found['kind']}{' on ' + found['rank'] if found['rank'] else ''})"


def _came(one: Json) -> str:
    return f"it was ready at line {one['ready_line']}" if one["ready"] else f"not ready before: {_proved(one)}"


def _proved(one: Json) -> str:
    last = one["last_progress"]
    phases = [phase["phase"] for phase in one["phases"] if phase["rank"] is None and phase["phase"] != "stopped"]
    if last is None or not phases:
        return "nothing is proved"
    rank = f" on {last['rank']}" if last["rank"] else ""
    return f"last proved is {phases[-1]} (line {last['line']}: {_EVENT_WORDS.get(last['event'], last['event'])}{rank})"


def _kind_lines(one: Json) -> Iterator[str]:
    if one["container"]:
        form = {"docker": "Docker (json-file)", "cri": "CRI (containerd, CRI-O)"}[one["container"]]
        yield f"  written by a container's runtime: {form}; lines without a time of their own have the runtime's"
    if not one["lines"] or one["last_progress"] or one["failed"]:
        if one["lines"] and not one["recognised"] and one["framework"] != FALLBACK:
            yield f"  no line is {one['framework']}'s alone: that it is its log is a guess"
    elif one["framework"] == FALLBACK:
        yield "  no line of a known server was found: this log is of an unknown kind"
    elif not one["markers"]:
        yield f"  no line of a start of {one['framework']} was found"


def _start_lines(one: Json) -> Iterator[str]:
    if one["starts"] <= 1:
        return
    yield f"  {one['starts']} starts in this file; what follows is the last one, from line {one['begin_line']}"
    shown = one["earlier_starts"][-MOST_STARTS:]
    if len(shown) < one["starts"] - 1:
        yield f"    {one['starts'] - 1 - len(shown)} earlier ones are left out"
    for start in shown:
        words = f"ready at line {start['ready_line']}" if start["ready_line"] else f"not ready, last {start['phase']}"
        for key, what in (("failed_line", "failed"), ("stopped_line", "shut down")):
            words += f", {what} at line {start[key]}" if start[key] else ""
        yield f"    lines {start['begin_line']} to {start['end_line']}: {words}"


def _phase_lines(one: Json) -> Iterator[str]:
    phases = [phase for phase in one["phases"] if phase["rank"] is None]
    if not phases:
        return
    left_out = max(0, len(phases) - MOST_PHASES)
    rows = [("phase", "lines", "began", "lasted")]
    for phase in phases[left_out:]:
        end = phase["end_line"] or "the end"
        rows.append((phase["phase"], f"{phase['begin_line']} to {end}", phase["begin"] or "?", _lasted(phase)))
    yield from _table(rows)
    if left_out:
        yield f"  {left_out} earlier phases are left out"


def _lasted(phase: Json) -> str:
    if phase["seconds"] is None:
        return "?"
    return duration(phase["seconds"]) + ("" if phase["end_line"] else " so far")


def _rank_lines(one: Json) -> Iterator[str]:
    if not one["ranks"]:
        return
    rows = [("rank", "phase", "weights", "markers", "last progress")]
    for name, rank in list(one["ranks"].items())[:MOST_RANKS]:
        passed = one["rank_progress"][name]
        loaded = "?" if rank["load_progress"] is None else f"{100 * rank['load_progress']:.0f} %"
        line = f"line {passed['last_line']}" if passed["last_line"] else "none"
        rows.append((name, rank["phase"], loaded, str(passed["markers"]), line))
    yield from _table(rows)
    if len(one["ranks"]) > MOST_RANKS:
        yield f"  {len(one['ranks']) - MOST_RANKS} more ranks are left out"


def _silence_lines(one: Json) -> Iterator[str]:
    for key, what in (("silences", "any lines"), ("progress_silences", "lines that show progress")):
        if one[key]:
            yield f"  longest silences (between {what} with a time):"
        for gap in one[key]:
            after = _EVENT_WORDS.get(gap["after_event"], gap["after_event"])
            until = _EVENT_WORDS.get(gap["until_event"], gap["until_event"])
            words = f"after line {gap['after_line']} ({after}), until line {gap['until_line']} ({until})"
            undated = (
                f"; {_counted(gap['undated_lines'], 'line')} without a time between" if gap["undated_lines"] else ""
            )
            yield f"    {duration(gap['seconds'])} {words}{undated}"


def _repeat_lines(one: Json) -> Iterator[str]:
    if one["heartbeats"]:
        first, last = one["heartbeat_lines"] or ("?", "?")
        where = f"line {first}" if one["heartbeats"] == 1 else f"lines {first} to {last}"
        yield f"  {_counted(one['heartbeats'], 'heartbeat')}, {where}: neither progress nor trouble"
    for event in _TOLD_EVENTS:
        if count := one["other_events"].get(event):
            yield f"  {_counted(count, 'line')} of {event}, which is no progress"


def _error_lines(one: Json) -> Iterator[str]:
    if not one["errors"]:
        return
    kinds = Counter(error["kind"] for error in one["errors"])
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    known = "" if one["error_lines"] == len(one["errors"]) else f" in the first {len(one['errors'])}"
    yield f"  {_counted(one['error_lines'], 'error')}: {said}{known}"
    runs = [(key, [error["line"] for error in run]) for key, run in groupby(one["errors"], _kind_and_rank)]
    shown = runs if len(runs) <= MOST_ERRORS else [*runs[: MOST_ERRORS // 2], *runs[-MOST_ERRORS // 2 :]]
    for number, ((kind, rank), lines) in enumerate(shown):
        if len(runs) > MOST_ERRORS and number == MOST_ERRORS // 2:
            yield f"    {len(runs) - MOST_ERRORS} more in between"
        where = f"line {lines[0]}" if len(lines) == 1 else f"lines {lines[0]} to {lines[-1]}, {len(lines)} of them"
        yield f"    {where}: {kind}" + (f" on {rank}" if rank else "")


def _kind_and_rank(error: Json) -> tuple[str, str]:
    return error["kind"], error["rank"] or ""


# --- words ---------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """0.004 s, 12 s, 3 min 48 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
