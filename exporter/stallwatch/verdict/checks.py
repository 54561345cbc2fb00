"""The checks, in order of certainty.  Each looks at Evidence and either speaks (a Finding) or abstains (None).

CHECKS is the whole of the rules; the first that speaks wins.  In words: docs/VERDICTS.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import Thresholds
from ..model import FRONTEND, WRITE, Verdict, is_rank_name
from .evidence import Evidence, RankEvidence
from .naming import awaited_rank, first_dead

ROOT_GRACE_SECONDS = 60.0
"""How long a dead set of ranks waits for its root, and within which a death confirms a fatal line."""

SHUTDOWN_LAG_SECONDS = 1.0
"""A fatal line that is older than the shutdown line by more than this was no part of the orderly end."""

SCOPE_GRACE_SECONDS = 10.0
"""How long after the first process the rest of its container, unit, job step or session may take to end."""

KILL_BEFORE_SECONDS, KILL_AFTER_SECONDS = 30.0, 15.0
"""A kill by the kernel, seen so long before or after a death was seen, explains it: each is read by another source."""

KILL_BEFORE_END_SECONDS = 10.0
"""The same for a server that may have ended by itself: the kernel counts kills of the whole node."""

TIMEOUTS_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check says."""

    state: str
    reason: str = "none"
    suspect_rank: str | None = None


SPINNING_PHASES = ("capturing_graphs", "warming_up")
"""Where ranks wait on their cards for one that is late, for long: only all of them, for twice the time, are stuck."""

Check = Callable[[Evidence, Thresholds, Verdict | None], Finding | None]


# --- over, or certain --------------------------------------------------------------------------------------


