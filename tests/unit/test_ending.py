"""What a rank takes for the wish of torchrun that it ends."""

import subprocess
import sys

from trainer.runners.ending import EXIT_CODE

CHILD = """
import select, signal, threading
from trainer.runners.ending import Ending

ending = Ending(0, 1)
signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch's DataLoader with workers does
signal.raise_signal(signal.SIGCHLD)
while select.select([ending._heard], [], [], 0)[0]:
    pass  # the thread has not looked yet
print("goes on", flush=True)
"""
TOLD = """
signal.raise_signal(signal.{name})
threading.Event().wait()
"""


def _run(program: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_end_of_a_child_process_does_not_end_the_rank() -> None:
    assert _run(CHILD) == (0, "goes on\n")


def test_sigterm_and_sigint_after_another_signal_end_the_rank() -> None:
    for name in ("SIGTERM", "SIGINT"):
        assert _run(CHILD + TOLD.format(name=name)) == (EXIT_CODE, "goes on\n")
