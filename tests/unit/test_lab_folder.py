"""The folder of a sweep, whoever made it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.lab.folder import LOCK, only_one


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / LOCK).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), only_one(tmp_path / "sweep"):
        pass
    assert precious.read_text() == "kept"
