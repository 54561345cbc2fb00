"""The helper that reads cmdline and environ: real child processes, and one that really hangs.

A folder whose cmdline is a FIFO that nobody writes is as good as a process that holds its mmap lock.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from proc_tree import ProcTree
from stallwatch.model import ProcessId
from stallwatch.sources import blocking_reads
from stallwatch.sources.blocking_child import LARGEST, answer
from stallwatch.sources.blocking_reads import BlockingReads, CommandLine, start_helper

DEADLINE_SECONDS = 0.2
PATIENT_SECONDS = 30.0
"""Where nothing hangs: the machine may be busy."""


class Stubborn(subprocess.Popen[bytes]):
    """Does not die of SIGKILL, as a helper in uninterruptible sleep does not."""

    def kill(self) -> None:
        """The signal is sent and changes nothing."""


class Helpers:
    """Starts real helpers, waits until each can answer, and remembers them."""

    def __init__(self, popen: type[subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        self.popen = popen
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self, proc: Path) -> subprocess.Popen[bytes]:
        child = start_helper(proc, self.popen)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"0 0\n")  # nobody; the answer shows that the interpreter is up
        assert child.stdout.readline() == b'{"reason": "vanished"}\n'
        self.started.append(child)
        return child

    def living(self) -> int:
        return sum(1 for child in self.started if child.poll() is None)

    def release(self) -> None:
        """Let the stubborn ones die after all."""
        for child in self.started:
            subprocess.Popen.kill(child)
            child.wait()


class Polls:
    """Notes for how many seconds it waits each time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        self._make = select.poll
        patch.setattr(blocking_reads, "select", SimpleNamespace(poll=self.poll, POLLIN=select.POLLIN))

    def poll(self) -> SimpleNamespace:
        made = self._make()

        def wait(milliseconds: float) -> object:
            self.seconds.append(milliseconds / 1000)
            return made.poll(milliseconds)

        return SimpleNamespace(register=made.register, poll=wait)


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    return Polls(monkeypatch)


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    made = ProcTree(tmp_path)
    made.add(7, "vllm serve org/m", environ={"RANK": "3", "OPENAI_API_KEY": "sk-PLANTED"})
    return made


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    made = Helpers()
    yield made
    made.release()


def hang(tree: ProcTree, pid: int) -> ProcessId:
    """A process whose cmdline blocks whoever reads it."""
    spec = tree.add(pid, "x")
    (tree.folder(pid) / "cmdline").unlink()
    os.mkfifo(tree.folder(pid) / "cmdline")
    return spec.id


KNOWN = ProcessId(7, 10000)
READ = CommandLine(("vllm", "serve", "org/m"), {"RANK": "3"})


def test_a_command_line_comes_with_the_few_variables_that_are_wanted(tree: ProcTree) -> None:
    reads = BlockingReads(tree.root, PATIENT_SECONDS)

    found = reads.command_line(KNOWN)
    reads.close()

    assert found == READ
    assert "PLANTED" not in repr(found)


def test_our_own_process_is_read() -> None:
    reads = BlockingReads(Path("/proc"), PATIENT_SECONDS)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])

    found = reads.command_line(ProcessId(os.getpid(), ticks))
    reads.close()

    assert found.argv == tuple(os.fsdecode(Path("/proc/self/cmdline").read_bytes()).rstrip("\0").split("\0"))


