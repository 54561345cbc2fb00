"""The page for people at `/`: the document of `check` as HTML.  Nothing external, no script, all escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .. import __version__
from ..presentation import (
    BAD_STATES,
    EPISODE_STATES,
    Document,
    by_severity,
    cell,
    is_waited_for,
    moment,
    rank_columns,
    verdict_words,
)

_STYLE = """
:root{color-scheme:light dark}
body{font:1rem/1.5 system-ui,sans-serif;margin:1.5rem auto;max-width:75rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.35rem .75rem .35rem 0;border-bottom:1px solid #8886}
.bad{font-weight:bold}
summary{padding:.35rem 0}
details td,details th{white-space:nowrap}
.scroll{overflow-x:auto}
"""

_COLUMNS = ("Server", "Verdict", "Since", "Framework", "Model", "Ranks alive")


def html(report: Document, telemetry_path: str = "/metrics") -> str:
    """The whole page of one document."""
    servers = by_severity(report["servers"])
    table = _table(_COLUMNS, map(_row, servers)) if servers else ""
    ranks = "\n".join(_ranks(server) for server in servers if server["ranks"])
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
{table}
{ranks}
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


def _table(columns: Iterable[str], rows: Iterable[str]) -> str:
    """Headings, which are our own words, above rows that are escaped already."""
    heads = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "\n".join(rows)
    return f"""<div class="scroll"><table>
<thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>"""


def _ranks(server: Document) -> str:
    """The table of its ranks, as `check` prints it; open where a person may have to look."""
    columns = rank_columns(server["ranks"])
    is_open = " open" if server["state"] in EPISODE_STATES else ""
    table = _table(columns, (_rank_row(rank, columns, server) for rank in server["ranks"]))
    return f"<details{is_open}><summary>Ranks of {escape(server['server'])}</summary>\n{table}</details>"


def _rank_row(rank: Document, columns: tuple[str, ...], server: Document) -> str:
    is_named = is_waited_for(rank, server)
    name, *rest = (escape(cell(column, rank)) for column in columns)
    cells = "".join(f"<td>{text}</td>" for text in rest)
    kind, whom = (' class="bad"', " (waited for)") if is_named else ("", "")
    return f'<tr{kind}><th scope="row">{name}{whom}</th>{cells}</tr>'
