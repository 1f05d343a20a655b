"""Which charts and number tiles a run shows, as JSON for the live chart component.

Pure: run facts in, a layout out. The samples themselves never pass here; the component in the
browser fetches them by the series and metric names that the layout gives.
"""

from __future__ import annotations

from dashboard.charts.facts import Fit, RunFacts, loss_keys, norm_keys, rate_keys
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

NORMS = ("blue", "orange", "pink", "amber", "grey", "green")
"""Colours of the gradient norms, an optimizer each."""
WARM_UP_ROWS = 3
"""First steps of a run, slow by nature: drawn, but they do not set the scale of step time."""
NO_LOSS = {
    RunKind.WATCH: "No loss yet: it is read where the script calls backward() on a scalar.",
    RunKind.INIT: "No loss yet: give it to each step, as in rec.step(loss=loss).",
}
WAITING = {
    RunKind.TRAINER: "Sent. Waiting for the training loop to reach the end of its step…",
    RunKind.WATCH: "Sent. Waiting for the script's next optimizer step…",
    RunKind.INIT: "Sent. Waiting for the script's next step…",
    RunKind.RECORD: "Sent. Waiting for the recording…",
}


def layout(facts: RunFacts) -> Json:
    """Return the component's layout: `charts`, `kpis`, `metrics` (unit, label by key), `fit`.

    `axis` is "time" where a run has no steps; `waiting` is said until a command is answered;
    `custom_note` says what of the script's own metrics has no chart.
    """
    recording = facts.kind is RunKind.RECORD
    charts = _machine(facts) if recording else [*_training(facts), *_custom(facts), *_more(facts)]
    known = {m.key: {"unit": m.unit.value, "label": m.label} for m in METRICS}
    drawn = {line["metric"] for made in charts for line in made["traces"]}
    own = {key: {"unit": "", "label": key} for key in sorted(drawn - known.keys())}
    return {
        "charts": charts,
        "kpis": tiles(facts),
        "metrics": known | own,
        "fit": _fit(facts.fit),
        "axis": "time" if recording else "step",
        "waiting": WAITING[facts.kind],
        "custom_note": _custom_note(facts),
    }


def _training(facts: RunFacts) -> list[Json]:
    charts = [_loss(facts), _memory(facts), _utilisation(facts), _throughput(facts)]
    if facts.gpus:
        charts.insert(3, _power(facts))
    if facts.fit is not None:
        charts.insert(1, chart("fit", "Fit", [], kind="fit"))
    return [*charts, _step_time(facts)]


def _machine(facts: RunFacts) -> list[Json]:
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
    if not facts.gpus:
        host[0]["note"] = f"No GPU charts: {facts.gpu_reason}"
        return host
    sizes = {gpu.memory_bytes for gpu in facts.gpus}
    used = [
        trace("gpu/mem_used", "envelope", gpu=gpu, label=f"used{suffix}", colour=colour)
        for gpu, suffix, colour in numbered(facts.gpus)
    ]
    if len(sizes) == 1:  # else one line would be the total of some of them only
        used.append(trace("gpu/mem_total", "context", gpu=facts.gpus[0], label="total"))
    memory = chart("memory", "GPU memory", used, y=y_axis(Unit.BYTES))
    return [_utilisation(facts), memory, _power(facts), *host]


def _loss(facts: RunFacts) -> Json:
    names, keys = facts.optimizers, loss_keys(len(facts.optimizers))
    lines = ("blue", "green", "pink", "amber", "grey")
    traces = [
        trace(
            key,
            "ema",
            label=f"train ({names[i]} {i})" if len(keys) > 1 else "train",
            colour=lines[i % len(lines)],
        )
        for i, key in enumerate(keys)
    ]
    scripted = facts.kind is not RunKind.TRAINER  # which need not validate at all
    traces.append(trace("val/loss", "points", label="validation", optional=scripted))
    return chart("loss", "Loss", traces, loss=True, empty=NO_LOSS.get(facts.kind))


def _memory(facts: RunFacts) -> Json:
    if not facts.has_cuda:
        traces = [trace(key, "envelope") for key in ("process/rss", "process/peak_rss")]
        traces.append(trace("host/mem_used", "context"))
        return chart("memory", "Memory", traces, y=y_axis(Unit.BYTES), note=facts.allocator_reason)
    keys = ("memory/allocated", "memory/reserved", "memory/peak_allocated")
    traces = [trace(key, "envelope") for key in keys]
    for gpu, suffix, colour in numbered(facts.gpus):
        used = trace(
            "gpu/mem_used", "envelope", gpu=gpu, label=f"device used{suffix}", colour=colour
        )
        traces.append(used)
    training = training_gpu(facts)
    if training is not None:
        traces.append(trace("gpu/mem_total", "context", gpu=training, label="total"))
    note = None if facts.gpus else f"Device used and total are not known: {facts.gpu_reason}"
    return chart("memory", "Memory", traces, y=y_axis(Unit.BYTES), note=note)


