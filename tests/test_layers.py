"""Data flows one way: who may import whom, as one table, held against every import there is.

Imports are read from the source (ast), so lazy ones inside functions and those under TYPE_CHECKING count.
A new module needs a line here; a line that has to point upwards is a sign that something is misplaced.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "stallwatch"
SOURCE = Path(__file__).parents[1] / "exporter" / PACKAGE

ALLOWED: Mapping[str, str] = {
    # Module or package -> what of stallwatch it may import.  "." is stallwatch itself (its version); "web.*"
    # is a package with all its modules, "*" is everything.  A package's line holds for its modules, which may
    # then import each other; a module with a line of its own keeps to that.  From the bottom to the top.
    ".": "",
    "model": "",
    "printable": "",
    "descriptors": "",
    "strict_yaml": "",
    "clock": "",
    "startup": "",
    "bell": "",
    "allocator": "",
    "call_filter": "children",
    "children": "",
    "rights": "",
    "heartbeat": "",
    "signals": "model",
    "config": "model strict_yaml",
    "frameworks": "model strict_yaml",
    # The sources: what every one of them may know, and the siblings it stands on.
    "sources": "model signals config frameworks",
    "sources.blocking_child": "",
    "sources.untrusted_paths": "",
    "sources.blocking_reads": "children model",
    "sources.cgroups": "",
    "sources.passing": "",
    "sources.admission": "sources.cgroups",
    "sources.cgroup_state": "model sources.cgroups sources.procfs",
    "sources.connections": "model",
    "sources.discovery": "model frameworks",
    "sources.endpoints": "model signals config frameworks sources sources.connections sources.http_probe"
    " sources.logs.guard sources.logs.mounts",
    "sources.http_probe": ". sources.connections",
    "sources.gpus.kernel_log": "sources sources.procfs",
    "sources.logs.kind": "frameworks sources.logs.lines",
    "sources.logs.journal": "children sources",
    "sources.host_files": "sources.logs.mounts sources.untrusted_paths",
    "sources.runtime_folders": "sources.host_files",
    "sources.runtime_names": "sources.host_files sources.runtime_folders",
    "sources.cgroup_roots": "sources.cgroups",
    "sources.attribution": "model sources.cgroups sources.host_files sources.logs.guard sources.logs.mounts"
    " sources.passing sources.procfs sources.runtime_names",
    "sources.logs.containers": "sources.host_files sources.procfs sources.runtime_folders",
    "sources.logs.decode": "",
    "sources.logs.earlier": "sources.untrusted_paths",
    "sources.logs.lines": "frameworks config sources.logs.ranks sources.logs.repeats sources.logs.search"
    " sources.logs.shapes"
    " sources.logs.text sources.logs.times",
    "sources.logs.places": "model sources.logs.guard sources.untrusted_paths",
    "sources.logs.ranks": "frameworks",
    "sources.logs.repeats": "startup frameworks frameworks.json_lines sources.logs.search",
    "sources.logs.search": "frameworks",
    "sources.logs.shapes": "frameworks sources.logs.text",
    "sources.logs.streams": "model sources.attribution sources.cgroups sources.logs.journal sources.logs.containers"
    " sources.logs.guard sources.logs.mounts sources.procfs",
    "sources.logs.opened": "",
    "sources.logs.copies": "sources.logs.earlier sources.logs.opened sources.untrusted_paths",
    "sources.logs.tail": "sources.logs.copies sources.logs.earlier sources.logs.opened sources.untrusted_paths",
    "sources.logs.text": "frameworks",
    "sources.logs.times": "",
    "sources.logs.mounts": "sources.passing",
    "sources.logs.guard": "descriptors sources.logs.mounts sources.logs.tail",
    "sources.logs.counters": "model signals sources.logs.journal sources.logs.lines sources.logs.tail",
    "sources.logs.hits": "sources.logs.counters sources.logs.lines sources.logs.times",
    "sources.logs.followed": "model sources.logs.counters sources.logs.decode sources.logs.earlier sources.logs.journal"
    " sources.logs.lines sources.logs.tail",
    "sources.logs.of_server": "config model sources.logs.counters sources.logs.followed sources.logs.opened"
    " sources.logs.places",
    "sources.logs.past": "model sources sources.logs.counters sources.logs.earlier sources.logs.followed"
    " sources.logs.guard sources.logs.journal sources.logs.of_server sources.logs.opened sources.logs.tail",
    "sources.logs.collector": "model signals config frameworks sources sources.logs.*",
    "sources.members": "model descriptors signals config frameworks sources.admission sources.attribution"
    " sources.cgroups"
    " sources.cgroup_state"
    " sources.discovery sources.process_table sources.procfs sources.told",
    "sources.locks": "model signals sources sources.blocking_reads sources.discovery sources.locks_child"
    " sources.procfs",
    "sources.locks_child": "sources.blocking_child",
    "sources.gpus.collector": "model signals config sources sources.gpus.faults sources.gpus.owners"
    " sources.gpus.unowned"
    " sources.gpus.nvml_child sources.procfs sources.gpus.xid sources.gpus.xid_log sources.told",
    "sources.gpus.faults": "model sources.gpus.xid",
    "sources.gpus.owners": "model sources.gpus.nvml_child sources.procfs",
    "sources.gpus.unowned": "sources.gpus.owners sources.procfs",
    "sources.gpus.nvml": "",
    "sources.gpus.nvml_child": "children sources.gpus.nvml",
    "sources.node": "model signals sources sources.locks sources.procfs sources.shm",
    "sources.process_table": "model sources.blocking_reads sources.discovery sources.procfs",
    "sources.crew": "model descriptors sources.cgroups sources.discovery sources.members sources.process_table"
    " sources.procfs",
    "sources.processes": "model descriptors signals config frameworks sources sources.admission sources.attribution"
    " sources.blocking_reads sources.cgroup_roots sources.cgroups sources.cgroup_state sources.discovery"
    " sources.logs.guard sources.logs.mounts sources.logs.streams"
    " sources.crew sources.members"
    " sources.process_table sources.procfs sources.readings sources.unit_state sources.untrusted_paths",
    "sources.procfs": "model descriptors sources.cgroup_roots",
    "sources.socket_diag": "",
    "sources.readings": "model signals sources.logs.streams sources.members sources.told",
    "sources.table": "sources sources.*",
    "sources.sockets": "model signals config frameworks sources sources.connections sources.procfs sources.socket_diag",
    "sources.shm": "model sources sources.blocking_reads sources.procfs sources.shm_child",
    "sources.shm_child": "sources.blocking_child",
    "sources.threads": "model descriptors signals sources sources.procfs sources.told sources.wait_class",
    "sources.told": "model",
    "sources.unit_state": "children sources.cgroups",
    "sources.wait_class": "model",
    "sources.gpus.xid": "",
    "sources.gpus.xid_log": "sources sources.gpus.kernel_log sources.gpus.xid",
    # From readings to the Report.
    "tracks": "",
    "idle_power": "",
    "card": "model signals tracks idle_power",
    "cards": "model signals tracks idle_power card",
    "deadlines": "model startup",
    "server_timeline": "model signals startup tracks cards deadlines",
    "timeline": "model signals startup config tracks server_timeline cards deadlines",
    "verdict": "model config",
    "verdict.channels": "model signals server_timeline tracks",
    "verdict.evidence": "model config signals server_timeline tracks cards verdict.channels",
    "restarts": "model config",
    "learned": "model config",
    "outcomes": "model",
    "episodes": "model signals config server_timeline timeline deadlines learned outcomes restarts rights verdict.*",
    "poller": "model signals config sources",
    "kept": "model signals startup tracks server_timeline timeline deadlines restarts episodes",
    "memory": "model signals tracks idle_power cards server_timeline timeline learned episodes kept",
    "state_file": "descriptors kept",
    "daemon": "model signals bell clock config frameworks sources sources.* server_timeline timeline deadlines"
    " verdict.* episodes poller kept memory rights",
    # From the Report to whoever reads it.
    "derived": "model signals config",
    "exposition": ". model derived printable",
    "gpu_words": "model printable",
    "presentation": "model printable gpu_words",
    "web": ". model descriptors config strict_yaml printable exposition presentation",
    # On top of all.
    "log_format": "",
    "parse": "",
    "parse.input": "printable strict_yaml sources.logs.decode",
    "parse.silences": "frameworks frameworks.* parse.input sources.logs.lines sources.logs.text sources.logs.times",
    "parse.text": "sources.logs.kind",
    "parse.report": "model strict_yaml startup config frameworks parse.input parse.silences parse.text"
    " sources.logs.kind sources.logs.lines sources.logs.times",
    "assembly": "model strict_yaml config frameworks sources sources.logs.collector sources.processes"
    " sources.table daemon poller"
    " memory rights",
    "catalogue": "model signals sources.table daemon derived",
    "stacks": "children printable rights sources.procfs",
    "recordings": "",
    "recordings.format": "model config strict_yaml",
    "recordings.told": "model signals recordings.format tracks",
    "recordings.replay": "model strict_yaml signals clock config frameworks tracks timeline deadlines episodes daemon"
    " presentation printable catalogue recordings.format recordings.rebuild recordings.scrapes recordings.told",
    "recordings.scrapes": "model strict_yaml derived",
    "recordings.rebuild": "model signals config startup derived recordings.format recordings.scrapes",
    "recordings.record": "model strict_yaml config frameworks assembly recordings.format",
    "check": ". config frameworks assembly strict_yaml daemon presentation printable stacks",
    "serve": "allocator model strict_yaml frameworks assembly daemon exposition presentation memory"
    " state_file heartbeat web.*",
    "drill": "model strict_yaml config",
    "rules": "strict_yaml config",
    "cli": ". call_filter strict_yaml config log_format frameworks assembly serve check catalogue"
    " parse.report recordings.record recordings.replay drill.command drill.conditions drill.memory_cgroup"
    " drill.nvml_standin drill.table rules rules.command",
    "__main__": "cli",
}

OUTSIDE: Mapping[str, str] = {
    # Names from other distributions -> the only modules that may import them.
    "ahocorasick_rs": "sources.logs.search",
    "bcrypt": "web.passwords",
    "h11": "web.*",
    "prometheus_client": "sources.endpoints",
    "pynvml": "sources.gpus.nvml",
    "watchdog": "sources.logs.tail",
    "yaml": "strict_yaml",
}

PURE = (
    "clock recordings.format recordings.told model signals startup tracks card cards server_timeline timeline verdict.*"
)
"""Modules without clock and I/O: the same code judges live, in a replay and in tests."""

IMPURE = (
    *("asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "select"),
    *("shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "urllib"),
)


class Import(NamedTuple):
    """One imported name, absolute and dotted (`stallwatch.model.Signal`, `os.path`), and where it stands."""

    name: str
    line: int


def imports_in(text: str, package: str) -> Iterator[Import]:
    """Every import of a source text; `package` is the dotted package it lies in.

    A name that is only known when the program runs comes as "?".
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            known = isinstance(first, ast.Constant) and not str(first.value).startswith(".")
            yield Import(str(first.value) if known and isinstance(first, ast.Constant) else "?", node.lineno)


