"""From the first gather to the end of the process: closed, dropped, forked, spawned, limited, without a context."""

import gc
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from rows_on_gpu import (
    BOTH_WAYS,
    LONG,
    Marked,
    Rows,
    assert_rows,
    order,
    random_ids,
    random_rows,
    read_until_killed,
    rows_of,
)
from torch import Tensor
from torch.utils.data import DataLoader

import freight
from freight import memory
from freight._units import GiB
from freight.errors import ClosedError, HostMemoryError

# ---- closed and dropped ------------------------------------------------------------------------------------


USES: dict[str, Callable[[freight.UnifiedTensor, Tensor], object]] = {
    "x[ids]": lambda x, ids: x[ids],
    "x[at]": lambda x, ids: x[0],
    "x[ids] = ": lambda x, ids: x.__setitem__(ids, 1.0),
    "gather_rows": lambda x, ids: freight.gather_rows(x, ids),
    "gather_rows, out=": lambda x, ids: freight.gather_rows(x, ids, torch.empty(2, 8, device="cuda")),
    "gather_rows, several": lambda x, ids: freight.gather_rows(x, [ids]),
    "embedding": lambda x, ids: torch.nn.functional.embedding(ids, x),
    "sum": lambda x, ids: x.sum(),
    "add_": lambda x, ids: x.add_(1),
    "host": lambda x, ids: x.host(),
    "numpy": lambda x, ids: x.numpy(),
    "to": lambda x, ids: x.to("cuda"),
    "stats": lambda x, ids: x.stats(),
    "check": lambda x, ids: x.check(),
    "refresh": lambda x, ids: x.refresh(),
    "another cache": lambda x, ids: freight.unified(x, cache=1, hot_ids=[0]),
}


@pytest.mark.parametrize("name", USES)
def test_a_closed_table_is_not_used(name: str) -> None:
    """Nor are its views."""
    x = freight.unified(torch.randn(100, 8), cache=10, hot_ids=torch.arange(10))
    view, ids = x[10:], torch.tensor([1, 2], device="cuda")
    x[ids]
    x.close()
    x.close()
    for tensor in (x, view):
        with pytest.raises(ClosedError, match="closed; make a new one"):
            USES[name](tensor, ids)
    assert repr(x) == "UnifiedTensor(closed, shape=(100, 8), dtype=torch.float32)"


@BOTH_WAYS
@pytest.mark.parametrize("end", ["close", "drop", "drop, another stream", "drop a view"])
def test_a_table_that_goes_while_it_is_read(end: str, ordered: bool) -> None:
    """The gather has not begun when the table goes; its rows are right, and the memory is then somebody else's."""
    host = random_rows(100_000, 64)
    x = freight.unified(host)
    order(x, ordered)
    ids = random_ids(100_000, 50_000)
    on_gpu = ids.cuda()
    x[on_gpu]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if "stream" in end else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG // 2)
        rows = x[:][on_gpu] if "view" in end else x[on_gpu]
        assert not stream.query()
    if end == "close":
        x.close()
    del x
    others = freight.unified(torch.zeros(100_000, 64))
    torch.cuda.synchronize()
    assert_rows(rows, host, ids)
    assert others.shape == (100_000, 64)


def test_a_write_under_way_is_done_before_the_memory_goes() -> None:
    """It goes to the caller's own memory, where it stays to be seen."""
    mine = torch.zeros(1000, 16)
    x = freight.unified(mine, in_place=True)
    ids, rows = torch.arange(1000, device="cuda"), torch.full((1000, 16), 4.0, device="cuda")
    x[ids[:1]] = rows[:1]
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG // 4)
    x[ids] = rows
    del x
    assert (mine == 4.0).all()


def test_autograd_may_outlive_the_table() -> None:
    """Backward reads the table once more: its memory stays as long as something can reach it."""
    host = torch.arange(24.0).view(6, 4)
    x = freight.unified(host)
    weight = torch.ones(4, 2, device="cuda", requires_grad=True)
    out = (x @ weight).sum()
    x.close()
    del x
    gc.collect()
    freight.unified(torch.full((6, 4), -1.0))
    out.backward()
    assert torch.equal(weight.grad.cpu(), host.sum(0)[:, None].expand(4, 2))


