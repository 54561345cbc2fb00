"""Every module that opens a path by itself stands here, with why nobody we watch can make it open something else.

What may be changed by somebody we watch is opened by sources/untrusted_paths.py (tests/test_security_files.py).
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "exporter" / "stallwatch"

KERNEL = "the kernel's own files in /proc and /sys/fs/cgroup: no user can put anything there"
OURS = "a file of whoever starts us: configuration, secrets, state, recordings, what we print"
SHIPPED = "files of the package"

OPENS = {
    "assembly": KERNEL,
    "check": OURS,
    "cli": "/dev/null",
    "exposition": KERNEL,
    "frameworks": SHIPPED,
    "parse.input": "logs a person names: a regular file only, without waiting",
    "recordings.record": OURS,
    "recordings.replay": OURS,
    "rights": KERNEL,
    "rules": SHIPPED,
    "sources.attribution": KERNEL,
    "sources.blocking_child": KERNEL,
    "sources.cgroup_roots": KERNEL,
    "sources.cgroup_state": KERNEL,
    "sources.endpoints": "the token of whoever configured it: a regular file only, without waiting",
    "sources.gpus.kernel_log": "/dev/kmsg, by the number of the device; no link, without waiting",
    "sources.gpus.nvml": KERNEL,
    "sources.gpus.unowned": KERNEL,
    "sources.locks": KERNEL,
    "sources.locks_child": "/proc, and in the server's root by descriptors of folders: a link as the server has it",
    "sources.logs.collector": "no path: a method of ours is called so",
    "sources.logs.copies": "only what untrusted_paths has opened",
    "sources.logs.earlier": "only what untrusted_paths has opened",
    "sources.logs.mounts": KERNEL,
    "sources.logs.streams": KERNEL,
    "sources.logs.tail": "a stream: the kernel's link to what a process has open, which is a regular file",
    "sources.node": KERNEL,
    "sources.procfs": KERNEL,
    "sources.shm_child": "/proc, and the names in /dev/shm: nothing in there is opened",
    "sources.sockets": KERNEL,
    "sources.threads": KERNEL,
    "sources.untrusted_paths": "by descriptors of folders; what it is for",
    "stacks": KERNEL,
    "state_file": OURS,
    "strict_yaml": OURS,
}

_CALLS = {"open", "os.open", "os.scandir", "os.listdir", "os.walk", "os.fwalk", "glob.iglob", "glob.glob", "io.open"}
_METHODS = {"open", "read_text", "read_bytes", "iterdir", "glob", "rglob", "walk"}
_OF_NO_PATH = {"tarfile", "webbrowser", "resources"}


def opens(source: str) -> bool:
    """Whether a module opens files or looks into folders."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in _CALLS or (isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS):
            return called.partition(".")[0] not in _OF_NO_PATH
    return False


def modules() -> dict[str, str]:
    """Name -> text, without the drills, which are stand-ins for a test."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[0] != "drill":
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def test_every_module_that_opens_a_path_has_its_reason() -> None:
    found = {name for name, text in modules().items() if opens(text)}

    assert found - OPENS.keys() == set(), "say why it is safe, or use sources/untrusted_paths.py"
    assert OPENS.keys() - found == set()


def test_an_open_is_found() -> None:
    assert opens("def f(path):\n    return path.read_bytes()\n")
    assert opens("import os\nos.open('x', 0)\n")
    assert not opens("import os\nos.stat('x')\nchannel.send('open')\n")


# --- and nobody looks at a working directory, which may lie on a mount that is dead ----------------------------


_LOOKS = {"getcwd", "getcwdb", "cwd", "chdir", "fchdir"}


def looks_at_working_directories(source: str) -> bool:
    """Whether a module asks for its own one, goes to another, or names a process's link to its."""
    words = set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name):
                words |= {name} & _LOOKS
            case ast.Constant(value=str(text)):
                words |= {"cwd"} & set(text.split("/"))
    return bool(words)


def test_no_module_looks_at_a_working_directory() -> None:
    assert {name for name, text in modules().items() if looks_at_working_directories(text)} == set()


def test_a_look_at_a_working_directory_is_found() -> None:
    assert looks_at_working_directories("os.getcwd()\n")
    assert looks_at_working_directories("Path.cwd()\n")
    assert looks_at_working_directories("from os import chdir\n")
    assert looks_at_working_directories("proc.path(pid, 'cwd')\n")
    assert looks_at_working_directories("os.stat(f'/proc/{pid}/cwd/x')\n")
    assert not looks_at_working_directories("subprocess.run(['true'], cwd='/')\n")
