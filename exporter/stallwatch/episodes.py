"""The story of every server name across ticks: verdict, since when, stalled time, starts that became ready.

Pure: the same code judges live results and recordings; only `daemon` (or `replay`) owns a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from . import signals
from .config import Thresholds
from .deadlines import OwnTimeouts, ranks_of_a_copy, serving_deadlines
from .learned import Learned
from .model import (
    CHANNELS,
    STARTUP_BUCKETS_SECONDS,
    STRONG_CHANNELS,
    ProcessId,
    RankState,
    Server,
    ServerReport,
    StartupHistogram,
    Verdict,
    is_rank_name,
)
from .outcomes import MOST_KINDS, Outcomes
from .restarts import Restarts
from .rights import NO_RIGHT
from .server_timeline import ServerTimeline, natural
from .timeline import Timeline
from .verdict import Evidence, gather, judge
from .verdict.evidence import rank_progress_age

FAILED_KEPT_SECONDS = 24 * 3600.0

REMEDIES: Mapping[str | None, str] = {
    None: "not read yet",
    "permission": NO_RIGHT,
    "vanished": "there is no such file",
    "not_supported": "it is no regular file",
    "namespace": "it is in another namespace",
    "timeout": "reading takes too long",
    "error": "reading fails",
}
"""Read reason -> what to tell a person about it."""

CARD_REMEDIES: Mapping[str, str] = {
    "learning": "what the card takes at rest is not known yet",
    "shared": "others are on its cards too",
    "driver_unresponsive": "the GPU driver does not answer",
    "gpu_lost": "a card is lost",
    "permission": "this process may not use the cards",
    "not_supported": "the card does not tell",
    "timeout": "the GPU driver takes too long",
}
"""The same of GPUs."""

_OF_CARDS = frozenset(channel for channel in CHANNELS if channel.startswith("gpu_"))

SEEN_SECONDS = 30.0
"""A start that we saw later than this after its beginning teaches nothing of how long it took."""

MOST_ENDED = 64
"""Servers that ended and are still shown; of more the ones that ended first are dropped."""


@dataclass(slots=True)
class Episode:
    """What is kept of one server name.  Survives restarts of the server."""

    verdict: Verdict | None = None
    since_timestamp: float = 0.0
    stalled_seconds: float = 0.0
    judged_at: float | None = None
    start_timestamp: float | None = None
    startup_seconds: float | None = None
    was_ready: bool = False
    restarts: Restarts = field(default_factory=Restarts)
    phases: dict[str, float] = field(default_factory=dict)  # seconds the present start took in each, at most
    was_stalled: bool = False  # the present start: how long it took is no measure
    stall_reason: str = "none"  # why the present start stalled last, before it was ready
    has_ended: bool = False  # the present start is ready, or over, and was counted


@dataclass(slots=True)
class Startups:
    """Successful starts of one kind, for the histogram."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(STARTUP_BUCKETS_SECONDS) + 1))
    total_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        for index, bound in enumerate((*STARTUP_BUCKETS_SECONDS, float("inf"))):
            if seconds <= bound:
                self.counts[index] += 1
        self.total_seconds += seconds


@dataclass(frozen=True, slots=True)
class Change:
    """A verdict that differs from the one before."""

    server: str
    before: Verdict | None
    after: Verdict
    phase: str


