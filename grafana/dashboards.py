"""All dashboards."""

from __future__ import annotations

from .exporter import EXPORTER_DASHBOARD
from .fleet import FLEET_DASHBOARD
from .node import NODE_DASHBOARD
from .server import SERVER_DASHBOARD

DASHBOARDS = (FLEET_DASHBOARD, SERVER_DASHBOARD, NODE_DASHBOARD, EXPORTER_DASHBOARD)
