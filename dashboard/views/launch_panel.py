"""The commands that launch a distributed run by hand: per node, or a Slurm script."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import streamlit as st

from dashboard.services import Services
from stepscope.run import folder_name
from trainer.config import RunConfig
from trainer.runners import torchrun as commands
from trainer.runners.child_process import PROJECT

FOLDER = "launch_folder"  # Session state: the folder of the next launch.


def launch_panel(server: Services, config: RunConfig) -> None:
    """Draw the commands for settings of several ranks; nothing for others."""
    if not config.distributed:
        return
    several = config.num_nodes > 1
    title = "Launch on several nodes" if several else "Launch from a terminal"
    with st.expander(title, icon=":material/terminal:", expanded=several, key="launch"):
        about = "Host name or address the other nodes can reach."
        host = st.text_input("First node", socket.gethostname(), key="launch_host", help=about)
        try:
            variables = commands.rank_variables(config, os.cpu_count() or 1) | commands.inherited()
            launch = commands.LaunchSpec(
                config=config,
                folder=_folder(server, config),
                project=PROJECT,
                host=host.strip(),
                environment=variables,
            )
            command, script = commands.machine_command(launch), commands.slurm_script(launch)
        except ValueError as error:
            st.error(str(error), icon=":material/error:")
            return
        nodes = f"each of the {config.num_nodes} nodes" if several else "the node"
        st.markdown(f"Run this on {nodes} within a few minutes:")
        st.code(command, language="bash", wrap_lines=True)
        st.markdown("Or save this as `job.sbatch` and submit it with `sbatch job.sbatch`:")
        st.code(script, language="bash", wrap_lines=True)
        st.caption(
            f"All nodes need this program in `{launch.project}` and the folder "
            f"`{launch.folder.parent}` on shared storage. The run then appears in the list with "
            "all its ranks."
        )


def _folder(server: Services, config: RunConfig) -> Path:
    """Return the folder of the next launch: a new one for each workload, and once it exists."""
    state = st.session_state
    known, slug = state.get(FOLDER), str(config.workload).replace("_", "-")
    if known is None or (server.runs / known).exists() or f"-{slug}-" not in known:
        state[FOLDER] = folder_name(time.time(), config.workload, os.urandom(4).hex())
    return server.runs.absolute() / str(state[FOLDER])
