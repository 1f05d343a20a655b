"""One lesson: what it teaches, its program, a button that runs it, and what it measured here."""

from __future__ import annotations

from itertools import groupby

import streamlit as st

from dashboard.services import ServerActivity, Services
from dashboard.views.parts import start_button
from stepscope.run import RunError
from trainer.lessons import LESSONS, Lesson
from trainer.runners.child_process import ChildOutput, ChildState

READING_WIDTH = 820  # Pixels of the widest line of text that is read with ease.
LOOK, LOOK_AGAIN = "500ms", "5s"
"""How often the result is read: while a lesson runs, and while the page waits for a press."""


def lesson_list(shown: Lesson) -> None:
    """Draw the lessons by theme in the sidebar, each a link; the shown one is marked."""
    with st.sidebar:
        for theme, lessons in groupby(LESSONS, key=lambda lesson: lesson.theme):
            st.markdown(f"#### {theme}")
            for lesson in lessons:
                _link(lesson, "lesson_here" if lesson is shown else f"lesson_{lesson.name}")


def lesson_steps(shown: Lesson) -> None:
    """Draw links to the lesson before and the one after this one."""
    place = LESSONS.index(shown)
    with st.container(horizontal=True, horizontal_alignment="distribute"):
        for near, name, icon in ((place - 1, "before", "back"), (place + 1, "after", "forward")):
            if 0 <= near < len(LESSONS):
                _link(LESSONS[near], f"lesson_{name}", f":material/arrow_{icon}:")


def _link(lesson: Lesson, key: str, icon: str | None = None) -> None:
    # The key is for page.css: Streamlit marks every link to this page as the current one.
    with st.container(key=key, width="content" if icon else "stretch"):
        st.page_link(
            "views/learn.py", label=lesson.title, icon=icon, query_params={"lesson": lesson.name}
        )


def lesson_panel(server: Services, lesson: Lesson) -> None:
    """Draw the lesson; its result moves on while it runs."""
    st.markdown(f"### {lesson.title}")
    st.container(width=READING_WIDTH).markdown(lesson.text)
    _missing(server, lesson)
    running = server.lessons.running() is not None
    st.fragment(_result, run_every=LOOK if running else LOOK_AGAIN)(server, lesson, running)
    st.caption(f"`{lesson.command}`")
    st.code(lesson.path.read_text(encoding="utf-8"), language="python", wrap_lines=True)


def _missing(server: Services, lesson: Lesson) -> None:
    """Say what a machine without CUDA cannot show of it, and why there is none."""
    reason = server.devices().cuda_reason
    if reason is None:
        return
    if lesson.needs_cuda:
        st.info(
            f"**This lesson needs CUDA.** {lesson.needs_cuda} No CUDA here: {reason}",
            icon=":material/memory:",
        )
    elif lesson.on_cpu:
        st.caption(f":material/info: Without CUDA: {lesson.on_cpu} No CUDA here: {reason}")


def _result(server: Services, lesson: Lesson, was_running: bool) -> None:
    """Draw the buttons, the progress and the output of the last run of this lesson."""
    if was_running != (server.lessons.running() is not None):
        st.rerun()  # so that it is read as often as there is something new
    run = server.lessons.last(lesson.name)
    output = run.output() if run else None
    if run is not None and output is not None and output.state is ChildState.RUNNING:
        if st.button("Stop", icon=":material/stop:", help="End the lesson's process."):
            run.stop()
            st.rerun()
        st.progress(
            min(1.0, output.seconds / lesson.limit_s),
            text=f"Running for {output.seconds:.0f} s (limit {lesson.limit_s:.0f} s). The first "
            "seconds go to loading PyTorch.",
        )
    else:
        _run_button(server, lesson)
    if output is not None:
        _show(output)


def _run_button(server: Services, lesson: Lesson) -> None:
    lacks_cuda = lesson.needs_cuda is not None and server.devices().cuda_reason is not None
    refused = server.busy_reason(ServerActivity.LESSON)
    icon = ":material/play_arrow:"
    if lacks_cuda:
        st.button("Run", type="primary", icon=icon, disabled=True, help=_run_help(lesson))
    elif start_button("Run", refused, _run_help(lesson), icon=icon):
        try:
            server.start_lesson(lesson)
        except (RunError, OSError) as error:
            st.error(f"The lesson could not start. {error}")
        else:
            st.rerun()


def _run_help(lesson: Lesson) -> str:
    if lesson.ranks == 1:
        return "Run this program in its own process on this machine."
    return f"Run this program as {lesson.ranks} torchrun processes on this machine."


def _show(output: ChildOutput) -> None:
    if output.text:
        st.code(output.text, language=None, wrap_lines=True)
    if output.state is ChildState.FINISHED:
        st.caption(f":material/check: Measured on this machine in {output.seconds:.1f} s.")
    elif output.state is ChildState.FAILED:
        st.error(f"The lesson failed after {output.seconds:.1f} s. {output.reason}")
    elif output.state is ChildState.STOPPED:
        st.caption(f":material/stop: Stopped after {output.seconds:.1f} s.")
