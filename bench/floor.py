"""The least that looking at threads can cost: a C loop of nothing but the reads, on descriptors that stay open.

floor = Floor(folder, pids)     # needs a C compiler
threads, seconds = floor.look()
floor.close()
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

_PROGRAM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static double spent(void) {
    struct timespec at;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

int main(void) {
    static int kept[1 << 18];
    int count = 0;
    char text[4096];
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    while (fgets(text, sizeof text, stdin) && text[0] == '/') {
        for (char *end = text; *end; end++)
            if (*end == '\n') *end = 0;
        if (count < 1 << 18 && (kept[count] = open(text, O_RDONLY)) >= 0) count++;
    }
    do {
        double began = spent();
        int read = 0;
        for (int i = 0; i < count; i++)
            if (pread(kept[i], text, 4, 0) > 0) read++;
        printf("%d %.9f\n", read, spent() - began);
        fflush(stdout);
    } while (fgets(text, sizeof text, stdin));
}
"""


class Floor:
    """The program, with the files of all threads of some processes open."""

    def __init__(self, folder: Path, pids: Iterable[int]) -> None:
        source, program = folder / "floor.c", folder / "floor"
        source.write_text(_PROGRAM)
        subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
        self._child = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for pid in pids:
            for thread in os.listdir(f"/proc/{pid}/task"):
                self._say(f"/proc/{pid}/task/{thread}/syscall")
        self.look()

    def look(self) -> tuple[int, float]:
        """One read of every thread: how many answered, and the CPU seconds it took."""
        self._say("look")
        assert self._child.stdout is not None
        threads, seconds = self._child.stdout.readline().split()
        return int(threads), float(seconds)

    def close(self) -> None:
        self._child.kill()
        self._child.wait()

    def _say(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{line}\n")
        self._child.stdin.flush()
