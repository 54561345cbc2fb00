"""`check --stacks`: a fake py-spy, stack files in a tree like /proc, and what happens when either misbehaves."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kernels.rights import without_file_rights
from proc_tree import ProcTree, Thread
from stallwatch import stacks
from stallwatch.assembly import Settings
from stallwatch.check import Peer, check
from stallwatch.model import Process, ProcessId, RankState, Report
from stallwatch.presentation import document, text
from stallwatch.stacks import NOT_INSTALLED, Tools, add_stacks, find_py_spy, kernel_frames, run_bounded

KERNEL = "[<0>] futex_wait_queue+0x69/0xe0\n[<0>] futex_wait+0x17e/0x260\n[<0>] do_syscall_64+0x5b/0xc0\n"
NFS = "[<0>] rpc_wait_bit_killable+0x11/0x70 [sunrpc]\n[<0>] nfs_file_read+0x8e/0xb0 [nfs]\n"


def frame(name: str, file: str, line: int) -> dict[str, object]:
    return {"name": name, "filename": f"/home/alice/{file}", "short_filename": file, "line": line, "locals": None}


def thread(number: int, name: str, *frames: dict[str, object]) -> dict[str, object]:
    return {"pid": 10, "thread_id": 7, "os_thread_id": number, "thread_name": name, "frames": list(frames)}


WAIT = frame("Condition.wait", "threading.py", 320)
ANSWER = json.dumps(
    [
        thread(12, "Thread-1 (watch)", WAIT, frame("watch", "sglang/watch.py", 8)),
        thread(13, "Thread-2 (watch)", WAIT, frame("watch", "sglang/watch.py", 8)),
        thread(10, "MainThread", WAIT, frame("load_model", "sglang/srt/model_runner.py", 411)),
    ]
)
"""What py-spy says: the main thread is not the first."""


class Machine:
    """A /proc with one rank TP1 (PID 10), and a folder for a py-spy of the test's own making."""

    def __init__(self, root: Path) -> None:
        self.tree = ProcTree(root / "proc")
        (self.tree.root / "self").symlink_to(str(os.getpid()))
        tasks = {10: Thread(), 11: Thread("0 0x3", "rpc_wait_bit_killable", "D"), 12: Thread(), 13: Thread()}
        self.spec = self.tree.add(10, "sglang::scheduler_TP1", tasks=tasks)
        self.kernel(10, KERNEL)
        self.kernel(11, NFS)
        self.kernel(12, "[<0>] do_epoll_wait+0x1/0x2\n")
        self.folder = root / "bin"
        self.folder.mkdir()
        self.tools = Tools(self.tree.root)

    def kernel(self, thread: int, text: str) -> None:
        (self.tree.folder(10) / f"task/{thread}/stack").write_text(text)

    def status(self, tracer: int) -> None:
        (self.tree.folder(10) / "status").write_text(f"Name:\tpython3\nTracerPid:\t{tracer}\nNSpid:\t10\n")

    def py_spy(self, script: str, **limits: Any) -> None:
        """Install a py-spy that is a shell script; it notes how it was called."""
        program = self.folder / "py-spy"
        program.write_text(f'#!/bin/sh\necho "$@" > {self.folder}/called\nenv > {self.folder}/environ\n{script}\n')
        program.chmod(0o755)
        self.tools = replace(self.tools, py_spy=str(program), **limits)

    def answering(self, answer: str) -> None:
        (self.folder / "answer").write_text(answer)
        self.py_spy(f"cat {self.folder}/answer")

    @property
    def called(self) -> str | None:
        note = self.folder / "called"
        return note.read_text() if note.exists() else None

    def server(self, state: str = "stalled", **rank: Any) -> dict[str, Any]:
        """A server of a document, as far as stacks look at it."""
        known = {"rank": "TP1", "pid": 10, "start_ticks": self.spec.id.start_ticks, "alive": True}
        return {"state": state, "ranks": [known | rank]}

    def take(self, state: str = "stalled", **rank: Any) -> dict[str, Any] | None:
        """What is found of the rank; None when nothing was asked."""
        server = self.server(state, **rank)
        add_stacks([server], self.tools)
        found: dict[str, Any] | None = server["ranks"][0].get("stacks")
        return found

    def problems(self, **rank: Any) -> list[str]:
        found = self.take(**rank)
        assert found is not None
        return list(found["problems"])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(stacks, "are_calls_filtered", lambda: False)  # in a container there may be a filter
    return Machine(tmp_path)


