"""torchrun as a child of the server: `python -m trainer.runners.agent TORCHRUN_ARGUMENTS`.

When stdin closes, as the server has ended, torchrun receives SIGTERM and ends all ranks.
"""

import importlib
import os
import signal
import sys

from stepscope.host.process_limits import call_at_end_of

if __name__ == "__main__":
    parent = os.dup(sys.stdin.fileno())  # ranks inherit stdin, but not this duplicate
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    call_at_end_of(parent, lambda: os.kill(os.getpid(), signal.SIGTERM))
    # After the listener: importing torch takes seconds, in which the parent may end.
    importlib.import_module("torch.distributed.run").main(sys.argv[1:])
