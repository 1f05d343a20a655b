"""CSV files and class folders as people and enemies write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from trainer.workloads.images import ImageError, ImageList, read_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ten images a.png to j.png."""
    return make_images(tmp_path / "set", *(f"{name}.png" for name in "abcdefghij"))


def make_images(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    return root


def table(folder: Path, text: str | bytes, name: str = "labels.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(*lines: str, header: str = "path,label") -> str:
    return "\n".join([header, *lines]) + "\n"


def labels(images: ImageList) -> dict[str, str]:
    return {entry.path: entry.label for entry in (*images.train, *images.validation)}


def split(images: ImageList) -> tuple[list[str], list[str]]:
    return [e.path for e in images.train], [e.path for e in images.validation]


GOOD = ["a.png,cat", "b.png,dog", "c.png,cat", "d.png,dog", "e.png,cat"]
FORMS = {
    "not-normalized": rows("./a.png,cat", ".//b.png,dog", *GOOD[2:]),
    "bom": b"\xef\xbb\xbf" + rows(*GOOD).encode(),
    "empty-lines": rows("", *GOOD[:2], "", *GOOD[2:], "", ""),
    "quoted": rows(*(f'" {line.replace(",", chr(34) + "," + chr(34))} "' for line in GOOD)),
    "more-columns": rows(*(f"0,{line},note" for line in GOOD), header=",path,label,extra"),
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_the_same_images_from_any_form_of_csv(folder: Path, text: str | bytes) -> None:
    images = read_images(table(folder, text))
    assert [f"{path},{label}" for path, label in sorted(labels(images).items())] == GOOD
    assert images.classes == ("cat", "dog")
    assert images.labels(images.train).tolist() == [e.label == "dog" for e in images.train]


def test_a_fixed_fifth_is_held_out_where_nothing_says_so(folder: Path) -> None:
    path = table(folder, rows(*(f"{name}.png,{name in 'aceg'}" for name in "abcdefghij")))
    train, validation = split(read_images(path))
    assert (len(train), len(validation)) == (8, 2)
    assert split(read_images(path)) == (train, validation)
    assert not set(train) & set(validation)


def test_the_split_column_decides_and_test_rows_stay_unread(folder: Path) -> None:
    parts = ["train", "VAL", "validation", " Train ", "test"]
    lines = [f"{line},{part}" for line, part in zip(GOOD, parts, strict=True)]
    images = read_images(table(folder, rows(*lines, header="path,label,split")))
    assert split(images) == (["a.png", "d.png"], ["b.png", "c.png"])


def test_a_folder_with_one_or_two_tables(folder: Path) -> None:
    table(folder, rows(*GOOD), "train.csv")
    assert [len(part) for part in split(read_images(folder))] == [4, 1]
    table(folder, rows(*GOOD[:3]), "train.csv")
    table(folder, rows(*GOOD[3:]), "val.csv")
    images = read_images(folder)
    assert split(images) == (["a.png", "b.png", "c.png"], ["d.png", "e.png"])
    assert images.validation[1].where == "val.csv, line 3"
    table(folder, rows(GOOD[0]), "val.csv")
    with pytest.raises(ImageError, match=r"^val\.csv, line 2: a\.png is already in train\.csv, l"):
        read_images(folder)


BAD_ROWS = [
    ("../secret.png,x", "is outside the folder"),
    ("/etc/passwd,x", "is outside the folder"),
    ("link.png,x", "link.png is outside the folder"),
    ("linked/secret.png,x", "linked/secret.png is outside the folder"),
    ("nowhere/a.png,x", "there is no file nowhere/a.png"),
    ("pipe.png,x", "there is no file pipe.png"),
    ("empty.png,x", "empty.png has 0 bytes"),
    ("large.png,x", "large.png has 68,157,440 bytes, 1 to 67,108,864 are allowed"),
    ("a\0b.png,x", "a�b.png is no valid file name"),
    ("f.png,", "the label has 0 characters"),
    ("f.png," + "x" * 201, "the label has 201 characters"),
    ("f.png", "it does not have the 2 columns"),
    ("a.png,bird", "a.png is already in labels.csv, line 2"),
]


@pytest.fixture
def traps(folder: Path) -> Path:
    (folder.parent / "secret.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "linked").symlink_to(folder.parent)
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
            assert len(str(caught.value)) < 400


SPLIT_HEADER = "path,label,split"
NO_TABLES: list[tuple[str | bytes, str]] = [
    ("", "columns named path and label are needed"),
    ("path,label\n", "classes or more are needed, got 0 with 0 images"),
    (rows(*GOOD, header="a,b"), "columns named path and label are needed, got 'a,b'"),
    (rows("a.png,x,train", "b.png,x,dev", header=SPLIT_HEADER), "line 3: the split is not train"),
    (rows("a.png,x,val", "b.png,y,val", header=SPLIT_HEADER), "every image is for validation"),
    (rows('"a.png,x', "b.png,y"), "labels.csv: unexpected end of data. Save it as CSV"),
    ("path,label\ncafé.png,x\n".encode("latin-1"), "labels.csv: 'utf-8' codec can't decode byte"),
]


@pytest.mark.parametrize(("text", "words"), NO_TABLES, ids=[words for _, words in NO_TABLES])
def test_a_file_that_is_no_table_of_images_is_one_sentence(
    folder: Path, text: str | bytes, words: str
) -> None:
    with pytest.raises(ImageError) as caught:
        read_images(table(folder, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_class_folders_with_deeper_ones_and_other_files(tmp_path: Path) -> None:
    names = ["cat/1.png", "cat/deep/2.JPG", "dog/1.png", "dog/2.png", "dog/3.gif"]
    make_images(tmp_path, *names, ".cache/1.png", "cat/.hidden.png")
    (tmp_path / "cat" / "notes.txt").write_text("x")
    images = read_images(tmp_path)
    assert labels(images) == {name: name[:3] for name in names}
    assert len(images.validation) == 1


def test_class_folders_parted_by_hand(tmp_path: Path) -> None:
    make_images(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/1.png")
    images = read_images(tmp_path)
    assert split(images) == (["train/cat/1.png", "train/dog/1.png"], ["val/cat/1.png"])
    assert labels(images)["val/cat/1.png"] == "cat"


@pytest.mark.parametrize("linked", ["dog/3.png", "bird"])
def test_links_out_of_class_folders_are_refused(tmp_path: Path, linked: str) -> None:
    root = make_images(tmp_path / "set", "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    make_images(tmp_path, "secret/1.png")
    target = "secret" if linked == "bird" else "secret/1.png"
    (root / linked).symlink_to(tmp_path / target)
    with pytest.raises(ImageError, match=rf"^set: {linked}.* is outside the folder"):
        read_images(root)


@pytest.mark.parametrize("name", ["train.csv", "validation.csv"])
def test_a_table_that_is_a_link_is_not_read(folder: Path, name: str) -> None:
    for table_name in ("train.csv", "validation.csv"):
        table(folder, rows(*GOOD[:3]), table_name)
    secret = table(folder.parent, "secret:x:0:0\n", "passwd")
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    with pytest.raises(ImageError, match="is a symbolic link") as caught:
        read_images(folder)
    assert "secret" not in str(caught.value)
