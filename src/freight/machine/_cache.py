"""What was measured, kept for the next process: one JSON file a GPU, in `machine` under the cache directory.

A file is valid for one identity: another GPU, driver, torch, host, number of cores or amount of memory makes it
outdated. What is outdated or cannot be read is ignored, with a line in the log, and replaced by the next probe.
"""

import contextlib
import dataclasses
import logging
import os
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from freight._config import current
from freight._units import GiB
from freight.errors import RecordError
from freight.machine import _json
from freight.machine._facts import SCHEMA, Disk, Gpu, Host, Machine, Software

log = logging.getLogger("freight.machine")

_MOST_DISKS = 16


@dataclass(frozen=True)
class Identity:
    """What the facts hold for."""

    host: str
    cores: int | None
    memory_gib: int
    gpu: str | None
    uuid: str | None
    driver: str | None
    torch: str

    @classmethod
    def of(cls, software: Software, gpu: Gpu, host: Host) -> "Identity":
        """The identity of the computer with these facts."""
        memory_gib = round((host.memory_bytes or 0) / GiB)
        name = socket.gethostname()
        return cls(name, host.cores, memory_gib, gpu.name, gpu.uuid, software.driver, software.torch)

    @property
    def file(self) -> Path:
        """Where its facts are kept: under the GPU's id, or the host's name where there is no GPU."""
        name = f"{self.gpu}-{self.uuid}" if self.gpu else f"cpu-{self.host}"
        return current().cache_home / "machine" / (re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() + ".json")


@dataclass(frozen=True)
class Entry:
    """A cache file: the facts, and the disks of all directories measured, the newest last."""

    identity: Identity
    machine: Machine
    disks: tuple[Disk, ...] = ()

    def disk(self, directory: Path) -> Disk | None:
        """The disk of `directory`, if it was measured."""
        return next((disk for disk in self.disks if disk.directory == str(directory)), None)

    def having(self, machine: Machine) -> "Entry":
        """With the facts and the disk of `machine`, where they are no poorer than those that are here."""
        keep = _worth(self.machine) > _worth(machine)
        disk = machine.disk
        before = None if disk.directory is None else self.disk(Path(disk.directory))
        disks = self.disks
        if disk.absent is None and (before is None or before.quick or not disk.quick):
            disks = (*(old for old in disks if old is not before), disk)[-_MOST_DISKS:]
        return Entry(self.identity, self.machine if keep else machine, disks)


def load(identity: Identity) -> Entry | None:
    """The entry for `identity`, or None where there is none that is valid."""
    file = identity.file
    try:
        entry = _json.load(Entry, file.read_text(encoding="utf-8"), SCHEMA)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, RecordError) as error:
        log.warning("%s is ignored: %s", file, error)
        return None
    if entry.identity != identity:
        log.info("%s is outdated: %s", file, _difference(entry.identity, identity))
        return None
    return entry


def store(entry: Entry) -> None:
    """Write `entry`, whole or not at all; a directory that cannot be written costs a warning and the next probe."""
    file, temporary = entry.identity.file, None
    text = _json.dump(dataclasses.asdict(entry), SCHEMA)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with open(fd, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(temporary, file)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        log.warning("what was measured is not kept: %s cannot be written (%s). Set FREIGHT_CACHE_DIR.", file, error)


def why_unwritable() -> str | None:
    """Why the cache directory cannot be written, None where it can."""
    home = current().cache_home
    there = next((path for path in (home, *home.parents) if path.exists()), Path("/"))
    if not there.is_dir():
        return f"{there} is not a directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def _worth(machine: Machine) -> int:
    return 2 * machine.complete + (not machine.quick)


def _difference(old: Identity, new: Identity) -> str:
    pairs = [(field.name, getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(Identity)]
    return ", ".join(f"{name} was {before} and is {now}" for name, before, now in pairs if before != now)
