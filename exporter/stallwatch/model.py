"""The records that flow from the machine to the page.  All are frozen; nothing here does I/O.

Order of appearance is the order of the flow: Signal, Reading, Event (what a source yields), Server (whom it
is about), Result (one finished read), Verdict, Report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

Scope = Literal["node", "server", "rank", "gpu", "log", "self"]
Kind = Literal["gauge", "counter", "info", "histogram"]

READ_REASONS = (
    "permission",
    "kernel",
    "namespace",
    "not_supported",
    "vanished",
    "timeout",
    "driver_unresponsive",
    "gpu_lost",
    "error",
)
"""Why a value was asked for and could not be read; docs/REFERENCE.md, "Reasons for a missing value"."""

WAITS = ("running", "futex", "poll", "sleep", "disk", "stopped", "other", "unreadable")
"""Wait classes of a thread."""

WRITE = "write"
"""Said of main threads only (counted among threads it is `other`): asleep in a write that nobody takes."""

EVENTS = (
    "start",
    "args",
    "dist_init_begin",
    "dist_init_end",
    "load_begin",
    "load_progress",
    "load_end",
    "draft_load_begin",
    "draft_load_end",
    "post_load",
    "memory_pool",
    "profile",
    "compile_begin",
    "compile_progress",
    "compile_end",
    "autotune_begin",
    "autotune_progress",
    "autotune_end",
    "capture_begin",
    "capture_progress",
    "capture_end",
    "warmup_begin",
    "warmup_progress",
    "warmup_end",
    "listening",
    "ready",
    "stats",
    "heartbeat",
    "waiting",
    "lock_wait",
    "download_progress",
    "access",
    "error",
    "fatal",
    "watchdog",
    "shutdown",
)
"""What a log line can mean: the closed set a framework file maps its patterns to."""

LINE_KINDS = ("novel", "repeat", "heartbeat", "access")
"""What a line no event names can be; a recording carries them as `line`."""

ERROR_KINDS = ("traceback", "oom", "nccl", "timeout", "rank_died", "engine_dead", "exit", "other")

PHASES = (
    "spawned",
    "distributed_init",
    "loading_weights",
    "post_load",
    "memory_pool",
    "compiling",
    "capturing_graphs",
    "warming_up",
    "listening",
    "ready",
    "stopped",
)
"""Phases of a start; the index is the exported number."""

STATES = ("working", "slow", "idle", "quiet", "suspect", "stalled", "failed", "unknown", "gone")

REASONS = (
    "none",
    "idle_wait",
    "blocked_io",
    "stopped",
    "stale_lock",
    "busy_spin",
    "gpu_spin",
    "rank_dead",
    "rank_missing",
    "port_taken",
    "no_tokens",
    "health_timeout",
    "fatal_log",
    "exited",
    "out_of_memory",
    "gpu_lost",
    "driver_unresponsive",
    "waiting_remote",
    "lock_wait",
    "traced",
    "frozen",
    "paused",
    "unreadable",
    "no_evidence",
)

CLOCKS = ("barrier", "watchdog", "nccl", "gloo", "execute", "handshake", "warmup")
"""The servers' own time-outs; docs/VERDICTS.md, "The server's own time-outs"."""

STRONG_CHANNELS = ("log", "storage", "memory", "children", "gpu_memory", "gpu_bus", "gpu_power", "tokens")
AMBIGUOUS_CHANNELS = ("cpu", "gpu_utilization")
CHANNELS = STRONG_CHANNELS + AMBIGUOUS_CHANNELS
CHANNEL_STATES = ("moving", "flat", "unreadable", "absent")

SERVER_INFO_LABELS = (
    "server",
    "role",
    "framework",
    "version",
    "model",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "nnodes",
    "node_rank",
    "group",
    "speculative",
    "unit",
    "container",
    "pod",
    "namespace",
    "slurm_job",
)
"""What is known of a server besides its configured labels, in the order of the metric's labels."""

