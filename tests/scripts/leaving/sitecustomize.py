"""Ends Python without the interpreter's last part, with exit code 0, if this is on PYTHONPATH.

A script of two gloo ranks may be aborted there ("terminate called without an active exception").
"""

import atexit
import os
import sys


def leave():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


atexit.register(leave)
