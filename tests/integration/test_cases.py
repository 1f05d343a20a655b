"""Scripts after public reports, and healthy ones that look similar: what their diagnosis says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.cli import main
from stepscope.run import run_folders
from tests.support.watched_scripts import AS_MODULE, SCRIPTS, run

CASES = SCRIPTS.parent / "cases"
ROWS = [
    line.split("\t")
    for line in (CASES / "expected.tsv").read_text().splitlines()
    if not line.startswith("#")
]
CONTENTION = "cpu-contention"


@pytest.mark.parametrize(("name", "wanted", "banned", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_the_diagnosis_of_a_reported_situation(
    name: str,
    wanted: str,
    banned: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = str(CASES / f"{name}.py")
    done = run([*AS_MODULE, script], tmp_path, OMP_NUM_THREADS="1", TQDM_MININTERVAL="1")
    assert done.returncode == 0, done.stderr
    [folder] = run_folders(tmp_path)
    main(["diagnose", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    kinds = {one["kind"] for one in found}
    kinds |= {f"{one['kind']}:{one['cause']}" for one in found if one["cause"]}
    text = " ".join(f"{one['text']} {one['next']}" for one in found)
    assert not kinds & set(banned.split()), text
    assert not [word for word in words.split() if word in text], text
    # On a busy host that is a cause in any script, and may be the only one.
    is_busy = CONTENTION in kinds and CONTENTION not in wanted
    kinds -= {CONTENTION} if is_busy else set()
    options = set(wanted.split())
    assert kinds & options or (not kinds and ("-" in options or is_busy)), text


def test_each_script_has_a_row() -> None:
    assert sorted(row[0] for row in ROWS) == sorted(path.stem for path in CASES.glob("*.py"))