def _utilisation(facts: RunFacts) -> Json:
    traces: list[Json] = []
    for gpu, suffix, colour in numbered(facts.gpus):
        traces.append(trace("gpu/util", "mean", gpu=gpu, label=f"GPU{suffix}", colour=colour))
        if len(facts.gpus) == 1:  # one line a GPU stays readable with eight of them
            traces.append(trace("gpu/mem_util", "mean", gpu=gpu, dash="dot"))
    if traces:
        y = y_axis(Unit.PERCENT, fixed=(0.0, 100.0))
        return chart("utilisation", "Utilisation", traces, y=y)
    traces = [trace("process/cpu", "mean"), trace("host/cpu", "mean")]
    note = (
        "Process CPU: 100 % is one core. No GPU utilisation, power or temperature: "
        f"{facts.gpu_reason}"
    )
    return chart("utilisation", "Utilisation", traces, y=y_axis(Unit.PERCENT), note=note)


def _power(facts: RunFacts) -> Json:
    traces: list[Json] = []
    for gpu, suffix, colour in numbered(facts.gpus):
        traces.append(trace("gpu/power", "mean", gpu=gpu, label=f"power{suffix}", colour=colour))
        temperature = trace(
            "gpu/temp",
            "mean",
            gpu=gpu,
            label=f"temperature{suffix}",
            colour=colour,
            axis="y2",
            dash="dot",
        )
        traces.append(temperature)
    training = training_gpu(facts)
    if training is not None:
        traces.append(trace("gpu/power_limit", "context", gpu=training, label="limit"))
    y2 = y_axis(Unit.CELSIUS, zero=False)
    return chart("power", "Power and temperature", traces, y=y_axis(Unit.WATT), y2=y2)


def _throughput(facts: RunFacts) -> Json:
    traces = [trace("perf/samples_per_sec", "mean")]
    y, y2 = y_axis(Unit.PER_SECOND), None
    if facts.kind is not RunKind.TRAINER:  # only a script can say what its tokens are
        traces.append(trace("perf/tokens_per_sec", "mean", optional=True, axis="y2", dash="dot"))
        y2 = y_axis(Unit.PER_SECOND)
    return chart("throughput", "Throughput", traces, y=y, y2=y2, empty=NO_SAMPLES.get(facts.kind))


def _step_time(facts: RunFacts) -> Json:
    scripted = facts.kind is not RunKind.TRAINER  # whose wait may not be seen
    waits = trace("perf/data_wait", "mean", optional=scripted)
    traces = [trace("perf/step_time", "mean"), waits]
    if facts.has_cuda and "perf/h2d" in BY_KEY:
        traces.append(trace("perf/h2d", "mean", optional=True))
    return chart("step_time", "Step time", traces, y=y_axis(Unit.SECOND), warm_up=WARM_UP_ROWS)


def _custom(facts: RunFacts) -> list[Json]:
    return [
        chart(f"custom:{key}", key.removeprefix("train/"), [trace(key, "mean")], group="custom")
        for key in facts.custom
    ]


def _custom_note(facts: RunFacts) -> str | None:
    left = facts.custom_left
    if not left:
        return None
    more = "1 more metric is" if left == 1 else f"{left} more metrics are"
    return f"{more} recorded without a chart; `stepscope export` gives all of them."


def _more(facts: RunFacts) -> list[Json]:
    """What the optimizer does; each chart and line shows only where the run records it."""
    names, count = facts.optimizers, len(facts.optimizers)
    several = count > 1
    rates = []
    for place, (key, i, j) in enumerate(rate_keys(count)):
        owner = f"{names[i]} {i}" if several else ""
        label = ", ".join(filter(None, [owner, f"group {j}" if j else ""]))
        colour = ("blue", "green", "orange", "pink", "amber", "grey")[place % 6]
        rates.append(trace(key, "mean", label=label or None, colour=colour, optional=True))
    norms = [
        trace(
            key,
            "ema",
            label=f"{names[i]} {i}" if several else None,
            colour=NORMS[i % len(NORMS)],
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
