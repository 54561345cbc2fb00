"""A pretended node on which servers start and end all the time: a tree of processes, and their real log files."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from proc_tree import ProcTree, Thread, threads

FIRST_LINES = (
    "[2026-06-02 08:00:00] server_args=ServerArgs(model_path='org/model', tp_size=2)",
    "[2026-06-02 08:00:01 TP0] Init torch distributed begin.",
    "[2026-06-02 08:00:02 TP0] Load weight begin. avail mem=78.50 GB",
    "[2026-06-02 08:00:03 TP1] Load weight begin. avail mem=78.50 GB",
    "[2026-06-02 08:00:09 TP0] Load weight end. elapsed=22.2 s, type=X, avail mem=57.10 GB",
    "[2026-06-02 08:00:09 TP1] Load weight end. elapsed=22.2 s, type=X, avail mem=57.10 GB",
    "[2026-06-02 08:00:12 TP0] Memory pool end. avail mem=20.11 GB",
)
READY = "[2026-06-02 08:00:20] The server is fired up and ready to roll!"
SERVING = (
    "[2026-06-02 08:01:{n:02} TP0] Decode batch, #running-req: {n}, #token: {k}, token usage: 0.31, cuda graph: True, "
    "gen throughput (token/s): {k}.12, #queue-req: 0",
    '[2026-06-02 08:01:{n:02}] INFO:     10.0.{n}.7:{k} - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "[2026-06-02 08:01:{n:02} TP1] request {k:032x} came from nobody a pattern knows",
)
ENDS = (
    "[2026-06-02 08:02:00] INFO:     Shutting down",
    "[2026-06-02 08:02:00 TP1] Scheduler hit an exception: Traceback (most recent call last):",
    "",
)
"""Last lines in turn: in order, by a fatal error, without a word."""

RETURNING_PORTS, NEW_NAME_EVERY, NEW_FAILS_EVERY = 8, 4, 64
"""Most servers return under their name; some come once under a name of their own, and nearly all of those end in order,
for one that failed is kept for a day."""
LINES_PER_TURN = 31


@dataclass(slots=True)
class Running:
    """One server: its processes and its log."""

    pids: tuple[int, int]
    log: Path
    end: str
    age: int = 0


@dataclass(slots=True)
class Machine:
    """`turn` lets one step of time pass.  `now`: seconds since boot."""

    folder: Path
    lives: int = 3
    now: float = 1000.0
    starts: int = 0
    lines: int = 0
    rotations: int = 0
    tree: ProcTree = field(init=False)
    running: deque[Running] = field(default_factory=deque)
    _next_pid: int = 1000
    _chance: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.tree = ProcTree(self.folder / "proc")
        for name in ("meminfo", "vmstat", "self/mountinfo"):
            path = self.tree.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text({"meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\nCached: 1 kB\n"}.get(name, ""))
        (self.folder / "dev/shm").mkdir(parents=True)
        (self.folder / "logs").mkdir()
        self._start(8000, "")  # it stays, and its log is rotated

    def turn(self, seconds: float, starts: int, rotate: bool) -> None:
        self.now += seconds
        for _ in range(starts):
            is_new = self.starts % NEW_NAME_EVERY == 0
            is_orderly = is_new and self.starts % NEW_FAILS_EVERY
            port = 10_000 + self.starts if is_new else 9000 + self.starts % RETURNING_PORTS
            self._start(port, ENDS[0] if is_orderly else ENDS[self.starts % len(ENDS)])
        if rotate:
            self._rotate(self.running[0])
        for server in self.running:
            self._speak(server)
            server.age += 1
        while len(self.running) > 1 and self.running[1].age >= self.lives:
            self._end(self.running[1])
            del self.running[1]

    def _start(self, port: int, end: str) -> None:
        first, log = self._next_pid, self.folder / "logs" / f"{self.starts}.log"
        self._next_pid += 10
        self.starts += 1
        log.write_text("\n".join(FIRST_LINES) + "\n")
        self.lines += len(FIRST_LINES)
        command = f"python3 -m sglang.launch_server --model-path org/model --tp 2 --port {port}"
        self.tree.add(first, command, started=self.now, tasks=threads(3, Thread(), first))
        rank = {"comm": "sglang::schedul", "ppid": first, "started": self.now}
        self.tree.add(first + 1, "sglang::scheduler_TP0", tasks=threads(5, Thread(), first + 1), **rank)
        for fd in (1, 2):
            self.tree.redirect(first, fd, log)
        self.running.append(Running((first, first + 1), log, end))

    def _speak(self, server: Running) -> None:
        texts = [READY] if server.age == 1 else []
        for _ in range(LINES_PER_TURN - len(texts)):
            text = self._chance.choice(SERVING)
            texts.append(text.format(n=self._chance.randrange(60), k=self._chance.randrange(60_000)))
        with server.log.open("a") as file:
            file.write("\n".join(texts) + "\n")
        self.lines += len(texts)
        for pid in server.pids:
            self.tree.change(pid, cpu=self.now / 10, minor=int(self.now), io={"rchar": int(self.now * 1e6)})

    def _rotate(self, server: Running) -> None:
        server.log.rename(server.log.with_suffix(".log.1"))
        server.log.touch()
        self.rotations += 1

    def _end(self, server: Running) -> None:
        if server.end:
            with server.log.open("a") as file:
                file.write(server.end + "\n")
            self.lines += 1
        self.tree.end(*server.pids)
        server.log.unlink()