# --- what is found -----------------------------------------------------------------------------------------


def test_python_stacks_are_functions_and_short_file_names_the_main_thread_first(machine: Machine) -> None:
    machine.answering(ANSWER)

    found = machine.take()

    assert found is not None
    assert found["python"] == [
        {
            "threads": [10],
            "name": "MainThread",
            "frames": ["Condition.wait (threading.py:320)", "load_model (sglang/srt/model_runner.py:411)"],
        },
        {
            "threads": [12, 13],
            "name": "Thread-1 (watch)",
            "frames": ["Condition.wait (threading.py:320)", "watch (sglang/watch.py:8)"],
        },
    ]
    assert found["problems"] == []
    assert "alice" not in json.dumps(found)


def test_py_spy_only_looks_and_gets_nothing_of_our_environment(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No local variables, no pause of the process, and no token of ours in the environment of another program."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    machine.answering(ANSWER)

    machine.take()

    assert machine.called == "dump --nonblocking --json --pid 10\n"
    assert "hf_secret" not in (machine.folder / "environ").read_text()


def test_kernel_stacks_are_those_of_the_main_thread_and_of_blocked_ones(machine: Machine) -> None:
    found = machine.take()

    assert found is not None
    assert found["kernel"] == [
        {"threads": [10], "name": "", "frames": ["futex_wait_queue", "futex_wait", "do_syscall_64"]},
        {"threads": [11], "name": "", "frames": ["rpc_wait_bit_killable [sunrpc]", "nfs_file_read [nfs]"]},
    ]


def test_a_kernel_that_prints_addresses_gives_none_away() -> None:
    assert kernel_frames(
        b"[<ffffffff810d1c2b>] futex_wait_queue_me+0xcb/0x120\n[<ffffffffffffffff>] 0xffffffffff\n"
    ) == (
        "futex_wait_queue_me",
        "0xffffffffff",
    )


@pytest.mark.parametrize("state", ["working", "slow", "idle", "quiet", "failed", "unknown", "gone"])
def test_a_server_that_does_not_stand_still_is_left_alone(machine: Machine, state: str) -> None:
    machine.answering(ANSWER)

    assert machine.take(state) is None
    assert machine.called is None


def test_a_suspect_server_is_asked(machine: Machine) -> None:
    machine.answering(ANSWER)

    assert machine.take("suspect") is not None
    assert machine.called is not None


@pytest.mark.parametrize("rank", [{"pid": None}, {"pid": "10; rm"}, {"pid": True}, {"pid": -1}, {"alive": False}])
def test_a_rank_without_a_living_process_is_left_alone(machine: Machine, rank: dict[str, Any]) -> None:
    machine.answering(ANSWER)

    assert machine.take(**rank) is None
    assert machine.called is None


# --- which process it is -----------------------------------------------------------------------------------


def test_another_process_with_the_pid_is_not_looked_at(machine: Machine) -> None:
    machine.answering(ANSWER)
    machine.tree.replace(10, "sshd", started=900.0, tasks={10: Thread()})
    machine.kernel(10, KERNEL)

    found = machine.take()

    assert found is not None
    assert (found["python"], found["kernel"], machine.called) == ([], [], None)
    assert all("another process" in problem for problem in found["problems"])


def test_what_was_said_of_another_process_in_between_is_dropped(machine: Machine) -> None:
    """The PID changes hands while py-spy runs."""
    machine.answering(ANSWER)
    other = (machine.tree.folder(10) / "stat").read_text().replace(f" {machine.spec.id.start_ticks} ", " 99999 ")
    (machine.folder / "other").write_text(other)
    machine.py_spy(f"cat {machine.folder}/answer; cat {machine.folder}/other > {machine.tree.folder(10)}/stat")

    found = machine.take()

    assert found is not None
    assert machine.called is not None
    assert found["python"] == []


def test_a_serve_that_does_not_tell_start_times_gets_no_stacks(machine: Machine) -> None:
    machine.answering(ANSWER)

    problems = machine.problems(start_ticks=None)

    assert [problem.startswith("the serve that answered does not say") for problem in problems] == [True]
    assert machine.called is None


def test_a_process_that_ended_is_said_to_be_gone(machine: Machine) -> None:
    machine.answering(ANSWER)
    machine.tree.end(10)

    assert machine.problems() == ["no Python stack: the process is gone", "no kernel stack: the process is gone"]
    assert machine.called is None


def test_a_process_that_is_traced_already_is_left_to_its_tracer(machine: Machine) -> None:
    machine.answering(ANSWER)
    machine.status(tracer=4242)

    found = machine.take()

    assert found is not None
    assert found["problems"] == ["no Python stack: another program (PID 4242) traces the process already"]
    assert (len(found["kernel"]), machine.called) == (2, None)


def test_pids_of_another_namespace_mean_nothing_to_py_spy(machine: Machine) -> None:
    machine.answering(ANSWER)
    (machine.tree.root / "self").unlink()

    found = machine.take()

    assert found is not None
    assert "namespace" in found["problems"][0]
    assert (len(found["kernel"]), machine.called) == (2, None)


# --- py-spy that misbehaves --------------------------------------------------------------------------------


def test_without_py_spy_it_is_said_what_would_help(machine: Machine) -> None:
    assert machine.problems() == [f"no Python stack: {NOT_INSTALLED}"]


def test_py_spy_that_hangs_is_killed_with_what_it_started(machine: Machine) -> None:
    machine.py_spy(f"sleep 600 & echo $! > {machine.folder}/child; wait", spy_seconds=0.3)

    problems = machine.problems()

    assert problems == ["no Python stack: py-spy did not end within 0.3 s and was killed"]
    child = int((machine.folder / "child").read_text())
    assert any(_is_over(child) for _ in range(100_000))


def _is_over(pid: int) -> bool:
    """Gone, or a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_py_spy_that_never_stops_talking_is_killed(machine: Machine) -> None:
    machine.py_spy("head -c 100000000 /dev/zero; sleep 600", largest_output=1 << 20)

    assert machine.problems() == ["no Python stack: py-spy said more than 1 MiB and was killed"]


DENIED = "echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1"


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        (None, "CAP_SYS_PTRACE (or root) is needed"),
        ("0", "CAP_SYS_PTRACE (or root) is needed"),
        ("1", "CAP_SYS_PTRACE (or root) is needed, or kernel.yama.ptrace_scope 0 and the same user"),
        ("2", "is needed, and kernel.yama.ptrace_scope is 2 (only with CAP_SYS_PTRACE)"),
        ("3", "is needed, and kernel.yama.ptrace_scope is 3 (nobody may, until the next boot)"),
    ],
)
def test_py_spy_without_the_right_tells_which_one(machine: Machine, scope: str | None, words: str) -> None:
    machine.py_spy(DENIED)
    if scope is not None:
        yama = machine.tree.root / "sys/kernel/yama"
        yama.mkdir(parents=True)
        (yama / "ptrace_scope").write_text(scope + "\n")

    (problem,) = machine.problems()

    assert problem.endswith(words)


def test_under_a_filter_it_is_said_that_there_may_be_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "are_calls_filtered", lambda: True)
    machine.py_spy(DENIED)

    (problem,) = machine.problems()

    assert problem.endswith("is needed, and no seccomp filter: this process is under one")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Error: Failed to find python version\x1b[2J' >&2; exit 1", "status 1): Error: Failed to find python"),
        ("exit 1", "py-spy failed (status 1): without a word"),
        ("kill -9 $$", "py-spy failed (signal 9): without a word"),
        ("echo 'Process 10: python3 --api-key secret'", "this py-spy answers in another form"),
        ("echo '[{}]'", "this py-spy answers in another form"),
        ("echo 7", "this py-spy answers in another form"),
        ('echo \'[{"frames":[],"os_thread_id":1e999}]\'', "this py-spy answers in another form"),
    ],
)
def test_py_spy_that_fails_is_told_in_one_line(machine: Machine, script: str, words: str) -> None:
    machine.py_spy(script)

    (problem,) = machine.problems()

    assert words in problem
    assert "\x1b" not in problem
    assert "secret" not in problem


def test_py_spy_that_does_not_start_is_a_sentence(machine: Machine) -> None:
    machine.tools = replace(machine.tools, py_spy=str(machine.folder / "nothing"))

    assert machine.problems() == ["no Python stack: nothing does not start: No such file or directory"]


def test_no_rank_is_begun_when_the_time_for_all_is_over(machine: Machine) -> None:
    machine.answering(ANSWER)
    machine.tools = replace(machine.tools, whole_seconds=-1.0)

    assert machine.problems() == ["the time for all stacks together is over"]
    assert machine.called is None


def test_a_program_that_closes_its_output_and_stays_is_killed_too() -> None:
    output = run_bounded(["/bin/sh", "-c", "exec >&- 2>&-; sleep 600"], 0.2, 100)

    assert (output.ended, output.text) == ("time", b"")


def test_a_program_that_ends_in_time_has_said_all(machine: Machine) -> None:
    output = run_bounded(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], 10.0, 100)

    assert (output.text, output.errors, output.ended, output.status) == (b"out\n", b"err\n", "end", 3)


# --- kernel stacks that are not to be had ------------------------------------------------------------------


def test_a_kernel_without_stack_files_is_said(machine: Machine) -> None:
    machine.answering(ANSWER)
    (machine.tree.folder(10) / "task/10/stack").unlink()

    assert machine.problems() == ["no kernel stack: this kernel does not tell (CONFIG_STACKTRACE)"]


def test_a_kernel_stack_without_the_right_tells_which_one(machine: Machine) -> None:
    machine.answering(ANSWER)
    (machine.tree.folder(10) / "task/10/stack").chmod(0)

    with without_file_rights():
        problems = machine.problems()

    assert problems == ["no kernel stack: only root with CAP_SYS_ADMIN may read it"]


def test_a_stack_file_that_hangs_is_left_behind(machine: Machine) -> None:
    """A FIFO stands for a read that does not come back; its reader lets go when the test opens the other end."""
    machine.answering(ANSWER)
    machine.tools = replace(machine.tools, kernel_seconds=0.2)
    fifo = machine.tree.folder(10) / "task/10/stack"
    fifo.unlink()
    os.mkfifo(fifo)
    try:
        problems = machine.problems()
    finally:
        os.close(os.open(fifo, os.O_RDWR))

    assert problems == ["no kernel stack: reading takes longer than 0.2 s"]


# --- finding py-spy ----------------------------------------------------------------------------------------


def test_py_spy_is_found_on_the_path_only_by_an_absolute_name(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.answering(ANSWER)
    monkeypatch.chdir(machine.folder)

    assert find_py_spy(str(machine.folder)) == str(machine.folder / "py-spy")
    assert find_py_spy(".") != "./py-spy"


# --- `check` -----------------------------------------------------------------------------------------------


@pytest.fixture
def stalled(machine: Machine, report: Report) -> dict[str, Any]:
    """The document of a `serve` about a stalled server whose TP1 is the process of the tree."""
    one = report.servers[0]
    process = Process(machine.spec.id, "TP1")
    other = Process(ProcessId(9, 1), "TP0")
    server = replace(one.server, processes=(*one.server.processes, process, other))
    ranks = (RankState("TP0", 9, alive=False), RankState("TP1", 10, alive=True))
    return document(replace(report, servers=(replace(one, server=server, ranks=ranks), *report.servers[1:])))


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    machine: Machine, stalled: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """`check` against a server on the loopback that sends the document; the fake py-spy is the first on PATH."""
    monkeypatch.setenv("PATH", str(machine.folder) + os.pathsep + os.environ["PATH"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(stalled).encode())

        def log_message(self, *arguments: Any) -> None:
            """Not to stderr."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"

    def run(output: str, with_stacks: bool) -> tuple[int, str]:
        settings = Settings(procfs=str(machine.tree.root), collectors=())
        code = check(settings, Peer(url), 0.0, None, output, with_stacks)
        return code, capsys.readouterr().out

    yield run
    server.shutdown()
    server.server_close()


def test_check_prints_the_stacks_below_their_rank(machine: Machine, run: Run) -> None:
    machine.answering(ANSWER)

    code, out = run("text", True)

    lines = out.splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith("> TP1 "))
    assert code == 1
    assert lines[row + 1 : row + 4] == [
        "    Python, thread 10 (MainThread):",
        "      Condition.wait (threading.py:320)",
        "      load_model (sglang/srt/model_runner.py:411)",
    ]
    assert "    Python, 2 threads, 12 and others (Thread-1 (watch)):" in lines
    assert "    kernel, thread 11:" in lines


