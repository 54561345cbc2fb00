"""The signals a verdict may look at.

A signal that is only exported is declared in the module that reads it; it moves here when a check needs it.
HELP texts name the source and the unit.
"""

from __future__ import annotations

from .model import Signal

_RANK = ("server", "rank")

# --- processes ---------------------------------------------------------------------------------------------
SERVER_ALIVE = Signal("server_alive", "1 while the first process of the server lives.", ("server",))
SERVER_START = Signal(
    "server_start_timestamp_seconds",
    "Unix time at which the first process of the server started (/proc/PID/stat).",
    ("server",),
)
SERVER_STARTS = Signal(
    "server_starts_total",
    "Starts of the server seen by this exporter; 0 for a configured server that has not come.",
    ("server",),
    kind="counter",
)
RANK_ALIVE = Signal(
    "rank_alive",
    "1 while the process of the rank (or engine) lives; 0 when it is gone or a zombie on two looks.",
    _RANK,
    "rank",
)
RANK_INFO = Signal(
    "rank_info",
    "Which process (in the exporter's PID namespace) and which GPU belong to a rank; always 1.",
    ("server", "rank", "pid", "gpu"),
    "rank",
    "info",
)
CPU_SECONDS = Signal(
    "process_cpu_seconds_total",
    "CPU time of the rank's process, user and system, all threads, in seconds.",
    _RANK,
    "rank",
    "counter",
)
PAGE_FAULTS = Signal(
    "process_page_faults_total",
    "Page faults of the rank's process (/proc/PID/stat); kind is major or minor.",
    ("server", "rank", "kind"),
    "rank",
    "counter",
)
STORAGE_READ = Signal(
    "process_storage_read_bytes_total",
    "Bytes the rank's process caused to be read from storage (read_bytes of /proc/PID/io).",
    _RANK,
    "rank",
    "counter",
)
READ_BYTES = Signal(
    "process_read_bytes_total",
    "Bytes the rank's process read by read() and its like, page cache included (rchar of /proc/PID/io).",
    _RANK,
    "rank",
    "counter",
)
WRITTEN_BYTES = Signal(
    "process_written_bytes_total",
    "Bytes the rank's process wrote by write() and its like (wchar of /proc/PID/io).",
    _RANK,
    "rank",
    "counter",
)
RESIDENT_MEMORY = Signal(
    "process_resident_memory_bytes", "Resident memory of the rank's process in bytes.", _RANK, "rank"
)
CHILD_PROCESSES = Signal(
    "server_child_processes",
    "Live child processes of ranks and engines; kind is compiler or other.",
    ("server", "kind"),
)
CHILD_CPU = Signal(
    "server_child_cpu_seconds_total",
    "CPU time of child processes of ranks and engines in seconds, live and ended; kind is compiler or other.",
    ("server", "kind"),
    kind="counter",
)

# --- threads -----------------------------------------------------------------------------------------------
THREADS = Signal(
    "threads",
    "Threads by what they wait in: running futex poll sleep disk stopped other unreadable "
    "(/proc/PID/task/*/syscall, else wchan).",
    ("server", "rank", "wait"),
    "rank",
)
MAIN_THREAD = Signal(
    "main_thread",
    "What the main thread of the rank waits in; only the current class is exported, as 1. "
    "One of: running futex poll sleep disk stopped other.",
    ("server", "rank", "wait"),
    "rank",
)

# --- sockets and endpoints ---------------------------------------------------------------------------------
PORT_LISTENING = Signal("port_listening", "1 while a process of the server listens on the port.", ("server", "port"))
HEALTH_STATUS = Signal(
    "health_status",
    "HTTP status of the last answer; absent when there was none; endpoint is health, models or metrics.",
    ("server", "endpoint"),
)
REQUESTS_RUNNING = Signal("server_requests_running", "Requests the server works on.", ("server",))
REQUESTS_WAITING = Signal("server_requests_waiting", "Requests that wait in the server's queue.", ("server",))
GENERATED_TOKENS = Signal(
    "server_generated_tokens_total",
    "Tokens generated, by the server's own count.",
    ("server",),
    kind="counter",
)
PROMPT_TOKENS = Signal(
    "server_prompt_tokens_total",
    "Prompt tokens taken in, by the server's own count.",
    ("server",),
    kind="counter",
)
FINISHED_REQUESTS = Signal(
    "server_finished_requests_total",
    "Requests finished, by the server's own count.",
    ("server",),
    kind="counter",
)

# --- logs --------------------------------------------------------------------------------------------------
LOG_BYTES = Signal("log_bytes_total", "Bytes of the log read so far.", ("server", "log"), "log", "counter")
