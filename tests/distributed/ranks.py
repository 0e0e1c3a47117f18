"""Run a function of a test in several processes that form one gloo group, on this computer alone."""

import datetime
import importlib.util
import inspect
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing


def run_ranks(function: Callable[..., None], world_size: int, *args: object, timeout: float = 120) -> None:
    """Call `function(rank, *args)` in `world_size` processes; the first error ends all of them and is raised here.

    The function stands at the top of its file and asserts for itself. Whatever happens, no process is left behind.
    """
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory, "store"))
        where = (inspect.getfile(function), function.__name__)
        ranks = torch.multiprocessing.spawn(_enter, (world_size, store, where, args), nprocs=world_size, join=False)
        deadline = time.monotonic() + timeout
        try:
            while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    alive = [rank for rank, process in enumerate(ranks.processes) if process.is_alive()]
                    raise TimeoutError(f"after {timeout:g} s rank {', '.join(map(str, alive))} had not returned")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()


def _enter(rank: int, world_size: int, store: str, where: tuple[str, str], args: tuple[object, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the computer's own name need not resolve
    patience = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=patience
    )
    try:
        _load(*where)(rank, *args)
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def _load(path: str, name: str) -> Callable[..., None]:
    """The function by its file: a test module has no name that another process could import it by."""
    spec = importlib.util.spec_from_file_location("ranks_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
