"""`stepscope sample-data`: this process becomes the program that writes images of digits."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.cli.app_process import become_program


def main(argv: Sequence[str]) -> int:
    """Become the program; return 1 if packages are missing."""
    return become_program("trainer.workloads.digit_images", argv)
