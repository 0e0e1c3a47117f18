"""Every way that torch has to say how exact float32 products are, alone and mixed, is understood.

torch cannot be brought back to where it began: a default that was written once, even as what it was, no longer gives
way to what is set above it. So each sequence of settings has a process of its own.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

HIGH = "torch.set_float32_matmul_precision('high')"
HIGHEST = "torch.set_float32_matmul_precision('highest')"
MEDIUM = "torch.set_float32_matmul_precision('medium')"
ALLOW, FORBID = (f"backends.cuda.matmul.allow_tf32 = {value}" for value in (True, False))
CUDNN_FORBID = "backends.cudnn.allow_tf32 = False"

# The default of convolutions gives way to what is set above it from torch 2.13 on; before, it stood.
GIVES_WAY = "ieee" if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13) else "tf32"

Steps = tuple[str, ...]


def _new(place: str, value: str) -> str:
    return f"backends{place}.fp32_precision = {value!r}"


ON_A_GPU: list[tuple[Steps, str, str]] = [
    ((), "ieee", "tf32"),
    ((HIGH,), "tf32", "tf32"),
    ((MEDIUM,), "tf32", "tf32"),
    ((MEDIUM, HIGHEST), "ieee", "tf32"),
    ((ALLOW,), "tf32", "tf32"),
    ((ALLOW, FORBID), "ieee", "tf32"),
    ((CUDNN_FORBID,), "ieee", "ieee"),
    ((_new(".cuda.matmul", "tf32"),), "tf32", "tf32"),
    ((_new(".cuda.matmul", "ieee"),), "ieee", "tf32"),
    ((_new(".cudnn.conv", "ieee"),), "ieee", "ieee"),
    ((_new(".cudnn.conv", "none"),), "ieee", "ieee"),
    ((_new(".cudnn", "tf32"),), "tf32", "tf32"),
    ((_new(".cudnn", "ieee"),), "ieee", GIVES_WAY),
    ((_new("", "tf32"),), "tf32", "tf32"),
    ((_new("", "ieee"),), "ieee", GIVES_WAY),
    ((_new("", "bf16"),), "ieee", GIVES_WAY),  # CUDA has no bf16 products, and torch computes in full
    ((_new("", "tf32"), _new(".cuda.matmul", "ieee")), "ieee", "tf32"),
    ((_new("", "ieee"), _new(".cudnn.conv", "tf32")), "ieee", "tf32"),
    # old and new mixed: torch refuses to read the old setting after these
    ((HIGH, _new(".cuda.matmul", "ieee")), "ieee", "tf32"),
    ((HIGHEST, _new(".cuda.matmul", "tf32")), "tf32", "tf32"),
    ((_new(".cudnn.conv", "ieee"), ALLOW), "tf32", "ieee"),
    ((_new("", "tf32"), HIGHEST), "ieee", "tf32"),
    (("backends.cudnn.allow_tf32 = True", _new(".cudnn", "ieee")), "ieee", "tf32"),  # the default, written
]

ON_A_CPU: list[tuple[Steps, str, str]] = [
    ((), "ieee", "ieee"),
    ((HIGH,), "tf32", "ieee"),
    ((MEDIUM,), "tf32", "ieee"),
    ((ALLOW,), "ieee", "ieee"),
    ((_new(".mkldnn.conv", "bf16"),), "ieee", "tf32"),
    ((_new(".mkldnn.matmul", "tf32"),), "tf32", "ieee"),
    ((_new("", "tf32"),), "tf32", "tf32"),
]

FORKED = """
import json, os, sys, torch
from torch import backends
from freight.kernels._precision import float32_conv, float32_matmul

DEVICES = [(), ("cuda",), (torch.device("cuda", 0),), ("cpu",), (torch.device("cpu"),)]

for steps in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            for step in steps:
                exec(step, {"torch": torch, "backends": backends})
            found = [[float32_matmul(*device), float32_conv(*device)] for device in DEVICES]
            try:
                found.append(backends.cuda.matmul.allow_tf32)
            except RuntimeError as error:
                found.append(str(error))
            os.write(write, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(write)
    print(os.read(read, 4096).decode(), flush=True)
    os.close(read)
"""


def _python(code: str, given: str = "", **environment: str) -> str:
    names = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, env=names, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def read_after() -> dict[Steps, list[Any]]:
    """After each sequence of settings: matmul and conv for each way to name the device, and torch's own old setting."""
    sequences = list(dict.fromkeys(steps for steps, _, _ in ON_A_GPU + ON_A_CPU))
    lines = _python(FORKED, json.dumps(sequences)).splitlines()
    return {steps: json.loads(line) for steps, line in zip(sequences, lines, strict=True)}


@pytest.mark.parametrize(("steps", "matmul", "conv"), ON_A_GPU, ids=str)
def test_on_a_gpu(steps: Steps, matmul: str, conv: str, read_after: dict[Steps, list[Any]]) -> None:
    unnamed, gpu, first_gpu, _, _, _ = read_after[steps]
    assert unnamed == gpu == first_gpu == [matmul, conv]


@pytest.mark.parametrize(("steps", "matmul", "conv"), ON_A_CPU, ids=str)
def test_on_a_cpu(steps: Steps, matmul: str, conv: str, read_after: dict[Steps, list[Any]]) -> None:
    _, _, _, cpu, device, _ = read_after[steps]
    assert cpu == device == [matmul, conv]


def test_old_settings_cannot_always_be_read(read_after: dict[Steps, list[Any]]) -> None:
    """Why reading `allow_tf32` would not do; once torch mends it, the mixtures above lose their point."""
    *_, plain = read_after[(ALLOW,)]
    *_, mixed = read_after[(HIGHEST, _new(".cuda.matmul", "tf32"))]
    assert plain is True
    assert "legacy" in mixed


def test_environment_variable() -> None:
    code = "from freight.kernels._precision import float32_matmul; print(float32_matmul())"
    assert _python(code, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1").strip() == "tf32"
