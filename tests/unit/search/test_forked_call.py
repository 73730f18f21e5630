"""What is worked out by another process meanwhile is what this one would say; where that fails,
this one says it."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from shardwright.search import forked_call
from shardwright.search.forked_call import ForkedCall, may_fork

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a command: pytest-xdist has threads, and other tests import torch."""
    monkeypatch.setattr(forked_call, "may_fork", lambda: True)


@pytest.mark.usefixtures("alone")
def test_another_process_says_it() -> None:
    begun = ForkedCall(os.getpid)
    assert begun.result() != os.getpid()


@pytest.mark.usefixtures("alone")
def test_what_fails_there_is_said_here() -> None:
    here = os.getpid()

    def dies() -> int:
        if os.getpid() != here:
            os._exit(9)
        return here

    def raises() -> int:
        raise ValueError(os.getpid())

    assert ForkedCall(dies).result() == here
    with pytest.raises(ValueError, match=str(here)):
        ForkedCall(raises).result()


def test_where_a_copy_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_call, "may_fork", lambda: False)
    assert ForkedCall(os.getpid).result() == os.getpid()


@needs_two
def test_a_copy_has_the_thread_alone_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert may_fork()
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert not may_fork()
