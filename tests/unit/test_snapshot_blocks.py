"""What segments hold: live blocks by stack, and how reserved memory is split up."""

from __future__ import annotations

from typing import Any

from stepscope.memory.oom.capture import live_blocks
from stepscope.memory.snapshots.segments import Fragmentation, fragmentation
from stepscope.memory.snapshots.stacks import StackTable, module_of

MIB = 2**20
Json = dict[str, Any]
FRAMES = [{"filename": "/me/net.py", "line": 7, "name": "forward"}]
OTHER = [{"filename": "/me/train.py", "line": 70, "name": "step"}]


def block(size: int, state: str = "active_allocated", frames: object = FRAMES, **more: Any) -> Json:
    """Return a block as torch 2.13 lists it."""
    return {"size": size, "requested_size": size - 100, "state": state, "frames": frames} | more


def segment(*blocks: Json, **more: Any) -> Json:
    """Return a segment that consists of these blocks."""
    return {
        "device": 0,
        "address": 0x7F0000000000,
        "total_size": sum(part["size"] for part in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": list(blocks),
    } | more


def test_equal_stacks_are_added_up_and_the_largest_comes_first() -> None:
    segments = [
        segment(block(2 * MIB), block(5 * MIB, frames=OTHER), block(9 * MIB, "inactive")),
        segment(block(4 * MIB, frames=[dict(FRAMES[0])]), block(MIB, "active_awaiting_free")),
        segment(block(MIB, frames=[])),
    ]
    (first, second, third), reason = live_blocks(segments)
    assert (first.size, first.count, first.frames) == (6 * MIB, 2, ("/me/net.py:7 in forward",))
    assert (second.size, second.frames) == (5 * MIB, ("/me/train.py:70 in step",))
    assert (third.size, third.frames) == (MIB, ())
    assert reason is None


def test_free_parts_of_segments_in_use_are_split() -> None:
    found = fragmentation(
        [
            segment(block(4 * MIB), block(16 * MIB, "inactive")),
            segment(block(20 * MIB, "inactive")),
            segment(block(2 * MIB, "active_awaiting_free"), segment_pool_id=(0, 3)),
        ]
    )
    assert found == Fragmentation(
        reserved=42 * MIB,
        allocated=4 * MIB,
        cached=20 * MIB,
        split=16 * MIB,
        largest_free=20 * MIB,
        private_pools=2 * MIB,
        awaiting_free=2 * MIB,
    )


def test_whole_pages_of_an_expandable_segment_can_be_given_back() -> None:
    used, free = block(10 * MIB), block(75 * MIB, "inactive")
    found = fragmentation([segment(used, free, block(15 * MIB), is_expandable=True)])
    # Pages of 20 MiB: those from 20 to 80 are free as a whole, 10 to 20 and 80 to 85 are parts.
    assert (found.cached, found.split, found.largest_free) == (60 * MIB, 15 * MIB, 75 * MIB)


def test_other_versions_and_nonsense_are_left_out() -> None:
    old = {
        "total_size": 2 * MIB,
        "blocks": [
            {
                "size": MIB,
                "state": "active_allocated",
                "history": [{"real_size": MIB - 5, "frames": FRAMES}],
            },
            {"size": MIB, "state": "inactive"},
        ],
    }
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
    assert table.text(table.number(frames)) == ("a�[31m.py in f", "x" * 300 + ":2 in g")
    once = table.text(table.number(FRAMES))
    assert table.text(table.number(FRAMES * 1000)) == once * 128
    assert table.text(table.number("abc")) == ()


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
