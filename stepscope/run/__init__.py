"""The run folder: its name, its `run.json`, its process and its status."""

from stepscope.run.folder import RUN_JSON as RUN_JSON
from stepscope.run.folder import RunError as RunError
from stepscope.run.folder import folder_name as folder_name
from stepscope.run.folder import is_run_id as is_run_id
from stepscope.run.folder import new_run_folder as new_run_folder
from stepscope.run.folder import pid_namespace as pid_namespace
from stepscope.run.folder import process_identity as process_identity
from stepscope.run.folder import process_of as process_of
from stepscope.run.folder import rank_file as rank_file
from stepscope.run.folder import rank_json as rank_json
from stepscope.run.folder import run_folder as run_folder
from stepscope.run.folder import run_folders as run_folders
from stepscope.run.folder import runs_root as runs_root
from stepscope.run.folder import user_name as user_name
from stepscope.run.folder import write_run_json as write_run_json
from stepscope.run.info import RunInfo as RunInfo
from stepscope.run.info import rank_pids as rank_pids
from stepscope.run.info import read_only_reason as read_only_reason
from stepscope.run.info import read_run as read_run
from stepscope.run.info import restart_expected as restart_expected
from stepscope.run.info import run_json_of as run_json_of
from stepscope.run.status import HEARTBEAT_S as HEARTBEAT_S
from stepscope.run.status import STALE_S as STALE_S
from stepscope.run.status import RunKind as RunKind
from stepscope.run.status import RunStatus as RunStatus
