"""Which charts and number tiles a run shows, as JSON for the live chart component.

Pure: run content in, a layout out. The samples themselves never pass here; the component in the
browser fetches them by the series and metric names that the layout gives.
"""

from __future__ import annotations

from dashboard.charts.content import Fit, RunContent, loss_keys, norm_keys, rate_keys
from dashboard.charts.parts import (
    Json,
    chart,
    numbered,
    trace,
    training_gpu,
    y_axis,
)
from dashboard.charts.tiles import NO_SAMPLES, tiles
from stepscope.metrics import BY_KEY, METRICS, Stream, Unit
from stepscope.run import RunKind

NORMS = ("blue", "orange", "pink", "amber", "gray", "green")
"""Colors of the gradient norms, an optimizer each."""
WARM_UP_ROWS = 3
"""First steps of a run, slow by nature: drawn, but they do not set the scale of step time."""
NO_LOSS = {
    RunKind.WATCH: "No loss yet: it is read where the script calls backward() on a scalar.",
    RunKind.INIT: "No loss yet: give it to each step, as in rec.step(loss=loss).",
}
WAITING = {
    RunKind.TRAINER: "sent. Waiting for the training loop to reach the end of its step…",
    RunKind.WATCH: "sent. Waiting for the script's next optimizer step…",
    RunKind.INIT: "sent. Waiting for the script's next step…",
    RunKind.RECORD: "sent. Waiting for the recording…",
}


def layout(content: RunContent) -> Json:
    """Return the component's layout: `charts`, `kpis`, `metrics` (unit, label by key), `fit`.

    `axis` is "time" where a run has no steps; `waiting` is said until a command is answered;
    `custom_note` says what of the script's own metrics has no chart.
    """
    recording = content.kind is RunKind.RECORD
    charts = (
        _machine(content)
        if recording
        else [*_training(content), *_custom(content), *_more(content)]
    )
    known = {m.key: {"unit": m.unit.value, "label": m.label} for m in METRICS}
    drawn = {line["metric"] for made in charts for line in made["traces"]}
    own = {key: {"unit": "", "label": key} for key in sorted(drawn - known.keys())}
    return {
        "charts": charts,
        "kpis": tiles(content),
        "metrics": known | own,
        "fit": _fit(content.fit),
        "axis": "time" if recording else "step",
        "waiting": WAITING[content.kind],
        "custom_note": _custom_note(content),
    }


def _training(content: RunContent) -> list[Json]:
    charts = [_loss(content), _memory(content), _utilization(content), _throughput(content)]
    if content.gpus:
        charts.insert(3, _power(content))
    if content.fit is not None:
        charts.insert(1, chart("fit", "Fit", [], kind="fit"))
    return [*charts, _step_time(content)]


def _machine(content: RunContent) -> list[Json]:
    """The charts of a recording: all GPUs and the host, no training."""
    host_memory = [trace("host/mem_used", "envelope"), trace("host/mem_total", "context")]
    host = [
        chart("host_memory", "Host memory", host_memory, y=y_axis(Unit.BYTES)),
        chart(
            "host_cpu",
            "Host CPU",
            [trace("host/cpu", "mean")],
            y=y_axis(Unit.PERCENT, fixed=(0.0, 100.0)),
        ),
    ]
    if not content.gpus:
        host[0]["note"] = f"No GPU charts: {content.gpu_reason}"
        return host
    sizes = {gpu.memory_bytes for gpu in content.gpus}
    used = [
        trace("gpu/mem_used", "envelope", gpu=gpu, label=f"used{suffix}", color=color)
        for gpu, suffix, color in numbered(content.gpus)
    ]
    if len(sizes) == 1:  # else one line would be the total of some of them only
        used.append(trace("gpu/mem_total", "context", gpu=content.gpus[0], label="total"))
    memory = chart("memory", "GPU memory", used, y=y_axis(Unit.BYTES))
    return [_utilization(content), memory, _power(content), *host]


def _loss(content: RunContent) -> Json:
    names, keys = content.optimizers, loss_keys(len(content.optimizers))
    lines = ("blue", "green", "pink", "amber", "gray")
    traces = [
        trace(
            key,
            "ema",
            label=f"train ({names[i]} {i})" if len(keys) > 1 else "train",
            color=lines[i % len(lines)],
        )
        for i, key in enumerate(keys)
    ]
    scripted = content.kind is not RunKind.TRAINER  # which need not validate at all
    traces.append(trace("val/loss", "points", label="validation", optional=scripted))
    return chart("loss", "Loss", traces, loss=True, empty=NO_LOSS.get(content.kind))


def _memory(content: RunContent) -> Json:
    if not content.has_cuda:
        traces = [trace(key, "envelope") for key in ("process/rss", "process/peak_rss")]
        traces.append(trace("host/mem_used", "context"))
        return chart(
            "memory", "Memory", traces, y=y_axis(Unit.BYTES), note=content.allocator_reason
        )
    keys = ("memory/allocated", "memory/reserved", "memory/peak_allocated")
    traces = [trace(key, "envelope") for key in keys]
    for gpu, suffix, color in numbered(content.gpus):
        used = trace("gpu/mem_used", "envelope", gpu=gpu, label=f"device used{suffix}", color=color)
        traces.append(used)
    training = training_gpu(content)
    if training is not None:
        traces.append(trace("gpu/mem_total", "context", gpu=training, label="total"))
    note = None if content.gpus else f"Device used and total are not known: {content.gpu_reason}"
    return chart("memory", "Memory", traces, y=y_axis(Unit.BYTES), note=note)


