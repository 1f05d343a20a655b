"""The slow and the CUDA tests by subject, and which of them a change needs: tests.families COMMAND

    since COMMIT            the families that the changes since COMMIT concern
    tests slow|cuda NAME…   the tests of a landing: all files of these families, the core of others

`.ci/run` and the Makefile ask it, also with a Python that has no packages.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


@dataclass(frozen=True)
class Family:
    """Test files of one subject, below tests/."""

    paths: tuple[str, ...]
    """What starts the path of a changed file that concerns this family."""
    files: tuple[str, ...] = ()
    core: tuple[str, ...] = ()
    """What each landing runs of it: tests, or whole files."""


def _gpu(*names: str) -> tuple[str, ...]:
    return tuple(f"gpu/test_{name}_gpu.py" for name in names)


SLOW = {
    "hangs": Family(
        paths=("stepscope/distributed/",),
        files=("integration/test_hangs.py",),
        core=("integration/test_hangs.py::test_a_rank_that_sleeps_is_named_and_where_it_is",),
    ),
    "stragglers": Family(
        paths=("stepscope/distributed/", "dashboard/ranks/"),
        files=(
            "integration/test_stragglers.py",
            "browser/test_ranks_page.py",
        ),
        core=("integration/test_stragglers.py::test_a_long_run_costs_no_more_than_a_short_one",),
    ),
    "agreement": Family(
        paths=("stepscope/session/", "stepscope/distributed/"),
        files=("integration/test_agreement.py",),
        core=(
            "integration/test_agreement.py::test_each_button_acts_on_all_ranks_at_the_same_step",
        ),
    ),
    "runners": Family(
        paths=("trainer/runners/", "stepscope/distributed/", "stepscope/session/"),
        files=("integration/test_torchrun_runner.py",),
        core=("integration/test_torchrun_runner.py::test_each_rank_records_and_the_job_finishes",),
    ),
    "parallel": Family(
        paths=("trainer/training/", "trainer/runners/"),
        files=("integration/test_parallel.py", "integration/test_compile.py"),
        core=(
            "integration/test_parallel.py::"
            "test_a_checkpoint_within_an_epoch_has_the_batch_norm_of_rank_0",
        ),
    ),
    "watch": Family(
        paths=("stepscope/watch/", "stepscope/integrations/"),
        files=("integration/test_watch_launchers.py", "integration/test_watch_frameworks.py"),
        core=("integration/test_watch_launchers.py::test_processes_that_the_script_spawns",),
    ),
    "integrations": Family(
        paths=("stepscope/integrations/", "stepscope/session/", "stepscope/tracker.py"),
        files=(
            "integration/test_integrations_huggingface.py",
            "integration/test_integrations_lightning.py",
        ),
        core=(
            "integration/test_integrations_huggingface.py::"
            "test_the_run_holds_what_the_trainer_logged",
        ),
    ),
    "lab": Family(
        paths=("trainer/lab/", "stepscope/lab/", "dashboard/sweep", "dashboard/views/lab"),
        files=(
            "integration/test_lab.py",
            "integration/test_sweeps.py",
            "browser/test_lab_page.py",
        ),
        core=("integration/test_lab.py::test_a_sweep_from_the_command_line",),
    ),
    "lab-scripts": Family(
        paths=("stepscope/lab/", "stepscope/settings/", "stepscope/watch/"),
        files=(
            "integration/test_lab_script.py",
            "integration/test_lab_ranks.py",
            "integration/test_tune.py",
        ),
        core=(
            "integration/test_lab_script.py::"
            "test_a_killed_sweep_leaves_the_folder_as_it_was_and_resumes",
        ),
    ),
    "lessons": Family(
        paths=("trainer/lessons/", "dashboard/views/learn.py"),
        files=("integration/test_lesson_run.py", "browser/test_learn_page.py"),
        core=("integration/test_lesson_run.py::test_stop_ends_it_with_all_that_it_started",),
    ),
    "memory": Family(
        paths=(
            "trainer/memory_estimate/",
            "stepscope/memory/",
            "stepscope/cli/measure_memory.py",
        ),
        files=("integration/test_memory_probe.py", "integration/test_growth.py"),
        core=(
            "integration/test_memory_probe.py::"
            "test_three_steps_of_a_workload_are_measured_and_leave_no_files",
        ),
    ),
    "profile": Family(
        paths=("stepscope/profiling/",),
        files=("integration/test_profile.py", "browser/test_profile.py"),
        core=("integration/test_profile.py::test_a_watched_script",),
    ),
    "packaging": Family(
        paths=(
            "pyproject.toml",
            "hatch_build.py",
            "requirements",
            "constraints",
            "app.py",
            "stepscope/cli/ui.py",
            "stepscope/cli/app_process.py",
        ),
        files=("integration/test_installed.py",),
        core=(
            "integration/test_installed.py::"
            "test_the_wheel_has_the_page_in_the_package_and_nothing_else",
        ),
    ),
    "cases": Family(
        paths=(
            "stepscope/diagnosis/",
            "stepscope/session/code_sampler.py",
            "stepscope/session/training_",
            "stepscope/watch/hooks/",
            "tests/cases/",
        ),
        files=("integration/test_cases.py",),
        core=(
            "integration/test_cases.py::test_the_diagnosis_of_a_reported_situation[ok_lbfgs]",
            "integration/test_cases.py::test_the_diagnosis_of_a_reported_situation[slow_upload]",
        ),
    ),
    "hostile-folders": Family(
        paths=("stepscope/run/", "stepscope/store/", "stepscope/common/", "dashboard/run_"),
        files=("integration/test_hostile_folders.py",),
        core=("integration/test_hostile_folders.py::test_a_hostile_folder_costs_itself_only",),
    ),
    "pages": Family(
        paths=("dashboard/", "stepscope/alerts/"),
        files=("browser/test_axe.py", "browser/test_alerts_page.py"),
        core=("browser/test_axe.py::test_an_example_opens_by_one_click_and_then_by_its_address",),
    ),
    "suite": Family(
        paths=("tests/conftest.py", "tests/support/", "constraints.txt"),
        files=("integration/test_suite.py",),
        core=("integration/test_suite.py::test_a_hang_in_c_ends_with_the_stack_of_its_thread",),
    ),
}
"""Real jobs of several processes, sweeps, frameworks, lessons and all pages at once: 5 % of the
tests and more than half of the time."""

CUDA = {
    "cuda-training": Family(
        paths=("simulator/", "trainer/training/", "trainer/workloads/", "trainer/runners/"),
        files=(
            *_gpu("training", "values", "parallel", "settings", "trainer_settings", "workloads"),
            *_gpu("synchronizations", "worker", "endings", "failures", "two_devices", "verdict"),
            *_gpu("lab", "lessons", "loading"),
            "browser/test_cuda_page.py",
        ),
        core=(*_gpu("training", "values", "parallel"), "browser/test_cuda_page.py"),
    ),
    "cuda-memory": Family(
        paths=("simulator/", "stepscope/memory/", "trainer/memory_estimate/"),
        files=(
            *_gpu(
                "breakdown", "memory_probe", "model_states", "memory_readings", "oom", "oom_trainer"
            ),
            *_gpu("snapshot_viewer"),
        ),
        core=_gpu("breakdown", "memory_probe"),
    ),
    "cuda-watch": Family(
        paths=("simulator/", "stepscope/watch/", "stepscope/integrations/", "stepscope/profiling/"),
        files=_gpu("watch", "frameworks", "profile"),
        core=_gpu("watch"),
    ),
    "cuda-jobs": Family(
        paths=("simulator/", "stepscope/distributed/", "stepscope/session/"),
        files=(
            *_gpu("hang", "stragglers"),
            "simulator/test_nccl.py",
        ),
        core=("simulator/test_nccl.py",),
    ),
    "cuda-devices": Family(
        paths=("simulator/", "stepscope/gpu/"),
        files=(
            *_gpu("device", "devices", "sampler", "lost_device", "alerts"),
            "simulator/test_nvml.py",
            "simulator/test_simulator.py",
            "browser/test_cuda_devices.py",
        ),
    ),
}
"""Tests on a GPU or on the simulator."""

PASSES = {
    "other-user": Family(paths=("stepscope/run/", "stepscope/common/", "stepscope/store/")),
    "newer-python": Family(paths=("pyproject.toml", "requirements", "constraints")),
}
"""Whole passes of `.ci/run`: tests that depend on the user, unit tests under Python 3.13."""

FAMILIES = SLOW | CUDA | PASSES
SLOW_FILES = frozenset(file for family in SLOW.values() for file in family.files)


def changed_since(commit: str) -> list[str] | None:
    """Return the files that differ from a commit; None if this checkout does not have it."""
    diff = ["git", "diff", "--name-only", "--no-renames", commit, "--"]
    found = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.splitlines() if commit and found.returncode == 0 else None


def concerned(changed: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each family that a changed file concerns, and the first such file."""
    for name, family in FAMILIES.items():
        tests = {f"tests/{file}" for file in family.files}
        used = tests | _shared(tests)
        for file in changed:
            if file.startswith(family.paths) or file in used:
                yield name, file
                break


