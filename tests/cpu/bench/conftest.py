"""Benchmarks that a test registers are gone after it; freight's own stay, as importing them again would not help."""

from collections.abc import Iterator

import pytest

from freight.bench import _registry


@pytest.fixture(autouse=True)
def _registered_for_the_test() -> Iterator[None]:
    before = {*_registry._registered, *_registry._BUILT_IN}
    yield
    for name in set(_registry._registered) - before:
        del _registry._registered[name]
