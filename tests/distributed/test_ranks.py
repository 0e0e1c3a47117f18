"""The lane itself: ranks meet, an error of one is everyone's end, and nothing hangs."""

import multiprocessing
import threading

import pytest
import torch
import torch.distributed
from ranks import run_ranks


def _sums_over_ranks(rank: int, world_size: int) -> None:
    mine = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(mine)
    assert torch.distributed.get_world_size() == world_size
    assert mine.item() == world_size * (world_size + 1) / 2


def _second_rank_fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    threading.Event().wait()  # for ever, unless it is ended


def _nobody_returns(rank: int) -> None:
    threading.Event().wait()


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_meet(world_size: int) -> None:
    run_ranks(_sums_over_ranks, world_size, world_size)


def test_failing_rank_is_reported_and_ends_the_others() -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="rank 1 has had enough"):
        run_ranks(_second_rank_fails, 2)
    assert multiprocessing.active_children() == []


def test_silent_ranks_are_ended_at_the_deadline() -> None:
    with pytest.raises(TimeoutError, match="after 1 s rank 0, 1 had not returned"):
        run_ranks(_nobody_returns, 2, timeout=1)
    assert multiprocessing.active_children() == []
