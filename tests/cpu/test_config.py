"""Settings: where they come from, which wins, and what a wrong one says."""

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import freight
from freight import _config
from freight._config import Config, current, variable
from freight.errors import ArgumentError, ArgumentTypeError, FreightError

KNOBS = {knob.name: knob for knob in dataclasses.fields(Config)}
GOOD: dict[str, tuple[Any, Any]] = {  # as given, as read
    "host_bytes": ("8GiB", 8 * 2**30),
    "host_share": ("0.25", 0.25),
    "host_threads": ("3", 3),
    "slab_bytes": ("64MiB", 64 * 2**20),
    "disk_dir": ("/var/tmp", Path("/var/tmp")),
    "disk_threads": (5, 5),
    "disk_block_bytes": (4096, 4096),
    "direct_io": ("off", False),
    "checksum": ("yes", True),
    "check_ids": ("1", True),
    "cache_dir": ("~/elsewhere", Path.home() / "elsewhere"),
}
WRONG: dict[str, list[Any]] = {
    "host_bytes": ["lots", -1, 1.5, True],
    "host_share": ["half", 0, 1.5, -0.1, float("nan"), None, True, 10**400],
    "host_threads": ["many", 0, -1, 2.5, float("inf"), True, "1.0"],
    "slab_bytes": ["big", 0, None],
    "disk_dir": [3, "", b"/tmp", "~no-such-user-here/x", "a\0b"],
    "disk_threads": ["", None, "0", [1]],
    "disk_block_bytes": [0, "0MiB"],
    "direct_io": ["perhaps", 1, None],
    "checksum": ["", 0],
    "check_ids": ["sometimes", 2],
    "cache_dir": [1.5],
}


def test_every_setting_is_tried_here() -> None:
    assert set(GOOD) == set(WRONG) == set(KNOBS)


@pytest.mark.parametrize("name", KNOBS)
def test_default_is_valid_and_documented(name: str) -> None:
    knob = KNOBS[name]
    assert knob.metadata["parse"](knob.default, name) == knob.default
    assert knob.metadata["doc"].endswith(".")


@pytest.mark.parametrize("name", KNOBS)
def test_block_sets_and_takes_back(name: str) -> None:
    given, read = GOOD[name]
    before = current()
    with freight.config(**{name: given}) as settings:
        assert settings == current() == dataclasses.replace(before, **{name: read})
    assert current() == before


@pytest.mark.parametrize("name", KNOBS)
def test_environment_sets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, read = GOOD[name]
    monkeypatch.setenv(variable(name), str(given))
    _config.reset()
    assert getattr(current(), name) == read


@pytest.mark.parametrize("name", KNOBS)
def test_empty_variable_counts_as_unset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), "")
    _config.reset()
    assert getattr(current(), name) == KNOBS[name].default


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_value_is_refused_where_it_is_written(name: str, value: Any) -> None:
    before = current()
    with pytest.raises((ArgumentError, ArgumentTypeError), match=rf"^{name} ") as caught:
        freight.config(**{name: value})
    assert repr(value) in str(caught.value)
    assert current() is before


@pytest.mark.parametrize(("name", "text"), [("disk_threads", "many"), ("host_share", "2"), ("checksum", "maybe")])
def test_wrong_variable_is_named_at_first_use_and_at_every_use(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable(name), text)
    _config.reset()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^environment variable {variable(name)}='{text}': {name} must be"):
            current()
        with pytest.raises(ValueError, match=variable(name)), freight.config(host_share=0.5):
            pytest.fail("the block was entered")
    monkeypatch.delenv(variable(name))
    assert current().host_share == 0.8  # the refused block left nothing behind


def test_misspelt_variable_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FREIGHT_DISK_THREAD", "4")
    _config.reset()
    with caplog.at_level(logging.WARNING, logger="freight"):
        current()
        with freight.config(disk_threads=2):
            current()
    [record] = caplog.records
    assert record.getMessage() == (
        "environment variable FREIGHT_DISK_THREAD is none of freight's and is ignored. "
        "Did you mean FREIGHT_DISK_THREADS?"
    )


