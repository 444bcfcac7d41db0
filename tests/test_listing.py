"""Flat folders, hidden folders, classes without test images, and files that look like images."""
import csv
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

import cli
import data
import evaluate
import listing
import train_crae
from helpers import QUICK, make_image_folder

# ---------------------------------------------------------------- forms of folders


def make_flat_folder(root, sizes):
    """root/<class>/<i>.png with the given numbers of images."""
    rng = np.random.default_rng(0)
    for name, n in sizes.items():
        (root / name).mkdir(parents=True)
        for i in range(n):
            Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8)).save(root / name / f"{i}.png")
    return str(root)


def load(root, **flags):
    images, labels, parts, classes = data.load(str(root), "nowhere", 16, **flags)
    return labels, parts, classes


def test_a_flat_folder_holds_out_a_tenth_of_each_class(tmp_path, capsys):
    root = make_flat_folder(tmp_path / "flat", dict(b=40, a=3, only=1, unlabeled=4))
    labels, parts, classes = load(root)
    assert classes == ["a", "b", "only"]
    assert np.bincount(labels[parts["test"]]).tolist() == [1, 4]
    assert np.bincount(labels[parts["train"]]).tolist() == [2, 36, 1] and len(parts["unlabeled"]) == 4
    assert ("no test set is given: 5 of 44 labelled images (a tenth, at least one per class) are held out"
            in capsys.readouterr().out)
    again = load(root)[1]
    assert all(np.array_equal(parts[part], again[part]) for part in parts)


def test_listed_images_of_a_flat_folder_are_never_in_the_test_set(tmp_path):
    root = make_flat_folder(tmp_path / "flat", dict(a=10, b=10))
    (tmp_path / "list.txt").write_text("\n".join(f"{c}/{i}.png" for c in "ab" for i in range(9)))
    labels, parts, _ = load(root, labels_file=str(tmp_path / "list.txt"))
    assert len(parts["labeled"]) == 18 and len(parts["test"]) == 2
    names = ["9.png", "9.png"]
    images, *_ = data.load(root, "nowhere", 16, labels_file=str(tmp_path / "list.txt"))
    assert [images.files[i][-5:] for i in parts["test"]] == names


def test_hidden_folders_are_no_classes_and_their_images_are_counted(tmp_path, capsys):
    root = tmp_path / "images"
    make_image_folder(root, classes=["a", "b"], n=3)
    for place in "train/.ipynb_checkpoints", "train/a/.thumbnails", "train/__MACOSX", "test/.hidden":
        (root / place).mkdir()
        (root / place / "x.png").write_bytes((root / "train" / "a" / "0.png").read_bytes())
    _, parts, classes = load(root)
    assert classes == ["a", "b"] and len(parts["train"]) == len(parts["test"]) == 6
    assert "not used: 1 other file (.png), 1 of them in hidden folders" in capsys.readouterr().out
    flat = tmp_path / "flat"
    make_flat_folder(flat, dict(a=10, b=10))
    (flat / ".git").mkdir()
    assert load(flat)[2] == ["a", "b"]


def test_a_class_without_test_images_is_a_note(tmp_path, capsys):
    root = tmp_path / "images"
    make_image_folder(root, classes=["a", "b", "c", "d"], n=4)
    for file in [*(root / "test" / "b").iterdir(), *(root / "test" / "c").iterdir()]:
        file.unlink()
    (root / "test" / "c").rmdir()                               # b is empty, c is missing
    flags = dict(QUICK, dataset=str(root), labels=8, image_size=16, steps=1, out=str(tmp_path / "run"))
    assert train_crae.train(**flags)["step"] == 1
    assert "note: the test set has no images of 2 of 4 classes (b, c)" in capsys.readouterr().out
    assert evaluate.use_model("test", str(tmp_path / "run"), device="cpu")["images"] == 8


def test_folders_that_are_refused(tmp_path):
    def refused(root, message):
        with pytest.raises(cli.Refused, match=message) as stop:
            load(root)
        assert "\n" not in str(stop.value)

    make_image_folder(tmp_path / "above" / "images")
    refused(tmp_path / "above", "no folder train/, but images/ has one; give --dataset .*above/images")
    make_image_folder(tmp_path / "part", ["test"])
    refused(tmp_path / "part", "no folder train/, only test/; create it")
    make_flat_folder(tmp_path / "gap", dict(a=3, b=0))
    refused(tmp_path / "gap", "found no image in the class folder b; add some")
    make_flat_folder(tmp_path / "british", dict(a=3, b=3, unlabelled=3))
    refused(tmp_path / "british", "rename unlabelled/ to unlabeled/")
    (tmp_path / "none" / "train" / ".cache").mkdir(parents=True)
    refused(tmp_path / "none", "train/ contains no class folder")
    refused("/", "is the root of the disk")


# ---------------------------------------------------------------- files that look like images


def without_heif(monkeypatch):
    monkeypatch.setattr(listing, "find_spec", lambda name: None)
    listing.endings.cache_clear()


@pytest.fixture(autouse=True)
def forget_formats():
    yield
    listing.endings.cache_clear()


