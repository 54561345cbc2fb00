"""Memory of the exporter with a server of 8 ranks: `python -m bench.memory` prints one JSON object.

PSS of every process of ours (the exporter, and its helper if one runs), after scrapes, beside that of the peers
from apt that watch parts of the same (those that are installed), in one run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench.scan import free_port, start_peer, start_server

SETTLE_SECONDS, SCRAPES = 60.0, 50
MIB = 1 << 20


def pss(pid: int) -> float:
    """MiB of a process and everything below it."""
    root = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True))) / MIB


def start(command: list[str], stack: ExitStack) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait, 10)
    stack.callback(process.terminate)
    return process


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start_server(stack)
        address = f"127.0.0.1:{free_port()}"
        ours = start([sys.executable, "-m", "stallwatch", "serve", "--web.listen-address", address], stack)
        peer = start_peer(folder, stack)
        time.sleep(SETTLE_SECONDS)
        for url in (f"http://{address}/metrics", *([peer[1]] if peer else [])):
            for _ in range(SCRAPES):
                urllib.request.urlopen(url, timeout=30).read()
        result = {"stallwatch_pss_mib": round(pss(ours.pid), 1), "scrapes": SCRAPES}
        if peer:
            result["process_exporter_pss_mib"] = round(pss(peer[0].pid), 1)
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
