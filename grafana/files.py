"""The files that are made of the dashboards, as they must stand in the repository byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .dashboards import DASHBOARDS
from .panels import Dashboard

ROOT = Path(__file__).resolve().parents[1]
JSON_FOLDER = ROOT / "grafana" / "dashboards"
CONFIG_MAPS = ROOT / "deploy" / "kubernetes" / "dashboards.yaml"

_HEAD = """\
# The dashboards as ConfigMaps, for a Grafana whose sidecar looks for the label grafana_dashboard (as that of the
# charts grafana and kube-prometheus-stack does).  Made by `python -m grafana`: do not edit.
"""
_CONFIG_MAP = """\
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: stallwatch
    grafana_dashboard: "1"
  annotations:
    grafana_folder: Stallwatch
data:
  {name}.json: |
{text}"""


def dashboard_text(dashboard: Dashboard) -> str:
    return json.dumps(dashboard.json(), indent=1, ensure_ascii=False) + "\n"


def config_maps() -> str:
    """One document per dashboard; the JSON is a literal block, so the same text byte for byte."""
    return _HEAD + "".join(
        _CONFIG_MAP.format(name=dashboard.uid, text=_indented(dashboard_text(dashboard))) for dashboard in DASHBOARDS
    )


def _indented(text: str) -> str:
    return "".join(f"    {line}" for line in text.splitlines(keepends=True))


FILES: Mapping[Path, str] = {
    **{JSON_FOLDER / f"{dashboard.uid}.json": dashboard_text(dashboard) for dashboard in DASHBOARDS},
    CONFIG_MAPS: config_maps(),
}
"""Path -> what must stand there."""
