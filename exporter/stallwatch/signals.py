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

SERVER_SCOPE_ALIVE = Signal(
    "server_scope_alive",
    "1 while anything runs in the container, system unit, job step or login session that the server's first process "
    "was started in; absent where it is in none.",
    ("server",),
)
SERVER_STOPPING = Signal(
    "server_stopping", "1 while the server's system unit or container is being stopped on purpose.", ("server",)
)
SERVER_FROZEN = Signal(
    "server_frozen", "1 while the cgroup of the server's first process is frozen (docker pause, freezer).", ("server",)
)
RANK_TRACED = Signal(
    "rank_traced",
    "1 while a debugger or tracer is attached to the rank's process (TracerPid of /proc/PID/status, or state t); else "
    "absent.",
    _RANK,
    "rank",
    zero_is_absent=True,
)

# --- locks -------------------------------------------------------------------------------------------------
LOCK_AGE = Signal(
    "server_lock_age_seconds",
    "Age of the oldest known cache lock a process of the server may wait for; kind is build, download or other.",
    ("server", "kind"),
)
LOCK_HELD = Signal(
    "server_lock_held",
    "1 while a live process may hold that lock, 0 when none can; absent where that cannot be known "
    "(a network file system); kind is build, download or other.",
    ("server", "kind"),
)

# --- threads -----------------------------------------------------------------------------------------------
THREADS = Signal(
    "threads",
    "Threads by what they wait in: running futex poll sleep disk stopped other unreadable "
    "(/proc/PID/task/*/syscall, else wchan).  A class that no thread is in is absent; where the kernel does not tell, "
    "unreadable is the only one.",
    ("server", "rank", "wait"),
    "rank",
    zero_is_absent=True,
)
MAIN_THREAD = Signal(
    "main_thread",
    "What the main thread of the rank waits in; only the current class is exported, as 1. "
    "One of: running futex poll sleep disk stopped write (asleep in one that nobody takes) other.",
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
HEALTH_TIMEOUTS = Signal(
    "health_timeouts_total",
    "Requests to the endpoint without a complete answer in time; endpoint is health, models or metrics.",
    ("server", "endpoint"),
    kind="counter",
)
PORT_FOREIGN = Signal(
    "port_foreign",
    "1 while the server lives and does not listen, and another process listens on its port in its network namespace.",
    ("server", "port"),
)
SERVER_PAUSED = Signal(
    "server_paused", "1 while the server is in sleep mode by its own word (its memory is given back).", ("server",)
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

# --- the node ----------------------------------------------------------------------------------------------
OOM_KILLS = Signal(
    "node_oom_kills_total",
    "Processes killed by the OOM killer since boot (/proc/vmstat).",
    (),
    "node",
    "counter",
)

# --- GPUs --------------------------------------------------------------------------------------------------
_GPU = ("gpu",)
GPU_INFO = Signal(
    "gpu_info",
    "A card or MIG instance; always 1.  index and pci_bus_id are NVML's; mig is disabled, enabled, instance, or empty "
    "where the card knows no MIG.",
    ("gpu", "index", "name", "compute_capability", "driver", "pci_bus_id", "mig"),
    "gpu",
    "info",
)
GPU_SM_CLOCK = Signal("gpu_sm_clock_hertz", "Clock of the streaming multiprocessors in hertz.", _GPU, "gpu")
GPU_MEMORY_USED = Signal("gpu_memory_used_bytes", "Memory of the card in use, in bytes.", _GPU, "gpu")
GPU_UTILIZATION = Signal(
    "gpu_utilization_ratio",
    "Share of time in which a kernel ran on the card, 0 to 1; a spinning one counts.",
    _GPU,
    "gpu",
)
GPU_MEMORY_UTILIZATION = Signal(
    "gpu_memory_utilization_ratio",
    "Share of time in which memory of the card was read or written, 0 to 1.",
    _GPU,
    "gpu",
)
GPU_POWER = Signal("gpu_power_watts", "Mean power of the card over the last interval, in watts.", _GPU, "gpu")
GPU_ENERGY = Signal("gpu_energy_joules_total", "Energy the card used, in joules.", _GPU, "gpu", "counter")
GPU_POWER_LIMIT = Signal("gpu_power_limit_watts", "Power limit of the card in watts.", _GPU, "gpu")
GPU_IDLE_POWER = Signal(
    "gpu_resident_idle_power_watts",
    "Power of the card while a process holds memory on it and nothing runs, in watts; learned.",
    _GPU,
    "gpu",
)
GPU_PCIE_RECEIVE = Signal("gpu_pcie_receive_bytes_per_second", "Bytes the card received over PCIe.", _GPU, "gpu")
GPU_PCIE_TRANSMIT = Signal("gpu_pcie_transmit_bytes_per_second", "Bytes the card sent over PCIe.", _GPU, "gpu")
GPU_TENSOR_ACTIVITY = Signal(
    "gpu_tensor_activity_ratio", "Share of time in which the tensor cores worked, 0 to 1.", _GPU, "gpu"
)
GPU_DRAM_ACTIVITY = Signal(
    "gpu_dram_activity_ratio", "Share of time in which the memory interface moved data, 0 to 1.", _GPU, "gpu"
)
GPU_LOST = Signal("gpu_lost", "1 while the card was there before and does not answer any more.", _GPU, "gpu")
GPU_UNOWNED_MEMORY = Signal(
    "gpu_unowned_memory_bytes",
    "Memory of the card in use that no live process is known to hold, in bytes.",
    _GPU,
    "gpu",
)
GPU_PROCESS_MEMORY = Signal(
    "gpu_process_memory_bytes",
    "Memory of the card that a rank holds, in bytes; server and rank are empty for processes of no known server.",
    ("gpu", "server", "rank"),
    "gpu",
)
GPU_CALL_IN_FLIGHT = Signal(
    "gpu_call_in_flight_seconds",
    "Seconds the present call into the GPU driver has been running, counted once it is overdue; 0 when none is.",
    (),
    "node",
)
