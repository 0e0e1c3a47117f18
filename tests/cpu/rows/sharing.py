"""What runs in other processes in the tests of sharing: spawned ones import it by name."""

from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.utils.data import Dataset

import freight
from freight import memory


class Rows(Dataset):
    """Rows as views, and a mark left in the table for every one that was asked for."""

    def __init__(self, x: freight.UnifiedTensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor, int]:
        row = self.x[at].host().clone()
        self.x.host()[at, 0] = -1
        return row, self.x[torch.tensor([at])], memory.stats().held


class Views(Rows):
    """Rows left to the loader to put together."""

    def __getitem__(self, at: int) -> Tensor:  # type: ignore[override]
        return self.x[at]


def answer(x: freight.UnifiedTensor, view: freight.UnifiedTensor, parent: Connection) -> None:
    """Read what is asked for, write what is given, until told to stop."""
    parent.send((x.is_unified, view.is_unified, str(x.compute_device), memory.stats().held))
    while (asked := parent.recv()) is not None:
        at, value = asked
        if value is not None:
            x[torch.tensor([at])] = value
        parent.send((x[torch.tensor([at])].tolist(), view.tolist()))
    x.close()
    parent.send("closed")
