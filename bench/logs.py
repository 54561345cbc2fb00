"""CPU of following and parsing a log, against mtail and grep with the same patterns, in one run.

    python -m bench.logs [--megabytes 200] [--slice 10] [--rounds 3] [--large 1000] [--only heavy many]

Prints bytes per CPU second of each and the ratios.  mtail reads a slice of the same log (it is slow) and is
scaled per byte; its start is measured on an empty log and taken off.  All files are read once before (page cache).
Then: logs of which every line matches, 64 logs at 1 MB/s in all, and a large log that was there before us.
--only takes some of these: compare containers heavy many large.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from stallwatch.config import Config
from stallwatch.frameworks import Framework, load_frameworks
from stallwatch.model import LogPlace, ProcessId, Reading, Scene, Server
from stallwatch.parse.report import parse_files
from stallwatch.sources import Host, Moment
from stallwatch.sources.logs.collector import Logs
from stallwatch.sources.logs.decode import StreamUnwrapper
from stallwatch.sources.logs.lines import LogScanner
from stallwatch.sources.logs.tail import LogTail

MARKER_SHARE = 0.001
SEED = 1

OWN = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:(?P<rank>(?: [A-Z_]+\d+)+))?\] "
UVICORN = OWN + r"[A-Z]+:\s+"

LINES: tuple[tuple[float, str], ...] = (
    (
        0.40,
        "[{time} TP0] Decode batch, #running-req: {small}, #token: {number}, token usage: 0.31, cuda graph: True, "
        "gen throughput (token/s): {number}.12, #queue-req: 0",
    ),
    (
        0.10,
        "[{time} TP0] Prefill batch, #new-seq: 1, #new-token: {number}, #cached-token: 0, token usage: 0.31, "
        "#running-req: {small}, #queue-req: 0, ",
    ),
    (0.30, '[{time}] INFO:     10.0.{small}.7:{number} - "POST /v1/chat/completions HTTP/1.1" 200 OK'),
    (
        0.20,
        "[{time} TP{small}] a line nobody has a pattern for, with number {number} and the id {number:032x} "
        "and some more words to make it as long as such lines are",
    ),
)
MARKERS = (
    "[{time} TP{small}] Load weight end. elapsed=22.2 s, type=X, avail mem=57.10 GB",
    "[{time} TP{small}] Memory pool end. avail mem=20.11 GB",
    "[{time} TP{small}] No available block found in 60 second. ",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
)


def write_log(path: Path, size: int) -> None:
    """A server that became ready and serves: decode and access lines, one in a thousand a marker."""
    chance = random.Random(SEED)
    weights, texts = [weight for weight, _ in LINES], [text for _, text in LINES]
    with path.open("w") as file:
        file.write("[2026-06-02 00:00:00] server_args=ServerArgs(tp_size=8)\n")
        file.write("[2026-06-02 00:00:00] The server is fired up and ready to roll!\n")
        number = 0
        while file.tell() < size:
            for text in chance.choices(texts, weights, k=1000):
                number += 1
                marker = chance.random() < MARKER_SHARE
                file.write(shaped(chance.choice(MARKERS) if marker else text, number) + "\n")


def shaped(text: str, number: int) -> str:
    second = number // 50
    time_text = f"2026-06-{2 + second // 86400:02} {second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
    return text.format(time=time_text, small=number % 8, number=number % 60_000)


def mtail_program(framework: Framework) -> str:
    """The framework's patterns as an mtail program that counts lines, and events by kind and rank (the first wins)."""
    rules = ["counter lines", "counter events by event, rank", "/$/ {\n  lines++\n}"]
    prefixes = {"own": OWN, "uvicorn": UVICORN, "any": "^"}
    for pattern in framework.patterns:
        text = re.sub(r"\(\?=(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\??", "", pattern.regex.pattern)
        text = re.sub(r"\(\?P<\w+>", "(?:", text).replace("/", r"\/")
        prefix = prefixes[pattern.prefix]
        rank = "$rank" if "rank" in prefix else '""'
        rules.append(f'/{prefix}{text}/ {{\n  events["{pattern.event}"][{rank}]++\n  stop\n}}')
    return "\n".join(rules) + "\n"


