"""Puts into one folder what the image holds: this Python, the environment it runs in, and what they are linked with.

`collect.py FOLDER`, with the Python of the environment /opt/stallwatch, on a Debian that is there for nothing else.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from py_compile import PycInvalidationMode

ENVIRONMENT = Path("/opt/stallwatch")
USER = 65532
HERE = Path(__file__).parent

UNUSED: tuple[str, ...] = (
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "pydoc_data",
    "distutils",
)
UNUSED += (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "config-*",
    "turtle.py",
    "*.a",
    "venv",
    "curses",
    "dbm",
    "xmlrpc",
)
LOADED_LATER = ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2", "libgcc_s.so.1")
"""What NVIDIA's library is linked with, and what glibc loads by itself."""

NEVER_STALE = PycInvalidationMode.UNCHECKED_HASH
"""Nothing in an image changes, so no source file is looked at."""

CAPABILITIES = 1 << 2 | 1 << 19
"""CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE; CAP_SYSLOG is above 32."""
CAPABILITIES_HIGH = 1 << (34 - 32)
REVISION = 0x02000000
"""Of the attribute security.capability (linux/capability.h), without the bit that makes them effective: a program with
that bit cannot be started at all where they are not granted."""

PASSWD = f"root:x:0:0:root:/:/bin/sh\nstallwatch:x:{USER}:{USER}:stallwatch:/:/bin/sh\n"
GROUP = f"root:x:0:\nstallwatch:x:{USER}:\n"


def main(target: Path) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            put_link(target, Path("/", name))
    programs = [put(target, Path("/bin/sh"))]
    python = put(target, Path(os.readlink(ENVIRONMENT / "bin/python3")))
    put_python(target)
    put_environment(target)
    programs.append(put_look(target))
    put_libraries(target, [*programs, python, *target.rglob("*.so"), *target.rglob("*.so.*")])
    put_texts(target)
    subprocess.run(["/sbin/ldconfig", "-r", str(target)], check=True)
    for path in target.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o6022)


def put(target: Path, source: Path) -> Path:
    """A file at its place, and every link that leads there at its own."""
    while source.is_symlink():
        link = target / source.parent.resolve().relative_to("/") / source.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(os.readlink(source))
        source = source.parent / os.readlink(source)
    place = target / source.resolve().relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, place)
    return place


def put_link(target: Path, link: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    (target / link.relative_to("/")).symlink_to(os.readlink(link))
    (target / link.resolve().relative_to("/")).mkdir(parents=True, exist_ok=True)


def put_python(target: Path) -> None:
    """Its own modules, compiled: nothing has to be compiled at the start, and nothing can be written there."""
    ignore = shutil.ignore_patterns(*UNUSED)
    for folder in {Path(sysconfig.get_path(kind, vars=base_paths())) for kind in ("stdlib", "platstdlib")}:
        place = target / folder.relative_to("/")
        shutil.copytree(folder, place, ignore=ignore, symlinks=True, dirs_exist_ok=True)
        compileall.compile_dir(place, quiet=2, stripdir=str(target), prependdir="/", invalidation_mode=NEVER_STALE)


def base_paths() -> dict[str, str]:
    """The variables of the Python that the environment was made with."""
    base, exec_base = sys.base_prefix, sys.base_exec_prefix
    return {"base": base, "installed_base": base, "platbase": exec_base, "installed_platbase": exec_base}


def put_environment(target: Path) -> None:
    place = target / ENVIRONMENT.relative_to("/")
    shutil.copytree(ENVIRONMENT, place, symlinks=True, ignore=shutil.ignore_patterns("*.pyc", "__pycache__", "pip*"))
    for link in place.joinpath("bin").iterdir():
        if not link.name.startswith(("python", "stallwatch")):
            link.unlink()
    shutil.copy(HERE / "enter", place / "bin/enter")
    shutil.copy(HERE / "healthy.py", place / "lib/healthy.py")
    compileall.compile_dir(place / "lib", quiet=2, stripdir=str(target), prependdir="/", invalidation_mode=NEVER_STALE)


def put_look(target: Path) -> Path:
    """setpriv, with the capabilities that it may pass on where the runtime grants them."""
    place = target / ENVIRONMENT.relative_to("/") / "bin/look"
    shutil.copy(shutil.which("setpriv") or "/usr/bin/setpriv", place)
    place.chmod(0o755)
    attribute = struct.pack("<5I", REVISION, CAPABILITIES, 0, CAPABILITIES_HIGH, 0)
    os.setxattr(place, "security.capability", attribute)
    return place


def put_libraries(target: Path, programs: Iterable[Path]) -> None:
    """The loader, and what everything is linked with."""
    found: set[Path] = set()
    for program in programs:
        done = subprocess.run(["/usr/bin/ldd", str(program)], capture_output=True, text=True, check=False)
        found.update(Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", done.stdout, re.MULTILINE))
    (libc,) = {path.resolve().parent for path in found if path.name == "libc.so.6"}
    found.update(libc / name for name in LOADED_LATER if (libc / name).exists())
    for library in sorted(path for path in found if target not in path.parents):
        put(target, library)


def put_texts(target: Path) -> None:
    """Users, certificates, licences; and folders that have to be there."""
    for name in ("etc/os-release", "etc/nsswitch.conf", "etc/ssl/certs/ca-certificates.crt", "etc/ssl/openssl.cnf"):
        if Path("/", name).exists():
            put(target, Path("/", name))
    (target / "etc/passwd").write_text(PASSWD)
    (target / "etc/group").write_text(GROUP)
    (target / "etc/ld.so.conf").write_text("/usr/local/lib\n/usr/local/nvidia/lib64\n")
    for text in Path("/usr/share/doc").glob("*/copyright"):
        put(target, text)
    for name, mode in (
        ("tmp", 0o1777),
        ("host", 0o755),
        ("var/lib/stallwatch", 0o700),
        ("proc", 0o555),
        ("sys", 0o555),
        ("dev", 0o755),
    ):
        (target / name).mkdir(parents=True, exist_ok=True)
        (target / name).chmod(mode)
    os.chown(target / "var/lib/stallwatch", USER, USER)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
