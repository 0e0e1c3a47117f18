"""`freight report`: all records of a folder as one HTML page."""

import sys
from pathlib import Path

from freight.bench._code import checkout
from freight.bench._record import Record, load
from freight.bench.report._page import page
from freight.bench.report._write import write
from freight.errors import RecordError

_OUT = Path("freight-report.html")


def main(*, results: Path | None = None, out: Path | None = None) -> int:
    """Write the page of the records in folder `results` to `out`, and return the exit status.

    By default the records are those of the checkout, or of ./benchmarks/results. A record that cannot be read is shown
    on the page as a problem, next to the others; then, and where there is no record at all, the status is 1.
    """
    folder = results or (checkout() or Path.cwd()) / "benchmarks" / "results"
    files = [folder] if folder.is_file() else sorted(folder.glob("*.json"))
    if not files:
        print(
            f"There are no records in {folder}. Make some with `freight bench`, e.g. `freight bench links --quick`.",
            file=sys.stderr,
        )
        return 1
    records: list[Record] = []
    problems: list[str] = []
    for file in files:
        try:
            records.append(load(file))
        except RecordError as error:
            problems.append(str(error))
            print(error, file=sys.stderr)
    target = out or _OUT
    write(target, page(records, problems))
    print(f"{target}: {len(records)} of {len(files)} records")
    return 1 if problems else 0
