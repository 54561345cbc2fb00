"""GPUs without a GPU: builds a stand-in libnvidia-ml.so.1 (nvml.c) and steers it through its state file.

    library = build(folder)                         # needs a C compiler
    cards = StandIn(folder, library, count=8)
    subprocess.Popen(..., env={**os.environ, **cards.environment()})
    cards.set("0.power_mw", 300_000)                # seen at the next call, in every process
    cards.hang("nvmlDeviceGetMemoryInfo_v2", card=3)

The keys are listed in nvml.c, beside the calls that answer with them.  A binding looks functions up by their
versioned names, and so do `fail`, `delay` and `hang`: nvmlInitWithFlags, nvmlDeviceGetCount_v2,
nvmlDeviceGetHandleByIndex_v2, nvmlDeviceGetPciInfo_v3, nvmlDeviceGetComputeRunningProcesses_v3,
nvmlEventSetWait_v2.  A function that an older driver lacks is `fail(call, 13)`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}")
_BUILD_SECONDS = 60.0

GPU_IS_LOST = 15
KEPT_XIDS = 16

_COUNTERS: Mapping[str, tuple[str, int]] = {
    # A counter that goes on by itself -> the rate it goes at, and that rate's default; as in nvml.c.
    "energy_mj": ("power_mw", 70_000),
    "pcie_tx_bytes": ("pcie_tx_per_second", 0),
    "pcie_rx_bytes": ("pcie_rx_per_second", 0),
    "nvlink_tx_bytes": ("nvlink_tx_per_second", 0),
    "nvlink_rx_bytes": ("nvlink_rx_per_second", 0),
}


class NoCompilerError(RuntimeError):
    """There is nothing on PATH that compiles C."""


class Call(NamedTuple):
    """One call that a process made of the library, noted before it could block or fail."""

    pid: int
    name: str
    card: int | None


def build(folder: Path, *flags: str) -> Path:
    """Compile the library into `folder`.

    Raises NoCompilerError, and RuntimeError with what the compiler said.  The file appears whole or not at all.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoCompilerError(f"no C compiler: none of {', '.join(_COMPILERS)} is on PATH")
    library, unfinished = folder / LIBRARY, folder / f".{LIBRARY}.{os.getpid()}"
    command = [compiler, *_FLAGS, *flags, "-o", str(unfinished), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{SOURCE.name} does not compile: {done.stderr}")
    unfinished.replace(library)
    return library


class StandIn:
    """The cards of one pretended node, as a state file that is replaced whole at every change.

    A file that is already there is taken over, so that a second process can go on with it; two writers at a time
    lose each other's changes.
    """

    def __init__(self, folder: Path, library: Path, count: int | None = None) -> None:
        self.path = folder / "nvml.state"
        self._library = library
        self._calls = folder / "nvml.calls"
        self._lines: dict[str, str] = _read(self.path)
        self.update({} if count is None else {"count": count})

    def environment(self) -> dict[str, str]:
        """What a process needs, from its start, to meet these cards."""
        return {"LD_LIBRARY_PATH": str(self._library.parent), "NVML_STANDIN_STATE": str(self.path)}

    # Values.

    def set(self, key: str, value: object) -> None:
        """For instance `0.mem_used`, `*.util_gpu`, `3:1.instance`, `driver`; the value "none" is NOT_SUPPORTED."""
        self.update({key: value})

    def update(self, values: Mapping[str, object | None]) -> None:
        """Several at once, so that no call sees half of them; None takes a key away.

        The counters of a card whose rate changes go on from where they are.
        """
        changes = {key.removeprefix("*."): value for key, value in values.items()}
        now = time.monotonic()
        before = self._running(now)
        for key, value in changes.items():
            _check(key, value)
            self._lines.pop(key, None)
            if value is not None:
                self._lines[key] = str(value)
        for (card, counter), (rate, reached) in before.items():
            if changes.keys().isdisjoint((counter, f"{card}.{counter}")) and self._rate(card, counter) != rate:
                self._lines[f"{card}.{counter}"] = f"{reached}@{now!r}"
        self._write()

    def unset(self, key: str) -> None:
        self.update({key: None})

    def processes(self, card: int | str, rows: Iterable[tuple[int, int | None]]) -> None:
        """What computes on a card, or on the instance "3:1": PIDs and bytes.  `mem_used` follows unless it is set."""
        listed = ",".join(f"{pid}:{'none' if size is None else size}" for pid, size in rows)
        self.update({f"{card}.processes": listed or None})

    def xid(self, card: int, code: int) -> None:
        """An Xid happens: whoever has registered for events before gets it."""
        told = [entry for entry in self._lines.get(f"{card}.xids", "").split(",") if entry]
        order = int(told[-1].partition(":")[0]) + 1 if told else 1
        self.set(f"{card}.xids", ",".join([*told, f"{order}:{code}"][-KEPT_XIDS:]))

    # What goes wrong.

    def fail(self, call: str, code: int, card: int | str | None = None) -> None:
        """`call` answers with that NVML code, "*" is every call; of one card (or instance "3:1") or of all."""
        self.set(_fault_key(call, card), f"ret:{code}")

    def delay(self, call: str, milliseconds: int, card: int | str | None = None) -> None:
        self.set(_fault_key(call, card), f"delay:{milliseconds}")

    def hang(self, call: str, card: int | str | None = None, deaf: bool = False) -> None:
        """Until `clear`, or until the file is gone.  `deaf` holds signals back meanwhile, except SIGKILL."""
        self.set(_fault_key(call, card), "hang:deaf" if deaf else "hang")

    def clear(self, call: str | None = None, card: int | str | None = None) -> None:
        """End what `fail`, `delay` or `hang` began for just this call and card; without a call, all of it."""
        faults = [key for key in self._lines if _is_fault(key)] if call is None else [_fault_key(call, card)]
        self.update(dict.fromkeys(faults))

    def lose(self, card: int, code: int = GPU_IS_LOST, handle_code: int | None = None) -> None:
        """The card answers nothing but `code`; asked for its handle, `handle_code` if that is given (often 999)."""
        self.update({f"{card}.lost": code, f"{card}.lost_handle": handle_code})

    def restore(self, card: int, reset: bool = False) -> None:
        """The card answers again; after a `reset` only to processes that begin later."""
        resets = int(self._lines.get(f"{card}.resets", "0"))
        again = {f"{card}.lost": None, f"{card}.lost_handle": None}
        self.update({**again, f"{card}.resets": resets + 1} if reset else again)

    def reload_driver(self, version: str | None = None, code: int | None = None) -> None:
        """Processes that have the library loaded get `code` (else 18) from every call from now on."""
        driver = self._lines.get("driver") if version is None else version
        self.update({"epoch": int(self._lines.get("epoch", "0")) + 1, "reload_ret": code, "driver": driver})

    # What was asked of it.

    def count_calls(self) -> None:
        """From now on; see `calls`."""
        self._calls.unlink(missing_ok=True)
        self.set("count_calls", self._calls)

    def calls(self) -> list[Call]:
        """In their order, by all processes since `count_calls`."""
        rows = self._calls.read_text().split("\n")[:-1] if self._calls.exists() else []
        return [Call(int(pid), name, None if int(card) < 0 else int(card)) for pid, name, card in map(str.split, rows)]

    def _write(self) -> None:
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text("".join(f"{key} {value}\n" for key, value in self._lines.items()))
        # The kernel's own stamps are some milliseconds apart, and a new file may get the number of one just removed.
        now = time.time_ns()
        os.utime(unfinished, ns=(now, now))
        unfinished.replace(self.path)

    def _running(self, now: float) -> dict[tuple[int, str], tuple[int, int]]:
        """Rate and what is reached, of each counter of each card that goes on by itself."""
        running: dict[tuple[int, str], tuple[int, int]] = {}
        for card in range(int(self._lines.get("count", "1"))):
            for counter in _COUNTERS:
                base, at, since = self._of(card, counter, "auto").replace("auto", "0@0").partition("@")
                if at:
                    rate = self._rate(card, counter)
                    running[card, counter] = rate, int(base) + int(rate * (now - float(since)))
        return running

    def _rate(self, card: int, counter: str) -> int:
        key, default = _COUNTERS[counter]
        text = self._of(card, key, str(default))
        return default if text == "none" else int(text)

    def _of(self, card: int, key: str, default: str) -> str:
        return self._lines.get(f"{card}.{key}", self._lines.get(key, default))


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(" ") for line in lines if not line.startswith("#"))
    return {key.removeprefix("*."): value.strip() for key, _, value in pairs if value}


def _check(key: str, value: object) -> None:
    if not key or " " in key or "\n" in f"{key}{value}" or value == "":
        raise ValueError(f"one word and a value on one line are wanted, not {key!r}, {value!r}")


def _fault_key(call: str, card: int | str | None) -> str:
    return call if card is None else f"{card}.{call}"


def _is_fault(key: str) -> bool:
    call = key.rpartition(".")[2]
    return call == "*" or call.startswith("nvml")
