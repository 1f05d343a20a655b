"""The command for each machine and the script for Slurm are what shell and argparse understand."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import config_from_args, parse_args

from trainer.config import RunConfig, Runner, Strategy, Workload, defaults
from trainer.lessons import LESSONS
from trainer.runners.torchrun import (
    LaunchSpec,
    inherited,
    machine_command,
    rank_variables,
    settings_json,
    slurm_script,
    torchrun_arguments,
)

ODD = Path("/shared/it's here/runs/20260101-digits-mlp-0a")


def job(device: str = "cpu", **changes: Any) -> RunConfig:
    base = defaults(Workload.DIGITS_MLP, device)
    torchrun = {"strategy": Strategy.DDP, "runner": Runner.TORCHRUN}
    return replace(base, devices_per_node=4, num_nodes=2, **torchrun, **changes)


def launch(config: RunConfig, **changes: Any) -> LaunchSpec:
    given: dict[str, Any] = {"folder": ODD, "project": Path("/opt/step scope"), "host": "node-1"}
    return LaunchSpec(config=config, **(given | changes))


def words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "))


def test_the_command_is_one_line_for_the_shell() -> None:
    found = words(machine_command(launch(job(), environment={"STEPSCOPE_DATA": "/a b"})))
    assert found[:4] == ["cd", "/opt/step scope", "&&", "STEPSCOPE_DATA=/a b"]
    assert found[4] == "torchrun"
    options = found[5:]
    values = {name: value for name, value in zip(options, options[1:], strict=False)}
    assert (values["--nnodes"], values["--nproc-per-node"]) == ("2", "4")
    assert (values["--rdzv-backend"], values["--rdzv-id"]) == ("c10d", ODD.name)
    assert values["--rdzv-endpoint"] == "node-1:29500"
    assert options[options.index("-m") + 1 :][:2] == ["trainer.runners.rank_worker", str(ODD)]


def test_the_settings_in_the_command_are_those_of_the_page() -> None:
    config = job("GPU-00", bucket_cap_mb=5, learning_rate=0.125, static_graph=True, max_restarts=3)
    found = words(machine_command(launch(config)))
    assert RunConfig.from_dict(json.loads(found[-1])) == config
    assert len(json.loads(settings_json(config))) < 12  # what is as ever is not said


@pytest.mark.parametrize("host", ["a b", "x; rm -rf ~", ""])
def test_a_host_that_cannot_be_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"^host: must be"):
        launch(job(), host=host)


def test_hosts_are_named_and_ranks_share_the_cores() -> None:
    for host in ("node1", "10.0.0.7", "gpu-01.cluster.example", "fe80::1"):
        assert f"{host}:29500" in machine_command(launch(job(), host=host))
    assert rank_variables(job(), 64)["OMP_NUM_THREADS"] == "8"
    assert rank_variables(job(), 2)["OMP_NUM_THREADS"] == "1"
    assert rank_variables(job(num_threads=5), 2)["OMP_NUM_THREADS"] == "5"
    assert "TORCH_NCCL_ENABLE_TIMING" not in rank_variables(job(), 2)
    assert rank_variables(job(time_collectives=True), 2)["TORCH_NCCL_ENABLE_TIMING"] == "1"
    told = {"STEPSCOPE_DATA": "/data", "STEPSCOPE_WORKLOAD": "", "HOME": "/root"}
    assert inherited(told) == {"STEPSCOPE_DATA": "/data"}


def test_the_script_asks_slurm_for_what_the_ranks_need() -> None:
    script = slurm_script(launch(job("GPU-00", num_threads=2, num_workers=3)))
    asked = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    assert {"nodes=2", "ntasks-per-node=1", "gpus-per-node=4", "cpus-per-task=24"} <= set(asked)
    assert "gpus-per-node" not in slurm_script(launch(job()))
    # srun takes its cores from here: since Slurm 22.05 not from sbatch's option any more.
    given = 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
    assert given in script[: script.index("\nsrun ")]
    # sbatch reads its options before the first command only.
    lines = script.splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert not any("#SBATCH" in line for line in lines[first:])


@pytest.mark.parametrize("device", ["cpu", "GPU-00"])
def test_bash_and_shellcheck_accept_the_script(device: str, tmp_path: Path) -> None:
    settings = {"time_collectives": device != "cpu", "dataset": "my data"}
    environment = {"STEPSCOPE_DATA": "/it's here", **rank_variables(job(**settings), 8)}
    script = tmp_path / "job.sbatch"
    script.write_text(slurm_script(launch(job(device, **settings), environment=environment)))
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck: bash alone has read the script")
    looked = subprocess.run([shellcheck, str(script)], capture_output=True, text=True)
    assert (looked.returncode, looked.stdout) == (0, "")


ON_ONE_MACHINE = {
    "job": torchrun_arguments(replace(job(), num_nodes=1), ODD),
    # Without Python's own "-m torch.distributed.run".
    "lesson": next(lesson for lesson in LESSONS if lesson.ranks > 1).arguments[2:],
}


@pytest.mark.parametrize("arguments", ON_ONE_MACHINE.values(), ids=ON_ONE_MACHINE)
def test_ranks_of_one_machine_meet_without_its_name(arguments: list[str]) -> None:
    """Nothing may resolve the machine's name, as --standalone does; any free port will do."""
    config = config_from_args(parse_args(arguments))[0]
    assert (config.local_addr, config.rdzv_endpoint) == ("localhost", "localhost:0")
    assert (config.rdzv_backend, config.min_nodes, config.max_nodes) == ("c10d", 1, 1)
    assert config.nproc_per_node in (2, 4)
