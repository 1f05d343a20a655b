"""Settings of `stepscope watch --with`: in effect with evidence, or refused with the reason."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sqlite3
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from stepscope.settings import SETTINGS, SettingError, parse
from stepscope.settings.applied import CallPlace, applied_settings
from stepscope.settings.setting import Training
from tests.support.applied_settings import applied

STEPS = 4
MUON: Any = getattr(torch.optim, "Muon", torch.optim.LBFGS)  # since torch 2.9


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 1))


def data(shape: tuple[int, ...] = (4,)) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(STEPS * 8, *shape))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: DataLoader[Any] | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
    *,
    set_to_none: bool = True,
) -> list[float]:
    """Train over the loader and return the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for (batch,) in loader or DataLoader(data(), batch_size=8):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = forward(batch) if forward else model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "words",
    [
        "tf33",
        "tf32=1",
        "num_workers",
        "num_workers=257",
        "threads=x",
        "tf32 tf32",
    ],
)
def test_invalid_words_name_the_setting_and_the_fix(words: str) -> None:
    with pytest.raises(SettingError, match=r"Use|Remove"):
        parse([words])


def test_a_script_without_torch_code_reaches_nothing() -> None:
    with applied("tf32 bf16 num_workers=2 fused") as found:
        assert set(found.states().values()) == {"not reached"}


@pytest.mark.parametrize("name", ["tf32", "cudnn_benchmark", "pin_memory", "non_blocking"])
def test_settings_of_a_gpu_are_refused_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # also with the CUDA build
    monkeypatch.setattr(torch.version, "cuda", None)
    with applied(name) as found:
        train(images(), loader=DataLoader(data((3, 8, 8)), batch_size=8))
        assert found[name]["state"] == "refused"
        assert "GPU" in found[name]["text"]


def test_workers_load_the_same_batches() -> None:
    bare = train(network())
    with applied("num_workers=2 prefetch_factor=3 persistent_workers") as found:
        line = 1 + found_line()
        loader = DataLoader(data(), batch_size=8)
        assert train(network(), loader=loader) == bare
        assert set(found.states().values()) == {"in effect"}
        assert found["num_workers"]["at"] == {"file": __file__, "line": line}
    assert loader.num_workers == 2
    assert DataLoader(data()).num_workers == 0, "torch is restored"


def found_line() -> int:
    """Return the line of the caller."""
    return sys._getframe(1).f_lineno


class Stream(IterableDataset[tuple[Tensor]]):
    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter([(torch.zeros(4),)] * 16)


