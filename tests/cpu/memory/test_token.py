"""Tokens: where a transfer is, and what those who wait for it get."""

import threading
from collections.abc import Callable

import pytest

from freight.errors import DiskError
from freight.memory import State, Token


def test_it_only_moves_on() -> None:
    token = Token("a copy")
    assert (token.state, token.done()) == (State.QUEUED, False)
    token._run()
    token._run()
    assert (token.state, token.done()) == (State.RUNNING, False)
    token._finish()
    token._run()
    token._finish(OSError("too late"))
    assert (token.state, token.done()) == (State.DONE, True)
    token.join()
    token.wait()
    token.wait_on()
    assert repr(token) == "Token(a copy: done)"


def test_its_error_goes_to_everyone_who_waits_and_to_nobody_who_joins() -> None:
    token = Token("a copy")
    token._finish(DiskError(5, "broken"))
    token.join()
    assert (token.state, token.done()) == (State.FAILED, True)
    for wait in (token.wait, token.wait, token.wait_on):
        with pytest.raises(OSError, match="broken"):
            wait()


def test_many_wait_for_one() -> None:
    token, came = Token("a copy"), threading.Semaphore(0)
    threads = [threading.Thread(target=lambda: (token.wait(), came.release())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert not came.acquire(blocking=False)
    token._finish()
    for thread in threads:
        thread.join(60)
    assert all(came.acquire(blocking=False) for _ in threads)


def test_many_finish_one() -> None:
    token, start = Token("a copy"), threading.Barrier(8)
    threads = [threading.Thread(target=lambda: (start.wait(60), token._finish())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert token.state is State.DONE


def test_an_interrupt_anywhere_hangs_nobody(interrupted_everywhere: Callable[..., None]) -> None:
    tokens: list[Token] = []

    def use() -> None:
        tokens.append(Token("a copy"))
        tokens[0]._run()
        tokens[0]._finish()
        tokens[0].wait()

    def check() -> None:
        while tokens:
            token = tokens.pop()
            token._finish()
            token.wait()
            assert token.state is State.DONE

    interrupted_everywhere(use, check)