def test_unknown_setting_names_the_near_one_and_all() -> None:
    with pytest.raises(TypeError, match=r"no setting 'disk_thread'\. Did you mean disk_threads\? It has: host_bytes, "):
        freight.config(disk_thread=2)


def test_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = current()
    monkeypatch.setenv("FREIGHT_DISK_THREADS", "31")
    assert current() is before


def test_innermost_wins_and_a_none_unsets() -> None:
    with freight.config(host_bytes="1GiB", disk_threads=2):
        with freight.config(host_bytes=None) as inner:
            assert (inner.host_bytes, inner.disk_threads) == (None, 2)
        assert current().host_bytes == 2**30


def test_an_exception_ends_the_block() -> None:
    before = current()
    with pytest.raises(KeyError), freight.config(disk_threads=2):
        raise KeyError
    assert current() == before


def test_one_block_may_be_used_again_and_within_itself() -> None:
    block = freight.config(disk_threads=2)
    for _ in range(2):
        with block, freight.config(disk_threads=3):
            with block:
                assert current().disk_threads == 2
            assert current().disk_threads == 3
    assert current().disk_threads == KNOBS["disk_threads"].default


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "disk_threads": st.integers(1, 9),
        "host_share": st.sampled_from([0.1, 0.5]),
        "checksum": st.booleans(),
    },
)


@given(layers=st.lists(CHANGES, max_size=6), data=st.data())
def test_blocks_may_end_in_any_order(layers: list[dict[str, Any]], data: st.DataObject) -> None:
    start = current()
    opened = [(changes, freight.config(**changes)) for changes in layers]
    for _, block in opened:
        block.__enter__()
    while opened:
        merged: dict[str, Any] = {}
        for changes, _ in opened:
            merged |= changes
        assert current() == dataclasses.replace(start, **merged)
        _, block = opened.pop(data.draw(st.integers(0, len(opened) - 1), label="ends next"))
        block.__exit__(None, None, None)
    assert current() == start


@given(name=st.sampled_from(sorted(KNOBS)), text=st.text(max_size=12))
def test_any_text_is_a_value_or_an_error_that_names_the_setting(name: str, text: str) -> None:
    parse = KNOBS[name].metadata["parse"]
    try:
        with freight.config(**{name: text}) as settings:
            parsed = getattr(settings, name)
    except FreightError as error:
        said = str(error)
    else:
        assert parse(parsed, name) == parsed  # what was read once reads the same again
        return
    assert said.startswith(f"{name} ")


def test_other_threads_see_the_settings() -> None:
    seen: list[int] = []
    with freight.config(disk_threads=7):
        thread = threading.Thread(target=lambda: seen.append(current().disk_threads))
        thread.start()
        thread.join()
    assert seen == [7]


def test_threads_that_open_blocks_leave_nothing_behind() -> None:
    before = current()
    at_once = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(threads: int) -> None:
        try:
            at_once.wait()
            for _ in range(100):
                with freight.config(disk_threads=threads):
                    assert 1 <= current().disk_threads <= 4
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert current() == before


FORK = """
import os, signal, threading, warnings
import freight
from freight import _config

warnings.simplefilter("ignore")  # that this process has threads is the point
held, done = threading.Event(), threading.Event()

def hold():
    with _config._lock:
        held.set()
        done.wait()

with freight.config(disk_threads=6):
    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a child that hangs ends
        with freight.config(checksum=True) as settings:
            print(settings.disk_threads, settings.checksum, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    done.set()
"""


def test_forked_child_keeps_the_settings_though_a_thread_of_its_parent_held_the_lock() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "6 True\n"


def test_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Config(cache_dir=tmp_path).cache_home == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Config().cache_home == tmp_path / "freight"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Config().cache_home == Path.home() / ".cache" / "freight"


def test_cache_home_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError: nobody is listed
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert Config().cache_home == tmp_path / f"freight-{os.getuid()}"