def test_check_prints_why_stacks_are_missing(machine: Machine, run: Run) -> None:
    machine.py_spy(DENIED)

    _, out = run("text", True)

    assert "\n  TP1: no Python stack: py-spy may not read the process: CAP_SYS_PTRACE (or root) is needed\n" in out


def test_a_problem_that_every_rank_has_is_said_once(stalled: dict[str, Any]) -> None:
    for rank, problems in zip(stalled["servers"][0]["ranks"], (["no x"], ["no x", "no y"]), strict=True):
        rank["stacks"] = {"python": [], "kernel": [], "problems": problems}

    told = text(stalled)

    assert told.count("no x") == 1
    assert "\n  every rank: no x\n  TP1: no y\n" in told


def test_check_gives_them_as_json_under_a_key_of_their_own(machine: Machine, run: Run, stalled: dict[str, Any]) -> None:
    machine.answering(ANSWER)

    code, out = run("json", True)

    ranks = json.loads(out)["servers"][0]["ranks"]
    assert code == 1
    assert [set(rank) - set(stalled["servers"][0]["ranks"][0]) for rank in ranks] == [set(), {"stacks"}]
    assert set(ranks[1]["stacks"]) == {"python", "kernel", "problems"}


def test_stacks_somebody_else_sends_are_not_shown(machine: Machine, run: Run, stalled: dict[str, Any]) -> None:
    stalled["servers"][0]["ranks"][1]["stacks"] = {"python": "load_model", "kernel": 7}

    _, out = run("text", False)

    assert "load_model" not in out


@pytest.mark.parametrize("output", ["text", "json"])
def test_without_the_flag_nothing_is_run_and_nothing_printed(machine: Machine, run: Run, output: str) -> None:
    machine.answering(ANSWER)

    _, out = run(output, False)

    assert machine.called is None
    assert "load_model" not in out
    assert '"stacks"' not in out


def test_a_report_never_holds_stacks(report: Report) -> None:
    """`/api/v1/report` sends this very document."""
    assert "stacks" not in json.dumps(document(report))


def test_frames_of_foreign_origin_cannot_move_the_cursor(stalled: dict[str, Any]) -> None:
    hostile = {"threads": [1], "name": "a\x1b[2Jb", "frames": ["f\x1b]0;x\x07 (a.py:1)"]}
    stalled["servers"][0]["ranks"][1]["stacks"] = {"python": [hostile], "kernel": [], "problems": ["\x1b[1m"]}

    assert "\x1b" not in text(stalled)
