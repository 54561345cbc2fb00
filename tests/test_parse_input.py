"""Log files as they lie about: packed, cut off, in a container's records, no files at all.  Nothing hangs."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.frameworks import load_frameworks
from stallwatch.parse.input import BAR_BYTES, BLOCK_BYTES, LONGEST_LINE_BYTES, LogInput, opened
from stallwatch.parse.report import format_text, parse, parse_files
from stallwatch.strict_yaml import InputError

FRAMEWORKS = load_frameworks()
LINES = [
    "[2026-06-02 08:00:00] server_args=ServerArgs(model_path='/m', tp_size=1)",
    *(f"[2026-06-02 08:{number // 60:02}:{number % 60:02}] line {number}" for number in range(600)),
    "[2026-06-02 08:30:00] The server is fired up and ready to roll!",
]
TEXT = "".join(line + "\n" for line in LINES).encode()


def parsed(path: Path | str, framework: str | None = None) -> dict[str, Any]:
    file: dict[str, Any] = parse_files([str(path)], framework, FRAMEWORKS)["files"][0]
    return file


def put(folder: Path, data: bytes, name: str = "server.log") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def without_name(file: dict[str, Any]) -> dict[str, Any]:
    return file | {"file": ""}


# --- packed --------------------------------------------------------------------------------------------------


def test_gzip_and_standard_input_are_read_like_the_file(tmp_path: Path) -> None:
    expected = without_name(parsed(put(tmp_path, TEXT)))
    packed = put(tmp_path, gzip.compress(TEXT), "server.log.gz")

    with packed.open("rb") as stdin:
        (piped,) = parse_files(["-"], None, FRAMEWORKS, stdin)["files"]

    assert without_name(parsed(packed)) == expected
    assert without_name(piped) == expected
    assert piped["file"] == "<stdin>"
    assert expected["warnings"] == []


def test_gzip_is_known_by_its_first_bytes_and_not_by_the_name(tmp_path: Path) -> None:
    assert parsed(put(tmp_path, TEXT, "plain.gz"))["lines"] == len(LINES)
    assert parsed(put(tmp_path, gzip.compress(TEXT), "packed.log"))["lines"] == len(LINES)


def test_joined_gzip_files_are_one_log(tmp_path: Path) -> None:
    half = len(TEXT) // 2
    packed = gzip.compress(TEXT[:half]) + gzip.compress(TEXT[half:]) + b"\0" * 512

    file = parsed(put(tmp_path, packed))

    assert without_name(file) == without_name(parsed(put(tmp_path, TEXT)))


@pytest.mark.parametrize("left_out", [1, 8, 9, 500, 2000])
def test_of_a_cut_off_gzip_file_is_told_what_could_be_read(left_out: int, tmp_path: Path) -> None:
    noise = b"".join(b"[2026-06-02 08:40:00] %d\n" % (number * 7919 % 10007) for number in range(4000))
    path = put(tmp_path, gzip.compress(TEXT + noise)[:-left_out])

    file = parsed(path)

    assert file["ready_line"] == len(LINES)
    assert file["warnings"] == ["the packed data end early: told is what could be unpacked"]
    assert f"warning: {file['warnings'][0]}" in format_text({"files": [file]})


def test_of_a_damaged_gzip_file_is_told_what_comes_before(tmp_path: Path) -> None:
    noise = os.urandom(60_000).hex().encode() + b"\n"
    packed = bytearray(gzip.compress(TEXT + noise))
    packed[-20_000:-19_990] = b"\xff" * 10

    file = parsed(put(tmp_path, bytes(packed)))

    assert file["ready_line"] == len(LINES)
    assert len(file["warnings"]) == 1


def test_what_lies_behind_packed_data_is_said(tmp_path: Path) -> None:
    file = parsed(put(tmp_path, gzip.compress(TEXT) + b"something else"))

    assert file["lines"] == len(LINES)
    assert file["warnings"] == ["behind the packed data are others that were not read"]


def test_a_gzip_file_that_unpacks_to_much_more_is_read_in_blocks(tmp_path: Path) -> None:
    path = put(tmp_path, gzip.compress(b"x" * 200 + b"\n" + b"\0" * (40 * BLOCK_BYTES)))

    with opened(str(path)) as log:
        sizes = [len(block.text) for block in log.blocks()]

    assert max(sizes) <= LONGEST_LINE_BYTES + 2 * BLOCK_BYTES
    assert log.bytes_read == 201 + 40 * BLOCK_BYTES


# --- no log --------------------------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


MAKES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.mkdir(), "is a directory; a log file is needed"),
    (lambda path: None, "cannot be read: No such file or directory"),
    (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file or directory"),
    (lambda path: path.symlink_to("/dev/zero"), "is a device; a log file is needed"),
    (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    (os.mkfifo, "is a pipe or socket; a log file is needed, or - for standard input"),
    (_socket, "is a pipe or socket; a log file is needed, or - for standard input"),
    (lambda path: path.write_bytes(bytes(range(256)) * 40), "is not a text file; a log file is needed"),
    (lambda path: path.write_bytes(gzip.compress(b"x" * 9999)[:12]), "cannot be read: damaged"),
    (lambda path: path.write_bytes(gzip.compress(b"x")[:10] + b"\xff" * 99), "cannot be read: damaged"),
    (
        lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(90)),
        "is packed by zstd; only gzip is unpacked here, others by a pipe into parse -",
    ),
]


@pytest.mark.parametrize(("make", "problem"), MAKES)
def test_what_is_no_log_is_an_input_error(make: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    make(path := tmp_path / "x")

    with pytest.raises(InputError) as caught:
        parsed(path)

    assert str(caught.value) == f"{path}: {problem}"


def test_a_name_that_is_none_is_an_input_error() -> None:
    with pytest.raises(InputError, match="cannot be read: its name is none"):
        parsed("a\0b")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for make, _ in MAKES:
        path = tmp_path / f"x{len(os.listdir(tmp_path))}"
        make(path)
        with pytest.raises(InputError):
            parsed(path)

    assert len(os.listdir("/proc/self/fd")) == before


def test_an_unknown_framework_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'x' is unknown; allowed are auto, .*generic.*sglang.*vllm"):
        parsed(put(tmp_path, TEXT), "x")


def test_a_file_that_grows_while_it_is_read_ends_where_it_ended(tmp_path: Path) -> None:
    path = put(tmp_path, TEXT)

    with opened(str(path)) as log, path.open("ab") as writer:
        writer.write(b"later\n")
        writer.flush()
        text = b"".join(block.text for block in log.blocks())

    assert text == TEXT


class BadDisk(io.RawIOBase):
    """Gives so many bytes and then fails."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._data:
            raise OSError(5, "Input/output error")
        size = min(len(buffer), len(self._data), BLOCK_BYTES)
        buffer[:size], self._data = self._data[:size], self._data[size:]
        return size


