"""What freight reads from torch's settings, old and new, is what torch's own products and convolutions do on this GPU.

Each sequence of settings has a process of its own, for torch cannot be brought back to where it began. The processes
are forked from one that has not used the GPU.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

HIGH = "torch.set_float32_matmul_precision('high')"
HIGHEST = "torch.set_float32_matmul_precision('highest')"
MEDIUM = "torch.set_float32_matmul_precision('medium')"
ALLOW, FORBID = (f"backends.cuda.matmul.allow_tf32 = {value}" for value in (True, False))
CUDNN_FORBID = "backends.cudnn.allow_tf32 = False"

Steps = tuple[str, ...]


def _new(place: str, value: str) -> str:
    return f"backends{place}.fp32_precision = {value!r}"


CASES: list[Steps] = [
    (),
    (HIGH,),
    (MEDIUM,),
    (MEDIUM, HIGHEST),
    (ALLOW,),
    (ALLOW, FORBID),
    (CUDNN_FORBID,),
    (_new(".cuda.matmul", "tf32"),),
    (_new(".cudnn.conv", "ieee"),),
    (_new(".cudnn.conv", "none"),),
    (_new(".cudnn", "tf32"),),
    (_new(".cudnn", "ieee"),),
    (_new("", "tf32"),),
    (_new("", "ieee"),),
    (_new("", "bf16"),),
]
MIXED: list[Steps] = [
    (HIGH, _new(".cuda.matmul", "ieee")),
    (HIGHEST, _new(".cuda.matmul", "tf32")),
    (_new(".cudnn.conv", "ieee"), ALLOW),
    (_new("", "tf32"), HIGHEST),
]

# 1 + 2**-12 is 1 in tf32, which keeps 10 bits of the fraction, and in bf16. The sums are exact in float32, or nearly so
# where an algorithm works on transforms; what they are nearer to tells how their terms were read.
FORKED = """
import json, os, sys, traceback, torch
from torch import backends
from freight.kernels._precision import float32_conv, float32_matmul

VALUE = 1 + 2**-12


def precision(compute, terms):
    try:
        mean = compute().double().mean().item() / terms
    except RuntimeError as error:
        return f"refused: {error}"
    return "ieee" if abs(mean - VALUE) < abs(mean - 1) else "tf32"


def product():
    return torch.full((1024, 1024), VALUE, device="cuda") @ torch.ones(1024, 1024, device="cuda")


def convolution():
    image = torch.full((16, 128, 28, 28), VALUE, device="cuda")
    return torch.nn.functional.conv2d(image, torch.ones(128, 128, 3, 3, device="cuda"))


def found(steps):
    for step in steps:
        exec(step, {"torch": torch, "backends": backends})
    backends.cudnn.benchmark = True  # so that the fastest is taken, which is tf32 where it may be
    return {
        "read": [float32_matmul(), float32_conv()],
        "done": [precision(product, 1024), precision(convolution, 128 * 9)],
    }


cases = json.load(sys.stdin)
for start in range(0, len(cases), 7):  # at once: each starts a CUDA context
    pipes = []
    for steps in cases[start : start + 7]:
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                os.write(write, json.dumps(found(steps)).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.close(write)
        pipes.append(read)
    for pipe in pipes:
        with open(pipe) as answer:
            print(answer.read() or "null", flush=True)
"""


def _answers(cases: list[Steps], **environment: str) -> dict[Steps, Any]:
    overrides = "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    names = {name: value for name, value in os.environ.items() if name not in overrides}
    names |= {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], input=json.dumps(cases), env=names, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases), done.stderr
    assert None not in answers, done.stderr
    return dict(zip(cases, answers, strict=True))


@pytest.fixture(scope="module")
def answers() -> dict[Steps, Any]:
    return _answers([*CASES, *MIXED])


@pytest.mark.parametrize("steps", CASES, ids=str)
def test_what_is_read_is_what_torch_does(steps: Steps, answers: dict[Steps, Any]) -> None:
    assert answers[steps]["read"] == answers[steps]["done"]


@pytest.mark.parametrize("steps", MIXED, ids=str)
def test_old_and_new_settings_mixed(steps: Steps, answers: dict[Steps, Any]) -> None:
    """Where torch itself refuses the mixture, there is nothing to agree with."""
    read, done = answers[steps]["read"], answers[steps]["done"]
    assert [(r, d) for r, d in zip(read, done, strict=True) if r != d and not d.startswith("refused: ")] == []


def test_both_precisions_are_seen(answers: dict[Steps, Any]) -> None:
    """The measurement tells the two apart; without that, the tests above would say nothing."""
    assert answers[()]["done"] == ["ieee", "tf32"]
    assert answers[(ALLOW,)]["done"][0] == "tf32"
    assert answers[(CUDNN_FORBID,)]["done"][1] == "ieee"


def test_environment_variable() -> None:
    [answer] = _answers([()], TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1").values()
    assert answer["read"] == answer["done"] == ["tf32", "tf32"]
