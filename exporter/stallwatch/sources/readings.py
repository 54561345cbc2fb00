"""What the `processes` collector says of one tracked server: its Server record and the readings of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from .. import signals
from ..model import LogPlace, Observation, Process, ProcessId, Reading, Server, Signal
from .logs.streams import NO_LOG, StreamPlaces, Whose
from .members import COUNTERS, LONE_RANK, Member, Tracked

VIRTUAL_MEMORY = Signal(
    "process_virtual_memory_bytes",
    "Virtual memory of the rank's process in bytes; large for every GPU process, no sign of trouble.",
    ("server", "rank"),
    "rank",
)


def report(streams: StreamPlaces, tracked: Tracked, gpus: Mapping[int, Sequence[str]]) -> Iterator[Observation]:
    """Everything about one server; after its end only that it is gone, and whether that was orderly.

    `gpus`: PID -> the cards it uses, as far as they are known.
    """
    name = tracked.name
    yield signals.SERVER_ALIVE.read(float(not tracked.root_gone), name)
    yield signals.SERVER_START.read(tracked.started_at, name)
    yield signals.SERVER_STARTS.read(tracked.starts, name)
    if tracked.around.scope_alive is not None:
        yield signals.SERVER_SCOPE_ALIVE.read(float(tracked.around.scope_alive), name)
    if tracked.stopping is not None:
        yield signals.SERVER_STOPPING.read(float(tracked.stopping), name)
    yield from _ranks(tracked, gpus)
    if tracked.ended_at is not None:
        return
    yield server_of(streams, tracked)
    yield from _answers(signals.SERVER_FROZEN, [tracked.around.frozen], name)
    yield from _usage(tracked)
    for kind, seconds in tracked.children.seconds.items():
        yield signals.CHILD_PROCESSES.read(tracked.children.live[kind], name, kind)
        yield signals.CHILD_CPU.read(seconds, name, kind)


def _ranks(tracked: Tracked, gpus: Mapping[int, Sequence[str]]) -> Iterator[Reading]:
    """0 for the dead, 1 for those that were seen now, unreadable for those missing on one look.

    stallwatch_rank_info{server="vllm-8000",rank="TP3",pid="4711",gpu="GPU-8f3b…"} 1, one for each card it uses
    """
    watched: dict[str, list[Member]] = {}
    for member in tracked.members.values():
        if member.is_watched:
            watched.setdefault(member.rank, []).append(member)
    for rank in {**tracked.dead_ranks, **watched}:
        members = watched.get(rank, [])
        if tracked.is_dead(rank):
            yield signals.RANK_ALIVE.read(0.0, tracked.name, rank)
            continue
        if any(member.missing_since is not None for member in members):
            yield signals.RANK_ALIVE.missing("vanished", tracked.name, rank)
        else:
            yield signals.RANK_ALIVE.read(1.0, tracked.name, rank)
        yield from _answers(signals.RANK_TRACED, [member.traced for member in members], tracked.name, rank)
        for member in members:
            for gpu in gpus.get(member.id.pid) or ("",):
                yield signals.RANK_INFO.read(1.0, tracked.name, rank, str(member.id.pid), gpu)


def _answers(signal: Signal, answers: Sequence[float | str | None], *labels: str) -> Iterator[Reading]:
    """1 when any answer is 1; else why one could not be had; else 0.  Nothing without an answer."""
    known = [answer for answer in answers if answer is not None]
    reasons = [answer for answer in known if isinstance(answer, str)]
    if reasons and 1.0 not in known:
        yield signal.missing(min(reasons), *labels)
    elif known:
        yield signal.read(max(answer for answer in known if not isinstance(answer, str)), *labels)


def _usage(tracked: Tracked) -> Iterator[Reading]:
    """Sums per label.  One unreadable process makes the label's value unreadable: never a partial sum."""
    by_label: dict[str, list[Member]] = {}
    for member in tracked.members.values():
        by_label.setdefault(member.label, []).append(member)
    for label, members in by_label.items():
        if all(member.missing_since is not None for member in members):
            continue
        for index, (signal, kind) in enumerate(COUNTERS):
            retired = tracked.retired.get((label, index), 0.0)
            yield _sum(signal, (tracked.name, label, *kind), _counter(members, index), retired)
        present = [member for member in members if member.missing_since is None]
        for signal, field in ((signals.RESIDENT_MEMORY, "resident_bytes"), (VIRTUAL_MEMORY, "virtual_bytes")):
            yield _sum(signal, (tracked.name, label), [_memory(member, field) for member in present], 0.0)


