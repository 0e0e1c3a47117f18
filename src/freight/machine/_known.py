"""What is known of this computer without measuring: the cached facts, or the defaults that come with freight."""

import dataclasses
import importlib.resources
import os
from pathlib import Path

import torch

from freight import _cuda, _direct
from freight._config import current
from freight.machine import _cache
from freight.machine._facts import Disk, Machine

_memo: dict[tuple[Path, Path | None, int | None], Machine | None] = {}


def known() -> Machine | None:
    """The facts that `probe()` left for this computer, else those shipped for its GPU, else None; never measures.

    Read once for each cache directory, disk directory and current GPU. Starts the CUDA context where there is a GPU.
    """
    settings = current()
    device = torch.cuda.current_device() if _cuda.available() else None
    key = (settings.cache_home, settings.disk_dir, device)
    if key not in _memo:
        _memo[key] = _look()
    return _memo[key]


def forget() -> None:
    """Have the next `known()` look again."""
    _memo.clear()


def shipped(slug: str | None) -> Machine | None:
    """The defaults that come with freight for the GPU model `slug`."""
    if slug is None:
        return None
    file = importlib.resources.files("freight.machine").joinpath("defaults", f"{slug}.json")
    if not file.is_file():
        return None
    return dataclasses.replace(Machine.from_json(file.read_text(encoding="utf-8")), source="shipped")


def _look() -> Machine | None:
    from freight.machine._probe import afresh, facts

    now = facts()
    entry = _cache.load(_cache.Identity.of(now.software, now.gpu, now.host))
    if entry is not None:
        directory = Path(os.path.abspath(_direct.default_directory()))  # as `probe()` files it
        unmeasured = Disk(absent=f"{directory} was not measured; run `freight doctor`", directory=str(directory))
        return afresh(dataclasses.replace(entry.machine, disk=entry.disk(directory) or unmeasured), now)
    defaults = shipped(now.gpu.slug)
    if defaults is None:
        return None
    anywhere = dataclasses.replace(defaults.disk, directory=None, kind=None, name=None)
    return afresh(dataclasses.replace(defaults, disk=anywhere), now)
