"""The exporter as another user without capabilities: it sees little, and says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from .harness import ROOT, STALL_AFTER, WINDOW, Exporter, StandIn, rest

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("as_root")]

NOBODY = 65534
DROP = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--bounding-set=-all"]
DROP += ["--inh-caps=-all", "--no-new-privs"]
_RUN = "import sys; from stallwatch.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A command that runs stallwatch and that any user may read, wherever this tree lies."""
    python = _readable_python()
    folder = Path(mkdtemp(prefix="stallwatch-readable-"))
    folder.chmod(0o755)
    try:
        _install(python, folder)
        yield ["env", f"PYTHONPATH={folder}", str(python), "-c", _RUN]
    finally:
        shutil.rmtree(folder)


def _readable_python() -> Path:
    """Started by env, since setpriv itself gives up its capabilities only with the program it starts."""
    candidates = [Path(sys.executable).resolve(), Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in candidates:
        if subprocess.run([*DROP, "env", str(python), "-c", check], check=False).returncode == 0:
            return python
    pytest.skip("no Python 3.11 that another user may execute")


def _install(python: Path, folder: Path) -> None:
    """The dependencies as installed here when the versions agree, else fresh; the package from the tree."""
    version = subprocess.run(
        [str(python), "-c", "import sys; print(*sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    )
    if version.stdout.split() == [str(part) for part in sys.version_info[:2]]:
        skipped = shutil.ignore_patterns("mypy*", "ruff*", "pip*", "hypothesis*", "setuptools*", "__pycache__")
        shutil.copytree(sysconfig.get_path("purelib"), folder, ignore=skipped, dirs_exist_ok=True)
    else:
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*command, "--target", str(folder), str(ROOT)], check=True)
    shutil.copytree(ROOT / "exporter" / "stallwatch", folder / "stallwatch", dirs_exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the other user can read, unlike pytest's own."""
    folder = Path(mkdtemp(prefix="stallwatch-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_stuck_server_is_unknown_and_a_slow_one_is_working_or_unknown(readable: list[str], open_folder: Path) -> None:
    with (
        Exporter(open_folder, command=readable, prefix=DROP) as exporter,
        StandIn("barrier-deadlock", open_folder) as stuck,
        StandIn("slow-load", open_folder, slow_seconds=3 * STALL_AFTER, ranks=4) as slow,
    ):
        status = Path(f"/proc/{exporter.pid}/status").read_text()
        assert f"Uid:\t{NOBODY}\t{NOBODY}" in status
        assert "CapEff:\t0000000000000000" in status
        stuck.log.chmod(0o600)
        slow.wait_for_line("Load weight begin", 4)
        slow_until = time.monotonic() + 3 * STALL_AFTER - WINDOW
        stuck.wait_for_line("Load weight end", 8)

        exporter.watch.wait_for(stuck.name, 2 * STALL_AFTER + 20, state="unknown")
        rest(WINDOW, stuck)
        assert_unknown(exporter, stuck)

        rest(max(0.0, slow_until - time.monotonic()), slow)
        # `quiet` is what a server without progress is called until `stall_after`
        assert exporter.watch.states(slow.name) <= {"working", "slow", "quiet", "unknown"}
        assert exporter.watch.last().servers[slow.name]["state"] in ("working", "unknown")


def assert_unknown(exporter: Exporter, server: StandIn) -> None:
    last = exporter.watch.last()
    assert last.servers[server.name]["state"] == "unknown"
    assert exporter.watch.states(server.name) <= {"working", "quiet", "unknown"}
    unreadable = last.values("stallwatch_threads", server=server.name, wait="unreadable")
    assert unreadable[(("rank", "TP3"),)] >= 200
    assert 0.0 not in last.values("stallwatch_threads", server=server.name, wait="futex").values()
