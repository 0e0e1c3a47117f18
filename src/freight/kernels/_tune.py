"""`freight bench --tune`: time what each tunable operator may be launched with on this GPU, and keep the best."""

import fnmatch
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freight._units import show_bytes
from freight.kernels._compile import kernels
from freight.kernels._table import Config, Entry, Shape, Tunable, registered, save

_WORTH = 0.97  # another configuration is another compilation for the user: below 3 % the default stays


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried: how long it took, or what was the matter with it."""

    config: Config
    microseconds: float | None = None
    problem: str | None = None
    wrong: bool = False


def main(names: Sequence[str] | None = None, *, only: str | None = None) -> int:
    """Tune the operators `names` (all of them unless given), in the cells whose label contains or matches `only`.

    Prints a table and writes this machine's own table of configurations; 1 where there is nothing to tune, or where
    a configuration gave a wrong result.
    """
    if not torch.cuda.is_available():
        print("Tuning times kernels on a GPU, and torch sees none; `freight doctor` says why.")
        return 1
    for module in kernels():
        importlib.import_module(module)
    ops = registered()
    unknown = [name for name in names or () if name not in ops]
    if unknown or not ops:
        print(f"There is no tunable operator {', '.join(unknown)}. There are: {', '.join(ops) or 'none'}.")
        return 1
    chosen = [(ops[op], shape, dtype) for op in names or ops for shape, dtype in ops[op].cells]
    chosen = [cell for cell in chosen if only is None or fnmatch.fnmatch(label(*cell), f"*{only}*")]
    if not chosen:
        print(f"No cell of {', '.join(names or ops)} matches {only!r}.")
        return 1
    return _tune(chosen, torch.device("cuda", torch.cuda.current_device()))


def label(tunable: Tunable, shape: Shape, dtype: str) -> str:
    """A cell for people, as `fingerprint bytes=256 MiB uint8`."""
    sizes = [
        f"{dim}={show_bytes(size) if dim.endswith('bytes') else size}"
        for dim, size in zip(tunable.dims, shape, strict=True)
    ]
    return " ".join([tunable.op, *sizes, dtype])


def try_all(
    tunable: Tunable, shape: Shape, dtype: str, device: torch.device, timer: Callable[[Callable[[], Any]], float]
) -> list[Trial]:
    """Try every candidate on the same inputs, the default first; each is checked before it is timed."""
    inputs = tunable.inputs(shape, dtype, device)
    others = [config for config in tunable.candidates() if config != tunable.default]
    return [_try(tunable, inputs, config, timer) for config in (tunable.default, *others)]


def best(trials: Sequence[Trial]) -> Trial | None:
    """The fastest, and the default (the first) where nothing beats it by enough; None where nothing ran."""
    timed = [trial for trial in trials if trial.microseconds is not None]
    if not timed:
        return None
    first = trials[0]
    bound = float("inf") if first.microseconds is None else _WORTH * first.microseconds
    fastest = min(timed, key=_time)
    return fastest if _time(fastest) < bound else first


def _time(trial: Trial) -> float:
    return float("inf") if trial.microseconds is None else trial.microseconds


def _try(tunable: Tunable, inputs: tuple[Any, ...], config: Config, timer: Callable[..., float]) -> Trial:
    try:
        tunable.check(inputs, tunable.launch(*inputs, config=config))
    except AssertionError as error:
        return Trial(config, problem=f"wrong: {error}", wrong=True)
    except Exception as error:  # too much shared memory, too many registers: a candidate that does not fit this GPU
        return Trial(config, problem=f"{type(error).__name__}: {error}")
    return Trial(config, microseconds=round(timer(lambda: tunable.launch(*inputs, config=config)), 2))


def _tune(cells: Sequence[tuple[Tunable, Shape, str]], device: torch.device) -> int:
    from rich.console import Console
    from rich.table import Table

    name = torch.cuda.get_device_name(device)
    table = Table("cell", "configuration", "µs", "default, µs", "tried", "failed", title=f"tuned on {name}")
    entries, problems = [], []
    for tunable, shape, dtype in cells:
        trials = try_all(tunable, shape, dtype, device, _gpu_timer)
        winner, default = best(trials), trials[0].microseconds
        where = label(tunable, shape, dtype)
        failed = [trial for trial in trials if trial.problem]
        problems += [f"{where} {show(trial.config)}: {trial.problem}" for trial in failed]
        wrong = winner is None or any(trial.wrong for trial in trials)
        if winner is not None and winner.microseconds is not None and not wrong:
            entries.append(Entry(tunable.op, shape, dtype, winner.config, winner.microseconds, default))
        shown = [show(winner.config), f"{_time(winner):.1f}"] if winner else ["none ran", "–"]
        table.add_row(where, *shown, "–" if default is None else f"{default:.1f}", str(len(trials)), str(len(failed)))
    console = Console()
    console.print(table)
    for problem in problems:
        console.print(problem, markup=False, highlight=False)
    if entries:
        console.print(f"Written to {save(entries, name)}", markup=False, highlight=False, soft_wrap=True)
    return 0 if len(entries) == len(cells) else 1


def show(config: Config) -> str:
    """A configuration for people, as `BLOCK=2048 num_warps=8`."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def _gpu_timer(call: Callable[[], Any]) -> float:
    """The median time of `call` in microseconds, with the L2 cache flushed before each run."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(call, warmup=20, rep=100, return_mode="median")
    return 1000 * milliseconds