def test_a_helper_is_started_though_our_working_directory_is_gone(
    tree: ProcTree, helpers: Helpers, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As good as one on a dead mount, at which nobody may look either."""
    gone = tmp_path_factory.mktemp("gone")
    monkeypatch.chdir(gone)
    gone.rmdir()
    reads = BlockingReads(tree.root, PATIENT_SECONDS, helpers)

    found = reads.command_line(KNOWN)
    reads.close()

    assert found == READ
    with pytest.raises(FileNotFoundError):
        Path.cwd()


def test_one_helper_serves_many_reads(tree: ProcTree, helpers: Helpers) -> None:
    reads = BlockingReads(tree.root, PATIENT_SECONDS, helpers)

    found = [reads.command_line(KNOWN) for _ in range(20)]
    reads.close()

    assert found == [READ] * 20
    assert len(helpers.started) == 1
    assert helpers.living() == 0


def test_a_read_that_hangs_ends_at_the_deadline_and_the_next_one_works(
    tree: ProcTree, helpers: Helpers, polls: Polls
) -> None:
    sick = hang(tree, 8)
    reads = BlockingReads(tree.root, DEADLINE_SECONDS, helpers)

    begin = time.monotonic()
    found = reads.command_line(sick)
    seconds, waits = time.monotonic() - begin, list(polls.seconds)
    after = [CommandLine(reason="timeout")]
    for _ in range(50):  # the machine may be busier than the deadline allows
        if after[-1].reason == "timeout":
            after.append(reads.command_line(KNOWN))
    living = helpers.living()
    reads.close()

    assert found == CommandLine(reason="timeout")
    assert seconds >= DEADLINE_SECONDS
    assert len(waits) == 1
    assert 0 < waits[0] <= DEADLINE_SECONDS
    assert after[-1] == READ
    assert living == 1
    assert helpers.living() == 0


def test_helpers_that_do_not_die_are_two_at_most(tree: ProcTree, polls: Polls) -> None:
    """Then nothing is read until one of them is released: bounded, and visible as time-outs."""
    stubborn = Helpers(Stubborn)
    sick = hang(tree, 8)
    reads = BlockingReads(tree.root, DEADLINE_SECONDS, stubborn)
    try:
        found = [reads.command_line(sick) for _ in range(5)]
        waits = len(polls.seconds)
        found.append(reads.command_line(KNOWN))
        started = len(stubborn.started)
    finally:
        stubborn.release()
    reads.close()

    assert found == [CommandLine(reason="timeout")] * 6
    assert started == 2
    assert len(polls.seconds) == waits == 2  # for the first two; whoever comes later does not wait


def test_after_the_sick_process_is_gone_reading_goes_on(tree: ProcTree) -> None:
    stubborn = Helpers(Stubborn)
    sick = hang(tree, 8)
    reads = BlockingReads(tree.root, DEADLINE_SECONDS, stubborn)
    for _ in range(2):
        reads.command_line(sick)
    stubborn.release()
    stubborn.popen = subprocess.Popen

    found = [reads.command_line(KNOWN) for _ in range(50)]
    reads.close()
    stubborn.release()

    assert READ in found


def test_a_helper_that_died_is_replaced(tree: ProcTree, helpers: Helpers) -> None:
    reads = BlockingReads(tree.root, PATIENT_SECONDS, helpers)
    reads.command_line(KNOWN)
    helpers.started[0].kill()
    helpers.started[0].wait()

    found = reads.command_line(KNOWN)
    reads.close()

    assert found == READ
    assert len(helpers.started) == 2


def test_a_helper_that_never_says_a_word_is_an_error(tree: ProcTree) -> None:
    """It cannot start at all: no interpreter, no library, no memory."""

    def start(proc: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    reads = BlockingReads(tree.root, PATIENT_SECONDS, start)
    found = reads.command_line(KNOWN)
    reads.close()

    assert found == CommandLine(reason="error")


def test_a_resting_reader_has_no_helper(tree: ProcTree, helpers: Helpers) -> None:
    reads = BlockingReads(tree.root, PATIENT_SECONDS, helpers)
    reads.command_line(KNOWN)

    reads.rest()
    living = helpers.living()
    again = reads.command_line(KNOWN)
    reads.close()

    assert (living, again) == (0, READ)


def test_the_helper_gets_nothing_of_our_environment(tree: ProcTree) -> None:
    child = start_helper(tree.root)
    environ = Path(f"/proc/{child.pid}/environ").read_bytes()
    child.communicate()

    names = {item.partition(b"=")[0] for item in environ.split(b"\0") if item}
    assert names <= {b"LD_LIBRARY_PATH"}


# --- what the helper says of one process; without a process of its own -------------------------------------


def say(tree: ProcTree, pid: int = 7, ticks: int = 10000) -> dict[str, object]:
    return answer(str(tree.root), str(pid), ticks)


def test_a_pid_that_is_used_again_is_another_process(tree: ProcTree) -> None:
    tree.replace(7, "other", started=500.0)

    assert say(tree) == {"reason": "vanished"}


def test_a_process_that_is_gone_has_vanished(tree: ProcTree) -> None:
    tree.end(7)

    assert say(tree) == {"reason": "vanished"}


def test_a_zombie_has_an_empty_command_line(tree: ProcTree) -> None:
    tree.change(7, ())

    assert say(tree)["argv"] == [""]


def test_what_cannot_be_read_is_an_error(tree: ProcTree) -> None:
    tree.forbid(7, "cmdline")

    assert say(tree) == {"reason": "error"}


def test_without_the_environment_the_arguments_still_count(tree: ProcTree) -> None:
    tree.forbid(7, "environ")

    assert say(tree) == {"argv": ["vllm", "serve", "org/m"], "environ": {}}


def test_an_environment_that_a_title_destroyed_says_nothing(tree: ProcTree) -> None:
    """setproctitle writes over it: NULs, blanks, halves of words."""
    (tree.folder(7) / "environ").write_bytes(b"\0\0  K=\0\xff\xfe=3\0RANK\0")

    assert say(tree)["environ"] == {}


def test_words_that_are_no_utf_8_survive(tree: ProcTree) -> None:
    (tree.folder(7) / "cmdline").write_bytes(b"python\0caf\xe9\0\0")

    assert say(tree)["argv"] == ["python", "caf\udce9"]


def test_an_endless_command_line_is_cut(tree: ProcTree) -> None:
    (tree.folder(7) / "cmdline").write_bytes(b"x" * (3 * LARGEST))

    argv = say(tree)["argv"]

    assert isinstance(argv, list)
    assert len(argv[0]) <= LARGEST + (1 << 16)


def test_a_helper_that_cannot_start_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without it no server is found, and nothing else would say why."""

    def refuse(proc: Path) -> subprocess.Popen[bytes]:
        raise PermissionError(13, "Permission denied")

    reads = BlockingReads(tmp_path, DEADLINE_SECONDS, refuse)

    assert [reads.command_line(ProcessId(1, 1)).reason for _ in range(3)] == ["error"] * 3
    assert [record.message for record in caplog.records] == ["command lines cannot be read: the helper does not start"]


def test_the_helper_gives_up_every_right_but_two(tmp_path: Path) -> None:
    """CAP_DAC_READ_SEARCH (2) and CAP_SYS_PTRACE (19) at most, and none can be won back."""
    helpers = Helpers()
    reads = BlockingReads(tmp_path, PATIENT_SECONDS, helpers)
    try:
        reads.command_line(ProcessId(1, 1))  # answered, whatever it says: so it has begun to work
        status = Path(f"/proc/{helpers.started[0].pid}/status").read_text()
    finally:
        reads.close()

    fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) & ~(1 << 2 | 1 << 19) == 0
    assert int(fields["CapPrm"], 16) & ~(1 << 2 | 1 << 19) == 0
    assert fields["NoNewPrivs"] == "1"