def _utilization(content: RunContent) -> Json:
    traces: list[Json] = []
    for gpu, suffix, color in numbered(content.gpus):
        traces.append(trace("gpu/util", "mean", gpu=gpu, label=f"GPU{suffix}", color=color))
        if len(content.gpus) == 1:  # one line a GPU stays readable with eight of them
            traces.append(trace("gpu/mem_util", "mean", gpu=gpu, dash="dot"))
    if traces:
        y = y_axis(Unit.PERCENT, fixed=(0.0, 100.0))
        return chart("utilization", "Utilization", traces, y=y)
    traces = [trace("process/cpu", "mean"), trace("host/cpu", "mean")]
    note = (
        "Process CPU: 100 % is one core. No GPU utilization, power or temperature: "
        f"{content.gpu_reason}"
    )
    return chart("utilization", "Utilization", traces, y=y_axis(Unit.PERCENT), note=note)


def _power(content: RunContent) -> Json:
    traces: list[Json] = []
    for gpu, suffix, color in numbered(content.gpus):
        traces.append(trace("gpu/power", "mean", gpu=gpu, label=f"power{suffix}", color=color))
        temperature = trace(
            "gpu/temp",
            "mean",
            gpu=gpu,
            label=f"temperature{suffix}",
            color=color,
            axis="y2",
            dash="dot",
        )
        traces.append(temperature)
    training = training_gpu(content)
    if training is not None:
        traces.append(trace("gpu/power_limit", "context", gpu=training, label="limit"))
    y2 = y_axis(Unit.CELSIUS, zero=False)
    return chart("power", "Power and temperature", traces, y=y_axis(Unit.WATT), y2=y2)


def _throughput(content: RunContent) -> Json:
    traces = [trace("perf/samples_per_sec", "mean")]
    y, y2 = y_axis(Unit.PER_SECOND), None
    if content.kind is not RunKind.TRAINER:  # only a script can say what its tokens are
        traces.append(trace("perf/tokens_per_sec", "mean", optional=True, axis="y2", dash="dot"))
        y2 = y_axis(Unit.PER_SECOND)
    return chart("throughput", "Throughput", traces, y=y, y2=y2, empty=NO_SAMPLES.get(content.kind))


def _step_time(content: RunContent) -> Json:
    scripted = content.kind is not RunKind.TRAINER  # whose wait may not be seen
    waits = trace("perf/data_wait", "mean", optional=scripted)
    traces = [trace("perf/step_time", "mean"), waits]
    if content.has_cuda and "perf/h2d" in BY_KEY:
        traces.append(trace("perf/h2d", "mean", optional=True))
    return chart("step_time", "Step time", traces, y=y_axis(Unit.SECOND), warm_up=WARM_UP_ROWS)


def _custom(content: RunContent) -> list[Json]:
    return [
        chart(f"custom:{key}", key.removeprefix("train/"), [trace(key, "mean")], group="custom")
        for key in content.custom
    ]


def _custom_note(content: RunContent) -> str | None:
    left = content.custom_left
    if not left:
        return None
    more = "1 more metric is" if left == 1 else f"{left} more metrics are"
    return f"{more} recorded without a chart; `stepscope export` gives all of them."


def _more(content: RunContent) -> list[Json]:
    """What the optimizer does; each chart and line shows only where the run records it."""
    names, count = content.optimizers, len(content.optimizers)
    several = count > 1
    rates = []
    for place, (key, i, j) in enumerate(rate_keys(count)):
        owner = f"{names[i]} {i}" if several else ""
        label = ", ".join(filter(None, [owner, f"group {j}" if j else ""]))
        color = ("blue", "green", "orange", "pink", "amber", "gray")[place % 6]
        rates.append(trace(key, "mean", label=label or None, color=color, optional=True))
    norms = [
        trace(
            key,
            "ema",
            label=f"{names[i]} {i}" if several else None,
            color=NORMS[i % len(NORMS)],
            optional=True,
        )
        for i, key in enumerate(norm_keys(count))
    ]
    scale, skipped = [trace("train/amp_scale", "mean", optional=True)], None
    if "train/amp_skipped" in BY_KEY:
        scale.append(trace("train/amp_skipped", "mean", optional=True, axis="y2", dash="dot"))
        skipped = y_axis(Unit.COUNT)
    return [
        chart("learning_rate", "Learning rate", rates, group="optimizer"),
        chart("grad_norm", "Gradient norm", norms, group="optimizer", y=y_axis(Unit.NONE)),
        chart("amp_scale", "AMP scale", scale, group="optimizer", y=y_axis(Unit.NONE), y2=skipped),
    ]


def _fit(fit: Fit | None) -> Json | None:
    if fit is None:
        return None
    return {
        "x": list(fit.x),
        "y": list(fit.y),
        "slope": fit.slope,
        "intercept": fit.intercept,
        "series": Stream.STEPS.value,
        "weight": "model/weight",
        "bias": "model/bias",
    }
