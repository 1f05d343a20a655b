"""Ends in the way that its argument names, without torch, so that many can be tried."""
# ruff: noqa: T201

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import TracebackType


def fail() -> None:
    raise ValueError("no such thing: é")


def in_a_chain() -> None:
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("while looking for it") from error


def exhausted() -> None:
    raise MemoryError


def with_own_hook() -> None:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        depth = 0
        while trace is not None:
            depth, trace = depth + 1, trace.tb_next
        print("own hook:", kind.__name__, error, depth)

    sys.excepthook = hook
    fail()


def with_atexit() -> None:
    atexit.register(print, "first registered, last called")
    atexit.register(print, "last registered, first called")
    sys.exit(4)


def with_a_thread_that_outlives_main() -> None:
    def work() -> None:
        time.sleep(0.3)
        print("the thread ends last")

    threading.Thread(target=work).start()
    print("main ends")


def terminated_with_a_handler() -> None:
    print("the handler before:", signal.getsignal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(8))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def without_goodbye() -> None:
    print("half a line", end="", flush=True)
    os._exit(9)


def by_fork() -> None:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print("the child's own line")
        sys.exit(5)
    print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


ENDINGS = {
    "last line": lambda: print("done"),
    "exception": fail,
    "chain": in_a_chain,
    "memory": exhausted,
    "own hook": with_own_hook,
    "exit 3": lambda: sys.exit(3),
    "exit text": lambda: sys.exit("this went wrong"),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "terminate, own handler": terminated_with_a_handler,
    "atexit": with_atexit,
    "thread": with_a_thread_that_outlives_main,
    "fork": by_fork,
    "os._exit": without_goodbye,
}

print("begins", *sys.argv[1:])
print("to stderr", file=sys.stderr)
ENDINGS[sys.argv[1]]()