def test_a_disk_that_fails_on_the_way_leaves_what_was_read() -> None:
    log = LogInput("x", io.BufferedReader(BadDisk(b"a\n" * BLOCK_BYTES), 1 << 16))

    text = b"".join(block.text for block in log.blocks())

    assert len(text) >= BLOCK_BYTES
    assert len(log.warnings) == 1
    assert log.warnings[0].endswith("(Input/output error): told is what was read")


def test_a_disk_that_fails_at_once_is_an_input_error() -> None:
    log = LogInput("x", io.BufferedReader(BadDisk(b"")))

    with pytest.raises(InputError, match="x: cannot be read: Input/output error"):
        list(log.blocks())


# --- several files, and what is printed ----------------------------------------------------------------------


def run(*paths: Path | str, as_json: bool = False) -> tuple[int, str, str]:
    out, problems = io.StringIO(), io.StringIO()
    status = parse([str(path) for path in paths], "auto", FRAMEWORKS, as_json, out, problems)
    return status, out.getvalue(), problems.getvalue()


def test_several_files_are_told_in_their_order(tmp_path: Path) -> None:
    first, second = put(tmp_path, TEXT, "a.log"), put(tmp_path, TEXT[: TEXT.index(b"\n") + 1], "b.log")

    status, out, problems = run(first, second)
    _, as_json, _ = run(first, second, as_json=True)

    assert (status, problems) == (0, "")
    assert out.index(f"{first}: sglang") < out.index(f"{second}: sglang")
    assert [one["lines"] for one in json.loads(as_json)["files"]] == [len(LINES), 1]


