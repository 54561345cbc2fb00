"""The exporter as another user: with two capabilities it sees what root sees, with fewer less, and it says so."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from .harness import PATIENCE, ROOT, STALL_AFTER, WINDOW, Exporter, StandIn, fetch, rest, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("as_root")]

NOBODY = 65534
DROP = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--bounding-set=-all"]
DROP += ["--inh-caps=-all", "--no-new-privs"]


def with_only(*capabilities: str) -> list[str]:
    """Words that make a program run as another user with these capabilities and no other."""
    kept = ",".join(("-all", *(f"+{name}" for name in capabilities)))
    words = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--no-new-privs"]
    return [*words, f"--bounding-set={kept}", f"--inh-caps={kept}", f"--ambient-caps={kept}"]


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


# --- with just the capabilities that looking needs ------------------------------------------------------------

PTRACE, SEARCH = "sys_ptrace", "dac_read_search"


def series(exporter: Exporter, server: StandIn) -> set[str]:
    """Names and labels of all that is told of a server, but when what moved last: that depends on who looked when."""
    told = re.findall(r"^(stallwatch_\S*?\{.*\}) \S+$", exporter.watch.last().page, re.MULTILINE)
    label = f'server="{server.name}"'
    return {name for name in told if label in name and not name.startswith("stallwatch_channel_age_seconds")}


def hidden(server: StandIn) -> None:
    """Its log and its folder are root's alone."""
    server.log.chmod(0o600)


def test_two_capabilities_show_what_root_sees(readable: list[str], open_folder: Path) -> None:
    roots = open_folder / "root"
    roots.mkdir()
    with (
        Exporter(roots) as root,
        Exporter(open_folder, command=readable, prefix=with_only(PTRACE, SEARCH)) as ours,
        StandIn("barrier-deadlock", open_folder) as server,
    ):
        hidden(server)
        status = Path(f"/proc/{ours.pid}/status").read_text()
        assert f"Uid:\t{NOBODY}\t{NOBODY}" in status
        assert f"CapEff:\t{1 << 19 | 1 << 2:016x}" in status
        server.wait_for_line("Load weight end", 8)
        for exporter in (root, ours):
            exporter.watch.wait_for(server.name, 2 * STALL_AFTER + 20, state="stalled", reason="idle_wait")

        def difference() -> set[str]:
            return series(root, server) ^ series(ours, server)

        wait_until(lambda: not difference(), PATIENCE, f"the same series: {sorted(difference())[:9]}", 0.5)
        assert len(series(ours, server)) > 100
        channels = ours.watch.last().values("stallwatch_channel_state", server=server.name, state="unreadable")
        assert not channels
        assert not [text for text in advice_of(ours, server) if "CAP_" in text]


FEWER = [
    ((), ("storage", "log"), ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")),
    ((PTRACE,), ("storage",), ("CAP_DAC_READ_SEARCH",)),
    ((SEARCH,), ("storage",), ("CAP_SYS_PTRACE",)),
]


@pytest.mark.parametrize(("kept", "lost", "wanted"), FEWER, ids=["none", "ptrace", "search"])
def test_with_fewer_it_says_of_the_server_what_it_cannot_read_and_what_would_help(
    kept: tuple[str, ...], lost: tuple[str, ...], wanted: tuple[str, ...], readable: list[str], open_folder: Path
) -> None:
    """On /metrics, on the page and in `check`."""
    with (
        StandIn("slow-load", open_folder, slow_seconds=60) as server,
        Exporter(open_folder, command=readable, prefix=with_only(*kept)) as ours,
    ):
        hidden(server)
        server.wait_for_line("Load weight begin", 8)

        def unreadable() -> set[str]:
            found = ours.watch.last().values("stallwatch_channel_state", server=server.name, state="unreadable")
            return {dict(labels)["channel"] for labels in found}

        wait_until(lambda: unreadable() >= set(lost), PATIENCE, f"{lost} unreadable, not {unreadable()}", 0.5)
        sentences = [text for text in advice_of(ours, server) if "CAP_" in text]
        page = fetch(f"{ours.url}/")[1]
        checked = subprocess.run(
            [*with_only(*kept), *readable, "check", "--url", ours.url], capture_output=True, text=True, check=False
        )

    assert sentences
    for text in (sentences[0], page, checked.stdout):
        assert "unreadable: " in text
        named = {name for name in ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH") if name in text}
        assert named == set(wanted)
    assert all(channel in sentences[0] for channel in lost)


def advice_of(exporter: Exporter, server: StandIn) -> list[str]:
    document = json.loads(fetch(f"{exporter.url}/api/v1/report")[1])
    return [text for each in document["servers"] if each["server"] == server.name for text in each.get("advice", ())]