def test_rows_outlive_the_table() -> None:
    host, ids = torch.randn(500, 8), torch.tensor([3, 499, 3], device="cuda")
    x = freight.unified(host)
    rows, shared = x[ids], x.host()
    del x
    assert_rows(rows, host, ids)
    assert torch.equal(shared, host)


# ---- limits ------------------------------------------------------------------------------------------------


def test_more_than_there_is() -> None:
    """Said before a page is touched, and nothing is left of the attempt."""
    gc.collect()  # what earlier tests left behind
    before, on_gpu = memory.stats(), torch.cuda.memory_allocated()
    available = psutil.virtual_memory().available
    for nbytes in (available + 4 * GiB, 2**42):
        start = time.perf_counter()
        with pytest.raises(HostMemoryError, match=r"a unified tensor asked for .* of host memory, and .* are left"):
            freight.UnifiedTensor.empty((nbytes // 512, 128))
        assert time.perf_counter() - start < 5
    assert psutil.virtual_memory().available > available - 4 * GiB
    assert (memory.stats().held, torch.cuda.memory_allocated()) == (before.held, on_gpu)


def test_more_than_is_allowed() -> None:
    with freight.config(host_bytes=memory.stats().held + 1000), pytest.raises(MemoryError, match="host_bytes="):
        freight.unified(torch.zeros(4096))


# ---- forked and spawned --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's own, of forks beside threads
def test_a_forked_worker_gets_cpu_rows() -> None:
    """After the GPU was used here; the parent then goes on, and its GPU reads what it always has."""
    host = torch.randn(20, 8)
    x = freight.unified(host, cache=5, hot_ids=torch.arange(5))
    ids = torch.arange(20, device="cuda")
    x[ids]
    loader = DataLoader(Rows(x), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    seen = 0
    for at, (rows, where, computes_on) in enumerate(loader):
        assert (where, computes_on) == ("cpu", "cpu")
        assert torch.equal(rows, host[[at, -1]])
        seen += 1
    assert seen == 20
    assert_rows(x[ids], host, ids)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_worker_shares_the_memory() -> None:
    x = freight.unified(torch.zeros(6, 4))
    x[torch.tensor([0], device="cuda")]
    loader = DataLoader(Marked(x), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    rows = torch.cat(list(loader))
    assert torch.equal(rows, torch.full((6, 4), 1000.0))
    assert torch.equal(x[torch.arange(6, device="cuda")].cpu(), rows)


def test_a_spawned_worker_shares_the_memory() -> None:
    x = freight.unified(torch.zeros(6, 4))
    x[torch.tensor([0], device="cuda")]
    loader = DataLoader(Marked(x), batch_size=2, num_workers=1, multiprocessing_context="spawn", timeout=120)
    rows = torch.cat(list(loader))
    assert torch.equal(rows, torch.full((6, 4), 1000.0))
    assert torch.equal(x.host(), rows)
    assert torch.equal(x[torch.arange(6, device="cuda")].cpu(), rows)


def test_two_processes_and_one_is_killed() -> None:
    """Its GPU reads and writes the same memory; when it is killed amid gathers, nothing changes here."""
    host = torch.randn(50_000, 64)
    x = freight.unified(host)
    ids = random_ids(50_000, 10_000)
    x[ids.cuda()]
    here, there = multiprocessing.get_context("spawn").Pipe()
    context = torch.multiprocessing.get_context("spawn")
    process = context.Process(target=read_until_killed, args=(x, ids, there), daemon=True)
    process.start()
    try:
        assert here.poll(120), "the other process said nothing"
        where, rows = here.recv()
    finally:
        process.kill()
        process.join(60)
    assert where.startswith("cuda")
    assert torch.equal(torch.from_numpy(rows), rows_of(host, ids))
    host[1] = 7.0
    assert torch.equal(x.host(), host)
    assert_rows(x[ids.cuda()], host, ids)
    x[torch.tensor([2], device="cuda")] = torch.zeros(1, 64, device="cuda")
    assert not x.host()[2].any()


# ---- processes of their own ----------------------------------------------------------------------------------

BEGIN = """
import gc, resource, torch, freight
host = torch.arange(64_000.0).view(1000, 64)
ids = torch.randint(1000, (5000,), device="cuda")
"""
SCRIPTS = {
    "alive": """
        x = freight.unified(host)
        hot = freight.unified(host, cache=50, hot_ids=torch.arange(50))
        mine = freight.unified(host, in_place=True)
        view, cycle = x[10:], []
        cycle.append((cycle, hot))
        for table in (x, hot, mine, view):
            rows = table[ids % len(table)]
        x[ids] = torch.zeros(5000, 64, device="cuda")
        torch.cuda._sleep(500_000_000)
        rows = x[ids]
        print("done")
    """,
    "broken": """
        x = freight.unified(host, cache=50, hot_ids=torch.arange(50))
        x[ids]
        try:
            torch.zeros(4, device="cuda")[torch.tensor([10], device="cuda")].cpu()
        except RuntimeError:
            print("the context is gone")
        x.host()
        print("host memory is not")
    """,
    "closed after it broke": """
        x = freight.unified(host)
        x[ids]
        try:
            torch.zeros(4, device="cuda")[torch.tensor([10], device="cuda")].cpu()
        except RuntimeError:
            print("the context is gone")
        try:
            x.close()
        except RuntimeError as error:
            assert not isinstance(error, freight.errors.FreightError), error
        try:
            x.host()
        except freight.errors.ClosedError:
            print("the table is closed")
    """,
    "64 KiB": """
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        try:
            x = freight.unified(torch.ones(100_000, 64))
        except freight.errors.PinError as error:
            assert "Lockable memory is 64 KiB (`ulimit -l`)" in str(error), error
            print("refused")
        else:
            assert (x[ids] == 1).all()
            print("locked")
        gc.collect()
        print(torch.zeros(3, device="cuda").tolist())
    """,
    "on the CPU": """
        x = freight.UnifiedTensor.empty((1000, 64), device="cpu")
        x[:] = host
        assert x[[5, 6]].tolist() == host[[5, 6]].tolist()
        print("done")
    """,
    "forked": """
        import os, warnings
        warnings.simplefilter("ignore")
        x = freight.unified(host)
        x[ids]
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            rows = x[torch.tensor([5, -1])]
            assert rows.device.type == x.compute_device.type == "cpu"
            assert rows.tolist() == host[[5, -1]].tolist()
            assert x.sum().device.type == "cpu"
            x.host()[7] = -1.0
            x.close()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(x[torch.tensor([7], device="cuda")].unique().tolist())
    """,
}

Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Every script, in a process of its own; all of them at once, for each has to start CUDA."""
    names = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    names["FREIGHT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    started = {}
    for name, script in SCRIPTS.items():
        code = BEGIN + "\n".join(line.removeprefix(" " * 8) for line in script.splitlines())
        command = [sys.executable, "-W", "ignore", "-c", code]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started[name] = subprocess.Popen(command, env=names, text=True, **pipes)

    def finish(name: str) -> "subprocess.CompletedProcess[str]":
        out, err = started[name].communicate(timeout=120)
        return subprocess.CompletedProcess(SCRIPTS[name], started[name].returncode, out, err)

    yield finish
    for process in started.values():
        process.kill()
        process.communicate()


def test_exit_with_tables_alive(run: Run) -> None:
    done = run("alive")
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_exit_when_the_context_is_gone(run: Run) -> None:
    """Only the GPU's own complaint is there to be read."""
    done = run("broken")
    assert done.stdout == "the context is gone\nhost memory is not\n", done.stderr
    assert "Traceback" not in done.stderr
    assert "freight" not in done.stderr
    assert done.returncode == 0


def test_close_when_the_context_is_gone(run: Run) -> None:
    done = run("closed after it broke")
    assert done.stdout == "the context is gone\nthe table is closed\n", done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_64_kib_that_can_be_locked(run: Run) -> None:
    """Drivers differ: some refuse to lock more and say so, others do not heed the limit. The GPU works either way."""
    done = run("64 KiB")
    first, second = done.stdout.splitlines() or ["", ""]
    assert first in ("refused", "locked"), done.stderr
    assert (second, done.stderr, done.returncode) == ("[0.0, 0.0, 0.0]", "", 0)


def test_a_table_of_the_cpu(run: Run) -> None:
    done = run("on the CPU")
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_a_forked_child_by_hand(run: Run) -> None:
    """It reads and writes the same memory by the CPU, and closing its tables takes nothing from its parent."""
    done = run("forked")
    assert (done.stdout, done.stderr, done.returncode) == ("0\n[-1.0]\n", "", 0)