class Episodes:
    """Judges every server of a timeline once per tick."""

    def __init__(
        self,
        timeline: Timeline,
        thresholds_of: Callable[[str], Thresholds],
        retention: float = 600.0,
        no_right: str = NO_RIGHT,
    ) -> None:
        """`no_right`: what to tell a person of what may not be read."""
        self.thresholds_of, self.retention, self._no_right = thresholds_of, retention, no_right
        self._timeline = timeline
        self._episodes: dict[str, Episode] = {}
        self._startups: dict[tuple[str, str, str], Startups] = {}
        self._servers: dict[str, tuple[Server, Server]] = {}  # as found, and as known: see _server_of
        self.learned = Learned()
        self.outcomes = Outcomes()
        self.changes: list[Change] = []

    def tick(self, now: float, wall: float, dated: Mapping[str, float] | None = None) -> tuple[ServerReport, ...]:
        """Judge all servers at `now` (monotonic; `wall` is the same moment as Unix time).

        `dated`: server -> Unix time of its last progress as far as it can be dated; used instead of what was
        observed where nothing moved since we watch (`check`).  Forgets what ended long ago.
        """
        self.changes = []
        reports = []
        for timeline in list(self._timeline):
            report = self._judge(timeline, now, wall, dated)
            if self._is_over(timeline, report.verdict, now):
                self._forget(timeline.name)
            else:
                reports.append(report)
        return tuple(sorted(self._without_surplus(reports), key=lambda report: report.server.name))

    def _forget(self, name: str) -> None:
        self._timeline.forget(name)
        self._episodes.pop(name, None)
        self._servers.pop(name, None)

    def _server_of(self, timeline: ServerTimeline) -> Server:
        """The server, with the release that its log told; the same object until another is found, or told."""
        found, told = timeline.server or _unknown_server(timeline), timeline.startup.version
        if not told or told == found.version:
            return found
        before = self._servers.get(timeline.name)
        if before is None or before[0] is not found or before[1].version != told:
            before = self._servers[timeline.name] = found, replace(found, version=told)
        return before[1]

    def _without_surplus(self, reports: list[ServerReport]) -> list[ServerReport]:
        """Restart loops under ever new names must not grow without end."""
        ended = [r for r in reports if r.verdict.state in ("failed", "gone") and r.server.starts]
        surplus = sorted(ended, key=lambda report: report.verdict.since)[: max(0, len(ended) - MOST_ENDED)]
        for report in surplus:
            self._forget(report.server.name)
        return [report for report in reports if report not in surplus]

    def startups(self) -> tuple[StartupHistogram, ...]:
        return tuple(
            StartupHistogram(*key, tuple(startups.counts), startups.total_seconds)
            for key, startups in sorted(self._startups.items())
        )

    def episode(self, name: str) -> Episode:
        """What is kept of a server name; it begins when it is first asked for."""
        return self._episodes.setdefault(name, Episode())

    @property
    def kept_startups(self) -> dict[tuple[str, str, str], Startups]:
        """Histograms of starts by framework, model and speculative method, to be kept over a restart of ours."""
        return self._startups

    def _is_over(self, timeline: ServerTimeline, verdict: Verdict, now: float) -> bool:
        age = now - verdict.since
        if verdict.state == "gone":
            never_came = timeline.server is not None and timeline.server.starts == 0
            return age > self.retention and not never_came
        is_held = self.episode(timeline.name).restarts.is_held
        return verdict.state == "failed" and age > FAILED_KEPT_SECONDS and not is_held

    def _judge(
        self, timeline: ServerTimeline, now: float, wall: float, dated: Mapping[str, float] | None
    ) -> ServerReport:
        episode, thresholds = self.episode(timeline.name), self.thresholds_of(timeline.name)
        last = episode.verdict
        if episode.start_timestamp != timeline.start_timestamp:
            self._begin(episode, timeline, thresholds, now, wall)
        elif episode.restarts.began is None:
            episode.restarts.began = now
        if timeline.server is not None and timeline.server.pod_uid:
            episode.restarts.pod_uid = timeline.server.pod_uid
        server = self._server_of(timeline)
        thresholds = self.learned.applied(server, thresholds)
        age = dated_progress_age(timeline, now, wall, dated, thresholds)
        evidence = gather(timeline, now, thresholds, age)
        before = last if episode.restarts.is_held else episode.verdict
        verdict = self._judge_restarts(episode, timeline, evidence, thresholds, now)
        if age is not None:
            verdict = replace(verdict, since=now - age)
        self._note(episode, timeline, evidence, verdict, now, wall)
        if before is None or (before.state, before.reason, before.suspect_rank) != (
            verdict.state,
            verdict.reason,
            verdict.suspect_rank,
        ):
            self.changes.append(Change(timeline.name, before, verdict, evidence.phase))
        return self._describe(timeline, server, evidence, verdict, thresholds, now, wall)

    def _describe(
        self,
        timeline: ServerTimeline,
        server: Server,
        evidence: Evidence,
        verdict: Verdict,
        thresholds: Thresholds,
        now: float,
        wall: float,
    ) -> ServerReport:
        """The report on one server: what was found out, nothing new is judged here."""
        episode, ranks = self.episode(timeline.name), evidence.ranks
        phase_start = max(timeline.startup.phase_since, timeline.anchor)
        ends = running_deadlines(timeline, evidence, self._timeline.timeouts_of(server.framework), now)
        return ServerReport(
            server=server,
            verdict=verdict,
            since_timestamp=episode.since_timestamp,
            phase=evidence.phase,
            phase_start_timestamp=wall - (now - phase_start),
            phase_budget_seconds=thresholds.budget(evidence.phase),
            ready=evidence.ready,
            ranks_alive=sum(1 for rank in ranks if rank.alive and is_rank_name(rank.rank)) if ranks else None,
            channels=evidence.channels,
            ranks=tuple(_rank_states(timeline, evidence, server, now)),
            starts=server.starts,
            stalled_seconds=episode.stalled_seconds,
            startup_seconds=episode.startup_seconds,
            advice=tuple(advice(evidence, verdict, thresholds, self._no_right)),
            deadlines={clock: wall - (now - at) for clock, at in ends.items()},
            similar=self.learned.similar(server),
        )

    def _begin(
        self, episode: Episode, timeline: ServerTimeline, thresholds: Thresholds, now: float, wall: float
    ) -> None:
        """Another start of the name.  Of a loop of starts that fail each is a failure from its beginning on."""
        server = timeline.server
        is_job, pod_uid = (server.role == "embedded", server.pod_uid) if server is not None else (False, "")
        last, was_ready = episode.verdict, episode.was_ready
        over = last if episode.start_timestamp else None  # before a time was told there was no other start
        held = episode.restarts.begin(over, was_ready, is_job, now, thresholds, pod_uid)
        if episode.start_timestamp and timeline.start_timestamp:  # an end that was seen is counted already
            reason = held.reason if held is not None else None
            self._note_end(episode, timeline, reason, timeline.start_timestamp)
        episode.start_timestamp, episode.was_ready = timeline.start_timestamp, False
        episode.phases, episode.was_stalled = {}, False
        episode.stall_reason, episode.has_ended = "none", False
        if held is not None:
            episode.verdict, episode.since_timestamp = held, wall - (now - held.since)
        elif last is not None and last.state in ("failed", "gone"):
            episode.verdict = None

    @staticmethod
    def _judge_restarts(
        episode: Episode, timeline: ServerTimeline, evidence: Evidence, thresholds: Thresholds, now: float
    ) -> Verdict:
        """The verdict; of a start that failed with those before it, once that is over, as of any other."""
        restarts, last = episode.restarts, episode.verdict
        was_held = restarts.is_held
        has_failed = last is not None and last.state == "failed" and not was_held
        is_over = timeline.root_gone_at is not None or has_failed
        is_follower = timeline.server is not None and timeline.server.node_rank > 0
        restarts.note(
            ready=evidence.ready,
            orderly=evidence.ends_orderly,
            over=is_over,
            unsure=last is not None and last.state in ("suspect", "unknown"),
            tells_ready=evidence.log == "readable" and not is_follower,
            now=now,
        )
        if not was_held or not restarts.lets_go(now, thresholds):
            return judge(evidence, thresholds, last, now)
        restarts.is_held = False
        verdict = judge(evidence, thresholds, None, now)
        return replace(verdict, since=last.since) if last is not None and last.state == verdict.state else verdict

    def _note(
        self,
        episode: Episode,
        timeline: ServerTimeline,
        evidence: Evidence,
        verdict: Verdict,
        now: float,
        wall: float,
    ) -> None:
        was_stalled = episode.verdict is not None and episode.verdict.state == "stalled"
        if was_stalled and episode.judged_at is not None:
            seconds, known = max(0.0, now - episode.judged_at), episode.verdict
            episode.stalled_seconds += seconds
            self.outcomes.stall(self._server_of(timeline), known.reason if known is not None else "none", seconds)
        if episode.verdict is None or episode.verdict.since != verdict.since:
            episode.since_timestamp = wall - (now - verdict.since)
        episode.verdict, episode.judged_at = verdict, now
        if not evidence.ready:
            episode.phases[evidence.phase] = max(evidence.phase_age, episode.phases.get(evidence.phase, 0.0))
            if verdict.state == "stalled":
                episode.was_stalled, episode.stall_reason = True, verdict.reason
        timeline.was_ready, timeline.is_idle = evidence.ready, verdict.state == "idle"
        if evidence.ready and not episode.was_ready:
            episode.was_ready = True
            self._note_ready(episode, timeline, now, wall)
        is_over = timeline.root_gone_at is not None or not episode.restarts.is_held
        if verdict.state in ("failed", "gone") and is_over and not episode.was_ready:
            self._note_end(episode, timeline, verdict.reason if verdict.state == "failed" else None, wall)

    def _note_end(self, episode: Episode, timeline: ServerTimeline, failure: str | None, wall: float) -> None:
        """Count a start that ended before it was ready; `failure`: the reason of one that is known to have failed."""
        if episode.has_ended or episode.start_timestamp is None or episode.start_timestamp <= 0:
            return
        episode.has_ended = True
        outcome, reason = "failed" if failure else "stopped", failure or "none"
        if not failure and episode.was_stalled:
            outcome, reason = "stalled", episode.stall_reason
        self.outcomes.end(self._server_of(timeline), outcome, reason, max(0.0, wall - episode.start_timestamp))

    def _note_ready(self, episode: Episode, timeline: ServerTimeline, now: float, wall: float) -> None:
        """Count the start that became ready, if we saw it happen."""
        ready_at = timeline.startup.ready_at if timeline.startup.ready_at is not None else now
        was_over, episode.has_ended = episode.has_ended, True
        server, started = timeline.server, timeline.start_timestamp
        if server is None or not started or ready_at <= timeline.anchor:
            return
        episode.startup_seconds = max(0.0, wall - (now - ready_at) - started)
        key = (server.framework, server.model, server.speculative)
        if key in self._startups or len(self._startups) < MOST_KINDS:
            self._startups.setdefault(key, Startups()).add(episode.startup_seconds)
        if not was_over:
            self.outcomes.end(self._server_of(timeline), "ready", "none", episode.startup_seconds)
        came = wall - (now - timeline.anchor) - started
        if came <= SEEN_SECONDS and not episode.was_stalled:
            read = sum(track.known or 0.0 for track in timeline.of(signals.STORAGE_READ).values())
            self.learned.learn(self._server_of(timeline), episode.phases, read, wall)