def test_a_file_that_cannot_be_read_costs_the_others_nothing(tmp_path: Path) -> None:
    good, bad = put(tmp_path, TEXT), tmp_path / "missing"

    status, out, problems = run(bad, good)

    assert (status, problems) == (2, f"stallwatch: {bad}: cannot be read: No such file or directory\n")
    assert f"{len(LINES)} lines read; ready at line {len(LINES)}" in out
    assert json.loads(run(bad, good, as_json=True)[1])["files"][0]["file"] == str(good)
    assert run(bad, as_json=True)[:2] == (2, "")


def test_a_name_cannot_draw_on_the_terminal(tmp_path: Path) -> None:
    path = put(tmp_path, TEXT, "a\x1b[2J\nb")

    status, out, _ = run(path)
    _, _, problems = run(f"{path}\x1b[2J")

    assert status == 0
    assert "\x1b" not in out + problems
    assert "a?[2J?b: sglang" in out


# --- progress ------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("size", "is_terminal", "drawn"),
    [(BAR_BYTES + 2 * BLOCK_BYTES, True, True), (BAR_BYTES + 9, False, False), (BAR_BYTES, True, False)],
)
def test_a_bar_is_drawn_for_a_large_file_on_a_terminal(
    size: int, is_terminal: bool, drawn: bool, tmp_path: Path
) -> None:
    path = put(tmp_path, b"a line\n")
    os.truncate(path, size)
    terminal = Terminal(is_terminal)

    with opened(str(path), terminal=terminal) as log:
        for _ in log.blocks():
            pass

    told = terminal.getvalue()
    assert ("100 % of" in told) == drawn
    assert told.endswith("\r\x1b[K") == drawn
    assert told.count("\r") <= 103


def test_a_bar_is_wiped_when_reading_fails(tmp_path: Path) -> None:
    path = put(tmp_path, b"\1" * 100)
    os.truncate(path, BAR_BYTES + 1)
    terminal = Terminal(True)

    with pytest.raises(InputError), opened(str(path), terminal=terminal) as log:
        list(log.blocks())

    assert terminal.getvalue().endswith("\r\x1b[K")


# --- containers ----------------------------------------------------------------------------------------------


def docker(line: str, second: int, stream: str = "stdout") -> str:
    time = f"2026-06-02T0{second // 3600}:{second // 60 % 60:02}:{second % 60:02}.5Z"
    return json.dumps({"log": line, "stream": stream, "time": time}, separators=(",", ":"))


def cri(line: str, second: int, tag: str = "F", stream: str = "stdout") -> str:
    return f"2026-06-02T0{second // 3600}:{second // 60 % 60:02}:{second % 60:02}.500000000Z {stream} {tag} {line}"


WRAPS: dict[str, Callable[[str, int], str]] = {
    "docker": lambda line, second: docker(line + "\n", second),
    "cri": cri,
}


@pytest.mark.parametrize("form", WRAPS)
def test_a_containers_log_tells_what_the_server_wrote(form: str, tmp_path: Path) -> None:
    wrapped = "".join(WRAPS[form](line, 0) + "\n" for line in LINES).encode()

    file, plain = parsed(put(tmp_path, wrapped, "w")), parsed(put(tmp_path, TEXT))

    assert (file["container"], file["bytes"]) == (form, len(wrapped))
    same = set(plain) - {"file", "bytes", "container"}
    assert {key: file[key] for key in same} == {key: plain[key] for key in same}


def test_lines_are_counted_on_disk_and_pieces_of_a_line_are_lines(tmp_path: Path) -> None:
    lines = [
        cri("[2026-06-02 08:00:00] server_args=Server", 0, "P"),
        cri("Args(tp_size=1, api_key='x')", 0),
        cri("[2026-06-02 08:00:09] The server is fired up and ready to roll!", 9),
    ]

    file = parsed(put(tmp_path, "\n".join(lines).encode()))

    assert (file["lines"], file["ready_line"], file["starts"]) == (3, 3, 1)
    assert file["longest_silence"] == {"seconds": 8.5, "after_line": 2}


