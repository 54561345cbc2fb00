"""What somebody on the node can try: names that change all the time, a second exporter, strange files, a single place.

Twins without processes: test_security_titles.py, test_state_file.py, test_log_lines.py, test_web.py and
test_strict_yaml.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from e2e.harness import fetch, wait_until
from stallwatch.config import Limits
from stallwatch.state_file import CORRUPT, StateFolder

from .harness import CONFIG, PATIENCE, QUICK_STATE, Exporter, Scrape, Victim, all_hold, holds_in_time
from .test_processes import AS_NOBODY, MOST_LOOK_SECONDS, duration

pytestmark = pytest.mark.faults

TITLES = 1000
MOST_MEMORY_BYTES = 64 << 20
SPARSE_BYTES = 2 << 30
GREEDY = 5
LITTLE_ROOM_BYTES, SMALL_SEGMENT_BYTES = 4096, 88
"""What the kernel keeps for a client on our side grows with its segments: with these it is some 20 KB."""
LINE = "llama_model_loader: loaded meta data\n"


@pytest.mark.usefixtures("as_root")
def test_a_thousand_names_that_change_every_second_are_nobody_elses_loss(folder: Path, victim: Path) -> None:
    """Of a user who owns nothing here: he gets half the room at most, and what is left out is counted."""
    log = folder / "crowd.log"
    log.touch()
    log.chmod(0o666)
    with Exporter(folder) as exporter, Victim(victim, folder / "well.log") as well:
        exporter.wait_for_server(well.name)
        memory = psutil.Process(exporter.pid).memory_info().rss
        with Victim(victim, log, "titles", str(TITLES), prefix=AS_NOBODY):
            exporter.wait_for("many of them", lambda page: servers(page) > 10)
            meanwhile = exporter.rest(10.0)
        more = psutil.Process(exporter.pid).memory_info().rss - memory
        after = exporter.wait_for_server(well.name)

    holds_in_time(meanwhile, lambda page: page.value("threads", server=well.name) == 1, "the honest one is watched")
    all_hold(meanwhile, lambda page: page.state(well.name) in ("working", "quiet", "stalled"), "and judged")
    all_hold(meanwhile, lambda page: servers(page) <= Limits().servers, "no more than there is room for")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    assert meanwhile[-1].value("series_dropped_total", reason="servers_limit"), "what is left out is counted"
    assert max(duration(page, "processes") for page in meanwhile) < MOST_LOOK_SECONDS
    assert more < MOST_MEMORY_BYTES
    assert after.value("server_starts_total", server=well.name) == 1


def servers(page: Scrape) -> int:
    return len(page.labels("server_info", "server"))


def test_of_two_exporters_with_one_state_folder_the_second_keeps_nothing(folder: Path, victim: Path) -> None:
    state, other = folder / "state", folder / "other"
    other.mkdir()
    with Victim(victim, folder / "server.log") as server:
        with Exporter(folder, "--state.dir", str(state), command=QUICK_STATE) as first:
            first.wait_for_server(server.name)
            wait_until((state / "state.json").exists, PATIENCE, "a first state")
            with Exporter(other, "--state.dir", str(state), command=QUICK_STATE) as second:
                second.wait_for_server(server.name)
                all_hold(second.rest(2.0), lambda page: not page.failed(), "the second one works")
                assert second.said("another stallwatch uses it") == 1
            all_hold(first.rest(2.0), lambda page: not page.failed(), "the first one works")
            assert first.said("state is kept") == 1
            assert not first.said("state cannot be written")
        with Exporter(folder, "--state.dir", str(state)) as third:
            page = third.wait_for_server(server.name)
            assert third.said('before="taken up"') == 1

    assert page.value("server_starts_total", server=server.name) == 1
    assert not (state / CORRUPT).exists()


def test_a_state_folder_that_is_removed_is_made_again(folder: Path, victim: Path) -> None:
    state = folder / "state"
    with Victim(victim, folder / "server.log") as server:
        with Exporter(folder, "--state.dir", str(state), command=QUICK_STATE) as exporter:
            exporter.wait_for_server(server.name)
            wait_until((state / "state.json").exists, PATIENCE, "a first state")
            state.rename(folder / "aside")
            wait_until((state / "state.json").exists, PATIENCE, "a state again")
            meanwhile = exporter.rest(2.0)
            said = exporter.said("state folder was removed")
        kept = StateFolder(str(state))
        assert kept.read() is not None
        kept.close()

    assert said == 1
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("own_proc", [True, False], ids=["its own /proc", "the machine's /proc"])
def test_in_a_pid_namespace_of_its_own_it_works_and_takes_nobody_for_dead(
    own_proc: bool, folder: Path, victim: Path
) -> None:
    """A container without the host's PIDs: with a /proc of its own nobody else is there."""
    prefix = ["unshare", "--pid", "--fork", "--kill-child", *(["--mount-proc"] if own_proc else [])]
    if subprocess.run([*prefix, "true"], check=False).returncode != 0:
        pytest.skip("needs PID namespaces")
    with Victim(victim, folder / "server.log") as server, Exporter(folder, prefix=prefix) as exporter:
        exporter.wait_for("its collectors", lambda page: not page.failed())
        if not own_proc:
            exporter.wait_for_server(server.name)
        pages = exporter.rest(3.0)
        exporter.scrapes.stop()

    all_hold(pages, lambda page: not page.failed(), "every collector works")
    expected = ("",) if own_proc else ("working", "quiet", "stalled")
    all_hold(pages, lambda page: page.state(server.name) in expected, "what it can see")
    assert exporter.said("only processes of our own PID namespace are seen") == own_proc


