"""The front door is frozen: a name that comes or goes changes this list, and with it the changelog."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import freight

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["UnifiedTensor", "__version__", "config", "errors", "gather_rows", "machine", "unified"]


def test_names_are_frozen() -> None:
    assert sorted(freight.__all__) == NAMES
    assert dir(freight) == NAMES
    assert [name for name in NAMES if not hasattr(freight, name)] == []


def test_nothing_public_beside_the_list() -> None:
    """Modules of the package appear in it once something imports them; all of them but the namespaces are private."""
    public = {name for name in vars(freight) if not name.startswith("_")}
    rooms = {path.stem for path in (ROOT / "src" / "freight").iterdir()}
    assert public - rooms - {"importlib", "TYPE_CHECKING", "Any"} <= set(NAMES)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'freight' has no attribute 'unite'"):
        _ = freight.unite  # type: ignore[attr-defined]


def test_version_is_said_once_and_cited() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", freight.__version__)
    assert f"version: {freight.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    try:
        installed = importlib.metadata.version("freight")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("freight runs from its source and is not installed")
    assert installed == freight.__version__
