"""Segments of the allocator: live blocks by stack, and fragmentation."""

from __future__ import annotations

from stepscope.memory.snapshots.segments import Fragmentation, fragmentation
from stepscope.memory.snapshots.stacks import NO_STACK, StackTable, module_of
from tests.support.snapshots import frame, free_block, live_block, segment

MIB = 2**20
FRAMES = [frame(7)]


def test_free_parts_of_segments_in_use_are_split() -> None:
    awaiting = live_block(2 * MIB, state="active_awaiting_free")
    segments = [
        segment([live_block(4 * MIB), free_block(16 * MIB)]),
        segment([free_block(20 * MIB)]),
        segment([awaiting], segment_pool_id=(0, 3)),
    ]
    assert fragmentation(segments) == Fragmentation(
        reserved=42 * MIB,
        allocated=4 * MIB,
        cached=20 * MIB,
        split=16 * MIB,
        largest_free=20 * MIB,
        private_pools=2 * MIB,
        awaiting_free=2 * MIB,
    )


def test_whole_pages_of_an_expandable_segment_are_reclaimable() -> None:
    blocks = [live_block(10 * MIB), free_block(75 * MIB), live_block(15 * MIB)]
    found = fragmentation([segment(blocks, is_expandable=True)])
    # Pages of 20 MiB: those from 20 to 80 are free as a whole, 10 to 20 and 80 to 85 are parts.
    assert (found.cached, found.split, found.largest_free) == (60 * MIB, 15 * MIB, 75 * MIB)


def test_malformed_segments_are_skipped() -> None:
    live = {"size": MIB, "state": "active_allocated"}
    old = {"total_size": 2 * MIB, "blocks": [live, {"size": MIB, "state": "inactive"}]}
    nonsense = [None, 3, {"blocks": 7}, {"blocks": [{"size": -4, "state": "inactive"}, "x"]}]
    bools = {"total_size": True, "blocks": [{"size": True, "state": "inactive"}]}
    assert fragmentation([old, *nonsense, bools]).reserved == 2 * MIB
    for other in (None, {}, "segments", 5):
        assert fragmentation(other) == Fragmentation(0, 0, 0, 0, 0, 0)


def test_frames_are_text_without_control_characters() -> None:
    frames = [
        {"filename": "??", "line": 0, "name": "??"},
        {"filename": "a\x1b[31m.py", "line": -3, "name": "f"},
        {"filename": "x" * 1000, "line": 2, "name": "g"},
        {"filename": 3, "line": 2, "name": "g"},
        "frame",
    ]
    table = StackTable()
    lines = [table.texts[place] for place in table.frames[table.number(frames)]]
    assert lines == ["a�[31m.py in f", "x" * 300 + ":2 in g"]
    [once] = table.frames[table.number(FRAMES)]
    assert table.frames[table.number(FRAMES * 1000)] == (once,) * 128
    assert table.number("abc") == NO_STACK


def test_a_module_is_told_only_where_nn_module_called_its_forward() -> None:
    call = "/v/torch/nn/modules/module.py:1787 in _call_impl"
    wrapped = "/v/torch/nn/modules/module.py:1775 in _wrapped_call_impl"
    conv = "/v/torch/nn/modules/conv.py:550 in forward"
    helper = "/v/torch/nn/functional.py:12 in conv2d"
    block, step = "/me/net.py:9 in forward", "/me/train.py:2 in step"
    found = module_of([helper, conv, call, wrapped, block, call, wrapped, step])
    assert found == "torch.nn.modules.conv, called at net.py:9"
    assert module_of(["/me/net.py:7 in _act", block, call, step]) == (
        "net.py, called at train.py:2"
    )
    assert module_of([block, call]) == "net.py"
    assert module_of([block, step]) is None
    assert module_of(["/me/opt.py:9 in step"]) is None
    assert module_of([]) is None
