"""The charts and tiles of a run as JSON; the live chart component fetches the values. No I/O."""

from __future__ import annotations

from dashboard.charts.chart_spec import (
    LINES,
    NO_EPOCH,
    NO_SAMPLES,
    Json,
    chart,
    gpu_kind,
    gpu_traces,
    tiles,
    trace,
    training_gpu,
    y_axis,
)
from dashboard.charts.run_view import RunView, optimizer_keys, rate_keys
from stepscope.common.metrics import METRICS, Unit
from stepscope.run import RunKind

NO_COLLECTIVES = "No data yet: collectives are read at the end of a step, every 1 to 64 s."
COLLECTIVES_UNREAD = "Collectives are not read: {}."
COLLECTIVES_NOTE = "Collectives of rank 0."
WARM_UP_ROWS = 3  # First, slow steps of a run: drawn, but excluded from the scale of step time.
NO_LOSS = {
    RunKind.WATCH: "No loss yet: it is captured when the script calls backward() on a scalar.",
    RunKind.INIT: "No loss yet: pass it to each step, as in rec.step(loss=loss).",
}
WAITING = {
    RunKind.TRAINER: "sent. Waiting for the current step to end…",
    RunKind.WATCH: "sent. Waiting for the script's next optimizer step…",
    RunKind.INIT: "sent. Waiting for the script's next step…",
    RunKind.RECORD: "sent. Waiting for the recording…",
}
PERCENT = y_axis(Unit.PERCENT, fixed=(0.0, 100.0))


def layout(content: RunView) -> Json:
    """Return the component's layout.

    `metrics`: unit and label by key; `axis`: "time" without steps; `waiting`: until a command is
    answered; `absent`: what the run lacks, and why; `custom_note`: metrics without a chart.
    """
    recording = content.kind is RunKind.RECORD
    charts = _recording(content) if recording else _training(content)
    known = {metric.key: {"unit": metric.unit.value, "label": metric.label} for metric in METRICS}
    drawn = {line["metric"] for made in charts for line in made["traces"]}
    user_defined = {key: {"unit": "", "label": key} for key in sorted(drawn - known.keys())}
    return {
        "charts": charts,
        "kpis": tiles(content),
        "metrics": known | user_defined,
        "axis": "time" if recording else "step",
        "waiting": WAITING[content.kind],
        "absent": _absent(content, drawn),
        "no_epoch": NO_EPOCH.get(content.kind),
        "custom_note": _custom_note(content),
    }


def _training(content: RunView) -> list[Json]:
    charts = [_loss(content), _memory(content), _utilization(content), _step_time(content)]
    charts += [
        chart(f"custom:{key}", key.removeprefix("train/"), [trace(key)], group="custom")
        for key in content.custom
    ]
    if content.gpus:
        charts.append(_power(content, "more"))
    if gpu_kind(content) == "heat":
        charts.append(_memory_used(content, "more"))
    folded = [_throughput(content), *_flops(content), *_optimizer(content)]
    return [*charts, *folded, *communication(content)]


def _recording(content: RunView) -> list[Json]:
    gpus: list[Json] = []
    if content.gpus:
        gpus = [_utilization(content), _memory_used(content, "main"), _power(content, "main")]
    host_memory = [trace("host/mem_used", "peak"), trace("host/mem_total", "context")]
    return [
        *gpus,
        chart("host_memory", "Host memory", host_memory, y=y_axis(Unit.BYTES)),
        chart("host_cpu", "Host CPU", [trace("host/cpu")], y=PERCENT),
    ]


