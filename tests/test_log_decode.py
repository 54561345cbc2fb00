"""What container runtimes put around lines, taken off: line for line, whatever the bytes are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.sources.logs import decode as log_decode
from stallwatch.sources.logs.decode import Part, StreamUnwrapper, Unwrapper, form_of, unix_time

TIME = "2026-06-02T08:00:0{}.5Z"


def docker(text: str, stream: str = "stderr", second: int = 0, **more: object) -> bytes:
    """One line as Docker's json-file driver writes it."""
    record = {"log": text, "stream": stream, "time": TIME.format(second), **more}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def cri(text: str, tag: str = "F", stream: str = "stderr", second: int = 0) -> bytes:
    return f"2026-06-02T08:00:0{second}.123456789+00:00 {stream} {tag} {text}\n".encode()


def whole(*lines: bytes) -> bytes:
    unwrapper = Unwrapper()
    return b"".join([*map(unwrapper.feed, lines), unwrapper.finish()])


def at_once(*lines: bytes) -> bytes:
    return whole(b"".join(lines))


def apart(*chunks: bytes) -> dict[str, bytes]:
    """Texts by stream, of a log that is followed."""
    streams, texts = StreamUnwrapper(), dict[str, bytes]()
    for parts in [*map(streams.feed, chunks), streams.leave()]:
        for name, part in parts.items():
            texts[name] = texts.get(name, b"") + part.text
    return texts


# --- forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "form"),
    [
        (docker("x\n"), "docker"),
        (docker("x\n", attrs={"tag": "a{b}"}), "docker"),
        (b'{"time":"2026-06-02T08:00:00Z","stream":"stdout","log":"x\\n"}\n', ""),
        (cri("x"), "cri"),
        (cri("x", "P"), "cri"),
        (cri("x", "P:more"), "cri"),
        (b"2026-06-02T08:00:09.5Z stdout F x\n", "cri"),
        (b"2026-06-02T08:00:09.5+03:00 stdout F \n", "cri"),
        (b"2026-06-02T08:00:09.5Z stdout F\n", "cri"),
        # Look-alikes: an application's own times, own JSON, and words in the place of the stream.
        (b"2026-06-02 08:00:09 stdout F x\n", ""),
        (b"2026-06-02T08:00:09.5Z INFO F x\n", ""),
        (b"2026-06-02T08:00:09.5Z stdout X x\n", ""),
        (b"2026-06-02T08:00:09.5Z stdout  F x\n", ""),
        (b'{"log":"x","level":"INFO"}\n', ""),
        (b'{"log":1,"stream":"stdout","time":"x"}\n', ""),
        (b"[2026-06-02 08:00:00 TP0] Load weight begin.\n", ""),
        (b"\n", ""),
    ],
)
def test_a_form_is_known_by_one_line(line: bytes, form: str) -> None:
    assert form_of(line) == form


PLAIN = b"[2026-06-02 08:00:00 TP0] Load weight begin.\r\n\nx\0\xff\n 3%|#  \r"


def test_what_no_runtime_wrote_passes_unchanged_and_at_once() -> None:
    streams = StreamUnwrapper()

    assert streams.feed(PLAIN) == {"": Part(PLAIN, len(PLAIN))}
    assert streams.form == ""
    assert at_once(PLAIN) == whole(PLAIN[:5], PLAIN[5:]) == PLAIN


@pytest.mark.parametrize("begin", [b"\n", b"  0%|     |", b"0% done", b"2026-06-02 08:00:00 x", b"{ jso"])
def test_a_line_without_end_is_not_held_back_where_it_cannot_be_a_runtimes(begin: bytes) -> None:
    assert StreamUnwrapper().feed(begin) == {"": Part(begin, len(begin))}


@pytest.mark.parametrize("line", [docker("Load weight begin.\n"), cri("Load weight begin.")])
def test_a_form_is_known_however_the_first_line_comes_in(line: bytes) -> None:
    for cut in range(len(line)):
        assert apart(line[:cut], line[cut:]) == {"stderr": b"Load weight begin.\n"}, cut