@pytest.mark.parametrize("form", WRAPS)
def test_a_line_without_a_time_has_the_containers(form: str, tmp_path: Path) -> None:
    """Bars have none: the silence in a load is that between its bars, whatever zone the server's clock is in."""
    wrap = WRAPS[form]
    bar = "Loading safetensors checkpoint shards:  {}% Completed | {}/4 [00:01<00:10,  1.0s/it]"
    lines = [
        wrap("[2026-06-02 16:00:00] server_args=ServerArgs(tp_size=1)", 0),
        wrap("[2026-06-02 16:00:10] Load weight begin. avail mem=138.01 GB", 10),
        wrap(bar.format(25, 1), 40),
        wrap(bar.format(50, 2), 900),
        wrap(bar.format(75, 3), 930),
        wrap("[2026-06-02 16:16:00] Load weight end. elapsed=950 s, type=X", 960),
    ]

    file = parsed(put(tmp_path, "\n".join(lines).encode()))

    assert file["longest_silence"] == file["longest_progress_silence"] == {"seconds": 860.5, "after_line": 3} or (
        file["longest_progress_silence"] == {"seconds": 860.0, "after_line": 3}
    )
    assert file["progress_silences"][0]["undated_lines"] == 0


def test_without_any_printed_time_the_containers_clock_is_the_logs(tmp_path: Path) -> None:
    lines = [
        cri("Loading shards 1/9", 0),
        cri('1.2.3.4 - "GET / HTTP/1.1" 200', 100),
        cri("Loading shards 2/9", 160),
        cri("Server is ready", 170),
    ]

    file = parsed(put(tmp_path, "\n".join(lines).encode()), "generic")

    assert file["longest_silence"] == {"seconds": 100.0, "after_line": 1}
    assert file["longest_progress_silence"] == {"seconds": 160.0, "after_line": 1}
    assert [phase["begin"] for phase in file["phases"] if phase["rank"] is None] == [
        "2026-06-02T00:00:00Z",
        "2026-06-02T00:02:50Z",
    ]


def test_a_clock_that_shows_late_moves_what_was_told_before(tmp_path: Path) -> None:
    early = [cri("no time in here", second) for second in range(0, 2000, 50)]
    late = [cri(f"[2026-06-02 {8 + second // 3600:02}:{second // 60 % 60:02}:00] x", second) for second in (2400, 2460)]

    with_bytes = "\n".join(early + late).encode()
    file = parsed(put(tmp_path, with_bytes), "sglang")

    assert file["longest_silence"]["after_line"] == len(early)
    assert 440 <= file["longest_silence"]["seconds"] <= 460


# --- anything ------------------------------------------------------------------------------------------------


PIECES = st.sampled_from(
    [
        *(b"\n", b"\r", b"\0", b"\xff\xfe", b"\x1b[31m", b'{"log":"', b"[2026-06-02 08:00:00 TP1] "),
        b"[2026-06-02 08:00:00] server_args=ServerArgs(tp_size=4, api_key='sk')\n",
        b"[2026-06-02 09:00:00 TP1] Load weight begin. avail mem=1 GB\n",
        b"[0000-00-00 99:99:99 TP99999] Load weight end.\n",
        b"Loading safetensors checkpoint shards: 50% Completed | 2/4 [00:20<00:00,  8.11it/s]\r",
        b'{"log":"INFO x\\n","stream":"stdout","time":"2026-06-02T08:00:00Z"}\n',
        b"2026-06-02T08:00:00Z stdout P abc\n",
        b"[2026-06-02 08:09:00] The server is fired up and ready to roll!\n",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(PIECES, st.binary(max_size=30)), max_size=30))
def test_anything_is_read_and_its_lines_are_those_on_disk(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    stdin: Any = io.BufferedReader(io.BytesIO(data))

    try:
        (file,) = parse_files(["-"], None, FRAMEWORKS, stdin)["files"]
    except InputError:
        return

    assert file["lines"] == data.count(b"\n") + bool(data and not data.endswith(b"\n"))
    assert file["bytes"] == len(data)
    assert all(error["line"] <= file["lines"] for error in file["errors"])
