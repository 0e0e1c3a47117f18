"""Tuning for real: what is tuned is launched from then on, and sizes that vary compile nothing more."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from freight import _config
from freight._gpuname import slug
from freight._units import MiB
from freight.kernels import _table, _tune
from freight.kernels.fingerprint import _fingerprint_kernel, fingerprint, launch, reference, tunable

# A space without the operator's own default, so that whatever wins is told apart from it.
TINY = {"BLOCK": (1024, 4096), "num_warps": (4,), "programs_per_sm": (8,)}
CELL = ((64 * MiB,), "uint8")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the kernel is launched with from here on, beside its tensors."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(_fingerprint_kernel, "pre_run_hooks", [lambda *args, **options: seen.append(options)])
    return seen


def tuned_table() -> list[Path]:
    return list((_config.current().cache_home / "tuned").glob("*.json"))


def test_what_is_tuned_is_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launches: list[dict[str, Any]]
) -> None:
    x = torch.randint(256, (64 * MiB + 5,), dtype=torch.uint8, device="cuda")
    default = {"BLOCK": 1024, "num_warps": 4, "programs_per_sm": 8}
    tiny = dataclasses.replace(tunable, default=default, space=TINY, cells=(CELL,))
    monkeypatch.setitem(_table._registered, tunable.op, tiny)
    assert _tune.main([tunable.op]) == 0

    [path] = tuned_table()
    assert path.name.startswith(f"{slug(torch.cuda.get_device_name())}-freight")
    assert f"Written to {path}" in capsys.readouterr().out
    [entry] = json.loads(path.read_text())["entries"]
    assert (entry["op"], entry["shape"], entry["dtype"]) == ("fingerprint", [64 * MiB], "uint8")
    assert entry["config"] in list(tiny.candidates())
    assert 0 < entry["microseconds"] <= entry["default_microseconds"]

    for device in (x.device, torch.device("cuda")):
        assert tunable.config((x.numel(),), "uint8", device) == entry["config"]
    launches.clear()
    assert torch.equal(fingerprint(x), reference(x))
    [launched] = launches
    assert (launched["BLOCK"], launched["num_warps"]) == (entry["config"]["BLOCK"], 4)


def test_without_a_table_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, launches: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(_table, "_SHIPPED", Path("nowhere"))
    _table.forget()
    x = torch.randint(256, (MiB,), dtype=torch.uint8, device="cuda")
    fingerprint(x)
    _table.forget()
    [launched] = launches
    assert (launched["BLOCK"], launched["num_warps"]) == (tunable.default["BLOCK"], tunable.default["num_warps"])
    assert tuned_table() == []


def test_the_timer_tells_slow_from_fast() -> None:
    """In microseconds: eight times the bytes take longer, and not less time than any GPU's bandwidth allows."""
    small, large = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for nbytes in (32 * MiB, 256 * MiB))
    fast, slow = (_tune._gpu_timer(lambda x=x: x.fill_(1)) for x in (small, large))
    assert 256 * MiB / 20e6 < slow < 100_000  # no GPU writes 20 TB/s, none this slowly
    assert fast < slow


def test_sizes_that_vary_compile_nothing(compilations: Callable[[Any], int]) -> None:
    """One compilation for each alignment that there is, and then no more of them."""
    room = torch.randint(256, (40 * MiB,), dtype=torch.uint8, device="cuda")
    offsets = (0, 8, 4, 2, 1)
    for offset in offsets:
        launch(room[offset : offset + 1000])
    before = compilations(_fingerprint_kernel)
    assert before >= len(offsets)
    for nbytes in (0, 1, 7, 8, 16, 17, 1000, 16_384, 16_385, 1_000_003, 2 * MiB, 33 * MiB + 9):
        for offset in (*offsets, 3, 16, 24, 32):
            fingerprint(room[offset : offset + nbytes])
    assert compilations(_fingerprint_kernel) == before