@pytest.mark.parametrize("line", [docker("x\n"), cri("x")])
@pytest.mark.parametrize("damage", [b"\0" * 5000, b'lf a line","stream":"stdout","time":"2026"}\n'])
def test_a_log_may_begin_with_a_hole_or_in_the_middle_of_a_line(damage: bytes, line: bytes) -> None:
    texts = at_once(damage + line)

    assert texts.endswith(b"x\n")
    assert texts.count(b"\n") == (damage + line).count(b"\n")


# --- texts ---------------------------------------------------------------------------------------------------

TEXTS = (
    "plain",
    "",
    "  leading blanks stay",
    'quoted "twice" and \\ back\\nslash \\',
    "tab\tand bell\a and \x1b[1;36mcolour\x1b[0m",
    "bar 10%\r bar 20%\r",
    "emoji \N{GRINNING FACE} and \N{LATIN SMALL LETTER E WITH ACUTE}, \N{REPLACEMENT CHARACTER}",
    "<a> & b",
    '{"log":"inside","stream":"stdout"}',
    "2026-06-02T08:00:00Z stdout F inside",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_json_is_read_back(text: str, ascii_only: bool) -> None:
    record = {"log": f"{text}\n", "stream": "stdout", "time": TIME.format(0)}
    line = json.dumps(record, separators=(",", ":"), ensure_ascii=ascii_only).encode() + b"\n"

    assert at_once(line, line) == f"{text}\n{text}\n".encode()
    assert at_once(line.replace(b'":"', b'": "'), line) == f"{text}\n{text}\n".encode()


@pytest.mark.parametrize("text", TEXTS)
def test_text_behind_cri_is_read_as_it_is(text: str) -> None:
    assert at_once(cri(text), cri(text)) == f"{text}\n{text}\n".encode()


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (b"\\u003ca\\u003e \\u0026", b"<a> &"),
        (b"\\ud83d\\ude00", "\N{GRINNING FACE}".encode()),
        (b"\\ud83d alone", b"\xef\xbf\xbd alone"),
        (b"\\\\u003c", b"\\u003c"),
        (b"\\u000aforged", b"\rforged"),
        (b"two\\nin one", b"two\rin one"),
        (b"\\/", b"/"),
    ],
)
def test_every_escape_is_put_back_and_makes_no_line_of_its_own(escaped: bytes, text: bytes) -> None:
    line = b'{"log":"' + escaped + b'\\n","stream":"stdout","time":"2026-06-02T08:00:00Z"}\n'

    assert at_once(line) == text + b"\n"
    assert at_once(b"\0" + line) == text + b"\n"


def test_a_tty_ends_its_lines_with_cr_lf() -> None:
    assert at_once(docker("x\r\n")) == b"x\r\n"


def test_labels_of_a_container_are_passed_over() -> None:
    before = b'{"log":"x\\n","stream":"stdout","attrs":{"tag":"a"},"time":"2026-06-02T08:00:00Z"}\n'

    assert at_once(before, docker("y\n", attrs={"a": "b", "c": "}"}), docker("z\n", attrs={"a": "b"})) == b"x\ny\nz\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"\0\0" + docker("x\n"), b"x\n"),
        (docker("half\n")[:20] + docker("x\n"), b"x\n"),
        (docker("x\n")[:-1] + docker("half\n")[:12] + b"\n", b"x\n"),
        (docker("x\n")[:-3] + b"\n", b"\n"),
        (b'{"log":' + b"[" * 20_000 + b"\n", b"\n"),
        (b'{"log":"' + b"9" * 9000 + b'","stream":7}\n', b"\n"),
        (b"no JSON at all\n", b"\n"),
        (b"\n", b"\n"),
    ],
)
def test_a_damaged_line_of_json_costs_no_other_line(line: bytes, text: bytes) -> None:
    """A crash of the host or a full disk leaves holes and halves; `docker logs` stops at them."""
    assert at_once(docker("a\n"), line, docker("b\n")) == b"a\n" + text + b"b\n"


