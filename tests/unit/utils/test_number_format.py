"""Figures as people read them."""

from __future__ import annotations

import pytest

from shardwright.utils.number_format import (
    format_bytes,
    format_days,
    format_device_hours,
    format_number,
    format_token_rate,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (433_333.3, "433,333"),
        (999.6, "1,000"),
        (1000, "1,000"),
        (0.03123, "0.0312"),
        (12.34, "12.3"),
        (0, "0"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


def test_hours_and_rates_name_what_a_rank_runs_on() -> None:
    assert format_device_hours(4.333e5, is_cpu=False) == "433,300 GPU hours"
    assert format_device_hours(0.0301, is_cpu=True) == "0.0301 rank hours"
    assert format_token_rate(14057.4, is_cpu=False) == "14,057 tokens/s per GPU"
    assert format_token_rate(2835, is_cpu=True) == "2,835 tokens/s per rank"


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (1234.5, "1,234 days"),
        (2, "2 days"),
        (1.5, "36 hours"),
        (0.05, "72 minutes"),
        (0.0003, "25.9 seconds"),
    ],
)
def test_durations(days: float, text: str) -> None:
    assert format_days(days) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *(
            (0, "0 bytes"),
            (1, "1 byte"),
            (999, "999 bytes"),
            (1234, "1.23 kB"),
            (45_678, "45.7 kB"),
        ),
        *(
            (999_499, "999 kB"),
            (999_500, "1 MB"),
            (1_530_000, "1.53 MB"),
            (2_500_000_000, "2.5 GB"),
        ),
    ],
)
def test_sizes_of_files(size: int, text: str) -> None:
    assert format_bytes(size) == text
