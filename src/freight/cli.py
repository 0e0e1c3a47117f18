"""The command line: `freight doctor`, `demo`, `bench` and `report`. It parses and prints; the work is in the rooms.

Exit status: 0 all is well, 1 something that was looked at is not, 2 the command could not begin, 130 interrupted.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from freight.errors import FreightError

_INTERRUPTED = 130  # what a shell makes of Ctrl-C

app = typer.Typer(
    name="freight",
    help="Data-efficient PyTorch training on GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(work: Callable[..., int]) -> Callable[..., None]:
    """Make a command of a function that returns its exit status; errors that freight foresees are one line."""

    @functools.wraps(work)
    def run(**options: object) -> None:
        try:
            status = work(**options)
        except FreightError as error:
            print(f"freight: {error}", file=sys.stderr)
            status = 2
        except KeyboardInterrupt:
            print("freight: interrupted", file=sys.stderr)
            status = _INTERRUPTED
        raise typer.Exit(status)

    app.command()(run)
    return run


@_command
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for a bug report.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, in under 3 s.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again what was measured before.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="The directory whose disk is judged.", show_default=False)
    ] = None,
) -> int:
    """Judge this computer line by line, with a remedy for what is not right; status 1 where something fails."""
    from freight.machine import _doctor

    return _doctor.main(as_json=as_json, quick=quick, refresh=refresh, directory=directory)


@_command
def demo() -> int:
    """Do the main jobs on what is at hand, each verified and shown with its rate; status 1 where a result is wrong."""
    from freight import _demo

    return _demo.main()


@_command
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which benchmarks; all of them unless named.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PATTERN", help="Only cells that match, such as 'copy/*'.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller cells, marked so in the record.")] = False,
    json_dir: Annotated[
        Path | None,
        typer.Option("--json", metavar="DIR", help="Where records go; benchmarks/results of the checkout otherwise."),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Find the best launch settings for this GPU.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Make the tables and plots of README and docs anew from the records.")
    ] = False,
) -> int:
    """Measure freight beside its rivals and keep what was measured; status 1 where a result is wrong."""
    from freight.bench import _main

    return _main.main(names or [], only=only, quick=quick, json_dir=json_dir, tune=tune, update=update)


@_command
def report(
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="DIR", help="The records; benchmarks/results of the checkout otherwise."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page; ./freight-report.html otherwise.")
    ] = None,
) -> int:
    """Write one self-contained HTML page of all records, with tables and plots."""
    from freight.bench.report import _main

    return _main.main(results=results, out=out)


def _show_version(asked: bool) -> None:
    if asked:
        import freight

        print(f"freight {freight.__version__}")
        raise typer.Exit(0)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Data-efficient PyTorch training on GPUs."""


def main() -> None:
    """The entry point of `freight` and of `python -m freight`."""
    app()
