"""Containers of a real engine: the exporter is started as docs/INSTALL.md says, the server has a name, limits and a log
that only the engine's files lead to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import CONFIG, PATIENCE, fetch, free_port, wait_until

from .engine import LIMITS, PYTHON, as_documented, podman, running
from .packages import ROOT

pytestmark = pytest.mark.e2e


@contextmanager
def server(image: str, name: str, *more: str) -> Iterator[int]:
    """A stand-in that deadlocks; what it says goes to the engine.  Yields its port."""
    port = free_port()
    words = ["run", "--detach", "--name", name, "--network", "host", "--user", "0:0", *LIMITS, "--pids-limit", "4096"]
    words += ["--log-driver", "k8s-file", *more, "--entrypoint", PYTHON, image, "-m", "stallwatch.drill.standin"]
    words += ["barrier-deadlock", "--port", str(port), "--for", "5m", "--log", "/dev/stdout"]
    with running(name, words):
        yield port


@contextmanager
def exporter(image: str, folder: Path) -> Iterator[int]:
    """As documented, but for its port and for times that are divided.  Yields the port."""
    port, volume = free_port(), f"stallwatch-test-{free_port()}"
    folder.chmod(0o755)
    (folder / "stallwatch.yml").write_text(CONFIG)
    settings = [
        f"STALLWATCH_WEB_LISTEN_ADDRESS=127.0.0.1:{port}",
        "STALLWATCH_CONFIG_FILE=/settings/stallwatch.yml",
    ]
    words = as_documented(image, volume, "--volume", f"{folder}:/settings:ro", settings=settings)
    words = [word.replace("stallwatch:/var", f"{volume}:/var") for word in words]
    words = [word.replace("seccomp=deploy", f"seccomp={ROOT}/deploy") for word in words]
    try:
        with running(volume, words):
            wait_until(
                lambda: fetch(f"http://127.0.0.1:{port}/-/ready")[0] == 200, PATIENCE, "an exporter that is ready"
            )
            yield port
    finally:
        podman("volume", "rm", "--force", volume, check=False)


def servers(port: int) -> dict[str, dict[str, Any]]:
    status, text = fetch(f"http://127.0.0.1:{port}/api/v1/report")
    return {each["server"]: each for each in json.loads(text)["servers"]} if status == 200 else {}


def test_the_documented_container_judges_a_server_of_another_one(engine_image: str, tmp_path: Path) -> None:
    name = f"chat-{free_port()}"
    with exporter(engine_image, tmp_path) as port, server(engine_image, name) as its_port:
        called = f"sglang-{its_port}@{name}"
        wait_until(
            lambda: servers(port).get(called, {}).get("state") == "stalled", 2 * PATIENCE, f"{called} stalled", 0.2
        )
        found = servers(port)[called]
        page = fetch(f"http://127.0.0.1:{port}/metrics")[1]

    assert (found["reason"], found["suspect_rank"], found["phase"]) == ("idle_wait", "TP3", "post_load")
    states = {channel["channel"]: channel["state"] for channel in found["channels"]}
    assert {states["log"], states["storage"]} == {"flat"}
    (info,) = (line for line in page.splitlines() if line.startswith(f'stallwatch_server_info{{server="{called}"'))
    assert f'container="{name}"' in info
    assert 'pod=""' in info


def test_without_a_log_that_a_file_holds_it_says_so(engine_image: str, tmp_path: Path) -> None:
    """The silent twin: the same server, and an engine that keeps nothing of what it says."""
    name = f"mute-{free_port()}"
    with exporter(engine_image, tmp_path) as port, server(engine_image, name, "--log-driver", "none") as its_port:
        called = f"sglang-{its_port}@{name}"
        wait_until(lambda: called in servers(port), PATIENCE, called, 0.2)
        states = {channel["channel"]: channel["state"] for channel in servers(port)[called]["channels"]}

    assert states["log"] == "absent"
