"""What the tests of memory share: what was held before, Ctrl-C at every step, and a GPU that is not there."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from freight import memory

sys.path.insert(0, str(Path(__file__).parent))  # for `fake_runtime`, which the test modules import by name as well

from fake_runtime import FakeRuntime


@pytest.fixture
def held_before() -> int:
    """What freight holds before the test, once what earlier tests left behind is collected."""
    gc.collect()
    return memory.stats().held


@pytest.fixture
def interrupted_everywhere(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Do `action` again and again, with Ctrl-C one step later each time, and `check` after each, until it goes through.

    Python raises Ctrl-C where a function begins and where a call of a built-in one has returned: just there it comes.
    """
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # some come in a finalizer, where Python drops them

    def interrupt(action: Callable[[], object], check: Callable[[], object]) -> None:
        step, came = -1, True
        while came:
            step, came, left = step + 1, False, step + 1

            def profile(frame: object, event: str, argument: object) -> None:
                nonlocal came, left
                if event in ("call", "c_return"):
                    left -= 1
                    if left < 0 and not came:
                        came = True
                        raise KeyboardInterrupt

            sys.setprofile(profile)
            try:
                action()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            check()
        assert step > 10  # or it was not the action that was interrupted

    return interrupt


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    fake.use(monkeypatch)
    return fake
