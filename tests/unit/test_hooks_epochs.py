"""Epochs and samples of loops that read their loaders in other ways than to the end, in order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.support.fake_live import FakeLive, hooked


@pytest.fixture
def live() -> Iterator[FakeLive]:
    with hooked() as live:
        yield live


class Script:
    """Steps on batches of a loader; the last batch of a pass is a smaller one."""

    def __init__(self, rows: int = 7, batch: int = 2) -> None:
        self.w = nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.w], lr=0.1)
        self.loader = loader(rows, batch)
        self.used: list[int] = []

    def backward(self, batch: Tensor) -> None:
        (batch * self.w).mean().backward()

    def step(self, *batches: Tensor) -> None:
        self.optimizer.zero_grad()
        for batch in batches:
            self.backward(batch)
        self.optimizer.step()
        self.used.append(sum(len(batch) for batch in batches))


def loader(rows: int, batch: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader([torch.ones(3)] * rows, batch_size=batch, **options)


def samples(live: FakeLive) -> list[int]:
    """Samples of each step from the second on: the first has no time, and so no rate."""
    rows = [row for _, row in live.rows][1:]
    counts = [(row.get("perf/samples_per_sec") or 0) * (row["perf/step_time"] or 0) for row in rows]
    return [round(count) for count in counts]


def epochs(live: FakeLive) -> list[float | None]:
    return [row.get("train/epoch") for _, row in live.rows]


def read_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """As accelerate and timm do: a batch is given out when the next one is there."""
    iterator = iter(batches)
    current = next(iterator)
    for following in iterator:
        yield current
        current = following
    yield current


def endlessly(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


class Repeating(Sampler[list[int]]):
    """Gives the batches of another sampler again and again, and has no length."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler


class OneIterator(DataLoader[Any]):
    """As in ultralytics and timm: workers are kept, for all passes come from one iterator."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.parametrize("workers", [0, 1])
def test_all_passes_from_one_iterator(live: FakeLive, workers: int) -> None:
    script = Script()
    endless = OneIterator([torch.ones(3)] * 7, batch_size=2, num_workers=workers)
    for _ in range(3):
        for batch in endless:
            script.step(batch)
    assert epochs(live) == [1] * 4 + [2] * 4 + [3] * 4
    assert samples(live) == script.used[1:]
    assert [text.partition(",")[0] for _, text, _ in live.recorder.events] == [
        "Epoch 1: 4 batches",
        "Epoch 2: 4 batches",
    ]


class Buckets(Sampler[list[int]]):
    """Batches in a drawn order without a length, as in pytorch-geometric."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(6), 6)
        return iter([order[:2], order[2:4], order[4:]])

    def __len__(self) -> int:
        random.random()
        raise ValueError("undefined")


class Order(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def __len__(self) -> int:
        raise AssertionError("not called")


@pytest.mark.parametrize(
    "options",
    [{"batch_sampler": Buckets()}, {"batch_size": 2, "sampler": Order()}],
)
def test_samplers_draw_what_they_draw_bare(options: dict[str, Any]) -> None:
    batches: DataLoader[Any] = DataLoader([torch.ones(3)] * 6, **options)
    state = random.getstate()
    list(itertools.chain(batches, batches))
    bare = random.random()
    random.setstate(state)
    with hooked() as live:
        script = Script()
        for batch in itertools.chain(batches, batches):
            script.step(batch)
    assert random.random() == bare
    assert epochs(live) == [1] * 3 + [2] * 3
    assert samples(live) == script.used[1:]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(3)] * 4)


def twice_a_stream(batches: DataLoader[Any]) -> Iterator[Any]:
    stream: DataLoader[Any] = DataLoader(Stream(), batch_size=2)
    for _ in range(2):
        yield from stream


def left_with_break(batches: DataLoader[Any]) -> Iterator[Any]:
    for _ in range(3):
        for number, batch in enumerate(batches):
            if number == 2:
                break
            yield batch


