"""The learn page: lessons by theme, each a short program that runs here and shows its result."""

import streamlit as st

from dashboard import services
from dashboard.controls.sidebar import keep_settings
from dashboard.views.lesson_panel import lesson_list, lesson_panel, lesson_steps
from trainer.lessons import BY_NAME, LESSONS

server = services.get()
keep_settings()
if not server.devices_known:
    with st.spinner("Loading PyTorch and looking for GPUs…", show_time=True):
        server.devices()

asked = st.query_params.get("lesson", LESSONS[0].name)
lesson = BY_NAME.get(asked)
if lesson is None:
    st.warning("No such lesson. Choose one from the list.", icon=":material/link_off:")
    lesson = LESSONS[0]
st.query_params["lesson"] = lesson.name  # else a link followed here would not change the address
lesson_list(lesson)
lesson_panel(server, lesson)
lesson_steps(lesson)
