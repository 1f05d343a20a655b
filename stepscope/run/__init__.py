"""The run folder: its name, its `run.json`, its process and its status."""
# ruff: noqa: I001 - "NAME as NAME" exports a name; one import for each module

from stepscope.run.folder import (
    RUN_JSON as RUN_JSON,
    RunError as RunError,
    folder_name as folder_name,
    is_run_id as is_run_id,
    new_run_folder as new_run_folder,
    pid_namespace as pid_namespace,
    process_identity as process_identity,
    process_of as process_of,
    rank_file as rank_file,
    rank_json as rank_json,
    run_folder as run_folder,
    run_folders as run_folders,
    runs_root as runs_root,
    user_name as user_name,
    write_run_json as write_run_json,
)
from stepscope.run.info import (
    RunInfo as RunInfo,
    rank_pids as rank_pids,
    read_only_reason as read_only_reason,
    read_run as read_run,
    restart_expected as restart_expected,
    run_json_of as run_json_of,
)
from stepscope.run.status import (
    HEARTBEAT_S as HEARTBEAT_S,
    STALE_S as STALE_S,
    RunKind as RunKind,
    RunStatus as RunStatus,
)
