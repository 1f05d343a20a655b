"""Imports from the script, as a module beside it may."""

import sys

WHO = "helper"


def from_main():
    return sys.modules["__main__"].square(4)
