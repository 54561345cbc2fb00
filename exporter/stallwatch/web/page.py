"""The page for people at `/`: the document of `check` as HTML.  Nothing external, no script, all escaped."""

from __future__ import annotations

from html import escape

from .. import __version__
from ..presentation import BAD_STATES, Document, by_severity, moment, verdict_words

_STYLE = """
:root{color-scheme:light dark}
body{font:1rem/1.5 system-ui,sans-serif;margin:1.5rem auto;max-width:75rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.35rem .75rem .35rem 0;border-bottom:1px solid #8886}
.bad{font-weight:bold}
.scroll{overflow-x:auto}
"""

_COLUMNS = ("Server", "Verdict", "Since", "Framework", "Model", "Ranks alive")


def html(report: Document, telemetry_path: str = "/metrics") -> str:
    """The whole page of one document."""
    servers = report["servers"]
    rows = "\n".join(_row(server) for server in by_severity(servers))
    heads = "".join(f'<th scope="col">{column}</th>' for column in _COLUMNS)
    table = f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(_title(report))}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>stallwatch</h1>
<p>{escape(_summary(report))}</p>
{f'<div class="scroll">{table}</div>' if servers else ""}
<p><a href="{escape(telemetry_path)}">metrics</a> · <a href="/api/v1/report">report as JSON</a> ·
stallwatch {escape(__version__)}</p>
</main>
</body>
</html>
"""


def _title(report: Document) -> str:
    bad = sum(server["state"] in BAD_STATES for server in report["servers"])
    return f"{bad} stalled or failed - stallwatch" if bad else "stallwatch"


def _summary(report: Document) -> str:
    count = len(report["servers"])
    what = "1 inference server" if count == 1 else f"{count or 'no'} inference servers"
    return f"{what} on this node, as of {moment(report.get('timestamp'))}."


def _row(server: Document) -> str:
    alive = "?" if server["ranks_alive"] is None else server["ranks_alive"]
    cells = (
        verdict_words(server),
        moment(server["since"]),
        f"{server['framework']} {server['version']}".strip(),
        server["model"],
        f"{alive} of {server['ranks_expected']}",
    )
    kind = ' class="bad"' if server["state"] in BAD_STATES else ""
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr{kind}><th scope="row">{escape(server["server"])}</th>{rest}</tr>'
