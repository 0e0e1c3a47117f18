"""A few threads that do what they are given, one thing after the other.

They are there from the start, so that a machine without a thread to spare says so then and not in the middle of a
transfer, and giving them something is one step that Ctrl-C comes before or after.
"""

import queue
import threading
from collections.abc import Callable

from freight.errors import FreightError


class Workers:
    """Threads named `name`; they end with `close`, when all they were given is done."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                thread = threading.Thread(target=_work, args=(self._calls,), name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                raise FreightError(
                    f"the system gave {len(self._threads)} of the {count} threads asked for ({error}). Ask for fewer, "
                    "or raise the limit of this user's processes (`ulimit -u`)."
                ) from None
            raise

    def do(self, call: Callable[[], object]) -> None:
        """Have a thread call `call`, which must not raise, once all given before was begun."""
        self._calls.put(call)

    def close(self) -> None:
        """Wait until everything is done and the threads have ended, which in a forked child they have."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # one of them may be the last to let the owner go
                thread.join()


def _work(calls: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # and what it holds, before the wait for the next
