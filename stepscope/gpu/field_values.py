"""nvmlDeviceGetFieldValues with a buffer that is made once: half the cost of pynvml's own call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pynvml


class _Value(ctypes.Union):
    """nvmlValue_t (nvml.h)."""

    _fields_ = [
        ("dVal", ctypes.c_double),
        ("uiVal", ctypes.c_uint),
        ("ulVal", ctypes.c_ulong),
        ("ullVal", ctypes.c_ulonglong),
        ("sllVal", ctypes.c_longlong),
        ("siVal", ctypes.c_int),
        ("usVal", ctypes.c_ushort),
    ]


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t (nvml.h)."""

    _fields_ = [
        ("fieldId", ctypes.c_uint),
        ("scopeId", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latencyUsec", ctypes.c_longlong),
        ("valueType", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", _Value),
    ]


_MEMBERS = {index: entry[0] for index, entry in enumerate(_Value._fields_)}
"""nvmlValueType_t: the types are numbered in the order of the union's members."""


class FieldValues:
    """Some fields, each a number and a scope, to be read again and again."""

    def __init__(self, numbers: Sequence[tuple[int, int]]) -> None:
        self._buffer = (_FieldValue * len(numbers))()
        for entry, (number, scope) in zip(self._buffer, numbers, strict=True):
            entry.fieldId, entry.scopeId = number, scope
        self._count = ctypes.c_int(len(numbers))
        self._pointer = ctypes.byref(self._buffer)

    def read(self, handle: Any) -> ctypes.Array[_FieldValue]:
        """Ask the driver; return its answers, valid until the next call. Raises NVMLError.

        The call succeeds while single fields fail: `nvmlReturn` of each says so.
        """
        function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
        pynvml._nvmlCheckReturn(function(handle, self._count, self._pointer))
        return self._buffer


def number_in(answer: Any) -> float | None:
    """Return the member of the union that the answer's type names; None for an unknown type."""
    member = _MEMBERS.get(answer.valueType)
    return None if member is None else getattr(answer.value, member)
