"""What `freight bench` prints: one short block a cell, as soon as it is measured."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from freight.bench._facts import Facts
from freight.bench._record import Cell, Measured, Rival, Target
from freight.bench.report import _show


class Printer:
    """Prints to `console`. Nothing of it runs while something is timed: the bar moves between rounds only."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, *parts: str | tuple[str, str]) -> None:
        """One line; a part is text, or text and its style."""
        self._console.print(Text.assemble(*parts), soft_wrap=True)

    def heading(self, title: str, name: str, facts: Facts, cells: int, *, quick: bool) -> None:
        """What is about to be measured, and on what."""
        commit = facts.commit[:7] + ("+" if facts.dirty else "")
        parts = [facts.gpu_name or "no GPU", f"commit {commit}", _show.plural(cells, "cell")]
        if quick:
            parts.append("quick: fewer and smaller, and marked so")
        self.say((name, "bold"), f" · {title} · {' · '.join(parts)}")

    @contextlib.contextmanager
    def measuring(self, cell_id: str) -> Iterator[Callable[[int, int], None]]:
        """A bar for the rounds of a cell, gone when it is over; gives what to tell it with. Only a terminal sees it."""
        if not self._console.is_terminal:
            yield lambda done, of: None
            return
        columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds")
        with Progress(*columns, console=self._console, auto_refresh=False, transient=True) as bar:
            task = bar.add_task(cell_id, total=None)
            bar.refresh()
            yield lambda done, of: bar.update(task, completed=done, total=of, refresh=True)

    def cell(self, cell: Cell) -> None:
        """The subject, its rivals, and the verdicts on its targets."""
        better = "more is better" if cell.better == "higher" else "less is better"
        pairs = _show.plural(cell.subject.runs, "round")
        self.say("  ", (cell.id, "bold"), f"  {cell.unit}, {better}, {pairs}{', quick' if cell.quick else ''}")
        width = max(len(name) for name in (cell.subject.name, *(rival.name for rival in cell.rivals)))
        self.say("    ", _measured(cell.subject, width))
        for rival in cell.rivals:
            self.say("    ", *_rival(rival, width))
        for target in cell.targets:
            self.say("    ", *_verdict(target))

    def skipped(self, cell_id: str, reason: str) -> None:
        """A cell that this machine cannot measure."""
        self.say("  ", (cell_id, "bold"), f"  not measured: {reason}")

    def failed(self, cell_id: str, reason: str) -> None:
        """A cell that failed its check, or broke."""
        self.say("  ", (cell_id, "bold"), ("  FAILED: ", "bold red"), reason)

    def summary(self, name: str, cells: Sequence[Cell], failed: int, left_out: int, path: Path) -> None:
        """How many cells there are now, what they reached, and where they are; `left_out` of them are not."""
        judged = [target for cell in cells for target in cell.targets if target.worse_end is not None]
        parts = [f"{_show.plural(len(cells), 'cell')} measured"]
        if judged:
            parts.append(f"{sum(target.met for target in judged)} of {_show.plural(len(judged), 'target')} met")
        if failed:
            parts.append(f"{_show.plural(failed, 'cell')} FAILED, and not recorded")
        if len(cells) > left_out:
            parts.append(f"saved in {path}")
        if left_out:
            parts.append(f"{_show.plural(left_out, 'quick cell')} left out: {path.name} has them in full")
        self.say((name, "bold"), ": " + "; ".join(parts))


def _measured(measured: Measured, width: int) -> str:
    return f"{measured.name:<{width}}  {_show.number(measured.median):>8}  ({_show.quartiles(measured)})"


def _rival(rival: Rival, width: int) -> Sequence[str | tuple[str, str]]:
    if rival.measured is None or rival.ratio is None:
        return (f"{rival.name:<{width}}  ", (f"absent: {rival.absent}", "dim"))
    ratio = f"{_show.ratio(rival.ratio)} (95 %: {_show.interval(rival)})"
    return (f"{_measured(rival.measured, width)}  ", (ratio, "cyan"))


def _verdict(target: Target) -> Sequence[str | tuple[str, str]]:
    asked = f"{_show.bound(target)} {target.what}"
    if target.worse_end is None:
        return (("not judged: ", "yellow"), f"{asked}; the rival is absent")
    verdict = ("met: ", "green") if target.met else ("missed: ", "red")
    return (verdict, f"{asked}; worse end {_show.reached(target)}")
