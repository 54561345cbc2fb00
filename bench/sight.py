"""What other exporters show of a hang, and of a start that is only slow, in the same seconds as ours.

`python -m bench.sight` plays barrier-deadlock and phantom-hang one after the other, each with process-exporter (a group
written for each rank), node-exporter and stallwatch beside it.  Printed is what moved within the seconds before our
verdict is asked for.  Other work on the machine shows in node-exporter's figures.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from bench.alone import be_alone
from bench.scan import free_port
from stallwatch.drill.command import Pace

SPEED = 20.0
LOADED_SECONDS, WATCHED_SECONDS = 12.0, 20.0
GROUPS = """\
process_names:
- {name: 'rank {{.Matches.Rank}}', cmdline: ['sglang::scheduler_TP(?P<Rank>\\d+)']}
"""
BY_RANK = re.compile(r'namedprocess_namegroup_(\w+)\{groupname="rank (\d+)"(?:,\w+="(\w+)")?\} (\S+)')


def start(stack: ExitStack, *words: str) -> None:
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)


def page(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def by_rank(text: str) -> dict[tuple[str, str], dict[str, float]]:
    """(figure, its mode or state) -> rank -> value."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for name, rank, mode, value in BY_RANK.findall(text):
        found[name, mode][rank] = float(value)
    return found


def moved(before: str, after: str) -> dict[str, str]:
    """Of each counter of process-exporter: how much the least and the most busy rank had of it."""
    first, last = by_rank(before), by_rank(after)
    result = {}
    for (name, mode), ranks in sorted(last.items()):
        if name.endswith("_total") and (name, mode) in first:
            grown = {rank: value - first[name, mode].get(rank, 0.0) for rank, value in ranks.items()}
            most = max(grown, key=lambda rank: grown[rank])
            result[f"{name} {mode}".strip()] = f"{min(grown.values()):.2f} to {grown[most]:.2f} (TP{most})"
    return result


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def look(condition: str, folder: Path) -> dict[str, object]:
    processes, node, ours, port = (free_port() for _ in range(4))
    config, groups = folder / f"{condition}.yml", folder / "groups.yml"
    config.write_text(Pace(SPEED).config())
    groups.write_text(GROUPS)
    with ExitStack() as stack:
        start(stack, "prometheus-process-exporter", "-config.path", str(groups), f"-web.listen-address=:{processes}")
        start(stack, "prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{node}")
        words = ["-m", "stallwatch", "serve", "--config.file", str(config), "--web.listen-address", f"127.0.0.1:{ours}"]
        start(stack, sys.executable, *words)
        standin = ["-m", "stallwatch.drill.standin", condition, "--port", str(port), "--for", "2m"]
        start(stack, sys.executable, *standin, "--speed", f"{SPEED:g}")
        time.sleep(LOADED_SECONDS)
        before = page(processes), page(node)
        time.sleep(WATCHED_SECONDS)
        after = page(processes), page(node)
        (server,) = (
            each
            for each in json.loads(page(ours, "/api/v1/report"))["servers"]
            if each["server"].startswith(f"sglang-{port}")
        )
    disk = "node_disk_read_bytes_total"
    return {
        "process_exporter": moved(before[0], after[0]),
        "node_exporter_read_mib": round((total(after[1], disk) - total(before[1], disk)) / 2**20, 1),
        "stallwatch": {key: server[key] for key in ("state", "reason", "suspect_rank", "phase")},
    }


def main() -> None:
    be_alone()
    with tempfile.TemporaryDirectory() as name:
        found = {condition: look(condition, Path(name)) for condition in ("barrier-deadlock", "phantom-hang")}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
