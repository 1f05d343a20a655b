"""The recorders under measurement, each as its documentation shows it, with its default settings.

All log the same four metrics a step. `START` opens a recorder in a folder and returns its two
calls; `STORED` counts, in another process and with the recorder's own reader, the steps that can be
read back with all four metrics. Only the recorder that is asked for is imported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

METRICS = ("loss", "lr", "acc", "norm")
PROJECT = "benchmark"

Log = Callable[[int, Any, float, float, float], None]
Finish = Callable[[], None]
Started = tuple[Log, Finish]


def complete(steps_by_metric: Iterable[Iterable[int]]) -> int:
    """Return how many steps every one of the metrics has."""
    found = [set(steps) for steps in steps_by_metric]
    return len(set.intersection(*found)) if len(found) == len(METRICS) else 0


def start_nothing(_folder: Path) -> Started:
    """Return calls that do nothing: what the measurement itself costs."""

    def log(step: int, loss: Any, lr: float, acc: float, norm: float) -> None:
        pass

    return log, lambda: None


def start_stepscope(folder: Path) -> Started:
    """Start a run with its sampler."""
    rec = import_module("stepscope").init(PROJECT, runs=folder)

    def log(step: int, loss: Any, lr: float, acc: float, norm: float) -> None:
        rec.step(loss=loss, lr=lr, acc=acc, norm=norm)

    return log, rec.close


def stored_in_stepscope(folder: Path) -> int:
    """Count the rows of the only run, after storing what a killed process left in its ring."""
    (run,) = [path.parent for path in folder.glob("*/run.json")]
    import_module("stepscope.store.writer").recover(run)
    with import_module("stepscope.store").StoreReader(run) as reader:
        found = [info for info in reader.series() if info.stream == "steps"]
        if not found:
            return 0
        block = reader.read(found[0].id, 0, found[0].rows, 1)
    rows = [block.keys.index(f"train/{name}") for name in METRICS]
    return int((block.count[rows] > 0).all(axis=0).sum())


def start_trackio(folder: Path) -> Started:
    """Start a local run; where its data lie is in TRACKIO_DIR."""
    trackio = import_module("trackio")
    trackio.init(project=PROJECT, name="run", embed=False)

    def log(step: int, loss: Any, lr: float, acc: float, norm: float) -> None:
        trackio.log({"loss": loss, "lr": lr, "acc": acc, "norm": norm}, step=step)

    return log, trackio.finish


def stored_in_trackio(folder: Path) -> int:
    """Count what trackio's storage returns."""
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    rows = storage.get_logs(PROJECT, "run")
    return complete([row["step"] for row in rows if name in row] for name in METRICS)


def start_tensorboard(folder: Path) -> Started:
    """Open torch's SummaryWriter."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(step: int, loss: Any, lr: float, acc: float, norm: float) -> None:
        writer.add_scalar("loss", loss, step)
        writer.add_scalar("lr", lr, step)
        writer.add_scalar("acc", acc, step)
        writer.add_scalar("norm", norm, step)

    return log, writer.close


def stored_in_tensorboard(folder: Path) -> int:
    """Count what the EventAccumulator returns with no limit set."""
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag in METRICS]
    return complete([event.step for event in events.Scalars(tag)] for tag in tags)


def start_wandb(folder: Path) -> Started:
    """Start an offline run."""
    wandb = import_module("wandb")
    run = wandb.init(project=PROJECT, mode="offline", dir=str(folder))

    def log(step: int, loss: Any, lr: float, acc: float, norm: float) -> None:
        run.log({"loss": loss, "lr": lr, "acc": acc, "norm": norm}, step=step)

    def finish() -> None:
        run.finish()
        wandb.teardown()  # its service process ends here

    return log, finish


def stored_in_wandb(folder: Path) -> int:
    """Count the history records of the offline file.

    wandb ships no reader for it in Python: this one follows the file's blocks, wandb's own classes
    decode the records.
    """
    schema = import_module("wandb.proto.wandb_internal_pb2")
    steps: dict[str, list[int]] = {name: [] for name in METRICS}
    (path,) = folder.rglob("*.wandb")
    for data in records(path.read_bytes()):
        record = schema.Record.FromString(data)
        for item in record.history.item:
            name = item.key or "".join(item.nested_key)
            if name in steps:
                steps[name].append(record.history.step.num)
    return complete(steps.values())


def records(data: bytes, header: int = 7, block: int = 32 * 1024) -> Iterator[bytes]:
    """Yield the records of a LevelDB log behind a file header; a torn one at the end is left out.

    Blocks of 32 KiB hold fragments: checksum (4 bytes), length (2), type (full, first, middle or
    last), data. Where fewer than 7 bytes remain in a block they are padding.
    """
    full, last = 1, 4
    at, parts = header, b""
    while at + 7 <= len(data):
        rest = block - at % block
        if rest < 7:
            at += rest
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += 7
        if not 1 <= kind <= last or at + length > len(data):
            return
        parts += data[at : at + length]
        at += length
        if kind in (full, last):
            yield parts
            parts = b""


def start_aim(folder: Path) -> Started:
    """Start a run in a repository of its own."""
    run = import_module("aim").Run(repo=str(folder))

    def log(step: int, loss: Any, lr: float, acc: float, norm: float) -> None:
        run.track({"loss": loss, "lr": lr, "acc": acc, "norm": norm}, step=step)

    return log, run.close


def stored_in_aim(folder: Path) -> int:
    """Count what the run itself returns; before aim has indexed it, it must be opened to write."""
    aim = import_module("aim")
    repo = aim.Repo(str(folder))
    (run_hash,) = repo.list_all_runs()
    run = aim.Run(run_hash, repo=repo, force_resume=True, system_tracking_interval=None)
    found = [
        run.get_metric(name, context).values.sparse_list()[0]
        for name, context, _ in run.iter_metrics_info()
        if name in METRICS
    ]
    steps = complete(found)
    run.close()
    return steps


def start_mlflow(folder: Path) -> Started:
    """Start a run in a SQLite file, the local store that mlflow makes by itself."""
    mlflow = import_module("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment(PROJECT)
    mlflow.start_run()

    def log(step: int, loss: Any, lr: float, acc: float, norm: float) -> None:
        mlflow.log_metrics({"loss": loss, "lr": lr, "acc": acc, "norm": norm}, step=step)

    return log, mlflow.end_run


def stored_in_mlflow(folder: Path) -> int:
    """Count the metric history that the client returns."""
    client = import_module("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name(PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    return complete(
        [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
        for name in METRICS
    )


NOTHING = "nothing"
OURS = "stepscope"
START: dict[str, Callable[[Path], Started]] = {
    NOTHING: start_nothing,
    OURS: start_stepscope,
    "trackio": start_trackio,
    "tensorboard": start_tensorboard,
    "wandb": start_wandb,
    "aim": start_aim,
    "mlflow": start_mlflow,
}
STORED: dict[str, Callable[[Path], int]] = {
    OURS: stored_in_stepscope,
    "trackio": stored_in_trackio,
    "tensorboard": stored_in_tensorboard,
    "wandb": stored_in_wandb,
    "aim": stored_in_aim,
    "mlflow": stored_in_mlflow,
}
