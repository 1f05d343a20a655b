"""The commands that start the chosen settings by hand: one for each machine, or a Slurm script."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import streamlit as st

from dashboard.services import PROJECT, Services
from stepscope.run import folder_name
from trainer.config import RunConfig
from trainer.launch_commands import (
    PORT,
    PORTS,
    LaunchSpec,
    inherited,
    machine_command,
    rank_variables,
    slurm_script,
)

FOLDER = "launch_folder"
"""In the session's state: where the job will record, until one has begun there."""


def launch_panel(server: Services, config: RunConfig) -> None:
    """Draw the commands for settings of several ranks; nothing for others."""
    if not config.distributed:
        return
    several = config.num_nodes > 1
    title = "Launch on several nodes" if several else "Launch from a terminal"
    with st.expander(title, icon=":material/terminal:", expanded=several, key="launch"):
        columns = st.columns([3, 1])
        host = columns[0].text_input(
            "First machine",
            socket.gethostname(),
            key="launch_host",
            help="Host name or address the other nodes can reach.",
        )
        port = columns[1].number_input(
            "Port",
            *PORTS,
            PORT,
            key="launch_port",
            help="A free port on the first node that the others can reach.",
        )
        try:
            _commands(config, _launch(config, _folder(server, config), host.strip(), int(port)))
        except ValueError as error:
            st.error(str(error), icon=":material/error:")


def _commands(config: RunConfig, launch: LaunchSpec) -> None:
    machines = f"each of the {config.num_nodes} machines" if config.num_nodes > 1 else "the machine"
    st.markdown(f"Run this on {machines} within a few minutes:")
    st.code(machine_command(launch), language="bash", wrap_lines=True)
    st.markdown("Or save this as `job.sbatch` and submit it with `sbatch job.sbatch`:")
    st.code(slurm_script(launch), language="bash", wrap_lines=True)
    st.caption(
        f"All nodes need this program in `{launch.project}` and the folder "
        f"`{launch.folder.parent}` on shared storage. The run then appears in the list with all "
        "its ranks."
    )


def _launch(config: RunConfig, folder: Path, host: str, port: int) -> LaunchSpec:
    variables = rank_variables(config, os.cpu_count() or 1)
    return LaunchSpec(
        config=config,
        folder=folder,
        project=PROJECT,
        host=host,
        port=port,
        environment=variables | inherited(),
    )


def _folder(server: Services, config: RunConfig) -> Path:
    """Return a folder for the job: the same until a run has begun there, or its name changes."""
    state = st.session_state
    known = state.get(FOLDER)
    begun = known is not None and (server.runs / known).exists()
    if known is None or begun or f"-{_slug(config)}-" not in known:
        tail = os.urandom(4).hex()
        state[FOLDER] = folder_name(time.time(), config.workload, tail)
    return server.runs.absolute() / str(state[FOLDER])


def _slug(config: RunConfig) -> str:
    return str(config.workload).replace("_", "-")
