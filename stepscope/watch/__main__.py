"""`python -m stepscope.watch script.py`, as torchrun needs it; the same as `stepscope watch`."""

import sys

from stepscope.watch.main import main

sys.exit(main(sys.argv[1:]))
