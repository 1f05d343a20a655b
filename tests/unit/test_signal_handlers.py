"""What the script's signal handlers may interrupt, and what they may not."""

import signal
import threading
from collections.abc import Iterator

import pytest

from stepscope.session.stop import handlers_wait


class Handled(Exception):
    """Raised by the handler of the test, as the DataLoader's does for a killed worker."""


@pytest.fixture
def handler() -> Iterator[object]:
    def handle(*_: object) -> None:
        raise Handled

    former = signal.signal(signal.SIGUSR1, handle)
    yield handle
    signal.signal(signal.SIGUSR1, former)


def test_a_handler_that_raises_does_so_after_the_block(handler: object) -> None:
    written = []

    @handlers_wait()
    def write() -> None:
        signal.raise_signal(signal.SIGUSR1)
        written.append("all")

    with pytest.raises(Handled):
        write()
    assert written == ["all"]
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_the_handlers_are_back_where_the_block_fails(handler: object) -> None:
    with pytest.raises(ZeroDivisionError), handlers_wait():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_ctrl_c_does_not_wait() -> None:
    written = []

    @handlers_wait()
    def write() -> None:
        signal.raise_signal(signal.SIGINT)
        written.append("all")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not written


def test_another_thread_leaves_them_alone(handler: object) -> None:
    seen = []

    def work() -> None:
        with handlers_wait():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]
