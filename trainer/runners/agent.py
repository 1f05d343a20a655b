"""torchrun, as a child of the page's server: `python -m trainer.runners.agent TORCHRUN_ARGUMENTS`.

It ends with its parent: when stdin ends, torchrun gets the signal with which it ends all ranks.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from trainer.parent_death_signal import call_at_end_of
from trainer.runners.rank_shutdown import SERVER_SIGNAL


def main() -> None:
    """Run torchrun to its end."""
    signal.signal(SERVER_SIGNAL, signal.SIG_DFL)  # a server that nohup has started ignores SIGHUP
    parent = os.dup(sys.stdin.fileno())  # not inherited by the ranks, unlike stdin
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    call_at_end_of(parent, lambda: os.kill(os.getpid(), SERVER_SIGNAL))
    # Only now: importing torch takes seconds, in which the parent may end.
    importlib.import_module("torch.distributed.run").main(sys.argv[1:])


if __name__ == "__main__":
    main()
