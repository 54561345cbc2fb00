"""What is asked of the story of a framework: the lines of a start, who speaks them, titles and command lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from .conditions import Condition


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who writes a line.  `rank`: its number among all ranks of the server, those of other nodes included."""

    kind: Literal["main", "engine", "rank", "script"]
    pid: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """What a server is started with; `ranks` of all nodes together, `node_rank` this node's number (None: the last)."""

    model: str
    ranks: int
    port: int
    nodes: int = 1
    node_rank: int | None = None

    @property
    def number(self) -> int:
        return self.nodes - 1 if self.node_rank is None else self.node_rank

    @property
    def first_rank(self) -> int:
        """The number of this node's first rank among those of all."""
        return self.ranks // self.nodes * self.number


class Story(Protocol):
    """The lines of a start, without prefix and newline; the bars are written as they are."""

    module: str
    """Dotted name of the module that is the server's first process."""

    def command(self, stage: Stage) -> list[str]:
        """The words after `python`."""

    def stamp_line(self, now: datetime, text: str, speaker: Speaker) -> str: ...

    def title(self, speaker: Speaker) -> str: ...

    def opening(self, stage: Stage) -> list[str]:
        """First process."""

    def engine_opening(self, stage: Stage) -> list[str]: ...

    def notices(self, condition: Condition, rank: int) -> list[str]: ...

    def before_meeting(self, rank: int, stage: Stage) -> list[str]: ...

    def after_meeting(self, rank: int, stage: Stage) -> list[str]: ...

    def begin_load(self, rank: int, stage: Stage) -> list[str]: ...

    def bar(self, share: float, speaker: Speaker) -> str:
        """The load as the first rank draws it."""

    def end_load(self, rank: int, seconds: float) -> list[str]: ...

    def begin_compile(self) -> list[str]: ...

    def end_compile(self) -> list[str]: ...

    def pools(self, rank: int) -> list[str]: ...

    def begin_capture(self, rank: int) -> list[str]: ...

    def capture_bars(self, speaker: Speaker) -> Iterator[str]: ...

    def end_capture(self, rank: int) -> list[str]: ...

    def engine_end(self) -> list[str]: ...

    def going_online(self, pid: int, port: int) -> Sequence[tuple[Speaker, str]]: ...

    def online(self) -> list[str]:
        """The word that the server is ready, and its first visitors."""

    def access_line(self, client: str, method: str, path: str, status: int = 200) -> str: ...

    def port_in_use(self, port: int) -> str: ...

    def heartbeat(self) -> str: ...

    def stats(self, running: int, tokens_per_second: float) -> str: ...

    def farewell(self, pid: int) -> list[str]: ...

    def metrics(self, running: int, prompt_tokens: int, tokens: int, finished: int) -> str:
        """The server's own metrics page; "" where it has none by default."""


def package_file(folder: Path, module: str) -> Path:
    """The file of a module below `folder`, with all its packages made."""
    *packages, name = module.split(".")
    for package in packages:
        folder = folder / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    return folder / f"{name}.py"
