"""What the `processes` collector says of one tracked server: its Server record and the readings of its processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from .. import signals
from ..model import LogPlace, Observation, Process, ProcessId, Reading, Server, Signal
from .logs.streams import NO_LOG, StreamPlaces, Whose
from .members import COUNTERS, LONE_RANK, Member, Tracked
from .told import again

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
    before, tracked.told = tracked.told, {}

    def tell(subject: object, found: object, make: Callable[[], Iterable[Reading]]) -> tuple[Reading, ...]:
        tracked.told[subject] = told = again(before.get(subject), found, make)
        return told.readings

    itself = (tracked.root_gone, tracked.started_at, tracked.starts, tracked.around.scope_alive, tracked.stopping)
    yield from tell("server", itself, partial(_itself, tracked))
    ranks = _watched(tracked)
    yield from tell("ranks", _seen(tracked, ranks, gpus), partial(_ranks, tracked, ranks, gpus))
    if tracked.ended_at is not None:
        return
    yield server_of(streams, tracked)
    frozen = tracked.around.frozen
    yield from tell("frozen", frozen, partial(_answers, signals.SERVER_FROZEN, [frozen], tracked.name))
    by_label: dict[str, list[Member]] = {}
    for member in tracked.members.values():
        by_label.setdefault(member.label, []).append(member)
    for label, members in by_label.items():
        yield from tell(("usage", label), _used(tracked, label, members), partial(_usage, tracked, label, members))
    children = tracked.children
    yield from tell("children", [*children.seconds.items(), *children.live.items()], partial(_children, tracked))


def _itself(tracked: Tracked) -> Iterator[Reading]:
    name = tracked.name
    yield signals.SERVER_ALIVE.read(float(not tracked.root_gone), name)
    yield signals.SERVER_START.read(tracked.started_at, name)
    yield signals.SERVER_STARTS.read(tracked.starts, name)
    if tracked.around.scope_alive is not None:
        yield signals.SERVER_SCOPE_ALIVE.read(float(tracked.around.scope_alive), name)
    if tracked.stopping is not None:
        yield signals.SERVER_STOPPING.read(float(tracked.stopping), name)


def _watched(tracked: Tracked) -> dict[str, list[Member]]:
    """Its ranks and engines: dead ones first, and how they are called -> who is that."""
    found: dict[str, list[Member]] = {rank: [] for rank in tracked.dead_ranks}
    for member in tracked.members.values():
        if member.is_watched:
            found.setdefault(member.rank, []).append(member)
    return found


def _seen(tracked: Tracked, ranks: Mapping[str, Sequence[Member]], gpus: Mapping[int, Sequence[str]]) -> object:
    """All that `_ranks` tells."""
    return [
        (rank, tracked.is_dead(rank), [_sight(member, gpus) for member in members]) for rank, members in ranks.items()
    ]


def _sight(member: Member, gpus: Mapping[int, Sequence[str]]) -> object:
    pid = member.id.pid
    return pid, member.missing_since is None, member.traced, gpus.get(pid)


def _ranks(
    tracked: Tracked, ranks: Mapping[str, Sequence[Member]], gpus: Mapping[int, Sequence[str]]
) -> Iterator[Reading]:
    """0 for the dead, 1 for those that were seen now, unreadable for those missing on one look.

    stallwatch_rank_info{server="vllm-8000",rank="TP3",pid="4711",gpu="GPU-8f3b…"} 1, one for each card it uses
    """
    for rank, members in ranks.items():
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


def _used(tracked: Tracked, label: str, members: Sequence[Member]) -> object:
    """All that `_usage` tells.  A process that did not run has the very same `usage`."""
    seen = [(member.usage, member.missing_since is None, member.unreadable) for member in members]
    return seen, _retired(tracked, label)


def _retired(tracked: Tracked, label: str) -> list[float]:
    """What those had counted that left the label, in the order of COUNTERS."""
    if not tracked.retired:
        return [0.0] * len(COUNTERS)
    return [tracked.retired.get((label, index), 0.0) for index in range(len(COUNTERS))]


def _usage(tracked: Tracked, label: str, members: Sequence[Member]) -> Iterator[Reading]:
    """Sums of a label.  One unreadable process makes the label's value unreadable: never a partial sum."""
    present = [member for member in members if member.missing_since is None]
    if not present:
        return
    counted = [_counters(member) for member in members if member.usage is not None or member.missing_since is None]
    for (signal, kind), retired, *values in zip(COUNTERS, _retired(tracked, label), *counted, strict=True):
        yield _sum(signal, (tracked.name, label, *kind), values, retired)
    for signal, field in ((signals.RESIDENT_MEMORY, "resident_bytes"), (VIRTUAL_MEMORY, "virtual_bytes")):
        yield _sum(signal, (tracked.name, label), [_memory(member, field) for member in present], 0.0)


def _sum(signal: Signal, labels: tuple[str, ...], values: Sequence[float | str], base: float) -> Reading:
    """The sum; a value that is a word says why it could not be read."""
    reasons = [value for value in values if isinstance(value, str)]
    if reasons:
        return signal.missing(min(reasons), *labels)
    return signal.read(base + sum(value for value in values if not isinstance(value, str)), *labels)


def _counters(member: Member) -> list[float | str]:
    """In the order of COUNTERS, or why there is none.

    A member that is missing on this look keeps its last values, so that the sum does not fall before it rises.
    """
    usage = member.usage
    if usage is None:
        return [member.unreadable or "error"] * len(COUNTERS)
    return [(usage.io_reason or "error") if value is None else value for value in usage.counters()]


def _memory(member: Member, field: str) -> float | str:
    if member.usage is None:
        return member.unreadable or "error"
    if not member.usage.stat.has_memory:
        return "vanished"
    return float(getattr(member.usage.stat, field))


def _children(tracked: Tracked) -> Iterator[Reading]:
    for kind, seconds in tracked.children.seconds.items():
        yield signals.CHILD_PROCESSES.read(tracked.children.live[kind], tracked.name, kind)
        yield signals.CHILD_CPU.read(seconds, tracked.name, kind)


def server_of(streams: StreamPlaces, tracked: Tracked) -> Server:
    """Its record; the very same one while nothing of it changes."""
    present = [member for member in tracked.members.values() if member.missing_since is None]
    logs = _logs(streams, tracked)
    people = [(member.id, member.rank, member.ppid, member.comm) for member in present]
    made_of = (people, logs, tracked.facts, tracked.home, tracked.configured, tracked.starts, tracked.slurm_job)
    shown = tracked.shown
    if shown is None or shown[0] != made_of:
        shown = tracked.shown = made_of, _server(tracked, present, logs)
    return shown[1]


def _server(tracked: Tracked, present: Sequence[Member], logs: tuple[LogPlace, ...]) -> Server:
    facts, home, configured = tracked.facts, tracked.home, tracked.configured
    port = facts.port or (tracked.framework.default_port if tracked.role == "server" else None)
    return Server(
        name=tracked.name,
        framework=tracked.framework.name,
        role="embedded" if tracked.role == "embedded" else "server",
        root=tracked.root,
        started_at=tracked.started_at,
        processes=tuple(Process(member.id, member.rank, member.ppid, member.comm, member.user) for member in present),
        logs=logs,
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
