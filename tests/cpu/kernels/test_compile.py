"""The compile lane: every kernel for every GPU that freight is made for, and everything that it must not let through.

The lane runs in processes of its own, for here kernels are interpreted.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from freight.kernels import _compile
from freight.kernels._compile import TARGETS, kernels
from freight.kernels._launch import interpreted

Line = dict[str, Any]

GOOD = """
    # A helper, and a kernel of which one variant is for one GPU only.
    import triton
    import triton.language as tl


    @triton.jit
    def _twice(value):
        return value + value


    @triton.jit(do_not_specialize=["n"])
    def _double_kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, _twice(tl.load(x + at, mask=at < n)), mask=at < n)


    VARIANT = {"args": {"x": "*fp32", "out": "*fp32", "n": "i32"}, "constants": {"BLOCK": 64}}
    COMPILE = {
        "_twice": "inlined",
        "_double_kernel": [
            {**VARIANT, "aligned": ["x", "out"], "options": {"num_warps": 2}},
            {**VARIANT, "targets": [90]},
        ],
    }
"""

GLUON = """
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl


    @gluon.jit
    def _hoard_kernel(x, out, ROWS: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        at = gl.arange(0, 1024, layout=layout)
        hoard = gl.allocate_shared_memory(gl.float32, [ROWS, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        hoard.index(0).store(gl.load(x + at))
        gl.store(out + at, hoard.index(ROWS - 1).load(layout))


    COMPILE = {
        "_hoard_kernel": [
            {"args": {"x": "*fp32", "out": "*fp32"}, "constants": {"ROWS": rows}} for rows in (1, 48, 64)
        ]
    }
"""

KERNEL = """
    import triton
    import triton.language as tl


    @triton.jit
    def _fill_kernel(out, value):
        tl.store(out, value)


    ARGS = {"out": "*fp32", "value": "fp32"}
"""

# how a module can be at fault, and what the lane says of it
FAULTS = {
    "bare": (KERNEL, "LookupError: cargo.bare._fill_kernel is not in its module's COMPILE"),
    "gone": (KERNEL + '    COMPILE = {"_fill_kernel": [{"args": ARGS}], "_old_kernel": []}', "names '_old_kernel'"),
    "hollow": (KERNEL + '    COMPILE = {"_fill_kernel": []}', "lists no variant of '_fill_kernel'"),
    "nowhere": (KERNEL + '    COMPILE = {"_fill_kernel": [{"args": ARGS, "targets": [95]}]}', "for [95]; the targets"),
    "never": (KERNEL + '    COMPILE = {"_fill_kernel": [{"args": ARGS, "targets": []}]}', "for []; the targets are"),
    "typo": (KERNEL + '    COMPILE = {"_fill_kernel": "inline"}', "AttributeError"),
    "torn": (KERNEL + "    raise OSError('no such library')", "OSError: no such library"),
    "short": (
        KERNEL + '    COMPILE = {"_fill_kernel": [{"args": {"out": "*fp32"}}]}',
        "LookupError: COMPILE gives ['out'] and []; the kernel's parameters are ['out', 'value'].",
    ),
    "long": (
        KERNEL + '    COMPILE = {"_fill_kernel": [{"args": ARGS, "constants": {"BLOCK": 1}}]}',
        "LookupError: COMPILE gives ['BLOCK', 'out', 'value'] and []; the kernel's parameters are ['out', 'value'].",
    ),
    "misspelt": (
        KERNEL + '    COMPILE = {"_fill_kernel": [{"args": ARGS, "option": {}}]}',
        "LookupError: COMPILE gives ['out', 'value'] and ['option']",
    ),
    "crooked": (KERNEL + '    COMPILE = {"_fill_kernel": [{"args": ARGS, "aligned": ["in"]}]}', "ValueError: 'in'"),
    "mistaken": (
        KERNEL.replace("tl.store(out, value)", "tl.store(value, out)")
        + '    COMPILE = {"_fill_kernel": [{"args": ARGS}]}',
        "CompilationError",
    ),
}

CRASH = """
    import os
    import triton


    @triton.jit
    def _first_kernel(out):
        pass


    @triton.jit
    def _second_kernel(out):
        pass


    class Crash:
        @property
        def arg_names(self):
            os.abort()  # as a compiler does whose own assertion failed


    _second_kernel = Crash()
    COMPILE = {"_first_kernel": [{"args": {"out": "*fp32"}}], "_second_kernel": [{"args": {"out": "*fp32"}}]}
"""


def lane(*arguments: str, **environment: str) -> tuple[int, list[Line], str]:
    """Run the lane: its status, its lines, and what it said on stderr."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "freight.kernels._compile", *arguments],
        env={**kept, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def lane_of(package: Path, *arguments: str) -> tuple[int, list[Line], str]:
    """The lane over another package, with nothing compiled before."""
    path = os.pathsep.join([str(package.parent), *sys.path])
    cache = str(package.parent / "triton")
    return lane("--package", str(package), *arguments, PYTHONPATH=path, TRITON_CACHE_DIR=cache)


def write(folder: Path, **modules: str) -> Path:
    """The package `cargo` of these modules, in `folder`."""
    package = folder / "cargo"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in modules.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    return package


# ---- freight's own kernels ---------------------------------------------------------------------------


def test_every_kernel_compiles_for_every_target() -> None:
    """What this machine has compiled before, Triton takes from its cache, which knows source, options and versions."""
    status, lines, said = lane()
    why = "\n".join(re.findall(r"^.*\berror: .*$", said, re.MULTILINE)[:20])  # the compiler says much more than that
    assert [line for line in lines if line["error"]] == [], why
    assert status == 0, why
    assert all(line["cubin_bytes"] > 0 for line in lines)
    found = {f"{module}.{name}" for module, names in kernels().items() for name in names}
    inlined = {"freight.kernels.fingerprint._mix_words", "freight.kernels.fingerprint._mixed_block"}
    compiled = {line["kernel"] for line in lines}
    assert compiled <= found
    assert {"freight.kernels.fingerprint._fingerprint_kernel", "freight.machine._reads._rows_kernel"} <= compiled
    assert not inlined & compiled
    assert {line["sm"] for line in lines if "fingerprint" in line["kernel"]} == set(TARGETS)


def test_nothing_is_imported_to_find_kernels(tmp_path: Path) -> None:
    package = write(tmp_path, good=GOOD, flow=GLUON, torn=FAULTS["torn"][0], plain="x = 'triton.jit'", empty="")
    assert kernels(package) == {
        "cargo.flow": ["_hoard_kernel"],
        "cargo.good": ["_twice", "_double_kernel"],
        "cargo.torn": ["_fill_kernel"],
    }
    assert not [name for name in sys.modules if name.startswith("cargo")]


def test_every_kernel_of_freight_is_found() -> None:
    found = kernels()
    assert found["freight.machine._reads"] == ["_total_kernel", "_rows_kernel"]
    text = "\n".join(path.read_text() for path in Path(_compile.__file__).parents[1].rglob("*.py"))
    assert len(re.findall(r"^@(?:triton|gluon)\.jit\b", text, re.MULTILINE)) == sum(map(len, found.values()))


# ---- what it must not let through --------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package in which most modules are at fault."""
    faults = {name: text for name, (text, _) in FAULTS.items()}
    return write(tmp_path_factory.mktemp("package"), good=GOOD, flow=GLUON, **faults)


@pytest.fixture(scope="module")
def cargo(package: Path) -> tuple[int, dict[str, list[Line]]]:
    """The lane over that package: its status, and its lines by module."""
    status, lines, _ = lane_of(package)
    by_module: dict[str, list[Line]] = {}
    for line in lines:
        by_module.setdefault(line["kernel"].split(".")[1], []).append(line)
    return status, by_module


def test_one_module_and_one_target(package: Path) -> None:
    status, lines, said = lane_of(package, "--module", "cargo.good", "--target", "80", "--jobs", "1")
    assert status == 0, said
    assert [(line["kernel"], line["variant"], line["sm"]) for line in lines] == [("cargo.good._double_kernel", 0, 80)]


def test_good_kernels_compile_beside_bad_ones(cargo: tuple[int, dict[str, list[Line]]]) -> None:
    status, lines = cargo
    assert status == 1
    assert lines.keys() == FAULTS.keys() | {"good", "flow"}
    assert [(line["variant"], line["sm"], line["error"]) for line in lines["good"]] == [
        (0, 80, None),
        (0, 90, None),
        (0, 100, None),
        (1, 90, None),
    ]
    assert {line["kernel"] for line in lines["good"]} == {"cargo.good._double_kernel"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_and_says_why(name: str, cargo: tuple[int, dict[str, list[Line]]]) -> None:
    _, lines = cargo
    assert [line["error"] for line in lines[name] if FAULTS[name][1] not in (line["error"] or "")] == []


def test_too_much_shared_memory_fails_where_it_is_too_much(cargo: tuple[int, dict[str, list[Line]]]) -> None:
    """A Gluon kernel with 4, 192 and 256 KiB: all GPUs have the first, all but the oldest the second, none the last."""
    _, lines = cargo
    refused = {(line["variant"], line["sm"]): line["error"] for line in lines["flow"] if line["error"]}
    assert len(lines["flow"]) == 9
    assert refused.keys() == {(1, 80), (2, 80), (2, 90), (2, 100)}
    assert refused[1, 80] == "MemoryError: needs 196608 bytes of shared memory; sm_80 has 166912."
    assert refused[2, 90] == "MemoryError: needs 262144 bytes of shared memory; sm_90 has 232448."


def test_a_crash_of_the_compiler_fails(tmp_path: Path) -> None:
    package = write(tmp_path, crash=CRASH)
    status, lines, _ = lane_of(package, "--target", "90", "--jobs", "2")
    assert status == 1
    assert lines[-1] == {
        "kernel": "cargo.crash._second_kernel",
        "variant": 0,
        "sm": 90,
        "error": "the compiler crashed at this kernel or beside it; --jobs 1 shows where",
    }
    status, lines, _ = lane_of(package, "--target", "90", "--jobs", "1")
    assert status < 0
    assert [line["kernel"] for line in lines] == ["cargo.crash._first_kernel"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--module", "freight.kernels.finger"], "no kernels in freight.kernels.finger; there are some in freight."),
        (["--target", "70"], "invalid choice: 70"),
    ],
)
def test_unknown_names_are_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compile, "interpreted", lambda: False)
    with pytest.raises(SystemExit) as caught:
        _compile.main(arguments)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(not interpreted(), reason="needs the interpreter: there is a GPU, and kernels are compiled")
def test_the_interpreter_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _compile.main([])
    assert caught.value.code == 2
    assert "nothing compiles while kernels are interpreted; unset TRITON_INTERPRET." in capsys.readouterr().err