def dated_progress_age(
    timeline: ServerTimeline, now: float, wall: float, dated: Mapping[str, float] | None, thresholds: Thresholds
) -> float | None:
    """Seconds since the last progress that can be dated; None when not asked for, or when something moved.

    Nothing moved and nothing can be dated: long enough to be `quiet`, and no longer.
    """
    moved = any(at > timeline.anchor for channel, at in timeline.moves.items() if channel in STRONG_CHANNELS)
    if dated is None or moved:
        return None
    if timeline.name not in dated:
        return math.nextafter(thresholds.window, math.inf)
    return max(0.0, wall - dated[timeline.name])


def running_deadlines(
    timeline: ServerTimeline, evidence: Evidence, timeouts: OwnTimeouts, now: float
) -> dict[str, float]:
    """Clock -> the moment at which one of the server's own time-outs strikes; none once the server is gone."""
    server = timeline.server
    if server is None or timeline.root_gone_at is not None:
        return {}
    found = timeline.deadlines.running(now, server.timeouts)
    tokens = next(channel for channel in evidence.channels if channel.channel == "tokens")
    if evidence.ready and evidence.unserved_age is not None and tokens.state == "flat":
        ranks = ranks_of_a_copy(server)
        found |= serving_deadlines(now, evidence.unserved_age, server, timeouts.serving, ranks)
    return found


