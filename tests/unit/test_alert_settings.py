"""alerts.toml: valid entries apply, invalid ones are reported, and no message has a secret."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest

from stepscope.alerts.sender import Alert
from stepscope.alerts.settings import (
    DEFAULTS,
    NO_STEP,
    SIZE_LIMIT,
    AlertLevel,
    AlertRule,
    AlertSettings,
    AlertState,
    holds,
    load,
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


def test_without_a_file_the_defaults_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".config" / "stepscope" / "alerts.toml"
    assert load({}) == AlertSettings(path=expected)
    expected.parent.mkdir(parents=True)
    expected.write_text("[rules.no_step]\nfor_s = 5\n")
    expected.chmod(0o644)
    assert rule_of(load({}), NO_STEP).for_s == 5


def test_alerts_can_be_disabled_and_a_named_file_must_exist(tmp_path: Path) -> None:
    assert load({"STEPSCOPE_ALERTS": "off"}).path is None
    settings = load({"STEPSCOPE_ALERTS": str(tmp_path / "none.toml")})
    assert settings.rules == DEFAULTS
    assert "there is no such file" in str(settings.problem)


def test_the_document_has_a_valid_example_all_default_rules_and_all_fields(tmp_path: Path) -> None:
    document = DOCS.read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", document, re.MULTILINE)
    assert listed == [(rule.name, str(rule.level)) for rule in DEFAULTS]
    (alert,) = re.findall(r"```json\n(.*?)```", document, re.DOTALL)
    assert list(json.loads(alert)) == list(Alert.__struct_fields__)
    (example,) = re.findall(r"```toml\n(.*?)```", document, re.DOTALL)
    settings = read(tmp_path, example)
    assert settings.problem is None
    command, webhook = settings.command, settings.webhook
    assert command is not None
    assert not command.accepts(AlertLevel.WARNING, AlertState.RAISED)
    assert command.accepts(AlertLevel.CRITICAL, AlertState.RAISED)
    assert not command.accepts(AlertLevel.CRITICAL, AlertState.CLEARED)
    assert webhook is not None
    assert "secret" not in repr(settings)


OWN = '[rules.hot]\nmetric = "a"\n'
INVALID = [
    (OWN, "exactly one of above, below, not_finite"),
    (f"{OWN}above = {10**400}", "Number out of range"),
    (f"{OWN}above = 1\ntreshold = 1", "rules.hot: Object contains unknown field `treshold`"),
    ('[rules.no_step]\nmetric = "a"', "rules.no_step: metric cannot be changed"),
    ("[rules.gpu_idle]\nabove = 9", "rules.gpu_idle: above cannot be changed"),
    ('[command]\nargv = ["./x"]', "a name on the PATH or an absolute path"),
    ('[webhook]\nurl = "file:///etc/passwd"', "url must begin with https:// or http://"),
    ('[webhook]\nurl = "https:///T0KEN"', "and have a host"),
    ('[webhook]\nurl = "https://[::1/T0KEN"', "url must begin with"),
    ('webhook = "https://x/T0KEN"', "Expected `object | null`, got `str`"),
]


def test_a_file_with_an_invalid_entry_has_no_effect(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for text, problem in INVALID:
        with subtests.test(text[:60]):
            settings = read(tmp_path, text)
            found = settings.problem or ""
            assert problem in found
            assert SECRET not in found
            assert settings.command is settings.webhook is None
            assert settings.rules == DEFAULTS


@pytest.mark.parametrize(
    "content", [b"[rules", b"\xff\xfe", b"x = " + b"[" * 3000, b"#" * (SIZE_LIMIT + 1)]
)
def test_an_invalid_file_leaves_the_defaults(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "alerts.toml"
    path.write_bytes(content)
    path.chmod(0o600)
    settings = load({"STEPSCOPE_ALERTS": str(path)})
    assert settings.rules == DEFAULTS
    assert settings.problem


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    settings = read(tmp_path, '[command]\nargv = ["x"]\n', mode)
    assert settings.command is None
    assert "chmod go-w" in str(settings.problem)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 4711)
    path = tmp_path / "alerts.toml"
    path.write_text('[command]\nargv = ["x"]\n')
    path.chmod(0o600)
    if real == 0:  # a file of root is trusted
        os.chown(path, 4712, -1)
    settings = load({"STEPSCOPE_ALERTS": str(path)})
    assert settings.command is None
    assert "belongs to another user" in str(settings.problem)


def test_a_default_rule_keeps_its_other_fields(tmp_path: Path) -> None:
    text = "[rules.memory_full]\nabove = 80\n[rules.gpu_idle]\nbelow = 20\n"
    settings = read(tmp_path, text)
    memory, idle = rule_of(settings, "memory_full"), rule_of(settings, "gpu_idle")
    assert (memory.clear_s, holds(memory, [85]), holds(memory, [80])) == (30, True, False)
    assert holds(idle, [20]) is False


# --- when a rule holds ---

HOT = AlertRule(name="hot", metric="gpu/temp", above=85, for_s=30)
SLOW = AlertRule(name="slow", metric="perf/samples_per_sec", below=100, for_s=30)
WORSE = AlertRule(name="worse", metric="val/loss", above=2.5)
BROKEN = AlertRule(name="broken", metric="x", not_finite=True)
LASTING = AlertRule(name="broken", metric="x", not_finite=True, for_s=5)
CONDITIONS = {"H": True, "O": False, "?": None}


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (HOT, (86, 90), "H"),
        (HOT, (86, 85), "O"),  # with a duration all values must hold
        (HOT, (math.nan,), "?"),
        (HOT, (math.nan, 90), "H"),
        (HOT, (), "?"),
        (SLOW, (99, 100), "O"),
        (WORSE, (1.0, 2.6, 1.0), "H"),  # without a duration one value is enough
        (WORSE, (2.5,), "O"),
        (BROKEN, (1.0, math.nan, 1.0), "H"),
        (BROKEN, (), "?"),
        (LASTING, (math.nan, 1.0), "O"),
        (LASTING, (1.0, math.nan), "H"),
    ],
)
def test_the_condition_of_a_rule(rule: AlertRule, values: tuple[float, ...], expected: str) -> None:
    assert holds(rule, values) is CONDITIONS[expected]
