"""The sidebar: device, workload and settings as one checked RunConfig, kept in the URL.

Widget values live in `st.session_state` under `config_<field>`. A link sets them once, when the
session begins; from then on the URL follows the widgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from dashboard.format import escape_markdown
from dashboard.services import Devices
from stepscope.formatting import format_bytes
from trainer.config import (
    FIELDS,
    LIMITS,
    ConfigError,
    NanPolicy,
    Optimizer,
    Precision,
    Problem,
    RunConfig,
    Runner,
    Schedule,
    Workload,
    defaults,
)
from trainer.problems import TrainDevice, choice_problem, problems

WORKLOADS = {
    Workload.LINEAR: "Linear regression (1 → 1)",
    Workload.DIGITS_MLP: "Digits, MLP (real data)",
    Workload.DIGITS_CNN: "Digits, small CNN (real data)",
    Workload.FILL: "Fill the GPU: residual CNN",
}
PRECISIONS = {
    Precision.FP32: "fp32",
    Precision.TF32: "tf32",
    Precision.BF16: "bf16 AMP",
    Precision.FP16: "fp16 AMP",
}
OPTIMIZERS = {
    Optimizer.SGD: "SGD",
    Optimizer.ADAM: "Adam",
    Optimizer.ADAMW: "AdamW",
}
SCHEDULES = {
    Schedule.NONE: "Constant",
    Schedule.PLATEAU: "Reduce on plateau",
    Schedule.COSINE: "Cosine",
}
RUNNERS = {Runner.THREAD: "Thread of this server", Runner.PROCESS: "Child process"}
NAN_POLICIES = {NanPolicy.STOP: "Stop the run", NanPolicy.CONTINUE: "Mark it and go on"}
DEVICE_NAME = 15
"""Characters of a GPU's name that the box has room for beside its index."""
_KEPT = ("device", "precision", "seed", "runner", "nan_policy", "threads")
"""Fields that a change of workload leaves alone."""


def load(config: RunConfig) -> None:
    """Put a configuration into the sidebar; call it before the widgets are drawn."""
    for name in FIELDS:
        st.session_state[f"config_{name}"] = getattr(config, name)


def keep_settings() -> None:
    """Keep the settings while a page without the sidebar is shown.

    Streamlit forgets the value of a widget that was not drawn, but not one that a script has set.
    """
    for key in [f"config_{name}" for name in FIELDS]:
        if key in st.session_state:
            st.session_state[key] = st.session_state[key]


def load_link(found: Devices) -> list[Problem]:
    """Fill the sidebar from the URL, once a session; return what in the link could not be used."""
    if "config_device" not in st.session_state:
        params = {name: str(value) for name, value in st.query_params.items()}
        params.setdefault("device", found.devices[0].id)
        config, unusable = RunConfig.from_params(params)
        load(config)
        st.session_state.link_problems = unusable
    return list(st.session_state.link_problems)


def sidebar(
    found: Devices, checkpoints: Sequence[str], shown: str | None = None
) -> tuple[RunConfig, tuple[Problem, ...]]:
    """Draw the settings; return them and the reasons why they cannot start.

    `shown` names a run on the page that these settings have nothing to do with.
    """
    config = _current()
    with st.sidebar:
        st.markdown("#### New run")
        if shown is not None:
            st.caption(
                "These settings start a built-in workload. "
                f"They are not those of {escape_markdown(shown)}."
            )
        _device(config, found)
        _workload(config)
        _precision(config, found.devices)
        _training()
        with st.expander("Data loading", expanded=False):
            _loading(config, found.devices)
        with st.expander("More", expanded=False):
            _more(checkpoints)
    config = _current()
    return config, problems(config, found.devices)


def link_params(config: RunConfig, devices: Sequence[TrainDevice]) -> dict[str, str]:
    """Return the URL parameters that bring this configuration back."""
    params = config.to_params()
    # A URL without a device means the best one; any other must be named, the CPU as well.
    params.pop("device", None)
    if config.device != devices[0].id:
        params["device"] = config.device
    return params


