"""The part of the page about one server: where its ranks are, what moves, what its logs hold.  All escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2s
from html import escape

from ..model import CHANNEL_STATES, PHASES
from ..presentation import EPISODE_STATES, Document, cell, duration, is_waited_for, moment, rank_columns
from .log_facts import LogFacts, ServerLogs
from .words import about, percent, phase_words

_NO_LOGS = ServerLogs()

_ELSEWHERE = "<p class=soft>Too many ranks for one page: stallwatch check --server NAME tells them one by one."


def key(server: Document) -> str:
    """An id that stays the server's own while others come and go, and holds nothing of its name."""
    return blake2s(server["server"].encode(errors="replace"), digest_size=4).hexdigest()


def server_part(server: Document, logs: ServerLogs | None, now: float, ranks_are_told: bool = True) -> str:
    """A folded section; open where a person may have to look.  Not `ranks_are_told`: without the table of its ranks.

    End tags that HTML lets one leave out are left out here: 64 servers of 8 ranks are many.
    """
    is_open = " open" if server["state"] in EPISODE_STATES else ""
    name, state = escape(server["server"]), escape(server["state"])
    advice = "".join(f"<li>{escape(line)}" for line in server.get("advice", ()))
    parts = (
        _facts(_where(server)),
        _ranks(server) if ranks_are_told or not server["ranks"] else _ELSEWHERE,
        _facts((*_about(server), *_channels(server), *_logs(logs or _NO_LOGS, now), *_deadlines(server))),
        f"<ul>{advice}</ul>" if advice else "",
    )
    body = "\n".join(filter(None, parts))
    return f"<details id=s{key(server)}{is_open}><summary><h2>{name}</h2>: {state}</summary>\n{body}</details>"


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names, to be escaped, and what is said of each, which is HTML already."""
    rows = "".join(f"<dt>{escape(name)}<dd>{what}" for name, what in pairs)
    return f"<dl>{rows}</dl>" if rows else ""


# --- ranks -------------------------------------------------------------------------------------------------


def _where(server: Document) -> Iterator[tuple[str, str]]:
    """Phase -> its ranks, in the order of a start: whoever stands alone in a line is ahead or behind."""
    by_place: dict[str, list[str]] = {}
    for rank in server["ranks"]:
        place = "dead" if rank["alive"] is False else rank["phase"] or "phase not known"
        by_place.setdefault(place, []).append(_chip(rank, server))
    for place in sorted(by_place, key=lambda place: PHASES.index(place) if place in PHASES else len(PHASES)):
        yield place, " ".join(by_place[place])


def _chip(rank: Document, server: Document) -> str:
    """A rank with how much of its weights it has read, as a number and as a bar."""
    share, classes = rank["load_progress"], []
    words = str(rank["rank"])
    if share is not None and rank["phase"] == "loading_weights":
        words += f" {percent(share)}"
        classes.append(f"p{min(10, max(0, int(share * 10)))}")
    if is_waited_for(rank, server):
        words += " (waited for)"
        classes.append("bad")
    kind = f' class="{" ".join(classes)}"' if len(classes) > 1 else "".join(f" class={each}" for each in classes)
    return f"<b{kind}>{escape(words)}</b>"


def _ranks(server: Document) -> str:
    """The table of its ranks, as `check` prints it, but for what stands above it: phase and load."""
    if not server["ranks"]:
        return ""
    columns = [column for column in rank_columns(server["ranks"]) if column not in ("phase", "load")]
    heads = "".join(f"<th>{column}" for column in columns)
    rows = "\n".join(_rank_row(rank, columns, server) for rank in server["ranks"])
    # What scrolls must be reached by keyboard, and what is reached has a name for a screen reader.
    return f"""<div class=scroll role=group tabindex=0 aria-label=ranks><table>
<thead><tr>{heads}
<tbody>
{rows}
</table></div>"""


def _rank_row(rank: Document, columns: Sequence[str], server: Document) -> str:
    name, *rest = (escape(cell(column, rank)) for column in columns)
    cells = "".join(f"<td>{text}" for text in rest)
    kind, whom = (" class=bad", " (waited for)") if is_waited_for(rank, server) else ("", "")
    return f"<tr{kind}><th>{name}{whom}{cells}"  # a row's heading, as nothing but headings is in its column


# --- what it is, channels, logs, time-outs -----------------------------------------------------------------


def _about(server: Document) -> Iterator[tuple[str, str]]:
    yield "about", escape(about(server))
    if not server["ready"]:
        yield "phase", escape(phase_words(server))


def _channels(server: Document) -> Iterator[tuple[str, str]]:
    """State -> its channels with their ages: `log 4s, storage 7s ago, children`."""
    for state in CHANNEL_STATES:
        told = [each for each in server["channels"] if each["state"] == state]
        aged = [
            f"{each['channel']} {duration(each['age_seconds'])}" for each in told if each["age_seconds"] is not None
        ]
        words = [f"{', '.join(aged)} ago"] if aged else []
        words += [str(each["channel"]) for each in told if each["age_seconds"] is None]
        if words:
            yield state, escape(", ".join(words))


def _logs(logs: ServerLogs, now: float) -> Iterator[tuple[str, str]]:
    for name, facts in logs.logs.items():
        yield f"log {name}", escape(", ".join(_log_words(facts, now)) or "nothing known")
    if logs.errors:
        yield "errors in logs", escape(", ".join(f"{count} {kind}" for kind, count in sorted(logs.errors.items())))


def _log_words(facts: LogFacts, now: float) -> Iterator[str]:
    if facts.last_line is not None:
        yield f"last line {duration(max(0.0, now - facts.last_line))} ago"
    if facts.lines is not None:
        yield f"{facts.lines:.0f} lines"
    if facts.unmatched is not None:
        yield f"{facts.unmatched:.0f} no pattern knows"
    if facts.backlog_bytes:
        yield f"{facts.backlog_bytes:.0f} bytes not read yet"


def _deadlines(server: Document) -> Iterator[tuple[str, str]]:
    for clock, at in (server.get("deadlines") or {}).items():
        yield f"its own time-out ({clock})", f"strikes at {moment(at)}"
