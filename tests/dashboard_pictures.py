"""Draw docs/pictures/: the dashboards over the recorded past.  `make pictures`; needs Prometheus and matplotlib."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dashboard_past import DEADLOCK, LOCKED, SERVING, SLOW_START, STALL
from e2e.past import recorded_past
from grafana.pictures import Picture, draw

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

PICTURES = (
    Picture("fleet", "stallwatch-fleet", "nine recorded nodes", {}),
    Picture(
        "server-stalled",
        "stallwatch-server",
        "a recorded stall: TP5 never comes to the barrier",
        {"instance": DEADLOCK.instance},
        ("Verdict", "The start"),
        minutes=8,
    ),
    Picture(
        "server-slow",
        "stallwatch-server",
        "a recorded slow start: TP2 still loads, at 10 s a shard",
        {"instance": SLOW_START.instance},
        ("Verdict", "The start"),
        minutes=12,
    ),
    Picture(
        "server-threads",
        "stallwatch-server",
        "a recorded stall: it waits for the lock of a build that was killed",
        {"instance": LOCKED.instance},
        ("Threads and processes",),
        minutes=8,
    ),
    Picture(
        "server-serving",
        "stallwatch-server",
        "a recorded server that starts, rests, and then takes in one prompt for ten minutes",
        {"instance": SERVING.instance},
        ("Cards", "Ports and health", "Logs", "Serving"),
        minutes=15,
    ),
    Picture(
        "node",
        "stallwatch-node",
        "a recorded stall: one card spins, its siblings rest",
        {"instance": STALL.instance},
        minutes=9,
    ),
    Picture("exporter", "stallwatch-exporter", "nine recorded nodes, on one of which the driver hangs", {}),
)


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, recorded_past(Path(folder)) as prometheus:
        for picture in PICTURES:
            print(draw(picture, prometheus.view(picture.chosen, picture.minutes), FOLDER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
