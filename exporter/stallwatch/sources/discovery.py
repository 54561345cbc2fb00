"""From command lines and titles to servers and ranks: pure functions over what procfs and the helper read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..frameworks import Argument, Framework, Timeout, Title, rank_name, whole_number

COMPILERS = frozenset(
    [
        "nvcc",
        "cicc",
        "ptxas",
        "fatbinary",
        "cudafe++",
        "nvlink",
        "ninja",
        "make",
        "cmake",
        "cc1",
        "cc1plus",
        "c++",
        "g++",
        "gcc",
        "cc",
        "clang",
        "clang++",
        "collect2",
        "ld",
        "ld.lld",
        "lld",
        "as",
        "ar",
        "hipcc",
        "amdclang++",
        "ptxas-blackwell",
        "rustc",
    ]
)
"""comm of the build tools that just-in-time compilation starts below a rank."""

LARGEST_PORT = 65535

MOST_MATCHED = 4 << 10
"""Characters of a command line that patterns are tried on: the line is another's word, up to 128 KiB of it."""

_JOB = re.compile(r"[0-9]{1,10}")
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_BEHIND_A_NAME = re.compile(
    r"[?#&;={\"'`]|-----BEGIN|\b(?:bearer|basic|token|api[_-]?key|password|passwd|secret|authorization|cookie)[:\s]",
    re.IGNORECASE,
)
"""What stands behind the name of a model where it begins with one: a query, a header, a key."""
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-|sk_(?:live|test)_|hf_(?=[A-Za-z0-9]{16})|gh[opsu]_|glpat-|xox[a-z]-|A[KS]IA|AIza|ya29\.|npm_"
    r"|pypi-|SG\.|nvapi-|hvs\.|dapi|eyJ|FwoG|IQoJ|AGE-SECRET-KEY-|bot\d{1,20}:)[A-Za-z0-9_.+-]{16,}"
)
"""Keys that their makers gave a form of their own.  Folders begin with `hf_`, too, and go on in words."""
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?")
_VALUE_OPTIONS = ("-W", "-X", "--check-hash-based-pycs")
_RUN_OPTION = re.compile(r"-[A-VYZabd-ln-z]*(?P<what>[mc])(?P<value>.*)", re.DOTALL)
"""`-m` or `-c` behind options that take no value."""
_COMPILE_WORKER = re.compile(r"compile_worker|torch[._]inductor")
_SPAWNED = re.compile(r"multiprocessing(?:\.|-)(?:spawn|forkserver|fork)")
_TRACKER = re.compile(r"resource_tracker|semaphore_tracker")


def head_words(argv: Sequence[str]) -> tuple[str, ...]:
    """The command as its user thinks of it: interpreter, its options and folders dropped.

    ('/usr/bin/python3', '-u', '/opt/bin/vllm', 'serve', 'm') -> ('vllm', 'serve', 'm')
    ('python', '-m', 'sglang.launch_server', '--tp', '8')     -> ('-m', 'sglang.launch_server', '--tp', '8')
    """
    if not argv or not argv[0]:
        return ()
    words = list(argv)
    program = _base(words[0])
    if not _PYTHON.fullmatch(program):
        return (program, *words[1:])
    return _after_options(words[1:]) or (program,)


