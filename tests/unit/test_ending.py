"""What a rank takes for the wish of torchrun that it ends."""

import pytest

from tests.support.python_programs import run_python
from trainer.runners.rank_worker import EXIT_CODE, SIGNALED

CHILD = """
import select, signal, threading
from stepscope.distributed.rendezvous import LauncherEnv
from trainer.runners.rank_worker import ShutdownListener

ending = ShutdownListener(LauncherEnv(local_world_size=1))
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
from stepscope.distributed.rendezvous import LauncherEnv
from trainer.runners import rank_worker

rank_worker.GRACE_S = 0.0
place = LauncherEnv(rank=1, local_rank={local_rank}, world_size=2, local_world_size=1)
one = rank_worker.ShutdownListener(place)
one.opened(
    SimpleNamespace(
        folder=None,
        job=SimpleNamespace(want_stop=lambda reason: print("asks:", reason, flush=True)),
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


@pytest.mark.parametrize(("local_rank", "asks"), [(0, f"asks: {SIGNALED}\n"), (1, "")])
def test_the_first_rank_of_another_machine_asks_all_to_stop(local_rank: int, asks: str) -> None:
    """Rank 0 may not have received the signal."""
    asked = REASON.format(local_rank=local_rank)
    said = f"{asks}{SIGNALED}\n"
    assert _run(asked + RAISE.format(name="SIGTERM")) == (EXIT_CODE, said)