def run_mtail(program: Path, log: Path) -> tuple[float, Counter[str]]:
    """CPU seconds, and what it counted by event."""
    command = ["mtail", "--progs", str(program), "--logs", str(log), "--one_shot", "--one_shot_format", "prometheus"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    with child.stdout as output:
        page = output.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"mtail ended with {child.returncode}")
    counted: Counter[str] = Counter()
    for event, number in re.findall(r'^events\{event="(\w+)".*\} (\d+)$', page, re.M):
        counted[event] += int(number)
    return usage.ru_utime + usage.ru_stime, counted


def follow(framework: Framework, log: Path) -> Counter[str]:
    """The way of `serve`: what was counted by event, a second load under its own name again."""
    scanner, tail = LogScanner(framework), LogTail(str(log))
    for chunk in tail.read(1 << 40):
        scanner.feed(chunk)
    scanner.finish()
    tail.close()
    counted = scanner.events
    counted["load_end"] += counted.pop("draft_load_end", 0)
    return counted


def wrap(log: Path, docker: Path, cri: Path) -> None:
    """The same log as two container runtimes write it."""
    stamp = "2026-06-02T08:00:00.123456789Z"
    with log.open() as lines, docker.open("w") as as_json, cri.open("w") as as_cri:
        for line in lines:
            as_json.write(f'{{"log":{json.dumps(line)},"stream":"stderr","time":"{stamp}"}}\n')
            as_cri.write(f"{stamp} stderr F {line}")


def follow_container(framework: Framework, log: Path) -> Counter[str]:
    """The way of `serve` for a file of a container runtime."""
    scanner, tail, unwrapper = LogScanner(framework), LogTail(str(log)), StreamUnwrapper()
    for chunk in tail.read(1 << 40):
        for part in unwrapper.feed(chunk).values():
            scanner.feed(part.text)
    scanner.finish()
    tail.close()
    scanner.events["load_end"] += scanner.events.pop("draft_load_end", 0)
    return scanner.events


def measure_containers(folder: Path, framework: Framework, log: Path, rounds: int) -> None:
    """Bytes on disk, the runtime's own among them."""
    docker, cri = folder / "docker.log", folder / "cri.log"
    wrap(log, docker, cri)
    for form in (docker, cri):
        if follow_container(framework, form) != follow(framework, log):
            raise SystemExit(f"{form.name} does not say what the same log says without its form")
        rate = form.stat().st_size / cpu_seconds(partial(follow_container, framework, form), rounds)
        print(f"{form.stem:<8} {rate / 1e6:8.1f}   follow, {form.stat().st_size / 1e6:.0f} MB on disk")
        form.unlink()


def grep_patterns(framework: Framework) -> str:
    """The framework's patterns as extended regular expressions, one a line."""
    prefixes = {"own": OWN, "uvicorn": UVICORN, "any": "^"}
    found = set()
    for pattern in framework.patterns:
        text = re.sub(r"\(\?=(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\??", "", pattern.regex.pattern)
        text = re.sub(r"\(\?(?:P<\w+>|:)", "(", prefixes[pattern.prefix] + text)
        found.add(extended(text.replace("*?", "*").replace("+?", "+").replace("}?", "}")))
    return "\n".join(sorted(found)) + "\n"


def extended(text: str) -> str:
    """Classes and escapes in the way of POSIX."""
    parts, inside = list[str](), False
    for sign in re.findall(r"\\.|.", text):
        if inside and sign[0] == "\\":
            sign = {r"\d": "0-9", r"\w": "[:alnum:]_", r"\s": "[:space:]"}.get(sign, sign[1])
        elif sign == r"\d":
            sign = "[0-9]"
        inside = sign == "[" or (inside and sign != "]")
        parts.append(sign)
    return "".join(parts)


