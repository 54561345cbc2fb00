"""docs/FLEET.md: Prometheus accepts each snippet, and the sums follow from what was measured."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from bench.fleet import SIZES, Measured, in_proportion

TEXT = (Path(__file__).parents[1] / "docs/FLEET.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    assert section, heading
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip().replace(",", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: text.split("\n", 1)[0])
def test_prometheus_accepts_each_snippet(snippet: str, tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    said = checked(program, snippet, tmp_path)
    if "field kubernetes_sd_configs not found" in said:  # Debian's is built without it; then all else is checked
        said = checked(program, re.sub(r"    kubernetes_sd_configs:\n(      .*\n)+", "", snippet), tmp_path)

    assert "FAILED" not in said, said
    assert "SUCCESS" in said, said


def checked(program: str, text: str, folder: Path) -> str:
    """What promtool says of a configuration."""
    file = folder / "prometheus.yml"
    file.write_text(text)
    done = subprocess.run([program, "check", "config", file], capture_output=True, text=True, check=False, timeout=600)
    return done.stdout + done.stderr


def test_there_are_snippets_for_each_way() -> None:
    words = ("file_sd_configs", "kubernetes_sd_configs", "remote_write", "hashmod", "/federate")
    assert [word for word in words if not any(word in snippet for snippet in SNIPPETS)] == []


def test_nodes_of_slurm_become_targets(tmp_path: Path) -> None:
    (command,) = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\nprintf 'gpu02\\ngpu01\\ngpu01\\n'\n")
    sinfo.chmod(0o755)

    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=path, check=True, timeout=600)

    assert yaml.safe_load((tmp_path / "gpu.yml").read_text()) == [{"targets": ["gpu01:10077", "gpu02:10077"]}]


def test_the_sums_follow_from_what_was_measured() -> None:
    nodes, series, memory, wal, remote, chunks, cpu, rules = (float(row[-1]) for row in rows("Measured"))
    measured = Measured(int(nodes), series, memory, wal, remote, chunks, cpu, {"all": rules})

    told = [[float(cell) for cell in row] for row in rows("In proportion")]

    assert told == [list(in_proportion(measured, size).values()) for size in SIZES]
