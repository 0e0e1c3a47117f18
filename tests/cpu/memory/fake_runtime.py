"""The CUDA runtime as far as page locks go, as a record of its calls."""

import pytest

from freight import _cuda
from freight.errors import PinError


class FakeRuntime:
    """Locks ranges as the CUDA runtime does: no overlap, and only what is locked can be unlocked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuse = False
        self.capturing = False

    def register(self, address: int, nbytes: int) -> None:
        if self.refuse:
            raise PinError("no")
        assert all(address + nbytes <= start or start + size <= address for start, size in self.locked.items())
        self.locked[address] = nbytes

    def unregister(self, address: int) -> int:
        assert not self.capturing
        del self.locked[address]
        return 0

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have freight believe that this is the machine's GPU, as far as page locks go."""
        monkeypatch.setattr(_cuda, "available", lambda: True)
        monkeypatch.setattr(_cuda, "register", self.register)
        monkeypatch.setattr(_cuda, "unregister", self.unregister)
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: self.capturing)
