"""`stallwatch record` as a real process: what it said live, what it wrote, and what that says when it is replayed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .harness import PATIENCE, Program, wait_until

COMMAND = str(Path(sys.executable).with_name("stallwatch"))
ALARMS = frozenset(("stalled", "suspect", "failed", "unknown"))
"""States that page or warn."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another verdict of a server; `at` is Unix time."""

    at: float
    state: str
    reason: str
    rank: str | None

    @property
    def verdict(self) -> tuple[str, str, str | None]:
        return self.state, self.reason, self.rank

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.at % 1000:.2f}", self.state, self.reason, self.rank)))


class Recorder(Program):
    """Watches the machine; its own daemon logs every change of a verdict as JSON."""

    def __init__(self, folder: Path, config: str, environment: Mapping[str, str] | None = None) -> None:
        self.out = folder / "recording.jsonl"
        config_file = folder / "stallwatch.yml"
        config_file.write_text(config)
        command = [COMMAND, "record", "--out", str(self.out), "--config.file", str(config_file)]
        super().__init__([*command, "--log.format", "json"], folder / "record.log", environment)

    def changes(self, server: str) -> list[Change]:
        """What was said of one server so far."""
        lines = [json.loads(line) for line in self.output.read_text().splitlines() if line.startswith("{")]
        return [
            Change(datetime.fromisoformat(line["ts"]).timestamp(), line["state"], line["reason"], line["rank"] or None)
            for line in lines
            if line["msg"] == "verdict changed" and line["server"] == server
        ]

    def wait_for(self, server: str, within: float, *expected: str | None) -> None:
        """Until a verdict of the server begins with these words: state, reason, rank."""

        def is_said() -> bool:
            return any(change.verdict[: len(expected)] == expected for change in self.changes(server))

        wait_until(is_said, within, f"{server}: {expected}\n{self.tail(40)}", 0.2)

    def finish(self) -> None:
        """End it as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE) == 0, self.tail(40)

    # --- what was written; to be asked when it has ended

    def lines(self) -> Iterator[dict[str, Any]]:
        """The recording, the header first."""
        with self.out.open() as file:
            yield from map(json.loads, file)

    def sum_of(self, metric: str, server: str) -> float:
        """Of the last readings of a metric, over all its series of one server."""
        latest: dict[str, float] = {}
        for line in self.lines():
            for name, labels, value, *_ in line.get("readings", ()):
                if (f"stallwatch_{name}", labels.get("server")) == (metric, server) and value is not None:
                    latest[json.dumps(labels)] = value
        return sum(latest.values())

    def replayed(self) -> dict[str, list[Change]]:
        """What is said of each server when the recording is replayed."""
        begun = next(self.lines())["begun_timestamp_seconds"]
        answer = subprocess.run(
            [COMMAND, "replay", "--format", "json", str(self.out)], capture_output=True, timeout=300.0, check=False
        )
        assert answer.returncode in (0, 1), answer.stderr
        return {
            server["server"]: [
                Change(begun + each["t"], each["state"], each["reason"], each["suspect_rank"])
                for each in server["changes"]
            ]
            for server in json.loads(answer.stdout)["recordings"][0]["servers"]
        }