def test_a_log_of_two_gigabytes_that_holds_nothing_costs_time_and_no_line(folder: Path, victim: Path) -> None:
    """A hole at its beginning is passed over; one in the middle is read, as one line that has no end."""
    log = folder / "sparse.log"
    with Victim(victim, folder / "well.log") as well, Victim(victim, log) as sparse, Exporter(folder) as exporter:
        log.write_text(LINE)
        exporter.wait_for("its first line", lambda page: lines(page, sparse.name) == 1)
        memory = psutil.Process(exporter.pid).memory_info().rss
        os.truncate(log, SPARSE_BYTES)
        with log.open("a") as file:
            file.write("\n" + LINE)
        append(well.output)
        exporter.wait_for("the other log", lambda page: lines(page, well.name) == 1)
        after = exporter.wait_for("its last line", lambda page: lines(page, sparse.name) == 3, 2 * PATIENCE)
        more = psutil.Process(exporter.pid).memory_info().rss - memory

    assert after.value("log_bytes_total", server=sparse.name) == SPARSE_BYTES + 1 + len(LINE)
    assert not after.failed()
    assert more < MOST_MEMORY_BYTES


def append(log: Path) -> None:
    with log.open("a") as file:
        file.write(LINE)


def lines(page: Scrape, server: str) -> float | None:
    return page.value("log_lines_total", server=server)


def test_one_place_is_enough_for_many_who_take_their_answers(folder: Path, victim: Path) -> None:
    statuses: Counter[int] = Counter()

    def scrape(url: str) -> None:
        for _ in range(5):
            statuses[fetch(f"{url}/metrics")[0]] += 1

    with Exporter(folder, "--web.max-requests", "1") as exporter, Victim(victim, folder / "server.log") as server:
        exporter.wait_for_server(server.name)
        many = [threading.Thread(target=scrape, args=(exporter.url,)) for _ in range(20)]
        for each in many:
            each.start()
        for each in many:
            each.join(PATIENCE)

    assert statuses == {200: 100}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(("--web.max-requests", "1"), {200: 1, 503: GREEDY - 1}), ((), {200: GREEDY})],
    ids=["one", "as shipped"],
)
def test_answers_beyond_those_that_may_be_in_flight_are_refused(
    flags: tuple[str, ...], expected: dict[int, int], folder: Path, victim: Path
) -> None:
    """Clients that take nothing ask at once; the answer that has lain for a tenth of a second is given up for others,
    so that a busy machine may need more than one try.  The honest one, who takes what it asks for, is never refused."""
    answers: list[bytes] = []

    def is_as_expected() -> bool:
        answers[:] = greedy(exporter.port)
        return Counter(int(answer.split()[1]) for answer in answers) == expected

    with ExitStack() as servers, Exporter(folder, *flags) as exporter:
        for number in range(4):  # so that a page is longer than what the kernel keeps for such a client
            exporter.wait_for_server(servers.enter_context(Victim(victim, folder / f"{number}.log")).name)
        wait_until(is_as_expected, PATIENCE, f"{expected} of {GREEDY} at once")

    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
    assert all(answer.endswith(b"\r\n\r\nmore than 1 requests in flight\n") for answer in refused)
    assert not any("in flight" in scrape.page[:100] for scrape in exporter.scrapes.history)


def greedy(port: int) -> list[bytes]:
    """The answers to clients with little room, who ask at once and take nothing; of pages their beginnings."""
    with ExitStack() as opened:
        clients = [opened.enter_context(socket.socket()) for _ in range(GREEDY)]
        for client in clients:
            client.settimeout(PATIENCE)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE_ROOM_BYTES)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT_BYTES)
            client.connect(("127.0.0.1", port))
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = [client.recv(12, socket.MSG_WAITALL) for client in clients]
        for number, client in enumerate(clients):
            while not answers[number].startswith(b"HTTP/1.1 200") and (more := client.recv(1000)):
                answers[number] += more
        return answers


def test_a_fifo_in_place_of_the_configuration_holds_nobody_up(folder: Path, victim: Path) -> None:
    file = folder / "stallwatch.yml"
    with Exporter(folder) as exporter, Victim(victim, folder / "server.log") as server:
        exporter.wait_for_server(server.name)
        file.unlink()
        os.mkfifo(file)
        os.kill(exporter.pid, signal.SIGHUP)
        exporter.wait_for("a failed reload", lambda page: page.value("config_last_reload_successful") == 0)
        meanwhile = exporter.rest(2.0)
        started = subprocess.run(exporter.command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        file.unlink()
        file.write_text(CONFIG)
        os.kill(exporter.pid, signal.SIGHUP)
        exporter.wait_for("a reload", lambda page: page.value("config_last_reload_successful") == 1)

    assert exporter.said("no regular file") == 1
    assert (started.returncode, "no regular file" in started.stderr) == (2, True)
    holds_in_time(meanwhile, lambda page: page.value("threads", server=server.name), "the server is watched as before")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
