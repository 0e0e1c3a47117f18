"""One short name for each GPU model, whatever its memory and form factor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight._gpuname import slug


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100mig1g"),
        ("NVIDIA Graphics", "gpu"),
        (None, "cpu"),
    ],
)
def test_known_models(name: str | None, short: str) -> None:
    assert slug(name) == short


@given(st.text())
def test_always_fit_for_a_file_name(name: str) -> None:
    short = slug(name)
    assert short
    assert short.isascii()
    assert short.isalnum()
