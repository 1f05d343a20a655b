"""The Learn page: lessons by theme, each a short program that runs here and shows its output."""

from __future__ import annotations

from itertools import groupby

import streamlit as st

from dashboard import services
from dashboard.format import note
from dashboard.services import ServerActivity
from dashboard.views.parts import READING_WIDTH, devices, practice_command, start_button
from stepscope.host.child_process import ChildOutput, ChildState
from stepscope.run import RunError
from trainer.lessons import BY_NAME, LESSONS, Lesson

REFRESH = "500ms"  # Of the output while a lesson runs.
IDLE_REFRESH = "5s"


def cuda_note(lesson: Lesson) -> None:
    """Draw what the lesson cannot show on a machine without CUDA."""
    if missing_cuda is None:
        return
    if lesson.needs_cuda:
        practice = practice_command()
        st.info(
            f"**This lesson needs CUDA.** {lesson.needs_cuda} No CUDA here: {missing_cuda}"
            + (f" It also runs on simulated GPUs: `{practice}`." if practice else ""),
            icon=":material/memory:",
        )
    elif lesson.on_cpu:
        note("info", f"Without CUDA: {lesson.on_cpu} No CUDA here: {missing_cuda}")


def result(lesson: Lesson, was_running: bool) -> None:
    """Draw the buttons, the progress and the output of the last run of this lesson."""
    if was_running != (server.running_lesson() is not None):
        st.rerun()  # for the other refresh interval
    run = server.lessons.get(lesson.name)
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
        run_button(lesson)
    if output is not None:
        show(output)


def run_button(lesson: Lesson) -> None:
    about = "Run this program in its own process on this machine."
    if lesson.ranks > 1:
        about = f"Run this program as {lesson.ranks} torchrun processes on this machine."
    icon = ":material/play_arrow:"
    if lesson.needs_cuda is not None and missing_cuda is not None:
        st.button("Run", type="primary", icon=icon, disabled=True, help=about)
    elif start_button("Run", server.busy_reason(ServerActivity.LESSON), about, icon=icon):
        try:
            server.start_lesson(lesson)
        except (RunError, OSError) as error:
            st.error(f"The lesson could not start. {error}")
        else:
            st.rerun()


def show(output: ChildOutput) -> None:
    if output.text:
        st.code(output.text, language=None, wrap_lines=True)
    if output.state is ChildState.FINISHED:
        note("check", f"Measured on this machine in {output.seconds:.1f} s.")
    elif output.state is ChildState.FAILED:
        st.error(f"The lesson failed after {output.seconds:.1f} s. {output.reason}")
    elif output.state is ChildState.STOPPED:
        note("stop", f"Stopped after {output.seconds:.1f} s.")


server = services.get()
missing_cuda = devices(server).cuda_reason
shown = BY_NAME.get(st.query_params.get("lesson", LESSONS[0].name))
if shown is None:
    st.warning("No such lesson. Choose one from the list.", icon=":material/link_off:")
    shown = LESSONS[0]
st.query_params["lesson"] = shown.name  # otherwise a link on this page would not change the address

with st.sidebar:
    for theme, lessons in groupby(LESSONS, key=lambda lesson: lesson.theme):
        st.markdown(f"#### {theme}")
        for each in lessons:
            # The key is for page.css: Streamlit marks every link to this page as the current one.
            with st.container(key="lesson_here" if each is shown else f"lesson_{each.name}"):
                query = {"lesson": each.name}
                st.page_link("views/learn.py", label=each.title, query_params=query)

st.markdown(f"### {shown.title}")
st.container(width=READING_WIDTH).markdown(shown.text)
cuda_note(shown)
running = server.running_lesson() is not None
st.fragment(result, run_every=REFRESH if running else IDLE_REFRESH)(shown, running)
st.caption(f"`{shown.command}`")
st.code(shown.path.read_text(encoding="utf-8"), language="python", wrap_lines=True)
