"""A large memory snapshot, written as torch writes one, without holding it in memory.

A training of a deep model, step after step: each forward allocates activations that its backward
frees. Every list of frames is a list of its own, the frames in it are shared, as with torch 2.13;
sizes and depths are those of a transformer of 48 blocks.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

LAYERS = 48
FRAME_BYTES = 65_536
ADDRESS = 0x7F0000000000
WORDS = ("alloc", "free_requested", "free_completed", "N/A", "")


def frames() -> list[dict[str, Any]]:
    """Return the distinct frames of the program."""
    torch = "/opt/venv/lib/python3.11/site-packages/torch/nn/modules"
    found = [
        {"name": "step", "filename": "/home/me/project/train.py", "line": 120},
        {"name": "_call_impl", "filename": f"{torch}/module.py", "line": 1789},
        {"name": "_wrapped_call_impl", "filename": f"{torch}/module.py", "line": 1778},
        {"name": "forward", "filename": f"{torch}/linear.py", "line": 134},
        {"name": "forward", "filename": f"{torch}/normalization.py", "line": 229},
        {"name": "backward", "filename": "/opt/venv/site-packages/torch/_tensor.py", "line": 630},
    ]
    for layer in range(LAYERS):
        found += [
            {"name": "forward", "filename": "/home/me/project/model.py", "line": 40 + layer},
            {"name": "forward", "filename": "/home/me/project/block.py", "line": 10 + 3 * layer},
        ]
    return found


def stack(layer: int, kind: int) -> list[int]:
    """Return the places of a stack's frames in `frames()`, innermost first."""
    inner = [3, 1, 2] if kind % 2 else [4, 1, 2]
    model, block = 6 + 2 * layer, 7 + 2 * layer
    return [*inner, block, 1, 2, model, 1, 2, 0] if kind < 4 else [model, 1, 2, 0]


class Writer:
    """Writes opcodes as Python's pickler does, in frames of 64 KB."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._part = bytearray()
        self._memo: dict[object, bytes] = {}
        self._memoized = 0
        self.size = 2
        file.write(b"\x80\x04")

    def put(self, data: bytes) -> None:
        """Write opcodes; never ends a frame within them."""
        self._part += data
        if len(self._part) >= FRAME_BYTES:
            self.flush()

    def memoize(self, key: object = None) -> bytes:
        """Return the opcode that remembers what is on top; `key` finds it again."""
        if key is not None:
            self._memo[key] = _get(self._memoized)
        self._memoized += 1
        return b"\x94"

    def text(self, text: str) -> bytes:
        """Return a text, the second time as a reference."""
        if ("text", text) in self._memo:
            return self._memo["text", text]
        data = text.encode()
        return b"\x8c" + bytes([len(data)]) + data + self.memoize(("text", text))

    def frame(self, place: int, frame: dict[str, Any]) -> bytes:
        """Return a frame's dict, the second time as a reference."""
        if ("frame", place) in self._memo:
            return self._memo["frame", place]
        data = b"}" + self.memoize(("frame", place)) + b"("
        for key, value in frame.items():
            data += self.text(key) + (self.text(value) if isinstance(value, str) else whole(value))
        return data + b"u"

    def flush(self) -> None:
        """End the frame."""
        self._file.write(b"\x95" + struct.pack("<Q", len(self._part)) + self._part)
        self.size += 9 + len(self._part)
        self._part.clear()


def _get(place: int) -> bytes:
    return b"h" + bytes([place]) if place < 256 else b"j" + struct.pack("<I", place)


def whole(value: int) -> bytes:
    """Return a whole number from 0 on."""
    if value < 256:
        return b"K" + bytes([value])
    if value < 65_536:
        return b"M" + struct.pack("<H", value)
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


def actions(seed: int = 0) -> Iterator[tuple[int, int, int, list[int]]]:
    """Yield word, address, size and stack of one action after another, without end."""
    random_ = random.Random(seed)
    while True:
        live = []
        for layer in range(LAYERS):
            for kind in range(6):
                size = random_.randint(1, 64) << (10 + 2 * kind)
                address = ADDRESS + (layer * 6 + kind) * 2**30
                live.append((address, size))
                yield 0, address, size, stack(layer, kind)
        for address, size in reversed(live):
            for word in (1, 2):
                yield word, address, size, [5, 0]


def write_snapshot(path: Path, size: int) -> int:
    """Write a snapshot of about this many bytes; return the number of its actions."""
    shared = frames()
    with path.open("wb") as file:
        writer = Writer(file)
        writer.put(b"}" + writer.memoize() + b"(" + writer.text("segments"))
        writer.put(b"]" + writer.memoize() + writer.text("device_traces"))
        writer.put(b"]" + writer.memoize() + b"(]" + writer.memoize() + b"(")
        entries, count = _Entries(writer, shared), 0
        for action in actions():
            writer.put(entries.data(action, count))
            count += 1
            if count % 1000 == 0:  # as the pickler of lists
                writer.put(b"e")
                if writer.size >= size:
                    break
                writer.put(b"(")
        writer.put(b"eu.")
        writer.flush()
    return count


class _Entries:
    """The opcodes of one action after another; what is the same in many is put together once."""

    def __init__(self, writer: Writer, shared: list[dict[str, Any]]) -> None:
        self._writer = writer
        self._shared = shared
        self._known: dict[tuple[int, ...], tuple[bytes, bytes, bytes, bytes]] = {}

    def data(self, action: tuple[int, int, int, list[int]], number: int) -> bytes:
        """Return the opcodes of an action, the `number`th."""
        word, address, size, places = action
        key = (word, *places)
        parts = self._known.get(key)
        if parts is None:
            parts = self._parts(word, places)
            if number > 10 * LAYERS:  # all texts and frames are references by now
                self._known[key] = parts
        else:
            for _ in range(4):
                self._writer.memoize()
        return b"".join(
            (
                parts[0],
                whole(address),
                parts[1],
                whole(size),
                parts[2],
                whole(1_795_340_000_000_000 + 3 * number),
                parts[3],
            )
        )

    def _parts(self, word: int, places: list[int]) -> tuple[bytes, bytes, bytes, bytes]:
        """Return what stands before the address, the size and the time, and after it."""
        writer, text = self._writer, self._writer.text
        first = b"}" + writer.memoize() + b"(" + text("action") + text(WORDS[word]) + text("addr")
        second, third = text("size"), text("stream") + whole(0) + text("time_us")
        # torch makes this text anew for each action.
        last = text("compile_context") + b"\x8c\x03N/A" + writer.memoize()
        last += text("user_metadata") + text("")
        last += text("pool_id") + b"K\x00K\x00\x86" + writer.memoize()
        last += text("frames") + b"]" + writer.memoize() + b"("
        last += b"".join(writer.frame(place, self._shared[place]) for place in places)
        return first, second, third, last + b"eu"
