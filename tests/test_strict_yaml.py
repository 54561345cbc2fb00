"""Files as they come: missing, no text, no YAML; and the small readers of one value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stallwatch.strict_yaml import LARGEST_BYTES, InputError, Section, load, parse_duration, parse_size, shown


def section(text: str) -> Section:
    found = load("f.yml", text)
    assert found is not None
    return found


def complaint(text: str) -> str:
    with pytest.raises(InputError) as caught:
        load("f.yml", text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("90s", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("100ms", 0.1), ("1w2d", 777600.0), ("1y", 31536000)],
)
def test_durations_are_written_as_prometheus_writes_them(text: str, seconds: float) -> None:
    assert seconds == pytest.approx(parse_duration(text))


@pytest.mark.parametrize("text", ["", "5", "-5s", "1.5m", "5 m", "m", "5min", "s5", "9" * 400 + "y", "5m "])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration; write it as 90s, 5m or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1B", 1), ("64KiB", 65536), ("1MiB", 1048576), ("2GiB", 2147483648)]
)
def test_sizes_are_binary(text: str, size: int) -> None:
    assert size == parse_size(text)


@pytest.mark.parametrize("text", ["", "1MB", "1 MiB", "-1", "0x10", "9" * 5000])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.yml"

    with pytest.raises(InputError) as caught:
        load(path)

    assert f"{path}: cannot be read: No such file or directory" == str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path)

    assert f"{tmp_path}: cannot be read: Is a directory" == str(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_has_no_end_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.yml"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")

    with pytest.raises(InputError) as caught:
        load(path)

    assert f"{path}: cannot be read: no regular file" == str(caught.value)


@pytest.mark.parametrize("more", [0, 1])
def test_a_file_is_bounded_in_size(tmp_path: Path, more: int) -> None:
    path = tmp_path / "a.yml"
    path.write_text("a: b\n#" + "x" * (LARGEST_BYTES - 6 + more))

    if more:
        with pytest.raises(InputError, match="cannot be read: larger than 4 MiB"):
            load(path)
    else:
        assert load(path) is not None


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap."""
    (tmp_path / "data").write_text("a: b\r\nc: d\r\n")
    (tmp_path / "a.yml").symlink_to("data")
    section = load(tmp_path / "a.yml")

    assert section is not None
    assert (section.text("a"), section.text("c")) == ("b", "d")


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.yml"
    path.write_bytes(b"name: caf\xe9\n")

    with pytest.raises(InputError) as caught:
        load(path)

    assert f"{path}: cannot be read: not UTF-8 text" == str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\nb: 2\n", "f.yml:2: not YAML: expected ',' or ']', but got ':'"),
        ("a: 1\nb: c: d\n", "f.yml:2: not YAML: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "f.yml:2: not YAML: but found another document"),
        ("a: \x01\n", "f.yml: not YAML: special characters are not allowed"),
        ('a: "\\UFFFFFFFF"\n', "f.yml: not YAML: cannot be parsed"),
        ("[" * 5000, "f.yml: not YAML: cannot be parsed"),
        ("- a\n", "f.yml:1: a mapping (key: value) is needed here"),
        ("a: 1\nb: 2\na: 3\n", "f.yml:3: a: the key is given twice"),
    ],
)
def test_what_is_no_mapping_of_yaml_is_refused_with_its_line(text: str, expected: str) -> None:
    assert expected == complaint(text)


@pytest.mark.parametrize("text", ["", "# only words\n", "\n\n"])
def test_an_empty_file_is_no_mistake(text: str) -> None:
    assert load("f.yml", text) is None


def test_values_are_read_as_their_type() -> None:
    top = section("t: 12\nb: true\ni: 7\nd: 2m\ns: 2KiB\nl: [a, 1]\nm: {x: y}\ne: '^a+$'\n")

    assert top.text("t") == "12"
    assert top.boolean("b", False) is True
    assert top.integer("i", 0) == 7
    assert top.duration("d", 0.0) == 120.0
    assert top.size("s", 0) == 2048
    assert top.texts("l") == ("a", "1")
    assert top.mapping("m") == {"x": "y"}
    pattern = top.expression("e")
    assert pattern is not None
    assert pattern.fullmatch("aa")
    top.finish()


def test_what_is_not_given_has_its_default() -> None:
    top = section("other: 1\n")

    assert top.text("t", "x") == "x"
    assert top.boolean("b", True) is True
    assert top.integer("i", 7) == 7
    assert top.duration("d", 1.5) == 1.5
    assert top.size("s", 9) == 9
    assert top.texts("l") == ()
    assert top.mapping("m") == {}
    assert top.expression("e") is None
    assert top.expressions("es") == ()
    assert top.section("sub") is None
    assert list(top.sections("subs")) == []


def test_an_empty_value_is_not_an_empty_string() -> None:
    """`name:` with nothing behind it is a slip of the pen, not a name."""
    with pytest.raises(InputError, match=r"^f.yml:1: name: a string is needed here$"):
        section("name:\n").text("name")


def test_a_quoted_number_is_no_number() -> None:
    with pytest.raises(InputError, match=r"^f.yml:1: port: '80' is no whole number$"):
        section("port: '80'\n").integer("port", 0)


def test_an_endless_number_is_no_number() -> None:
    with pytest.raises(InputError, match="is no whole number"):
        section(f"port: {'9' * 5000}\n").integer("port", 0)


def test_keys_nobody_asked_for_are_refused_and_the_others_listed() -> None:
    top = section("a: 1\nz: 2\n")
    top.text("a")
    top.text("b", "")

    with pytest.raises(InputError, match=r"^f.yml:2: z: unknown key; allowed are a, b, c$"):
        top.finish(("c",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("maybe", "'maybe'"),
        ("10 minutes", "'10 minutes'"),
        ("serve_stall_aftr", "'serve_stall_aftr'"),
        ("RequireAnyClientCert", "'RequireAnyClientCert'"),
        ("X-Frame-Optoins", "'X-Frame-Optoins'"),
        ("sk-proj-4fQ9x7Zb1c", "a text of 18 characters"),
        ("correct horse battery", "a text of 21 characters"),
        ("http://user:password@h/", "a text of 23 characters"),
        ("kXpWvQzRtYbNmHgFdS", "a text of 18 characters"),
        ("a" * 33, "a text of 33 characters"),
    ],
)
def test_a_wrong_word_is_repeated_unless_it_may_be_a_secret(text: str, expected: str) -> None:
    assert shown(text) == expected


@pytest.mark.parametrize(
    "text",
    ["a: *sk-proj-4fQ9x7Zb1c\n", "sk-proj-4fQ9x7Zb1c: 1\nsk-proj-4fQ9x7Zb1c: 2\n", "a: !<tag:sk-proj-4fQ9x7Zb1c> [\n"],
)
def test_what_is_no_yaml_is_told_without_what_it_quotes(text: str) -> None:
    assert "4fQ9x7" not in complaint(text)


def test_what_is_no_expression_is_told_without_its_names() -> None:
    with pytest.raises(InputError, match="not a regular expression") as caught:
        section("a: '(?P<sk4fQ9x7Zb1cLong>x)(?P<sk4fQ9x7Zb1cLong>x)'\n").expression("a")
    assert "4fQ9x7" not in str(caught.value)
