"""Files that a log was moved to, chunk by chunk: kept open, or opened anew for each."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from stallwatch.sources.logs.earlier import CHUNK_BYTES, Earlier, read_earlier

TEXT = b"".join(b"line %d\n" % number for number in range(400_000))
"""Several chunks."""
assert len(TEXT) > 3 * CHUNK_BYTES


def earlier(path: Path) -> Earlier:
    status = path.stat()
    return Earlier(str(path), (status.st_dev, status.st_ino), status.st_mtime)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.log.1", TEXT, TEXT),
        ("x.log.1.gz", gzip.compress(TEXT), TEXT),
        ("x.log.1.gz", gzip.compress(TEXT) + gzip.compress(b"more\n"), TEXT + b"more\n"),
        ("x.log.1.gz", gzip.compress(b"a" * len(TEXT)), b"a" * len(TEXT)),
        ("x.log.1.gz", b"no gzip at all", b""),
        ("x.log.1.gz", b"", b""),
    ],
)
def test_it_is_read_and_unpacked_as_far_as_it_goes(
    keeps: bool, name: str, content: bytes, told: bytes, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    chunks = list(read_earlier(earlier(path), keeps))

    assert b"".join(chunks) == told
    assert max(map(len, chunks), default=0) <= CHUNK_BYTES


@pytest.mark.parametrize("keeps", [True, False])
def test_a_packed_one_that_is_cut_off_gives_what_there_is(keeps: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.log.1.gz"
    content = os.urandom(1 << 16) + TEXT
    packed = gzip.compress(content)
    path.write_bytes(packed[: len(packed) // 2])

    told = b"".join(read_earlier(earlier(path), keeps))

    assert len(told) < len(content)
    assert content.startswith(told)
    assert told


def test_what_is_opened_anew_is_the_same_file_or_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.log.1"
    path.write_bytes(TEXT)
    reading = read_earlier(earlier(path), keeps=False)

    first = next(reading)
    path.rename(tmp_path / "x.log.2")
    path.write_bytes(b"another\n" * CHUNK_BYTES)

    assert first == TEXT[:CHUNK_BYTES]
    assert list(reading) == []


def test_nothing_is_open_between_two_chunks(tmp_path: Path) -> None:
    path = tmp_path / "x.log.1"
    path.write_bytes(TEXT)

    def is_held(keeps: bool) -> bool:
        reading = read_earlier(earlier(path), keeps)
        next(reading)
        links = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
        reading.close()
        return str(path) in links

    assert (is_held(True), is_held(False)) == (True, False)
