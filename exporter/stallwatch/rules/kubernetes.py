"""The rules as an object of the Prometheus Operator, and the scrape that goes with them."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..config import DEFAULT_LISTEN_ADDRESS
from . import RuleFile, one_file
from .settings import SETTINGS

_PRINTED = "# Printed by: stallwatch rules --kubernetes\n"

_PROMETHEUS_RULE = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: stallwatch
  labels:
    app.kubernetes.io/name: stallwatch
spec:
"""

_POD_MONITOR = """\
# One exporter a node: the pods of a DaemonSet with the label app.kubernetes.io/name=stallwatch.
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: stallwatch
  labels:
    app.kubernetes.io/name: stallwatch
spec:
  selector:
    matchLabels:
      app.kubernetes.io/name: stallwatch
  podMetricsEndpoints:
    - targetPort: {port}
      interval: 15s
      scrapeTimeout: 10s
      # Metrics have labels of the servers' own pods and namespaces, which would be renamed otherwise.
      honorLabels: true
      relabelings:
        # Of the exporter's own pod: no series shall seem to be in its namespace.
        - action: labeldrop
          regex: namespace|pod|container|endpoint
        # The job that the rules select.
        - targetLabel: job
          replacement: {job}
        # The node, not the pod: a pod that is replaced must be no new story.
        - sourceLabels: [__meta_kubernetes_pod_node_name]
          targetLabel: instance
"""


def prometheus_rule(rule_files: Collection[RuleFile]) -> str:
    """The same groups, further in: what Prometheus loads as a file is the object's `spec`."""
    return _PRINTED + _PROMETHEUS_RULE + re.sub(r"^(?=.)", "  ", one_file(rule_files), flags=re.MULTILINE)


def pod_monitor(job: str = SETTINGS["job"].default) -> str:
    return _PRINTED + _POD_MONITOR.format(port=DEFAULT_LISTEN_ADDRESS.rpartition(":")[2], job=job)
