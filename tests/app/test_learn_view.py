"""The Learn page: lists all lessons, shows the program that runs, and why one cannot run."""

from __future__ import annotations

import pytest

from dashboard.services import ServerActivity, Services
from tests.support.app_page import (
    GPU,
    Learn,
    Machine,
    OpenPage,
    component,
    label,
    press,
    start_refused,
    start_run,
    wait_for_result,
)
from tests.support.lesson_programs import SLEEP, Write, write
from trainer.lessons import BY_NAME, LESSONS

__all__ = ["write"]


@pytest.mark.parametrize("name", ["amp", "cuda_graphs"])
def test_a_link_opens_a_lesson_with_the_program_that_runs(
    learn: Learn, machine: Machine, name: str
) -> None:
    """One that is different on a CPU, and one that needs CUDA."""
    lesson = BY_NAME[name]
    machine()
    app = learn(lesson=lesson.name)
    assert f"### {lesson.title}" in [part.value for part in app.markdown]
    assert [code.value for code in app.code] == [lesson.path.read_text().strip()]
    run = label(app, "button", "Run")
    assert run.disabled == (lesson.needs_cuda is not None)
    machine(GPU)
    app.run()
    assert not label(app, "button", "Run").disabled


@pytest.mark.parametrize(
    "name",
    [
        "absent",
        "../devices",
    ],
)
def test_a_link_to_an_unknown_lesson_shows_the_first(learn: Learn, name: str) -> None:
    app = learn(lesson=name)
    assert len(app.warning) == 1
    assert f"### {LESSONS[0].title}" in [part.value for part in app.markdown]


def test_a_lesson_shows_its_result_its_failure_and_why_it_cannot_start(
    learn: Learn, server: Services, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError("EAGAIN")

    write("print('gradient: 16.0')\n", name="linear_regression")
    app = learn(lesson="linear_regression")
    press(app, "Run")
    wait_for_result(app, server)
    assert "gradient: 16.0" in app.code[0].value
    assert "gradient: 16.0" in learn(lesson="linear_regression").code[0].value, "in another tab"
    write("raise ValueError('<b>broken</b>')\n", name="linear_regression")
    press(app, "Run")
    wait_for_result(app, server)
    assert len(app.error) == 1
    assert "<b>broken</b>" in app.code[0].value
    monkeypatch.setattr("stepscope.host.child_process.subprocess.Popen", refuse)
    press(app, "Run")
    assert "EAGAIN" in app.error[0].value


@pytest.mark.parametrize("active", ["run", "sweep"])
def test_during_a_run_or_a_sweep_no_lesson_starts(
    learn: Learn, server: Services, monkeypatch: pytest.MonkeyPatch, active: str
) -> None:
    app = learn(lesson="linear_regression")
    owner = server if active == "run" else server.sweeps
    monkeypatch.setattr(owner, "active_id", lambda: "20261122-digits")
    press(app, "Run")  # drawn before the other one began
    assert server.running_lesson() is None
    app.run()
    assert start_refused(app, "Run") == server.busy_reason(ServerActivity.LESSON)


def test_during_a_lesson_no_run_and_no_sweep_starts(
    page: OpenPage, server: Services, write: Write
) -> None:
    live, lab = page(), page()
    lab.switch_page("views/lab.py").run()
    before = component(live)["page_token"]
    lesson = write(SLEEP)
    server.start_lesson(lesson)
    start_run(live)  # drawn before the lesson began
    assert not server.run_list.fresh().runs
    assert start_refused(live) == server.busy_reason(ServerActivity.RUN) is not None
    # The other token makes the browser run the page, when the lesson begins and when it ends.
    assert component(live)["page_token"] != before
    lab.run()
    assert start_refused(lab, "Start sweep") == server.busy_reason(ServerActivity.SWEEP)
    server.lessons[lesson.name].stop()
    live.run()
    assert start_refused(live) is None
    assert component(live)["page_token"] == before
