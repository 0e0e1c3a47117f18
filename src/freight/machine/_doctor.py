"""`freight doctor`: probe, judge, print; as a table for people or as JSON for a bug report."""

import dataclasses
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from freight._config import current
from freight.machine._cache import why_unwritable
from freight.machine._facts import Machine
from freight.machine._judge import FAIL, PASS, WARN, Finding, judge
from freight.machine._known import shipped
from freight.machine._probe import probe

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = {PASS: "green", WARN: "yellow", FAIL: "bold red"}
_MARK = {PASS: "ok", WARN: "warn", FAIL: "FAIL"}  # words, which need neither colour nor fonts


def main(*, as_json: bool, quick: bool, refresh: bool, directory: Path | None) -> int:
    """Print the findings on this computer; the exit status, 1 where something fails."""
    from rich.console import Console

    waiting = Console(stderr=True)
    if waiting.is_terminal:
        with waiting.status("looking at this computer; measuring it takes some seconds, once"):
            machine = probe(quick=quick, refresh=refresh, directory=directory)
    else:
        machine = probe(quick=quick, refresh=refresh, directory=directory)
    findings = judge(machine, usual=shipped(machine.gpu.slug), cache_problem=why_unwritable())
    if as_json:
        sys.stdout.write(report(machine, findings))
    else:
        show(machine, findings, Console(highlight=False))
    return int(any(finding.verdict == FAIL for finding in findings))


def report(machine: Machine, findings: list[Finding]) -> str:
    """One JSON object with everything that a bug report needs."""
    data = {
        "machine": json.loads(machine.json()),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "versions": dataclasses.asdict(machine.software) | {"freight": _freight_version()},
    }
    return json.dumps(data, indent=2) + "\n"


def show(machine: Machine, findings: list[Finding], console: "Console") -> None:
    """The findings as a table, each remedy under its line, and a count at the end."""
    from rich.table import Table
    from rich.text import Text

    def printable(text: str) -> str:  # not every terminal has a µ, and not every file name is text
        return text.encode(console.encoding, "backslashreplace").decode(console.encoding)

    for group, lines in groupby(findings, key=lambda finding: finding.group):
        table = Table(
            title=group, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
        )
        table.add_column(width=4)
        table.add_column(min_width=22, no_wrap=True)
        table.add_column(overflow="fold")
        for line in lines:
            table.add_row(Text(_MARK[line.verdict], _STYLE[line.verdict]), Text(line.name), Text(printable(line.value)))
            if line.remedy:
                table.add_row("", "", Text(printable(f"-> {line.remedy}"), "italic"))
        console.print(table)
        console.print()
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _MARK}
    how = "quickly measured" if machine.quick else "measured"
    console.print(f"{counts[PASS]} pass, {counts[WARN]} warn, {counts[FAIL]} fail", style="bold", markup=False)
    console.print(f"freight {_freight_version()}; {how} {machine.date} in {machine.seconds} s", markup=False)
    kept = f"kept in {current().cache_home}; `freight doctor --refresh` measures again"
    console.print(printable(kept), markup=False)


def _freight_version() -> str:
    import freight

    return freight.__version__
