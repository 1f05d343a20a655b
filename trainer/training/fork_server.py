"""Imported by the fork server of loading processes alone: gives it a process group of its own.

torchrun ends a rank by SIGTERM to the rank's whole group. The rank then takes some steps more, to
stop where the other ranks do, and needs its workers for them. They have the fork server's group.
"""

import os

os.setpgid(0, 0)