@pytest.mark.parametrize("line", [b"no such line\n", b"\n", b"2026-06-02T08:00:00Z stdout\n"])
def test_a_damaged_line_of_cri_costs_no_other_line(line: bytes) -> None:
    assert at_once(cri("a"), line, cri("b")) == b"a\n\nb\n"


# --- pieces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces",
    [
        (docker("Load wei"), docker("ght be"), docker("gin.\n")),
        (cri("Load wei", "P"), cri("ght be", "P"), cri("gin.")),
        (cri("Load weight begin.", "P"), cri("", "P"), cri("")),
    ],
)
def test_a_line_in_pieces_stands_where_its_first_piece_stood(pieces: tuple[bytes, ...]) -> None:
    after = docker("x\n") if pieces[0].startswith(b"{") else cri("x")

    for text in (at_once(after, *pieces, after), whole(after, *pieces, after)):
        assert text == b"x\nLoad weight begin.\n\n\nx\n"
    assert apart(after, *pieces, after) == {"stderr": b"x\nLoad weight begin.\n\n\nx\n"}


@pytest.mark.parametrize("form", ["docker", "cri"])
def test_pieces_of_two_streams_are_not_mixed(form: str) -> None:
    lines = {
        "docker": (docker("out ", "stdout"), docker("err ", "stderr"), docker("put\n", "stdout"), docker("or\n")),
        "cri": (cri("out ", "P", "stdout"), cri("err ", "P"), cri("put", "F", "stdout"), cri("or")),
    }[form]

    assert at_once(*lines) == whole(*lines) == b"out put\nerr or\n\n\n"
    assert apart(*lines) == {"stdout": b"out put\n\n", "stderr": b"err or\n\n"}


@pytest.mark.parametrize("last", [cri("last words", "P"), docker("last words")])
def test_the_last_piece_may_never_get_its_end(last: bytes) -> None:
    before = docker("x\n") if last.startswith(b"{") else cri("x")

    assert at_once(before, last) == b"x\nlast words\n"
    assert apart(before, last) == {"stderr": b"x\nlast words"}


def test_a_piece_is_given_out_before_its_end_comes_where_a_log_is_followed() -> None:
    streams = StreamUnwrapper()
    streams.feed(cri("x"))

    assert streams.feed(cri("  3%|", "P"))["stderr"].text == b"  3%|"
    assert streams.feed(cri(" more", "P"))["stderr"].text == b" more"
    assert streams.feed(cri(""))["stderr"].text == b"\n\n\n"


def test_the_last_words_of_one_process_are_not_joined_to_the_first_of_the_next() -> None:
    lines = (docker("Segmentation fault"), docker("INFO start\n", time="2026-06-02T08:00:30Z"))

    assert at_once(*lines) == b"Segmentation fault\nINFO start\n"
    assert apart(*lines) == {"stderr": b"Segmentation fault\nINFO start\n"}


def test_a_full_piece_is_joined_however_late_the_next_one_comes() -> None:
    lines = (docker("x" * 16384), docker("y\n", time="2026-06-02T09:00:00Z"))

    assert at_once(*lines) == b"x" * 16384 + b"y\n\n"


def test_a_line_in_pieces_goes_on_in_the_next_file() -> None:
    streams = StreamUnwrapper()
    streams.feed(cri("x") + cri("Load wei", "P"))
    assert streams.leave() == {}

    assert streams.feed(cri("ght begin."))["stderr"].text == b"ght begin.\n\n"


def test_what_waits_for_an_end_that_does_not_come_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_decode, "MOST_HELD_LINES", 10)
    unwrapper = Unwrapper()
    unwrapper.feed(cri("never ", "P", "stdout"))

    assert b"".join(unwrapper.feed(cri(str(number))) for number in range(10)).startswith(b"never \n0\n1\n")
    assert unwrapper.feed(cri("ended", "F", "stdout")) == b"ended\n"


def test_a_line_on_disk_is_held_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_decode, "MOST_PHYSICAL_BYTES", 100)
    streams = StreamUnwrapper()
    streams.feed(cri("x"))
    for _ in range(50):
        assert streams.feed(b"2026-06-02T08:00:00Z stderr F " + b"y" * 30) == {}

    assert len(streams.feed(b"end\n")["stderr"].text) <= 104
    assert streams.feed(cri("z"))["stderr"].text == b"z\n"


