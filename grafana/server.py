"""Server: one server, its start rank by rank, and every figure its verdict rests on."""

from __future__ import annotations

from .common import CARD, LINK_NODE, LINK_SOURCE, NOW, ONE_JOB, ONE_NODE, SERVER, STATE
from .panels import (
    CHANNEL_CHOICES,
    GONE_LIVES,
    MAIN_WAIT_CHOICES,
    NO_BUT,
    NO_YES,
    PHASE_CHOICES,
    STATES,
    WAIT_CHOICES,
    Column,
    Dashboard,
    Query,
    Row,
    Variable,
    graph,
    numbered,
    stat,
    steps,
    table,
    timeline,
)

_RANK = "{{rank}}"

SERVER_DASHBOARD = Dashboard(
    uid="stallwatch-server",
    title="Stallwatch / Server",
    description="One inference server: its verdict, its start rank by rank, and every figure the verdict rests on.",
    variables=(
        ONE_JOB,
        ONE_NODE,
        Variable("server", "server", 'stallwatch_server_info{job="$job",instance="$instance"}', several=False),
    ),
    selectors={
        "@": 'job="$job",instance="$instance",server="$server"',
        "@node": 'job="$job",instance="$instance"',
    },
    links={
        "Fleet": f"/d/stallwatch-fleet?{LINK_SOURCE}",
        "Node and GPUs": f"/d/stallwatch-node?{LINK_NODE}",
        "Exporter": f"/d/stallwatch-exporter?{LINK_NODE}",
    },
    rows=(
        Row(
            "Verdict",
            (
                stat(
                    "State",
                    "The verdict. Only stalled and failed page.",
                    STATE,
                    4,
                    choices=STATES,
                    runbook="InferenceServerStalled",
                ),
                stat(
                    "Reason",
                    "Why the server is in its state; none where there is nothing to explain.",
                    "stallwatch_server_reason{@}",
                    4,
                    legend="{{reason}}",
                ),
                stat(
                    "In this state for",
                    "Time since the verdict last changed its state.",
                    f"max by ({SERVER}) ({NOW}{{@node}} - on (job, instance) group_right () "
                    "stallwatch_server_state_since_timestamp_seconds{@})",
                    4,
                    "dtdurations",
                    decimals=0,
                ),
                stat(
                    "Phase",
                    "How far the start has come.",
                    "stallwatch_server_phase{@}",
                    4,
                    legend="{{phase}}",
                ),
                stat(
                    "The others wait for",
                    "The rank that is behind all others; only in the states suspect, stalled and failed.",
                    "stallwatch_rank_suspect{@}",
                    4,
                    thresholds=steps(base="orange"),
                    legend=_RANK,
                    no_value="no rank",
                    runbook="InferenceRankDead",
                ),
                stat(
                    "Ranks",
                    "Ranks that live on this node, and ranks that the server's arguments ask for here.",
                    (
                        Query("stallwatch_server_ranks_alive{@}", "alive", instant=True),
                        Query("stallwatch_server_ranks_expected{@}", "expected", instant=True),
                    ),
                    4,
                ),
                table(
                    "The server",
                    "The present start, from its command line and its cgroup.",
                    (
                        "stallwatch_server_info{@}",
                        f"max by ({SERVER}) (stallwatch_server_start_timestamp_seconds{{@}} * 1000)",
                        f"max by ({SERVER}) (stallwatch_server_starts_total{{@}})",
                        f"max by ({SERVER}) (stallwatch_server_startup_duration_seconds{{@}})",
                    ),
                    (
                        Column("server", "Server"),
                        Column("framework", "Framework"),
                        Column("version", "Version"),
                        Column("model", "Model"),
                        Column("role", "Role"),
                        Column("tensor_parallel", "TP"),
                        Column("pipeline_parallel", "PP"),
                        Column("data_parallel", "DP"),
                        Column("nnodes", "Nodes"),
                        Column("Value #B", "Started", "dateTimeAsIso"),
                        Column("Value #C", "Starts seen"),
                        Column("Value #D", "Start to ready", "s"),
                        Column("container", "Container"),
                        Column("unit", "Unit"),
                        Column("pod", "Pod"),
                    ),
                    height=4,
                    hidden=(
                        "__name__",
                        "job",
                        "instance",
                        "node_rank",
                        "group",
                        "speculative",
                        "namespace",
                        "slurm_job",
                    ),
                ),
            ),
        ),
        Row(
            "The start",
            (
                timeline(
                    "Verdict",
                    "The state over time.",
                    (Query(STATE, "verdict"),),
                    12,
                    STATES,
                    height=5,
                ),
                timeline(
                    "Reasons",
                    "Which reason stood when.",
                    (Query("stallwatch_server_reason{@}", "{{reason}}"),),
                    12,
                    height=5,
                    named=False,
                ),
                timeline(
                    "Phases",
                    "The phase that each rank has proved, below that of the whole server. A rank whose bar stands "
                    "still while the others go on is the one they wait for.",
                    (
                        Query("stallwatch_server_phase_number{@}", "server"),
                        Query("stallwatch_rank_phase_number{@}", _RANK),
                    ),
                    24,
                    PHASE_CHOICES,
                    height=9,
                    runbook="InferenceServerStalled",
                ),
                graph(
                    "Weights loaded",
                    "Share of the weights each rank has loaded, by its own word.",
                    (Query("stallwatch_rank_load_progress_ratio{@}", _RANK),),
                    6,
                    "percentunit",
                    most=1,
                    no_value="It does not say",
                ),
                graph(
                    "Since each rank last progressed",
                    "Seconds since anything of the rank showed progress. At a barrier all but the slowest grow old, "
                    "and that is no stall.",
                    (Query("stallwatch_rank_progress_age_seconds{@}", _RANK),),
                    6,
                    "s",
                    runbook="InferenceRankBehind",
                ),
                graph(
                    "This phase against its budget",
                    "Time in the present phase, and how long it may take before the server counts as slow.",
                    (
                        Query(
                            f"max by ({SERVER}) ({NOW}{{@node}} - on (job, instance) group_right () "
                            "stallwatch_server_phase_start_timestamp_seconds{@})",
                            "in this phase",
                        ),
                        Query("stallwatch_server_phase_budget_seconds{@}", "budget"),
                    ),
                    6,
                    "s",
                    dashed="budget",
                    runbook="InferenceStartupSlow",
                ),
                graph(
                    "Time left on its own clocks",
                    "Seconds until one of the server's own time-outs strikes: a barrier, a collective, the warm-up. "
                    "What still waits at 0 ends itself. Empty while none runs.",
                    (
                        Query(
                            "stallwatch_server_deadline_timestamp_seconds{@}\n"
                            f"- on (job, instance) group_left () {NOW}{{@node}}",
                            "{{clock}}",
                        ),
                    ),
                    6,
                    "s",
                    least=None,
                    lines=steps((0, "red"), base="red"),
                    runbook="InferenceStartupKilledSoon",
                    no_value="None of them runs",
                ),
                timeline(
                    "Channels of progress",
                    "What moves. The stall clock runs while none but cpu and gpu_utilization moves.",
                    (
                        Query(
                            numbered("stallwatch_channel_state", "state", CHANNEL_CHOICES, f"{SERVER}, channel"),
                            "{{channel}}",
                        ),
                    ),
                    12,
                    CHANNEL_CHOICES,
                    height=9,
                ),
                graph(
                    "Channel ages",
                    "Seconds since the last move of each channel that can be read, and dashed the stall clock: the "
                    "youngest of all but cpu and gpu_utilization. Only the stall clock counts against the lines: a "
                    "minute (quiet) and four (stalled, when the rest is at rest), as shipped.",
                    (
                        Query("stallwatch_channel_age_seconds{@}", "{{channel}}"),
                        Query(
                            f'min by ({SERVER}) (stallwatch_channel_age_seconds{{@,channel!~"cpu|gpu_utilization"}})',
                            "stall clock",
                        ),
                    ),
                    12,
                    "s",
                    height=9,
                    dashed="^stall clock$",
                    lines=steps((60, "yellow"), (240, "red")),
                ),
            ),
        ),
        Row(
            "Threads and processes",
            (
                graph(
                    "Threads by what they wait in",
                    "Of all ranks together. All in futex and poll is a server at rest, or one that hangs.",
                    (Query(f"sum by ({SERVER}, wait) (stallwatch_threads{{@}})", "{{wait}}"),),
                    12,
                    "none",
                    stacked=True,
                    colors=WAIT_CHOICES,
                ),
                timeline(
                    "Main threads",
                    "What the main thread of each rank waits in. One that differs from all others is a clue.",
                    (Query(numbered("stallwatch_main_thread", "wait", MAIN_WAIT_CHOICES, f"{SERVER}, rank"), _RANK),),
                    12,
                    MAIN_WAIT_CHOICES,
                ),
                graph(
                    "CPU",
                    "Cores each rank uses.",
                    (Query("rate(stallwatch_process_cpu_seconds_total{@}[$__rate_interval])", _RANK),),
                    8,
                    "none",
                ),
                graph(
                    "Resident memory",
                    "Host memory of each rank.",
                    (Query("stallwatch_process_resident_memory_bytes{@}", _RANK),),
                    8,
                    "bytes",
                ),
                graph(
                    "Read from storage",
                    "Bytes a second each rank causes to be read from storage. What comes from the page cache is not in "
                    "it, nor what some network file systems read.",
                    (Query("rate(stallwatch_process_storage_read_bytes_total{@}[$__rate_interval])", _RANK),),
                    8,
                    "Bps",
                ),
                graph(
                    "Page faults",
                    "Faults a second of all ranks: minor ones map memory, major ones wait for storage.",
                    (
                        Query(
                            f"sum by ({SERVER}, kind) "
                            "(rate(stallwatch_process_page_faults_total{@}[$__rate_interval]))",
                            "{{kind}}",
                        ),
                    ),
                    8,
                    "ops",
                ),
                graph(
                    "Child processes",
                    "Live children of ranks and engines, compilers apart.",
                    (Query("stallwatch_server_child_processes{@}", "{{kind}}"),),
                    8,
                    "none",
                ),
                graph(
                    "Locks",
                    "Age of the oldest cache lock that a process of the server may wait for, by kind.",
                    (Query("stallwatch_server_lock_age_seconds{@}", "{{kind}}"),),
                    8,
                    "s",
                    no_value="No lock is known",
                ),
                graph(
                    "Read and written by calls",
                    "Bytes a second of all ranks through read() and write() and their like, page cache included.",
                    (
                        Query(
                            f"sum by ({SERVER}) (rate(stallwatch_process_read_bytes_total{{@}}[$__rate_interval]))",
                            "read",
                        ),
                        Query(
                            f"sum by ({SERVER}) (rate(stallwatch_process_written_bytes_total{{@}}[$__rate_interval]))",
                            "written",
                        ),
                    ),
                    8,
                    "Bps",
                ),
                graph(
                    "CPU of children",
                    "Cores that children of ranks and engines use, compilers apart.",
                    (Query("rate(stallwatch_server_child_cpu_seconds_total{@}[$__rate_interval])", "{{kind}}"),),
                    8,
                    "none",
                ),
                timeline(
                    "What else explains silence",
                    "What explains silence without a hang: frozen, in sleep mode, being stopped, a debugger attached, "
                    "a lock in somebody's hands.",
                    (
                        Query("stallwatch_server_frozen{@}", "frozen"),
                        Query("stallwatch_server_paused{@}", "in sleep mode"),
                        Query("stallwatch_server_stopping{@}", "being stopped"),
                        Query(f"max by ({SERVER}) (stallwatch_rank_traced{{@}})", "traced"),
                        Query("stallwatch_server_lock_held{@}", "lock held: {{kind}}"),
                    ),
                    8,
                    NO_BUT,
                ),
                timeline(
                    "Processes",
                    "Whether the first process, its container or unit, and each rank live.",
                    (
                        Query("stallwatch_server_alive{@}", "first process"),
                        Query("stallwatch_server_scope_alive{@}", "container or unit"),
                        Query("stallwatch_rank_alive{@}", _RANK),
                    ),
                    24,
                    GONE_LIVES,
                    runbook="InferenceServerFailed",
                ),
            ),
        ),
        Row(
            "Cards",
            (
                graph(
                    "Memory held",
                    "Memory of the card that each rank holds.",
                    (Query("stallwatch_gpu_process_memory_bytes{@}", _RANK),),
                    8,
                    "bytes",
                    no_value="No card is known",
                ),
                graph(
                    "Utilisation",
                    "Share of time in which a kernel ran on the rank's card; one that only spins counts.",
                    (
                        Query(
                            f'max by ({SERVER}, rank, gpu) (stallwatch_rank_info{{@,gpu!=""}})\n'
                            f"* on ({CARD}) group_left () stallwatch_gpu_utilization_ratio{{@node}}",
                            _RANK,
                        ),
                    ),
                    8,
                    "percentunit",
                    most=1,
                    no_value="No card is known",
                ),
                graph(
                    "Power above resident-idle",
                    "What the rank's card draws above what it takes when a process holds memory and nothing runs. "
                    "Near 0 at full utilisation is a spin, not work.",
                    (
                        Query(
                            f'max by ({SERVER}, rank, gpu) (stallwatch_rank_info{{@,gpu!=""}})\n'
                            f"* on ({CARD}) group_left () "
                            "(stallwatch_gpu_power_watts{@node} - stallwatch_gpu_resident_idle_power_watts{@node})",
                            _RANK,
                        ),
                    ),
                    8,
                    "watt",
                    least=None,
                    no_value="Not learned yet, or no card is known",
                ),
            ),
        ),
        Row(
            "Ports and health",
            (
                timeline(
                    "Ports",
                    "Whether the server listens, and whether another process sits on its port.",
                    (
                        Query("stallwatch_port_listening{@}", "{{port}}: listens"),
                        Query("stallwatch_port_foreign{@}", "{{port}}: another's"),
                    ),
                    8,
                    NO_YES,
                    runbook="InferencePortTaken",
                ),
                timeline(
                    "TCP connect",
                    "The answer to the last connect to the port.",
                    (Query("stallwatch_port_connect{@}", "{{port}}: {{result}}"),),
                    8,
                    named=False,
                ),
                graph(
                    "Accept queue",
                    "Connections that the kernel completed and the server has not accepted.",
                    (Query("stallwatch_port_accept_queue{@}", "port {{port}}"),),
                    8,
                    "none",
                    no_value="It does not listen",
                ),
                timeline(
                    "Health",
                    "HTTP status of the last answer.",
                    (Query("stallwatch_health_status{@}", "{{endpoint}}"),),
                    8,
                    thresholds=steps((200, "green"), (300, "orange"), (500, "red"), base="text"),
                    runbook="InferenceHealthTimesOut",
                ),
                graph(
                    "Health: time to answer",
                    "From connect to the end of the last answer; absent when there was none.",
                    (Query("stallwatch_health_duration_seconds{@}", "{{endpoint}}"),),
                    8,
                    "s",
                    no_value="Nobody answers",
                ),
                graph(
                    "Health: no answer in time",
                    "Requests in five minutes that were not answered completely in time.",
                    (Query("increase(stallwatch_health_timeouts_total{@}[5m])", "{{endpoint}}"),),
                    8,
                    "none",
                    no_value="Nobody was asked",
                ),
            ),
        ),
        Row(
            "Logs",
            (
                graph(
                    "Silence of the log",
                    "Seconds since the last line, and since the last line that shows progress. Heartbeats and access "
                    "lines part the two.",
                    (
                        Query("stallwatch_log_silence_seconds{@}", "{{log}}: any line"),
                        Query("stallwatch_log_progress_silence_seconds{@}", "{{log}}: progress"),
                    ),
                    8,
                    "s",
                ),
                graph(
                    "Lines",
                    "Lines a second; unmatched are those that no pattern of the framework knows.",
                    (
                        Query("rate(stallwatch_log_lines_total{@}[$__rate_interval])", "{{log}}: all"),
                        Query("rate(stallwatch_log_unmatched_lines_total{@}[$__rate_interval])", "{{log}}: unmatched"),
                        Query("rate(stallwatch_log_heartbeat_lines_total{@}[$__rate_interval])", "{{log}}: heartbeats"),
                    ),
                    8,
                    "none",
                    runbook="InferenceLogFormatUnknown",
                ),
                graph(
                    "Not read yet",
                    "Bytes of the log that were written and not read yet.",
                    (Query("stallwatch_log_backlog_bytes{@}", "{{log}}"),),
                    8,
                    "bytes",
                ),
                graph(
                    "What the log says",
                    "Recognised lines by event, in the minute before each moment.",
                    (
                        Query(
                            'increase(stallwatch_log_events_total{@,event!~"access|stats"}[1m]) > 0',
                            "{{event}}",
                        ),
                    ),
                    8,
                    "none",
                    bars=True,
                    stacked=True,
                ),
                graph(
                    "Lines of error",
                    "Lines of error and fatal so far, by kind.",
                    (Query("stallwatch_log_errors_total{@}", "{{kind}}"),),
                    8,
                    "none",
                ),
                graph(
                    "Files of the log",
                    "How often the log was replaced, cut short, or became unreadable.",
                    (
                        Query("stallwatch_log_rotations_total{@}", "{{log}}: replaced"),
                        Query("stallwatch_log_truncations_total{@}", "{{log}}: cut short"),
                        Query("stallwatch_log_read_errors_total{@}", "{{log}}: unreadable"),
                    ),
                    8,
                    "none",
                    runbook="InferenceLogUnreadable",
                ),
            ),
        ),
        Row(
            "Serving",
            (
                graph(
                    "Requests",
                    "By the server's own count. Work that waits while no token comes is a stall.",
                    (
                        Query("stallwatch_server_requests_running{@}", "running"),
                        Query("stallwatch_server_requests_waiting{@}", "waiting"),
                    ),
                    8,
                    "none",
                    runbook="InferenceServingStalled",
                    no_value="It does not say",
                ),
                graph(
                    "Requests finished",
                    "Requests a second, by the server's own count.",
                    (Query("rate(stallwatch_server_finished_requests_total{@}[$__rate_interval])", "finished"),),
                    8,
                    "none",
                    no_value="It does not say",
                ),
                graph(
                    "Tokens",
                    "Tokens a second, by the server's own count.",
                    (
                        Query("rate(stallwatch_server_generated_tokens_total{@}[$__rate_interval])", "generated"),
                        Query("rate(stallwatch_server_prompt_tokens_total{@}[$__rate_interval])", "prompt"),
                    ),
                    8,
                    "none",
                    no_value="It does not say",
                ),
            ),
        ),
    ),
)
