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
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from stepscope.settings import SETTINGS, SettingError, parse
from stepscope.settings.setting import Training, applied_settings
from tests.support.applied_settings import applied

STEPS = 4


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
) -> list[float]:
    """Train over the loader and return the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for (batch,) in loader or DataLoader(data(), batch_size=8):
        optimizer.zero_grad()
        loss = forward(batch) if forward else model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "words",
    ["tf33", "tf32=1", "num_workers", "num_workers=257", "tf32 tf32"],
)
def test_invalid_words_name_the_setting_and_the_fix(words: str) -> None:
    with pytest.raises(SettingError, match=r"Use|Remove"):
        parse([words])


def test_a_script_without_torch_code_reaches_nothing() -> None:
    with applied("tf32 bf16 num_workers=2 fused") as found:
        assert set(found.states().values()) == {"not reached"}


def test_settings_of_a_gpu_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # also with the CUDA build
    monkeypatch.setattr(torch.version, "cuda", None)
    with applied("tf32 cudnn_benchmark pin_memory non_blocking") as found:
        train(images(), loader=DataLoader(data((3, 8, 8)), batch_size=8))
        assert set(found.states().values()) == {"refused"}
        assert all("GPU" in found[name]["text"] for name in found.states())


def test_workers_load_the_same_batches() -> None:
    bare = train(network())
    with applied("num_workers=2 prefetch_factor=3 persistent_workers") as found:
        line = 1 + found_line()
        loader = DataLoader(data(), batch_size=8)
        assert train(network(), loader=loader) == bare
        assert set(found.states().values()) == {"in effect"}
        assert found["num_workers"]["places"] == [{"file": __file__, "line": line}]
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
        assert found.state("num_workers") == "refused"
        assert "Stream is an IterableDataset" in found.text("num_workers")
        train(network(), loader=OwnLoader(data()))
        assert found.state("num_workers") == "in effect"
        assert "Stream is an IterableDataset" in found.text("num_workers")


class Records(TensorDataset):
    """Keeps what it reads from."""

    def __init__(self, source: Any) -> None:
        super().__init__(torch.zeros(8, 4))
        self.source = source


class CudaTensor(Tensor):
    """Claims to be on a GPU."""

    is_cuda = True


def test_workers_are_refused_for_open_files_cuda_tensors_and_collate_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def workers(dataset: Any, **options: Any) -> int:
        return DataLoader(dataset, **options).num_workers

    with (tmp_path / "data.bin").open("wb") as file, applied("num_workers=2") as found:
        with (
            closing(sqlite3.connect(":memory:")) as database,
            zipfile.ZipFile(tmp_path / "data.zip", "w") as archive,
        ):
            for source in ([file], {"a": file}, database, archive):
                assert workers(Subset(ConcatDataset([Records(source)]), [0])) == 0
        assert "has an open file" in found.text("num_workers")
        for other in ("data.bin", io.BytesIO(bytes(32)), tmp_path):
            assert workers(Records(other)) == 2
        tensors = TensorDataset(torch.zeros(4, 2).as_subclass(CudaTensor))
        assert workers(ConcatDataset([Subset(tensors, [0])])) == 0
        assert "CUDA tensors" in found.text("num_workers")
        plain = data()
        for is_initialized in (False, True):
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda found=is_initialized: found)
            assert workers(plain, collate_fn=list) == (0 if is_initialized else 2)
        assert workers(plain) == 2


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
        assert found.state("num_workers") == "refused"


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
        assert found.state("num_workers") == "in effect"


def test_fused_equals_the_argument_until_a_checkpoint_undoes_it() -> None:
    by_hand = network()
    expected = train(by_hand, torch.optim.AdamW(by_hand.parameters(), lr=0.1, fused=True))
    plain = torch.optim.AdamW(by_hand.parameters(), lr=0.1).state_dict()
    with applied("fused") as found:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        assert train(model, optimizer) == expected
        assert hasattr(optimizer, "_step_supports_amp_scaling")
        assert optimizer.param_groups[0]["fused"] is True
        assert found.state("fused") == "in effect"
        assert found["fused"]["lines"] == ["AdamW(..., fused=True)"]
        assert optimizer.state_dict()["param_groups"] == plain["param_groups"], "in no checkpoint"
    with applied("fused") as found:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(plain)
        assert not hasattr(optimizer, "_step_supports_amp_scaling"), "GradScaler reads it"
        train(model, optimizer)
        assert found.state("fused") == "refused"


def test_fused_is_refused_for_sparse_gradients() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    with applied("fused") as found:
        train(model, forward=lambda _: model(torch.tensor([1, 2])).pow(2).mean())
        assert found.state("fused") == "refused"
        assert "not applied to sparse gradients" in found.text("fused")
        assert found["fused"]["refused_places"] == [None]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS has no argument fused"),
        (lambda p: torch.optim.Adam(p, foreach=True), "already has foreach=True"),
        (lambda p: type("Own", (torch.optim.SGD,), {})(p), "not a class of torch.optim"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "uninitialized memory"),
        (lambda _: torch.optim.SGD([torch.zeros(2, dtype=torch.bfloat16)]), "16-bit"),
    ],
)
def test_fused_is_refused(make: Callable[[Any], torch.optim.Optimizer], reason: str) -> None:
    with applied("fused") as found:
        make(network().parameters())
        assert found.state("fused") == "refused"
        assert reason in found.text("fused")


def test_threads_are_read_back() -> None:
    former = torch.get_num_threads()
    try:
        with applied(f"threads={former + 1}") as found:
            assert found.state("threads") == "in effect"
            torch.set_num_threads(former)  # the script's own
            assert found.state("threads") == "refused"
        with applied(f"threads={former}") as found:
            assert found.state("threads") == "refused"
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
        assert found.state("bf16") == "in effect"
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
        loss = model(torch.ones(2, 4)).pow(2).mean()
        torch.autograd.grad(loss, parameters, create_graph=True)
        assert torch.is_autocast_enabled("cpu"), "a penalty is part of the pass"
        optimizer.step()


@pytest.mark.parametrize("is_training", [True, False])
def test_bf16_of_a_model_that_is_its_own_target(is_training: bool) -> None:
    """As in BYOL, here with weights of 0: a pass without gradients before `backward()`."""
    with applied("bf16"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = [model(torch.ones(1, 4)) for _ in range(2)]
        weights = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)
        with torch.no_grad():
            assert not model.train(is_training)(torch.ones(1, 4)).any()
        for parameter, weight in zip(model.train().parameters(), weights, strict=True):
            parameter.data = weight
        outputs.append(model(torch.ones(1, 4)))
        assert outputs[2].item() == outputs[1].item() != 0
        outputs[2].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()


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
        assert found.state("bf16") == "in effect"


def test_bf16_is_refused_for_a_bce_loss_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    [setting] = parse(["bf16"])
    gc.collect()
    assert setting.problem(Training(torch.device("cuda"), network())) is None
    loss = nn.BCELoss()
    problem = setting.problem(Training(torch.device("cuda"), network()))
    assert type(loss).__name__ in (problem or "")
    assert setting.problem(Training(torch.device("cpu"), network())) is None


def test_two_models_are_refused() -> None:
    with applied("bf16 channels_last compile") as found:
        models = [network(), network(1)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer)
        assert set(found.states().values()) == {"refused"}


def test_frozen_modules_are_not_the_model() -> None:
    with applied("bf16") as found:
        teacher, model = network(1), network()
        train(model, forward=lambda batch: (model(batch) - teacher(batch)).pow(2).mean())
        assert found.state("bf16") == "in effect"


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
        assert found.state("bf16") == "refused"
        assert not torch.is_autocast_enabled("cpu")


def test_channels_last_converts_weights_and_inputs() -> None:
    def run() -> tuple[nn.Sequential, list[float]]:
        model = images()
        return model, train(model, loader=DataLoader(data((3, 8, 8)), batch_size=8))

    _, bare = run()
    with applied("channels_last") as found:
        model, losses = run()
        assert losses == pytest.approx(bare, rel=1e-4)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert found.state("channels_last") == "in effect"
        # Copies and pickles do not contain the setting.
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other._compiled_call_impl is None
    with applied("channels_last") as found:
        train(network())
        assert found.text("channels_last") == "Sequential has no Conv2d."


def test_channels_last_is_refused_for_five_dimensions() -> None:
    model = images()
    model.register_buffer("grid", torch.zeros(1, 1, 2, 8, 8))
    with applied("channels_last") as found:
        train(model, loader=DataLoader(data((3, 8, 8)), batch_size=8))
        assert found.state("channels_last") == "refused"


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
        assert found.state("channels_last") == "refused"
        assert "view size is not compatible" in found.text("channels_last")


def test_channels_last_converts_the_state_of_the_optimizer() -> None:
    with applied("channels_last"):
        model = images()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        train(model, optimizer, DataLoader(data((3, 8, 8)), batch_size=8))
        weight: Any = model[0].weight
        assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()


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
        assert "3 compiled calls, 2 uncompiled; 1 graphs" in found.text("compile")


def test_a_model_that_cannot_be_compiled_trains_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    bare, plain = train(network()), torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: plain(call, backend=broken))
    with applied("compile") as found:
        assert train(network()) == bare
        assert found.state("compile") == "refused"
        assert "no compiler" in found.text("compile")
    torch.compiler.reset()


def test_a_model_that_the_script_compiles_is_refused() -> None:
    with applied("compile bf16 fused") as found:
        model = torch.compile(network(), backend="eager")
        train(model)  # type: ignore[arg-type]
        assert found.states() == {"compile": "refused", "bf16": "refused", "fused": "in effect"}
    torch.compiler.reset()


@pytest.mark.parametrize(
    "damage", [{"state": "fast"}, {"places": [{"file": 1, "line": 2}]}, {"lines": "x"}]
)
def test_damaged_entries_of_a_run_are_missing(damage: dict[str, Any]) -> None:
    with applied("num_workers=2") as found:
        entry = found["num_workers"]
    assert [one.name for one in applied_settings({"settings": [entry]})] == ["num_workers"]
    assert applied_settings({"settings": [entry | damage]}) == []


def test_a_setting_that_fails_does_not_end_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(SETTINGS["fused"], "enter", broken)
    with applied("fused") as found:
        assert len(train(network())) == STEPS
        assert found.text("fused") == "Failed with RuntimeError: lost"
