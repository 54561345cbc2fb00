"""Fleet: which servers of all nodes stall, are slow, cannot be judged; starts and how long they take."""

from __future__ import annotations

from .common import JOBS, LINK_ROW, LINK_SOURCE, NODES, NOW, ORANGE, PURPLE, RED, SERVER, STATE
from .panels import STATES, Column, Dashboard, Query, Row, bars, graph, stat, steps, table, timeline

_TROUBLE = 'state=~"stalled|failed|suspect|unknown|slow"'
_STARTS = "stallwatch_server_start_timestamp_seconds{@}"


_KIND = "framework, version, model, speculative"
_UNSAID = {"version": "unknown", "model": "unknown", "speculative": "no"}
"""Label of a kind of start -> what stands for it where it is empty."""


def _grown(metric: str, by: str) -> str:
    """By how much counters grew in the range, those that began in it included: increase() misses their first value."""
    return f"sum by ({by}) (({metric} - {metric} offset $__range) >= 0 or {metric})"


def _ended(outcome: str) -> str:
    return _grown(f'stallwatch_startup_outcome_duration_seconds_count{{@,outcome=~"{outcome}"}}', _KIND)


def _line(expr: str) -> str:
    """With no label empty: Prometheus leaves such a one out, and Grafana joins by the columns that all answers have."""
    for label, word in _UNSAID.items():
        expr = f'label_replace({expr}, "{label}", "{word}", "{label}", "")'
    return expr


def _servers(state: str) -> str:
    return f'sum(stallwatch_servers{{@,state="{state}"}})'


