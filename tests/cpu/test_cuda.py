"""The seam to the CUDA runtime, with a runtime that answers as a test wants; `tests/gpu` has the real one."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from freight import _cuda
from freight.errors import ArgumentError, ForkedError, OverlapError, PinError, UnsupportedError


class Runtime:
    """`torch.cuda` and its binding of the runtime on a computer with two GPUs; `calls` is what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.in_use = {0}  # GPUs with a context
        self.current = 0
        self.answers: dict[str, int] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.forked = self.capturing = False
        zeros = torch.zeros

        def new_zeros(*sizes: int, device: torch.device | None = None) -> torch.Tensor:
            if device is None or device.type == "cpu":
                return zeros(*sizes)
            self.calls.append(f"clear the error on {device}")
            raise RuntimeError("the last error, which is raised by the next launch")

        for name, replacement in {
            "cudart": lambda: self,
            "init": lambda: None,
            "is_available": lambda: True,
            "_is_in_bad_fork": lambda: self.forked,
            "is_current_stream_capturing": lambda: self.capturing,
            "device_count": lambda: 2,
            "current_device": lambda: self.current,
            "current_stream": lambda: self.in_use.add(self.current),
            "synchronize": lambda device: self.calls.append(f"wait for {device}"),
            "device": self.device,
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda gpu: gpu in self.in_use, raising=False)
        monkeypatch.setattr(torch, "zeros", new_zeros)

    def device(self, device: torch.device | int) -> AbstractContextManager[None]:
        runtime, index = self, device.index if isinstance(device, torch.device) else device

        class Chosen(AbstractContextManager[None]):
            def __enter__(self) -> None:
                self.before, runtime.current = runtime.current, index

            def __exit__(self, *_: object) -> None:
                runtime.current = self.before

        return Chosen()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return self.call("register", f"{address} + {nbytes} on {self.current}")

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return self.call("unregister", f"{address} on {self.current}")

    def call(self, name: str, arguments: str) -> int:
        self.calls.append(f"{name} {arguments}")
        self.after.get(name, lambda: None)()
        return self.answers.get(name, 0)

    def cudaGetErrorString(self, error: str) -> str:  # noqa: N802
        return f"what {error} means"

    def cudaError(self, code: int) -> str:  # noqa: N802
        return f"error {code}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


def test_register_and_unregister(runtime: Runtime) -> None:
    _cuda.register(4096, 100)
    assert _cuda.unregister(4096) == 0
    assert runtime.calls == ["register 4096 + 100 on 0", "wait for 0", "unregister 4096 on 0"]


def test_the_gpu_is_waited_for_wherever_the_process_has_work(runtime: Runtime) -> None:
    runtime.in_use = {0, 1}
    _cuda.unregister(4096)
    assert runtime.calls == ["wait for 0", "wait for 1", "unregister 4096 on 0"]


def test_no_context_is_made_on_a_gpu_that_the_process_does_not_use(runtime: Runtime) -> None:
    """A thread's current device is the first until it is told, and finalizers run in any thread."""
    runtime.in_use = {1}
    _cuda.register(4096, 100)
    _cuda.unregister(4096)
    assert runtime.in_use == {1}
    assert runtime.calls == ["register 4096 + 100 on 1", "wait for 1", "unregister 4096 on 1"]
    assert runtime.current == 0


def test_the_first_context_is_made_where_the_process_computes(runtime: Runtime) -> None:
    runtime.in_use, runtime.current = set(), 1
    _cuda.register(4096, 100)
    assert runtime.in_use == {1}


def test_a_refusal_says_the_runtimes_reason_and_leaves_no_error_behind(runtime: Runtime) -> None:
    runtime.answers["register"] = 2
    with pytest.raises(PinError, match=r"refused 100 bytes at 0x1000: error 2, what error 2 means"):
        _cuda.register(4096, 100)
    assert runtime.calls[-1] == "clear the error on cuda:0"


def test_what_others_registered_says_so(runtime: Runtime) -> None:
    runtime.answers["register"] = 712
    with pytest.raises(OverlapError, match=r"100 bytes at 0x1000 are page-locked already.* not by freight"):
        _cuda.register(4096, 100)
    assert runtime.calls[-1] == "clear the error on cuda:0"


def test_nothing_is_locked_while_a_graph_is_captured(runtime: Runtime) -> None:
    runtime.capturing = True
    with pytest.raises(UnsupportedError, match="cannot be page-locked while a CUDA graph is captured; allocate it bef"):
        _cuda.register(4096, 100)
    assert runtime.calls == []


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_lock_is_taken_back(runtime: Runtime) -> None:
    """Locking gigabytes takes seconds; Ctrl-C in them is raised when the memory is locked."""
    runtime.after["register"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        _cuda.register(4096, 100)
    assert runtime.calls[-1] == "unregister 4096 on 0"


def test_unregister_never_raises(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.answers["unregister"] = 713
    assert _cuda.unregister(4096) == 713
    assert runtime.calls[-1] == "clear the error on cuda:0"

    def gone(*_: object) -> None:
        raise RuntimeError("the context is gone")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    runtime.calls.clear()
    assert _cuda.unregister(4096) == 713  # an error of the GPU's work does not keep memory locked
    assert runtime.calls[0] == "unregister 4096 on 0"
    monkeypatch.setattr(torch.cuda, "cudart", gone)
    assert _cuda.unregister(4096) == -1


def test_devices(runtime: Runtime) -> None:
    runtime.current = 1
    assert _cuda.compute_device() == _cuda.compute_device("cuda") == torch.device("cuda", 1)
    assert _cuda.compute_device(0) == _cuda.compute_device("cuda:0") == torch.device("cuda", 0)
    for wrong in ("cpu", torch.device("meta")):
        with pytest.raises(ArgumentError, match=rf"must be a GPU, such as 'cuda' or 'cuda:0'; got '{wrong}'"):
            _cuda.compute_device(wrong)


def test_an_alias_is_what_torch_takes_for_a_gpu_array(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, owner = [], object()
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: seen.append((array, device, runtime.current)))
    _cuda.alias(4096, 100, owner, 1)
    [(array, device, current)] = seen
    assert array.__cuda_array_interface__ == {"shape": (100,), "typestr": "|u1", "data": (4096, False), "version": 3}
    assert array.owner is owner
    assert (device, current) == (torch.device("cuda", 1), 1)


# ---- no GPU, and forks -------------------------------------------------------------------------------


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not _cuda.available()
    _cuda.refuse_fork("reading")
    for use in (
        lambda: _cuda.require("page-locking memory"),
        lambda: _cuda.register(4096, 100),
        lambda: _cuda.alias(4096, 100, None),
    ):
        with pytest.raises(UnsupportedError, match=r"needs a GPU and torch sees none; `freight doctor` says why"):
            use()


def test_in_a_forked_child_nothing_reaches_the_gpu(runtime: Runtime) -> None:
    runtime.forked = True
    assert not _cuda.available()
    assert _cuda.in_forked_child()
    assert _cuda.unregister(4096) == 0
    for use in (
        lambda: _cuda.refuse_fork("the loader"),
        lambda: _cuda.require("the loader"),
        lambda: _cuda.register(4096, 100),
        lambda: _cuda.alias(4096, 100, None),
    ):
        with pytest.raises(
            ForkedError, match=rf"needs CUDA, which does not work in process {os.getpid()}.*'spawn' method"
        ):
            use()
    assert runtime.calls == []
