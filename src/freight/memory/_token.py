"""The completion of a transfer: what its owner polls, waits for, or has a GPU stream wait for."""

import enum
import threading
from typing import Any


class State(enum.Enum):
    """Where a transfer is. It only moves down this list, and ends in DONE or FAILED."""

    QUEUED = "queued"  # nothing was handed to a device or the disk yet
    RUNNING = "running"  # at least part of it was
    DONE = "done"
    FAILED = "failed"


class Token:
    """One transfer under way.

    While it is not over, the token's maker keeps the memory at both ends alive; the token itself may be dropped.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._lock = threading.Lock()
        self._over = threading.Lock()  # held until it is over; a lock is what Ctrl-C cannot leave half taken
        self._over.acquire()
        self._state = State.QUEUED
        self._error: BaseException | None = None

    @property
    def state(self) -> State:
        """Where the transfer is now."""
        self._poll()
        return self._state

    def done(self) -> bool:
        """Whether the transfer is over, well or not; never waits."""
        return self.state in (State.DONE, State.FAILED)

    def join(self) -> None:
        """Wait on the host until the transfer is over, without raising its error."""
        with self._over:
            pass

    def wait(self) -> None:
        """Wait on the host until the transfer is over; raises what it failed with."""
        self.join()
        if self._error is not None:
            raise self._error

    def wait_on(self, stream: Any = None) -> None:
        """Have `stream`, or the current one, wait for the transfer; where only the host can wait, it does."""
        self.wait()

    def _poll(self) -> None:
        """Bring the state up to date; for those that learn of the end only by asking."""

    def _run(self) -> None:
        with self._lock:
            if self._state is State.QUEUED:
                self._state = State.RUNNING

    def _finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self._state not in (State.DONE, State.FAILED):
                self._error = error
                self._state = State.DONE if error is None else State.FAILED
                self._over.release()

    def __repr__(self) -> str:
        return f"Token({self.what}: {self._state.value})"
