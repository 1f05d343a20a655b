"""The charts and tiles of a run as JSON; the live chart component fetches the values. No I/O."""

from __future__ import annotations

from dashboard.charts.chart_spec import (
    LINES,
    NO_EPOCH,
    NO_SAMPLES,
    Json,
    chart,
    gpu_traces,
    tiles,
    trace,
    training_gpu,
    y_axis,
)
from dashboard.charts.run_view import RunView, optimizer_keys, rate_keys
from stepscope.common.metrics import METRICS, Unit
from stepscope.run import RunKind

WARM_UP_ROWS = 3  # First, slow steps of a run: drawn, but excluded from the scale of step time.
NO_LOSS = {
    RunKind.WATCH: "No loss yet: it is captured when the script calls backward() on a scalar.",
    RunKind.INIT: "No loss yet: pass it to each step, as in rec.step(loss=loss).",
}
WAITING = {
    RunKind.TRAINER: "sent. Waiting for the current step to end…",
    RunKind.WATCH: "sent. Waiting for the script's next optimizer step…",
    RunKind.INIT: "sent. Waiting for the script's next step…",
}
PERCENT = y_axis(Unit.PERCENT, fixed=(0.0, 100.0))


def layout(content: RunView) -> Json:
    """Return the component's layout.

    `metrics`: unit and label by key; `waiting`: until a command is answered; `absent`: what the run
    lacks, and why; `custom_note`: metrics without a chart.
    """
    charts = _charts(content)
    drawn = {line["metric"] for made in charts for line in made["traces"]}
    metrics = {key: {"unit": "", "label": key} for key in sorted(drawn)}
    for metric in METRICS:
        metrics[metric.key] = {"unit": metric.unit.value, "label": metric.label}
    return {
        "charts": charts,
        "kpis": tiles(content),
        "metrics": metrics,
        "waiting": WAITING[content.kind],
        "absent": _absent(content, drawn),
        "no_epoch": NO_EPOCH.get(content.kind),
        "custom_note": _custom_note(content),
    }


def _charts(content: RunView) -> list[Json]:
    charts = [_loss(content), _memory(content), _utilization(content), _step_time(content)]
    for key in content.custom:
        title = key.removeprefix("train/")
        charts.append(chart(f"custom:{key}", title, [trace(key)], group="custom"))
    if content.gpus:
        charts.append(_power(content))
    if len(content.gpus) > 1:
        used = gpu_traces(content, "gpu/mem_used", "used", style="peak")
        charts.append(chart("gpu_memory", "GPU memory", used, y=y_axis(Unit.BYTES), group="more"))
    charts.append(_throughput(content))
    if content.kind is RunKind.TRAINER:  # FLOPs of scripts are not counted
        charts.append(_flops(content))
    charts += [_learning_rates(content), _gradient_norms(content), _amp_scale()]
    return charts


def _absent(content: RunView, drawn: set[str]) -> str | None:
    """Return what this run lacks, and why; None if nothing is missing."""
    texts = []
    if not content.gpus:
        texts.append(f"No GPU utilization, power or temperature: {content.gpu_reason}")
    if content.allocator_reason:
        texts.append(content.allocator_reason)
    labels: dict[tuple[str, str], list[str]] = {}  # By reason and GPUs.
    for metric in METRICS:
        lacking: dict[str, list[str]] = {}
        for gpu in content.gpus if metric.key in drawn else ():
            if metric.key in gpu.missing:
                lacking.setdefault(gpu.missing[metric.key], []).append(str(gpu.index))
        for reason, indices in lacking.items():
            gpus = "" if len(indices) == len(content.gpus) else f" of GPU {', '.join(indices)}"
            labels.setdefault((reason, gpus), []).append(metric.label)
    for (reason, gpus), names in labels.items():
        text = f"{', '.join(names)}{gpus}: {reason.removesuffix('.')}."
        texts.append(text[0].upper() + text[1:])
    return " ".join(texts) or None


def _custom_note(content: RunView) -> str | None:
    left = content.custom_left
    if not left:
        return None
    more = "1 more metric is" if left == 1 else f"{left} more metrics are"
    return f"{more} recorded but not charted; `stepscope export` has all of them."


def _line_color(index: int) -> str:
    return LINES[index % len(LINES)]


def _loss(content: RunView) -> Json:
    colors = [color for color in LINES if color != "orange"]  # the validation loss is orange
    names = content.optimizers
    traces = []
    for index, key in enumerate(optimizer_keys("train/loss", len(names))):
        label = f"train ({names[index]} {index})" if len(names) > 1 else "train"
        traces.append(trace(key, "ema", label=label, color=colors[index % len(colors)]))
    scripted = content.kind is not RunKind.TRAINER  # a script may have no validation
    traces.append(trace("val/loss", "points", label="validation", optional=scripted))
    return chart("loss", "Loss", traces, loss=True, empty=NO_LOSS.get(content.kind))