def _unknown_server(timeline: ServerTimeline) -> Server:
    return Server(timeline.name, "generic", "server", ProcessId(0, 0), timeline.start_timestamp or 0.0, ())


def _rank_names(timeline: ServerTimeline) -> list[str]:
    watched = timeline.watched_names
    return watched or sorted(timeline.startup.ranks)


def _rank_states(timeline: ServerTimeline, evidence: Evidence, server: Server, now: float) -> Iterator[RankState]:
    """In the order in which they are shown."""
    cards = timeline.cards.of_ranks(timeline.name, now) if timeline.cards else {}
    pids = {process.rank: process.id.pid for process in reversed(server.processes)}  # of several the first
    for name in _rank_names(timeline):
        startup, waits = timeline.startup.ranks.get(name), timeline.waits.get(name)
        if waits is not None and not waits.is_fresh(now):
            waits = None
        gpus = cards.get(name, ())
        if len(gpus) > 1:
            gpus = tuple(sorted(gpus, key=lambda card: (natural(card.index), card.gpu)))
        yield RankState(
            rank=name,
            pid=pids.get(name),
            gpu=gpus[0].gpu if gpus else None,
            phase="ready" if evidence.ready and is_rank_name(name) else startup.phase if startup else None,
            load_progress=startup.load_progress if startup else None,
            alive=timeline.is_alive(name),
            progress_age_seconds=rank_progress_age(timeline, name, now),
            wait=dict(waits.counts) if waits and waits.counts is not None else None,
            main_wait=waits.usual_main() if waits else None,
            gpus=gpus,
            load_counts=startup.load_counts if startup else None,
        )


