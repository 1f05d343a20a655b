"""`trainer.memory_estimate` and `stepscope fit` as processes, and what earlier runs teach."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.recorder.recorder import Recorder
from stepscope.run import RunKind, RunStatus
from trainer.config import RunConfig, Workload, defaults
from trainer.devices import list_devices
from trainer.memory_estimate.__main__ import main
from trainer.memory_estimate.estimate import answer
from trainer.memory_estimate.past_runs import DEFAULT_FACTOR, FIT_JSON, margin_for
from trainer.memory_estimate.probe import ROUNDS, Progress, measure

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
    done = fit(*options, "--fused", "false", "--json", "--runs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted_peak_bytes"] == sum(found["parts"].values())
    assert found["fits"] is True
    assert found["reason"]
    assert found["device"] == "cpu"
    assert 0 < found["seconds"] < 300
    assert found["margin"] == {"factor": DEFAULT_FACTOR, "runs": 0, "source": "default"}
    chosen = found["config"]
    assert (chosen["batch_size"], chosen["optimizer"], chosen["optimizer_impl"]) == (
        512,
        "sgd",
        "for-loop",
    )


def test_what_is_too_large_does_not_fit_and_takes_no_memory_to_say_so(tmp_path: Path) -> None:
    options = ["--workload", "matmul", "--width", "16384", "--batch-size", "512"]
    done = fit(*options, "--json", "--runs", str(tmp_path))
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is False
    assert found["predicted_peak_bytes"] > 2**41
    assert "Use a smaller batch" in found["reason"]


def test_settings_come_from_a_run_and_the_command_line_counts_more(tmp_path: Path) -> None:
    config = replace(defaults(Workload.LINEAR), batch_size=64).to_dict()
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "config": config}))
    options = ["--config", str(tmp_path / "run.json"), "--batch-size", "32", "--json"]
    done = fit(*options, "--runs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    chosen = json.loads(done.stdout)["config"]
    assert (chosen["workload"], chosen["batch_size"]) == ("linear", 32)


@pytest.mark.parametrize("option", ["--find-batch-size", "--largest"])
def test_the_largest_batch_without_a_measurement(option: str, tmp_path: Path) -> None:
    done = fit("--workload", "linear", option, "--json", "--runs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    curve = json.loads(done.stdout)["largest"]
    assert curve["largest"] == 800  # the samples of an epoch
    assert curve["recommended"] is None
    sizes = [point["batch_size"] for point in curve["points"]]
    assert sizes == sorted(sizes)
    assert {1, 64, 256, 512, 800} <= set(sizes)
    needed = [point["needed_bytes"] for point in curve["points"]]
    assert needed == sorted(needed)


def test_throughput_is_measured_in_short_runs_that_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    done = fit("--workload", f"{path}:build", "--json", "--runs", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "reads tensor values (mine.py, line 10, in forward)," in done.stderr
    assert "stepscope measure-memory" in done.stderr
    assert "Traceback" not in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("error", [None, PermissionError(13, "Permission denied", "/data/x")])
def test_the_line_of_progress_is_gone_before_anything_else_is_said(
    error: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*args: Any, progress: Progress, **more: Any) -> dict[str, Any]:
        progress("Measuring", 1.0)
        if error is not None:
            raise error
        return {"fits": True}

    monkeypatch.setattr("trainer.memory_estimate.estimate.answer", answer)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    code = main(["--workload", "linear", "--device", "cpu", "--json"])
    shown = terminal.getvalue()
    _, after = shown.split("Measuring…\r\033[K")
    assert "\n" not in shown.removesuffix(after)
    if error is None:
        assert (code, after) == (0, "")
    else:
        assert code == 1
        assert (
            after == "A file or folder cannot be used: [Errno 13] Permission denied: '/data/x'.\n"
        )


def test_the_share_of_progress_only_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(config: Any, sizes: Any, progress: Progress) -> Any:
        for share in (0.0, 0.5):
            progress("Measuring", share)
        return {}, []

    monkeypatch.setattr("trainer.memory_estimate.estimate.measure", measured)
    shares: list[float] = []
    config = defaults(Workload.LINEAR)
    device = next(one for one in list_devices() if one.id == "cpu")
    found = answer(
        config,
        device,
        tmp_path,
        largest=True,
        probe=True,
        progress=lambda text, share: shares.append(share),
    )
    assert "largest" in found
    assert shares == sorted(shares)
    assert shares[-2:] == pytest.approx([0.5, 0.75])


HOSTILE = {
    "unknown workload": (["--workload", "bert"], "--workload"),
    "no workload": ([], "--workload"),
    "no number": (["--workload", "gpt", "--batch-size", "many"], "batch_size: must be"),
    "too large": (["--workload", "gpt", "--batch-size", "1e9"], "batch_size: must be"),
    "negative": (["--workload", "gpt", "--layers", "-1"], "layers: must be"),
    "unknown field": (["--workload", "gpt", "--set", "batchsize=3"], "Did you mean batch_size"),
    "no value": (["--workload", "gpt", "--set", "batch_size"], "must be FIELD=VALUE"),
    "not on a CPU": (
        ["--workload", "gpt", "--precision", "tf32"],
        "precision: TF32 needs NVIDIA tensor cores.",
    ),
    "no data": (["--workload", "images", "--data", "../../etc"], "dataset: must be a path"),
    "no file": (["--config", "/nowhere/run.json"], "cannot be read"),
    "not JSON": (["--config", "{FILE}"], "must be JSON"),
    "probe alone": (["--workload", "gpt", "--probe"], "needs --find-batch-size"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_usage_is_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, said = HOSTILE[name]
    (tmp_path / "file").write_text("[" * 100_000)
    given = [option.replace("{FILE}", str(tmp_path / "file")) for option in options]
    assert main(["--device", "cpu", *given, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["[]", '{"config": 3}', '{"workload": ["gpt"]}', '{"workload": "gpt", "layers": 0}']
)
def test_settings_that_are_no_object_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(text)
    assert main(["--config", str(tmp_path / "run.json"), "--json"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.strip().splitlines())) == ("", 1)


# --- what earlier runs teach ----------------------------------------------------------------------


def recorded(root: Path, name: str, config: RunConfig, peak: float, rate: float = 100.0) -> Path:
    folder = root / name
    folder.mkdir()
    recorder = Recorder(folder, name=name, kind=RunKind.TRAINER, config=config.to_dict())
    for step in range(1, 41):
        recorder.log(step, {"train/loss": 1.0, "perf/samples_per_sec": rate})
    recorder.sample({"memory/peak_allocated": peak})
    recorder.close(RunStatus.FINISHED)
    return folder


def test_the_margin_comes_from_measured_against_predicted(tmp_path: Path) -> None:
    config = defaults(Workload.GPT, "GPU-1")
    predicted: list[RunConfig] = []

    def predict(other: RunConfig) -> int:
        predicted.append(other)
        return 1000

    for number, peak in enumerate((1010.0, 1050.0, 1080.0)):
        recorded(tmp_path, f"run-{number}", config, peak)
    recorded(tmp_path, "other", defaults(Workload.MATMUL, "GPU-1"), 5000.0)
    margin = margin_for(config, tmp_path, predict)
    assert margin.factor == pytest.approx(1.10)
    assert margin.runs == 3
    assert len(predicted) == 3
    assert margin_for(config, tmp_path, predict) == margin
    assert len(predicted) == 3, "kept beside the runs"


def test_a_prediction_for_another_gpu_is_not_used(tmp_path: Path) -> None:
    config = defaults(Workload.GPT, "GPU-1")
    recorded(tmp_path, "run", config, 1000.0)
    predicted: list[RunConfig] = []

    def predict(other: RunConfig) -> int:
        predicted.append(other)
        return 1000

    for capability, count in (((9, 0), 1), ((9, 0), 1), ((8, 0), 2), ((8, 0), 2)):
        margin_for(config, tmp_path, predict, capability)
        assert len(predicted) == count


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_a_plain_file_is_read(tmp_path: Path, kind: str) -> None:
    config = defaults(Workload.GPT, "GPU-1")
    first = recorded(tmp_path, "run-0", config, 1000.0)
    margin_for(config, tmp_path, lambda other: 1000)
    kept = (first / FIT_JSON).rename(tmp_path / "kept")
    if kind == "link":
        (first / FIT_JSON).symlink_to(kept)
    else:
        os.mkfifo(first / FIT_JSON)
    predicted: list[RunConfig] = []
    margin_for(config, tmp_path, lambda other: predicted.append(other) or 900)
    assert len(predicted) == 1
    assert not (first / FIT_JSON).is_symlink()


@pytest.mark.parametrize(
    "text", ["", "[1]", "{" * 5000, '{"method": 1, "torch": "x", "predicted_peak_bytes": 5}']
)
def test_a_damaged_or_older_prediction_is_made_again(tmp_path: Path, text: str) -> None:
    config = defaults(Workload.GPT, "GPU-1")
    folder = recorded(tmp_path, "run", config, 1000.0)
    (folder / FIT_JSON).write_text(text)
    margin_for(config, tmp_path, lambda other: 900)
    assert json.loads((folder / FIT_JSON).read_text())["predicted_peak_bytes"] == 900


def test_runs_that_cannot_be_predicted_or_read_teach_nothing(tmp_path: Path) -> None:
    config = defaults(Workload.GPT, "GPU-1")
    folder = recorded(tmp_path, "run", config, 1000.0)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"config": {"workload": 3}}')

    def refuses(other: RunConfig) -> int:
        raise RuntimeError("its data are gone")

    assert margin_for(config, tmp_path, refuses).runs == 0
    assert not (folder / FIT_JSON).exists()


# --- stepscope fit --------------------------------------------------------------------------------


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
    assert "arguments ['8192', 'well', '--steps', '9']" in done.stderr
    assert "cleaned up" in done.stderr


def test_a_small_batch_is_no_ground_for_advice(script: str) -> None:
    done = run([*SCRIPT_FIT, script, "4", "well"])
    assert done.returncode == 0
    assert "too little to tell" in done.stdout
    assert "3 steps measured" in done.stdout


def test_a_script_that_fails_says_so_with_what_was_measured(script: str) -> None:
    done = run([*SCRIPT_FIT, "--json", script, "64", "raise"])
    assert done.returncode == 1
    assert "ValueError: no more" in done.stderr
    assert json.loads(done.stdout)["steps"] == 1


def test_a_script_that_catches_everything_is_ended_from_outside(script: str) -> None:
    done = run([*SCRIPT_FIT, "--json", script, "64", "catch"])
    assert done.returncode == 0
    assert json.loads(done.stdout)["steps"] == 3


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
META = {
    "setup": "model = torch.nn.Linear(4, 4, device='meta')\n"
    "optimizer = torch.optim.SGD(model.parameters())",
    "loss": "model(torch.ones(4, device='meta')).sum()",
    "closure": "",
}
NO_STATE = {
    "setup": "model = torch.nn.Linear(4, 4)\n"
    "optimizer = torch.optim.SGD(model.parameters())\n"
    "optimizer.state = 5",
    "loss": "model(torch.ones(4)).sum()",
    "closure": "",
}


@pytest.mark.parametrize(("parts", "said"), [(META, "lies on meta"), (NO_STATE, "AttributeError")])
def test_a_script_that_cannot_be_measured_ends_at_once_with_the_first_reason(
    tmp_path: Path, parts: dict[str, str], said: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(MANY_STEPS.format(**parts))
    done = run([*SCRIPT_FIT, "--json", str(path)])
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert said in found["text"]
    assert found["steps"] == 0
    assert done.stderr == ""


TWO = {
    "setup": "import copy\nmodel = torch.nn.Linear(4, 4)\nother = copy.deepcopy(model)\n"
    "optimizer = torch.optim.Adam(model.parameters())\n"
    "second = torch.optim.Adam(other.parameters())",
    "loss": "model(torch.ones(4)).sum() + other(torch.ones(4)).sum()",
}


@pytest.mark.parametrize(
    ("closure", "said"),
    [
        (
            "); second.step(",
            "No advice: several optimizers alternate, so their steps are not comparable.",
        ),
        (
            ") if step < 40 else second.step(",
            (
                "No advice: another optimizer has not stepped yet, so its memory is "
                "unknown. Measure more steps with --steps."
            ),
        ),
    ],
)
def test_optimizers_of_one_class_are_told_apart(tmp_path: Path, closure: str, said: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(MANY_STEPS.format(**TWO, closure=closure))
    done = run([*SCRIPT_FIT, "--json", str(path)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert said in found["text"]
    assert found["batch_factor"] is None


def test_sparse_gradients_and_lists_of_state_count(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    rows, width = 1000, 8
    path.write_text(
        MANY_STEPS.format(
            setup=f"model = torch.nn.Embedding({rows}, {width}, sparse=True)\n"
            "optimizer = torch.optim.SparseAdam(model.parameters())",
            loss="model(torch.arange(32)).sum()",
            closure="",
        )
    )
    done = run([*SCRIPT_FIT, "--json", str(path)])
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)["parts"]
    assert parts["gradients"] == 32 * (width * 4 + 8)  # values, and an index of 8 bytes
    assert parts["optimizer_state"] == 2 * rows * width * 4
    path.write_text(
        MANY_STEPS.format(
            setup="model = torch.nn.Linear(64, 64, bias=False)\n"
            "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)",
            loss="model(torch.ones(64)).square().sum()",
            closure="lambda: (optimizer.zero_grad(), "
            "model(torch.randn(99, 64)).square().sum().backward(), torch.ones(()))[2]",
        )
    )
    done = run([*SCRIPT_FIT, "--json", "--steps", "4", str(path)])
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)["parts"]
    # Besides the direction and the gradient before, two lists of their differences.
    assert parts["optimizer_state"] >= 4 * 64 * 64 * 4


def test_a_script_without_steps_gets_a_sentence(tmp_path: Path) -> None:
    for text, said in (("print(1)", "did not import torch"), ("import torch", "optimizer")):
        path = tmp_path / "nothing.py"
        path.write_text(text)
        done = run([*SCRIPT_FIT, str(path)])
        assert done.returncode == 1
        assert said in done.stdout


@pytest.mark.parametrize(
    ("options", "code"),
    [([], 2), (["--steps", "1", "x.py"], 2), (["--steps", "1e9", "x.py"], 2), (["/nowhere.py"], 2)],
)
def test_wrong_usage_of_the_script_command(options: list[str], code: int) -> None:
    done = run([*SCRIPT_FIT, *options])
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
