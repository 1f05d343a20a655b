"""What a rank takes for the wish of torchrun or the server that it ends."""

import pytest

from tests.support.child_process import run_python
from trainer.runners.rank_worker import EXIT_CODE, LAUNCHER_GONE, SIGNALED

LISTENER = """
import os, select, signal, threading
from types import SimpleNamespace
from stepscope.distributed.rendezvous import LauncherEnv
from trainer.runners import rank_worker

stdin, server = os.pipe()
os.dup2(stdin, 0)
rank_worker.GRACE_S = 0.0
rank_worker.send_command = lambda folder, name, args: print("asks:", args["reason"], flush=True)
listener = rank_worker.ShutdownListener(LauncherEnv(rank={rank}, world_size=1))
"""
NOISE = """
signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch's DataLoader with workers does
signal.raise_signal(signal.SIGCHLD)
print("goes on", flush=True)
"""
RECORDER = """
close = lambda status, reason: print(reason, flush=True)
listener.opened(SimpleNamespace(folder=None, close=close))
"""
WAIT = "\nthreading.Event().wait()\n"


def _run(program: str) -> tuple[int, str]:
    done = run_python("-c", program + WAIT)
    return done.returncode, done.stdout + done.stderr


def test_a_signal_to_end_after_another_signal_ends_the_rank() -> None:
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        end = f"signal.raise_signal(signal.{name})"
        assert _run(LISTENER.format(rank=0) + NOISE + end) == (EXIT_CODE, "goes on\n")


@pytest.mark.parametrize(
    ("end", "reason"),
    [("signal.raise_signal(signal.SIGTERM)", SIGNALED), ("os.close(server)", LAUNCHER_GONE)],
)
def test_rank_0_asks_all_to_stop_and_each_rank_records_the_reason(end: str, reason: str) -> None:
    for rank, asks in ((0, f"asks: {reason}\n"), (1, "")):
        said = f"{asks}{reason}\n"
        assert _run(LISTENER.format(rank=rank) + RECORDER + end) == (EXIT_CODE, said)