# --- line numbers, sizes, times ------------------------------------------------------------------------------


def test_the_time_of_each_line_of_the_file_is_known_while_it_is_given_out() -> None:
    unwrapper = Unwrapper()
    unwrapper.feed(docker("a\n", second=1) + docker("b\n", second=2))
    begun = unix_time("2026-06-02T08:00:00.5Z")
    assert begun is not None

    assert [unwrapper.time_of(line) for line in (0, 1, 2, 3)] == [None, begun + 1, begun + 2, None]
    unwrapper.feed(docker("c", second=3))
    assert [unwrapper.time_of(line) for line in (2, 3)] == [None, None]
    unwrapper.finish()
    assert unwrapper.time_of(3) == begun + 3


def test_times_of_any_zone_are_read_and_others_are_none() -> None:
    assert unix_time(b"2026-06-02T08:00:09.5Z") == unix_time("2026-06-02T11:00:09.500000000+03:00")
    assert [unix_time(text) for text in ("", "2026-06-02T08:00:09", "9999-99-99T00:00:00Z", "\xff")] == [None] * 4


def test_sizes_are_those_on_disk_and_times_those_of_the_last_line() -> None:
    first, second = docker("a\n", "stdout", 1), docker("b\n", "stderr", 2)

    parts = StreamUnwrapper().feed(first + second + first)

    assert {name: part.size for name, part in parts.items()} == {"stdout": 2 * len(first), "stderr": len(second)}
    assert parts["stderr"].time == unix_time(TIME.format(2))


def test_an_unfinished_line_on_disk_has_the_size_of_its_bytes() -> None:
    streams = StreamUnwrapper()
    streams.feed(docker("a\n"))
    assert streams.feed(docker("b\n")[:-1]) == {}

    assert {name: part.size for name, part in streams.leave().items()} == {"stderr": len(docker("b\n")) - 1}


# --- any bytes -----------------------------------------------------------------------------------------------

LINES = st.one_of(
    st.binary(max_size=60).map(lambda text: text + b"\n"),
    st.text(max_size=30).map(lambda text: docker(text + "\n")),
    st.tuples(st.text(max_size=20), st.sampled_from(["stdout", "stderr"])).map(lambda each: docker(*each)),
    st.tuples(
        st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n"), max_size=20),
        st.sampled_from(["F", "P", "P:x", "X"]),
        st.sampled_from(["stdout", "stderr"]),
    ).map(lambda each: cri(*each)),
    st.binary(max_size=20).map(lambda text: b'{"log":"' + text + b'\\n","stream":"stdout","time":""}\n'),
)
FIRST = st.sampled_from([docker("x\n"), cri("x"), b""])


@given(FIRST, st.lists(LINES, max_size=12), st.binary(max_size=30), st.lists(st.integers(1, 90), max_size=40))
def test_no_bytes_raise_and_no_line_is_lost_or_added(
    first: bytes, lines: list[bytes], rest: bytes, cuts: list[int]
) -> None:
    content = first + b"".join(lines) + rest
    chunks, left = list[bytes](), content
    for cut in cuts:
        chunks.append(left[: max(cut, len(first))] if not chunks else left[:cut])
        left = left[len(chunks[-1]) :]
    chunks.append(left)

    text = whole(*chunks)
    parts = apart(*chunks)

    if first:  # else what it is may be decided earlier or later
        assert (text, parts) == (at_once(content), apart(content))
    ends = content.count(b"\n") + (not content.endswith(b"\n") and bool(content))
    assert text.count(b"\n") + (not text.endswith(b"\n") and bool(text)) in (ends, ends - 1)


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_sizes_of_all_streams_are_the_bytes_of_the_file(chunks: list[bytes]) -> None:
    streams, size = StreamUnwrapper(), 0
    for parts in [*(streams.feed(chunk) for chunk in [docker("x\n"), *chunks]), streams.leave()]:
        size += sum(part.size for part in parts.values())

    assert size == len(docker("x\n")) + sum(map(len, chunks))


