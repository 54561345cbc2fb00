"""Node and GPUs: the cards of one node, and the node itself."""

from __future__ import annotations

from .common import CARD, LINK_NODE, LINK_SOURCE, ONE_JOB, ONE_NODE, ORANGE, RED, SERVER
from .panels import Column, Dashboard, Query, Row, Variable, graph, stat, steps, table

_GPU = "{{gpu}}"


def _cards(expr: str) -> tuple[Query, ...]:
    return (Query(expr, _GPU),)


def _by_card(metric: str) -> str:
    return f"max by ({CARD}) (stallwatch_gpu_{metric}{{@gpu}})"


NODE_DASHBOARD = Dashboard(
    uid="stallwatch-node",
    title="Stallwatch / Node and GPUs",
    description="One node and its cards: memory against work, power against rest, faults, memory of the host.",
    variables=(
        ONE_JOB,
        ONE_NODE,
        Variable("gpu", "GPU", 'stallwatch_gpu_memory_used_bytes{job="$job",instance="$instance"}', several=True),
    ),
    selectors={
        "@": 'job="$job",instance="$instance"',
        "@gpu": 'job="$job",instance="$instance",gpu=~"$gpu"',
    },
    links={
        "Fleet": f"/d/stallwatch-fleet?{LINK_SOURCE}",
        "Server": f"/d/stallwatch-server?{LINK_NODE}",
        "Exporter": f"/d/stallwatch-exporter?{LINK_NODE}",
    },
    rows=(
        Row(
            "Now",
            (
                stat("Cards", "Cards and MIG instances that answer.", "count(stallwatch_gpu_info{@})", 4),
                stat(
                    "Cards lost",
                    "Cards that were there before and do not answer any more.",
                    "sum(stallwatch_gpu_lost{@})",
                    4,
                    thresholds=RED,
                    runbook="GpuLost",
                ),
                stat(
                    "Driver call in flight",
                    "Time the present call into the GPU driver has been running, once it is overdue.",
                    "stallwatch_gpu_call_in_flight_seconds{@}",
                    4,
                    "s",
                    thresholds=steps((5, "orange"), (60, "red")),
                    runbook="GpuDriverUnresponsive",
                ),
                stat(
                    "Memory held by nobody",
                    "Memory of all cards in use that no live process is known to hold.",
                    "sum(stallwatch_gpu_unowned_memory_bytes{@})",
                    4,
                    "bytes",
                    thresholds=steps((1 << 30, "orange")),
                    runbook="GpuMemoryHeldByNobody",
                ),
                stat(
                    "Left over in /dev/shm",
                    "Bytes of files in /dev/shm that no live process maps or has open.",
                    "stallwatch_node_shm_orphan_bytes{@}",
                    4,
                    "bytes",
                    thresholds=steps((1 << 30, "orange")),
                    runbook="ShmLeftovers",
                ),
                stat(
                    "Killed for want of memory",
                    "Processes that the OOM killer ended in the last hour.",
                    "round(increase(stallwatch_node_oom_kills_total{@}[1h]))",
                    4,
                    thresholds=ORANGE,
                    runbook="NodeOomKilled",
                ),
                table(
                    "Cards and ranks",
                    "Every card with the rank on it. Memory held, no utilisation and power at rest: it waits. Full "
                    "utilisation and power at rest: it spins.",
                    (
                        f"max by ({CARD}, index, name) (stallwatch_gpu_info{{@gpu}})",
                        f"max by ({CARD}, server, rank) (stallwatch_rank_info{{@gpu}})",
                        _by_card("memory_used_bytes"),
                        _by_card("memory_total_bytes"),
                        _by_card("utilization_ratio"),
                        _by_card("power_watts"),
                        _by_card("resident_idle_power_watts"),
                        _by_card("unowned_memory_bytes"),
                        _by_card("temperature_celsius"),
                    ),
                    (
                        Column("index", "Index"),
                        Column("name", "Name"),
                        Column(
                            "server",
                            "Server",
                            link=f"/d/stallwatch-server?{LINK_NODE}&var-server=${{__data.fields.Server}}",
                            link_title="Open the server",
                        ),
                        Column("rank", "Rank"),
                        Column("Value #C", "Memory used", "bytes"),
                        Column("Value #D", "of", "bytes"),
                        Column("Value #E", "Utilisation", "percentunit"),
                        Column("Value #F", "Power", "watt"),
                        Column("Value #G", "At rest", "watt"),
                        Column("Value #H", "Held by nobody", "bytes"),
                        Column("Value #I", "Temperature", "celsius"),
                        Column("gpu", "GPU"),
                    ),
                    hidden=("job", "instance"),
                ),
            ),
        ),
        Row(
            "Memory against utilisation",
            (
                graph(
                    "Memory used",
                    "Share of the card's memory that is in use.",
                    _cards("stallwatch_gpu_memory_used_bytes{@gpu} / stallwatch_gpu_memory_total_bytes{@gpu}"),
                    8,
                    "percentunit",
                    most=1,
                ),
                graph(
                    "Utilisation",
                    "Share of time in which a kernel ran; one that only spins counts.",
                    _cards("stallwatch_gpu_utilization_ratio{@gpu}"),
                    8,
                    "percentunit",
                    most=1,
                ),
                graph(
                    "Utilisation of the memory",
                    "Share of time in which memory was read or written. 0 at full utilisation is a kernel that waits.",
                    _cards("stallwatch_gpu_memory_utilization_ratio{@gpu}"),
                    8,
                    "percentunit",
                    most=1,
                ),
                graph(
                    "Memory by rank",
                    "Who holds it; a series without server is a process of no known server.",
                    (
                        Query(
                            f"sum by ({SERVER}, rank) (stallwatch_gpu_process_memory_bytes{{@gpu}})",
                            "{{server}} {{rank}}",
                        ),
                    ),
                    12,
                    "bytes",
                    stacked=True,
                ),
                graph(
                    "Memory held by nobody, by card",
                    "In use, and no live process is known to hold it.",
                    _cards("stallwatch_gpu_unowned_memory_bytes{@gpu}"),
                    12,
                    "bytes",
                    lines=steps((1 << 30, "orange")),
                    runbook="GpuMemoryHeldByNobody",
                ),
            ),
        ),
        Row(
            "Power",
            (
                graph(
                    "Power against resident-idle",
                    "Mean power; dashed what the card takes while a process holds memory and nothing runs (learned).",
                    (
                        Query("stallwatch_gpu_power_watts{@gpu}", _GPU),
                        Query("stallwatch_gpu_resident_idle_power_watts{@gpu}", "at rest {{gpu}}"),
                    ),
                    12,
                    "watt",
                    dashed="^at rest",
                ),
                graph(
                    "Share of the span from rest to limit",
                    "0 is at rest, 1 the power limit. Below a third of the way to its work level a card does not count "
                    "as working.",
                    _cards(
                        "(stallwatch_gpu_power_watts{@gpu} - stallwatch_gpu_resident_idle_power_watts{@gpu})\n"
                        "/ (stallwatch_gpu_power_limit_watts{@gpu} - stallwatch_gpu_resident_idle_power_watts{@gpu})",
                    ),
                    12,
                    "percentunit",
                    least=None,
                    most=1,
                ),
                graph(
                    "PCIe received",
                    "Bytes a second; weights on their way to the card show here.",
                    _cards("stallwatch_gpu_pcie_receive_bytes_per_second{@gpu}"),
                    8,
                    "Bps",
                ),
                graph(
                    "SM clock",
                    "Clock of the streaming multiprocessors.",
                    _cards("stallwatch_gpu_sm_clock_hertz{@gpu}"),
                    8,
                    "hertz",
                ),
                graph("Temperature", "Of the card.", _cards("stallwatch_gpu_temperature_celsius{@gpu}"), 8, "celsius"),
            ),
        ),
        Row(
            "Faults",
            (
                table(
                    "Last faults",
                    "When the driver last reported each kind of fault (Xid), since the node booted.",
                    (f"max by ({CARD}, xid) (stallwatch_gpu_xid_last_timestamp_seconds{{@}} * 1000)",),
                    (Column("Value", "When", "dateTimeAsIso"), Column("xid", "Xid"), Column("gpu", "GPU")),
                    width=8,
                    sort="When",
                    hidden=("job", "instance"),
                    runbook="GpuXid",
                ),
                graph(
                    "Faults",
                    "Faults so far, by card and Xid.",
                    (Query("stallwatch_gpu_xid_errors_total{@}", "Xid {{xid}}, {{gpu}}"),),
                    8,
                    "none",
                    runbook="GpuXid",
                ),
                graph(
                    "What the driver asks for",
                    "0 nothing, 1 a reset of the card, 2 a reboot of the node, 3 and 4 to be drained.",
                    _cards("stallwatch_gpu_recovery_action{@gpu}"),
                    8,
                    "none",
                ),
            ),
        ),
        Row(
            "Host",
            (
                graph(
                    "Memory of the host",
                    "Available without swapping, and page cache, which is given back on demand; dashed all there is.",
                    (
                        Query("stallwatch_node_memory_available_bytes{@}", "available"),
                        Query("stallwatch_node_memory_cached_bytes{@}", "page cache"),
                        Query("stallwatch_node_memory_total_bytes{@}", "all"),
                    ),
                    8,
                    "bytes",
                    dashed="^all$",
                ),
                graph(
                    "Shared memory",
                    "Used bytes of /dev/shm, and of them those in files that nobody has open any more.",
                    (
                        Query("stallwatch_node_shm_used_bytes{@}", "used"),
                        Query("stallwatch_node_shm_orphan_bytes{@}", "left over"),
                    ),
                    8,
                    "bytes",
                    runbook="ShmLeftovers",
                ),
                graph(
                    "Kills and strangers",
                    "Processes killed for want of memory since boot, and processes that may belong to a server and "
                    "cannot be read.",
                    (
                        Query("stallwatch_node_oom_kills_total{@}", "killed since boot"),
                        Query("stallwatch_unidentified_processes{@}", "cannot be read"),
                    ),
                    8,
                    "none",
                ),
            ),
        ),
    ),
)
