"""`stepscope watch` against bare python: the same script, the same output, exit code and losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from stepscope.run import RunStatus, read_run, run_folders
from stepscope.session import stop
from stepscope.store import EventRow
from stepscope.watch.hooks.state import TRIAL_BACKWARDS
from tests.support.run_values import ask, metric
from tests.support.waiting import wait_until
from tests.support.watched_scripts import AS_MODULE, SCRIPTS, run, watched_like_bare

WATCH = [sys.executable, "-c", "from stepscope.cli import main; raise SystemExit(main())", "watch"]


ENDINGS = {
    "last line": (RunStatus.FINISHED, None),
    "exception": (RunStatus.FAILED, "ValueError: no such thing: é"),
    "chain": (RunStatus.FAILED, "RuntimeError: while looking for it"),
    "memory": (RunStatus.FAILED, "The host ran out of memory."),
    "own hook": (RunStatus.FAILED, "ValueError"),
    "exit text": (RunStatus.FAILED, "The script ended: this went wrong"),
    "interrupt": (RunStatus.STOPPED, "Ctrl-C"),
    "terminate": (RunStatus.CRASHED, "ended by SIGTERM"),
    "terminate, own handler": (RunStatus.FAILED, "exit code 8"),
    "atexit": (RunStatus.FAILED, "The script ended with exit code 4."),
    "thread": (RunStatus.FINISHED, None),
    "os._exit": (RunStatus.CRASHED, None),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_would_bare(tmp_path: Path, ending: str) -> None:
    found = watched_like_bare(tmp_path, "endings.py", ending)
    status, reason = ENDINGS[ending]
    assert found.status is status
    if reason is not None:
        assert reason in str(found.reason)
    traceback = found.folder / "traceback.txt"  # an empty one is left where nothing could close it
    assert bool(traceback.exists() and traceback.stat().st_size) == (
        ending in ("exception", "chain", "memory", "own hook", "terminate")
    )


def test_a_forked_child_leaves_the_run_alone(tmp_path: Path) -> None:
    bare = run([sys.executable, "endings.py", "fork"], tmp_path)
    seen = run([*AS_MODULE, "endings.py", "fork"], tmp_path)
    assert (seen.stdout, seen.returncode) == (bare.stdout, bare.returncode)
    [folder] = run_folders(tmp_path)
    assert read_run(folder).status is RunStatus.FINISHED
    assert "the child's own line" not in (folder / "output.log").read_text()


@pytest.mark.parametrize("watch", [AS_MODULE, WATCH], ids=["module", "command"])
def test_a_script_sees_what_it_would_see_bare(tmp_path: Path, watch: list[str]) -> None:
    found = watched_like_bare(tmp_path, "beside/script.py", "--name", "x", "-m", watch=watch)
    assert found.run_json["script"]["arguments"] == ["--name", "x", "-m"]
    assert found.run_json["name"] == "script"
    if watch is AS_MODULE:
        beside = str(SCRIPTS / "beside")
        module = ("-m", "beside.script", "--runs", "x")
        watched_like_bare(tmp_path / "module", *module, PYTHONPATH=beside)
        unbuffered = ("endings.py", "exception")
        watched_like_bare(tmp_path / "unbuffered", *unbuffered, PYTHONUNBUFFERED="1")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (["missing.py"], 2),
        (["-m", "missing"], 1),
        (["-m", "json"], 1),
        (["{tmp}/broken.py"], 1),  # a syntax error
    ],
)
def test_what_cannot_run_is_told_as_python_does(
    tmp_path: Path, script: list[str], code: int
) -> None:
    (tmp_path / "broken.py").write_text("print('so far')\nx = = 1\n")
    script = [word.format(tmp=tmp_path) for word in script]
    bare, seen = run([sys.executable, *script], tmp_path), run([*AS_MODULE, *script], tmp_path)
    assert (seen.returncode, seen.stderr) == (code, bare.stderr)
    assert list(run_folders(tmp_path)) == []


def test_without_a_run_folder_the_script_runs_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen = run([*AS_MODULE, "--runs", str(tmp_path / "file"), "endings.py", "exit 3"], tmp_path)
    assert (seen.returncode, seen.stdout) == (3, b"begins exit 3\n")
    assert b"stepscope: not watched" in seen.stderr


@pytest.mark.parametrize("broken", ["find_place", "ScriptSession", "keep_output"])
def test_whatever_fails_in_us_the_script_runs(tmp_path: Path, broken: str) -> None:
    program = f"""
import sys
from stepscope.watch import main, watched_run
def fail(*_, **__):
    raise LookupError("odd")
