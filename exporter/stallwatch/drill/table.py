"""The table of conditions."""

from __future__ import annotations

from .conditions import Condition, UnknownSettingError
from .steps import Launch, Step

_VLLM = Launch("vllm")

_LAST_LINE = "the last line of progress"

CONDITIONS: tuple[Condition, ...] = (
    Condition("normal", "loads, becomes ready, then nobody asks anything", "idle"),
    # --- ranks that wait for one --------------------------------------------------------------------------
    Condition(
        "barrier-deadlock",
        "every rank has loaded; all but one wait in a barrier for one that sleeps",
        "stalled",
        "idle_wait",
        names_culprit=True,
        twin="phantom-hang",
        steps=(Step("loaded", "sleep"),),
    ),
    Condition(
        "phantom-hang",
        "looks like barrier-deadlock, but the last rank still reads, slowly; then the server is ready",
        "idle",
        logs_access=False,
        total_lines=312,
        steps=(Step("loaded", "read"),),
    ),
    Condition(
        "slow-load",
        "every rank reads its weights slowly and the log is silent; then the server is ready",
        "idle",
        steps=(Step("loading", "read", "all"),),
    ),
    Condition(
        "busy-spin",
        "barrier-deadlock with one waiter that spins on the CPU instead of sleeping",
        "suspect",
        "busy_spin",
        twin="busy-compile",
        steps=(Step("loaded", "sleep"), Step("loaded", "spin", "spinner")),
    ),
    Condition(
        "stopped-rank",
        "one rank is stopped by a signal after its load; the others wait for it in a barrier",
        "stalled",
        "stopped",
        names_culprit=True,
        twin="briefly-stopped-rank",
        steps=(Step("loaded", "stop"),),
    ),
    Condition(
        "briefly-stopped-rank",
        "one rank is stopped for half a window, then goes on; the server is ready",
        "idle",
        steps=(Step("loaded", "stop-briefly"),),
    ),
    Condition(
        "gpu-spin",
        "barrier-deadlock in which every card spins in a collective at little more than idle power",
        "suspect",
        "gpu_spin",
        names_culprit=True,
        twin="normal",
        steps=(Step("loaded", "sleep"),),
        gpu_utilization=1.0,
        gpu_watts=152.0,
        needs_cards=True,
    ),
    # --- ranks that are gone ------------------------------------------------------------------------------
    Condition(
        "dead-rank",
        "one rank dies without a word after its load and is waited for; nobody tells the others",
        "failed",
        "rank_dead",
        names_culprit=True,
        twin="normal",
        steps=(Step("loaded", "die"), Step("starting", "reap", "main")),
    ),
    Condition(
        "zombie-rank",
        "one rank dies without a word after its load; its parent never looks, so it stays as a zombie",
        "failed",
        "rank_dead",
        names_culprit=True,
        twin="normal",
        steps=(Step("loaded", "die"),),
    ),
    Condition(
        "oom-killed-rank",
        "one rank takes more memory than its cgroup allows after its load; the kernel kills it",
        "failed",
        "out_of_memory",
        names_culprit=True,
        twin="normal",
        note="needs the right to make a memory cgroup",
        steps=(Step("before", "make-cgroup", "launcher"), Step("loaded", "take-memory")),
    ),
    # --- ranks in the kernel, at locks, at downloads ------------------------------------------------------
    Condition(
        "blocked-io",
        "one rank is in uninterruptible sleep (state D) after its load, as at a disk that does not answer",
        "stalled",
        "blocked_io",
        names_culprit=True,
        twin="briefly-blocked-io",
        steps=(Step("loaded", "block"),),
    ),
    Condition(
        "briefly-blocked-io",
        "the same, for longer than a window and shorter than a stall; then the server is ready",
        "idle",
        steps=(Step("loaded", "block-briefly"),),
    ),
    Condition(
        "stale-lock",
        "every rank waits for the lock file of a build that was killed (torch extensions)",
        "stalled",
        "stale_lock",
        twin="released-lock",
        note="where not every process of the node can be seen, nobody knows that the lock is stale: suspect, lock_wait",
        steps=(Step("before", "leave-lock", "launcher"), Step("loaded", "await-file", "all")),
    ),
    Condition(
        "held-lock",
        "every rank waits for the lock of a download (Hugging Face) that another live process holds",
        "suspect",
        "lock_wait",
        twin="released-lock",
        steps=(Step("before", "hold-lock", "launcher"), Step("loaded", "await-lock", "all")),
    ),
    Condition(
        "released-lock",
        "the same, but it is released before a stall; then the server is ready",
        "idle",
        steps=(Step("before", "hold-lock-briefly", "launcher"), Step("loaded", "await-lock", "all")),
    ),
    Condition(
        "stuck-download",
        "vLLM downloads its weights; the other side falls silent and keeps the connection",
        "stalled",
        "idle_wait",
        since=_LAST_LINE,
        twin="slow-download",
        launch=_VLLM,
        ranks=1,
        steps=(Step("loading", "download-until-stuck", "first"),),
    ),
    Condition(
        "slow-download",
        "vLLM downloads its weights slowly: a bar is all that moves; then the server is ready",
        "idle",
        launch=_VLLM,
        ranks=1,
        steps=(Step("loading", "download", "first"),),
    ),
    # --- compilers ----------------------------------------------------------------------------------------
    Condition(
        "stuck-compile",
        "the first rank waits for a compiler that sleeps; the others wait for the rank",
        "stalled",
        "idle_wait",
        since="the line that begins the compilation",
        twin="busy-compile",
        steps=(Step("compiling", "compile-for-ever", "first"),),
    ),
    Condition(
        "busy-compile",
        "the first rank waits for compilers that work (at low priority) and say nothing; then the server is ready",
        "idle",
        steps=(Step("compiling", "compile", "first"),),
    ),
    # --- logs ---------------------------------------------------------------------------------------------
    Condition(
        "heartbeats-only",
        "vLLM in a barrier-deadlock whose engine says every minute that it waits",
        "stalled",
        "idle_wait",
        names_culprit=True,
        since=_LAST_LINE,
        twin="slow-bar",
        launch=_VLLM,
        steps=(Step("loaded", "sleep"), Step("starting", "beat", "engine")),
    ),
    Condition(
        "slow-bar",
        "vLLM loads slowly: a bar redrawn with carriage returns is all that moves; then the server is ready",
        "idle",
        launch=_VLLM,
        steps=(Step("loading", "crawl", "first"),),
    ),
    Condition(
        "buffered-log",
        "vLLM reads slowly and writes its log in blocks: no line for as long as it lives; then health answers",
        "idle",
        launch=Launch("vllm", log="buffered"),
        steps=(Step("loading", "read", "all"),),
    ),
    Condition(
        "log-to-nowhere",
        "barrier-deadlock whose output goes to /dev/null: with no log and no GPU nobody can tell",
        "unknown",
        "no_evidence",
        since="the last bytes read",
        twin="buffered-log",
        launch=Launch(log="nowhere"),
        steps=(Step("loaded", "sleep"),),
    ),
    # --- ports and requests -------------------------------------------------------------------------------
    Condition(
        "port-taken",
        "every rank is ready, but another process listens on the server's port",
        "stalled",
        "port_taken",
        since=_LAST_LINE,
        twin="freed-port",
        steps=(Step("before", "hold-port", "launcher"),),
    ),
    Condition(
        "freed-port",
        "the same, but the port is freed before a stall; then the server is ready",
        "idle",
        steps=(Step("before", "hold-port-briefly", "launcher"),),
    ),
    Condition(
        "health-hangs",
        "ready, accepts connections and never answers",
        "stalled",
        "health_timeout",
        since="the first question without an answer (three in a row, of 5s each, are needed)",
        twin="normal",
        steps=(Step("serving", "hang", "main"),),
    ),
    Condition(
        "serving",
        "vLLM answers the requests of a few clients, one after the other",
        "working",
        launch=_VLLM,
        steps=(Step("serving", "ask", "launcher"),),
    ),
    Condition(
        "serving-wedge",
        "vLLM answers some requests, then they run and no token comes; health answers",
        "stalled",
        "no_tokens",
        since="the last token",
        twin="serving",
        launch=_VLLM,
        steps=(Step("serving", "ask", "launcher"), Step("serving", "wedge", "main")),
    ),
    # --- other shapes -------------------------------------------------------------------------------------
    Condition(
        "restart-loop",
        "a supervisor starts a server that ends without a word after 2 s, again and again",
        "working",
        note="each start is judged by itself; stallwatch_server_starts_total grows",
        launch=Launch(supervised=True),
        steps=(Step("starting", "vanish", "main"),),
    ),
    Condition(
        "follower",
        "the second of two nodes: becomes ready without saying so and without a port",
        "idle",
        launch=Launch(nodes=2),
    ),
    Condition(
        "stuck-follower",
        "the second of two nodes waits for the first, which never comes",
        "suspect",
        "waiting_remote",
        since=_LAST_LINE,
        twin="follower",
        launch=Launch(nodes=2),
        steps=(Step("joining", "wait", "all"),),
    ),
    Condition(
        "embedded",
        "a vLLM engine inside a script: no port, no word that it is ready",
        "idle",
        launch=Launch("vllm", embedded=True),
    ),
    Condition(
        "stuck-embedded",
        "the same in a barrier-deadlock",
        "stalled",
        "idle_wait",
        names_culprit=True,
        since=_LAST_LINE,
        twin="embedded",
        launch=Launch("vllm", embedded=True),
        steps=(Step("loaded", "sleep"),),
    ),
    Condition(
        "two-servers",
        "a server in a barrier-deadlock, and a second one beside it on the node that is ready and idle",
        "stalled",
        "idle_wait",
        names_culprit=True,
        twin="normal",
        also="normal",
        steps=(Step("loaded", "sleep"),),
    ),
)


def find_condition(name: str) -> Condition:
    for condition in CONDITIONS:
        if condition.name == name:
            return condition
    allowed = ", ".join(condition.name for condition in CONDITIONS)
    raise UnknownSettingError(f"{name!r} is no condition; allowed are {allowed}")