def grep_seconds(patterns: Path, log: Path, lines: int) -> float:
    environment = {**os.environ, "LC_ALL": "C"}
    command = ["grep", "-cE", "-f", str(patterns), str(log)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    with child.stdout as output:
        counted = int(output.read())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if counted != lines:
        raise SystemExit(f"grep and we count differently: {counted} against {lines}")
    return usage.ru_utime + usage.ru_stime


HEAVY: dict[str, tuple[str, ...]] = {
    "serving": tuple(text for _, text in LINES[:3]),
    "loading": MARKERS[:2],
    "trouble": (
        *MARKERS[2:],
        "node1:{number}:77 [{small}] misc/socket.cc:{number} NCCL WARN socketProgress: Connection closed by peer",
        "[rank{small}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {number}.00 GiB.",
    ),
    "bars": ("Loading safetensors checkpoint shards:  1% Completed | {small}/64 [00:0{small}<01:40, 1.85s/it]",),
}
"""Logs of which every line matches: of a server that serves, one that loads, one that repeats its errors; and bars that
move with each line, which are read each time (a bar is drawn ten times a second at most)."""


def measure_heavy(folder: Path, framework: Framework, megabytes: int, rounds: int) -> None:
    for name, texts in HEAVY.items():
        log, chance, number = folder / f"{name}.log", random.Random(SEED), 0
        with log.open("w") as file:
            if name not in ("loading", "bars"):
                file.write("[2026-06-02 00:00:00] The server is fired up and ready to roll!\n")
            while file.tell() < megabytes * 1_000_000:
                for text in chance.choices(texts, k=1000):
                    number += 1
                    file.write(shaped(text, number) + "\n")
        before = resident_megabytes()
        rate = log.stat().st_size / cpu_seconds(partial(follow, framework, log), rounds)
        grown = resident_megabytes() - before
        print(f"all hits {rate / 1e6:8.1f}   {name}: every line matches; memory {grown:+.1f} MB")
        log.unlink()


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def source_of(folder: Path, servers: int, logs: int) -> tuple[Logs, Scene]:
    """The source itself, with the logs of some servers in a folder."""
    places = [
        tuple(
            LogPlace(f"{number}-{log}.log", str(folder / f"{number}-{log}.log"), owner=os.geteuid())
            for log in range(logs)
        )
        for number in range(servers)
    ]
    scene = Scene(
        tuple(
            Server(f"sglang-{number}", "sglang", "server", ProcessId(number + 1, 1), 0.0, (), logs=found)
            for number, found in enumerate(places)
        ),
        ready=frozenset(f"sglang-{number}" for number in range(servers)),
    )
    return Logs(Host(Config(), load_frameworks())), scene


def measure_many(folder: Path, log: Path, turns: int = 30) -> None:
    """64 logs of 8 servers, 1 MB in all in each turn of one second.  CPU of the source's reads only."""
    source, scene = source_of(folder, 8, 8)
    paths = [Path(place.path) for server in scene.servers for place in server.logs]
    for path in paths:
        path.touch()
    lone, lone_scene = source_of(folder, 1, 1)
    spent, before = [], 0.0
    with log.open("rb") as whole:
        for turn in range(turns):
            for path in paths:
                with path.open("ab") as file:
                    file.write(whole.read(1_000_000 // len(paths)))
            if turn == 0:
                list(lone.read(lone_scene, Moment(0.0, time.time())))
                before = resident_megabytes()
            begun = time.process_time()
            list(source.read(scene, Moment(float(turn), time.time())))
            spent.append(time.process_time() - begun)
    grown = resident_megabytes() - before
    print(f"64 logs  {100 * statistics.median(spent):8.2f}   % of a core at 1 MB/s in all; memory {grown:+.1f} MB")
    source.close()
    lone.close()
    for path in paths:
        path.unlink()


def measure_first(folder: Path, log: Path) -> None:
    """A large log was there before us: when it is told of, and how long the log of another server had to wait."""
    source, scene = source_of(folder, 2, 1)
    large, small = (Path(server.logs[0].path) for server in scene.servers)
    large.symlink_to(log)
    small.write_bytes(b"one line\n")
    first = replace(scene.servers[0], logs=(replace(scene.servers[0].logs[0], owner=None),))
    scene = replace(scene, servers=(first, scene.servers[1]))
    begun, longest, told = time.monotonic(), 0.0, False
    while not told:
        turn = time.monotonic()
        seen = list(source.read(scene, Moment(turn, time.time())))
        longest = max(longest, time.monotonic() - turn)
        lines = [one for one in seen if isinstance(one, Reading) and one.signal.name == "log_lines_total"]
        told = {one.labels[0] for one in lines} == {server.name for server in scene.servers}
    print(
        f"first    {time.monotonic() - begun:8.1f}   s until a log of {log.stat().st_size / 1e6:.0f} MB is told of; "
        f"another log waited {longest:.2f} s at most"
    )
    source.close()


def enlarge(log: Path, size: int) -> None:
    """Make a log longer with what it says once it is ready."""
    with log.open("rb") as whole:
        whole.readline(), whole.readline()
        body = whole.read()
    with log.open("ab") as file:
        while file.tell() < size:
            file.write(body)


def cpu_seconds(work: Callable[[], object], rounds: int) -> float:
    def once() -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    return statistics.median(once() for _ in range(rounds))


def measure_against_others(folder: Path, framework: Framework, log: Path, slice_megabytes: int, rounds: int) -> None:
    part, nothing, program = (folder / name for name in ("part.log", "empty.log", "sglang.mtail"))
    with log.open("rb") as file:
        part.write_bytes(b"".join(file.readlines(slice_megabytes * 1_000_000)))
    nothing.touch()
    program.write_text(mtail_program(framework))

    follow_rate = log.stat().st_size / cpu_seconds(lambda: follow(framework, log), rounds)
    parse_rate = log.stat().st_size / cpu_seconds(lambda: parse_files([str(log)], "sglang", [framework]), rounds)
    start, _ = run_mtail(program, nothing)
    seconds, counted = run_mtail(program, part)
    mtail_rate = part.stat().st_size / max(1e-3, seconds - start)
    if counted != follow(framework, part):
        raise SystemExit(f"mtail and we count differently: {counted} against {follow(framework, part)}")

    print(f"follow   {follow_rate / 1e6:8.1f}   {follow_rate / mtail_rate:7.1f} x mtail")
    print(f"parse    {parse_rate / 1e6:8.1f}   {parse_rate / mtail_rate:7.1f} x mtail")
    print(f"mtail    {mtail_rate / 1e6:8.2f}   ({slice_megabytes} MB, its start of {start:.2f} s taken off)")
    patterns = folder / "patterns"
    patterns.write_text(grep_patterns(framework))
    lines = sum(follow(framework, log).values())
    grep_rate = log.stat().st_size / statistics.median(grep_seconds(patterns, log, lines) for _ in range(rounds))
    print(f"grep     {grep_rate / 1e6:8.1f}   parse is {parse_rate / grep_rate:.2f} x grep -cE")


def measure_large(folder: Path, framework: Framework, log: Path, large: int) -> None:
    if shutil.disk_usage(folder).free < 3 * large * 1_000_000:
        raise SystemExit(f"no room for a log of {large} MB in {folder}")
    enlarge(log, large * 1_000_000)
    large_rate = log.stat().st_size / cpu_seconds(lambda: follow(framework, log), 1)
    print(f"follow   {large_rate / 1e6:8.1f}   {large} MB")
    measure_first(folder, log)


PARTS = ("compare", "containers", "heavy", "many", "large")


def measure(folder: Path, options: argparse.Namespace) -> None:
    framework = next(one for one in load_frameworks() if one.name == "sglang")
    log, rounds = folder / "whole.log", options.rounds
    write_log(log, options.megabytes * 1_000_000)
    print(f"log of {options.megabytes} MB, {len(framework.patterns)} patterns, median of {rounds}; MB per CPU second")
    if "compare" in options.only:
        measure_against_others(folder, framework, log, options.slice, rounds)
    if "containers" in options.only:
        measure_containers(folder, framework, log, rounds)
    if "heavy" in options.only:
        measure_heavy(folder, framework, 50, rounds)
    if "many" in options.only:
        measure_many(folder, log)
    if "large" in options.only and options.large:
        measure_large(folder, framework, log, options.large)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--slice", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", type=int, default=1000, help="megabytes of a log that was there before; 0 = none")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    if "compare" in options.only and shutil.which("mtail") is None:
        raise SystemExit("mtail is not installed (apt-get install mtail)")
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options)


if __name__ == "__main__":
    main()