def _absent(content: RunView, drawn: set[str]) -> str | None:
    """Return what this run lacks, and why; None if nothing is missing."""
    texts = []
    if not content.gpus:
        texts.append(f"No GPU utilization, power or temperature: {content.gpu_reason}")
    if content.allocator_reason and content.kind is not RunKind.RECORD:
        texts.append(content.allocator_reason)
    missing: dict[tuple[str, str], list[str]] = {}
    for metric in METRICS:
        if metric.key in drawn:
            reasons = {gpu.index: gpu.missing.get(metric.key) for gpu in content.gpus}
            for reason in filter(None, dict.fromkeys(reasons.values())):
                lacking = [str(index) for index, why in reasons.items() if why == reason]
                whose = "" if len(lacking) == len(reasons) else f" of GPU {', '.join(lacking)}"
                missing.setdefault((reason, whose), []).append(metric.label)
    for (reason, whose), labels in missing.items():
        names = ", ".join(labels)
        texts.append(f"{names[0].upper()}{names[1:]}{whose}: {reason.removesuffix('.')}.")
    return " ".join(texts) or None


def _loss(content: RunView) -> Json:
    names, keys = content.optimizers, optimizer_keys("train/loss", len(content.optimizers))
    lines = [color for color in LINES if color != "orange"]  # the validation loss is orange
    traces = [
        trace(
            key,
            "ema",
            label=f"train ({names[i]} {i})" if len(keys) > 1 else "train",
            color=lines[i % len(lines)],
        )
        for i, key in enumerate(keys)
    ]
    scripted = content.kind is not RunKind.TRAINER  # a script may have no validation
    traces.append(trace("val/loss", "points", label="validation", optional=scripted))
    return chart("loss", "Loss", traces, loss=True, empty=NO_LOSS.get(content.kind))


def _memory(content: RunView) -> Json:
    """Return the memory chart, of many GPUs only for the training one."""
    y = y_axis(Unit.BYTES)
    if not content.has_cuda:
        traces = [trace(key, "peak") for key in ("process/rss", "process/peak_rss")]
        traces.append(trace("host/mem_used", "context"))
        return chart("memory", "Memory", traces, y=y)
    keys = ("memory/allocated", "memory/reserved", "memory/peak_allocated")
    traces = [trace(key, "peak") for key in keys]
    used = gpu_traces(content, "gpu/mem_used", "device used", style="peak")
    training = training_gpu(content)
    if training is not None:
        many = gpu_kind(content) == "heat"
        traces += [used[training.index]] if many else used
        traces.append(trace("gpu/mem_total", "context", gpu=training, label="total"))
    return chart("memory", "Memory", traces, y=y)


def _memory_used(content: RunView, group: str) -> Json:
    traces = gpu_traces(content, "gpu/mem_used", "used", style="peak")
    if len({gpu.memory_bytes for gpu in content.gpus}) == 1:  # one total line cannot show several
        traces.append(trace("gpu/mem_total", "context", gpu=content.gpus[0], label="total"))
    y, kind = y_axis(Unit.BYTES), gpu_kind(content)
    chart_id = "memory" if group == "main" else "gpu_memory"
    return chart(chart_id, "GPU memory", traces, y=y, kind=kind, group=group)


def _utilization(content: RunView) -> Json:
    if not content.gpus:
        note = "Process CPU: 100% = one core."
        traces = [trace("process/cpu"), trace("host/cpu")]
        return chart("utilization", "Utilization", traces, y=y_axis(Unit.PERCENT), note=note)
    traces = gpu_traces(content, "gpu/util", "GPU")
    if len(content.gpus) == 1:  # several GPUs: one line each stays readable
        traces += gpu_traces(content, "gpu/mem_util", "memory access", dash="dot")
    return chart("utilization", "Utilization", traces, y=PERCENT, kind=gpu_kind(content))


def _power(content: RunView, group: str) -> Json:
    traces = [
        *gpu_traces(content, "gpu/power", "power"),
        *gpu_traces(content, "gpu/temp", "temperature", axis="y2", dash="dot"),
        trace("gpu/power_limit", "context", gpu=training_gpu(content), label="limit"),
    ]
    y, y2, kind = y_axis(Unit.WATT), y_axis(Unit.CELSIUS, zero=False), gpu_kind(content)
    return chart("power", "Power and temperature", traces, y=y, y2=y2, kind=kind, group=group)


