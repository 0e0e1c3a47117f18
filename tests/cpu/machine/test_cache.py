"""What was measured is kept whole or not at all, and what cannot be trusted is ignored, with a line in the log."""

import dataclasses
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import freight
from freight._config import current
from freight.machine import Disk, DiskRate, Host, Machine, _cache
from freight.machine._cache import Entry, Identity, load, store, why_unwritable

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def _all_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "freight.machine")


def entry_of(machine: Machine) -> Entry:
    return Entry(Identity.of(machine.software, machine.gpu, machine.host), machine, (machine.disk,))


def disk(directory: str, gbs: float = 1.0, *, quick: bool = False) -> Disk:
    return Disk(quick=quick, directory=directory, direct=True, rates=(DiskRate(1, 2**20, gbs, gbs),))


def test_there_and_back(h200: Machine) -> None:
    entry = entry_of(h200)
    assert load(entry.identity) is None
    store(entry)
    assert load(entry.identity) == entry
    assert [path.name for path in entry.identity.file.parent.iterdir()] == ["nvidia-h200-gpu-3f1c.json"]
    assert entry.identity.file.parent == current().cache_home / "machine"


def test_a_machine_without_a_gpu_goes_by_its_host_name(h200: Machine) -> None:
    identity = dataclasses.replace(entry_of(h200).identity, gpu=None, uuid=None, host="node 7/Ä")
    assert identity.file.name == "cpu-node-7.json"


# ---- files that cannot be trusted -------------------------------------------------------------------


def garbled(file: Path) -> None:
    file.write_bytes(os.urandom(3000))


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def of_an_older_freight(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 0}))


def with_a_wrong_type(file: Path) -> None:
    data = json.loads(file.read_text())
    data["machine"]["link"]["h2d_gbs"] = "fast"
    file.write_text(json.dumps(data))


def of_something_else(file: Path) -> None:
    file.write_text('{"schema": 1, "rates": [1, 2, 3]}')


