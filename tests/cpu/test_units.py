"""Sizes as people write them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight._units import _UNITS, KiB, TiB, parse_bytes, round_up, show_bytes
from freight.errors import ArgumentError, ArgumentTypeError, FreightError

SIZES = st.integers(0, 2**50)


@given(number=SIZES, unit=st.sampled_from(sorted(_UNITS)), space=st.sampled_from(["", " ", "  "]), upper=st.booleans())
def test_whole_numbers_with_any_unit_are_exact(number: int, unit: str, space: str, upper: bool) -> None:
    text = f"{space}{number}{space}{unit.upper() if upper else unit}{space}"
    assert parse_bytes(text) == number * _UNITS[unit]


@given(SIZES)
def test_whole_numbers_are_themselves(number: int) -> None:
    assert parse_bytes(number) == parse_bytes(str(number)) == parse_bytes(np.int64(number)) == number


@given(SIZES)
def test_what_is_shown_can_be_read_back(number: int) -> None:
    assert parse_bytes(show_bytes(number)) == pytest.approx(number, rel=5e-4)


@given(st.text(max_size=30))
def test_text_is_a_size_or_a_clear_error(text: str) -> None:
    try:
        nbytes = parse_bytes(text, "disk_block_bytes")
    except ArgumentError as error:
        said = str(error)
    else:
        assert nbytes >= 0
        return
    assert said.startswith("disk_block_bytes must look like")
    assert repr(text) in said


@pytest.mark.parametrize("text", ["2 gigs", "GiB", "1,5GB", "-1", "1e9", "", ".", "1.GiB", "٣GiB", "9" * 30, "2GiB\n3"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"must look like '2GiB', '500MB' or '4096'; got "):
        parse_bytes(text)


@pytest.mark.parametrize(
    "value", [1.5, None, True, b"1", [1], np.float32(1), np.array([1, 2]), torch.tensor(1.5)], ids=repr
)
def test_not_a_kind_of_size(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a whole number of bytes or text"):
        parse_bytes(value)  # type: ignore[arg-type]


def test_negative() -> None:
    with pytest.raises(FreightError, match="must not be negative; got -1"):
        parse_bytes(-1)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (KiB, "1 KiB"), (-1536, "-1.5 KiB"), (3 * TiB, "3 TiB")]
)
def test_shown(nbytes: int, text: str) -> None:
    assert show_bytes(nbytes) == text


@given(value=st.integers(0, 2**60), multiple=st.integers(1, 2**30))
def test_round_up(value: int, multiple: int) -> None:
    up = round_up(value, multiple)
    assert up % multiple == 0
    assert 0 <= up - value < multiple
