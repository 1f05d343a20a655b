"""The run folder: its name, its `run.json`, which process writes it, and how it stands."""

from stepscope.run.folder import (
    RUN_JSON,
    RunError,
    folder_name,
    is_run_id,
    new_run_folder,
    rank_file,
    rank_json,
    run_folder,
    run_folders,
    runs_root,
    write_run_json,
)
from stepscope.run.info import (
    RunInfo,
    rank_pids,
    read_only_reason,
    read_run,
    restart_expected,
    run_json_of,
)
from stepscope.run.process import pid_namespace, process_identity, process_of, user_name
from stepscope.run.status import HEARTBEAT_S, STALE_S, RunKind, RunStatus

__all__ = [
    "HEARTBEAT_S",
    "RUN_JSON",
    "STALE_S",
    "RunError",
    "RunInfo",
    "RunKind",
    "RunStatus",
    "folder_name",
    "is_run_id",
    "new_run_folder",
    "pid_namespace",
    "process_identity",
    "process_of",
    "rank_file",
    "rank_json",
    "rank_pids",
    "read_only_reason",
    "read_run",
    "restart_expected",
    "run_folder",
    "run_folders",
    "run_json_of",
    "runs_root",
    "user_name",
    "write_run_json",
]