BODIES = st.lists(
    st.sampled_from(
        [b"x", b'"', b'\\"', b"\\\\", b"\\n", b"\\u001b", b"\\r", b"\\", b'","stream":"stdout"', b'{"log":"', b"\xff"]
    ),
    max_size=5,
).map(b"".join)
USUAL = st.tuples(
    BODIES, st.sampled_from([b"stdout", b"stderr"]), st.sampled_from([b"2026-06-02T08:00:00Z", b"", b"\\"])
)


@given(st.lists(USUAL, min_size=1, max_size=4))
def test_a_block_at_once_is_what_its_lines_are_one_by_one(lines: list[tuple[bytes, bytes, bytes]]) -> None:
    block = b"".join(b'{"log":"%b\\n","stream":"%b","time":"%b"}\n' % line for line in lines)
    decoded = log_decode._docker_block(block)
    if decoded is not None:
        assert decoded.each() == [log_decode._docker_row(line) for line in block.splitlines()]


# --- whatever a runtime does to lines ------------------------------------------------------------------------

WORDS = st.text(alphabet='ab "\\\t\r\x1b{}\N{GRINNING FACE}', max_size=12)
SAID = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.lists(WORDS, min_size=1, max_size=3)), max_size=8)
"""Lines, each in the pieces a runtime wrote it in."""


def on_disk(form: str, said: list[tuple[str, list[str]]], chances: random.Random) -> tuple[list[bytes], list[int]]:
    """The file's lines, the streams mixed at random; and for each line said the number of its first piece."""
    forms: Mapping[str, Callable[[str, str, bool], bytes]] = {
        "docker": lambda piece, stream, is_last: docker(piece + "\n" * is_last, stream),
        "cri": lambda piece, stream, is_last: cri(piece, "F" if is_last else "P", stream),
    }
    write = forms[form]
    left = {
        name: [(n, pieces) for n, (stream, pieces) in enumerate(said) if stream == name]
        for name in ("stdout", "stderr")
    }
    at, lines, firsts = dict.fromkeys(left, 0), list[bytes](), [0] * len(said)
    while any(left.values()):
        stream = chances.choice([name for name in left if left[name]])
        number, pieces = left[stream][0]
        if at[stream] == 0:
            firsts[number] = len(lines)
        lines.append(write(pieces[at[stream]], stream, at[stream] + 1 == len(pieces)))
        at[stream] += 1
        if at[stream] == len(pieces):
            at[stream] = 0
            del left[stream][0]
    return lines, firsts


@pytest.mark.parametrize("form", ["docker", "cri"])
@given(SAID, st.randoms(use_true_random=False))
def test_what_was_said_comes_out_in_order_over_any_pieces_and_files(
    form: str, said: list[tuple[str, list[str]]], chances: random.Random
) -> None:
    lines, _ = on_disk(form, said, chances)
    streams, texts = StreamUnwrapper(), {"stdout": b"", "stderr": b""}
    for line in lines:
        cut = chances.randrange(len(line) + 1)
        heard = [streams.feed(line[:cut]), streams.feed(line[cut:])]
        if chances.random() < 0.2:
            heard.append(streams.leave())
        for parts in heard:
            for name, part in parts.items():
                texts[name] += part.text

    for name, text in texts.items():
        expected = [f"{''.join(pieces)}".encode() + b"\n" * len(pieces) for stream, pieces in said if stream == name]
        assert text == b"".join(expected)


@pytest.mark.parametrize("form", ["docker", "cri"])
@given(SAID, st.randoms(use_true_random=False))
def test_a_line_stands_where_it_began_in_the_file(
    form: str, said: list[tuple[str, list[str]]], chances: random.Random
) -> None:
    lines, firsts = on_disk(form, said, chances)
    texts = at_once(*lines).split(b"\n")[:-1]

    expected = [b""] * len(lines)
    for first, (_, pieces) in zip(firsts, said, strict=True):
        expected[first] = "".join(pieces).encode()
    assert texts == expected
