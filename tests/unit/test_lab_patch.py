"""The patch of a script: the calls are changed, the rest of the text is not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stepscope.lab.folder import AppliedSetting, CallPlace
from stepscope.lab.patch import Patch, make_patch

IMPORTS = "import torch\nfrom torch.utils.data import DataLoader\n"


def setting(name: str, value: bool | int, line: int | None, *lines: str) -> AppliedSetting:
    places = [] if line is None else [CallPlace("train.py", line)]
    return AppliedSetting(
        name=name, value=value, state="in effect", text="", lines=list(lines), places=places
    )


def patched(source: str, *settings: AppliedSetting) -> Patch:
    return make_patch(source, "train.py", "train.py", settings)


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("x = DataLoader(d)", "x = DataLoader(d, num_workers=4)"),
        ("x = DataLoader(d, num_workers=0)  # c", "x = DataLoader(d, num_workers=4)  # c"),
        ("x = DataLoader(\n    d,\n)", "x = DataLoader(\n    d,\n    num_workers=4,\n)"),
        ("x = DataLoader(\n    d,  # c\n)", "x = DataLoader(\n    d, num_workers=4,  # c\n)"),
        ("x = torch.utils.data.DataLoader(d)", "x = torch.utils.data.DataLoader(d, num_workers=4)"),
        ("def f():\n    return DataLoader(d)", None),
        ("x = DataLoader('é', d)", "x = DataLoader('é', d, num_workers=4)"),
    ],
)
def test_a_call_gets_the_argument(call: str, after: str | None) -> None:
    line = 4 if call.startswith("def") else 3
    found = patched(IMPORTS + call + "\n", setting("num_workers", 4, line))
    after = after or "def f():\n    return DataLoader(d, num_workers=4)"
    assert (found.text, found.by_hand) == (IMPORTS + after + "\n", [])
    assert "num_workers=4" in found.diff


@pytest.mark.parametrize(
    "call",
    [
        "x = DataLoader(d, **options)",
        "x = DataLoader(*d)",
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


def test_several_settings_of_one_script() -> None:
    source = (
        "import torch as th\r\nfrom torch.optim import AdamW as Best\r\n"
        "from torch.utils.data import DataLoader as DL\r\n\r\n"
        "x = DL(d)\r\no = Best(p, lr=1)"
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
        "import torch as th\r\nfrom torch.optim import AdamW as Best\r\n"
        "from torch.utils.data import DataLoader as DL\r\n"
        'th.set_float32_matmul_precision("high")\r\n\r\n'
        "x = DL(d, num_workers=2, persistent_workers=True)\r\no = Best(p, lr=1, fused=True)"
    )
    assert [one.setting for one in found.by_hand] == ["compile"]
    ast.parse(found.text)


def test_a_call_in_another_file_is_changed_by_hand() -> None:
    entry = AppliedSetting(
        name="fused",
        value=True,
        state="in effect",
        text="",
        lines=["AdamW(..., fused=True)"],
        places=[CallPlace(str(Path("other/model.py")), 3)],
    )
    found = patched(IMPORTS + "x = AdamW(p)\n", entry)
    assert (found.diff, found.by_hand[0].where) == ("", "model.py, line 3")
