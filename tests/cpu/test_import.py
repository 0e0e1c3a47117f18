"""Importing freight starts nothing, reads no environment and is cheap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
HEAVY = ["triton", "torch_geometric", "matplotlib", "rich", "typer", "transformers", "cupy", "kvikio"]


def run(code: str, **variables: str) -> str:
    """What a fresh Python prints for `code`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FREIGHT_")}
    env |= {"PYTHONPATH": str(SOURCE), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["freight", "freight.errors", "freight.machine", "freight.memory"])
def test_starts_no_context_and_imports_nothing_heavy(name: str) -> None:
    # torch is imported first: what it brings along by itself is not freight's doing
    code = f"""
import sys, torch
before = set(sys.modules)
import {name}
new = set(sys.modules) - before
print(torch.cuda.is_initialized(), sorted({{name.partition(".")[0] for name in new}} & set({HEAVY!r})))
"""
    assert run(code) == "False []"


def test_costs_less_than_a_fifth_of_a_second() -> None:
    code = """
import time, torch
start = time.perf_counter()
import freight
from freight import config, errors, machine
print(time.perf_counter() - start)
"""
    best = min(float(run(code)) for _ in range(3))
    assert best < 0.2


def test_reads_no_environment_until_first_use() -> None:
    code = """
import freight
from freight import errors, machine
try:
    with freight.config():
        pass
except ValueError as error:
    print(error)
"""
    said = run(code, FREIGHT_DISK_THREADS="many", FREIGHT_HOST_BYTES="lots")
    assert said.startswith("environment variable FREIGHT_HOST_BYTES='lots': host_bytes must look like '2GiB'")


def test_leaves_the_process_as_it_was() -> None:
    code = """
import os, signal, sys, threading, warnings
import torch
def state():
    return (
        dict(os.environ), list(sys.path), warnings.filters[:], threading.active_count(), os.getcwd(),
        signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.excepthook, torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads(),
    )
before = state()
import freight, freight.memory
from freight import errors, machine
print(state() == before)
"""
    assert run(code) == "True"
