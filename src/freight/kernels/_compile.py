"""Compile every kernel of the package for sm_80, sm_90 and sm_100, without a GPU: `python -m freight.kernels._compile`.

A module with kernels (functions decorated with `@triton.jit` or `@gluon.jit`, at module level) says how each is
compiled, as plain data in a global named COMPILE, so that no room need import anything for it:

    COMPILE = {
        "_add_kernel": [
            {
                "args": {"x": "*fp32", "out": "*fp32", "n": "i64"},    # Triton's names; "*" is a pointer
                "constants": {"BLOCK": 1024},                          # the tl.constexpr parameters
                "aligned": ["x", "out"],                               # optional: divisible by 16
                "options": {"num_warps": 8},                           # optional: what the launch passes beside
                "targets": [90],                                       # optional: where not all three
            },
            {...},                                                     # one entry for each variant worth compiling
        ],
        "_helper": "inlined",                                          # called by other kernels, never launched
    }

`args` and `constants` together name every parameter. A kernel that COMPILE leaves out fails the lane, and so does one
that asks for more shared memory than the GPU has. What has been compiled before comes from Triton's own cache.
"""

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from freight.kernels._launch import interpreted

TARGETS = (80, 90, 100)
INLINED = "inlined"

_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_KEYS = {"args", "constants", "aligned", "options", "targets"}
_PACKAGE = Path(__file__).resolve().parents[1]
_Task = tuple[str, str, int, int]  # module, kernel, number of the variant, target


def kernels(package: Path = _PACKAGE) -> dict[str, list[str]]:
    """The names of the kernels in each module of `package`, read from the source; nothing is imported."""
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if ".jit" not in source:
            continue
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        names = [function.name for function in functions if any(map(_is_jit, function.decorator_list))]
        if names:
            found[_module_name(path, package)] = names
    return found


def variants(module: str, names: Sequence[str]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Each declared way to compile the kernels `names` of `module`: kernel, number of the variant, declaration."""
    declared = getattr(importlib.import_module(module), "COMPILE", {})
    for name in names:
        if name not in declared:
            raise LookupError(f"{module}.{name} is not in its module's COMPILE; see freight.kernels._compile.")
        if declared[name] == INLINED:
            continue
        if not declared[name]:
            raise LookupError(f"{module}.COMPILE lists no variant of {name!r}, so nothing of it would be compiled.")
        for number, declaration in enumerate(declared[name]):
            targets = declaration.get("targets", TARGETS)
            if not targets or not set(targets) <= set(TARGETS):
                raise LookupError(f"{module}.COMPILE wants {name!r} for {targets}; the targets are {TARGETS}.")
            yield name, number, declaration
    for name in declared:
        if name not in names:
            raise LookupError(f"{module}.COMPILE names {name!r}, and there is no such kernel.")


def compile_variant(kernel: Any, declaration: Mapping[str, Any], target: int) -> Any:
    """Compile one variant of `kernel` for sm_`target`; Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    unknown = declaration.keys() - _KEYS
    args, constants = declaration["args"], declaration.get("constants", {})
    given, wanted = sorted([*args, *constants]), sorted(kernel.arg_names)
    if unknown or given != wanted:
        raise LookupError(f"COMPILE gives {given} and {sorted(unknown)}; the kernel's parameters are {wanted}.")
    signature = {name: args.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in declaration.get("aligned", ())}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = triton.compile(
        source(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", target, 32),
        options=dict(declaration.get("options", {})),
    )
    if compiled.metadata.shared > _SHARED_BYTES[target]:
        most = _SHARED_BYTES[target]
        raise MemoryError(f"needs {compiled.metadata.shared} bytes of shared memory; sm_{target} has {most}.")
    return compiled


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print one line of JSON for each kernel, variant and target; 1 where any failed."""
    parser = argparse.ArgumentParser("python -m freight.kernels._compile", description="Compile without a GPU.")
    parser.add_argument("--module", action="append", help="only this module (may be repeated)")
    parser.add_argument("--target", action="append", type=int, choices=TARGETS, help="only this one (may be repeated)")
    parser.add_argument("--package", type=Path, default=_PACKAGE, help="the folder of another package")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="kernels compiled at once")
    chosen = parser.parse_args(arguments)
    if interpreted():
        parser.error("nothing compiles while kernels are interpreted; unset TRITON_INTERPRET.")
    found = kernels(chosen.package.resolve())
    if unknown := sorted(set(chosen.module or ()) - found.keys()):
        parser.error(f"no kernels in {', '.join(unknown)}; there are some in {', '.join(found) or 'no module'}.")
    failed = False
    for line in _lines({module: found[module] for module in chosen.module or found}, chosen.target, chosen.jobs):
        failed |= line["error"] is not None
        print(json.dumps(line), flush=True)
    return int(failed)


def _lines(found: Mapping[str, Sequence[str]], targets: Sequence[int] | None, jobs: int) -> Iterator[dict[str, Any]]:
    tasks: list[_Task] = []
    for module, names in found.items():
        try:
            declared = list(variants(module, names))
        except Exception as error:  # one module's fault, whatever it is, is not the others'
            yield {"kernel": module, "error": f"{type(error).__name__}: {error}"}
            continue
        tasks += [
            (module, name, number, target)
            for name, number, declaration in declared
            for target in declaration.get("targets", TARGETS)
            if target in (targets or TARGETS)
        ]
    if jobs < 2:
        yield from map(_attempt, tasks)
        return
    # Forked: a worker has every module already, and compiling leaves no state behind that another would miss.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for task, line in [(task, pool.submit(_attempt, task)) for task in tasks]:
            try:
                yield line.result()
            except BrokenProcessPool:
                yield {**_what(task), "error": "the compiler crashed at this kernel or beside it; --jobs 1 shows where"}


def _attempt(task: _Task) -> dict[str, Any]:
    module, name, number, target = task
    start = time.perf_counter()
    try:
        defined = importlib.import_module(module)
        compiled = compile_variant(getattr(defined, name), defined.COMPILE[name][number], target)
    except Exception as error:  # whatever the compiler says belongs into the report of this kernel, not of the lane
        return {**_what(task), "error": f"{type(error).__name__}: {error}"}
    return {
        **_what(task),
        "error": None,
        "shared": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
        "seconds": round(time.perf_counter() - start, 2),
    }


def _what(task: _Task) -> dict[str, Any]:
    module, name, number, target = task
    return {"kernel": f"{module}.{name}", "variant": number, "sm": target}


def _is_jit(decorator: ast.expr) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "jit" for node in ast.walk(decorator))


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.exit(main())