class OwnLoader(DataLoader[Any]):
    """Equal to anything, and positional arguments."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, 8, False, None, None, 0)

    def __eq__(self, other: object) -> bool:
        return True


def test_workers_are_refused_for_a_stream_and_work_for_a_subclass() -> None:
    with applied("num_workers=2") as found:
        stream: Any = DataLoader(Stream(), batch_size=8)
        train(network(), loader=stream)
        assert stream.num_workers == 0
        assert found["num_workers"]["state"] == "refused"
        assert "Stream is an IterableDataset" in found["num_workers"]["text"]
        train(network(), loader=OwnLoader(data()))
        assert found["num_workers"]["state"] == "in effect"
        assert "Stream is an IterableDataset" in found["num_workers"]["text"]


class Records(TensorDataset):
    """Keeps what it reads from."""

    def __init__(self, source: Any) -> None:
        super().__init__(torch.zeros(8, 4))
        self.source = source


def test_workers_are_refused_for_data_sets_with_open_files(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(32))
    with (
        (tmp_path / "data.bin").open("rb") as file,
        sqlite3.connect(":memory:") as database,
        zipfile.ZipFile(tmp_path / "data.zip", "w") as archive,
        applied("num_workers=2") as found,
    ):
        for source in (file, [file], {"a": file}, database, archive):
            records = Records(source)
            for dataset in (
                records,
                Subset(Subset(records, [0, 1]), [0]),
                ConcatDataset([records]),
            ):
                assert DataLoader(dataset).num_workers == 0
        assert "has an open file" in found["num_workers"]["text"]
        for other in ("data.bin", io.BytesIO(bytes(32)), tmp_path):
            assert DataLoader(Records(other)).num_workers == 2
    database.close()


class CudaTensor(Tensor):
    """Claims to be on a GPU."""

    is_cuda = True


def test_workers_are_refused_for_nested_cuda_tensors_and_collate_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with applied("num_workers=2") as found:
        dataset = TensorDataset(torch.zeros(4, 2).as_subclass(CudaTensor))
        for nested in (dataset, Subset(dataset, [0]), ConcatDataset([Subset(dataset, [0])])):
            assert DataLoader(nested).num_workers == 0
        assert "CUDA tensors" in found["num_workers"]["text"]
        samples = data()
        # An earlier test may have initialized CUDA in this process.
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert DataLoader(samples, collate_fn=list).num_workers == 2
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert DataLoader(samples, collate_fn=list).num_workers == 0
        assert DataLoader(samples).num_workers == 2


def test_a_setting_of_the_evaluation_alone_is_refused() -> None:
    def run(script: list[DataLoader[Any]]) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            train(model, optimizer, script[0])
            with torch.no_grad():
                list(script[1])

    with applied("num_workers=2") as found:
        run([DataLoader(Stream(), batch_size=8), DataLoader(data())])
        assert found["num_workers"]["state"] == "refused"
        assert "Stream is an IterableDataset" in found["num_workers"]["text"]
    with applied("num_workers=2") as found:
        run([DataLoader(data()), DataLoader(Stream(), batch_size=8)])
        assert found["num_workers"]["state"] == "in effect"


def test_no_workers_also_drops_what_needs_them() -> None:
    with applied("num_workers=0") as found:
        loader = DataLoader(
            data(),
            batch_size=8,
            num_workers=2,
            prefetch_factor=4,
            timeout=5,
            multiprocessing_context="fork",
        )
        train(network(), loader=loader)
        assert (loader.num_workers, loader.prefetch_factor) == (0, None)
        assert found["num_workers"]["state"] == "in effect"


def test_fused_equals_the_argument() -> None:
    by_hand = network()
    expected = train(by_hand, torch.optim.AdamW(by_hand.parameters(), lr=0.1, fused=True))
    with applied("fused") as found:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        assert train(model, optimizer) == expected
        assert hasattr(optimizer, "_step_supports_amp_scaling")
        assert optimizer.param_groups[0]["fused"] is True
        assert found["fused"]["state"] == "in effect"
        assert found["fused"]["lines"] == ["AdamW(..., fused=True)"]


def test_fused_undone_by_a_checkpoint_is_seen() -> None:
    model = network()
    state = torch.optim.AdamW(model.parameters()).state_dict()
    with applied("fused") as found:
        optimizer = torch.optim.AdamW(model.parameters())
        assert optimizer._step_supports_amp_scaling
        optimizer.load_state_dict(state)
        assert not hasattr(optimizer, "_step_supports_amp_scaling"), "GradScaler reads it"
        train(model, optimizer)
        assert found["fused"]["state"] == "refused"
        assert "0 of 4 steps" in found["fused"]["text"]


def test_fused_is_not_in_a_checkpoint() -> None:
    def saved() -> list[dict[str, Any]]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
        return groups

    bare = saved()
    with applied("fused") as found:
        assert saved() == bare
        assert found["fused"]["state"] == "in effect"


def test_fused_is_refused_for_sparse_gradients() -> None:
    def run() -> list[float]:
        torch.manual_seed(0)
        model = nn.Embedding(8, 4, sparse=True)
        return train(model, forward=lambda _: model(torch.tensor([1, 2])).pow(2).mean())

    bare = run()
    with applied("fused") as found:
        assert run() == bare
        assert found["fused"]["state"] == "refused"
        assert "not applied to sparse gradients" in found["fused"]["text"]
        assert found["fused"]["refused_places"] == [None]


def test_the_places_of_all_refusals_are_recorded() -> None:
    (setting,) = parse(["persistent_workers"])
    places = [CallPlace("train.py", line) for line in (3, 3, 7)]
    for place in places:
        setting.apply({"num_workers": 0, "persistent_workers": False}, place)
    lines = [place["line"] for place in setting.as_json()["refused_places"]]
    assert lines == [3, 7], "also those of one reason"


class OwnSgd(torch.optim.SGD):
    """A subclass may have another step."""


class AnySgd(torch.optim.SGD):
    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS has no argument fused"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor has no argument fused"),
        (lambda p: MUON([next(iter(p))]), "has no argument fused"),
        (lambda p: AnySgd(p), "not a class of torch.optim"),
        (lambda p: torch.optim.Adam(p, fused=True), "already has fused=True"),
        (lambda p: torch.optim.Adam(p, foreach=True), "already has foreach=True"),
        (lambda p: OwnSgd(p), "not a class of torch.optim"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "uninitialized memory"),
        (lambda _: torch.optim.SGD([torch.zeros(2, dtype=torch.bfloat16)]), "16-bit"),
    ],
)
def test_fused_is_refused(make: Callable[[Any], torch.optim.Optimizer], reason: str) -> None:
    with applied("fused") as found:
        make(network().parameters())
        assert found["fused"]["state"] == "refused"
        assert reason in found["fused"]["text"]


def test_set_to_none_changes_only_calls_that_zero() -> None:
    bare = train(network(), set_to_none=False)
    with applied("set_to_none") as found:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert train(model, optimizer, set_to_none=False) == bare
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is None for p in model.parameters())
        assert found["set_to_none"]["state"] == "in effect"
    with applied("set_to_none") as found:
        train(network())
        assert found["set_to_none"]["state"] == "refused"


def test_garbage_is_collected_at_boundaries_only() -> None:
    bare = train(network())
    with applied("gc_off=2") as found:
        assert train(network()) == bare
        assert not gc.isenabled()
        assert "2 collections, 4 steps" in found["gc_off"]["text"]
        gc.enable()
        assert found["gc_off"]["state"] == "refused"
    assert gc.isenabled()
    with applied(f"gc_off={STEPS + 1}") as found:  # no step has the cost of a collection
        train(network())
        assert found["gc_off"]["state"] == "refused"


class Collected(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (torch.tensor([float(gc.isenabled())] * 4),)


def test_garbage_is_collected_in_forked_workers() -> None:
    with applied("gc_off"):
        train(network())
        loader = DataLoader(Collected(torch.zeros(1)), num_workers=1)
        assert [batch.tolist() for (batch,) in loader] == [[[1.0] * 4]]
        assert not gc.isenabled()


def test_threads_are_read_back() -> None:
    former = torch.get_num_threads()
    try:
        with applied(f"threads={former + 1}") as found:
            assert found["threads"]["state"] == "in effect"
            torch.set_num_threads(former)  # the script's own
            assert found["threads"]["state"] == "refused"
        with applied(f"threads={former}") as found:
            assert found["threads"]["state"] == "refused"
    finally:
        torch.set_num_threads(former)


def test_bf16_equals_autocast_around_forward_and_loss() -> None:
    by_hand = network()

    def forward(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return by_hand(batch).pow(2).mean()

    expected = train(by_hand, forward=forward)
    assert expected != train(network())
    with applied("bf16") as found:
        model = network()
        assert train(model) == expected
        assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            assert model(torch.ones(1, 4)).dtype is torch.float32
        model(torch.ones(1, 4))
        assert torch.is_autocast_enabled("cpu"), "until backward or a step"
        assert found["bf16"]["state"] == "in effect"
        during: list[bool] = []
        loss = model(torch.ones(1, 4)).sum()
        loss.register_hook(lambda _: during.append(torch.is_autocast_enabled("cpu")))
        loss.backward()
        assert during == [False]
    assert not torch.is_autocast_enabled("cpu")


def test_bf16_of_updates_by_autograd_grad_uses_the_new_weights() -> None:
    with applied("bf16"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            loss = model(torch.ones(2, 4)).pow(2).mean()
            losses.append(loss.item())
            parameters = list(model.parameters())
            for one, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                one.data -= 0.1 * gradient
        assert losses == sorted(set(losses), reverse=True)
        assert not torch.is_autocast_enabled("cpu")
        optimizer.step()


@pytest.mark.parametrize("is_training", [True, False])
def test_bf16_of_a_model_that_is_its_own_target(is_training: bool) -> None:
    """As in BYOL, here with other weights: a pass without gradients before `backward()`."""
    targets = [parameter.detach() for parameter in network(1).parameters()]
    batch = torch.ones(8, 4)

    def gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        optimizer.zero_grad()
        output = model(batch)
        weights = [parameter.data for parameter in model.parameters()]
        for parameter, target in zip(model.parameters(), targets, strict=True):
            parameter.data = target
        model.train(is_training)
        with torch.no_grad():
            wanted = model(batch)
        model.train()
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data = weight
        ((output @ wanted.T).mean() + model(batch).mean()).backward()
        optimizer.step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    by_hand = network()
    expected = gradients(by_hand, torch.optim.SGD(by_hand.parameters(), lr=0.0))
    with applied("bf16") as found:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            torch.testing.assert_close(gradients(model, optimizer), expected, rtol=0.05, atol=0.02)
            assert not torch.is_autocast_enabled("cpu")
        assert found["bf16"]["state"] == "in effect"


def test_bf16_of_a_last_batch_that_is_skipped_ends_before_the_evaluation() -> None:
    with applied("bf16"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(4, 4)), 2)):
            loss = model(batch).mean()
            if number == 0:
                loss.backward()
                optimizer.step()
        assert torch.is_autocast_enabled("cpu"), "backward() may still come"
        for (batch,) in DataLoader(TensorDataset(torch.ones(2, 4)), 2):
            assert not torch.is_autocast_enabled("cpu")
            with torch.no_grad():
                assert model(batch).dtype is torch.float32


def test_bf16_of_a_gradient_penalty_stays_until_backward() -> None:
    with applied("bf16"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(2, 4, requires_grad=True)
        output = model(batch)
        (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
        assert torch.is_autocast_enabled("cpu")
        (output.mean() + slope.pow(2).mean()).backward()
        assert not torch.is_autocast_enabled("cpu")
        optimizer.step()


def test_bf16_ignores_an_evaluation_in_another_thread() -> None:
    with applied("bf16") as found:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(2, 4)).pow(2).mean()
        with torch.no_grad(), ThreadPoolExecutor(1) as threads:
            dtypes = threads.submit(lambda: torch.no_grad()(model)(torch.ones(1, 4)).dtype)
        assert dtypes.result() is torch.float32
        assert torch.is_autocast_enabled("cpu")
        loss.backward()
        assert not torch.is_autocast_enabled("cpu")
        optimizer.step()
        assert found["bf16"]["state"] == "in effect"


def test_bf16_is_refused_for_a_bce_loss_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    [setting] = parse(["bf16"])
    gc.collect()
    assert setting.problem(Training(torch.device("cuda"), network())) is None
    loss = nn.BCELoss()
    problem = setting.problem(Training(torch.device("cuda"), network()))
    assert type(loss).__name__ in (problem or "")
    assert setting.problem(Training(torch.device("cpu"), network())) is None


def test_bf16_yields_to_an_autocast_inside_of_the_model() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, batch: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(batch)

    torch.manual_seed(0)
    expected = train(Own())
    with applied("bf16") as found:
        assert train(Own()) == expected
        assert found["bf16"]["state"] == "refused"
        assert not torch.is_autocast_enabled("cpu")


def test_two_models_are_refused() -> None:
    with applied("bf16 channels_last compile") as found:
        first, second = network(), network(1)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
        train(first, optimizers[0])
        train(second, optimizers[1])
        assert set(found.states().values()) == {"refused"}
        assert "several models" in found["bf16"]["text"].lower()


def test_frozen_modules_are_not_the_model() -> None:
    with applied("bf16") as found:
        teacher, model = network(1), network()
        train(model, forward=lambda batch: (model(batch) - teacher(batch)).pow(2).mean())
        assert found["bf16"]["state"] == "in effect"


def test_channels_last_converts_weights_and_inputs() -> None:
    def run() -> tuple[nn.Sequential, list[float]]:
        model = images()
        return model, train(model, loader=DataLoader(data((3, 8, 8)), batch_size=8))

    _, bare = run()
    with applied("channels_last") as found:
        model, losses = run()
        assert losses == pytest.approx(bare, rel=1e-4)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert found["channels_last"]["state"] == "in effect"
        # Copies and pickles do not contain the setting.
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other._compiled_call_impl is None
    with applied("channels_last") as found:
        train(network())
        assert found["channels_last"]["text"] == "Sequential has no Conv2d."


class Flat(nn.Module):
    """Flattens with view(), after layers with random numbers and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Sequential(nn.Dropout(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.last = nn.Linear(4 * 36, 1)

    def forward(self, batch: Tensor) -> Any:
        out = self.norm(batch)
        return self.last(out.view(out.size(0), -1))


def test_channels_last_is_undone_for_a_model_that_views_outputs() -> None:
    def run() -> tuple[list[float], list[Tensor]]:
        model = Flat()
        optimizer = torch.optim.AdamW(model.parameters())
        losses = train(model, optimizer, DataLoader(data((3, 8, 8)), batch_size=8))
        return losses, list(model.buffers())

    bare, buffers = run()
    with applied("channels_last") as found:
        losses, others = run()
        assert losses == bare
        assert all(map(torch.equal, buffers, others))
        assert found["channels_last"]["state"] == "refused"
        assert "view size is not compatible" in found["channels_last"]["text"]


def test_channels_last_is_refused_for_five_dimensions() -> None:
    for name in ("parameter", "buffer"):
        model, grid = images(), torch.zeros(1, 1, 2, 8, 8)
        if name == "parameter":
            model[0].grid = nn.Parameter(grid)
        else:
            model[0].register_buffer("grid", grid)
        with applied("channels_last") as found:
            train(model, loader=DataLoader(data((3, 8, 8)), batch_size=8))
            assert found["channels_last"]["state"] == "refused", name


def test_channels_last_converts_the_state_of_the_optimizer() -> None:
    def run() -> list[float]:
        model = images()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        losses = train(model, optimizer, DataLoader(data((3, 8, 8)), batch_size=8))
        weight = model[0].weight
        assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()  # type: ignore[index]
        return losses

    bare = run()
    with applied("channels_last"):
        assert run() == pytest.approx(bare, rel=1e-3)


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch.compile trace without Inductor, which would take seconds."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: plain(call, backend="eager"))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("eager_backend")
def test_compile_runs_full_batches_only() -> None:
    torch._dynamo.utils.counters.clear()
    with applied("compile") as found:
        short = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=8)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            train(model, optimizer, short)
        # The first call came before; of 5 others, 2 had 4 samples.
        assert found["compile"]["state"] == "in effect"
        assert "3 compiled calls, 2 uncompiled; 1 graphs" in found["compile"]["text"]


def test_a_model_that_cannot_be_compiled_trains_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    bare, plain = train(network()), torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: plain(call, backend=broken))
    with applied("compile") as found:
        assert train(network()) == bare
        assert found["compile"]["state"] == "refused"
        assert "no compiler" in found["compile"]["text"]
    torch.compiler.reset()


def test_a_model_that_the_script_compiles_is_refused() -> None:
    with applied("compile bf16 gc_off=2") as found:
        model = torch.compile(network(), backend="eager")
        train(model)  # type: ignore[arg-type]
        assert found.states() == {"compile": "refused", "bf16": "refused", "gc_off": "in effect"}
    torch.compiler.reset()


@pytest.mark.parametrize(
    "damage",
    [
        {"state": "fast"},
        {"text": None},
        {"at": {"file": 1, "line": 2}},
        {"lines": "x"},
        {"value": []},
    ],
)
def test_damaged_entries_of_a_run_are_missing(damage: dict[str, Any]) -> None:
    with applied("gc_off") as found:
        entry = found["gc_off"]
    assert [one.name for one in applied_settings({"settings": [entry]})] == ["gc_off"]
    assert applied_settings({"settings": [entry | damage]}) == []


def test_a_setting_that_fails_does_not_end_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(SETTINGS["gc_off"], "enter", broken)
    with applied("gc_off") as found:
        assert len(train(network())) == STEPS
        assert found["gc_off"]["text"] == "Failed with RuntimeError: lost"
