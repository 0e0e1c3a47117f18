"""`freight demo` verifies what it shows: the whole of it runs here, and a wrong byte is its failure."""

import pytest
import torch

from freight import _demo, memory
from freight.errors import DiskFullError


def test_all_parts_run_and_are_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert _demo.main() == 0
    shown = capsys.readouterr().out
    assert [title for title, _ in _demo.PARTS if title not in shown] == []
    assert shown.count("verified") == 3
    assert "WRONG" not in shown
    assert "not shown here" not in shown


def test_wrong_byte_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    read = memory.DiskFile.read

    def read_other_bytes(self: memory.DiskFile, extent: memory.Extent, tensor: torch.Tensor) -> memory.Token:
        token = read(self, extent, tensor)
        token.wait()
        tensor[:1] ^= 1
        return token

    monkeypatch.setattr(memory.DiskFile, "read", read_other_bytes)
    assert _demo.main() == 1
    assert "WRONG" in capsys.readouterr().out


def test_part_that_cannot_run_is_told_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise DiskFullError(28, "the disk is full", "/somewhere")

    monkeypatch.setattr(_demo, "DiskFile", full)
    assert _demo.main() == 0
    shown = capsys.readouterr().out
    assert "not shown here: [Errno 28] the disk is full" in shown
    assert shown.count("verified") == 2


def test_little_memory_makes_the_parts_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    import freight

    with freight.config(host_bytes="64MiB"):
        assert _demo._affordable(256 * 2**20) == 4 * 2**20
