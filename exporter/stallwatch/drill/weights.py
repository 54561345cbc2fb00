"""Weight files of a stand-in, and reading them at a given speed, from storage each time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

BYTES_PER_RANK = 6 << 20
_CHUNK_BYTES = 256 << 10


def write_weights(folder: Path, ranks: int) -> list[Path]:
    """One file a rank, 6 MiB each, flushed to storage so that the page cache can be dropped later."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["DeepseekV3ForCausalLM"]}\n')
    paths = []
    for rank in range(ranks):
        path = folder / f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors"
        with path.open("wb") as file:
            file.write(os.urandom(BYTES_PER_RANK))
            file.flush()
            os.fsync(file.fileno())
        paths.append(path)
    return paths


def read_slowly(path: Path, total_bytes: int, bytes_per_second: float) -> Iterator[float]:
    """Read `total_bytes`, going round the file as often as needed; yields the share done after each chunk.

    The page cache of the file is dropped at the start of each round: the bytes come from storage, as those of
    a file that is larger than memory do.
    """
    started, done, offset = time.monotonic(), 0, 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while done < total_bytes:
            if offset == 0:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            count = len(os.pread(fd, _CHUNK_BYTES, offset))
            done += count
            offset = offset + count if count == _CHUNK_BYTES else 0
            ahead = done / bytes_per_second - (time.monotonic() - started)
            if ahead > 0:
                time.sleep(ahead)
            yield min(1.0, done / total_bytes)
    finally:
        os.close(fd)