def _base(node: ast.ImportFrom, package: str) -> str:
    """The absolute package or module an `from … import` names."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def modules_below(root: Path) -> dict[str, Path]:
    """Dotted name inside the package -> file; the package itself is "."."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "."] = path
    return modules


def covers(patterns: str, module: str) -> bool:
    """Whether a line of a table names the module: by itself, by `package.*`, or by `*`."""
    return any(
        pattern in ("*", module) or (pattern.endswith(".*") and (module + ".").startswith(pattern.removesuffix("*")))
        for pattern in patterns.split()
    )


def line_of(module: str, table: Mapping[str, str]) -> str | None:
    """The key of the table that speaks for a module: its own, else its package's."""
    while module not in table:
        module, dot, _ = module.rpartition(".")
        if not dot:
            return None
    return module


class Tables(NamedTuple):
    """What may be imported where; see ALLOWED, OUTSIDE and PURE."""

    allowed: Mapping[str, str]
    outside: Mapping[str, str]
    pure: str

    def violations(self, root: Path) -> list[str]:
        """A sentence for each import below `root` that is forbidden, and for each module without a line."""
        modules = modules_below(root)
        unknown = [f"{module}: has no line in ALLOWED" for module in modules if not line_of(module, self.allowed)]
        forbidden = [
            f"{module}:{line}: {problem}"
            for module, path in modules.items()
            for name, line in imports_in(path.read_text(encoding="utf-8"), _package(root, path))
            if (problem := self._problem(module, name, root.name, modules))
        ]
        return unknown + list(dict.fromkeys(forbidden))

    def _problem(self, module: str, name: str, root: str, modules: Mapping[str, Path]) -> str | None:
        """What is wrong with `module` importing `name`; None when it may."""
        top = name.partition(".")[0]
        if top == root:
            target, key = _module_of(name, modules), line_of(module, self.allowed) or module
            free = f"{key} {key}.* {self.allowed.get(key, '')}"
            return None if covers(free, target) else f"must not import {target}"
        if top in self.outside:
            only = self.outside[top]
            return None if covers(only, module) else f"must not import {top}; only {only} may"
        if top not in sys.stdlib_module_names:
            return f"imports {top}, which has no line in OUTSIDE"
        return f"is pure and must not import {top}" if covers(self.pure, module) and top in IMPURE else None