def a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (garbled, "is ignored: "),
        (truncated, "is ignored: machine facts are not JSON"),
        (emptied, "is ignored: machine facts are not JSON"),
        (of_an_older_freight, "is ignored: machine facts have schema 0, and this freight reads 1"),
        (with_a_wrong_type, "is ignored: machine facts: machine.link.h2d_gbs must be a finite number"),
        (of_something_else, "is ignored: machine facts: rates is not a known field"),
        (a_directory, "is ignored: .*Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_ignored(
    h200: Machine, spoil: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = entry_of(h200)
    store(entry)
    spoil(entry.identity.file)
    assert load(entry.identity) is None
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(str(entry.identity.file))
    assert re.search(reason, record.getMessage())
    if spoil is not a_directory:
        store(entry)
        assert load(entry.identity) == entry


@given(at=st.integers(0, 10**6), value=st.integers(0, 255))
def test_one_wrong_byte_never_raises(at: int, value: int) -> None:
    """It gives facts for the same machine, or none; a library that does not start would be worse than either."""
    machine = Machine.from_json('{"schema": 1, "software": {"python": "3.11.7", "torch": "2.13.0"}, "seconds": 12.5}')
    entry = entry_of(machine)
    store(entry)
    data = bytearray(entry.identity.file.read_bytes())
    data[at % len(data)] = value
    entry.identity.file.write_bytes(data)
    found = load(entry.identity)
    assert found is None or found.identity == entry.identity


@pytest.mark.parametrize(
    ("field", "before", "said"),
    [
        ("driver", "570.1", "driver was 570.1 and is 580.95.05"),
        ("torch", "2.10.0", "torch was 2.10.0 and is 2.11.0+cu130"),
        ("host", "elsewhere", "host was elsewhere and is "),
        ("cores", 8, "cores was 8 and is 16"),
        ("memory_gib", 64, "memory_gib was 64 and is 125"),
        ("driver", None, "driver was None and is 580.95.05"),
    ],
)
def test_an_outdated_or_foreign_file_is_ignored(
    h200: Machine, field: str, before: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = entry_of(h200)
    old = dataclasses.replace(entry, identity=dataclasses.replace(entry.identity, **{field: before}))
    store(old)
    assert old.identity.file == entry.identity.file
    assert load(entry.identity) is None
    [message] = caplog.messages
    assert message.startswith(f"{entry.identity.file} is outdated: {said}")
    store(entry)
    assert load(entry.identity) == entry


def test_another_gpu_has_a_file_of_its_own(h200: Machine) -> None:
    one = entry_of(h200)
    other = entry_of(dataclasses.replace(h200, gpu=dataclasses.replace(h200.gpu, uuid="GPU-77aa")))
    store(one)
    store(other)
    assert (load(one.identity), load(other.identity)) == (one, other)


def test_memory_that_is_only_a_little_less_is_the_same_machine(h200: Machine) -> None:
    """A kernel update takes some megabytes more."""
    less = dataclasses.replace(h200, host=dataclasses.replace(h200.host, memory_bytes=125 * 2**30 - 2**27))
    store(entry_of(h200))
    assert load(entry_of(less).identity) is not None


# ---- writing ----------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_costs_a_warning(
    h200: Machine, unwritable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with freight.config(cache_dir=unwritable / "freight"):
        store(entry_of(h200))
        assert "is not writable" in (why_unwritable() or "")
        assert load(entry_of(h200).identity) is None
    [message] = caplog.messages
    assert message.startswith("what was measured is not kept: ")
    assert message.endswith("Set FREIGHT_CACHE_DIR.")
    assert list(unwritable.iterdir()) == []


def test_a_file_in_the_way_costs_a_warning(h200: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    with freight.config(cache_dir=tmp_path / "file"):
        store(entry_of(h200))
        assert why_unwritable() == f"{tmp_path / 'file'} is not a directory"
    assert "is not kept" in caplog.text
    assert (tmp_path / "file").read_text() == "mine"


def test_where_a_cache_can_be_made(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "not" / "yet" / "there"):
        with freight.config(cache_dir=place):
            assert why_unwritable() is None
    assert list(tmp_path.iterdir()) == []  # asking makes nothing


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_a_write_that_breaks_off_leaves_the_old_file(
    h200: Machine, fault: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = entry_of(h200)
    store(old)
    new = dataclasses.replace(old, machine=dataclasses.replace(h200, seconds=1.0))

    def broken(source: str, target: Path) -> None:
        assert Path(source).parent == target.parent  # a rename is only atomic within one file system
        raise fault

    with monkeypatch.context() as patched:
        patched.setattr(_cache.os, "replace", broken)
        if isinstance(fault, OSError):
            store(new)
            assert "No space left on device" in caplog.text
        else:
            with pytest.raises(KeyboardInterrupt):
                store(new)
    assert load(old.identity) == old
    assert list(old.identity.file.parent.iterdir()) == [old.identity.file]


def test_readers_see_a_whole_file_at_any_time(h200: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """A writer writes two entries of very different length in turn; a reader never sees anything else."""
    short = entry_of(h200)
    long = dataclasses.replace(short, disks=tuple(disk(f"/disk/{number}") for number in range(16)))
    store(short)
    stop, seen = threading.Event(), []

    def read() -> None:
        while not (seen and stop.is_set()):
            seen.append(load(short.identity))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(60):
            store(long if turn % 2 else short)
    finally:
        stop.set()
        reader.join()
    assert set(seen) <= {short, long}
    assert caplog.messages == []


# ---- what replaces what ------------------------------------------------------------------------------


def quick(machine: Machine) -> Machine:
    return dataclasses.replace(machine, quick=True, seconds=2.0)


def partial(machine: Machine) -> Machine:
    return dataclasses.replace(machine, host=Host(absent="too little memory"), seconds=3.0)


@pytest.mark.parametrize(
    ("before", "after", "replaced"),
    [
        ("full", "full", True),
        ("full", "quick", False),
        ("full", "partial", False),
        ("quick", "full", True),
        ("quick", "quick", True),
        ("quick", "partial", False),  # what is missing is worth more than a finer figure
        ("partial", "quick", True),
        ("partial", "full", True),
        ("partial", "partial", True),
    ],
)
def test_what_is_poorer_replaces_nothing(h200: Machine, before: str, after: str, replaced: bool) -> None:
    kinds = {"full": h200, "quick": quick(h200), "partial": partial(h200)}
    old = kinds[before]
    new = dataclasses.replace(kinds[after], date="2030-01-01")
    assert entry_of(old).having(new).machine == (new if replaced else old)


def test_several_disks_are_kept(h200: Machine) -> None:
    entry = entry_of(dataclasses.replace(h200, disk=disk("/one")))
    for name in ("/two", "/three"):
        entry = entry.having(dataclasses.replace(h200, disk=disk(name)))
    store(entry)
    kept = load(entry.identity)
    assert kept is not None
    assert [found.directory for found in kept.disks] == ["/one", "/two", "/three"]
    assert kept.disk(Path("/two")) == disk("/two")
    assert kept.disk(Path("/four")) is None


@pytest.mark.parametrize(
    ("before", "after", "replaced"),
    [
        (disk("/one"), disk("/one", 2.0), True),
        (disk("/one"), disk("/one", 2.0, quick=True), False),
        (disk("/one", quick=True), disk("/one", 2.0), True),
        (disk("/one", quick=True), disk("/one", 2.0, quick=True), True),
        (disk("/one"), Disk(absent="it is full", directory="/one"), False),
    ],
)
def test_what_replaces_a_disk(h200: Machine, before: Disk, after: Disk, replaced: bool) -> None:
    entry = entry_of(dataclasses.replace(h200, disk=before))
    assert entry.having(dataclasses.replace(h200, disk=after)).disks == ((after,) if replaced else (before,))


def test_the_oldest_disk_goes_first(h200: Machine) -> None:
    entry = entry_of(h200)
    for number in range(20):
        entry = entry.having(dataclasses.replace(h200, disk=disk(f"/{number}")))
    assert [found.directory for found in entry.disks] == [f"/{number}" for number in range(4, 20)]
