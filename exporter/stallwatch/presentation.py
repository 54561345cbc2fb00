"""Report -> the JSON document of `check` and `/api/v1/report`, and that document -> words.

The text is made from the document, not from the Report: `check` may hold one fetched from a running `serve`.
Such a document comes from another process, so everything in it is treated as foreign text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .gpu_words import GPU_CELLS, cards_of, gpu_document, gpu_words
from .model import RankState, Report, Server, ServerReport
from .printable import printable

SCHEMA = 1

Document = Mapping[str, Any]
"""A JSON object as `json.loads` gives it."""

BAD_STATES = ("stalled", "failed")
UNJUDGED_STATES = ("unknown", "gone")
EPISODE_STATES = ("suspect", *BAD_STATES)

REASON_WORDS: Mapping[str, str] = {
    "idle_wait": "every thread is asleep",
    "blocked_io": "a thread waits for a disk, or for its output to be read",
    "stopped": "a process is stopped by a signal",
    "stale_lock": "it waits for a lock file nobody holds",
    "busy_spin": "CPU is busy and nothing else moves",
    "gpu_spin": "GPUs spin without doing work",
    "rank_dead": "a rank is dead",
    "rank_missing": "a rank never came",
    "port_taken": "another process has its port",
    "no_tokens": "work is owed and no token comes",
    "health_timeout": "the health endpoint does not answer",
    "fatal_log": "the log ends in a fatal error",
    "exited": "its first process ended without a word",
    "out_of_memory": "the kernel killed it for memory",
    "gpu_lost": "a GPU is lost",
    "driver_unresponsive": "the GPU driver does not answer",
    "waiting_remote": "it waits for another node",
    "lock_wait": "it waits for a lock",
    "traced": "a debugger holds it",
    "frozen": "its cgroup is frozen",
    "paused": "it is in sleep mode",
    "unreadable": "the evidence cannot be read",
    "no_evidence": "there is too little evidence",
}
"""What a reason means, for people; `none` has no words."""

WIDTH = 120
"""Columns a table of ranks fits into, as long as its ranks have short names."""

_GAP = "  "
_MARK = "> "
"""Stands before the rank the others wait for, where other lines are indented."""

_LEAST_ROOM = 12

SEVERITY = ("stalled", "failed", "suspect", "unknown", "quiet", "slow", "working", "idle", "gone")
"""States, what needs a person first."""


# --- Report -> document ------------------------------------------------------------------------------------


def document(report: Report) -> dict[str, Any]:
    """The report as a JSON document of schema 1: see docs/REFERENCE.md, "JSON documents".

    Moments are Unix seconds, ages are seconds as of `timestamp`; null = not known.
    """
    return {
        "schema": SCHEMA,
        "timestamp": report.timestamp,
        "servers": [server_document(server, report.monotonic) for server in report.servers],
    }


PLACES = ("pod", "namespace", "container", "unit", "slurm_job")
"""Where a server runs; docs/CONTAINERS.md."""


def server_document(report: ServerReport, now: float) -> dict[str, Any]:
    """One server of the document.  `now`: the monotonic second of the report, for `since_seconds_ago`."""
    server, verdict = report.server, report.verdict
    return {
        "server": printable(server.name),
        "framework": printable(server.framework),
        "version": printable(server.version),
        "model": printable(server.model),
        "role": server.role,
        **{name: printable(getattr(server, name)) for name in PLACES},
        "state": verdict.state,
        "reason": verdict.reason,
        "since": _number(report.since_timestamp),
        "since_seconds_ago": _number(max(0.0, now - verdict.since)),
        "phase": report.phase,
        "phase_since": _number(report.phase_start_timestamp),
        "phase_budget_seconds": _number(report.phase_budget_seconds),
        "ready": report.ready,
        "suspect_rank": verdict.suspect_rank and printable(verdict.suspect_rank),
        "ranks_expected": server.ranks_expected,
        "ranks_alive": report.ranks_alive,
        "starts": report.starts,
        "startup_seconds": _number(report.startup_seconds),
        "deadlines": {clock: _number(at) for clock, at in report.deadlines.items()},
        "ranks": [_rank(rank, server) for rank in report.ranks],
        "channels": [
            {"channel": each.channel, "state": each.state, "age_seconds": _number(each.age_seconds)}
            for each in report.channels
        ],
        "advice": list(report.advice),
    }


def _rank(rank: RankState, server: Server) -> dict[str, Any]:
    process = next((process.id for process in server.processes if process.id.pid == rank.pid), None)
    done, total = rank.load_counts or (None, None)
    return {
        "rank": printable(rank.rank),
        "pid": rank.pid,
        "start_ticks": process and process.start_ticks,
        "phase": rank.phase,
        "load_progress": _number(rank.load_progress),
        "load_done": done,
        "load_total": total,
        "alive": rank.alive,
        "wait": None if rank.wait is None else {wait: count for wait, count in rank.wait.items() if count},
        "main_wait": rank.main_wait,
        "gpu": rank.gpu and printable(rank.gpu),
        "gpus": [gpu_document(gpu) for gpu in rank.gpus],
        "progress_age_seconds": _number(rank.progress_age_seconds),
    }


def _number(value: float | None) -> float | None:
    """JSON has no infinity and no NaN: they are not known."""
    return value if value is not None and math.isfinite(value) else None


def exit_code(report: Document) -> int:
    """`check`'s exit status: 1 any stalled or failed; else 3 no server, or none could be judged; else 0."""
    states = [server["state"] for server in report["servers"]]
    if any(state in BAD_STATES for state in states):
        return 1
    return 0 if any(state not in UNJUDGED_STATES for state in states) else 3


