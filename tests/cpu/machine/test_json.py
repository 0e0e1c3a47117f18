"""Facts are read strictly: what is not exactly what freight writes is an error that names the field."""

import json
from typing import Any

import pytest

from freight.errors import RecordError
from freight.machine import Machine, Software, _json
from freight.machine._facts import SCHEMA

DEEP = "[" * 100_000


def text(**parts: Any) -> str:
    """The least that is read, and `parts`."""
    return json.dumps({"schema": SCHEMA, "software": {"python": "3.11.7", "torch": "2.13.0"}, **parts})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (DEEP, "not JSON"),
        ('{"schema": ' + "9" * 5000 + "}", "not JSON"),
        ("[]", r"an object with a schema number; got \[\]"),
        ("null", "an object with a schema number; got None"),
        ("{}", "an object with a schema number"),
        ('{"schema": "1"}', "an object with a schema number"),
        ('{"schema": true}', "an object with a schema number"),
        ('{"schema": 1.0}', "an object with a schema number"),
        ('{"schema": 0}', "have schema 0, and this freight reads 1"),
        ('{"schema": 2, "whatever": 0}', "have schema 2, and this freight reads 1"),
        ('{"schema": 1}', "software is missing"),
        ('{"schema": 1, "software": {"python": "3.11.7"}}', "software.torch is missing"),
        (text(software="torch"), "software must be an object; got 'torch'"),
        (text(software=None), "software must be an object; got None"),
        (text(software={"python": "3", "torch": 2}), "software.torch must be text; got 2"),
        (text(software={"python": None, "torch": "2"}), "software.python must be text; got None"),
        (text(frieght=1), "frieght is not a known field"),
        (text(gpu={"nmae": "H200"}), "gpu.nmae is not a known field"),
        (text(quick=1), "quick must be true or false; got 1"),
        (text(quick="no"), "quick must be true or false; got 'no'"),
        (text(gpu={"sms": 132.0}), "gpu.sms must be a whole number of at least 0, of 63 bits; got 132.0"),
        (text(gpu={"sms": True}), "gpu.sms must be a whole number"),
        (text(gpu={"sms": -1}), "gpu.sms must be a whole number"),
        (text(gpu={"memory_bytes": 2**63}), "gpu.memory_bytes must be a whole number"),
        (text(gpu={"capability": 9}), "gpu.capability must be a list; got 9"),
        (text(gpu={"capability": [9, "0"]}), r"gpu.capability\[1\] must be a whole number .* got '0'"),
        (text(link={"h2d_gbs": "55"}), "link.h2d_gbs must be a finite number of at least 0; got '55'"),
        (text(link={"h2d_gbs": False}), "link.h2d_gbs must be a finite number"),
        (text(link={"h2d_gbs": -0.5}), "link.h2d_gbs must be a finite number"),
        (text(link={"h2d_gbs": float("nan")}), "link.h2d_gbs must be a finite number"),
        (text(link={"h2d_gbs": float("inf")}), "link.h2d_gbs must be a finite number"),
        (text(link={"h2d_gbs": 10**400}), r"link.h2d_gbs must be a finite number .* got 1000+\.\.\."),
        (text(reads={"random": None}), "reads.random must be a list; got None"),
        (text(reads={"random": [None]}), r"reads.random\[0\] must be an object; got None"),
        (text(reads={"random": [{"table_bytes": 1, "row_bytes": 1}]}), r"reads.random\[0\].gbs is missing"),
    ],
)
def test_what_is_wrong_is_named(broken: str, message: str) -> None:
    with pytest.raises(RecordError, match=message) as caught:
        Machine.from_json(broken)
    assert str(caught.value).endswith("Measure again: `freight doctor --refresh`.")
    assert len(str(caught.value)) < 300


def test_what_may_be_left_out_is_its_default() -> None:
    assert Machine.from_json(text()) == Machine(Software("3.11.7", "2.13.0"))
    assert Machine.from_json(text(seconds=None, link={})) == Machine(Software("3.11.7", "2.13.0"))


def test_whole_numbers_may_stand_for_rates() -> None:
    machine = Machine.from_json(text(link={"h2d_gbs": 55}))
    assert machine.link.h2d_gbs == 55.0
    assert isinstance(machine.link.h2d_gbs, float)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_is_written_that_is_not_read(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Machine(Software("3", "2"), seconds=value).json()


def test_text_of_any_kind_is_written() -> None:
    name = "caf\udce9 µ 数 \x1b"  # a surrogate is how a file name that is no UTF-8 is read
    written = _json.dump({"software": {"python": name, "torch": "2"}}, SCHEMA)
    assert written.encode("ascii")
    assert Machine.from_json(written).software.python == name