def _after_options(words: list[str]) -> tuple[str, ...]:
    """What an interpreter runs: module, code or script, with its arguments.

    Short options may be written together: `-um NAME`, `-mNAME`, `-Wignore`.
    """
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        option = words[at]
        if not option.startswith("--") and (match := _RUN_OPTION.match(option)):
            return ("-" + match["what"], *filter(None, [match["value"]]), *words[at + 1 :])
        at += 2 if option in _VALUE_OPTIONS else 1
    return (_base(words[at]), *words[at + 1 :]) if at < len(words) else ()


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def entry_point(framework: Framework, words: Sequence[str]) -> tuple[str, ...] | None:
    """The words after the framework's entry point, when the command starts with one; else None."""
    for entry in framework.entry_points:
        head = entry.split(" ")
        if list(words[: len(head)]) == head:
            return tuple(words[len(head) :])
    return None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the arguments of a server say; nothing else of the command line is kept.

    `data_parallel`: copies of the model, each with ranks of its own.  `nnodes`: launches the copies and ranks are
    spread over, this one included; the ranks of this node are its share.
    """

    model: str = ""
    port: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    nnodes: int = 1
    node_rank: int = 0
    group: str = ""
    speculative: str = ""
    metrics_enabled: bool = True
    headless: bool = False
    timeouts: Mapping[str, float] = field(default_factory=dict)  # clock -> seconds, where it was told so
    eager: bool = False  # no graphs are to be captured


def read_facts(framework: Framework, words: Sequence[str], environ: Mapping[str, str] | None = None) -> Facts:
    """Parse the words after the entry point.  Unreadable numbers fall back to the defaults."""
    given = {name: argument_value(argument, words) for name, argument in framework.arguments.items()}

    def number(name: str, default: int) -> int:
        found = whole_number(given.get(name))
        return default if found is None else found

    def address(name: str, port: str) -> str:
        """With the port the framework would take itself: one node may write it out and another not."""
        known = framework.arguments.get(port)
        host = given.get(name) or ""
        return f"{host}:{given.get(port) or known.default}" if host and known is not None else host

    copies = 1 if given.get("attention_only") is not None else max(1, number("data_parallel", 1))
    nodes = max(1, number("nnodes", 1))
    here = 1 if given.get("data_parallel_rank") is not None else number("data_parallel_local", copies)
    spread = _launches(copies, here) if nodes == 1 else 1
    headless = given.get("headless") is not None
    start = number("data_parallel_start", here) // max(1, here)
    switched = given.get("metrics_enabled") is not None
    return Facts(
        model=short_model(given.get("served_model") or given.get("model") or ""),
        port=port if 0 < (port := number("port", 0)) <= LARGEST_PORT else None,
        tensor_parallel=max(1, number("tensor_parallel", 1)),
        pipeline_parallel=max(1, number("pipeline_parallel", 1)),
        data_parallel=copies,
        nnodes=max(nodes, spread),
        node_rank=max(1, start) if headless and spread > 1 else number("node_rank", 0),
        group=group_hash(address("data_parallel_address", "data_parallel_port"), copies)
        if spread > 1
        else group_hash(address("rendezvous", "rendezvous_port"), nodes),
        speculative=speculative_name(given.get("speculative") or ""),
        metrics_enabled=framework.metrics_default != switched,
        headless=headless,
        timeouts=_timeouts(framework, words, environ or {}),
        eager=given.get("eager") is not None,
    )


def _timeouts(framework: Framework, words: Sequence[str], environ: Mapping[str, str]) -> dict[str, float]:
    """Clock -> seconds, of the time-outs that were set, or are there only with such arguments."""
    found: dict[str, float] = {}
    for clock, timeout in framework.timeouts.items():
        if timeout.several and (whole_number(argument_value(Argument(timeout.several), words)) or 0) <= 1:
            continue
        told = _told_seconds(timeout, words, environ)
        if told is not None:
            found[clock] = told
        elif timeout.several:
            found[clock] = timeout.seconds
    return found


def _told_seconds(timeout: Timeout, words: Sequence[str], environ: Mapping[str, str]) -> float | None:
    """An argument comes before a variable; what is no number of seconds is nothing."""
    texts = (argument_value(Argument(timeout.flags), words), *(environ.get(name) for name in timeout.variables))
    return next((float(text) for text in texts if text and _SECONDS.fullmatch(text)), None)


def _launches(copies: int, here: int) -> int:
    """How many launches share the copies when `here` of them run in this one; at least two when not all do."""
    if here >= copies:
        return 1
    return -(-copies // here) if here else 2


def argument_value(argument: Argument, words: Sequence[str]) -> str | None:
    """The last value given to an argument ('' for a flag that is set); None when it is not given."""
    found: str | None = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in argument.flags:
            following = words[index + 1] if index + 1 < len(words) else ""
            found = "" if argument.is_flag else value if equals else following
    if found is None and argument.positional and words and not words[0].startswith("-"):
        return words[0]
    return found


def short_model(text: str) -> str:
    """The last two path parts, with scheme, user, query, fragment and whatever looks like a secret removed.

    At most 128 bytes.  A name that is nothing but a secret of no known form is told as it is.
    """
    text = re.sub(r"^[a-z][a-z0-9+.-]*://(?:.*@)?", "", text, flags=re.IGNORECASE | re.DOTALL)
    text = _TOKEN.sub("", _BEHIND_A_NAME.split(text, maxsplit=1)[0])
    text = _without_user(text).rstrip(" ,")
    return "/".join([part for part in text.split("/") if part][-2:])[:128]


def _without_user(text: str) -> str:
    """Without who logs in, where no scheme says that it is an address: user:password@host, user@host/path."""
    host, slash, path = text.partition("/")
    user, _, after = host.rpartition("@")
    return after + slash + path if ":" in user or (user and path) else text


def group_hash(rendezvous: str, nnodes: int) -> str:
    """A short name for a group of nodes: hash of the rendezvous address and the size of the group."""
    if nnodes <= 1 or not rendezvous:
        return ""
    return hashlib.blake2b(
        f"{rendezvous.lower()}|{nnodes}".encode("utf-8", "surrogateescape"), digest_size=6
    ).hexdigest()


def speculative_name(text: str) -> str:
    """The method of speculative decoding: a word as it is, or `method` of a JSON object; never a path."""
    if text.startswith("{"):
        match = re.search(r'"method"\s*:\s*"([A-Za-z0-9_-]{1,32})"', text)
        return match[1] if match else "yes"
    return text if re.fullmatch(r"[A-Za-z0-9_-]{1,32}", text) else "yes" if text else ""


@dataclass(frozen=True, slots=True)
class Command:
    """What is remembered of one command line.  `own` is the part discovery decides by; no other word is kept."""

    framework: str = ""  # whose entry point it is
    facts: Facts | None = None
    role: str = ""  # engine rank worker detokenizer controller main, from its title; "" = none
    rank: str = ""  # rank name or engine name that the title gives
    titled_by: str = ""  # framework of the title
    kind: str = "other"  # spawned (a multiprocessing child), tracker, compiler, other
    configured: str = ""  # name of the configured server whose `match: command` it fits
    excluded: bool = False
    fingerprint: str = ""  # equal for a forked child that still shows its parent's command
    slurm_job: str = ""
    reason: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


def matched_part(argv: Sequence[str]) -> str:
    """The beginning of a command line: as much of it as patterns are tried on."""
    return " ".join(argv)[:MOST_MATCHED]


def understand(
    frameworks: Sequence[Framework],
    argv: Sequence[str],
    environ: Mapping[str, str],
    reason: str | None = None,
) -> Command:
    """Reduce a command line to what discovery needs."""
    if reason is not None:
        return Command(reason=reason)
    words, title, everything = head_words(argv), matched_part(argv), " ".join(argv)
    entry = next(((f, rest) for f in frameworks if (rest := entry_point(f, words)) is not None), None)
    role, rank, titled_by = _by_title(frameworks, title, environ)
    return Command(
        framework=entry[0].name if entry else "",
        facts=read_facts(*entry, environ) if entry else None,
        role=role,
        rank=rank,
        titled_by=titled_by,
        kind=_kind(title),
        fingerprint=hashlib.blake2b(everything.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest(),
        slurm_job=job if _JOB.fullmatch(job := environ.get("SLURM_JOB_ID", "")) else "",
        environ=environ,
    )


def _by_title(frameworks: Sequence[Framework], title: str, environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Role, name and framework; no framework where other programs may have the same title."""
    for framework in frameworks:
        for pattern in framework.titles:
            match = pattern.pattern.match(title)
            if match is None:
                continue
            groups, titled_by = match.groupdict(), "" if pattern.shared else framework.name
            if pattern.role == "rank":
                role, rank = _rank_of_title(pattern, groups.get("parts") or "", environ)
                return role, rank, titled_by
            if pattern.role == "engine":
                number = whole_number(groups.get("engine")) or 0
                return "engine", f"engine{number}" if number else "engine", titled_by
            return pattern.role, pattern.role, titled_by
    return "", "", ""


def _rank_of_title(title: Title, parts: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """A rank by its title or its environment; a worker where neither says which one it is."""
    if not title.rank_from:
        return "rank", rank_name(parts)
    number = next((n for name in title.rank_from if (n := whole_number(environ.get(name))) is not None), None)
    return ("worker", "worker") if number is None else ("rank", f"TP{number}")


def _kind(title: str) -> str:
    if _TRACKER.search(title):
        return "tracker"
    if _COMPILE_WORKER.search(title):
        return "compiler"
    return "spawned" if _SPAWNED.search(title) else "other"
