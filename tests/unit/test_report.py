"""Reports: content, size, escaping, scrubbing, and no external reference."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli import main
from stepscope.compare.report_page import ReportError
from stepscope.compare.reports import (
    MAX_DETAILED_RUNS,
    run_report,
    sweep_report,
)
from stepscope.compare.scrubber import Scrubber
from stepscope.distributed.flight_recorder import Collective
from stepscope.distributed.hangs.record import HangRecord, StackFrame, hang_name
from stepscope.memory.oom.record import OomReport
from stepscope.run import RunError, process_identity, read_run, write_run_json
from tests.support.fake_sweep import sweep
from tests.support.oom_records import FULL
from tests.support.recorded_runs import CREATED, write_run

HOSTILE = ("name", "config", "environment", "script", "heartbeat", "world_size", "host", "reason")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = [(1.0, 1, {"train/loss": 1.0})]
KEYS = ("train/loss", "memory/allocated", "process/rss", "perf/step_time", "perf/samples_per_sec")
SCRUB = Scrubber(frozenset({"node7"}), frozenset({"alice"}), frozenset({"/data/my files"}))


class Parsed(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}


def is_self_contained(html: str) -> bool:
    parsed = Parsed(html)
    foreign = {"script", "img", "link", "iframe", "object", "image", "use", "a", "b"}
    refers = {"src", "href", "xlink:href", "srcset", "onclick", "onload", "style"}
    return not foreign & {*parsed.tags} and not refers & parsed.names and "url(" not in html


@pytest.mark.parametrize("name", ["cpu-training", "two-simulated-gpus"])
def test_a_recorded_run_becomes_a_small_page_of_its_own(name: str, tmp_path: Path) -> None:
    run = read_run(shutil.copytree(EXAMPLES / name, tmp_path / "run"))
    html = run_report([run])
    assert is_self_contained(html)
    assert len(html.encode()) < 2_000_000
    assert "figure" in Parsed(html).tags
    assert str(tmp_path) not in html


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    told = {"name": bad, "config": {bad: bad}, "environment": {bad: [bad]}, "status": "failed"}
    told |= {"reason": bad}
    run = write_run(tmp_path / "r", told, steps=[(1.0, 1, {f"x/{bad}": 2.0})])
    (run / "traceback.txt").write_text(f"{bad}\x1b[31m")
    assert is_self_contained(run_report([read_run(run)]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('File "/home/al ice/p/train.py", line 3', 'File "train.py", line 3'),
        ("in /data/my files/a.py", "in a.py"),
        (r"C:\Users\alice\t.py", "t.py"),
        ("NODE7.example.de: alice", "[host]: [user]"),
        ("alice@node7", "[address]"),
        ("10.1.2.3:29500 and fe80::1", "[address]:29500 and [address]"),
        ("https://alice:pw@x.y/z", "[url]"),
        ("train/loss at 17:45:00, 3 samples/s, c10::Error", None),
        ("alice: the training failed, says Alice_2", "[user]: the training failed, says [user]_2"),
        ("cuda\n12.4.5.8", None),  # the name and the value of a row
    ],
)
def test_names_and_places_are_scrubbed(text: str, expected: str | None) -> None:
    assert SCRUB(text) == (text if expected is None else expected)


def test_recorded_names_are_in_no_part_unless_full(tmp_path: Path) -> None:
    told = {"host": "secrethost", "user": "bob7", "status": "failed", "tags": ["of-bob7"]}
    told |= {"reason": "secrethost: /home/bob7/run.py failed", "config": {"root": "/home/bob7"}}
    told |= {"group": "sweep on secrethost", "note": "first line\nsee /home/bob7/notes.txt"}
    run = write_run(tmp_path / "r", told, steps=STEPS)
    (run / "traceback.txt").write_text('File "/home/bob7/run.py", line 1\nsecrethost.lan 10.0.0.1')
    html, full = run_report([read_run(run)]), run_report([read_run(run)], full=True)
    assert not [name for name in ("secrethost", "bob7", "10.0.0.1") if name in html]
    assert [text for text in ("run.py", "sweep on", "first line\nsee") if text not in html] == []
    assert "sweep on secrethost" in full
    (run / "notes.json").write_text(json.dumps({"group": "<edited>"}))
    assert "&lt;edited&gt;" in run_report([read_run(run)])


def test_a_short_host_name_is_in_no_part_unless_full(tmp_path: Path) -> None:
    for name in ("gx1", "gx2"):
        write_run(tmp_path / name[-1], {"environment": {"host": name, "cores": 8}})
    runs = [read_run(tmp_path / name) for name in "12"]
    for count in (1, 2):
        html = run_report(runs[:count])
        assert "cores" in html
        assert "gx" not in html
        assert "gx1" in run_report(runs[:count], full=True)


def test_metrics_of_the_script_have_a_chart(tmp_path: Path) -> None:
    rows = [(float(step), step, {"eval/f1": step / 9, "<b>": 1.0}) for step in range(9)]
    html = run_report([read_run(write_run(tmp_path / "a", {"name": "b"}, steps=rows))])
    assert "<figcaption>eval/f1</figcaption>" in html
    assert "<figcaption>&lt;b&gt;</figcaption>" in html


def test_the_first_of_many_runs_have_details(tmp_path: Path) -> None:
    steps = [(step / 10, step, dict.fromkeys(KEYS, 1 / step)) for step in range(1, 513)]
    first = write_run(tmp_path / "r00", {"config": {"x": 1}}, steps=steps)
    names = [f"r{number:02}" for number in range(20)]
    for name in names[1:]:
        shutil.copytree(first, tmp_path / name)
    html = run_report([read_run(tmp_path / name) for name in names])
    assert html.count("<h2>") == 1 + MAX_DETAILED_RUNS
    single = run_report([read_run(first)])
    assert max(map(len, re.findall(r' d="(M[^"]+)"', single))) > 4000, "all points"


def test_a_failed_allocation_is_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", {"status": "failed"}, samples=[(1.0, 1, {"process/rss": 1.0})])
    (run / "oom.json").write_text(json.dumps(asdict(OomReport(last=FULL))))
    assert "Out of memory" in run_report([read_run(run)])


def test_a_hang_has_the_stack(tmp_path: Path) -> None:
    frames = (StackFrame(file="/home/bob/slow.py", line=7, function="load"),)
    for number in (0, 1):
        told = {"world_size": 2, "rank": number, "status": "failed", "heartbeat": CREATED + 40}
        run = write_run(tmp_path / "r", told, rank=number, steps=STEPS)
        if number:
            write_run_json(run, told | process_identity(), "rank1.json")
        entered = Collective(group="default", operation="all_reduce", sequence=9 - number)
        record = HangRecord(
            number=number,
            rank=number,
            step=5,
            since=CREATED + 2,
            seen=CREATED + 30,
            frames=frames,
            collectives=(entered,),
            groups={"default": (0, 1)},
        )
        (run / hang_name(number)).write_text(json.dumps(asdict(record)))
    html = run_report([read_run(run)])
    assert "slow.py:7 in load" in html
    assert "bob" not in html


def finished_sweep() -> dict[str, Any]:
    content = sweep(combining=[])
    for variant in content["variants"]:
        variant["text"] = variant["verdict"]
        variant["metrics"] = variant["metrics"] or dict.fromkeys(content["baseline"]["metrics"])
    return content


def test_a_sweep_has_its_verdicts() -> None:
    content = finished_sweep()
    html = sweep_report(content)
    assert is_self_contained(html)
    assert [one["name"] for one in content["variants"] if one["name"] not in html] == []


def test_several_runs_begin_with_their_comparison(tmp_path: Path) -> None:
    for name, seconds in (("a", 0.1), ("b", 0.2)):
        rows = [(seconds * step, step, {"perf/step_time": seconds}) for step in range(1, 41)]
        config = {"learning_rate": seconds, "dataset": "/home/bob/secret-set"}
        told = {"kind": "init", "config": config, "environment": {"host": f"node-{name}"}}
        write_run(tmp_path / name, told, steps=rows)
    (tmp_path / "c").mkdir()
    shutil.copy(tmp_path / "a" / "run.json", tmp_path / "c")
    html = run_report([read_run(tmp_path / name) for name in "abc"])
    first, *others = html.split("<h2>")[1:]
    assert len(others) == 2  # the run without a store is in the comparison only
    assert "<td>200 ms (+100.0%)</td>" in first
    assert "learning_rate" in first
    assert first.count("<figure>") == 1, "the step time of both runs over the steps"
    assert first.count('class="line c') >= 2
    assert not [text for text in ("node-", "secret-") if text in html]
    with pytest.raises(ReportError):
        run_report([read_run(tmp_path / "c")])


@pytest.mark.parametrize("bad", [None, [1], {"x": 1}, "x", 1e999])
def test_hostile_sweeps_and_runs_become_a_sentence(bad: object, tmp_path: Path) -> None:
    content = sweep(combining=[])
    for name in content:
        with suppress(ReportError):
            assert is_self_contained(sweep_report({**content, name: bad}))
    for name in HOSTILE:
        run = write_run(tmp_path / name, {name: bad, "status": "failed"}, steps=STEPS)
        with suppress(ReportError, RunError):  # RunError: the page does not list it
            assert is_self_contained(run_report([read_run(run)]))


def test_the_command_writes_runs_and_a_sweep(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    names = ("h100", "cpu-training")
    runs = [str(shutil.copytree(EXAMPLES / name, tmp_path / name)) for name in names]
    assert main(["report", *runs, "-o", str(out)]) == 0
    assert ">cpu-training<" in out.read_text()
    assert main(["report", runs[0], runs[0], "-o", str(out)]) == 2
    folder = tmp_path / "lab" / "sweep"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps(finished_sweep()))
    assert main(["report", str(folder), "-o", str(out)]) == 0
    (folder / "sweep.json").write_text(json.dumps({"status": "finished"}))
    assert main(["report", str(folder), "-o", str(out)]) == 1


def test_common_words_and_short_names_stay() -> None:
    text = "Example: train for one step; bo has no memory."
    assert Scrubber(frozenset({"memory", "Example"}), frozenset({"train", "bo"}))(text) == text
