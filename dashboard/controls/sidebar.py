"""The sidebar: device, workload and settings as one checked RunConfig, kept in the URL.

Widget values live in `st.session_state` under `config_<field>`, and under SETTINGS, which other
pages keep. A link sets them once, when the session begins; then the URL follows the widgets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard.controls import config_widgets as widgets
from dashboard.controls.sidebar_groups import PLACES, groups
from dashboard.format import escape_markdown, note
from dashboard.services import Devices, missing_package
from stepscope.common.config_issue import ConfigError, ConfigIssue
from stepscope.common.formatting import format_bytes
from stepscope.gpu.source import is_simulated
from trainer import config as fields
from trainer.training.config_validation import TrainDevice, validate

PRACTICE = {"workload": "memory_stress", "epochs": "100", "width": "8", "image_size": "64"}
"""First settings on a simulated GPU: *Empty cache* frees memory, and a CPU computes the steps."""
SETTINGS = "settings"  # Session state: the value of every field of RunConfig by its name.
_OF_WORKLOAD = ("lr_scheduler", "lr_warmup_steps", "resume_from", "channels_last")
"""Settings of the groups that a change of workload resets."""
_KEPT = ("device", "precision", *(name for name in PLACES if name not in _OF_WORKLOAD))


@dataclass(frozen=True, slots=True)
class NewRunForm:
    """The sidebar's settings, why they cannot start, and the containers for buttons."""

    config: fields.RunConfig
    problems: tuple[ConfigIssue, ...]
    estimate: DeltaGenerator  # Below the settings that are always visible.
    start: DeltaGenerator  # At the end.


def keep(config: fields.RunConfig) -> None:
    """Put a configuration into the sidebar of the next page."""
    st.session_state[SETTINGS] = {name: getattr(config, name) for name in fields.SETTINGS}


def load(config: fields.RunConfig) -> None:
    """Put a configuration into the sidebar, before the widgets are drawn."""
    keep(config)
    _set_widgets()


def reset() -> None:
    """Put the defaults of the workload and device into the sidebar, in a callback."""
    load(_defaults())


def _defaults() -> fields.RunConfig:
    """Return the defaults of the chosen workload and device: PRACTICE on a simulated GPU."""
    workload, device = st.session_state["config_workload"], st.session_state["config_device"]
    if is_simulated(device) and workload == PRACTICE["workload"]:
        return fields.RunConfig.from_params(PRACTICE | {"device": device})[0]
    return fields.defaults(workload, device)


def _set_widgets() -> None:
    for name, value in st.session_state[SETTINGS].items():
        st.session_state[f"config_{name}"] = value


def load_settings(found: Devices) -> list[ConfigIssue]:
    """Fill the sidebar from the URL, later from its settings; return the problems of the link.

    Streamlit drops the values of widgets that are not drawn, and the browser shows the default of
    one that is drawn again unless the script sets its value in the same run.
    """
    if SETTINGS in st.session_state:
        if st.session_state.arrived:
            _set_widgets()
    else:
        params = {name: str(value) for name, value in st.query_params.items()}
        params.setdefault("device", found.devices[0].id)
        if is_simulated(params["device"]) and "workload" not in params:
            params = PRACTICE | params
        config, unusable = fields.RunConfig.from_params(params)
        load(config)
        st.session_state.link_problems = unusable
    return list(st.session_state.link_problems)


def sidebar(
    found: Devices, title: str, about: str | None = None, checkpoints: Sequence[str] = ()
) -> NewRunForm:
    """Draw the settings of a built-in workload; `about` is Markdown below the title."""
    config, _ = _current()
    with st.sidebar:
        st.markdown(f"#### {title}")
        if about is not None:
            st.caption(about)
        _device(config, found)
        _workload(config, found)
        state = widgets.SidebarState(config, found.devices)
        widgets.supported_select("precision", state)
        columns = st.columns(2)
        with columns[0]:
            widgets.number("batch_size")
            widgets.number("learning_rate")
        with columns[1]:
            widgets.number("epochs")
            widgets.select("optimizer", fields.SETTINGS["optimizer"].choices)
        estimate = st.container()
        groups(state, checkpoints)
        start = st.container()
        help_text = "Restore the recommended settings of this workload."
        st.button("Reset to defaults", "reset_settings", help_text, on_click=reset, type="tertiary")
    config, invalid = _current()
    st.session_state[SETTINGS] = _values(config)
    problems = (*invalid, *problems_of(config, found.devices))
    return NewRunForm(config, problems, estimate, start)


