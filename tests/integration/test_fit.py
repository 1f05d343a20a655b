"""`trainer.memory_estimate` and `stepscope measure-memory` as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.measure_memory import main as script_main
from trainer.config import Workload, defaults
from trainer.memory_estimate.__main__ import main
from trainer.memory_estimate.batch_size_finder import ROUNDS, measure
from trainer.memory_estimate.estimate import MARGIN

FIT = [sys.executable, "-m", "trainer.memory_estimate"]
SCRIPT_FIT = [sys.executable, "-m", "stepscope.cli", "measure-memory"]
SCRIPT = """
import sys, torch
from torch import nn
print("arguments", sys.argv[1:])
batch, ending = int(sys.argv[1]), sys.argv[2]
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters())
steps = 0
try:
    for _ in range(50):
        if ending == "raise" and steps == 1:
            raise ValueError("no more")
        loss = model(torch.randn(batch, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        try:
            optimizer.step()
        except BaseException:
            if ending != "catch":
                raise
        steps += 1
finally:
    print("cleaned up", file=sys.stderr)
"""

READS = """
from torch import nn, randn
from trainer.workloads.task import Task, TensorSplit

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, values):
        return self.layer(values) * values.mean().item()

def build(config):
    split = TensorSplit.of(randn(32, 4), randn(32, 4))
    loss = nn.MSELoss()
    return Task(model=Model(), train=split, validation=split, loss=loss, classifies=False)
"""


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **more)


def fit(*options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return run([*FIT, "--device", "cpu", *options], **more)


# --- python -m trainer.memory_estimate ----------------------------------------------------------


def test_the_command_prints_the_peak_and_its_parts(tmp_path: Path) -> None:
    options = ["--workload", "digits_cnn", "--batch-size", "512", "--optimizer", "sgd"]
    done = fit(*options, "--optimizer-impl", "for-loop", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted_peak_bytes"] == sum(found["parts"].values())
    assert found["fits"] is True
    assert found["reason"]
    assert found["device"] == "cpu"
    assert 0 < found["seconds"] < 300
    assert found["margin"] == {"factor": MARGIN}
    chosen = [found["config"][name] for name in ("batch_size", "optimizer", "optimizer_impl")]
    assert chosen == [512, "sgd", "for-loop"]


def test_a_run_that_is_too_large_does_not_fit_and_takes_no_memory(tmp_path: Path) -> None:
    words = ["--json", "--workload", "matmul", "--width", "16384", "--batch-size", "512"]
    done = run([*SCRIPT_FIT, *words, "--device", "cpu"])
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is False
    assert found["predicted_peak_bytes"] > 2**41
    assert found["reason"]


def test_settings_come_from_a_run_and_the_command_line_counts_more(tmp_path: Path) -> None:
    config = replace(defaults(Workload.LINEAR), batch_size=64).to_dict()
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "config": config}))
    options = ["--config", str(tmp_path / "run.json"), "--batch-size", "32", "--json"]
    done = fit(*options)
    assert done.returncode == 0, done.stderr
    chosen = json.loads(done.stdout)["config"]
    assert (chosen["workload"], chosen["batch_size"]) == ("linear", 32)


def test_the_largest_batch_without_a_measurement(tmp_path: Path) -> None:
    done = fit("--workload", "linear", "--find-batch-size", "--json")
    assert done.returncode == 0, done.stderr
    curve = json.loads(done.stdout)["largest"]
    assert curve["largest"] == 800  # the samples of an epoch
    assert curve["recommended"] is None
    sizes = [point["batch_size"] for point in curve["points"]]
    assert sizes == sorted(sizes)
    assert {1, 64, 256, 512, 800} <= set(sizes)
    needed = [point["needed_bytes"] for point in curve["points"]]
    assert needed == sorted(needed)


def test_throughput_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path / "others"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    old = tmp_path / "temporary" / "stepscope-batch-killed"
    old.mkdir()
    os.utime(old, (1.0, 1.0))
    shares: list[float] = []
    rates, missed = measure(
        defaults(Workload.LINEAR), [64, 65], lambda text, share: shares.append(share)
    )
    assert missed == []
    assert {size: len(found) for size, found in rates.items()} == {64: ROUNDS, 65: ROUNDS}
    assert min(min(found) for found in rates.values()) > 0
    assert shares == sorted(shares)
    assert list(tmp_path.rglob("*")) == [tmp_path / "temporary"]


def test_a_model_that_reads_values_gets_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(READS)
    done = fit("--workload", f"{path}:build", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "mine.py, line 10" in done.stderr
    assert "measure-memory" in done.stderr
    assert "Traceback" not in done.stderr


GPT = "--workload gpt"


@pytest.mark.parametrize(
    ("options", "text", "said"),
    [
        ("--workload bert", "", "--workload"),
        (f"{GPT} --batch-size many", "", "batch_size: "),
        (f"{GPT} --num-layers -1", "", "num_layers: "),
        (f"{GPT} --set batchsize=3", "", "batch_size"),
        (f"{GPT} --precision tf32", "", "precision: "),
        (f"{GPT} --measure-throughput", "", "needs --find-batch-size"),
        ("--workload images --dataset ../../etc", "", "dataset: "),
        ("--config /nowhere/run.json", "", "/nowhere/run.json"),
        ("--config run.json", "[" * 100_000, "JSON"),
        ("--config run.json", '{"config": 3}', "with a workload"),
        ("--config run.json", '{"workload": ["gpt"]}', "workload: "),
        ("--config run.json", '{"workload": "gpt", "num_layers": 0}', "num_layers: "),
    ],
)
def test_wrong_usage_is_one_sentence(
    options: str,
    text: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(text)
    assert main(["--device", "cpu", *options.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1


# --- stepscope measure-memory ---------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_is_measured_and_ended(script: str) -> None:
    done = run([*SCRIPT_FIT, "--steps", "4", "--json", script, "8192", "well", "--steps", "9"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 4
    weights = 8 * 4 * (512 * 512 + 512)
    assert found["parts"]["trained_parameters"] == found["parts"]["gradients"] == weights
    assert found["parts"]["optimizer_state"] == 2 * weights + 16 * 4
    # Sixteen layers keep what they gave, of 16 MiB each.
    assert 0.5 * 256 * 2**20 < found["parts"]["activations_and_the_rest"] < 2 * 256 * 2**20
    assert found["batch_factor"] > 1
    assert str(["8192", "well", "--steps", "9"]) in done.stderr
    assert "cleaned up" in done.stderr


def test_a_small_batch_gives_no_factor(script: str) -> None:
    done = run([*SCRIPT_FIT, script, "4", "well"])
    assert done.returncode == 0
    assert "3 steps" in done.stdout


@pytest.mark.parametrize(
    ("ending", "code", "steps", "said"),
    [("raise", 1, 1, "ValueError: no more"), ("catch", 0, 3, "")],
)
def test_a_script_that_fails_or_catches(
    script: str, ending: str, code: int, steps: int, said: str
) -> None:
    done = run([*SCRIPT_FIT, "--json", script, "64", ending])
    assert done.returncode == code
    assert said in done.stderr
    assert json.loads(done.stdout)["steps"] == steps


MANY_STEPS = """
import torch
{setup}
for step in range(200):
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step({closure})
print("ran to its end")
"""


@pytest.fixture
def many_steps(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Measure a script of many steps; return exit code, JSON and stderr."""

    def measured(
        setup: str, loss: str, closure: str = "", *options: str
    ) -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "train.py"
        path.write_text(MANY_STEPS.format(setup=setup, loss=loss, closure=closure))
        done = run([*SCRIPT_FIT, "--json", *options, str(path)])
        return done.returncode, json.loads(done.stdout), done.stderr

    return measured


ManySteps = Callable[..., tuple[int, dict[str, Any], str]]


SGD = "optimizer = torch.optim.SGD(model.parameters())"


def test_a_script_that_cannot_be_measured_ends_at_once(many_steps: ManySteps) -> None:
    setup = f"model = torch.nn.Linear(4, 4)\n{SGD}\noptimizer.state = 5"
    code, found, err = many_steps(setup, "model(torch.ones(4)).sum()")
    assert (code, found["steps"], err) == (1, 0, "")
    assert "TypeError" in found["text"]


def test_two_optimizers_of_one_class(many_steps: ManySteps) -> None:
    setup = (
        "import copy\nmodel = torch.nn.Linear(4, 4)\nother = copy.deepcopy(model)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "second = torch.optim.Adam(other.parameters())"
    )
    loss = "model(torch.ones(4)).sum() + other(torch.ones(4)).sum()"
    code, found, err = many_steps(setup, loss, "); second.step(")
    assert code == 0, err
    assert found["batch_factor"] is None


def test_sparse_gradients_count(many_steps: ManySteps) -> None:
    rows, width = 1000, 8
    sparse = (
        f"model = torch.nn.Embedding({rows}, {width}, sparse=True)\n"
        "optimizer = torch.optim.SparseAdam(model.parameters())"
    )
    code, found, err = many_steps(sparse, "model(torch.arange(32)).sum()")
    assert code == 0, err
    assert found["parts"]["gradients"] == 32 * (width * 4 + 8)  # values, and an index of 8 bytes
    assert found["parts"]["optimizer_state"] == 2 * rows * width * 4


def test_a_script_without_steps_gets_a_sentence(tmp_path: Path) -> None:
    for text, said in (("print(1)", "did not import torch"), ("import torch", "optimizer")):
        path = tmp_path / "nothing.py"
        path.write_text(text)
        done = run([*SCRIPT_FIT, str(path)])
        assert done.returncode == 1
        assert said in done.stdout


@pytest.mark.parametrize(
    "options", ["", "--steps 1 x.py", "--steps 1e9 x.py", "/nowhere.py", "--steps 3 --workload gpt"]
)
def test_wrong_usage_of_the_script_command(
    options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())  # the command adds the script's folder
    try:
        code: object = script_main(options.split())
    except SystemExit as error:  # of argparse
        code = error.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err
