"""What the queries of several dashboards share.

Rules of these queries, each from a panel that would look fine and be wrong:
* Every `by` and `on` names job and instance: two nodes may have servers of the same name.
* A counter that is born at 1 (a new server's starts) shows no increase; what is born in the range is counted apart.
* What is absent stays absent: no `or vector(0)` behind a figure that may be unreadable.
* Histograms of starts are read as they stand: in any short window there are too few starts for a rate.
"""

from __future__ import annotations

from .panels import STATES, Variable, numbered, steps

SERVER = "job, instance, server"
CARD = "job, instance, gpu"
STATE = numbered("stallwatch_server_state", "state", STATES, SERVER)
NOW = "stallwatch_report_timestamp_seconds"
"""Every exporter has it, with or without servers; ages are as of it, so no clock of another machine counts."""

RED = steps((1, "red"))
ORANGE = steps((1, "orange"))
PURPLE = steps((1, "purple"))

LINK_SOURCE = "var-datasource=${datasource}"
LINK_NODE = f"{LINK_SOURCE}&var-job=${{job}}&var-instance=${{instance}}"
LINK_ROW = f"{LINK_SOURCE}&var-job=${{__data.fields.Job}}&var-instance=${{__data.fields.Node}}"

JOBS = Variable("job", "job", NOW, several=True)
ONE_JOB = Variable("job", "job", NOW, several=False)
NODES = Variable("instance", "node", f'{NOW}{{job=~"$job"}}', several=True)
ONE_NODE = Variable("instance", "node", f'{NOW}{{job="$job"}}', several=False)
