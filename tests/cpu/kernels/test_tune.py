"""Tuning, with a timer that says what it is told: what wins, what never does, and what is kept of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freight import _config
from freight._units import MiB
from freight.kernels import _table, _tune
from freight.kernels._table import Config, Shape, Tunable
from freight.kernels._tune import Trial, best, label, main, show, try_all

CPU = torch.device("cpu")
GPU_NAME = "NVIDIA RTX 9999"
WRONG, BROKEN = 8, 16  # values of BLOCK with which the operator below gives a wrong result, and none


class Doubling:
    """An operator that notes what it was launched with, and a timer that knows what that takes."""

    def __init__(self, microseconds: dict[int, float]) -> None:
        self.microseconds = microseconds
        self.launched: list[tuple[Tensor, int]] = []
        self.timed: list[int] = []
        self.tunable = Tunable(
            op="doubling",
            dims=("rows",),
            default={"BLOCK": 1},
            space={"BLOCK": (4, 2, 1, WRONG, BROKEN)},
            cells=(((5,), "float32"), ((3,), "float32")),
            inputs=self.inputs,
            launch=self.launch,
            check=self.check,
        )

    def inputs(self, shape: Shape, dtype: str, device: torch.device) -> tuple[Tensor]:
        return (torch.rand(shape, dtype=getattr(torch, dtype)),)

    def launch(self, x: Tensor, config: Config) -> Tensor:
        self.launched.append((x, config["BLOCK"]))
        if config["BLOCK"] == BROKEN:
            raise RuntimeError("out of resource: shared memory")
        return 2 * x + (config["BLOCK"] == WRONG)

    def check(self, inputs: tuple[Tensor], got: Tensor) -> None:
        if not torch.equal(got, inputs[0] + inputs[0]):
            raise AssertionError("it is not twice the input")

    def timer(self, call: Callable[[], Any]) -> float:
        call()
        self.timed.append(self.launched[-1][1])
        return self.microseconds[self.timed[-1]]

    def tried(self) -> list[Trial]:
        return try_all(self.tunable, (5,), "float32", CPU, self.timer)

    def without(self, *blocks: int) -> "Doubling":
        space = {"BLOCK": tuple(size for size in self.tunable.space["BLOCK"] if size not in blocks)}
        self.tunable = dataclasses.replace(self.tunable, space=space)
        return self


def timed(default: float | None, *others: float) -> list[Trial]:
    return [Trial({"BLOCK": 2**i}, time) for i, time in enumerate((default, *others))]


def test_every_candidate_is_tried_on_the_same_inputs_the_default_first() -> None:
    op = Doubling({1: 30.0, 2: 20.0, 4: 10.0})
    trials = op.tried()
    assert [trial.config["BLOCK"] for trial in trials] == [1, 4, 2, WRONG, BROKEN]
    assert [trial.microseconds for trial in trials] == [30.0, 10.0, 20.0, None, None]
    assert len({id(x) for x, _ in op.launched}) == 1


def test_a_wrong_result_never_wins() -> None:
    op = Doubling({1: 30.0, 2: 20.0, 4: 10.0, WRONG: 0.001})
    trials = op.tried()
    assert trials[3] == Trial({"BLOCK": WRONG}, None, "wrong: it is not twice the input", wrong=True)
    assert WRONG not in op.timed
    assert best(trials) == Trial({"BLOCK": 4}, 10.0)


def test_a_candidate_that_fails_is_reported_and_the_others_go_on() -> None:
    trials = Doubling({1: 30.0, 2: 20.0, 4: 40.0}).tried()
    assert trials[4] == Trial({"BLOCK": BROKEN}, None, "RuntimeError: out of resource: shared memory")
    assert best(trials) == Trial({"BLOCK": 2}, 20.0)


@pytest.mark.parametrize(("other", "wins"), [(110.0, 0), (100.0, 0), (97.0, 0), (96.9, 1), (1.0, 1)])
def test_what_is_less_than_three_percent_faster_is_not_worth_a_compilation(other: float, wins: int) -> None:
    trials = timed(100.0, other)
    assert best(trials) is trials[wins]


def test_the_fastest_wins_wherever_it_stands() -> None:
    trials = timed(100.0, 50.0, 10.0, 20.0)
    assert best(trials) is trials[2]


def test_where_the_default_fails_the_fastest_wins_by_whatever_margin() -> None:
    trials = timed(None, 100.0, 99.9)
    assert best(trials) is trials[2]


def test_where_everything_fails_nothing_wins() -> None:
    assert best(timed(None)) is None
    assert best([]) is None


def test_cells_and_configurations_for_people() -> None:
    tunable = dataclasses.replace(Doubling({}).tunable, dims=("rows", "row_bytes"), cells=())
    assert label(tunable, (1000, 256 * MiB), "uint8") == "doubling rows=1000 row_bytes=256 MiB uint8"
    assert show({"BLOCK": 2048, "num_warps": 8}) == "BLOCK=2048 num_warps=8"


# ---- the command -------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 1
    said = capsys.readouterr().out
    assert said == "Tuning times kernels on a GPU, and torch sees none; `freight doctor` says why.\n"


Command = Callable[[Doubling], Callable[..., int]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """`main` with one operator registered, on a GPU by name whose clock is the operator's own timer."""

    def prepare(op: Doubling) -> Callable[..., int]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU_NAME)
        monkeypatch.setattr(_table, "_gpu_at", lambda index: "rtx9999")
        monkeypatch.setattr(_table, "_registered", {"doubling": op.tunable})
        monkeypatch.setattr(_tune, "_gpu_timer", op.timer)
        monkeypatch.setenv("COLUMNS", "200")
        return main

    return prepare