def problems_of(
    config: fields.RunConfig, devices: Sequence[TrainDevice]
) -> tuple[ConfigIssue, ...]:
    """Return why a configuration cannot run on this machine."""
    return (*validate(config, devices), *widgets.absent(config))


def link_params(config: fields.RunConfig, devices: Sequence[TrainDevice]) -> dict[str, str]:
    params = config.to_params()
    # A URL without a device means the best one; any other must be named, the CPU as well.
    params.pop("device", None)
    if config.device != devices[0].id:
        params["device"] = config.device
    if is_simulated(config.device):  # without it the link means PRACTICE
        params["workload"] = config.workload
    return params


def write_link(config: fields.RunConfig, devices: Sequence[TrainDevice]) -> None:
    """Put the settings into the URL, next to the parameters of the page."""
    params = link_params(config, devices)
    for name in fields.SETTINGS:
        if name not in params:
            st.query_params.pop(name, None)
        elif st.query_params.get(name) != params[name]:
            st.query_params[name] = params[name]


def _current() -> tuple[fields.RunConfig, tuple[ConfigIssue, ...]]:
    """Return the widgets' values, defaults for invalid ones, and the issues of those."""
    state = st.session_state
    base = fields.defaults(state["config_workload"], state["config_device"])
    values = _values(base)
    invalid: list[ConfigIssue] = []
    while True:
        try:
            return fields.RunConfig(**values), tuple(invalid)
        except ConfigError as error:
            invalid.append(error.problem)
            values[error.problem.field] = getattr(base, error.problem.field)


def _values(base: fields.RunConfig) -> dict[str, Any]:
    """Return the widgets' values, `base`'s if Streamlit dropped one; torchrun runs DDP and FSDP."""
    state = st.session_state
    values = {name: state.get(f"config_{name}", getattr(base, name)) for name in fields.SETTINGS}
    distributed = values["strategy"] in (fields.Strategy.DDP, fields.Strategy.FSDP)
    if distributed != (values["runner"] == fields.Runner.TORCHRUN):
        values["runner"] = fields.Runner.TORCHRUN if distributed else base.runner
    return values


def _reload_defaults(devices: Sequence[TrainDevice]) -> None:
    """Load the defaults of a newly chosen workload, and reset unsupported settings."""
    state = st.session_state
    kept = {name: state[f"config_{name}"] for name in _KEPT if f"config_{name}" in state}
    load(replace(_defaults(), **kept))
    _reset_unsupported(devices)


def _adapt_to_device(devices: Sequence[TrainDevice]) -> None:
    """Load the loading defaults of a newly chosen device, and reset unsupported settings."""
    state = st.session_state
    base = fields.defaults(state["config_workload"], state["config_device"])
    for name in ("pin_memory", "non_blocking", "precision"):
        state[f"config_{name}"] = getattr(base, name)
    _reset_unsupported(devices)


def _reset_unsupported(devices: Sequence[TrainDevice]) -> None:
    config, _ = _current()
    base = fields.defaults(config.workload, config.device)
    for problem in validate(config, devices):
        if problem.field not in ("device", "workload"):
            st.session_state[f"config_{problem.field}"] = getattr(base, problem.field)


def _device(config: fields.RunConfig, found: Devices) -> None:
    names = {device.id: device_name(device) for device in found.devices}
    if config.device not in names:  # a link from another machine
        names[config.device] = "Not on this machine"
    widgets.select("device", names, functools.partial(_adapt_to_device, found.devices))
    for device in found.devices:
        if device.id == config.device:
            memory = format_bytes(device.memory_total).replace(" ", "\N{NO-BREAK SPACE}")
            st.caption(f"{escape_markdown(device.name)} · {memory}")
    if config.device != "cpu":
        st.caption(f"`{config.device}`")
    if missing_package() is not None:
        return  # the button Start run has the reason and the fix
    for problem in validate(config, found.devices):
        if problem.field == "device":
            widgets.problem_caption(problem)
    if found.cuda_reason:
        note("info", found.cuda_reason)


def device_name(device: TrainDevice) -> str:
    """Return the label of a device in a list."""
    if device.cuda_index is None:
        return "CPU"
    return f"cuda:{device.cuda_index} · {device.name.removeprefix('NVIDIA ')}"


def _workload(config: fields.RunConfig, found: Devices) -> None:
    names = fields.SETTINGS["workload"].choices
    offered = {one: names[one] for one in widgets.offered(config.workload)}
    widgets.select("workload", offered, functools.partial(_reload_defaults, found.devices))
    widgets.workload_fields(config)
