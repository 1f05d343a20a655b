"""The phase that allocations are labeled with, from the spans of a step."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from stepscope.memory.snapshots.recording import AllocationLabeler
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER, span


class Memory:
    """Stands for torch.cuda.memory: the text that the next allocation gets."""

    text = "the script's"

    def _set_memory_metadata(self, text: str) -> None:
        self.text = text

    def _get_memory_metadata(self) -> str:
        return self.text


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(memory=memory)))
    return memory


def test_each_phase_of_a_step_is_labeled(memory: Memory) -> None:
    labels = AllocationLabeler()
    seen = [memory.text]
    for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER):
        with span(phase):
            seen.append(memory.text)
        seen.append(memory.text)
    labels.begin_step()
    assert memory.text == "phase=forward"
    with span(DATA), span(FORWARD):
        assert memory.text == "phase=data"
    thread = threading.Thread(target=lambda: span(BACKWARD).__enter__())
    thread.start()
    thread.join()
    assert memory.text == "phase=forward", "of another thread"
    labels.end()
    assert [text.removeprefix("phase=") for text in seen] == [
        *("forward", "data", "forward", "forward", "forward"),
        *("backward", "optimizer", "optimizer", "forward"),
    ]
    assert memory.text == "the script's"
    with span(FORWARD):
        assert memory.text == "the script's"
