"""Launches a stand-in server: `python -m stallwatch.drill.standin CONDITION --port P --for 2m`.

Makes a temporary folder with weight files and a package named sglang whose launch_server is ours, starts
the main process from it, waits, and leaves nothing behind: not after Ctrl-C, not after the time limit, not
after kill -9 of this process (each process is tied to its parent; a janitor removes the folder).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ..strict_yaml import parse_duration
from .conditions import Condition, UnknownSettingError, find_condition, with_settings
from .janitor import cleaned_up, end_group
from .server import Plan
from .weights import write_weights

_LAUNCHER = """\
from pathlib import Path

from stallwatch.drill.server import run_server

if __name__ == "__main__":
    run_server(Path({plan!r}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        condition = with_settings(find_condition(options.condition), options.set)
    except UnknownSettingError as error:
        print(f"standin: {error}", file=sys.stderr)
        return 2
    return run(condition, options.port, options.limit, Path(options.log) if options.log else None, options.cards)


def run(condition: Condition, port: int, limit_seconds: float, log: Path | None = None, cards: str = "") -> int:
    """Start the server, say which process it is, wait for its end.  Returns its exit status.

    `cards` is the folder of the stand-in cards that it holds.  `log` receives stdout and stderr and is kept;
    without it the log lies in the folder and goes with it.
    """
    folder = Path(tempfile.mkdtemp(prefix="stallwatch-drill-"))
    with cleaned_up(folder) as pipe:
        process = _start(folder, condition, port, limit_seconds, log or folder / "server.log", cards)
        print(process.pid, file=pipe, flush=True)
        print(f"pid {process.pid}", flush=True)
        _end_with_us(process)
        try:
            return process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return 0
        finally:
            end_group(process.pid)
            process.wait()


def _start(
    folder: Path, condition: Condition, port: int, limit_seconds: float, log: Path, cards: str
) -> subprocess.Popen[bytes]:
    model = folder / "models" / "drill-moe"
    weights = write_weights(model, condition.ranks)
    package = folder / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    plan = folder / "plan.json"
    (package / "launch_server.py").write_text(_LAUNCHER.format(plan=str(plan)))
    Plan(condition, str(model), tuple(map(str, weights)), port, os.getpid(), limit_seconds, cards).save(plan)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--tp-size", str(condition.ranks), "--host", "127.0.0.1", "--port", str(port)]
    search = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": search, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )


def _end_with_us(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C and SIGTERM here are an orderly shutdown there."""

    def end(_number: int, _frame: FrameType | None) -> None:
        process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stallwatch.drill.standin", description=__doc__)
    parser.add_argument("condition")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--for", dest="limit", type=parse_duration, default=300.0, metavar="DURATION")
    parser.add_argument("--log", metavar="FILE", help="where the server's output goes (kept)")
    parser.add_argument("--cards", default="", metavar="DIR", help="hold the stand-in cards of this folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a changed setting")
    return parser


if __name__ == "__main__":
    sys.exit(main())