def one_at_a_time(batches: DataLoader[Any]) -> Iterator[Any]:
    for _ in range(4):
        yield next(iter(batches))


def in_turn(batches: DataLoader[Any]) -> Iterator[Any]:
    sources = [iter(loader(40)), iter(loader(40))]
    for number in range(6):
        yield next(sources[number % 2])


def back_to_the_first(batches: DataLoader[Any]) -> Iterator[Any]:
    first, second = iter(batches), iter(batches)
    for source in (first, first, second, second, first):
        yield next(source)


def one_restarted(batches: DataLoader[Any]) -> Iterator[Any]:
    short, long = endlessly(loader(4)), iter(loader(40))
    for _ in range(5):
        yield torch.cat([next(short), next(long)])


def twice_beside_a_longer(batches: DataLoader[Any]) -> Iterator[Any]:
    second = loader(9)
    for _ in range(2):
        yield from map(torch.cat, zip(batches, second, strict=False))


READ_AHEAD = [1] * 4 + [2] * 4 + [3] * 3


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda batches: itertools.islice(itertools.cycle(batches), 6), [1] * 4 + [None] * 2),
        (left_with_break, [1, 1, 2, 2, 3, 3]),
        (lambda batches: itertools.islice(read_ahead(endlessly(batches)), 11), READ_AHEAD),
        (twice_a_stream, [None, None, 2, 2]),  # without a length
        (one_at_a_time, [1] + [None] * 3),
        (in_turn, [1] + [None] * 5),
        (back_to_the_first, [1, 1, 2, 2, None]),
        (one_restarted, [None] * 5),
        (twice_beside_a_longer, [None] * 8),
    ],
)
def test_the_epoch_of_each_step(
    live: FakeLive, read: Callable[[Any], Iterable[Any]], expected: list[int | None]
) -> None:
    script = Script()
    for batch in read(script.loader):
        script.step(batch)
    assert epochs(live) == expected
    assert live.recorder.epoch == (expected[-1] or 0)
    if expected == READ_AHEAD or read is left_with_break:
        assert samples(live) == script.used[1:]
    if read is left_with_break:
        told = [text.partition(",")[0] for _, text, _ in live.recorder.events]
        assert told == ["Epoch 1: 3 batches", "Epoch 2: 3 batches"]


def evaluate(script: Script, wrap: Callable[[Any], Iterable[Any]]) -> None:
    for batch in wrap(loader(6)):
        with torch.no_grad():
            script.w.mul(batch.sum())


@pytest.mark.parametrize(("clears", "used"), [(True, [6, 6]), (False, [7, 7])])
def test_left_over_batches_count_unless_their_gradients_are_cleared(
    live: FakeLive, clears: bool, used: list[int]
) -> None:
    script = Script(7)
    for _ in range(3):
        for number, batch in enumerate(script.loader):
            if clears and number % 3 == 0:
                script.optimizer.zero_grad()
            script.backward(batch)
            if number % 3 == 2:
                script.optimizer.step()
    assert samples(live) == used


@pytest.mark.parametrize("rows", [7, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_samples_belong_to_the_step_that_uses_them(
    live: FakeLive, rows: int, accumulate: int
) -> None:
    """Read ahead by one, evaluated after each epoch: no step without samples, none with double."""
    script = Script(rows)
    expected: list[float] = []
    for epoch in (1, 2, 3):
        ahead, group = read_ahead(script.loader), []
        for batch in ahead:
            group.append(batch)
            script.backward(batch)
            if len(group) == accumulate:
                script.optimizer.step()
                script.used.append(sum(map(len, group)))
                expected.append(epoch)
                group = []
        if group:
            script.optimizer.step()
            script.used.append(sum(map(len, group)))
            expected.append(epoch)
        evaluate(script, read_ahead)  # also at the very end, with gradients on
    assert samples(live) == script.used[1:]
    assert epochs(live) == expected
    assert live.recorder.epoch == 3
    if (rows, accumulate) == (7, 1):
        assert [kind for kind, _, _ in live.recorder.events] == ["epoch"] * 3