def _throughput(content: RunView) -> Json:
    traces, y2 = [trace("perf/samples_per_sec")], None
    if content.kind is not RunKind.TRAINER:  # only scripts report tokens
        traces.append(trace("perf/tokens_per_sec", optional=True, axis="y2", dash="dot"))
        y2 = y_axis(Unit.PER_SECOND)
    y, empty = y_axis(Unit.PER_SECOND), NO_SAMPLES.get(content.kind)
    return chart("throughput", "Throughput", traces, y=y, y2=y2, empty=empty, group="more")


def _flops(content: RunView) -> list[Json]:
    """Return the chart of model TFLOP/s and MFU; FLOPs of scripts are not counted."""
    if content.kind is not RunKind.TRAINER:
        return []
    note, empty = content.peak_reason, content.flops_reason
    traces, y2 = [trace("perf/tflops", optional=empty is None)], None
    if note is None:
        share = trace("perf/mfu", label="MFU", axis="y2", dash="dot", optional=True)
        traces, y2 = [*traces, share], y_axis(Unit.PERCENT)
    y = y_axis(Unit.TERAFLOPS)
    return [chart("flops", "Model FLOPs", traces, y=y, y2=y2, note=note, empty=empty, group="more")]


def _step_time(content: RunView) -> Json:
    scripted = content.kind is not RunKind.TRAINER  # its data wait may be unknown
    traces = [trace("perf/step_time"), trace("perf/data_wait", optional=scripted)]
    if content.has_cuda:
        traces += [trace("perf/h2d", optional=True), trace("perf/gpu_time", optional=True)]
    return chart("step_time", "Step time", traces, y=y_axis(Unit.SECOND), warm_up=WARM_UP_ROWS)


def _custom_note(content: RunView) -> str | None:
    left = content.custom_left
    if not left:
        return None
    more = "1 more metric is" if left == 1 else f"{left} more metrics are"
    return f"{more} recorded but not charted; `stepscope export` has all of them."


def _optimizer(content: RunView) -> list[Json]:
    """Return the optimizer's charts; each line is shown only if the run records it."""
    names, count = content.optimizers, len(content.optimizers)
    several = count > 1
    rates = []
    for place, (key, i, j) in enumerate(rate_keys(count)):
        owner = f"{names[i]} {i}" if several else ""
        label = ", ".join(filter(None, [owner, f"group {j}" if j else ""]))
        color = LINES[place % len(LINES)]
        rates.append(trace(key, label=label or None, color=color, optional=True))
    norms = [
        trace(key, "ema", label=label, color=LINES[i % len(LINES)], optional=True)
        for i, key in enumerate(optimizer_keys("train/grad_norm", count))
        for label in [f"{names[i]} {i}" if several else None]
    ]
    scale = [
        trace("train/amp_scale", optional=True),
        trace("train/amp_skipped", optional=True, axis="y2", dash="dot"),
    ]
    zero, count_axis = y_axis(Unit.NONE), y_axis(Unit.COUNT)
    return [
        chart("learning_rate", "Learning rate", rates, group="more"),
        chart("grad_norm", "Gradient norm", norms, group="more", y=zero),
        chart("amp_scale", "AMP scale", scale, group="more", y=zero, y2=count_axis),
    ]


def communication(content: RunView) -> list[Json]:
    """Return the charts of collectives; none for a single process."""
    if content.ranks == 1:
        return []
    reasons = content.collectives
    unread, untimed = reasons.get("comm/bytes"), reasons.get("comm/time")
    empty = NO_COLLECTIVES if unread is None else COLLECTIVES_UNREAD.format(unread)
    note = COLLECTIVES_NOTE
    if unread is None and untimed is not None:
        note += f" No times: {untimed}."
    timed = trace("comm/share", "points", axis="y2", dash="dot", optional=True)
    lines = [trace("comm/rate", "points"), timed]
    bandwidth, share = y_axis(Unit.BYTES_PER_SECOND), y_axis(Unit.PERCENT)
    return [
        chart(
            "communication",
            "Communication",
            lines,
            y=bandwidth,
            y2=share,
            empty=empty,
            group="more",
            note=note,
        )
    ]