def test_files_that_look_like_images_are_named_and_others_counted(tmp_path, monkeypatch, capsys):
    without_heif(monkeypatch)
    root = tmp_path / "images"
    make_image_folder(root, classes=["a", "b"], n=3)
    (root / "unlabeled").mkdir()
    Image.new("RGB", (9, 9)).save(root / "unlabeled" / "0.png")
    for name in "train/a/x.HEIC", "train/a/y.heic", "unlabeled/scan.jp2", "test/b/drawing.svg", "raw.CR2":
        (root / name).write_bytes(b"?")
    (root / "train" / "lost.png").write_bytes((root / "train" / "a" / "0.png").read_bytes())
    for name in "train/a/notes.txt", "train/Thumbs.db", "README.txt", "unlabeled/.DS_Store":
        (root / name).write_bytes(b"?")
    (root / "valid").mkdir()
    _, parts, _ = load(root)
    assert len(parts["train"]) == len(parts["test"]) == 6 and len(parts["unlabeled"]) == 1
    lines = capsys.readouterr().out.splitlines()
    heic, = [line for line in lines if "HEIC" in line]
    assert heic == ("not read: train/a/x.HEIC, train/a/y.heic (to read .heic files, install the package "
                    "pillow-heif)")
    for name in "unlabeled/scan.jp2", "test/b/drawing.svg", "raw.CR2":
        assert any(line.startswith(f"not read: {name} (.") and "convert" in line for line in lines), name
    assert "not read: train/lost.png (in no folder of a class)" in lines
    assert "not used: valid/ (only train/, test/, val/ and unlabeled/ are used)" in lines
    others, = [line for line in lines if "other file" in line]
    assert others == "not used: 4 other files (.txt, .db, .DS_Store)"


def test_many_unread_files_are_summarised(tmp_path, monkeypatch, capsys):
    listing.print_unread(tmp_path, [tmp_path / f"{i:02}.svg" for i in range(25)])
    line, = capsys.readouterr().out.splitlines()
    assert "18.svg, 19.svg and 5 more (" in line and "20.svg" not in line


def test_avif_is_read_where_pillow_can(tmp_path, monkeypatch, capsys):
    root = make_image_folder(tmp_path / "images", n=3)
    file = tmp_path / "images" / "train" / "ö" / "z.avif"
    if listing.features.check("avif"):
        Image.new("RGB", (20, 20), (250, 0, 0)).save(file, quality=95)
        images, _, parts, _ = data.load(root, "nowhere", 16)
        assert len(parts["train"]) == 7 and images[6, 0].min() > 200 > 60 > images[6, 1].max()
    file.write_bytes(b"?")
    monkeypatch.setattr(listing.features, "check", lambda name: False)
    listing.endings.cache_clear()
    capsys.readouterr()
    assert len(load(root)[1]["train"]) == 6
    assert "z.avif (this Pillow was built without AVIF" in capsys.readouterr().out


def test_heic_is_read_where_pillow_heif_is_installed(tmp_path, monkeypatch):
    registered = []
    fake = ModuleType("pillow_heif")
    fake.__spec__, fake.register_heif_opener = ModuleSpec("pillow_heif", None), lambda: registered.append(1)
    monkeypatch.setitem(sys.modules, "pillow_heif", fake)
    root = make_image_folder(tmp_path / "images", n=3)
    train = tmp_path / "images" / "train" / "ö"
    (train / "z.HEIC").write_bytes((train / "0.png").read_bytes())      # Pillow looks at the content
    listing.endings.cache_clear()
    images, _, parts, _ = data.load(root, "nowhere", 16)
    assert registered == [1] and len(parts["train"]) == 7
    assert (images[6] == images[3]).all()


def test_predict_has_a_row_with_an_error_for_each_unread_image(tmp_path, monkeypatch, capsys):
    without_heif(monkeypatch)
    root = make_image_folder(tmp_path / "images", n=4)
    train_crae.train(**QUICK, dataset=root, labels=4, image_size=16, steps=1, out=str(tmp_path / "run"))
    folder = tmp_path / "photos"
    make_flat_folder(folder, dict(sub=2))
    for name in "sub/a.heic", "b.svg":
        (folder / name).write_bytes(b"?")
    for name in "notes.txt", "sub/list.csv":
        (folder / name).write_bytes(b"?")
    (tmp_path / "single.heic").write_bytes(b"?")
    for name in ".ipynb_checkpoints", "sub/.cache":             # as in training, these are ignored
        make_flat_folder(folder, {name: 1})
    capsys.readouterr()
    with pytest.raises(cli.Refused, match="3 of 5 files could not be read"):
        evaluate.use_model("predict", str(tmp_path / "run"), str(folder), str(tmp_path / "single.heic"),
                           out=str(tmp_path / "p.csv"), device="cpu")
    assert f"{folder}: 4 other files ignored" in capsys.readouterr().out
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    errors = {row["file"].rpartition("/")[2]: row["error"] for row in rows}
    assert len(rows) == 5 and not any(None in row.values() for row in rows)     # as many cells as columns
    assert errors.keys() == {"0.png", "1.png", "a.heic", "b.svg", "single.heic"}
    assert not errors["0.png"] and ".svg files are not read; convert" in errors["b.svg"]
    assert "pillow-heif" in errors["a.heic"] and "pillow-heif" in errors["single.heic"]