def _package(root: Path, path: Path) -> str:
    """The dotted package a file lies in: where its relative imports start."""
    return ".".join((root.name, *path.parent.relative_to(root).parts))


def _module_of(name: str, modules: Mapping[str, Path]) -> str:
    """The module a dotted name leads to: `stallwatch.model.Signal` -> model, `stallwatch.main` -> "."."""
    inside = name.partition(".")[2]
    while inside and inside not in modules:
        inside = inside.rpartition(".")[0]
    return inside or "."


def test_every_import_is_in_the_table() -> None:
    found = Tables(ALLOWED, OUTSIDE, PURE).violations(SOURCE)

    assert found == []


def test_the_table_points_one_way() -> None:
    """No group of modules (a package counts as one) reaches itself by way of others."""
    units = {key: key.partition(".")[0] or "." for key in ALLOWED}
    leads_to: dict[str, set[str]] = {unit: set() for unit in units.values()}
    for key, unit in units.items():
        leads_to[unit] |= {other for name, other in units.items() if covers(ALLOWED[key], name)} - {unit}

    placed: set[str] = set()
    while ready := {unit for unit, below in leads_to.items() if unit not in placed and below <= placed}:
        placed |= ready

    assert set() == set(leads_to) - placed


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """A small package in `folder`; returns its root."""
    root = folder / PACKAGE
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


