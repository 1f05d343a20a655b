"""The sampler's real thread over the real recorder: it beats, it ends, it outlives failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.common.metrics import Stream
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import NullSource
from stepscope.run import RunStatus
from stepscope.session.sampler import Sampler
from stepscope.store.reader import StoreReader
from stepscope.store.recorder import Recorder
from tests.support.child_process import ROOT, run_python
from tests.support.waiting import wait_until

PATIENCE_S = 10.0


class Source(NullSource):
    """No listed GPU; each read of a GPU asked for by name does what the test says."""

    calls = 0

    def read(self, uuid: str, *tiers: SamplingTier) -> dict[str, float]:
        Source.calls += 1
        if uuid == "GPU-raises":
            raise RuntimeError("odd")
        if uuid == "GPU-hangs":
            RELEASE.wait(PATIENCE_S)
        return {"gpu/util": 5.0}


RELEASE = threading.Event()


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path, name="sampled")
    yield recorder
    recorder.close(RunStatus.FINISHED)


@pytest.fixture(autouse=True)
def _fresh_source() -> Iterator[None]:
    Source.calls = 0
    RELEASE.clear()
    yield
    RELEASE.set()


def sampler_for(recorder: Recorder, *uuids: str, period_s: float = 0.02) -> Sampler:
    return Sampler(
        recorder,
        allocator_index=None,
        gpu_uuids=uuids,
        source=Source("No driver in this test."),
        period_s=period_s,
    )


def wait_for_calls(count: int) -> None:
    wait_until(lambda: Source.calls >= count, PATIENCE_S)


def sampler_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "stepscope-sampler"]


def test_it_beats_until_stopped_leaves_no_thread_and_its_values_are_stored(
    recorder: Recorder,
) -> None:
    sampler = sampler_for(recorder, "GPU-raises", "GPU-fine")
    sampler.start()
    wait_for_calls(20)
    assert sampler_threads() == ["stepscope-sampler"]
    assert sampler.stop()
    assert sampler_threads() == []
    calls = Source.calls
    assert sampler.stop()
    assert Source.calls == calls
    recorder.close(RunStatus.FINISHED)
    with StoreReader(recorder.folder) as reader:
        series = {(info.stream, info.source): info for info in reader.series()}
        gpu, process = series[Stream.DEVICES, "GPU-fine"], series[Stream.SAMPLES, ""]
        block = reader.read(gpu.id, 0, gpu.rows, 1)
        assert "process/rss" in reader.read(process.id, 0, process.rows, 1).keys
    assert block.keys == ("gpu/util",)
    assert gpu.rows == process.rows >= 5
    assert set(block.mean[0]) == {5.0}


def test_a_long_period_does_not_delay_the_stop(recorder: Recorder) -> None:
    sampler = sampler_for(recorder, "GPU-fine", period_s=60.0)
    sampler.start()
    wait_for_calls(1)
    assert sampler.stop(timeout_s=30.0)


def test_a_stuck_driver_call_is_reported_not_waited_for(recorder: Recorder) -> None:
    sampler = sampler_for(recorder, "GPU-hangs")
    sampler.start()
    wait_for_calls(1)
    assert not sampler.stop(timeout_s=0.05)
    RELEASE.set()
    assert sampler.stop()


FOREIGN = """
from stepscope.gpu import gpm, process_memory, xid
from stepscope.session import sampler
from stepscope.gpu.source import open_source
print(open_source().reason)
"""


def test_a_foreign_pynvml_package_without_any_of_the_names_breaks_no_import(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("")
    done = run_python("-c", FOREIGN, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "nvidia-ml-py" in done.stdout, done.stderr