def found(op: Doubling, rows: int) -> Config:
    return op.tunable.config((rows,), "float32", torch.device("cuda", 0))


def test_what_wins_is_kept_for_the_next_lookup(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    op = Doubling({1: 30.0, 2: 20.0, 4: 10.0}).without(WRONG)
    run = command(op)
    assert found(op, 5) == {"BLOCK": 1}
    assert run(only="rows=5*") == 0
    assert found(op, 5) == {"BLOCK": 4}
    said = capsys.readouterr().out
    assert "tuned on NVIDIA RTX 9999" in said
    assert [word for word in ("doubling rows=5 float32", "BLOCK=4", "10.0", "30.0") if word not in said] == []
    assert "doubling rows=5 float32 BLOCK=16: RuntimeError: out of resource: shared memory\n" in said
    assert f"Written to {next(iter((_config.current().cache_home / 'tuned').iterdir()))}\n" in said


def test_a_cell_with_a_wrong_result_is_not_kept(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that can be wrong is not to be trusted with another configuration either."""
    op = Doubling({1: 30.0, 2: 20.0, 4: 10.0})
    assert command(op)() == 1
    assert found(op, 5) == {"BLOCK": 1}
    said = capsys.readouterr().out
    assert "doubling rows=5 float32 BLOCK=8: wrong: it is not twice the input\n" in said
    assert "Written to" not in said


def test_a_cell_in_which_nothing_runs_is_said(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    op = Doubling({})
    op.tunable = dataclasses.replace(op.tunable, default={"BLOCK": BROKEN}, space={"BLOCK": (BROKEN,)})
    assert command(op)() == 1
    said = capsys.readouterr().out
    assert "none ran" in said
    assert said.count("BLOCK=16: RuntimeError: out of resource: shared memory\n") == 2
    assert "Written to" not in said


def test_names_and_patterns_choose_the_cells(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    op = Doubling({1: 30.0, 2: 20.0, 4: 10.0}).without(WRONG, BROKEN)
    run = command(op)
    assert run(["doubling"], only="rows=3 float32") == 0
    assert {x.numel() for x, _ in op.launched} == {3}
    assert run(["doubling"]) == 0
    assert {x.numel() for x, _ in op.launched} == {3, 5}
    op.launched.clear()
    capsys.readouterr()
    assert run(["halving", "doubling"]) == 1
    assert run(only="rows=7") == 1
    assert op.launched == []
    assert capsys.readouterr().out.splitlines() == [
        "There is no tunable operator halving. There are: doubling.",
        "No cell of doubling matches 'rows=7'.",
    ]
