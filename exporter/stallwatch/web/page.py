"""The page for people at `/`, and its part that a browser asks for anew every tick.  Nothing external, all escaped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from .. import __version__
from ..presentation import BAD_STATES, Document, by_severity, moment
from .assets import SCRIPT, STYLE
from .changes import Change
from .log_facts import ServerLogs
from .server_part import key, server_part
from .words import counts, sentence


@dataclass(frozen=True, slots=True)
class Beside:
    """What the page shows beside the document."""

    logs: Mapping[str, ServerLogs] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    tick_seconds: float = 5.0


NOTHING_BESIDE = Beside()

LONGEST = 144_000
"""Bytes of a page, as far as leaving out tables of ranks can keep to it."""

FRAME = 10_000
"""What style, script and the rest around the live part take of it."""


def html(report: Document, telemetry_path: str = "/metrics", beside: Beside = NOTHING_BESIDE) -> str:
    """The whole page of one document.  Its links are relative: it may stand behind a proxy, under any path."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(_title(report))}</title>
<style>{STYLE}</style>
</head>
<body>
<header id="top"><h1>stallwatch</h1>
<p id="status" role="status">{escape(counts(report["servers"]))}</p>
<button id="pause" type="button" hidden>Pause</button></header>
<main>
<p id="old" role="alert" hidden></p>
<p id="still">Without JavaScript this page stands still: <a href="">load it again</a>.</p>
{live(report, beside)}
</main>
<footer><p><a href="{escape(telemetry_path.lstrip("/"))}">metrics</a> · <a href="api/v1/report">report as JSON</a> ·
stallwatch {escape(__version__)}</p></footer>
<script>{SCRIPT}</script>
</body>
</html>
"""


def live(report: Document, beside: Beside = NOTHING_BESIDE) -> str:
    """What changes with each report.  Its attributes hold what stands outside of it: title and summary."""
    servers = by_severity(report["servers"])
    overview, changes = _overview(servers), _changes(beside.changes)
    room = LONGEST - FRAME - len(overview.encode()) - len(changes.encode())
    parts = "\n".join(_parts(servers, beside, report.get("timestamp") or 0.0, room))
    return f"""<div id="live" data-tick="{beside.tick_seconds:g}" data-title="{escape(_title(report))}" \
data-summary="{escape(counts(servers))}">
<p class="soft">As of <time>{moment(report.get("timestamp"))}</time></p>
{overview}
<div id="servers">{parts}</div>
{changes}
</div>"""


def _parts(servers: list[Document], beside: Beside, now: float, room: int) -> list[str]:
    """A part of each server.  In `room` bytes as many as possible have the table of their ranks, the worst first."""

    def made(are_told: bool) -> list[str]:
        return [server_part(each, beside.logs.get(each["server"]), now, ranks_are_told=are_told) for each in servers]

    whole = made(True)
    if sum(map(_size, whole)) <= room:
        return whole
    parts = made(False)
    room -= sum(map(_size, parts))
    for place, part in enumerate(whole):
        room -= _size(part) - _size(parts[place])
        if room < 0:
            break
        parts[place] = part
    return parts


def _size(text: str) -> int:
    return len(text.encode()) + 1


def _title(report: Document) -> str:
    bad = sum(server["state"] in BAD_STATES for server in report["servers"])
    return f"{bad} stalled or failed - stallwatch" if bad else "stallwatch"


_HEADS = ("Server", "Verdict", "Ranks alive", "Since", "Framework", "Model")
"""On a phone the last four go: the verdict needs the room, and each server's own part says the rest."""


def _overview(servers: list[Document]) -> str:
    if not servers:
        return ""
    heads = "".join(f"<th scope=col>{head}" for head in _HEADS)
    rows = "\n".join(map(_row, servers))
    return f"""<table id=all>
<thead><tr>{heads}
<tbody>
{rows}
</table>"""


def _row(server: Document) -> str:
    alive = "?" if server["ranks_alive"] is None else server["ranks_alive"]
    rest = (
        f"{alive} of {server['ranks_expected']}",
        moment(server["since"]),
        f"{server['framework']} {server['version']}".strip(),
        server["model"],
    )
    cells = "".join(f"<td>{escape(each)}" for each in rest)
    name = f"<a href=#s{key(server)}>{escape(server['server'])}</a>"
    return (
        f"<tr id=r{key(server)} class={server['state']}><th scope=row>{name}"
        f"<td class=v>{escape(sentence(server))}{cells}"
    )


def _changes(changes: tuple[Change, ...]) -> str:
    """The last changes of verdict; the ones before stand in the log of stallwatch and in Prometheus."""
    rows = "\n".join(f"<li><span>{moment(each.timestamp)}</span> {escape(_change(each))}</li>" for each in changes)
    body = f"<ul>\n{rows}\n</ul>" if rows else "<p>None since stallwatch was started.</p>"
    return f'<section id="changes"><h2>Last changes of verdict</h2>\n{body}</section>'


def _change(change: Change) -> str:
    if change.now is None:
        return f"{change.server}: not shown any more, was {change.before}"
    if change.before is None:
        return f"{change.server}: found, {change.now}"
    return f"{change.server}: {change.now}, was {change.before}"
