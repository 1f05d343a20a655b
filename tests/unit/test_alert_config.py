"""alerts.toml: what is right in it counts, what is wrong is said, and no secret is in a message."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.alerts import channels, config
from stepscope.alerts.channels import AlertConfigError, CommandChannel, WebhookChannel
from stepscope.alerts.config import SIZE_LIMIT, AlertSettings, load, path_of
from stepscope.alerts.notifier import Alert
from stepscope.alerts.rules import (
    DEFAULTS,
    GPU_IDLE,
    MEMORY_FULL,
    NO_STEP,
    RUN_FAILED,
    RUN_FINISHED,
    THROTTLING,
    AlertRule,
    AlertState,
    Comparison,
    Severity,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "alerts.md"
SECRET = "T0KEN"


def read(folder: Path, text: str, mode: int = 0o600) -> AlertSettings:
    path = folder / "alerts.toml"
    path.write_text(text)
    path.chmod(mode)
    return load({"STEPSCOPE_ALERTS": str(path)})


def rule_of(settings: AlertSettings, name: str) -> AlertRule:
    (found,) = (rule for rule in settings.rules if rule.name == name)
    return found


def test_without_a_file_the_defaults_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".config" / "stepscope" / "alerts.toml"
    assert load({}) == AlertSettings(path=expected)
    assert load({"STEPSCOPE_ALERTS": ""}) == AlertSettings(path=expected)
    assert load({}).rules == DEFAULTS
    assert [rule.name for rule in DEFAULTS if not rule.enabled] == [RUN_FINISHED]
    expected.parent.mkdir(parents=True)
    expected.write_text("[rules.no_step]\nfor_s = 5\n")
    expected.chmod(0o644)
    assert rule_of(load({}), NO_STEP).for_s == 5


def test_alerts_can_be_switched_off() -> None:
    assert path_of({"STEPSCOPE_ALERTS": "off"}) is None
    assert not load({"STEPSCOPE_ALERTS": "off"}).on


def test_a_file_that_was_named_and_is_not_there_is_said(tmp_path: Path) -> None:
    settings = load({"STEPSCOPE_ALERTS": str(tmp_path / "none.toml")})
    assert settings.rules == DEFAULTS
    assert "there is no such file" in settings.problems[0]


def test_the_example_of_the_docs_is_taken_as_it_stands(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    settings = read(tmp_path, example)
    assert settings.problems == ()
    assert rule_of(settings, NO_STEP).for_s == 300
    assert not rule_of(settings, THROTTLING).enabled
    assert rule_of(settings, RUN_FINISHED).enabled
    hot = rule_of(settings, "hot")
    assert (hot.threshold, hot.clear, hot.for_s, hot.clear_s) == (85, 80, 30, 30)
    assert (hot.metric, hot.level, hot.text) == (
        "gpu/temp",
        Severity.CRITICAL,
        "{device} has {value}",
    )
    assert settings.command is not None
    assert settings.command.argv[0] == "/usr/bin/logger"
    assert not settings.command.alert(Severity.WARNING, AlertState.RAISED)
    assert settings.command.alert(Severity.CRITICAL, AlertState.RAISED)
    assert not settings.command.alert(Severity.CRITICAL, AlertState.CLEARED)
    assert settings.webhook is not None
    assert settings.webhook.shown == "https://hooks.example.com/…"
    assert "secret" not in repr(settings)


def test_the_docs_list_each_default_rule_and_what_it_takes() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE)
    assert listed == [(rule.name, str(rule.level)) for rule in DEFAULTS]


WRONG = {
    "[rules.hot]\nabove = 1": "rules.hot.metric: must be one line",
    '[rules.hot]\nmetric = ""\nabove = 1': "rules.hot.metric: must be one line",
    '[rules.hot]\nmetric = "a\\u0007"\nabove = 1': "rules.hot.metric: must be one line",
    '[rules.hot]\nmetric = "a"': "exactly one of above, below and not_finite, got none",
    '[rules.hot]\nmetric = "a"\nabove = 1\nbelow = 2': "got above, below",
    '[rules.hot]\nmetric = "a"\nabove = "1"': "rules.hot.above: must be a number, got '1'",
    '[rules.hot]\nmetric = "a"\nabove = true': "rules.hot.above: must be a number, got True",
    '[rules.hot]\nmetric = "a"\nabove = nan': "rules.hot.above: must be a number, got nan",
    f'[rules.hot]\nmetric = "a"\nabove = {10**400}': "rules.hot.above: must be a number, got 10",
    '[rules.hot]\nmetric = "a"\nabove = inf': "rules.hot.above: must be a number, got inf",
    '[rules.hot]\nmetric = "a"\nabove = 1\nclear = 2': "must be below the threshold 1 or equal",
    '[rules.hot]\nmetric = "a"\nbelow = 1\nclear = 0': "must be above the threshold 1 or equal",
    '[rules.hot]\nmetric = "a"\nnot_finite = true\nclear = 0': "has no field 'clear'",
    '[rules.hot]\nmetric = "a"\nnot_finite = false': "not_finite: must be true, got False",
    '[rules.hot]\nmetric = "a"\nabove = 1\nfor_s = -1': "for_s: must be a number from 0 to 86400",
    '[rules.hot]\nmetric = "a"\nabove = 1\nfor_s = 1e9': "for_s: must be a number from 0 to 86400",
    '[rules.hot]\nmetric = "a"\nabove = 1\nlevel = "bad"': "must be one of info, warning, critical",
    '[rules.hot]\nmetric = "a"\nabove = 1\nlevel = []': "level: must be one of",
    '[rules.hot]\nmetric = "a"\nabove = 1\nenabled = 1': "enabled: must be true or false, got 1",
    '[rules.hot]\nmetric = "a"\nabove = 1\ntext = "{run}"': "got {run}",
    '[rules.hot]\nmetric = "a"\nabove = 1\ntreshold = 1': "has no field 'treshold'",
    "[rules.Hot]\nabove = 1": "a name must be small letters",
    '[rules."../x"]\nabove = 1': "a name must be small letters",
    "[rules]\nhot = 3": "rules.hot: must be a table",
    "rules = 3": "rules: must be tables",
    "[rules.memory_full]\nabove = 120": "between 0 and 100 %, got 120",
    "[rules.memory_full]\nfor_s = 3": "rules.memory_full: has no field 'for_s'",
    "[rules.run_failed]\nfor_s = 3": "rules.run_failed: has no field 'for_s'",
    '[rules.run_failed]\ntext = "{value} of {device}"': "only step, value, got {device}",
    '[rules.run_finished]\ntext = "{metric}"': "only step, value, got {metric}",
    "[rules.throttling]\nabove = 3": "rules.throttling: has no field 'above'",
    '[rules.no_step]\nmetric = "a"': "rules.no_step: has no field 'metric'",
    "[commands]\nargv = []": "'commands': is no table here",
    "[command]\nargv = []": "command.argv: must be a list of 1 to 50 words",
    '[command]\nargv = "rm -rf /"': "command.argv: must be a list",
    "[command]\nargv = [1]": "command.argv: each word must be text",
    '[command]\nargv = ["a\\u0000"]': "command.argv: each word must be text",
    '[command]\nargv = [""]': "must be a name on the PATH or an absolute path",
    '[command]\nargv = ["./x"]': "must be a name on the PATH or an absolute path",
    '[command]\nargv = ["x"]\nshell = true': "command: has no field 'shell'",
    '[command]\nargv = ["x"]\ntimeout_s = 0': "command.timeout_s: must be a number from 0.1 to 60",
    "[webhook]": "webhook.url: must be an address",
    "[webhook]\nurl = 3": "webhook.url: must be an address",
    '[webhook]\nurl = "file:///etc/passwd"': "must begin with https:// or http://",
    '[webhook]\nurl = "ftp://x/T0KEN"': "must begin with https:// or http://",
    '[webhook]\nurl = "hooks.example.com/T0KEN"': "must begin with https:// or http://",
    '[webhook]\nurl = "https:///T0KEN"': "must have a host",
    '[webhook]\nurl = "https://a b/T0KEN"': "must have a host",
    '[webhook]\nurl = "https://x/T0KEN\\r\\nX: 1"': "must have a host",
    '[webhook]\nurl = "https://[::1/T0KEN"': "must begin with https:// or http://",
    '[webhook]\nurl = "https://x:99999/T0KEN"': "must begin with https:// or http://",
    '[webhook]\nurl = "https://me:T0KEN@x/"': "must have no user and password",
    'webhook = "https://x/T0KEN"': "webhook: must be a table, got text",
    '[webhook]\nurls = "https://x/T0KEN"': "webhook: has no field 'urls'",
    '[command]\nurl = "https://x/T0KEN"\nargv = ["x"]': "command: has no field 'url'",
    '[webhook]\nurl = ["https://x/T0KEN"]': "webhook.url: must be an address",
    'url = "https://x/T0KEN"': "'url': is no table here",
}


def test_what_is_wrong_is_left_out_and_said_and_the_rest_counts(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for text in WRONG:
        with subtests.test(text[:60]):
            other = '\n[rules.fine]\nmetric = "val/loss"\nbelow = 1\n'
            if text.startswith("rules = "):
                other = ""
            settings = read(tmp_path, f"{text}\n{other}")
            (problem,) = settings.problems
            assert WRONG[text] in problem
            assert str(tmp_path / "alerts.toml") in problem
            assert SECRET not in problem
            assert problem.endswith(".")
            assert settings.command is None
            assert settings.webhook is None
            names = [rule.name for rule in DEFAULTS]
            assert [rule.name for rule in settings.rules] == names + ["fine"] * bool(other)
            assert tuple(settings.rules[: len(names)]) == DEFAULTS


@pytest.mark.parametrize("text", ["[rules", "a = 1\na = 2", "x = " + "[" * 3000, "=" * 99])
def test_a_file_that_is_no_toml_leaves_the_defaults(tmp_path: Path, text: str) -> None:
    settings = read(tmp_path, text)
    assert settings.rules == DEFAULTS
    assert "is no valid TOML" in settings.problems[0]


def test_bytes_that_are_no_text_and_too_many_of_them_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "alerts.toml"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    assert "is no valid TOML" in load({"STEPSCOPE_ALERTS": str(path)}).problems[0]
    path.write_bytes(b"#" * (SIZE_LIMIT + 1))
    assert "is larger than 64 KiB" in load({"STEPSCOPE_ALERTS": str(path)}).problems[0]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o664])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    settings = read(tmp_path, '[command]\nargv = ["x"]\n', mode)
    assert settings.command is None
    assert f"can be written by others (mode {mode:03o})" in settings.problems[0]
    assert "chmod go-w" in settings.problems[0]


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text('[command]\nargv = ["x"]\n')
    path.chmod(0o600)
    real = os.fstat

    def of_another(file: int) -> os.stat_result:
        state = list(real(file))
        state[stat.ST_UID] += 4711
        return os.stat_result(state)

    monkeypatch.setattr("stepscope.alerts.config.os.fstat", of_another)
    settings = load({"STEPSCOPE_ALERTS": str(path)})
    assert settings.command is None
    assert "belongs to another user" in settings.problems[0]


def test_a_pipe_or_a_folder_in_its_place_hangs_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "."):
        settings = load({"STEPSCOPE_ALERTS": str(tmp_path / name)})
        assert (
            "is no regular file" in settings.problems[0] or "cannot be read" in settings.problems[0]
        )


def test_a_changed_threshold_takes_the_clearing_one_with_it(tmp_path: Path) -> None:
    text = "[rules.memory_full]\nabove = 80\n[rules.gpu_idle]\nbelow = 20\n"
    settings = read(tmp_path, text)
    assert settings.problems == ()
    memory, idle = rule_of(settings, MEMORY_FULL), rule_of(settings, GPU_IDLE)
    assert (memory.threshold, memory.clear) == (80, 80)
    assert (idle.threshold, idle.clear) == (20, 20)
    settings = read(tmp_path, '[rules.run_failed]\nlevel = "warning"\ntext = "Oh: {value}"\n')
    assert rule_of(settings, RUN_FAILED).text == "Oh: {value}"


def test_a_command_in_the_users_home_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = read(tmp_path, '[command]\nargv = ["~/bin/tell", "~"]\n')
    assert settings.command is not None
    assert settings.command.argv == ("/home/me/bin/tell", "~")


def test_own_rules_have_a_text_and_are_not_endless(tmp_path: Path) -> None:
    text = '[rules.a]\nmetric = "gpu/temp"\nabove = 85\nfor_s = 5\n'
    text += '[rules.b]\nmetric = "x"\nnot_finite = true'
    settings = read(tmp_path, text)
    expected = "{device}: temperature is {value}, above {threshold} for {seconds}"
    assert rule_of(settings, "a").text == expected
    assert rule_of(settings, "b").text == "{metric} is {value}"
    many = "\n".join(f'[rules.r{n}]\nmetric = "x"\nabove = 1' for n in range(60))
    settings = read(tmp_path, many)
    assert len(settings.rules) == len(DEFAULTS) + config.RULES_LIMIT
    assert "at most 50, got 60" in settings.problems[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=10,
)
RIGHT = {
    "metric": "a",
    "above": 90,
    "below": 0.5,
    "clear": 2,
    "for_s": 3,
    "level": "info",
    "text": "{value}",
    "enabled": False,
    "argv": ["tell"],
    "url": "https://x/y",
}
NEEDED = [("metric", "above"), ("argv",), ("url",), ()]


@st.composite
def tables(draw: st.DrawFn) -> Any:
    """Return what is right, what is right but for one value, or anything."""
    also = draw(st.lists(st.sampled_from(list(RIGHT)), min_size=1, max_size=2))
    table = {name: RIGHT[name] for name in (*draw(st.sampled_from(NEEDED)), *also)}
    if draw(st.booleans()):
        table |= draw(st.dictionaries(st.sampled_from(list(RIGHT)), JSON, max_size=1))
    return table if draw(st.integers(0, 5)) else draw(JSON)


def outcome(checked: Callable[[], object]) -> Any:
    try:
        return checked()
    except AlertConfigError as problem:
        return problem


def test_whatever_stands_there_is_taken_or_refused_by_its_name() -> None:
    taken: set[type] = set()

    @given(st.just("own") | st.sampled_from([rule.name for rule in DEFAULTS]), tables())
    def check(name: str, table: Any) -> None:
        for where, checked in (
            (f"rules.{name}", lambda: config.parse_rule(name, table)),
            ("command", lambda: channels.command(table)),
            ("webhook", lambda: channels.webhook(table)),
        ):
            found = outcome(checked)
            if isinstance(found, AlertConfigError):
                assert str(found).startswith((f"{where}.", f"{where}:"))
                continue
            taken.add(type(found))
            for field, value in table.items():
                is_bound = field in list(Comparison)
                held = found.threshold if is_bound else getattr(found, field)
                if field == "argv":
                    value = (os.path.expanduser(value[0]), *value[1:])
                assert held == value
                assert not is_bound or found.comparison == field

    check()
    assert taken == {AlertRule, CommandChannel, WebhookChannel}


def test_the_docs_json_has_the_fields_of_an_alert() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert list(json.loads(example)) == [field.name for field in fields(Alert)]