FRONTEND_NAMES = ("main", "detokenizer", "controller", "worker")
"""Processes that are no rank and are summed as rank="frontend"; `engine`, `engine1` … keep their own name."""

FRONTEND = "frontend"


@dataclass(frozen=True, slots=True)
class Signal:
    """One thing that can be observed.  `name` is the metric name without the `stallwatch_` prefix.

    `zero_is_absent`: a 0 is read and judged as any value, and has no series on `/metrics`; the help says so.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    scope: Scope = "server"
    kind: Kind = "gauge"
    zero_is_absent: bool = False

    def read(self, value: float, *labels: str) -> Reading:
        """A reading of this signal; `labels` in the order of `self.labels`."""
        return Reading(self, labels, value)

    def missing(self, reason: str, *labels: str) -> Reading:
        """Asked for and not readable; `reason` is one of READ_REASONS."""
        return Reading(self, labels, None, reason)


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one signal for one subject.  `value` None = asked for, not readable, see `reason`."""

    signal: Signal
    labels: tuple[str, ...]
    value: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One recognised log line, or a line no event names (`event` is then one of LINE_KINDS).

    `at` is the arrival on the monotonic clock in seconds (for lines found on start: the file's last change).
    `fields`: `done`/`total` or `ratio` for *_progress; `kind` for error and fatal; `running`, `waiting`,
    `generation_tokens_per_second` for stats.  Never any text of the line.
    `dated` is the Unix time of the line as far as it can be known from times printed in the log, measured
    back from the file's last change; only `check` looks at it.
    """

    at: float
    server: str
    event: str
    rank: str | None = None
    log: str = ""
    fields: Mapping[str, float | str] = field(default_factory=dict)
    dated: float | None = None


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """Identity of a process: a PID is reused, a PID with its start time (clock ticks since boot) is not."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Process:
    """A process that belongs to a server.

    `rank` is a rank name (`TP3`) or one of main, engine, engine1 …, detokenizer, controller, worker.
    """

    id: ProcessId
    rank: str
    ppid: int = 0
    comm: str = ""
    user: int = 0

    @property
    def label(self) -> str:
        """The `rank` label: its own name, or `frontend` for processes that are summed."""
        return FRONTEND if self.rank in FRONTEND_NAMES else self.rank

    @property
    def is_rank(self) -> bool:
        return is_rank_name(self.rank)

    @property
    def is_engine(self) -> bool:
        return self.rank.startswith("engine")


@lru_cache(maxsize=4096)
def is_rank_name(name: str) -> bool:
    """`TP3`, `DP0-PP1-TP3`, and whatever a recording calls its ranks.  `main`, `engine1`, `frontend` are none."""
    return name not in _NO_RANKS and _ENGINE.fullmatch(name) is None


_NO_RANKS = frozenset((*FRONTEND_NAMES, FRONTEND, ""))
_ENGINE = re.compile(r"engine\d*")


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where one stream of a server goes.

    `name` is the `log` label: short file name, or `stdout`, `stderr`.  `path` is opened by the reader as it
    stands (`<proc>/<pid>/fd/1`, a container's file, or a configured file), or names a unit's journal
    (`journal:<namespace>:<unit>`).  `reason` is set when there is nothing to read:
    `absent` (pipe, terminal, /dev/null: no log evidence) or one of READ_REASONS.  `owner` (a user's id, set
    for configured files): only a file of this user or of root is read, and no link is followed to it; None =
    do not check.
    """

    name: str
    path: str = ""
    reason: str | None = None
    device: int = 0
    inode: int = 0
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class LogCounts:
    """What was counted of one log, files that are gone included.

    `streams`: by "", `stdout` or `stderr` its counters, in the order of the source; events and errors are those of all.
    """

    streams: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogSums:
    """One log over a restart of ours: what was counted of it when its file was read up to `told` bytes.

    `key` and `position` are keyed hashes: of server, start and log, and of these and the file ("" = no file was open).
    """

    key: str
    position: str
    told: int
    mark: str
    counts: LogCounts


@dataclass(frozen=True, slots=True)
class HealthTarget:
    """A configured health URL; `bearer_file` names a file whose content is sent as a bearer token."""

    url: str
    insecure: bool = False
    bearer_file: str | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """One start of one inference server on this node, as discovery sees it."""

    name: str
    framework: str
    role: Literal["server", "embedded"]
    root: ProcessId
    started_at: float  # Unix seconds
    processes: tuple[Process, ...]
    logs: tuple[LogPlace, ...] = ()
    ports: tuple[int, ...] = ()
    health: HealthTarget | None = None
    starts: int = 1
    version: str = ""
    model: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expected_ranks: tuple[str, ...] = ()  # names of this node's ranks, where they are known beforehand
    nnodes: int = 1
    node_rank: int = 0
    group: str = ""
    speculative: str = ""
    unit: str = ""
    container: str = ""
    pod: str = ""
    namespace: str = ""
    pod_uid: str = ""  # tells its pod from one of the same name that comes after it
    slurm_job: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    metrics_enabled: bool = True
    timeouts: Mapping[str, float] = field(default_factory=dict)  # clock -> seconds, where the server was told so
    eager: bool = False  # it was told to capture no graphs

    @property
    def ranks(self) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.is_rank)

    @property
    def ranks_expected(self) -> int:
        """This node's share of the ranks its arguments ask for."""
        if self.expected_ranks:
            return len(self.expected_ranks)
        world = self.tensor_parallel * self.pipeline_parallel * self.data_parallel
        return max(1, world // max(1, self.nnodes))


@dataclass(frozen=True, slots=True)
class RankName:
    """A log line said which rank a process is (`pid` as the log prints it, in the server's PID namespace)."""

    server: str
    pid: int
    rank: str


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket that belongs to a server, with the address a client on this node can use."""

    server: str
    port: int
    address: str  # literal IPv4 or IPv6, "127.0.0.1" for a wildcard
    reachable: bool = True  # False: in another network namespace, on its loopback only


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A process of a server (PID as in our /proc) uses a card, by the card's own list or its last one."""

    gpu: str
    pid: int


Observation = Reading | Event | Server | RankName | Listener | GpuUse
"""Everything a source may yield.  Readings and events are evidence (and what a recording holds); the others
are what sources tell each other through the Scene."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What the other sources found so far; made by the daemon, handed to every read."""

    servers: tuple[Server, ...] = ()
    rank_names: tuple[RankName, ...] = ()
    listeners: tuple[Listener, ...] = ()
    ready: frozenset[str] = frozenset()  # names of the servers whose present start became ready
    gpu_uses: tuple[GpuUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One finished read of one source.  Times are monotonic seconds.  A failed read carries no readings."""

    source: str
    started: float
    finished: float
    cpu_seconds: float = 0.0
    readings: tuple[Reading, ...] = ()
    events: tuple[Event, ...] = ()
    servers: tuple[Server, ...] | None = None
    rank_names: tuple[RankName, ...] = ()
    listeners: tuple[Listener, ...] | None = None
    gpu_uses: tuple[GpuUse, ...] | None = None
    error: str | None = None  # class name of the exception, never its text
    wall: float | None = None  # Unix time at which it began, as the source was told


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """How a source does, apart from what it read.  Times are monotonic seconds; None = never."""

    source: str
    success: bool | None
    duration_seconds: float | None
    last_success: float | None
    in_flight_since: float | None


@dataclass(frozen=True, slots=True)
class ChannelState:
    """One channel of one server: `state` of CHANNEL_STATES, seconds since its last move (None = never)."""

    channel: str
    state: str
    age_seconds: float | None


@dataclass(frozen=True, slots=True)
class GpuState:
    """One card a rank uses, or a MIG instance; None = not known.

    `held_bytes` is what the rank holds on it; everything else is the whole card's, whoever else is on it.
    """

    gpu: str  # UUID
    index: str = ""  # "3", of a MIG instance "3:1"; empty while not known
    held_bytes: float | None = None
    used_bytes: float | None = None
    utilization: float | None = None  # 0 to 1
    power_watts: float | None = None
    idle_power_watts: float | None = None  # with memory held and nothing running; learned


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of one rank (or engine); None = not known."""

    rank: str
    pid: int | None = None
    gpu: str | None = None
    phase: str | None = None
    load_progress: float | None = None
    alive: bool | None = None
    progress_age_seconds: float | None = None
    wait: Mapping[str, int] | None = None
    main_wait: str | None = None
    gpus: tuple[GpuState, ...] = ()  # in order of their indices; `gpu` is the first one's UUID
    load_counts: tuple[int, int] | None = None  # shards (or other parts) read, and all of them


@dataclass(frozen=True, slots=True)
class Verdict:
    """State, reason, since when (monotonic seconds), and the rank the others wait for."""

    state: str
    reason: str
    since: float
    suspect_rank: str | None = None


@dataclass(frozen=True, slots=True)
class ServerReport:
    """Everything one tick says about one server.  Moments are Unix seconds."""

    server: Server
    verdict: Verdict
    since_timestamp: float
    phase: str
    phase_start_timestamp: float
    phase_budget_seconds: float
    ready: bool
    ranks_alive: int | None
    channels: tuple[ChannelState, ...]
    ranks: tuple[RankState, ...]
    starts: int
    stalled_seconds: float
    startup_seconds: float | None = None
    advice: tuple[str, ...] = ()  # sentences for `check`: what to watch longer, which capability helps
    deadlines: Mapping[str, float] = field(default_factory=dict)  # clock -> when that time-out of its own strikes
    similar: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # speculative yes, no -> starts, the last


@dataclass(frozen=True, slots=True)
class Report:
    """What one tick publishes.  `/metrics`, the page, the JSON and the command line render this one object."""

    timestamp: float  # Unix seconds
    monotonic: float
    readings: tuple[Reading, ...]  # fresh ones only
    servers: tuple[ServerReport, ...]
    health: tuple[SourceHealth, ...]
    read_errors: Mapping[tuple[str, str], int]  # (collector, reason) -> count
    startups: tuple[StartupHistogram, ...] = ()
    config_reload: tuple[bool, float] = (True, 0.0)  # last one successful, Unix time of the last success
    dropped: Mapping[str, int] = field(default_factory=dict)  # series dropped by reason
    outcomes: tuple[StartOutcome, ...] = ()


@dataclass(frozen=True, slots=True)
class StartupHistogram:
    """Successful starts by duration, cumulative counts per upper bound in seconds (the last is +Inf)."""

    framework: str
    model: str
    speculative: str
    counts: tuple[int, ...]
    total_seconds: float


STARTUP_BUCKETS_SECONDS = (30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0)

START_OUTCOMES = ("ready", "failed", "stalled", "stopped")
"""How a start ends: it becomes ready; it fails; it stalled and was ended without having become ready; it was ended
before it could."""

OUTCOME_BUCKETS_SECONDS = (120.0, 600.0, 1800.0, 7200.0)


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """Ends of starts of one kind of server, and what stalls cost.

    `durations`: outcome -> cumulative counts per bound of OUTCOME_BUCKETS_SECONDS and +Inf, and the seconds of all.
    `failures`: starts that failed or stalled, by reason; `stalled_seconds`: by reason, of ready servers too.
    """

    framework: str
    version: str
    model: str
    speculative: str
    durations: Mapping[str, tuple[tuple[int, ...], float]]
    failures: Mapping[str, int]
    stalled_seconds: Mapping[str, float]