def _current() -> RunConfig:
    state = st.session_state
    base = defaults(state["config_workload"], state["config_device"])
    # Streamlit forgets the value of a widget that was not drawn; its default stands in.
    values = {name: state.get(f"config_{name}", getattr(base, name)) for name in FIELDS}
    try:
        return RunConfig(**values)
    except ConfigError as error:
        st.sidebar.error(str(error))
        return base


def _reload_defaults() -> None:
    state = st.session_state
    kept = {name: state[f"config_{name}"] for name in _KEPT if f"config_{name}" in state}
    load(replace(defaults(state["config_workload"], state["config_device"]), **kept))


def _adapt_to_device() -> None:
    """Give a newly chosen device its loading defaults, and fp32, which all of them have."""
    state = st.session_state
    base = defaults(state["config_workload"], state["config_device"])
    for name in ("pin_memory", "non_blocking", "precision"):
        state[f"config_{name}"] = getattr(base, name)


def _device(config: RunConfig, found: Devices) -> None:
    names = {device.id: _device_name(device) for device in found.devices}
    if config.device not in names:  # a link from another machine
        names[config.device] = "Not in this machine"
    st.selectbox(
        "Device",
        list(names),
        format_func=names.__getitem__,
        key="config_device",
        on_change=_adapt_to_device,
        help="The CPU and every CUDA device, best first. A GPU is known by its UUID.",
    )
    for problem in problems(config, found.devices):
        if problem.field == "device":
            _reason(problem)
    for device in found.devices:
        if device.id == config.device:
            memory = format_bytes(device.memory_total).replace(" ", "\N{NO-BREAK SPACE}")
            st.caption(f"{escape_markdown(device.name)} · {memory}")
    if config.device != "cpu":
        st.caption(f"`{config.device}`")
    if found.cuda_reason:
        st.caption(f":material/info: {found.cuda_reason}")


def _device_name(device: TrainDevice) -> str:
    """Return what fits into the box; the whole name stands below it."""
    if device.cuda_index is None:
        return "CPU"
    name = device.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    if len(name) > DEVICE_NAME:
        name = f"{name[: DEVICE_NAME - 1].rstrip()}…"
    return f"cuda:{device.cuda_index} · {name}"


def _workload(config: RunConfig) -> None:
    st.selectbox(
        "Workload",
        list(WORKLOADS),
        format_func=WORKLOADS.__getitem__,
        key="config_workload",
        on_change=_reload_defaults,
        help="Choosing a workload sets its recommended epochs, batch size and learning rate.",
    )
    if config.workload is Workload.FILL:
        st.caption("The images are synthetic. Width and image size scale the memory it takes.")
        columns = st.columns(2)
        with columns[0]:
            _number("width", "Width", "Channels of the first stage; memory grows with it.")
        with columns[1]:
            _number("image_size", "Image size", "Pixels a side; memory grows with its square.")


def _precision(config: RunConfig, devices: Sequence[TrainDevice]) -> None:
    refused = {p: choice_problem("precision", p, config, devices) for p in Precision}
    possible = [p for p in Precision if refused[p] is None or p is config.precision]
    st.selectbox(
        "Precision",
        possible,
        format_func=PRECISIONS.__getitem__,
        key="config_precision",
        help="fp32 and tf32 compute in single precision; bf16 and fp16 are automatic mixed "
        "precision, fp16 with a gradient scaler that is unscaled before clipping.",
    )
    # Streamlit cannot disable one option of a list: what the device lacks is named here.
    for precision, problem in refused.items():
        if problem is not None:
            _reason(problem, PRECISIONS[precision])


