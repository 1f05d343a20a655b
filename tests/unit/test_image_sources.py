"""CSV files and class folders as people and enemies write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from trainer.workloads import image_index as lists
from trainer.workloads import image_index as sources
from trainer.workloads.image_index import ImageError, ImageList, read_images

NAMES = [f"{name}.png" for name in "abcdefghij"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ten images a.png to j.png."""
    here = tmp_path / "set"
    here.mkdir()
    for name in NAMES:
        Image.new("RGB", (4, 4)).save(here / name)
    return here


def table(folder: Path, text: str | bytes, name: str = "labels.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(*lines: str, header: str = "path,label") -> str:
    return "\n".join([header, *lines]) + "\n"


def paths(images: ImageList) -> dict[str, str]:
    return {entry.path: entry.label for entry in (*images.train, *images.validation)}


GOOD = ["a.png,cat", "b.png,dog", "c.png,cat", "d.png,dog", "e.png,cat"]
PLAIN = {"a.png": "cat", "b.png": "dog", "c.png": "cat", "d.png": "dog", "e.png": "cat"}


FORMS = {
    "plain": rows(*GOOD),
    "not-normalized": rows("./a.png,cat", ".//b.png,dog", *GOOD[2:]),
    "windows-lines": rows(*GOOD).replace("\n", "\r\n"),
    "bom": b"\xef\xbb\xbf" + rows(*GOOD).encode(),
    "utf-16": rows(*GOOD).encode("utf-16"),
    "empty-lines": rows("", *GOOD[:2], " ", ",", *GOOD[2:], "", ""),
    "no-header": "\n".join(GOOD),
    "other-names": rows(*GOOD, header="Image_Path , Target"),
    "semicolons": rows(*(line.replace(",", ";") for line in GOOD), header="path;label"),
    "tabs": rows(*(line.replace(",", "\t") for line in GOOD), header="path\tlabel"),
    "dot-slash": rows(*(f"./{line}" for line in GOOD)),
    "quoted": rows(
        *(f'" {line.split(",")[0]} ", "{line.split(",")[1]} "' for line in GOOD)
    ).replace(', "', ',"'),
    "twice": rows(*GOOD, GOOD[0], f"./{GOOD[0]}"),
    "more-columns": rows(*(f"0,{line},note" for line in GOOD), header=",path,label,extra"),
    "other-order": rows(
        *(",".join(reversed(line.split(","))) for line in GOOD), header="label,path"
    ),
}


def test_the_same_images_from_any_form_of_csv(folder: Path, subtests: pytest.Subtests) -> None:
    for name, text in FORMS.items():
        with subtests.test(name):
            images = read_images(table(folder, text))
            assert paths(images) == PLAIN
            assert images.classes == ("cat", "dog")


def test_a_fixed_fifth_is_held_out_where_nothing_says_so(folder: Path) -> None:
    text = rows(*(f"{name},{2 + 8 * (place % 2)}" for place, name in enumerate(NAMES)))
    one = read_images(table(folder, text))
    again = read_images(table(folder, text))
    assert (len(one.train), len(one.validation)) == (8, 2)
    assert one.classes == ("2", "10"), "in the order of numbers"
    assert one.validation == again.validation
    assert not {e.path for e in one.train} & {e.path for e in one.validation}
    for entries in (one.train, one.validation):
        numbers = one.labels(entries).tolist()
        assert [one.classes[number] for number in numbers] == [e.label for e in entries]


def test_the_split_column_decides_and_test_rows_stay_unread(folder: Path) -> None:
    split = ["train", "VAL", "validation", " Training ", "test"]
    lines = [f"{line},{part}" for line, part in zip(GOOD, split, strict=True)]
    images = read_images(table(folder, rows(*lines, header="path,label,split")))
    assert [entry.path for entry in images.train] == ["a.png", "d.png"]
    assert [entry.path for entry in images.validation] == ["b.png", "c.png"]
    assert "e.png" not in paths(images)


def test_a_folder_with_one_or_two_tables(folder: Path) -> None:
    name = "val.csv"
    table(folder, rows(*GOOD), "train.csv")
    images = read_images(folder)
    assert (len(images.train), len(images.validation)) == (4, 1)
    table(folder, rows(*GOOD[:3]), "train.csv")
    table(folder, rows(*GOOD[3:]), name)
    images = read_images(folder)
    assert [entry.path for entry in images.train] == ["a.png", "b.png", "c.png"]
    assert [entry.where for entry in images.validation] == [f"{name}, line 2", f"{name}, line 3"]


BAD_ROWS = [
    ("../secret.png,x", "points outside the folder or at no file in it"),
    ("in\\..\\..\\secret.png,x", "points outside the folder or at no file in it"),
    ("/etc/passwd,x", "is absolute; paths are relative to the CSV file"),
    ("C:\\a.png,x", "is absolute"),
    ("missing.png,x", "there is no file missing.png"),
    ("nowhere/a.png,x", "there is no file nowhere/a.png"),
    ("a.png/b.png,x", "a.png/b.png cannot be read (Not a directory)"),
    (".,x", "the path has 0 characters"),
    ("link.png,x", "link.png is a symbolic link"),
    ("linked/a.png,x", "linked/a.png is a symbolic link or in a linked folder"),
    ("pipe.png,x", "pipe.png is no file"),
    ("empty.png,x", "empty.png is empty"),
    ("large.png,x", "large.png has 65 MiB, 64 are allowed"),
    ("a\0b.png,x", "a?b.png has control characters"),
    ("f" * 300 + ".png,x", "cannot be read (File name too long)"),
    ("f/" * 600 + "a.png,x", "the path has 1,205 characters"),
    ("f.png,", "the label has 0 characters"),
    ("f.png," + "x" * 201, "the label has 201 characters"),
    ("f.png", "it has 1 of the 2 columns"),
    ("a.png,bird", "a.png is already in labels.csv, line 2, with another label or split"),
]


@pytest.fixture
def traps(folder: Path) -> Path:
    (folder.parent / "secret.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "in").mkdir()
    (folder / "link.png").symlink_to(folder / "a.png")
    (folder / "linked").symlink_to(folder)
    os.mkfifo(folder / "pipe.png")
    (folder / "empty.png").touch()
    with (folder / "large.png").open("wb") as file:
        file.truncate(65 * 2**20)
    return folder


def test_a_bad_row_is_named_and_ends_the_run(traps: Path, subtests: pytest.Subtests) -> None:
    for line, reason in BAD_ROWS:
        with subtests.test(reason):
            path = table(traps, rows(*GOOD, line))
            with pytest.raises(ImageError) as caught:
                read_images(path)
            assert str(caught.value).startswith("labels.csv, line 7: ")
            assert reason in str(caught.value)
            assert str(caught.value).endswith("Fix or remove it.")
            assert len(str(caught.value)) < 400


def test_an_image_of_two_splits_or_of_an_unknown_one_is_refused(folder: Path) -> None:
    table(folder, rows(*GOOD), "train.csv")
    table(folder, rows(GOOD[0]), "val.csv")
    with pytest.raises(ImageError, match=r"^val\.csv, line 2: a\.png .* train\.csv, line 2, with"):
        read_images(folder)
    with pytest.raises(ImageError, match="line 3: the split is 'dev', not train, validation or"):
        read_images(table(folder, rows("a.png,x,train", "b.png,x,dev", header="path,label,split")))


NO_TABLES = [
    ("", "labels.csv has no rows"),
    ("path,label\n", "at least two classes are needed, got 0 with 0"),
    (rows("a.png,x", "b.png,x"), "at least two classes are needed, got 1 with 2 images."),
    ("a,b\nc,d\n", "columns named path and label are needed, got a, b"),
    (rows('"a.png,x', "b.png,y"), "no valid CSV"),
    (rows("x" * 200_000 + ",x"), "no valid CSV"),
    ("path,label\ncafé.png,x\n".encode("latin-1"), "line 2: not in UTF-8 (byte 0xe9)"),
    (b"\xff\xfe\x00", "not in UTF-16"),
    (b"\x89PNG\r\n\x1a\n\0\0", "not in UTF-8"),
]


def test_a_file_that_is_no_table_of_images_is_one_sentence(
    folder: Path, subtests: pytest.Subtests
) -> None:
    for text, words in NO_TABLES:
        with subtests.test(words):
            with pytest.raises(ImageError) as caught:
                read_images(table(folder, text))
            assert words in str(caught.value)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 300


def test_limits_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(folder, rows(*GOOD))
    monkeypatch.setattr(lists, "MAX_IMAGES", 4)
    with pytest.raises(ImageError, match="at most 4 images are possible"):
        read_images(path)
    monkeypatch.setattr(lists, "MAX_IMAGES", 5)
    monkeypatch.setattr(lists, "MAX_CLASSES", 1)
    with pytest.raises(ImageError, match="at most 1 classes are possible, got 2"):
        read_images(path)
    monkeypatch.setattr(sources, "MAX_CSV_BYTES", 10)
    with pytest.raises(ImageError, match="are allowed"):
        read_images(path)


def class_folders(root: Path, *names: str) -> None:
    for place, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (place, 0, 0)).save(path)


def test_class_folders_with_deeper_ones_and_other_files(tmp_path: Path) -> None:
    class_folders(tmp_path, "cat/1.png", "cat/deep/2.JPG", "dog/1.png", "dog/2.png", "dog/3.gif")
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / "cat" / ".hidden.png").write_text("x")
    (tmp_path / ".cache").mkdir()
    images = read_images(tmp_path)
    assert paths(images) == {
        "cat/1.png": "cat",
        "cat/deep/2.JPG": "cat",
        "dog/1.png": "dog",
        "dog/2.png": "dog",
        "dog/3.gif": "dog",
    }
    assert len(images.validation) == 1