def stays_failed(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Over is over: until the name starts again (which begins another timeline).

    Only the kernel's kill, which is counted elsewhere and may be read a moment after the death, still explains it.
    """
    if previous is None or previous.state != "failed":
        return None
    first = max(_ends(evidence), default=None)
    killed = previous.reason in ("rank_dead", "exited") and not _is_job(evidence) and _was_killed(evidence, first)
    return Finding("failed", "out_of_memory" if killed else previous.reason, previous.suspect_rank)


def never_came(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A configured server without a process."""
    return None if evidence.known else Finding("gone")


def ended_orderly(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """The server said that it ends, or its unit is being stopped, and its first process is gone."""
    if evidence.root_gone_age is None or not evidence.ends_orderly or _fatal_before_shutdown(evidence):
        return None
    return Finding("gone")


def out_of_memory(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """The kernel killed a process for memory at the time at which one of this server went."""
    if _is_job(evidence) or not any(_was_killed(evidence, age) for age in _ends(evidence)):
        return None
    return Finding("failed", "out_of_memory", first_dead(evidence))


def _is_job(evidence: Evidence) -> bool:
    """An engine inside a program that may have done its work: such processes come and go."""
    return evidence.role == "embedded" and _may_have_been_done(evidence)


def _was_killed(evidence: Evidence, death_age: float | None) -> bool:
    """Whether the kernel's last kill may have been this death."""
    if evidence.oom_age is None or death_age is None or evidence.ends_orderly:
        return False
    before = KILL_BEFORE_END_SECONDS if _may_have_been_done(evidence) else KILL_BEFORE_SECONDS
    return -KILL_AFTER_SECONDS <= evidence.oom_age - death_age <= before


def _ends(evidence: Evidence) -> list[float]:
    """Ages of the deaths of ranks, engines and the first process."""
    ends = [age for age, _ in evidence.deaths]
    return ends if evidence.root_gone_age is None else [*ends, evidence.root_gone_age]


def engine_ended(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """An engine inside a program is gone as a whole and the program lives on: `del llm` in a notebook.

    Before it was ready this is an end of its work only where no log could tell of a failure.
    """
    over = evidence.deaths and not any(rank.alive for rank in evidence.ranks)
    if evidence.role != "embedded" or not over or evidence.root_gone_age is not None:
        return None
    if evidence.fatal_age is not None or not _may_have_been_done(evidence):
        return None
    return Finding("idle")


def _may_have_been_done(evidence: Evidence) -> bool:
    is_told = evidence.log == "readable" and evidence.log_speaks
    return evidence.ready or (evidence.role == "embedded" and not is_told)


def gpu_lost(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A card that a live rank used is lost.  Of a death that is seen only after that it is the cause."""
    if evidence.ends_orderly or not evidence.lost_cards:
        return None
    died = {rank: age for age, rank in evidence.deaths}
    lost = [(age, rank) for age, rank in evidence.lost_cards if rank != FRONTEND and died.get(rank, 0.0) <= age]
    if not lost:
        return None
    first = {rank for age, rank in lost if age >= lost[0][0] - 1e-6 and is_rank_name(rank)}
    return Finding("failed", "gpu_lost", first.pop() if len(first) == 1 and evidence.rank_count > 1 else None)


def rank_dead(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A rank or engine that was seen is gone while others live.  When all went together: wait for the root."""
    if not evidence.deaths or evidence.ends_orderly:
        return None
    waited = max(age for age, _ in evidence.deaths)
    if not evidence.live_ranks and (evidence.root_gone_age is not None or waited < ROOT_GRACE_SECONDS):
        return None
    return Finding("failed", "rank_dead", first_dead(evidence))


def fatal_log(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A fatal line, confirmed by a death or by a window in which nothing moved."""
    if evidence.fatal_age is None or (evidence.ends_orderly and not _fatal_before_shutdown(evidence)):
        return None
    confirmed = any(abs(age - evidence.fatal_age) <= ROOT_GRACE_SECONDS for age in _ends(evidence))
    silent = _fell_silent(evidence, evidence.progress_age, thresholds.window)
    if evidence.ready:  # in one that owes nothing, nothing moves anyway
        silent = silent and _fell_silent(evidence, evidence.unserved_age or 0.0, thresholds.window)
    if confirmed or (silent and _nothing_moves(evidence, thresholds.window)):
        rank = first_dead(evidence) if evidence.deaths else awaited_rank(evidence, thresholds.window)
        return Finding("failed", "fatal_log", rank)
    return None


def _fell_silent(evidence: Evidence, silence: float, window: float) -> bool:
    """Silent for a window after the fatal line, and since then: what went on for a window more was not killed by it."""
    fatal = evidence.fatal_age or 0.0
    return min(silence, fatal) >= window and fatal - silence <= window


def _fatal_before_shutdown(evidence: Evidence) -> bool:
    fatal, shutdown = evidence.fatal_age, evidence.shutdown_age
    return fatal is not None and shutdown is not None and fatal - shutdown > SHUTDOWN_LAG_SECONDS


def exited(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """The first process is gone without a word: a failure before ready, an end after (we see no exit code).

    Together with its container, unit, job step or session it was ended by whoever ended that; unless its unit is
    known to have failed by itself.
    """
    if evidence.root_gone_age is None:
        return None
    ended_with_scope = evidence.scope_alive is False and evidence.stopping is not False
    if evidence.fatal_age is None and (_may_have_been_done(evidence) or ended_with_scope):
        return Finding("gone")
    if evidence.scope_alive and evidence.root_gone_age < SCOPE_GRACE_SECONDS:
        return None
    return Finding("failed", "exited", first_dead(evidence))


# --- serving -----------------------------------------------------------------------------------------------


def health_timeout(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """The health endpoint gave no answer several times in a row, and nothing is served either."""
    lasts = evidence.timeouts >= TIMEOUTS_IN_A_ROW and evidence.timeouts_span >= thresholds.serve_stall_after
    if not evidence.ready or evidence.role == "embedded" or evidence.demand == 0 or not lasts:
        return None
    if evidence.tokens_age < thresholds.serve_stall_after:
        return None
    return _serving_stall("health_timeout", evidence, thresholds, _at_rest(evidence))


def no_tokens(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Work is owed, and no token and no finished request comes."""
    if not evidence.ready or not evidence.demand or evidence.unserved_age is None:
        return None
    if evidence.unserved_age < thresholds.serve_stall_after or "tokens" not in _readable(evidence):
        return None
    return _serving_stall("no_tokens", evidence, thresholds, evidence.tokens_counted and _at_rest(evidence))


def _serving_stall(reason: str, evidence: Evidence, thresholds: Thresholds, at_rest: bool) -> Finding:
    held = _held(evidence)
    if evidence.paused or held:
        return Finding("suspect", "paused" if evidence.paused else held, _traced_rank(evidence))
    return Finding("stalled" if at_rest else "suspect", reason, awaited_rank(evidence, thresholds.window))


def _at_rest(evidence: Evidence) -> bool:
    """Its GPUs do no work; where that is not known: every rank and engine is flat on CPU, and no card is used."""
    if evidence.cards_rest is not None:
        return evidence.cards_rest
    return evidence.cpu_readable and evidence.is_flat("cpu") and not evidence.ambiguous_moving


def _readable(evidence: Evidence) -> set[str]:
    return {channel.channel for channel in evidence.channels if channel.state in ("moving", "flat")}


def is_ready(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Ready: working while work is owed, else idle whatever threads and log do."""
    if not evidence.ready:
        return None
    if evidence.demand is None:
        return Finding("idle", "no_evidence")
    return Finding("working" if evidence.demand > 0 else "idle")


# --- from absence ------------------------------------------------------------------------------------------


def stopped(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """State T on a rank or engine for one window, nothing else moving.  Of a ready server: while work is owed."""
    if evidence.frozen or (evidence.ready and (evidence.unserved_age or 0.0) < thresholds.window):
        return None
    halted = [r for r in evidence.ranks if _lasts(r.stopped_age, thresholds.window) and not r.traced]
    if not halted or not _nothing_moves(evidence, thresholds.window):
        return None
    named = halted[0].rank if len(halted) == 1 and evidence.rank_count > 1 else None
    return Finding("stalled", "stopped", named or awaited_rank(evidence, thresholds.window))


def _lasts(age: float | None, seconds: float) -> bool:
    return age is not None and age >= seconds


def _nothing_moves(evidence: Evidence, seconds: float) -> bool:
    """Nothing moved for so long, and enough could be read all the time to say so."""
    silent = evidence.progress_age >= seconds and not evidence.ambiguous_moving
    return silent and can_conclude(evidence, seconds)


def can_conclude(evidence: Evidence, seconds: float) -> bool:
    """See docs/VERDICTS.md, "Sufficient evidence": whether `seconds` of silence prove anything."""
    if not evidence.storage_readable or evidence.watched_age < seconds:
        return False
    return evidence.log == "readable" or (evidence.gpu_readable and evidence.progress_age >= 2 * seconds)


def stall_after(evidence: Evidence, thresholds: Thresholds) -> float:
    """Silence that is a stall: longer in a phase whose counter takes long steps."""
    return max(thresholds.stall_after, evidence.stretch)


def progresses(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    if evidence.progress_age > thresholds.window:
        return None
    slow = evidence.phase_age > thresholds.budget(evidence.phase)
    return Finding("slow" if slow else "working")


def quiet(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    return Finding("quiet") if evidence.progress_age < stall_after(evidence, thresholds) else None


def cannot_tell(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Too little is readable, or was watched for too short, to conclude anything from silence.

    What was concluded before outlasts a look that fails; one in a minute would be a page in a minute.  Unless another
    look sees that somebody holds the server by now.
    """
    if can_conclude(evidence, stall_after(evidence, thresholds)):
        return None
    if evidence.blinks and previous is not None and previous.state in ("stalled", "suspect"):
        before = Finding(previous.state, previous.reason, previous.suspect_rank)
        return held_by_somebody(evidence, thresholds, previous) or before
    return Finding("unknown", "no_evidence" if evidence.storage_readable else "unreadable")


def held_by_somebody(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A frozen cgroup, a debugger: somebody's wish, at most suspect."""
    held = _held(evidence)
    return Finding("suspect", held, _traced_rank(evidence)) if held else None


def _held(evidence: Evidence) -> str:
    if evidence.frozen:
        return "frozen"
    return "traced" if any(rank.traced for rank in evidence.ranks) else ""


def _traced_rank(evidence: Evidence) -> str | None:
    traced = [rank.rank for rank in evidence.ranks if rank.traced and not rank.is_engine]
    return traced[0] if len(traced) == 1 and evidence.rank_count > 1 else None


def gpu_spin(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A card is always used, its memory never, at idle power: a collective waits for somebody who does not come.

    What was concluded before goes on until a card shows otherwise: after a restart of ours their figures come late, and
    a driver may hang, too.
    """
    before = previous if previous is not None and previous.reason == "gpu_spin" else None
    if before is not None and evidence.is_unread("gpu_utilization"):
        return Finding(before.state, "gpu_spin", before.suspect_rank)
    spins = [spin for spin in evidence.spins if before is not None or spin.age >= thresholds.window]
    if not spins:
        return None
    rank = awaited_rank(evidence, thresholds.window)
    if _may_come(evidence) or not (
        (before is not None and before.state == "stalled") or _is_proven(evidence, stall_after(evidence, thresholds))
    ):
        return Finding("suspect", "gpu_spin", rank)
    if evidence.nnodes > 1:
        return Finding("suspect", "waiting_remote", rank)
    return Finding("stalled", "gpu_spin", rank)


def _may_come(evidence: Evidence) -> bool:
    """Whether there may be somebody on this node for whom the spin waits and who still comes.

    The CPU of a rank that spins is part of the spin (its thread asks the card again and again); that of any other
    process, or a card that does anything else, may be the very work that is waited for.
    """
    others = evidence.busy - {spin.rank for spin in evidence.spins}
    builds = evidence.compile_open or evidence.autotune_open
    return bool(others) or evidence.cards_work or evidence.held_lock or builds


def _is_proven(evidence: Evidence, patience: float) -> bool:
    proven = {spin.rank: spin.age for spin in evidence.spins if spin.is_proven}
    if evidence.phase not in SPINNING_PHASES:
        return bool(proven)
    live = [rank.rank for rank in evidence.ranks if rank.alive is not False and not rank.is_engine]
    lasts = min((proven.get(rank, 0.0) for rank in live), default=0.0)
    return min(lasts, evidence.progress_age) >= 2 * patience


def busy(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """An ambiguous channel moves and nothing else: at most suspect."""
    moving = evidence.ambiguous_moving
    if not moving:
        return None
    return Finding("suspect", "busy_spin" if "cpu" in moving else "none", awaited_rank(evidence, thresholds.window))


def lock_wait(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """It waits for a lock that somebody may hold: at most suspect."""
    return Finding("suspect", "lock_wait", awaited_rank(evidence, thresholds.window)) if evidence.held_lock else None


def waiting_remote(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """One node of several stands still: the cause may be on another.  Only a rule over the group pages."""
    if evidence.nnodes <= 1:
        return None
    return Finding("suspect", "waiting_remote", awaited_rank(evidence, thresholds.window))


def open_autotune(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Silent, near-idle autotunes of hours exist: at most suspect."""
    if not evidence.autotune_open:
        return None
    rank = awaited_rank(evidence, thresholds.window)
    return Finding("suspect", _reason_of_silence(evidence, thresholds, rank), rank)


def still(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Nothing moves, and enough is readable to say so."""
    rank = awaited_rank(evidence, thresholds.window)
    return Finding("stalled", _reason_of_silence(evidence, thresholds, rank), rank)


CHECKS: tuple[Check, ...] = (
    stays_failed,
    never_came,
    ended_orderly,
    out_of_memory,
    engine_ended,
    gpu_lost,
    rank_dead,
    fatal_log,
    exited,
    stopped,
    health_timeout,
    no_tokens,
    is_ready,
    progresses,
    quiet,
    cannot_tell,
    held_by_somebody,
    gpu_spin,
    busy,
    lock_wait,
    waiting_remote,
    open_autotune,
    still,
)


def _reason_of_silence(evidence: Evidence, thresholds: Thresholds, rank: str | None) -> str:
    """Why nothing moves, the surest explanation first; `none` when the threads cannot be read either."""
    if evidence.stale_lock:
        return "stale_lock"
    if evidence.driver_hangs:
        return "driver_unresponsive"
    if any(_lasts(each.disk_age, thresholds.window) or each.main_wait == WRITE for each in evidence.ranks):
        return "blocked_io"
    if evidence.missing:
        return "rank_missing"
    if evidence.port_foreign and rank is None and evidence.role == "server":
        return "port_taken"
    return "idle_wait" if evidence.threads_readable and not _any_running(evidence.ranks) else "none"


def _any_running(ranks: tuple[RankEvidence, ...]) -> bool:
    return any("running" in (rank.waits or ()) for rank in ranks)