FLEET_DASHBOARD = Dashboard(
    uid="stallwatch-fleet",
    title="Stallwatch / Fleet",
    description="All inference servers of all nodes: which stall, which are slow, which cannot be judged.",
    variables=(JOBS, NODES),
    selectors={"@": 'job=~"$job",instance=~"$instance"'},
    links={
        "Server": f"/d/stallwatch-server?{LINK_SOURCE}",
        "Node and GPUs": f"/d/stallwatch-node?{LINK_SOURCE}",
        "Exporter": f"/d/stallwatch-exporter?{LINK_SOURCE}",
    },
    rows=(
        Row(
            "Now",
            (
                stat(
                    "Stalled",
                    "Servers that live and move nothing, on any rank. These page.",
                    _servers("stalled"),
                    4,
                    thresholds=RED,
                    runbook="InferenceServerStalled",
                ),
                stat(
                    "Failed",
                    "Servers that are over: a rank died, the log says so, the root went. Kept until they start again.",
                    _servers("failed"),
                    4,
                    thresholds=RED,
                    runbook="InferenceServerFailed",
                ),
                stat(
                    "Suspect",
                    "No progress, but something runs that could be work, or the cause lies on another node.",
                    _servers("suspect"),
                    4,
                    thresholds=ORANGE,
                    runbook="InferenceStartupSuspect",
                ),
                stat(
                    "Slow",
                    "Still moving, and over the budget of their phase. Never a page.",
                    _servers("slow"),
                    4,
                    thresholds=steps((1, "yellow")),
                    runbook="InferenceStartupSlow",
                ),
                stat(
                    "Blind",
                    "Servers that show no progress and cannot be judged: a stall of them would not be noticed.",
                    _servers("unknown"),
                    4,
                    thresholds=PURPLE,
                    runbook="StallwatchBlind",
                ),
                stat(
                    "Nodes that do not answer",
                    "Exporters whose last scrape failed: their servers are not watched.",
                    "sum(up{@} == bool 0)",
                    4,
                    thresholds=RED,
                    runbook="StallwatchDown",
                ),
                table(
                    "Servers, the gravest first",
                    "Every server with its verdict, the reason, and the rank that the others wait for.",
                    (
                        f"{STATE}\n"
                        f"* on ({SERVER}) group_left (reason) stallwatch_server_reason{{@}}\n"
                        f"* on ({SERVER}) group_left (phase) stallwatch_server_phase{{@}}\n"
                        f"* on ({SERVER}) group_left (framework, model) stallwatch_server_info{{@}}",
                        f"max by ({SERVER}) ({NOW}{{@}} - on (job, instance) group_right () "
                        "stallwatch_server_state_since_timestamp_seconds{@})",
                        f"max by ({SERVER}, rank) (stallwatch_rank_suspect{{@}})",
                    ),
                    (
                        Column(
                            "server",
                            "Server",
                            link=f"/d/stallwatch-server?{LINK_ROW}&var-server=${{__data.fields.Server}}",
                            link_title="Open the server",
                        ),
                        Column("instance", "Node", link=f"/d/stallwatch-node?{LINK_ROW}", link_title="Open the node"),
                        Column("Value #A", "State", choices=STATES),
                        Column("reason", "Reason"),
                        Column("Value #B", "For", "s"),
                        Column("phase", "Phase"),
                        Column("rank", "Waits for"),
                        Column("framework", "Framework"),
                        Column("model", "Model"),
                        Column("job", "Job"),
                    ),
                    height=9,
                    sort="State",
                ),
            ),
        ),
        Row(
            "Over time",
            (
                graph(
                    "Servers by state",
                    "How many servers are in each state.",
                    (Query("sum by (state) (stallwatch_servers{@})", "{{state}}"),),
                    8,
                    "none",
                    stacked=True,
                    colors=STATES,
                ),
                graph(
                    "Starts per hour",
                    "Starts in the hour before each moment, and how many of them were of a server that was there "
                    "before. A restart loop shows as a line that climbs.",
                    (
                        Query(
                            "(sum(round(increase(stallwatch_server_starts_total{@}[1h]))) or vector(0))\n"
                            f"+ (count({_STARTS} > time() - 3600 unless {_STARTS} offset 1h) or vector(0))",
                            "starts",
                        ),
                        Query("sum(round(increase(stallwatch_server_starts_total{@}[1h])))", "of these restarts"),
                    ),
                    8,
                    "none",
                    runbook="InferenceRestartLoop",
                ),
                graph(
                    "Time lost in stalls",
                    "Server time spent stalled in the hour before each moment.",
                    (Query("sum(increase(stallwatch_server_stalled_seconds_total{@}[1h]))", "stalled"),),
                    8,
                    "s",
                ),
                timeline(
                    "Servers in trouble",
                    "The verdicts of every server that was stalled, failed, suspect, unknown or slow in this range.",
                    (
                        Query(
                            f"{STATE}\n"
                            f"and on ({SERVER}) (max by ({SERVER}) "
                            f"(max_over_time(stallwatch_server_state{{@,{_TROUBLE}}}[$__range] @ end())) == 1)",
                            "{{server}} on {{instance}}",
                        ),
                    ),
                    24,
                    STATES,
                    height=9,
                ),
            ),
        ),
        Row(
            "Time to ready",
            (
                bars(
                    "Last successful start",
                    "Seconds from start to ready, the 15 longest.",
                    Query(
                        f"topk(15, max by ({SERVER}) (stallwatch_server_startup_duration_seconds{{@}}))",
                        "{{server}} on {{instance}}",
                        instant=True,
                    ),
                    8,
                    "s",
                    thresholds=steps((600, "yellow"), (1800, "orange")),
                ),
                graph(
                    "Starts by duration",
                    "Within which time half and nine in ten of all starts were ready, since the exporters started.",
                    tuple(
                        Query(
                            f"histogram_quantile({share}, sum by (le, framework, model) "
                            "(stallwatch_startup_duration_seconds_bucket{@}))",
                            f"{word} {{{{framework}}}} {{{{model}}}}",
                        )
                        for share, word in (("0.5", "half"), ("0.9", "9 in 10"))
                    ),
                    8,
                    "s",
                ),
                graph(
                    "Starts under way, against their budget",
                    "Time in the present phase as a share of what it may take before the server counts as slow; "
                    "the 10 furthest.",
                    (
                        Query(
                            f"topk(10, ({NOW}{{@}} - on (job, instance) group_right () "
                            "stallwatch_server_phase_start_timestamp_seconds{@}) "
                            "/ stallwatch_server_phase_budget_seconds{@} "
                            f"and on ({SERVER}) stallwatch_server_ready{{@}} == 0)",
                            "{{server}} on {{instance}}",
                        ),
                    ),
                    8,
                    "percentunit",
                    lines=steps((1, "yellow")),
                ),
            ),
        ),
        Row(
            "What starts cost",
            (
                table(
                    "Starts, with and without speculative decoding",
                    "How starts ended in this range, how long those took that became ready, and what stalls cost; by "
                    "model, release and speculative decoding, so that two lines of one model can be set side by side.",
                    (
                        _line(_ended("ready")),
                        _line(_ended("failed|stalled")),
                        _line(
                            _grown('stallwatch_startup_outcome_duration_seconds_sum{@,outcome="ready"}', _KIND)
                            + f" / ({_ended('ready')} > 0)"
                        ),
                        _line(_grown("stallwatch_stalled_seconds_total{@}", _KIND)),
                    ),
                    (
                        Column("framework", "Framework"),
                        Column("version", "Release"),
                        Column("model", "Model"),
                        Column("speculative", "Speculative"),
                        Column("Value #A", "Ready"),
                        Column("Value #B", "Failed or stalled"),
                        Column("Value #C", "Time to ready", "s"),
                        Column("Value #D", "Lost in stalls", "s"),
                    ),
                    width=16,
                    sort="Lost in stalls",
                ),
                bars(
                    "Why starts failed",
                    "Starts that failed or stalled before they were ready, by reason, in this range.",
                    Query(
                        _grown("stallwatch_startup_failures_total{@}", "reason"),
                        "{{reason}}",
                        instant=True,
                    ),
                    8,
                    "none",
                    thresholds=steps((1, "orange")),
                ),
            ),
        ),
    ),
)
