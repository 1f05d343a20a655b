"""The summary of a snapshot by stack, and the difference of two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepscope.memory.snapshots import summary as summaries
from stepscope.memory.snapshots.open_snapshot import load
from stepscope.memory.snapshots.summary import LiveStack, difference, summarize
from tests.support.snapshots import ADDRESS, REAL, frame, free_block, live_block, segment, snapshot

MIB = 2**20


def test_a_real_snapshot_has_what_torch_counted() -> None:
    found = load(REAL)
    assert (found.allocated, found.reserved) == (34_790_912, 37_748_736)
    largest = found.stacks[0]
    assert largest.size == 32 * MIB
    assert largest.frames[0] == "/venv/site-packages/torch/nn/modules/linear.py:134 in forward"


def test_blocks_of_one_stack_are_added_up_over_segments_but_not_over_devices() -> None:
    inside = [frame(134, filename="/v/torch/linear.py"), frame(9)]
    segments = [
        segment([live_block(MIB, frames=inside), live_block(3 * MIB), free_block(MIB)]),
        segment([live_block(4 * MIB)], ADDRESS + 2**30),
        segment([live_block(2 * MIB, frames=inside)], 2 * ADDRESS, device=1),
        segment([live_block(MIB, state="active_awaiting_free")], 3 * ADDRESS, total_size=5 * MIB),
    ]
    found = summarize({"segments": segments})
    torch_line, own_line = "/v/torch/linear.py:134 in forward", "/me/net.py:9 in forward"
    assert found.stacks == (
        LiveStack(device=0, frames=("/me/net.py:7 in forward",), size=7 * MIB, blocks=2),
        LiveStack(device=1, frames=(torch_line, own_line), size=2 * MIB, blocks=1),
        LiveStack(device=0, frames=(torch_line, own_line), size=MIB, blocks=1),
    )
    assert (found.allocated, found.blocks, found.reserved) == (10 * MIB, 4, 16 * MIB)


@pytest.mark.parametrize(
    "segments",
    [
        "segments",
        [None, 3, {"blocks": 7}, {"blocks": [{"size": -4, "state": "inactive"}, "x"]}],
        [{"total_size": True, "blocks": [{"size": True, "state": "active_allocated"}]}],
        [segment([live_block(2**62)])],
        [{}],
    ],
)
def test_malformed_parts_count_as_nothing(segments: Any) -> None:
    found = summarize({"segments": segments})
    assert (found.reserved, found.allocated, found.stacks) == (0, 0, ())


def test_frames_are_text_without_control_characters() -> None:
    frames = [
        {"filename": "??", "line": 0, "name": "??"},
        {"filename": "a\x1b[31m.py", "line": -3, "name": "f"},
        {"filename": "x" * 1000, "line": 2, "name": "g"},
        {"filename": 3, "line": 2, "name": "g"},
        "frame",
    ]
    found = summarize(
        snapshot([live_block(8, frames=frames), live_block(4, frames=[frame(7)] * 1000)])
    )
    assert len(found.stacks[1].frames) == summaries.MAX_FRAMES
    assert found.stacks[0].frames == ("a�[31m.py in f", "x" * 300 + ":2 in g")


def test_only_the_largest_stacks_are_listed_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summaries, "MAX_STACKS", 2)
    found = summarize(snapshot([live_block(size, line=size) for size in (3, 9, 5, 1)]))
    assert (found.stack_count, found.left_size, found.allocated) == (4, 4, 18)
    assert not difference(found, found).complete


def test_the_difference_is_by_stack_whatever_the_addresses() -> None:
    first = summarize(
        snapshot([live_block(MIB), live_block(MIB, line=8), live_block(5, line=9)]),
    )
    blocks = [live_block(MIB), live_block(MIB), live_block(5, line=9), live_block(7, line=10)]
    second = summarize({"segments": [segment(blocks, 3 * ADDRESS, device=1)]})
    found = difference(first, second)
    assert [
        (change.size, change.blocks_before, change.blocks_after) for change in found.changes
    ] == [
        (MIB, 1, 2),
        (-MIB, 1, 0),
        (7, 0, 1),
    ]
    assert (found.before, found.after, found.complete) == (2 * MIB + 5, 2 * MIB + 12, True)
    assert difference(first, replace(first)).changes == ()