def _training() -> None:
    columns = st.columns(2)
    with columns[0]:
        _number("epochs", "Epochs", "Passes over the training data.")
        _number("learning_rate", "Learning rate", "The optimizer's initial learning rate.")
        _number(
            "clip_norm", "Clip norm", "Largest 2-norm of all gradients together; 0 does not clip."
        )
    with columns[1]:
        _number("batch_size", "Batch size", "Samples a step.")
        _select(
            "optimizer",
            "Optimizer",
            OPTIMIZERS,
            "How gradients change the weights; SGD has momentum 0.9.",
        )
        _number("seed", "Seed", "The same seed on a CPU gives the same losses, bit for bit.")


def _loading(config: RunConfig, devices: Sequence[TrainDevice]) -> None:
    _toggle(
        "pin_memory",
        "pin_memory",
        config,
        devices,
        "Load batches into page-locked memory, from which a GPU copies faster.",
    )
    _toggle(
        "non_blocking",
        "non_blocking copies",
        config,
        devices,
        "Let the copy to the GPU overlap with computing; needs pin_memory.",
    )
    _number(
        "num_workers",
        "num_workers",
        "Loader processes; 0 loads in the training thread, "
        "which is fastest for data that fit in memory. With pin_memory the training thread "
        "copies each batch of a loader once more.",
    )
    refused = choice_problem("prefetch_factor", 3, config, devices)
    _number(
        "prefetch_factor",
        "prefetch_factor",
        "Batches that each worker loads ahead.",
        disabled=refused is not None,
    )
    if refused is not None:
        _reason(refused)


def _more(checkpoints: Sequence[str]) -> None:
    _select(
        "schedule",
        "Learning rate schedule",
        SCHEDULES,
        "Cosine falls to 0 over the run; plateau halves when validation stalls.",
    )
    st.toggle(
        "Fused optimizer",
        key="config_fused",
        help="One kernel for all parameters, where the optimizer has one.",
    )
    _select("nan_policy", "If the loss is NaN", NAN_POLICIES, "A NaN or infinite training loss.")
    _select(
        "runner",
        "Runner",
        RUNNERS,
        "A child process starts slower, but the page cannot slow it down.",
    )
    _number("threads", "CPU threads", "Threads of one CPU operation; 0 is half of the cores.")
    current = st.session_state.get("config_resume", "")
    options = ["", *dict.fromkeys([*([current] if current else []), *checkpoints])]
    st.selectbox(
        "Resume from",
        options,
        key="config_resume",
        format_func=lambda name: name or "Nothing: start anew",
        help="A checkpoint of an earlier run with the same workload; epochs count on from it. Its "
        "weights, optimizer state, schedule and random numbers go on; a learning rate that you "
        "change counts from here on.",
    )


def _number(name: str, label: str, text: str, *, disabled: bool = False) -> None:
    low, high = LIMITS[name]
    whole = isinstance(getattr(RunConfig(), name), int)
    small = name == "learning_rate"
    bounds: dict[str, Any] = {
        "min_value": int(low) if whole else float(low),
        "max_value": int(high) if whole else float(high),
        "step": 1 if whole else 1e-4 if small else 0.1,
        "format": "%d" if whole else "%.3g" if small else "%.2f",
    }
    st.number_input(label, key=f"config_{name}", help=text, disabled=disabled, **bounds)


def _select(name: str, label: str, options: dict[Any, str], text: str) -> None:
    st.selectbox(
        label, list(options), format_func=options.__getitem__, key=f"config_{name}", help=text
    )


def _toggle(
    name: str, label: str, config: RunConfig, devices: Sequence[TrainDevice], text: str
) -> None:
    refused = choice_problem(name, True, config, devices)
    # It stays usable while it is on, so that it can be switched off.
    stuck = bool(getattr(config, name))
    st.toggle(label, key=f"config_{name}", help=text, disabled=refused is not None and not stuck)
    if refused is not None:
        _reason(refused)


def _reason(problem: Problem, name: str | None = None) -> None:
    prefix = f"{name}: " if name else ""
    st.caption(f":material/block: {prefix}{problem.reason}. {problem.remedy}.")