def advice(evidence: Evidence, verdict: Verdict, thresholds: Thresholds, no_right: str = NO_RIGHT) -> list[str]:
    """Sentences for a person: what is missing and what would help."""
    sentences = []
    if verdict.state == "quiet":
        left = thresholds.stall_after - evidence.progress_age
        sentences.append(f"nothing moved yet; watch for {max(1, round(left))} s more to know")
    if evidence.root_gone_age is not None:
        return sentences  # of an ended process there is nothing to read
    unreadable = [state.channel for state in evidence.channels if state.state == "unreadable"]
    reasons: dict[str | None, list[str]] = {}
    for channel in unreadable:
        if channel not in _OF_CARDS:
            reason = evidence.log_reason if channel == "log" else evidence.unreadable_reason
            reasons.setdefault(reason, []).append(channel)
    for reason, channels in reasons.items():
        why = no_right if reason == "permission" else REMEDIES.get(reason, reason)
        sentences.append(f"unreadable: {', '.join(channels)}; {why}")
    if of_cards := [channel for channel in unreadable if channel in _OF_CARDS]:
        why = CARD_REMEDIES.get(evidence.cards_reason, REMEDIES["error"])
        sentences.append(f"unreadable: {', '.join(of_cards)}; {why}")
    if evidence.log == "absent":
        sentences.append("no log evidence: stdout and stderr go to no file; write them to one (`> server.log 2>&1`)")
    if not evidence.threads_readable and not reasons:
        sentences.append("the kernel does not tell what threads wait in")
    return sentences
