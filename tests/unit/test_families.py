"""The families of slow and CUDA tests: complete, and selected by what a change touches."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import families
from tests.families import CUDA, FAMILIES, ROOT, SLOW, TESTS


def test_each_file_exists_and_is_in_one_family_as_every_cuda_file_is() -> None:
    files = [file for family in FAMILIES.values() for file in family.files]
    assert len(files) == len(set(files))
    assert [file for file in files if not (TESTS / file).is_file()] == []
    patterns = ("gpu/test_*.py", "simulator/test_*.py", "browser/test_cuda_*.py")
    found = {str(path.relative_to(TESTS)) for one in patterns for path in TESTS.glob(one)}
    assert found == {file for family in CUDA.values() for file in family.files}


def test_every_slow_family_has_a_core_among_its_tests() -> None:
    for name, family in SLOW.items():
        assert family.core, name
        for test in family.core:
            file, _, function = test.partition("::")
            assert file in family.files
            tree = ast.parse((TESTS / file).read_text("utf-8"))
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function.partition("[")[0] in names, test
    for family in CUDA.values():
        assert set(family.core) <= set(family.files)


def test_every_path_of_the_map_exists() -> None:
    paths = {path for family in FAMILIES.values() for path in family.paths}
    missing = [path for path in paths if not list(ROOT.glob(f"{path.removesuffix('/')}*"))]
    assert missing == []


@pytest.mark.parametrize(
    ("changed", "some"),
    [
        ("stepscope/distributed/rendezvous.py", {"hangs", "stragglers", "runners", "cuda-jobs"}),
        ("simulator/src/nccl.cpp", set(CUDA)),
        ("docs/lab.md", set()),
        ("tests/gpu/test_oom_gpu.py", {"cuda-memory"}),
        ("tests/scripts/hanging.py", {"hangs"}),
    ],
)
def test_a_change_brings_the_families_of_its_folder(changed: str, some: set[str]) -> None:
    found = {name for name, _ in families.concerned([changed])}
    assert some <= found
    assert bool(found) == bool(some)


def test_shared_code_of_tests_brings_the_families_that_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("from tests.support.jobs import Job\n")
    (tmp_path / "tests" / "test_two.py").write_text("")
    monkeypatch.setattr(families, "ROOT", tmp_path)
    table = {
        name: families.Family(paths=("product/",), files=(f"test_{name}.py",))
        for name in ("one", "two")
    }
    monkeypatch.setattr(families, "FAMILIES", table)
    assert dict(families.concerned(["tests/support/jobs.py"])) == {"one": "tests/support/jobs.py"}