watched_run.{broken} = fail
sys.exit(main.main(["endings.py", "exit 3"]))
"""
    seen = run([sys.executable, "-c", program], tmp_path)
    assert (seen.returncode, seen.stdout) == (3, b"begins exit 3\n")
    assert b"Traceback" not in seen.stderr
    assert (b"not watched: LookupError: odd" in seen.stderr) == (broken != "keep_output")


def test_training_gives_the_same_losses_to_the_last_bit(tmp_path: Path) -> None:
    shapes = ["plain", "accumulate", "gan", "thread", "workers"]
    found = watched_like_bare(tmp_path, "training.py", *shapes, "--name", "x")
    assert found.status is RunStatus.FINISHED
    assert found.run_json["device"] == "cpu"
    # Plain 8, accumulation 4, GAN 8 of both optimizers, workers 8; of two threads one is recorded.
    assert found.run_json["step"] == 28
    keys = {"train/loss", "train/lr", "train/grad_norm", "train/loss.optimizer1"}
    assert keys <= set(stepscope.open(found.folder).metrics)


class Endless:
    """A watched script that runs until it is stopped."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*AS_MODULE, "endless.py", *arguments],
            cwd=SCRIPTS,
            stdout=subprocess.PIPE,
            env={**os.environ, "STEPSCOPE_RUNS": str(tmp_path)},
        )
        wait_until(lambda: any(run_folders(tmp_path)))
        [self.folder] = run_folders(tmp_path)
        wait_until(lambda: read_run(self.folder).status is RunStatus.RUNNING)

    def ask(self, name: str, **args: str) -> EventRow:
        """Ask for something and wait until it is done or refused."""
        return ask(self.folder, name, **args)

    def end(self) -> tuple[int, bytes]:
        output, _ = self.process.communicate(timeout=40)
        return self.process.returncode, output


def test_the_pages_buttons_act_on_a_script(tmp_path: Path) -> None:
    script = Endless(tmp_path)
    assert script.ask("mark", text="here").text == "here"
    assert script.ask("pause").data["ok"]
    wait_until(lambda: read_run(script.folder).status is RunStatus.PAUSED)
    for name in ("empty_cache", "collect_garbage"):
        assert script.ask(name).data["after"]["process/rss"] > 0
    assert script.ask("reset_peaks").data["after"]["process/peak_rss"] > 0
    snapshot, checkpoint = script.ask("memory_snapshot"), script.ask("save_checkpoint")
    assert (snapshot.data["ok"], checkpoint.data["ok"]) == (False, False)
    paused = read_run(script.folder).run_json["step"]
    assert script.ask("mark").step == paused
    script.ask("resume")
    wait_until(lambda: read_run(script.folder).run_json["step"] > paused)
    assert script.ask("pause").data["ok"]
    assert "SIGINT sent" in script.ask("stop").text
    assert script.end() == (-2, b"cleaned up\n")
    assert read_run(script.folder).status is RunStatus.STOPPED


def test_a_script_that_ignores_a_stop_is_ended_by_force(tmp_path: Path) -> None:
    script = Endless(tmp_path, "--ignore")
    assert "which ignores it; if it continues, use Force stop" in script.ask("stop").text
    step = read_run(script.folder).run_json["step"]
    wait_until(lambda: read_run(script.folder).run_json["step"] > step)
    assert read_run(script.folder).run_json["stop_asked"] > 0
    assert "1 process has ended" in stop.end_job(read_run(script.folder))
    script.end()
    assert read_run(script.folder).status is RunStatus.STOPPED


def test_updates_by_hand_are_steps(tmp_path: Path) -> None:
    found = watched_like_bare(tmp_path, "without_optimizer.py", "by_hand")
    [folder] = run_folders(tmp_path)
    losses = [line for line in (folder / "output.log").read_text().splitlines() if line]
    recorded = [loss.hex() for loss in metric(folder, "train/loss").tolist()]
    assert recorded == losses[TRIAL_BACKWARDS:]
    assert found.run_json["step"] == len(losses)
    assert found.reason is None


def test_training_in_child_processes_is_said_not_to_be_recorded(tmp_path: Path) -> None:
    why = "Training in the processes that it started is not recorded"
    found = watched_like_bare(tmp_path, "without_optimizer.py", "children", last_line=why)
    assert found.status is RunStatus.FINISHED
    assert why in str(found.reason)


AGAIN = """
import os, sys, torch
if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    {call}
weights = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weights], lr=0.1)
for _ in range(7):
    loss = (weights * weights).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(hash("a"), loss.item(), sys.argv[1:])
"""


@pytest.mark.parametrize(
    "call",
    [
        "os.execv(sys.executable, sys.orig_argv)",
        "os.execvpe('env', ['env', sys.executable, *sys.orig_argv[1:]], dict(os.environ))",
    ],
)
def test_a_script_that_replaces_its_process_has_two_finished_runs(
    tmp_path: Path, call: str
) -> None:
    script = tmp_path / "again.py"
    script.write_text(AGAIN.format(call=call))
    bare = run([sys.executable, str(script), "x"], tmp_path)
    seen = run([*AS_MODULE, "--tag", "t", str(script), "x"], tmp_path)
    assert (seen.returncode, seen.stdout) == (0, bare.stdout)
    first, second = sorted(map(read_run, run_folders(tmp_path)), key=lambda run: run.created)
    assert first.status is second.status is RunStatus.FINISHED
    assert first.reason is not None
    assert first.reason.startswith("The script replaced its process by: ")
    assert second.run_json["replaces"] == first.id
    assert (first.run_json["step"], second.run_json["step"]) == (0, 7)
    assert first.run_json["tags"] == second.run_json["tags"] == ["t"]


def test_a_failed_exec_ends_no_run(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    tried = "try: os.execvp('no-such-program', ['x'])\n    except OSError: pass"
    script.write_text(AGAIN.format(call=tried))
    assert run([*AS_MODULE, str(script)], tmp_path).returncode == 0
    [folder] = run_folders(tmp_path)
    found = read_run(folder)
    assert (found.status, found.reason, found.run_json["step"]) == (RunStatus.FINISHED, None, 7)