def by_severity(servers: Iterable[Document]) -> list[Document]:
    """What needs a person first; then by name."""
    return sorted(servers, key=lambda server: (SEVERITY.index(server["state"]), server["server"]))


# --- document -> words -------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """`41s`, `6m41s`, `3h14m`, `2d1h`: at most two units, rounded down."""
    whole = int(seconds)
    for above, size, unit, below in _UNITS:
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{unit}" + (f"{rest}{above}" if rest else "")
    return f"{whole}s"


_UNITS = (("h", 86400, "d", 3600), ("m", 3600, "h", 60), ("s", 60, "m", 1))
"""Smaller unit, size of a unit in seconds, its letter, size of the smaller one."""


def verdict_words(server: Document) -> str:
    """The verdict without the name: `stalled (idle_wait) for 6m41s in loading_weights: ...`."""
    if server["state"] == "gone" and server.get("starts") == 0:
        return "gone: it has not been seen yet"
    reason, words = server["reason"], f"{server['state']}"
    if reason != "none":
        words += f" ({reason})"
    if (ago := server.get("since_seconds_ago")) is not None:
        words += f" for {duration(ago)}"
    if not server["ready"] and server["state"] != "gone":
        words += f" in {server['phase']}"
    because = [REASON_WORDS[reason]] if reason in REASON_WORDS else []
    if server["state"] == "idle" and reason == "no_evidence":
        because = ["ready; whether it has work is not known"]
    if server["state"] in EPISODE_STATES:
        because += _whom_and_gpus(server["suspect_rank"], gpu_words(server["ranks"]))
    return words + (f": {', '.join(because)}" if because else "")


def _whom_and_gpus(suspect: str | None, gpus: str) -> list[str]:
    """What the ranks wait for, in one breath with what their cards do meanwhile."""
    if not gpus:
        return [f"the others wait for {suspect}"] if suspect else []
    return [f"{gpus}, waiting for {suspect}" if suspect else gpus]


def verdict_line(server: Document) -> str:
    """One line per server: `vllm-8000  stalled (idle_wait) for 6m41s in loading_weights: ...`."""
    return _shown(f"{server['server']}  {verdict_words(server)}")


def text(report: Document) -> str:
    """The whole document in words, ending in a newline: per server verdict, ranks, channels and advice."""
    if not report["servers"]:
        return "no inference server found on this node\n"
    servers = by_severity(report["servers"])
    return "\n".join("".join(f"{line}\n" for line in _server_lines(server)) for server in servers)


def _server_lines(server: Document) -> list[str]:
    lines = [verdict_line(server), _about(server), _when(server)]
    lines += _rank_lines(server)
    lines += _table(("channel", "state", "last move"), server["channels"])
    lines += [f"  * {sentence}" for sentence in server.get("advice", ())]
    return [_shown(line.rstrip()) for line in lines]


def _rank_lines(server: Document) -> list[str]:
    """The table of ranks; below each rank its stacks, and below all of them why some are missing."""
    ranks = server["ranks"]
    table = _ranks_in_width(ranks)
    lines = table[:1]
    for rank, row in zip(ranks, table[1:], strict=True):
        lines += [f"{_MARK}{row[len(_MARK) :]}" if is_waited_for(rank, server) else row]
        lines += _stack_lines(rank.get("stacks"))
    missing: dict[str, list[str]] = {}
    for rank in ranks:
        for problem in (rank.get("stacks") or {}).get("problems", ()):
            missing.setdefault(problem, []).append(str(rank["rank"]))
    asked = sum(1 for rank in ranks if rank.get("stacks"))
    whose = {
        problem: "every rank" if 1 < len(names) == asked else ", ".join(names) for problem, names in missing.items()
    }
    return lines + [f"  {names}: {problem}" for problem, names in whose.items()]


def _ranks_in_width(ranks: Sequence[Document]) -> list[str]:
    """Headings and rows of the ranks.  Threads come last and get what is left of WIDTH: the rarest give way."""
    *columns, last = rank_columns(ranks)
    rows = _table(columns, ranks)
    if not rows:
        return []
    room = max(WIDTH - len(rows[0]) - len(_GAP), _LEAST_ROOM)
    return [_GAP.join(line) for line in zip(rows, (last, *(_threads(rank, room) for rank in ranks)), strict=True)]


