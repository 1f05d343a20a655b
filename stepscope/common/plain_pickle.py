"""Read untrusted pickles of plain containers, numbers and text; nothing is imported or called."""

from __future__ import annotations

import pickle
from typing import NoReturn


class PlainUnpickler(pickle.Unpickler):
    """Unpickler that raises pickle.UnpicklingError for names of classes and functions."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse a class or function."""
        named = f"{module}.{name}"[:100]
        raise pickle.UnpicklingError(f"it names {named!r}, and only plain containers are read")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse an object that is stored elsewhere."""
        raise pickle.UnpicklingError("it refers to objects outside of it")