def _sum(signal: Signal, labels: tuple[str, ...], values: Sequence[float | str], base: float) -> Reading:
    """The sum; a value that is a word says why it could not be read."""
    reasons = [value for value in values if isinstance(value, str)]
    if reasons:
        return signal.missing(min(reasons), *labels)
    return signal.read(base + sum(value for value in values if not isinstance(value, str)), *labels)


def _counter(members: Sequence[Member], index: int) -> list[float | str]:
    """A member that is missing on this look keeps its last value, so that the sum does not fall before it rises."""
    values: list[float | str] = []
    for member in members:
        if member.usage is None:
            if member.missing_since is None:
                values.append(member.unreadable or "error")
            continue
        value = member.usage.counters()[index]
        values.append((member.usage.io_reason or "error") if value is None else value)
    return values


def _memory(member: Member, field: str) -> float | str:
    if member.usage is None:
        return member.unreadable or "error"
    if not member.usage.stat.has_memory:
        return "vanished"
    return float(getattr(member.usage.stat, field))


def server_of(streams: StreamPlaces, tracked: Tracked) -> Server:
    facts, home, configured = tracked.facts, tracked.home, tracked.configured
    port = facts.port or (tracked.framework.default_port if tracked.role == "server" else None)
    return Server(
        name=tracked.name,
        framework=tracked.framework.name,
        role="embedded" if tracked.role == "embedded" else "server",
        root=tracked.root,
        started_at=tracked.started_at,
        processes=tuple(
            Process(member.id, member.rank, member.ppid, member.comm, member.user)
            for member in tracked.members.values()
            if member.missing_since is None
        ),
        logs=_logs(streams, tracked),
        ports=(port,) if port and tracked.role == "server" and not facts.headless else (),
        health=configured.health if configured else None,
        starts=tracked.starts,
        model=facts.model,
        tensor_parallel=facts.tensor_parallel,
        pipeline_parallel=facts.pipeline_parallel,
        data_parallel=facts.data_parallel,
        expected_ranks=(LONE_RANK,) if tracked.framework.single_process else (),
        nnodes=facts.nnodes,
        node_rank=facts.node_rank,
        group=facts.group,
        speculative=facts.speculative,
        unit=home.placement.unit,
        container=home.container,
        pod=home.names.pod,
        namespace=home.names.namespace,
        pod_uid=home.placement.pod_uid,
        slurm_job=tracked.slurm_job,
        labels=dict(configured.labels) if configured else {},
        metrics_enabled=facts.metrics_enabled,
        timeouts=facts.timeouts,
        eager=facts.eager,
    )


def _logs(streams: StreamPlaces, tracked: Tracked) -> tuple[LogPlace, ...]:
    """The configured files, else where stdout and stderr of the first process go."""
    configured, holder = tracked.configured, tracked.holder
    if configured is not None and configured.logs:
        owner = holder.user if holder is not None else 0
        return _named_places(tuple(configured.logs), owner)
    return _streams(streams, tracked, holder.id) if holder is not None else ()


@lru_cache(maxsize=1024)
def _named_places(paths: tuple[str, ...], owner: int) -> tuple[LogPlace, ...]:
    return tuple(LogPlace(name, path, owner=owner) for path, name in log_names(paths).items())


def log_names(paths: Sequence[str]) -> dict[str, str]:
    """path -> name of the log: the last part of its path, with a number when an earlier one has it."""
    names: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        name = stem = os.path.basename(path.rstrip("/")) or "log"
        number = 1
        while name in names.values():
            number += 1
            name = f"{stem}-{number}"
        names[path] = name
    return names


def _streams(streams: StreamPlaces, tracked: Tracked, process: ProcessId) -> tuple[LogPlace, ...]:
    """A file keeps its first name when it is renamed, and gives it to the file that takes its place."""
    before, after = tracked.log_names, dict[tuple[ProcessId | int, int], str]()
    places: list[LogPlace] = []
    whose = Whose(process.pid, tracked.placement, tracked.started_at)
    for fd, stream in ((1, "stdout"), (2, "stderr")):
        place = streams.place(whose, fd, stream)
        file, slot = (place.device, place.inode), (process, fd)
        is_known = bool(place.path and place.inode)  # by its file, and not by its path alone
        if place.path and ((is_known and file in after) or any(place.path == other.path for other in places)):
            continue
        known = before.get(slot) if place.reason != NO_LOG else None
        name = (before.get(file) if is_known else None) or known or place.name
        if any(other.name == name for other in places):
            name = stream
        places.append(replace(place, name=name))
        if is_known:
            after[file] = name
        if place.path:
            after[slot] = name
        elif known:
            after[slot] = known
    tracked.log_names = after
    return tuple(places)
