"""The rules as an object of the Prometheus Operator.  The scrape that goes with them is the chart's PodMonitor."""

from __future__ import annotations

import re
from collections.abc import Collection

from . import RuleFile, one_file

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


def prometheus_rule(rule_files: Collection[RuleFile]) -> str:
    """The same groups, further in: what Prometheus loads as a file is the object's `spec`."""
    return _PRINTED + _PROMETHEUS_RULE + re.sub(r"^(?=.)", "  ", one_file(rule_files), flags=re.MULTILINE)
