"""The patch of a script: the calls are changed, the rest of the text is not."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from stepscope.lab.patch import Patch, make_patch
from stepscope.settings.setting import AppliedSetting, CallPlace

IMPORTS = "import torch\nfrom torch.utils.data import DataLoader\n"


def setting(name: str, value: bool | int, line: int | None, *lines: str) -> AppliedSetting:
    places = [] if line is None else [CallPlace("train.py", line)]
    return AppliedSetting(
        name=name,
        value=value,
        state="in effect",
        text="",
        lines=list(lines),
        places=places,
    )


def patched(source: str, *settings: AppliedSetting) -> Patch:
    return make_patch(source, "train.py", "train.py", settings)


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("x = DataLoader(d)", "x = DataLoader(d, num_workers=4)"),
        ("x = DataLoader(d, num_workers=0)  # c", "x = DataLoader(d, num_workers=4)  # c"),
        ("x = DataLoader(\n    d,\n)", "x = DataLoader(\n    d, num_workers=4,\n)"),
        ("x = DataLoader(\n    d,  # c\n)", "x = DataLoader(\n    d, num_workers=4,  # c\n)"),
        ("x = DataLoader('é', d)", "x = DataLoader('é', d, num_workers=4)"),
    ],
)
def test_a_call_gets_the_argument(call: str, after: str) -> None:
    found = patched(IMPORTS + call + "\n", setting("num_workers", 4, 3))
    assert (found.text, found.by_hand) == (IMPORTS + after + "\n", [])
    assert "num_workers=4" in found.diff


@pytest.mark.parametrize(
    "call",
    [
        "x = DataLoader(d, **options)",
        "x = DataLoader(*d)",
        "x = DataLoader(d, num_workers=args.workers)",
        "x = DataLoader((d))",
        "x = Mine(d)",
        "x = DataLoader(d), DataLoader(e)",
        "x = DataLoader(d, 8, True, None, None, 2)",
        "x = wrap(DataLoader(p for p in d))",
        "x = (",
        "x = '\x00'",
    ],
)
def test_an_unclear_call_is_changed_by_hand(call: str) -> None:
    source = IMPORTS + call + "\n"
    found = patched(source, setting("num_workers", 4, 3, "DataLoader(..., num_workers=4)"))
    assert (found.text, found.diff) == (source, "")
    assert [(one.setting, one.where) for one in found.by_hand] == [
        ("num_workers", "train.py, line 3")
    ]


@pytest.mark.parametrize("refused", [CallPlace("train.py", 3), None])
def test_a_call_that_is_refused_at_times_is_changed_by_hand(refused: CallPlace | None) -> None:
    source = IMPORTS + "def make(d): return DataLoader(d)\n"
    found = patched(source, replace(setting("num_workers", 4, 3), refused_places=[refused]))
    assert (found.text, found.diff) == (source, "")
    assert found.by_hand[0].where == "train.py, line 3"
    elsewhere = replace(setting("num_workers", 4, 3), refused_places=[CallPlace("train.py", 9)])
    assert patched(source, elsewhere).diff


@pytest.mark.parametrize("name", ["my train.py", "sub/train.py"])
def test_the_diff_is_applied_by_git(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    source = f"{IMPORTS}x = 'a\x0cb\u2028c'\r\ndef f(d):\n\treturn DataLoader(d)  # \x0c\n"
    file.write_bytes(source.encode())
    found = make_patch(source, "train.py", name, [setting("num_workers", 4, 5)])
    assert (found.text != source, found.by_hand) == (True, [])
    command = ["git", "apply", "-"]
    done = subprocess.run(command, cwd=tmp_path, input=found.diff.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().decode() == found.text


def test_several_settings_of_one_script() -> None:
    source = (
        "import torch\r\nfrom torch.optim import AdamW\r\n"
        "from torch.utils.data import DataLoader\r\n\r\n"
        "x = DataLoader(d)\r\no = AdamW(p, lr=1)"
    )
    found = patched(
        source,
        setting("tf32", True, None, 'torch.set_float32_matmul_precision("high")'),
        setting("num_workers", 2, 5),
        setting("persistent_workers", True, 5),
        setting("fused", True, 6, "AdamW(..., fused=True)"),
        setting("compile", True, None, "model = torch.compile(model)"),
    )
    assert found.text == (
        "import torch\r\nfrom torch.optim import AdamW\r\n"
        "from torch.utils.data import DataLoader\r\n"
        'torch.set_float32_matmul_precision("high")\n\r\n'
        "x = DataLoader(d, num_workers=2, persistent_workers=True)\r\n"
        "o = AdamW(p, lr=1, fused=True)"
    )
    assert [one.setting for one in found.by_hand] == ["compile"]
    ast.parse(found.text)


def test_a_line_without_an_import_of_torch_before_it_is_added_by_hand() -> None:
    line = 'torch.set_float32_matmul_precision("high")'
    for source in ("import torch as th\nx = 1\n", "x = 1\n", "import torch\n"):
        found = patched(source, setting("tf32", True, None, line))
        assert (found.diff, found.by_hand[0].where) == ("", "after the imports")


def test_optimizers_of_two_classes_are_changed() -> None:
    source = f"{IMPORTS}a = torch.optim.Adam(p)\nb = torch.optim.SGD(q)\n"
    lines = ["Adam(..., fused=True)", "SGD(..., fused=True)"]
    places = [CallPlace("train.py", line) for line in (3, 4)]
    both = replace(setting("fused", True, None, *lines), places=places)
    found = patched(source, both)
    assert found.text == source.replace("p)", "p, fused=True)").replace("q)", "q, fused=True)")
    assert found.by_hand == []
    one_line = source.replace("p)\nb", "p); b")
    found = patched(one_line, replace(both, places=places[:1]))
    assert (found.diff, found.by_hand[0].lines) == ("", lines)


def test_a_call_in_another_file_is_changed_by_hand() -> None:
    places = [CallPlace("other/model.py", 3)]
    entry = replace(setting("fused", True, None, "AdamW(..., fused=True)"), places=places)
    found = patched(IMPORTS + "x = AdamW(p)\n", entry)
    assert (found.diff, found.by_hand[0].where) == ("", "model.py, line 3")
