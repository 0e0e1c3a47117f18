"""The disk's threads: in order, all of it, and gone at the end."""

import os
import threading

import pytest

from freight.errors import FreightError
from freight.memory._workers import Workers


def test_one_thread_keeps_the_order() -> None:
    workers, done = Workers(1, "a-test"), []
    for number in range(100):
        workers.do(lambda number=number: done.append(number))
    workers.close()
    assert done == list(range(100))


def test_all_is_done_before_the_threads_end() -> None:
    before = threading.active_count()
    workers, done, gate = Workers(4, "a-test"), [], threading.Event()
    for number in range(50):
        workers.do(lambda number=number: (gate.wait(60), done.append(number)))
    assert sorted(t.name for t in threading.enumerate() if "a-test" in t.name) == [f"a-test-{n}" for n in range(4)]
    closing = threading.Thread(target=workers.close)
    closing.start()
    assert done == []
    gate.set()
    closing.join(60)
    assert sorted(done) == list(range(50))
    assert threading.active_count() == before
    workers.close()


def test_one_of_them_may_close_them() -> None:
    before, workers, closed = threading.active_count(), Workers(3, "a-test"), threading.Event()
    workers.do(lambda: (workers.close(), closed.set()))
    assert closed.wait(60)
    workers.close()
    assert threading.active_count() == before


def test_what_a_call_holds_goes_when_it_is_done() -> None:
    class Held:
        gone = threading.Event()

        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            self.gone.set()

    workers = Workers(1, "a-test")
    workers.do(Held())
    assert Held.gone.wait(60)  # and not when the thread gets its next call
    workers.close()


def test_no_thread_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    before, spare, start = threading.active_count(), iter([True]), threading.Thread.start

    def start_where_there_is_one(thread: threading.Thread) -> None:
        if not next(spare, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_where_there_is_one)
    with pytest.raises(FreightError, match=r"the system gave 1 of the 3 threads asked for \(can't.*`ulimit -u`"):
        Workers(3, "a-test")
    assert threading.active_count() == before


def test_a_forked_child_has_no_such_threads() -> None:
    workers = Workers(2, "a-test")
    pid = os.fork()
    if pid == 0:
        workers.close()  # waits for nobody
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    workers.close()
