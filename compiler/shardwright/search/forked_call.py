"""Run a function in a forked process while this process goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar, cast

R = TypeVar("R")


class ForkedCall(Generic[R]):
    """Runs a function in a fork where that is safe and a second processor is free; else in this
    process when the result is asked for."""

    def __init__(self, function: Callable[[], R]) -> None:
        self._function = function
        self._answer: Connection | None = _begun(function) if may_fork() else None

    def result(self) -> R:
        """Once. Raises what the function raises."""
        if self._answer is not None:
            try:
                return cast(R, self._answer.recv())
            except (
                EOFError,
                OSError,
            ):  # it failed, or was killed: what it says, this process says too
                pass
            finally:
                self._answer.close()
        return self._function()


def may_fork() -> bool:
    """A copy has the thread alone that makes it: locks that others hold stay locked in it."""
    if (
        not sys.platform.startswith("linux")
        or threading.active_count() > 1
        or "torch" in sys.modules
    ):
        return False
    return len(os.sched_getaffinity(0)) > 1 and not multiprocessing.current_process().daemon


def _begun(function: Callable[[], object]) -> Connection | None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    try:
        context.Process(target=_answer, args=(function, theirs), daemon=True).start()
    except OSError:  # no memory, or no process more for this user
        return None
    finally:
        theirs.close()
    return ours


def _answer(function: Callable[[], object], answer: Connection) -> None:
    """A failure is told by silence."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the terminal tells both; this one ends with the other
    try:
        answer.send(function())
    except Exception:
        os._exit(1)