SMALL = {
    "__init__.py": "__version__ = '1'\n",
    "model.py": "import math\n",
    "sources/__init__.py": "from ..model import Signal\n",
    "sources/threads.py": "from . import Host\nfrom .. import model\nimport os\n",
    "sources/gpu.py": "from stallwatch.model import Signal\n",
    "verdict/__init__.py": "from .checks import CHECKS\nfrom .. import __version__\n",
    "verdict/checks.py": "from ..model import Signal\n",
    "web/__init__.py": "",
    "web/page.py": "from . import server\n",
    "web/server.py": "import h11\nfrom ..verdict import checks\n",
}
SMALL_ALLOWED = {
    ".": "",
    "model": "",
    "sources": "model",
    "sources.threads": "model sources",
    "sources.gpu": "model",
    "verdict": ". model",
    "web": "verdict.*",
}


def small_violations(folder: Path, changed: Mapping[str, str]) -> list[str]:
    root = write(folder, {**SMALL, **changed})
    return Tables(SMALL_ALLOWED, {"h11": "web.*", "yaml": "model"}, "verdict.*").violations(root)


def test_a_tree_that_keeps_to_its_table_has_no_violation(tmp_path: Path) -> None:
    assert small_violations(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("model.py", "from .verdict import judge\n", "model:1: must not import verdict"),
        ("model.py", "from . import verdict\n", "model:1: must not import verdict"),
        ("model.py", "from .verdict import judge, CHECKS\n", "model:1: must not import verdict"),
        ("model.py", "import stallwatch.verdict.checks\n", "model:1: must not import verdict.checks"),
        ("model.py", "def late():\n    from .web import page\n", "model:2: must not import web.page"),
        (
            "model.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .web.page import Page\n",
            "model:3: must not import web.page",
        ),
        (
            "model.py",
            "import importlib\nimportlib.import_module('stallwatch.web.page')\n",
            "model:2: must not import web.page",
        ),
        ("model.py", "__import__(name)\n", "model:1: imports ?, which has no line in OUTSIDE"),
        ("sources/threads.py", "from .gpu import Gpu\n", "sources.threads:1: must not import sources.gpu"),
        ("sources/threads.py", "from ..verdict import judge\n", "sources.threads:1: must not import verdict"),
        ("verdict/checks.py", "import time\n", "verdict.checks:1: is pure and must not import time"),
        (
            "verdict/checks.py",
            "import h11.config\n",
            "verdict.checks:1: must not import h11; only web.* may",
        ),
        ("web/page.py", "import numpy\n", "web.page:1: imports numpy, which has no line in OUTSIDE"),
        ("extra.py", "", "extra: has no line in ALLOWED"),
    ],
)
def test_a_forbidden_import_is_named_with_its_line(tmp_path: Path, file: str, text: str, expected: str) -> None:
    assert [expected] == small_violations(tmp_path, {file: text})