def test_class_folders_parted_by_hand(tmp_path: Path) -> None:
    class_folders(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/1.png")
    images = read_images(tmp_path)
    assert [entry.path for entry in images.train] == ["train/cat/1.png", "train/dog/1.png"]
    assert [entry.path for entry in images.validation] == ["val/cat/1.png"]


def test_links_in_class_folders_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "set"
    class_folders(root, "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    (tmp_path / "secret.png").write_bytes((root / "cat/1.png").read_bytes())
    (root / "dog" / "3.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ImageError, match=r"^dog/3\.png is a symbolic link"):
        read_images(root)
    (root / "dog" / "3.png").unlink()
    (root / "bird").symlink_to(root / "cat")
    with pytest.raises(ImageError, match="^bird: it is a symbolic link"):
        read_images(root)


@pytest.mark.parametrize("name", ["train.csv", "validation.csv"])
def test_a_table_that_is_a_link_is_not_read(folder: Path, name: str) -> None:
    for table_name in ("train.csv", "validation.csv"):
        table(folder, rows(*GOOD), table_name)
    secret = table(folder.parent, "secret:x:0:0\n", "passwd")
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    with pytest.raises(ImageError, match="is a symbolic link") as caught:
        read_images(folder)
    assert "secret" not in str(caught.value)
