"""Imported only by the fork server of DataLoader workers: puts it into a new process group.

torchrun sends SIGTERM to the process group of a rank. The rank needs its workers for some more
steps, to stop at the same step as the others. Workers inherit the fork server's group.
"""

import os

os.setpgid(0, 0)
