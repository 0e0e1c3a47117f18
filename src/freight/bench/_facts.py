"""Under which conditions a run measures: the GPU, the machine, the versions and the commit."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from freight import _cuda
from freight._gpuname import slug
from freight.bench import _code


@dataclass(frozen=True)
class Facts:
    """The conditions of one run; every cell gets the versions and the commit, the record gets the machine."""

    gpu: str
    gpu_name: str
    commit: str
    dirty: bool
    versions: Mapping[str, str]
    machine: Mapping[str, Any]


def gpu_name() -> str:
    """The GPU that is measured, in its driver's words; empty where there is none."""
    return torch.cuda.get_device_name() if _cuda.available() else ""


def gather() -> Facts:
    """The facts of this process; the machine is probed, quickly, unless that was done before."""
    from freight.machine import probe

    name = gpu_name()
    commit, dirty = _code.commit()
    machine = json.loads(probe(quick=True).json())
    return Facts(slug(name or None), name, commit, dirty, versions(machine["software"]["driver"]), machine)


def versions(driver: str | None = None) -> dict[str, str]:
    """What is measured with; what is absent is left out.

    >>> sorted(versions().keys() & {"python", "torch", "numpy", "driver"})
    ['numpy', 'python', 'torch']
    """
    found: dict[str, str | None] = {"freight": _package("freight"), "python": platform.python_version()}
    found["torch"] = torch.__version__
    found |= {name: _package(name) for name in ("triton", "numpy")}
    found["cuda"] = torch.version.cuda
    found["driver"] = driver
    return {name: version for name, version in found.items() if version}


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
