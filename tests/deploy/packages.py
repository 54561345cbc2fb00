"""Builds the distributions of this tree and installs them where nothing of the tree can be seen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "exporter" / "stallwatch"
BUILT_FROM = ("exporter", "LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "pyproject.toml")
MOST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment and a folder outside the tree to run its programs in."""

    folder: Path
    workplace: Path

    def run(self, program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return command([str(self.folder / "bin" / program), *arguments], self.workplace, check)


def documented(words: str) -> list[str]:
    """The commands of the block of docs/INSTALL.md in which `words` stand, one each."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/INSTALL.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if words in block)
    return str(block).replace("\\\n", " ").splitlines()


def clean_environ() -> dict[str, str]:
    """Ours without what would bring the tree's modules in."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def command(words: Sequence[str], folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run to the end; AssertionError with what it said when it fails."""
    done = subprocess.run(
        words, cwd=folder, env=clean_environ(), capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )
    assert not check or done.returncode == 0, f"{words}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done


def new_environment(folder: Path) -> Environment:
    workplace = folder.with_name(folder.name + "-workplace")
    workplace.mkdir()
    command([sys.executable, "-m", "venv", str(folder)], workplace)
    return Environment(folder, workplace)


def copy_of_the_tree(folder: Path) -> Path:
    """What a build looks at and nothing else, so that no earlier build leaves anything in it."""
    for name in BUILT_FROM:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder
