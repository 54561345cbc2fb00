"""What a card takes at rest, learned: spans of rest, clocks, and an estimate that errs on the low side."""

from __future__ import annotations

import pytest

from stallwatch.idle_power import MOST_LEARNED, REST_SECONDS, UNKNOWN_CLOCK, IdleKey, IdlePowers, Rest, bucket_of

KEY = IdleKey("GPU-0", "580.95", 3)
STEP = 5.0


def rest(*watts: float, key: IdleKey = KEY, span: Rest | None = None) -> list[float]:
    """Means that come out of one look every five seconds."""
    span = span or Rest()
    means = [span.add(key, each, STEP) for each in watts]
    return [mean for mean in means if mean is not None]


# --- spans -----------------------------------------------------------------------------------------------------


def test_thirty_seconds_of_rest_are_a_span_and_twentyfive_are_none() -> None:
    assert rest(*[122.0] * 7) == [122.0]
    assert rest(*[122.0] * 6) == []


def test_what_was_used_before_the_first_look_at_rest_may_have_been_work() -> None:
    assert rest(400.0, *[122.0] * 6) == [122.0]
    assert rest(122.0, 182.0, *[122.0] * 5) == [132.0]


def test_a_span_is_a_mean_of_all_its_looks_and_the_next_one_begins_at_once() -> None:
    assert rest(0.0, *[120.0, 124.0] * 6) == [122.0, 122.0]


def test_a_rest_that_ended_begins_anew() -> None:
    span = Rest()
    assert rest(*[122.0] * 6, span=span) == []
    span.end()

    assert rest(*[130.0] * 6, span=span) == []
    assert rest(130.0, span=span) == [130.0]


def test_another_clock_is_another_span() -> None:
    span, other = Rest(), KEY._replace(bucket=1)
    assert rest(*[122.0] * 6, span=span) == []

    assert rest(*[72.0] * 6, key=other, span=span) == []
    assert rest(72.0, key=other, span=span) == [72.0]


def test_a_look_that_took_longer_counts_for_as_long() -> None:
    span = Rest()
    span.add(KEY, 500.0, 30.0)

    assert span.add(KEY, 100.0, 25.0) is None
    assert span.add(KEY, 160.0, 5.0) == pytest.approx(110.0)


# --- the estimate ----------------------------------------------------------------------------------------------


def test_a_lower_rest_counts_at_once_and_a_higher_one_little_by_little() -> None:
    powers = IdlePowers()
    for mean, expected in ((130.0, 130.0), (122.0, 122.0), (130.0, 123.0)):
        powers.learn(KEY, mean)
        assert powers.of(KEY) == pytest.approx(expected)

    for _ in range(40):
        powers.learn(KEY, 130.0)
    assert powers.of(KEY) == pytest.approx(130.0, abs=0.1)


def test_card_driver_and_clock_are_learned_apart() -> None:
    powers = IdlePowers()
    powers.learn(KEY, 122.0)

    for other in (KEY._replace(gpu="GPU-1"), KEY._replace(driver="610.57"), KEY._replace(bucket=1)):
        assert powers.of(other) is None
    assert powers.of(IdleKey(*KEY)) == 122.0


@pytest.mark.parametrize("mean", [0.0, -5.0, 1e5, float("inf"), float("nan")])
def test_a_card_that_takes_nothing_or_no_end_is_one_whose_power_is_not_known(mean: float) -> None:
    powers = IdlePowers()
    powers.learn(KEY, mean)

    assert powers.of(KEY) is None


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    powers = IdlePowers()
    for number in range(MOST_LEARNED):
        powers.learn(IdleKey(f"GPU-{number}", "", 0), 100.0)
    powers.learn(IdleKey("GPU-0", "", 0), 100.0)
    powers.learn(KEY, 122.0)

    assert len(powers.watts) == MOST_LEARNED
    assert powers.of(IdleKey("GPU-1", "", 0)) is None
    assert powers.of(IdleKey("GPU-0", "", 0)) == 100.0


# --- clocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"), [(1_755e6, 1_980e6), (1_200e6, 1_410e6), (2_520e6, 2_745e6), (210e6, 297e6), (345e6, 599e6)]
)
def test_a_clock_that_sways_stays_in_its_bucket(low: float, high: float) -> None:
    assert bucket_of(low) == bucket_of(high)


def test_a_card_that_sleeps_and_one_that_a_context_keeps_awake_are_told_apart() -> None:
    assert bucket_of(345e6) != bucket_of(1_980e6)
    assert bucket_of(float("inf")) == bucket_of(float("nan")) == UNKNOWN_CLOCK
    assert bucket_of(0.0) == bucket_of(210e6) == 0
    assert bucket_of(None) == UNKNOWN_CLOCK not in {bucket_of(hertz * 1e6) for hertz in range(0, 4000, 7)}
    assert REST_SECONDS == 30.0