def rank_columns(ranks: Iterable[Document]) -> tuple[str, ...]:
    """The headings of the table of ranks; those of GPUs only where a card is known.  See `cell`."""
    gpus = tuple(GPU_CELLS) if any(cards_of(rank) for rank in ranks) else ()
    return ("rank", "pid", "phase", "load", *gpus, "progress", "threads")


def cell(column: str, record: Document) -> str:
    """What stands below a heading for a rank or a channel: `-` is none, or none known; `?` could not be read."""
    return _CELLS[column](record)


def is_waited_for(rank: Document, server: Document) -> bool:
    """Whether it is the rank the others wait for."""
    return server["state"] in EPISODE_STATES and rank["rank"] == server["suspect_rank"]


def _stack_lines(stacks: Document | None) -> list[str]:
    """What `check --stacks` found of one rank, innermost frame first."""
    lines = []
    for kind, key in (("Python", "python"), ("kernel", "kernel")):
        for stack in (stacks or {}).get(key, ()):
            lines += [f"    {kind}, {_whose(stack)}:", *(f"      {frame}" for frame in stack["frames"])]
    return lines


def _whose(stack: Document) -> str:
    """`thread 4711 (MainThread)`, `204 threads, 4712 and others (Thread-1)`."""
    first, *others = stack["threads"]
    name = f" ({stack['name']})" if stack["name"] else ""
    return f"{len(others) + 1} threads, {first} and others{name}" if others else f"thread {first}{name}"


def _about(server: Document) -> str:
    facts = [f"{server['framework']} {server.get('version') or ''}".strip(), f"role {server['role']}"]
    if server.get("model"):
        facts.insert(1, f"model {server['model']}")
    if server.get("ranks_alive") is not None:
        facts.append(f"{server['ranks_alive']} of {server.get('ranks_expected')} ranks alive")
    if server.get("starts") is not None:
        facts.append(f"starts seen: {server['starts']}")
    return "  " + ", ".join(facts)


def _when(server: Document) -> str:
    facts = [f"{server['state']} since {moment(server['since'])}"]
    if server["ready"]:
        facts.append("ready")
    else:
        phase = f"phase {server['phase']} since {moment(server.get('phase_since'))}"
        if (budget := server.get("phase_budget_seconds")) is not None:
            phase += f" (slow after {duration(budget)})"
        facts += ["not ready", phase]
    for clock, at in (server.get("deadlines") or {}).items():
        facts.append(f"its own time-out ({clock}) strikes at {moment(at)}")
    return "  " + ", ".join(facts)


def moment(timestamp: float | None) -> str:
    """A Unix time in UTC; a document of another process may hold one no calendar has."""
    if timestamp is None or not 0 <= timestamp < _LAST_MOMENT:
        return "an unknown time"
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_LAST_MOMENT = 253402300800.0
"""Year 10000."""


def _table(columns: Sequence[str], records: Iterable[Document]) -> list[str]:
    """The records as aligned columns below their headings; nothing for no record."""
    rows = [[cell(column, record) for column in columns] for record in records]
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        _GAP + _GAP.join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in (columns, *rows)
    ]


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{duration(seconds)} ago"


def _threads(rank: Document, room: int = 1 << 16) -> str:
    """`futex 205 (main), poll 3`: most frequent first; `?` when the wait classes are not known."""
    if rank["alive"] is False:
        return "dead"
    waits, main = rank["wait"], rank.get("main_wait")
    if waits is None:
        return "?"
    counted = sorted(waits.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{wait} {count}" + (" (main)" if wait == main else "") for wait, count in counted] or ["none"]
    if main and main not in waits:
        words.insert(0, f"main {main}")
    return _shortened(words, room)


def _shortened(words: Sequence[str], room: int) -> str:
    """The words with commas; the last ones give way to `...` when there is no room for all."""
    for kept in range(len(words), 1, -1):
        told = ", ".join((*words[:kept], *(("...",) if kept < len(words) else ())))
        if len(told) <= room:
            return told
    return words[0] + (", ..." if len(words) > 1 else "")


def _or_dash(key: str) -> Callable[[Document], str]:
    return lambda record: "-" if record[key] is None else str(record[key])


_CELLS: Mapping[str, Callable[[Document], str]] = {
    "rank": _or_dash("rank"),
    "pid": _or_dash("pid"),
    "phase": _or_dash("phase"),
    "load": lambda rank: "-" if rank["load_progress"] is None else f"{math.floor(rank['load_progress'] * 100 + 1e-9)}%",
    **GPU_CELLS,
    "progress": lambda rank: _ago(rank.get("progress_age_seconds")),
    "threads": _threads,
    "channel": _or_dash("channel"),
    "state": _or_dash("state"),
    "last move": lambda channel: _ago(channel["age_seconds"]),
}
"""How each column of the text is filled from a rank or a channel of the document."""


def _shown(line: str) -> str:
    """A line without characters that could move a terminal's cursor or colour it."""
    return "".join(character if character.isprintable() else "?" for character in line)
