"""The unified tensor: rows in host memory that GPU kernels read in place, behind the face of a torch tensor.

It is a CPU tensor over page-locked memory, so numpy, sharing and saving work as with any other. What makes it more is
where operations on it compute: see `freight.rows._placement`.
"""

import operator
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freight import _cuda
from freight._units import show_bytes
from freight.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from freight.memory import HostBlock, allocate, register
from freight.rows import _cache, _op, _placement  # _op registers the operator
from freight.rows._table import RowStats, Table

_QUANTIZED = [getattr(torch, name, None) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")]


class UnifiedTensor(torch.Tensor):
    """Rows in host memory that the GPU reads in place; made by `freight.unified`, `empty` and `from_file`.

    >>> import freight, torch
    >>> x = freight.unified(torch.arange(8.0).view(4, 2))
    >>> x[torch.tensor([3, 0])].tolist()
    [[6.0, 7.0], [0.0, 1.0]]
    """

    _table: Table
    _plain: Tensor

    @classmethod
    def _wrap(cls, plain: Tensor, table: Table) -> "UnifiedTensor":
        x = plain.as_subclass(cls)
        x._table, x._plain = table, plain
        return x

    @classmethod
    def _over(cls, block: HostBlock, plain: Tensor, device: torch.device, *, in_place: bool = False) -> "UnifiedTensor":
        return cls._wrap(plain, Table(block, plain, device, in_place=in_place))

    # ---- made in place ---------------------------------------------------------------------------

    @staticmethod
    def empty(
        shape: Sequence[int] | int,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | int | str | None = None,
    ) -> "UnifiedTensor":
        """A table of zeros, to be filled in place: by slices, by `host()`, or by the GPU.

        >>> import freight, torch
        >>> x = freight.UnifiedTensor.empty((3, 2), torch.int64)
        >>> x[1:] = 7
        >>> x.host().tolist()
        [[0, 0], [7, 7], [7, 7]]
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED:
            raise ArgumentTypeError(f"dtype must be one of torch's that needs no scale, such as int8; got {dtype!r}.")
        try:
            sizes = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
        except TypeError:
            raise ArgumentTypeError(f"shape must be whole numbers; got {shape!r}.") from None
        if not sizes or min(sizes) < 0:
            raise ArgumentError(f"shape must be at least one size, none negative; got {shape!r}.")
        nbytes = dtype.itemsize
        for size in sizes:
            nbytes *= size
        where = _compute_device(device)
        block = allocate(nbytes, purpose="a unified tensor", shareable=True)
        return UnifiedTensor._over(block, block.tensor(dtype, sizes), where)

    @staticmethod
    def from_file(
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        device: torch.device | int | str | None = None,
    ) -> "UnifiedTensor":
        """The array in a `.npy` file, or tensor `name` of a `.safetensors` file, read straight into place.

        >>> import freight, numpy, torch
        >>> numpy.save("features.npy", numpy.ones((3, 2), numpy.float16))
        >>> freight.UnifiedTensor.from_file("features.npy").shape
        torch.Size([3, 2])
        """
        from freight.rows import _files

        with _files.open_array(Path(path), name) as array:
            x = UnifiedTensor.empty(array.shape, array.dtype, device=device)
            try:
                array.read_into(x._plain)
            except BaseException as error:
                _let_go(error)
                del x
                raise
        return x

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def is_unified(self) -> bool:
        """True."""
        return True

    @property
    def compute_device(self) -> torch.device:
        """Where operations on it compute and rows land; the CPU where there is no GPU, and in a forked worker."""
        return self._table.device

    def host(self) -> Tensor:
        """The plain CPU tensor over the same memory; waits for what the GPU was told to write.

        After writing to it, call `refresh()` if rows are cached.
        """
        return self._table.lent(self._memory())

    def _memory(self) -> Tensor:
        """The plain tensor, when the GPU has written what it was told to; never to be given away."""
        self._table.check_open()
        self._table.wait_for_writes()
        return self._plain

    def stats(self) -> RowStats:
        """Rows and bytes served from host and from GPU memory; waits for the GPU."""
        self._table.check_open()
        return self._table.stats()

    def check(self) -> None:
        """Wait for gathers under way, and raise an IndexError if an id of one of them lay outside the table."""
        self._table.check_open()
        self._table.wait()

    def refresh(self) -> None:
        """Copy cached rows from the table anew, after the CPU wrote to it."""
        self._table.check_open()
        if self._table.hot is not None:
            _cache.refresh(self._table, self._table.hot)

    def close(self) -> None:
        """Give the memory up, once the GPU is done with it; every tensor over this table is closed with it."""
        self._table.close()

    def set_(self, *_: Any, **__: Any) -> Any:
        """Refused here, for torch 2.13 asks `__torch_function__` about every method but this one."""
        _placement.refuse_remaking("x.set_(...)", "x = freight.unified(...)")

    def __iter__(self) -> Iterator["UnifiedTensor"]:
        plain = self._memory()
        return (self._wrap(plain[at], self._table) for at in range(len(plain)))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        table = self._table
        if table.closed:
            return f"UnifiedTensor(closed, shape={tuple(self._plain.shape)}, dtype={self._plain.dtype})"
        hot = (
            ""
            if table.hot is None
            else f", {len(table.hot.rows):,} rows in {show_bytes(table.hot.nbytes)} of GPU memory"
        )
        part = "" if table.is_whole(self._plain) else f", a view of {show_bytes(table.nbytes)}"
        return (
            f"UnifiedTensor(shape={tuple(self._plain.shape)}, dtype={self._plain.dtype}, computes on {table.device}, "
            f"{show_bytes(self._plain.numel() * self._plain.element_size())} of "
            f"{'page-locked' if table.block.pinned else 'pageable'} host memory{part}{hot})"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self._memory().item() if spec and not self.dim() else repr(self), spec)

    # ---- copies ----------------------------------------------------------------------------------

    def __copy__(self) -> "UnifiedTensor":
        return self._wrap(self._plain, self._table)

    def __deepcopy__(self, memo: dict[int, Any]) -> "UnifiedTensor":
        if id(self) not in memo:
            copied = UnifiedTensor.empty(self._plain.shape, self._plain.dtype, device=self._table.device)
            _op.as_integers(copied._plain).copy_(_op.as_integers(self._memory().resolve_conj().resolve_neg()))
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """To a file or a pickle goes a plain tensor, which loads without freight; a view goes as what it shows."""
        plain = self._memory()
        return (plain if self._table.is_whole(plain) else plain.clone()).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = _placement.traced if torch.compiler.is_dynamo_compiling() else _placement.run
        return run(func, args, kwargs or {})


def unified(
    data: Any,
    *,
    in_place: bool = False,
    cache: int | str | None = None,
    hot: Any | None = None,
    hot_ids: Any | None = None,
    device: torch.device | int | str | None = None,
) -> UnifiedTensor:
    """Put rows where GPU kernels read them in place: a CPU tensor or numpy array becomes a `UnifiedTensor`.

    The data is copied into page-locked memory; with `in_place=True` the caller's own memory is page-locked instead.
    `cache`, a number of rows or bytes such as "2GiB", keeps the hottest rows in GPU memory too: those with the highest
    scores in `hot` (one a row, such as degrees), those that a loader passed as `hot` asks for most often, or `hot_ids`.
    `device` is where it computes: the current GPU unless said, the CPU where there is none.

    >>> import freight, torch
    >>> x = freight.unified(torch.arange(6.0).view(3, 2))
    >>> x[[2, 0]].tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """
    if isinstance(data, UnifiedTensor) and device is not None and _compute_device(device) != data.compute_device:
        raise ArgumentError(f"the data is unified already, and computes on {data.compute_device}; got {device=}.")
    x = data if isinstance(data, UnifiedTensor) else (_in_place if in_place else _copied)(data, device)
    if cache is not None:
        try:
            x._table.keep_hot(_cache.build(x._table, x._table.base, cache, hot, hot_ids))
        except BaseException as error:
            _let_go(error)
            del x
            raise
    elif hot is not None or hot_ids is not None:
        raise ArgumentError("hot= and hot_ids= say which rows are cached; say how many with cache=.")
    return x


def _let_go(error: BaseException) -> None:
    """Or a notebook, which keeps the last error with all that its frames hold, would keep the whole table."""
    traceback.clear_frames(error.__traceback__)


def _copied(data: Any, device: torch.device | int | str | None) -> UnifiedTensor:
    if isinstance(data, np.ndarray):
        dtype = _torch_dtype(data.dtype)
        x = UnifiedTensor.empty(data.shape, dtype, device=device)
        np.copyto(x._plain.numpy(), data)
        return x
    _check_tensor(data)
    x = UnifiedTensor.empty(data.shape, data.dtype, device=device)
    _op.as_integers(x._plain).copy_(_op.as_integers(data))
    return x


def _in_place(data: Any, device: torch.device | int | str | None) -> UnifiedTensor:
    if isinstance(data, np.ndarray):
        _torch_dtype(data.dtype)
        if not data.flags.writeable:
            raise ArgumentError("a read-only array cannot be page-locked in place; leave in_place=True out to copy it.")
        data = torch.from_numpy(data)
    _check_tensor(data)
    where = _compute_device(device)
    if data.data_ptr() % min(8, data.element_size()):
        raise ArgumentError("the data does not begin at a multiple of its elements' size; leave in_place=True out.")
    block = register(data, purpose="a unified tensor in place")
    return UnifiedTensor._over(block, data.detach(), where, in_place=True)


def _check_tensor(data: Any) -> None:
    if not isinstance(data, Tensor):
        raise ArgumentTypeError(f"unified takes a CPU tensor or a numpy array; got {type(data).__name__}.")
    if data.device.type != "cpu" or data.layout != torch.strided or data.is_quantized:
        dense = "dequantize()" if data.is_quantized else "cpu()" if data.layout == torch.strided else "to_dense().cpu()"
        raise ArgumentTypeError(
            f"unified takes a dense CPU tensor; got a {data.layout} {data.dtype} tensor on {data.device}. "
            f"Pass data.{dense}."
        )
    if data.requires_grad:
        _placement.refuse_grad()
    if data.dim() == 0:
        raise ArgumentError("unified takes rows: a tensor of at least one dimension; got one without.")
    if data.is_conj() or data.is_neg():
        raise ArgumentError("unified takes memory as it lies; got a lazily conjugated or negated view. Pass a clone.")


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # the latter where its bytes are the other way round
        raise ArgumentTypeError(f"torch has no dtype for numpy's {dtype!r}; convert the array first.") from None


def _compute_device(device: torch.device | int | str | None) -> torch.device:
    if device is not None and not isinstance(device, int) and torch.device(device).type == "cpu":
        return torch.device("cpu")
    if device is None and not _cuda.available():
        return torch.device("cpu")
    _cuda.require("a unified tensor that computes on a GPU")
    return _cuda.compute_device(device)


# ---- to other processes of this machine ------------------------------------------------------------


def _share(x: UnifiedTensor) -> tuple[Any, ...]:
    """Another process gets the same memory; its GPU page-locks it at the first use."""
    x._table.check_shareable()
    view = x._plain
    if view.is_conj() or view.is_neg():
        raise UnsupportedError("a lazily conjugated view cannot go to other processes; send the table itself.")
    offset = view.data_ptr() - x._table.block.address
    geometry = (view.dtype, tuple(view.shape), view.stride(), offset)
    base = x._table.base
    whole = (base.dtype, tuple(base.shape), base.stride(), base.data_ptr() - x._table.block.address)
    return _attached, (x._table.block, whole, geometry, str(x._table.device))


def _attached(block: HostBlock, whole: tuple[Any, ...], geometry: tuple[Any, ...], kind: str) -> UnifiedTensor:
    # Whoever only reads it by the CPU starts no CUDA context: a device is named here, and not asked for.
    on_gpu = kind != "cpu" and torch.cuda.is_available() and not _cuda.in_forked_child()
    device = torch.device(kind) if on_gpu else torch.device("cpu")
    x = UnifiedTensor._over(block, _seen(block, *whole), device)
    return x if geometry == whole else UnifiedTensor._wrap(_seen(block, *geometry), x._table)


def _seen(block: HostBlock, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0
    return block.tensor(dtype, extent, offset).as_strided(shape, stride) if extent else torch.empty(shape, dtype=dtype)


ForkingPickler.register(UnifiedTensor, _share)