def _shared(files: Collection[str]) -> set[str]:
    """Return what test files use of tests/: modules that they import, scripts that they name."""
    found: set[str] = set()
    waiting = list(files)
    while waiting:
        path = ROOT / waiting.pop()
        text = path.read_text("utf-8") if path.exists() else ""
        modules = re.findall(r"^from tests\.(support\.\w+) import", text, re.MULTILINE)
        shared = {f"tests/{module.replace('.', '/')}.py" for module in modules} - found
        waiting += shared
        found |= shared
        for script in re.findall(r"\b\w+\.py\b", text):
            found |= {f"tests/scripts/{script}", f"tests/browser/scripts/{script}"}
    return found


def tests_of(families: dict[str, Family], whole: Collection[str]) -> list[str]:
    """Return what to run: all files of the families in `whole`, and the core of each other."""
    return [
        f"tests/{test}"
        for name, family in families.items()
        for test in (family.files if name in whole else family.core)
    ]


def _since(commit: str) -> None:
    changed = changed_since(commit)
    if changed is None:
        print(f"all families: no commit {commit or 'recorded'} here", file=sys.stderr)
        print(*FAMILIES)
        return
    found = dict(concerned(changed))
    for name, file in found.items():
        print(f"{name}: {file} changed since {commit[:8]}", file=sys.stderr)
    print(*found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    since = commands.add_parser("since")
    since.add_argument("commit")
    tests = commands.add_parser("tests")
    tests.add_argument("kind", choices=["slow", "cuda"])
    tests.add_argument("whole", nargs="*", metavar="NAME")
    asked = parser.parse_args(arguments)
    if asked.command == "since":
        _since(asked.commit)
    else:
        print(*tests_of(SLOW if asked.kind == "slow" else CUDA, asked.whole))


if __name__ == "__main__":
    main()
