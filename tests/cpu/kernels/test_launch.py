import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.kernels import _launch
from freight.kernels._launch import (
    cdiv,
    fits_int32,
    interpreted,
    launching_on,
    multiprocessors,
    next_power_of_two,
    vector_bytes,
    why_not,
)


@given(value=st.integers(0, 2**40), by=st.integers(1, 2**20))
def test_cdiv_just_covers(value: int, by: int) -> None:
    assert cdiv(value, by) * by >= value > (cdiv(value, by) - 1) * by


@given(value=st.integers(1, 2**40))
def test_next_power_of_two_is_the_smallest(value: int) -> None:
    power = next_power_of_two(value)
    assert power.bit_count() == 1
    assert power >= value > power // 2


@given(address=st.integers(0, 2**48), row_bytes=st.integers(0, 2**20))
def test_vector_bytes_divides_both_and_is_the_widest(address: int, row_bytes: int) -> None:
    width = vector_bytes(address, row_bytes)
    fitting = [w for w in (1, 2, 4, 8, 16) if address % w == 0 and row_bytes % w == 0]
    assert width == max(fitting)


@pytest.mark.parametrize(
    ("shape", "stride", "fits"),
    [
        ((0, 2**40), (2**40, 1), True),
        ((2, 2), (2**31 - 2, 1), True),
        ((2, 2), (2**31 - 1, 1), False),
        ((2**31,), (1,), True),
        ((2**20, 2**20), (0, 0), True),
    ],
)
def test_fits_int32_counts_the_last_offset(shape: tuple[int, ...], stride: tuple[int, ...], fits: bool) -> None:
    far = torch.empty_strided(shape, stride, device="meta")
    assert fits_int32(far) is fits
    assert fits_int32(torch.empty(3), far) is fits


def test_interpreted_where_there_is_no_gpu() -> None:
    assert interpreted() is not torch.cuda.is_available()


def test_launching_on_a_cpu_tensor_changes_nothing() -> None:
    with launching_on(torch.empty(3)):
        pass


def _gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> torch.device:
    gpu = SimpleNamespace(name="Some GPU", major=major, minor=minor)
    monkeypatch.setattr(_launch, "_properties_of", lambda index: gpu)
    return torch.device("cuda", 0)


def test_why_not_gives_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = _gpu(monkeypatch, 8, 6)
    assert why_not(ampere) is None
    assert why_not(ampere, least=90) == "needs sm_90 or later; Some GPU is sm_86"
    blackwell = _gpu(monkeypatch, 12, 0)
    assert why_not(blackwell, least=90) is None
    assert why_not(blackwell, least=90, most=90) == "is made for sm_90 to sm_90; Some GPU is sm_120"
    assert why_not(torch.device("cpu")) == "needs a GPU; the data is on cpu"


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(name=f"GPU {i}", major=9, minor=0, multi_processor_count=100 + i) for i in range(3)]
    monkeypatch.setattr(_launch, "_properties_of", lambda index: gpus[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert [multiprocessors(torch.device("cuda", i)) for i in range(3)] == [100, 101, 102]
    assert multiprocessors(torch.device("cuda")) == 102
    assert why_not(torch.device("cuda"), least=100) == "needs sm_100 or later; GPU 2 is sm_90"
    assert multiprocessors(torch.device("cpu")) >= 2  # where kernels are interpreted, programs still share their work


@pytest.mark.parametrize("module", ["_launch", "_table", "_tolerance", "_precision", "_compile", "_tune"])
def test_helpers_leave_triton_alone(module: str) -> None:
    code = f"import sys, freight.kernels.{module}; sys.exit('triton' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
