"""`freight bench`: measure the named benchmarks, print them, and keep what was measured."""

import logging
import tempfile
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from freight import _cuda
from freight._gpuname import slug
from freight.bench import _facts, _registry
from freight.bench._code import checkout
from freight.bench._facts import Facts
from freight.bench._measure import Stamp, WrongResult, measure
from freight.bench._print import Printer
from freight.bench._record import Cell, Record, load, merge, save
from freight.bench._registry import Benchmark
from freight.bench._run import Case, Run, Skip
from freight.errors import ArgumentError, DiskError, FreightError

INTERRUPTED = 130  # what a shell makes of Ctrl-C

_log = logging.getLogger(__name__)


def main(
    names: list[str],
    *,
    only: str | None = None,
    quick: bool = False,
    json_dir: Path | None = None,
    tune: bool = False,
    update: bool = False,
) -> int:
    """Run the benchmarks `names`, or all of them, and return the exit status.

    0: all that was measured is right, whether its targets were met or not. 1: a cell failed its check, or broke; it
    is not recorded. 130: interrupted; the cells that were complete are saved. `tune` and `update` do only what they
    say where no benchmark is named. What cannot begin (an unknown name, a record that cannot be read, a folder that
    cannot be written) raises one of freight's errors before anything is measured.
    """
    printer = Printer(Console(highlight=False))
    if update and checkout() is None:
        raise ArgumentError("tables are updated in a checkout of freight, and this freight is not imported from one.")
    status = 0
    if tune:
        from freight.kernels import _tune

        status = _tune.main()
    if names or not (tune or update):
        status = max(status, _bench(names, only, quick, json_dir, printer))
    if update and status != INTERRUPTED:
        _update(json_dir, printer)
    return status


@dataclass
class _Job:
    """One benchmark to run: which cells, and the record that they go into."""

    benchmark: Benchmark
    path: Path
    record: Record | None  # as it was found
    defined: tuple[str, ...]
    cases: list[Case]
    done: list[Cell] = field(default_factory=list)
    failed: int = 0

    def keep(self, cell: Cell, facts: Facts) -> None:
        """Put a measured cell into the record and the record on the disk, so that nothing measured is lost."""
        done = (*self.done, cell)
        new = Record(self.benchmark.name, self.benchmark.title, facts.gpu, facts.gpu_name, done, facts.machine)
        save(merge(self.record or new, new, defined=self.defined), self.path)
        self.done.append(cell)

    @property
    def left_out(self) -> int:
        """How many quick cells did not enter the record, which has them in full."""
        full = {cell.id for cell in self.record.cells if not cell.quick} if self.record else set()
        return sum(cell.quick and cell.id in full for cell in self.done)


def _bench(names: list[str], only: str | None, quick: bool, json_dir: Path | None, printer: Printer) -> int:
    benchmarks = [_registry.get(name) for name in dict.fromkeys(names or _registry.names())]
    directory = _results(json_dir)
    jobs = [_job(benchmark, only, quick, directory) for benchmark in benchmarks]
    if not any(job.cases for job in jobs):
        raise ArgumentError(_no_match(only, quick, jobs))
    if json_dir is None and checkout() is None:
        printer.say(f"freight is not run from a checkout: records go to {directory}")
    try:
        facts = _facts.gather()
        for job in jobs:
            if job.cases:
                _run(job, facts, quick, printer)
    except KeyboardInterrupt:
        complete = sum(len(job.done) for job in jobs)
        printer.say(f"interrupted: {complete} complete cells are saved in {directory}; the one under way is lost")
        return INTERRUPTED
    return int(any(job.failed for job in jobs))


def _job(benchmark: Benchmark, only: str | None, quick: bool, directory: Path) -> _Job:
    """The cells of a benchmark, declared but not begun, and its record so far."""
    run = Run(quick=quick, gpu=_cuda.available())
    benchmark.function(run)
    path = directory / f"{benchmark.name}.{slug(_facts.gpu_name() or None)}.json"
    record = load(path) if path.exists() else None
    chosen = [case for case in run.cases if _wanted(case, benchmark.name, only) and (case.in_quick or not quick)]
    return _Job(benchmark, path, record, tuple(case.id for case in run.cases), chosen)


def _wanted(case: Case, benchmark: str, only: str | None) -> bool:
    return only is None or fnmatchcase(case.id, only) or fnmatchcase(f"{benchmark}/{case.id}", only)


def _no_match(only: str | None, quick: bool, jobs: list[_Job]) -> str:
    ids = "\n".join(f"  {job.benchmark.name}/{cell_id}" for job in jobs for cell_id in job.defined)
    haste = " of a quick run" if quick else ""
    if only is None:
        return f"there is no cell{haste} in {', '.join(job.benchmark.name for job in jobs)}."
    return f"no cell{haste} matches {only!r}; quote a pattern such as 'copy/*'. The cells are:\n{ids}"


def _run(job: _Job, facts: Facts, quick: bool, printer: Printer) -> None:
    benchmark = job.benchmark
    stamp = Stamp(facts.commit, facts.dirty, benchmark.code(), _now, facts.versions, quick)
    printer.heading(benchmark.title, benchmark.name, facts, len(job.cases), quick=quick)
    for case in job.cases:
        try:
            with printer.measuring(case.id) as told:
                cell = measure(case, stamp, told=told)
        except Skip as reason:
            printer.skipped(case.id, str(reason))
        except Exception as error:
            job.failed += 1
            printer.failed(case.id, _reason(error))
            _log.debug("cell %s of %s failed", case.id, benchmark.name, exc_info=True)
        else:
            job.keep(cell, facts)
            printer.cell(cell)
    printer.summary(benchmark.name, job.done, job.failed, job.left_out, job.path)


def _reason(error: Exception) -> str:
    """What to say of a failed cell; of an error that nobody foresaw, where it happened too."""
    if isinstance(error, WrongResult | FreightError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def _results(json_dir: Path | None) -> Path:
    """The folder of the records, made if need be and known to be writable before anything is measured."""
    directory = json_dir or (checkout() or Path.cwd()) / "benchmarks" / "results"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()  # asked of the system itself; it leaves nothing behind
    except OSError as error:
        reason = f"records cannot be written here ({error.strerror}); name another folder with --json"
        raise DiskError(error.errno, reason, str(directory)) from None
    return directory


def _update(json_dir: Path | None, printer: Printer) -> None:
    """Make the tables between markers anew, in the README and the docs of the checkout."""
    from freight.bench.report import _markers

    root = checkout()
    assert root is not None  # looked at before anything was measured
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    records = [load(path) for path in sorted(_results(json_dir).glob("*.json"))]
    changed = _markers.update([page for page in pages if page.exists()], records)
    for page in changed:
        printer.say(f"updated {page.relative_to(root)}")
    if not changed:
        printer.say("every table is up to date")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
