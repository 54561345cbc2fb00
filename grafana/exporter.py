"""Exporter: the watcher itself."""

from __future__ import annotations

from .common import JOBS, LINK_SOURCE, NODES, NOW, ORANGE, RED
from .panels import FAILS_WORKS, Column, Dashboard, Query, Row, graph, stat, steps, table, timeline

_COLLECTOR = "{{collector}} on {{instance}}"

EXPORTER_DASHBOARD = Dashboard(
    uid="stallwatch-exporter",
    title="Stallwatch / Exporter",
    description="The watcher itself: a stall watcher that stalls in silence is worse than none.",
    variables=(JOBS, NODES),
    selectors={"@": 'job=~"$job",instance=~"$instance"'},
    links={
        "Fleet": f"/d/stallwatch-fleet?{LINK_SOURCE}",
        "Server": f"/d/stallwatch-server?{LINK_SOURCE}",
        "Node and GPUs": f"/d/stallwatch-node?{LINK_SOURCE}",
    },
    rows=(
        Row(
            "Now",
            (
                stat(
                    "Exporters",
                    "How many answer, and how many are scraped.",
                    (
                        Query("sum(up{@})", "answer", instant=True),
                        Query("count(up{@})", "scraped", instant=True),
                    ),
                    4,
                    runbook="StallwatchDown",
                ),
                stat(
                    "Oldest report",
                    "Age of the oldest report on any page. Beyond three ticks an exporter answers 503.",
                    f"max(timestamp({NOW}{{@}}) - {NOW}{{@}})",
                    4,
                    "s",
                    thresholds=steps((15, "orange"), (60, "red")),
                    decimals=1,
                    runbook="StallwatchStale",
                ),
                stat(
                    "Collectors that fail",
                    "Collectors whose last finished call failed.",
                    "sum(stallwatch_collector_success{@} == bool 0)",
                    4,
                    thresholds=ORANGE,
                    runbook="StallwatchCollectorStuck",
                ),
                stat(
                    "Longest call in flight",
                    "A call that never returns stops its own collector only; it shows here.",
                    "max(stallwatch_collector_in_flight_seconds{@})",
                    4,
                    "s",
                    thresholds=steps((10, "orange"), (120, "red")),
                    decimals=1,
                    runbook="StallwatchCollectorStuck",
                ),
                stat(
                    "Series left out",
                    "Series that a limit or a duplicate kept off the pages, since the exporters started.",
                    "sum(stallwatch_series_dropped_total{@})",
                    4,
                    thresholds=ORANGE,
                    runbook="StallwatchSeriesDropped",
                ),
                stat(
                    "Configurations refused",
                    "Exporters whose last reload failed: they run with the configuration before.",
                    "sum(stallwatch_config_last_reload_successful{@} == bool 0)",
                    4,
                    thresholds=RED,
                    runbook="StallwatchConfigReloadFailed",
                ),
            ),
        ),
        Row(
            "Collectors",
            (
                timeline(
                    "Collectors that do not always work",
                    "Whether the last finished call of each collector succeeded; those that never failed in this range "
                    "are one bar.",
                    (
                        Query("min(stallwatch_collector_success{@})", "all together"),
                        Query(
                            "stallwatch_collector_success{@} "
                            "and min_over_time(stallwatch_collector_success{@}[$__range] @ end()) == 0",
                            _COLLECTOR,
                        ),
                    ),
                    12,
                    FAILS_WORKS,
                    runbook="StallwatchCollectorStuck",
                ),
                graph(
                    "Since the last success",
                    "Of the slowest exporter, as of its own report.",
                    (
                        Query(
                            f"max by (collector) ({NOW}{{@}} - on (job, instance) group_right () "
                            "stallwatch_collector_last_success_timestamp_seconds{@})",
                            "{{collector}}",
                        ),
                    ),
                    12,
                    "s",
                    lines=steps((300, "red")),
                    runbook="StallwatchCollectorStuck",
                ),
                graph(
                    "Duration of a call",
                    "Seconds the last finished call took, of the slowest exporter.",
                    (Query("max by (collector) (stallwatch_collector_duration_seconds{@})", "{{collector}}"),),
                    8,
                    "s",
                ),
                graph(
                    "Call in flight",
                    "Seconds the present call has been running, of the slowest exporter.",
                    (Query("max by (collector) (stallwatch_collector_in_flight_seconds{@})", "{{collector}}"),),
                    8,
                    "s",
                    lines=steps((120, "red")),
                    runbook="StallwatchCollectorStuck",
                ),
                graph(
                    "What cannot be read",
                    "Values in five minutes that were asked for and could not be read.",
                    (
                        Query(
                            "sum by (collector, reason) (increase(stallwatch_read_errors_total{@}[5m])) > 0",
                            "{{collector}}: {{reason}}",
                        ),
                    ),
                    8,
                    "none",
                ),
            ),
        ),
        Row(
            "Cost",
            (
                graph(
                    "CPU",
                    "Cores that each exporter uses; the 10 that use most.",
                    (Query("topk(10, rate(process_cpu_seconds_total{@}[$__rate_interval]))", "{{instance}}"),),
                    8,
                    "none",
                ),
                graph(
                    "Memory",
                    "Resident memory of each exporter; the 10 that use most.",
                    (Query("topk(10, process_resident_memory_bytes{@})", "{{instance}}"),),
                    8,
                    "bytes",
                ),
                graph(
                    "Descriptors",
                    "Open descriptors of each exporter; the 10 that have most.",
                    (Query("topk(10, process_open_fds{@})", "{{instance}}"),),
                    8,
                    "none",
                ),
                graph(
                    "Duration of a scrape",
                    "As Prometheus measured it; the 10 slowest.",
                    (Query("topk(10, scrape_duration_seconds{@})", "{{instance}}"),),
                    8,
                    "s",
                ),
                graph(
                    "Samples of a scrape",
                    "Series on each page; the 10 largest.",
                    (Query("topk(10, scrape_samples_scraped{@})", "{{instance}}"),),
                    8,
                    "none",
                ),
                table(
                    "Versions",
                    "How many exporters run which version.",
                    ("count by (version, revision, python) (stallwatch_build_info{@})",),
                    (
                        Column("version", "Version"),
                        Column("revision", "Revision"),
                        Column("python", "Python"),
                        Column("Value", "Exporters"),
                    ),
                    width=8,
                    sort="Exporters",
                ),
            ),
        ),
    ),
)
