"""Every example in a docstring runs, and gives what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.glob("freight/**/*.py"))
    if ">>> " in path.read_text()
]


def test_there_are_examples() -> None:
    assert {"freight._config", "freight._units"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 0