def _memory(content: RunView) -> Json:
    if content.has_cuda:
        keys = ("memory/allocated", "memory/reserved", "memory/peak_allocated")
        traces = [trace(key, "peak") for key in keys]
        training = training_gpu(content)
        if training is not None:
            traces.append(trace("gpu/mem_used", "peak", gpu=training, label="device used"))
            traces.append(trace("gpu/mem_total", "context", gpu=training, label="total"))
    else:
        traces = [trace(key, "peak") for key in ("process/rss", "process/peak_rss")]
        traces.append(trace("host/mem_used", "context"))
    return chart("memory", "Memory", traces, y=y_axis(Unit.BYTES))


def _utilization(content: RunView) -> Json:
    if not content.gpus:
        note = "Process CPU: 100% = one core."
        traces = [trace("process/cpu"), trace("host/cpu")]
        return chart("utilization", "Utilization", traces, y=y_axis(Unit.PERCENT), note=note)
    traces = gpu_traces(content, "gpu/util", "GPU")
    if len(content.gpus) == 1:  # with one line for each of more GPUs the chart stays readable
        traces += gpu_traces(content, "gpu/mem_util", "memory access", dash="dot")
    return chart("utilization", "Utilization", traces, y=PERCENT)


def _power(content: RunView) -> Json:
    traces = [
        *gpu_traces(content, "gpu/power", "power"),
        *gpu_traces(content, "gpu/temp", "temperature", axis="y2", dash="dot"),
        trace("gpu/power_limit", "context", gpu=training_gpu(content), label="limit"),
    ]
    return chart(
        "power",
        "Power and temperature",
        traces,
        y=y_axis(Unit.WATT),
        y2=y_axis(Unit.CELSIUS, zero=False),
        group="more",
    )


def _throughput(content: RunView) -> Json:
    traces, y2 = [trace("perf/samples_per_sec")], None
    if content.kind is not RunKind.TRAINER:  # only scripts report tokens
        traces.append(trace("perf/tokens_per_sec", optional=True, axis="y2", dash="dot"))
        y2 = y_axis(Unit.PER_SECOND)
    return chart(
        "throughput",
        "Throughput",
        traces,
        y=y_axis(Unit.PER_SECOND),
        y2=y2,
        empty=NO_SAMPLES.get(content.kind),
        group="more",
    )


def _flops(content: RunView) -> Json:
    """Return the chart of model TFLOP/s and MFU."""
    traces, y2 = [trace("perf/tflops", optional=content.flops_reason is None)], None
    if content.peak_reason is None:
        traces.append(trace("perf/mfu", label="MFU", axis="y2", dash="dot", optional=True))
        y2 = y_axis(Unit.PERCENT)
    return chart(
        "flops",
        "Model FLOPs",
        traces,
        y=y_axis(Unit.TERAFLOPS),
        y2=y2,
        note=content.peak_reason,
        empty=content.flops_reason,
        group="more",
    )


def _step_time(content: RunView) -> Json:
    scripted = content.kind is not RunKind.TRAINER  # its data wait may be unknown
    traces = [trace("perf/step_time"), trace("perf/data_wait", optional=scripted)]
    if content.has_cuda:
        traces += [trace("perf/h2d", optional=True), trace("perf/gpu_time", optional=True)]
    return chart("step_time", "Step time", traces, y=y_axis(Unit.SECOND), warm_up=WARM_UP_ROWS)


def _learning_rates(content: RunView) -> Json:
    """Return the chart of learning rates; each line is shown only if the run records it."""
    names = content.optimizers
    traces = []
    for place, (key, optimizer, group) in enumerate(rate_keys(len(names))):
        label = [f"{names[optimizer]} {optimizer}"] if len(names) > 1 else []
        if group:
            label.append(f"group {group}")
        text = ", ".join(label) or None
        traces.append(trace(key, label=text, color=_line_color(place), optional=True))
    return chart("learning_rate", "Learning rate", traces, group="more")


def _gradient_norms(content: RunView) -> Json:
    names = content.optimizers
    traces = []
    for index, key in enumerate(optimizer_keys("train/grad_norm", len(names))):
        label = f"{names[index]} {index}" if len(names) > 1 else None
        traces.append(trace(key, "ema", label=label, color=_line_color(index), optional=True))
    return chart("grad_norm", "Gradient norm", traces, group="more", y=y_axis(Unit.NONE))


def _amp_scale() -> Json:
    traces = [
        trace("train/amp_scale", optional=True),
        trace("train/amp_skipped", optional=True, axis="y2", dash="dot"),
    ]
    y, y2 = y_axis(Unit.NONE), y_axis(Unit.COUNT)
    return chart("amp_scale", "AMP scale", traces, group="more", y=y, y2=y2)
