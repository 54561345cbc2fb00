"""No memory is left: it ends and says so by its status, or goes on; a page it serves meanwhile is whole and of now.

The limit is that of the address space, which Python is told of, or that of a container, at which the kernel kills.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from e2e.harness import wait_until
from stallwatch.drill.memory_cgroup import NoCgroupError, limited
from stallwatch.state_file import CORRUPT

from .harness import COLLECTORS, PATIENCE, TICK, Exporter, Scrape, Victim, tell

pytestmark = pytest.mark.faults

SHORT_SECONDS = 10.0
LIMITS = ("memory.max", "memory.limit_in_bytes")
LIMIT_BYTES = 160 << 20
"""More than it takes, and less than its manifests allow."""
OLDEST_REPORT = 3 * TICK + 1.0
"""An older one is refused; and what a busy machine needs to answer."""


def test_without_memory_it_ends_or_goes_on_and_never_lies(folder: Path, victim: Path) -> None:
    order, log = folder / "order", folder / "victim.log"
    command = [sys.executable, str(Path(__file__).with_name("hoarding.py")), str(order)]
    with Exporter(folder, command=command) as exporter, Victim(victim, log) as server:
        exporter.may_end, exporter.is_checked = True, False
        exporter.wait_for_server(server.name)
        begun = time.time()
        order.touch()
        with log.open("a") as lines:
            lines.write("INFO 06-02 08:00:09 [loader.py:1] a line\n" * 100_000)
        with suppress(subprocess.TimeoutExpired):
            exporter.process.wait(SHORT_SECONDS)
        status, meanwhile = exporter.process.poll(), list(exporter.scrapes.history)
        order.unlink()
        if status is None:
            exporter.wait_for("every collector", lambda page: not page.failed() and page.state(server.name))

    # By the allocator of a library, which has no other way to end a search, and says so.
    is_aborted = status == -signal.SIGABRT and exporter.said("memory allocation of")
    assert status is None or status > 0 or is_aborted
    assert status is None or is_aborted or exporter.said("MemoryError")
    check_whole_and_of_now([page for page in meanwhile if page.at > begun])


def check_whole_and_of_now(meanwhile: Sequence[Scrape]) -> None:
    for page in meanwhile:
        if page.status != 200:
            continue
        told = page.value("report_timestamp_seconds")
        assert told is not None
        assert page.at - told < OLDEST_REPORT
        assert {name for name in COLLECTORS if page.value("collector_success", collector=name) is None} == set()
    assert {page.status for page in meanwhile} <= {0, 200, 500, 503}


@pytest.fixture
def container() -> Iterator[Path]:
    """A memory cgroup that kills whoever takes more than it allows."""
    try:
        with limited(f"stallwatch-faults-{os.getpid()}") as group:
            limit = next(file for file in map(group.joinpath, LIMITS) if file.exists())
            limit.write_text(str(LIMIT_BYTES))
            yield group
            wait_until(lambda: not (group / "cgroup.procs").read_text(), PATIENCE, "an empty cgroup")
    except NoCgroupError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("as_root")
def test_a_limit_of_the_container_ends_it_and_the_next_one_goes_on(folder: Path, victim: Path, container: Path) -> None:
    """The kernel kills at once: no page is half, the state is whole, and the server keeps its start."""
    order, state = folder / "order", folder / "state"
    command = [sys.executable, str(Path(__file__).with_name("hoarding.py")), str(order)]
    inside = ["sh", "-c", f'echo $$ > {container}/cgroup.procs && exec "$@"', "sh"]
    with Victim(victim, folder / "victim.log") as server:
        with Exporter(folder, "--state.dir", str(state), command=command, prefix=inside) as exporter:
            exporter.may_end, exporter.is_checked = True, False
            exporter.wait_for_server(server.name)
            wait_until((state / "state.json").exists, PATIENCE, "a first state")
            begun = time.time()
            tell(order, "touch")
            status = exporter.process.wait(PATIENCE)
            meanwhile = [page for page in exporter.scrapes.history if page.at > begun]
        order.unlink()
        with Exporter(folder, "--state.dir", str(state)) as after:
            page = after.wait_for_server(server.name)
            assert after.said('before="taken up"') >= 1

    assert status == -signal.SIGKILL
    check_whole_and_of_now(meanwhile)
    assert page.value("server_starts_total", server=server.name) == 1
    assert not (state / CORRUPT).exists()
