"""Metadata of a run: run.json merged with the edits of the user, safe for any content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.common.secrets import HIDDEN, is_secret, with_hidden_secrets, without_secrets
from stepscope.run import RunError
from stepscope.run.info import (
    MAX_TAGS,
    NOTES_JSON,
    FinalMetric,
    GitState,
    RunNotes,
    edit_notes,
    known_notes,
    merged,
    read_notes,
)

RECORDED: dict[str, Any] = {
    "name": "digits",
    "config": {"lr": 0.1},
    "tags": ["first", 2],
    "group": "sweep",
    "note": "baseline",
    "git": {"commit": "abc", "branch": "main", "dirty": True, "diff": True},
    "packages": {"torch": "2.9"},
    "final": {"train/loss": {"last": 0.2, "best": 0.1}},
    "totals": {"steps": 300, "peak_allocated": 2.0e9},
}


def test_the_edits_of_the_user_win_and_an_empty_text_removes(tmp_path: Path) -> None:
    edit_notes(tmp_path, name="best", tags=("kept",), pinned=True)
    edit_notes(tmp_path, group="")
    found = merged(RECORDED, read_notes(tmp_path), "id")
    assert (found.name, found.tags, found.pinned) == ("best", ("kept",), True)
    assert (found.group, found.note) == (None, "baseline")
    edit_notes(tmp_path, name="")  # the recorded name, as in the list of runs
    assert merged(RECORDED, read_notes(tmp_path), "id").name == "digits"
    recorded = merged(RECORDED, RunNotes(), "id")
    assert (recorded.name, recorded.tags, recorded.group) == ("digits", ("first", "2"), "sweep")
    assert recorded.git == GitState("abc", "main", dirty=True, diff=True)
    assert recorded.final == {"train/loss": FinalMetric(0.2, 0.1)}
    assert recorded.totals == RECORDED["totals"]


@pytest.mark.parametrize("value", [None, 1, [], [1], {"a": 1}, {"x": {"last": []}}, "x" * 10**6])
def test_any_content_of_a_field_gives_the_default_or_a_bounded_value(value: Any) -> None:
    found = merged(dict.fromkeys(RECORDED, value), RunNotes(), "id")
    assert len(found.name) <= 20_000
    assert (found.git, found.final) == (None, None)


@pytest.mark.parametrize("content", ["", "[]", '{"tags": "x"}', '{"name": 1}', "[" * 9999])
def test_invalid_notes_are_not_taken_as_no_edits(tmp_path: Path, content: str) -> None:
    assert read_notes(tmp_path) == RunNotes()
    (tmp_path / NOTES_JSON).write_text(content)
    with pytest.raises(RunError, match="cannot be read"):
        read_notes(tmp_path)
    assert known_notes(tmp_path) == RunNotes()


def test_notes_that_are_too_long_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="tags"):
        edit_notes(tmp_path, tags=tuple("x" * (MAX_TAGS + 1)))
    assert not (tmp_path / NOTES_JSON).exists()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--use-auth-token --api-key sk-1", "--use-auth-token --api-key (hidden)"),
        ("--api-keys a sk-b --lr 1", "--api-keys (hidden) (hidden) --lr 1"),
        ("--passphrase x", "--passphrase (hidden)"),
        ("--db postgres://u:pw@h/x", "--db (hidden)"),
        ("--accessKey x --password 12", "--accessKey (hidden) --password (hidden)"),
        ("model.private_key=x --no-auth", "model.private_key=(hidden) --no-auth"),
        ("--wandb-key a1b2c3d4e5f6a7b8c9d0", "--wandb-key (hidden)"),
        ("--image-key jpg --sort_key id", "--image-key jpg --sort_key id"),
        ("--token_type bpe --use_auth_token true", "--token_type bpe --use_auth_token true"),
        ("--url https://h/x?token=1a", "--url https://h/x?token=(hidden)"),
        ('--config {"api_key":"x"}', "--config (hidden)"),
    ],
)
def test_secrets_of_a_command_are_hidden(command: str, shown: str) -> None:
    assert " ".join(without_secrets(command.split())) == shown
    assert without_secrets(["--header", "Authorization: Bearer x"])[1] == "(hidden)"


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "a" * 34,
        "sk-proj-" + "a" * 20,
        "ghp_" + "a" * 36,
        "AKIA" + "A" * 16,
        "eyJhbGciOiJIUzI1.x",
        "https://" + "a" * 40 + "@github.com/x",
    ],
)
def test_secrets_in_a_config_are_hidden_and_tokens_of_a_tokenizer_are_not(text: str) -> None:
    login = {"token": "x", "pad_token": "<pad>", "passwords": {"db": "x"}}
    hidden = {"token": HIDDEN, "pad_token": "<pad>", "passwords": {"db": HIDDEN}}
    config = {"lr": 0.1, "names": ["a", text], "login": login}
    shown = {"lr": 0.1, "names": ["a", HIDDEN], "login": hidden}
    assert with_hidden_secrets("config", config) == shown
    assert is_secret("", text)
