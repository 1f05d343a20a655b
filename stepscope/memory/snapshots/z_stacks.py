"""The distinct stacks of a snapshot, each known by a number.

A file of 1 GB has some ten million lists of frames, which speak of some thousand places in a
program. So a list is read once, by the identities of its frames: torch shares the dict of a frame
among all stacks that pass through it.
"""

from __future__ import annotations

from typing import Any

from stepscope.memory.snapshots.stacks import FRAMES_LIMIT, frame_text

NO_STACK = -1
"""The number of an allocation whose stack was not recorded, or is one too many."""
STACKS_LIMIT = 100_000
"""Distinct stacks kept; programs have some thousand."""
TEXTS_LIMIT = 200_000
"""Distinct frames kept."""


class Stacks:
    """Gives stacks their numbers, from 0 on; `left_out` counts lists beyond the limits."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        """The distinct frames."""
        self.frames: list[tuple[int, ...]] = []
        """Of each stack its frames, as places in `texts`, innermost first."""
        self.left_out = 0
        self._aliases: list[int] = []
        self._by_frames: dict[tuple[int, ...], int] = {}
        self._by_ids: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._place: dict[str, int] = {}
        # Of each distinct frame the first object, kept alive: no other can get its identity.
        self._places_by_id: dict[int, int] = {}
        self._alive: list[object] = []

    def number(self, frames: object) -> int:
        """Return the number of a list of frames."""
        if type(frames) is int:
            return self._aliases[frames] if 0 <= frames < len(self._aliases) else NO_STACK
        if not isinstance(frames, list | tuple) or not frames:
            return NO_STACK
        found = self._by_ids.get(tuple(map(id, frames[:FRAMES_LIMIT])))
        return self._add(frames[:FRAMES_LIMIT]) if found is None else found

    def alias(self, lists: list[list[Any]]) -> None:
        """Let a whole number stand for each of these lists of frames, from 0 on."""
        self._aliases = [self.number(frames) for frames in lists]

    @property
    def aliases(self) -> int:
        """How many lists have a number in place of their frames."""
        return len(self._aliases)

    def text(self, number: int) -> tuple[str, ...]:
        """Return the lines of a stack, () for NO_STACK."""
        if number == NO_STACK:
            return ()
        return tuple(self.texts[place] for place in self.frames[number])

    def _add(self, frames: list[Any] | tuple[Any, ...]) -> int:
        places = []
        shared = True
        for frame in frames:
            place = self._places_by_id.get(id(frame))
            if place is None:
                place, kept = self._add_frame(frame)
                shared = shared and kept
            if place >= 0:
                places.append(place)
        key = tuple(places)
        found = self._by_frames.get(key)
        if found is None:
            found = self._new(key)
        if shared and found >= 0:
            self._by_ids[tuple(map(id, frames))] = found
        return found

    def _new(self, key: tuple[int, ...]) -> int:
        if not key:
            return NO_STACK
        if len(self.frames) >= STACKS_LIMIT:
            self.left_out += 1
            return NO_STACK
        number = self._by_frames[key] = len(self.frames)
        self.frames.append(key)
        return number

    def _add_frame(self, frame: object) -> tuple[int, bool]:
        """Return the place of a frame, -1 for what is none, and whether it is the first such."""
        text = frame_text(frame) or ""
        place = self._place.get(text)
        if place is not None:
            return place, False
        place = len(self.texts)
        if text == "" or place >= TEXTS_LIMIT:
            place = -1
        if place < 0 and "" in self._place:
            return place, False
        if place >= 0:
            self.texts.append(text)
        self._place[text if place >= 0 else ""] = place
        self._places_by_id[id(frame)] = place
        self._alive.append(frame)
        return place, True
