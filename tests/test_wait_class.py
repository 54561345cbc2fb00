from __future__ import annotations

import os

import pytest

from stallwatch.sources.wait_class import class_of_state, class_of_symbol, class_of_syscall, is_write, writes


@pytest.mark.parametrize(
    ("machine", "number", "expected"),
    [
        ("x86_64", 202, "futex"),
        ("x86_64", 449, "futex"),
        ("x86_64", 7, "poll"),
        ("x86_64", 232, "poll"),
        ("x86_64", 281, "poll"),
        ("x86_64", 35, "sleep"),
        ("x86_64", 230, "sleep"),
        ("x86_64", 0, None),  # read: only the state can tell
        ("x86_64", 98, None),  # getrusage, which is futex elsewhere
        ("aarch64", 98, "futex"),
        ("aarch64", 22, "poll"),
        ("aarch64", 73, "poll"),
        ("aarch64", 115, "sleep"),
        ("aarch64", 202, None),  # accept, which is futex elsewhere
        ("riscv64", 98, None),
    ],
)
def test_numbers_are_those_of_the_architecture(machine: str, number: int, expected: str | None) -> None:
    assert class_of_syscall(machine).get(str(number).encode()) == expected


@pytest.mark.parametrize(
    ("machine", "expected"), [("x86_64", {b"1", b"20"}), ("aarch64", {b"64", b"66"}), ("s390x", set())]
)
def test_write_and_writev_are_writes(machine: str, expected: set[bytes]) -> None:
    assert writes(machine) == expected


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("pipe_write", True),
        ("anon_pipe_write", True),  # 6.14 and later
        ("pipe_read", False),
        ("anon_pipe_read", False),
        ("pipe_wait", False),  # before 5.5: reads or writes
        ("0", False),
    ],
)
def test_a_full_pipe_is_known_by_its_symbol(symbol: str, expected: bool) -> None:
    assert is_write(symbol) == expected


def test_an_unknown_architecture_has_no_numbers_at_all() -> None:
    assert class_of_syscall("s390x") == {}


def test_the_machine_we_run_on_is_the_default() -> None:
    assert class_of_syscall() == class_of_syscall(os.uname().machine)


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("futex_do_wait", "futex"),  # 6.15 and later
        ("futex_wait_queue", "futex"),  # 5.16 to 6.14
        ("futex_wait_queue_me", "futex"),  # up to 5.15
        ("rt_mutex_schedule", "futex"),  # priority inheritance
        ("do_epoll_wait", "poll"),
        ("ep_poll", "poll"),
        ("poll_schedule_timeout.constprop.0", "poll"),
        ("do_sys_poll", "poll"),
        ("do_poll.constprop.0", "poll"),
        ("hrtimer_nanosleep", "sleep"),
        ("__do_sys_pause", "sleep"),
        ("do_signal_stop", "stopped"),
        ("ptrace_stop", "other"),
        ("anon_pipe_read", "other"),
        ("folio_wait_bit_common", "other"),
        ("my_futex_thing", "other"),
        ("0", None),
        ("", None),
    ],
)
def test_symbols_change_with_the_kernel_and_are_matched_by_their_beginning(symbol: str, expected: str | None) -> None:
    assert class_of_symbol(symbol) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("T", "stopped"),
        ("t", "other"),
        ("Z", "other"),
        ("X", "other"),
        ("D", "disk"),
        ("R", "running"),
        ("S", None),
        ("I", None),
    ],
)
def test_some_states_decide_by_themselves(state: str, expected: str | None) -> None:
    assert class_of_state(state) == expected
