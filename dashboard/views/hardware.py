"""The Hardware page: this machine and every GPU of it."""

from __future__ import annotations

import time

import streamlit as st

from dashboard import services
from dashboard.format import code_between_backticks, escape_markdown, pick
from dashboard.machine.tables import (
    gpu_rows,
    history_figure,
    host_facts,
    process_rows,
    value_rows,
)
from dashboard.services import Services
from dashboard.views import parts
from stepscope.common.metrics import BY_KEY
from stepscope.gpu.machine_state import MachineState

NO_GPU = (
    "Only the host is shown until there is a GPU; checked every 30 s. Training on the CPU needs no "
    "GPU. To use one, install its driver so that `nvidia-smi` lists it; start containers with "
    "`--gpus all`. The command `stepscope doctor` lists what is missing."
)
DIFFERENCE = (
    "Utilization is the share of time with at least one kernel running, however small: at 100% "
    "most of the chip may be idle. SM, tensor and DRAM activity show how much of it worked "
    "(Hopper and newer)."
)
# Of the chart. A string here would be drawn: Streamlit shows the expressions of a page's script.
DRAWN = (
    "gpu/util",
    "gpu/sm_active",
    "gpu/tensor_active",
    "gpu/dram_active",
    "gpu/mem_used",
    "gpu/power",
    "gpu/temp",
    "gpu/sm_clock",
    "gpu/pcie_tx",
    "gpu/pcie_rx",
    "gpu/nvlink_tx",
    "gpu/nvlink_rx",
)
COLUMNS = {
    "GPU": parts.text(pinned=True, help="nvidia-smi's index; torch may number GPUs differently."),
    "Torch": parts.text(help="torch's name of the GPU in this server."),
    "Health": parts.text(width="medium"),
    "Utilization": st.column_config.ProgressColumn(
        min_value=0, max_value=100, format="%.0f%%", help=DIFFERENCE
    ),
    "Memory": st.column_config.ProgressColumn(
        min_value=0, max_value=100, format="%.0f%%", help="All processes, by the driver."
    ),
    "Temperature": parts.number(format="%.0f °C"),
    "Power": parts.number(format="%.0f W"),
    "SM clock": parts.number(format="%,.0f MHz"),
    "Processes": parts.text(width="large"),
}


# A training thread of the server keeps 0.98 of its steps/s (95% CI 0.97 to 0.99) while this page is
# open: digits CNN, 297 redraws with 8 rows, two busy cores. A redraw takes 15 ms of CPU.
@st.fragment(run_every="2s")
def machine_section(server: Services) -> None:
    """Draw the host, a row per GPU, one chart, and on request everything on one GPU."""
    seen = server.machine.read()
    if seen.trouble is not None:
        parts.warning(seen.trouble)
    if seen.view is None:
        return
    host = seen.view.host
    st.markdown(f"**{escape_markdown(host.name)}**")
    st.caption(escape_markdown(" · ".join(host_facts(host))))
    if seen.view.reason is not None:
        st.info(f"**No GPU found.** {code_between_backticks(seen.view.reason)} {NO_GPU}")
        return
    ours = server.run_processes()
    rows = gpu_rows(seen.view, server.cuda_indices(), ours)
    parts.table(rows, COLUMNS, "gpus", "GPUs of this machine", height="content")
    _history(server, seen.view)
    details = st.expander("All values of a GPU", on_change="rerun", key="gpu_details")
    if details.open:
        with details:
            _details(seen.view, ours)


def _history(server: Services, view: MachineState) -> None:
    past = server.machine.past()
    readings = [values for reading in past for values in reading.gpus.values()]
    drawn = [key for key in DRAWN if any(key in values for values in readings)]
    if not drawn:
        return
    labels = {key: BY_KEY[key].label for key in drawn}
    metric = pick("Last ten minutes", labels, "gpu_metric", "Metric of the chart.", width=260)
    figure = history_figure(metric, [device.info for device in view.devices], past, time.time())
    parts.plot(figure, "gpu_history", labels[metric])


def _details(view: MachineState, ours: dict[int, str]) -> None:
    names = {device.info.nvml_index: device for device in view.devices}
    labels = {index: f"GPU {index} · {device.info.name}" for index, device in names.items()}
    index = pick("GPU", labels, "gpu", "The GPU by nvidia-smi's index.", width=360)
    device = names[index]
    for issue in device.health.issues:
        parts.warning(issue.text)
    values = value_rows(device)
    columns = {"Meaning": parts.text(width="large")}
    parts.table(values, columns, "gpu_values", "Values of the GPU")
    if processes := process_rows(device, ours):
        columns = {"Command": parts.text(width="large")}
        parts.table(processes, columns, "gpu_processes", "Processes of the GPU")
    else:
        st.caption("No processes, or the driver does not list them.")


server = services.get()
with st.spinner("Reading the GPUs of this machine…", show_time=True):
    server.machine.read()
machine_section(server)
st.caption(
    "Updated every 2 s while the page is open; nothing is recorded. In a terminal: "
    "`stepscope devices --watch`."
)
