from __future__ import annotations

import os

import pytest

from stallwatch.sources.wait_class import class_of_state, class_of_symbol, class_of_syscall


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
