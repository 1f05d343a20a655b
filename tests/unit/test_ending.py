"""What a rank takes for the wish of torchrun that it ends."""

import pytest

from tests.support.python_programs import run_python
from trainer.runners.rank_shutdown import EXIT_CODE, SERVER_ENDED, SIGNALED, SIGNALED_OR_PEER

CHILD = """
import select, signal, threading
from trainer.runners.rank_shutdown import ShutdownListener, TorchrunEnv

ending = ShutdownListener(TorchrunEnv(0, 0, 1, 1), by_page=True)
signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch's DataLoader with workers does
signal.raise_signal(signal.SIGCHLD)
while select.select([ending._pipe], [], [], 0)[0]:
    pass  # the thread has not looked yet
print("goes on", flush=True)
"""
RAISE = """
signal.raise_signal(signal.{name})
threading.Event().wait()
"""
REASON = """
import signal, threading
from types import SimpleNamespace
from trainer.runners import rank_shutdown

rank_shutdown.GRACE_S = 0.0
place = rank_shutdown.TorchrunEnv(1, 1, 1, {world_size})
one = rank_shutdown.ShutdownListener(place, by_page={by_page})
one.opened(
    SimpleNamespace(
        folder=None,
        close=lambda status, reason: print(reason, flush=True),
    )
)
"""


def _run(program: str) -> tuple[int, str]:
    done = run_python("-c", program)
    return done.returncode, done.stdout + done.stderr


def test_a_signal_to_end_after_another_signal_ends_the_rank() -> None:
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        assert _run(CHILD + RAISE.format(name=name)) == (EXIT_CODE, "goes on\n")


@pytest.mark.parametrize(
    ("name", "world_size", "by_page", "reason"),
    [
        ("SIGHUP", 1, True, SERVER_ENDED),
        ("SIGTERM", 1, True, SIGNALED),
        ("SIGTERM", 2, False, SIGNALED_OR_PEER),
        ("SIGHUP", 2, False, SIGNALED_OR_PEER),
    ],
)
def test_the_reason_names_only_what_there_is(
    name: str, world_size: int, by_page: bool, reason: str
) -> None:
    """No other machine where all ranks are on this one, and no server of a job by hand."""
    asked = REASON.format(world_size=world_size, by_page=by_page)
    assert _run(asked + RAISE.format(name=name)) == (EXIT_CODE, f"{reason}\n")
