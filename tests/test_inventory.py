"""Names and fingerprints of images, moved data, split.csv, and notes on the data."""
import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import cli
import data
import evaluate
import inventory
import train_crae
from helpers import QUICK, everything_in, make_image_folder, same

# ---------------------------------------------------------------- fingerprints


def fingerprint(root, like=None, **flags):
    images, labels, parts, classes = data.load(str(root), "nowhere", 16, **flags)
    return inventory.fingerprint(images, labels, parts, classes, like)


def test_the_fingerprint_of_a_folder_does_not_depend_on_its_place(tmp_path):
    make_image_folder(tmp_path / "one", n=3)
    first = fingerprint(tmp_path / "one")
    assert fingerprint(tmp_path / "one", stream=True) == first and len(first) == 12
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "deep")
    assert fingerprint(tmp_path / "two" / "deep") == first
    file = tmp_path / "one" / "train" / "ö" / "1.png"
    content = file.read_bytes()
    file.rename(file.with_name("7.png"))
    assert fingerprint(tmp_path / "one") != first               # another name
    file.with_name("7.png").unlink()
    Image.new("RGB", (9, 9)).save(file)
    assert fingerprint(tmp_path / "one") != first               # another image of the same name
    file.write_bytes(content)
    assert fingerprint(tmp_path / "one") == first
    for part in "train", "test":
        (tmp_path / "one" / part / "ö").rename(tmp_path / "one" / part / "p")
    assert fingerprint(tmp_path / "one") != first               # another class


def test_the_fingerprint_of_an_earlier_run_is_still_recognised(tmp_path):
    root = make_image_folder(tmp_path / "one", n=3)
    images, labels, parts, _ = data.load(root, "nowhere", 16)
    value = inventory.zlib.crc32(labels.numpy())
    for part, index in parts.items():
        value = inventory.zlib.crc32(f"{part} {len(index)}".encode(), value)
    names = "\n".join("/".join(Path(file).parts[-2:]) for file in images.files)
    expected = f"{inventory.zlib.crc32(names.encode(), value):08x}"
    assert fingerprint(root, like="0" * 8) == expected != fingerprint(root)
    run = dict(QUICK, dataset=root, labels=4, image_size=16, out=str(tmp_path / "run"))
    train_crae.train(**run, steps=1)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | dict(data=expected)))
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    torch.save(saved | dict(whose=saved["whose"] | dict(data=expected)), tmp_path / "run" / "last.pt")
    assert evaluate.use_model("test", str(tmp_path / "run"), device="cpu")["images"] == 6
    assert train_crae.train(**run, steps=2, resume=True)["step"] == 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == expected


# ---------------------------------------------------------------- moved data


@pytest.fixture
def moved(tmp_path):
    """A run of one step on a folder with a table, which then moves: its flags, its folder, both places."""
    old, new = tmp_path / "old", tmp_path / "elsewhere" / "new"
    make_image_folder(old, ("x",), n=20)
    names = [file.relative_to(old) for file in sorted(old.rglob("*.png"))]
    (old / "labels.csv").write_text("image,label\n" + "\n".join(f"{n},{n.parent.name}" for n in names[::2]))
    flags = dict(QUICK, dataset=str(old), labels_file=str(old / "labels.csv"), image_size=16,
                 out=str(tmp_path / "run"))
    train_crae.train(**flags, steps=1)
    new.parent.mkdir()
    old.rename(new)
    return flags, Path(flags["out"]), old, new


def test_a_run_whose_data_moved_is_tested_and_continued_at_the_new_place(moved, tmp_path, capsys):
    flags, run, old, new = moved
    with pytest.raises(cli.Refused, match="its dataset .*old does not exist; if it was moved, give --datas"):
        evaluate.use_model("test", str(run), device="cpu")
    scores = evaluate.use_model("test", str(run), dataset=str(new), device="cpu")
    assert scores["images"] == 2
    there = flags | dict(dataset=str(new), labels_file=str(new / "labels.csv"))
    train_crae.train(**there, steps=2, resume=True)
    assert f"{new} has the images of the run in {run}, which were in {old}" in capsys.readouterr().out
    config = json.loads((run / "config.json").read_text())
    assert config["dataset"] == str(old) and config["steps"] == 2
    before = everything_in(run)
    assert train_crae.train(**there, steps=2, resume=True)["step"] == 2         # it is finished
    assert same(everything_in(run), before)
    new.rename(old)                                             # and back
    assert train_crae.train(**flags, steps=3, resume=True)["step"] == 3


def test_a_run_without_its_folder_asks_for_the_new_place(tmp_path):
    root = make_image_folder(tmp_path / "images", n=3)
    flags = dict(QUICK, dataset=root, labels=4, out=str(tmp_path / "run"), steps=1)
    train_crae.train(**flags)
    (tmp_path / "images").rename(tmp_path / "gone")
    with pytest.raises(cli.Refused, match="--dataset .*images: no such folder; if the images of the run in"):
        train_crae.train(**flags | dict(steps=2), resume=True)


def test_a_moved_run_has_the_bits_of_a_run_that_stayed(moved, tmp_path):
    flags, run, old, new = moved
    there = flags | dict(dataset=str(new), labels_file=str(new / "labels.csv"))
    train_crae.train(**there, steps=2, resume=True)
    train_crae.train(**there | dict(out=str(tmp_path / "stayed")), steps=2)
    a, b = (torch.load(folder / "model.pt", weights_only=True) for folder in (run, tmp_path / "stayed"))
    assert same(a["state"], b["state"])


def test_other_data_is_refused_even_for_a_finished_run(moved, tmp_path):
    flags, run, old, new = moved
    there = flags | dict(dataset=str(new), labels_file=str(new / "labels.csv"))
    file = next(iter(new.rglob("*.png")))
    Image.new("RGB", (30, 20)).save(file)                       # the same names, but another image
    for steps in 1, 2:
        with pytest.raises(cli.Refused, match=r"--dataset .*new: its images, .* differ from those of the run "
                                              r"in .*run \(it used .*old\); give another --out"):
            train_crae.train(**there, steps=steps, resume=True)
    with pytest.raises(cli.Refused, match="--dataset .*new: its images, labels or classes differ"):
        evaluate.use_model("test", str(run), dataset=str(new), device="cpu")
    for change in dict(lr=0.1), dict(batch=2), dict(dataset="digits", labels_file=None):
        with pytest.raises(cli.Refused, match=f"--({'|'.join(change)}|image_size) .*has "):
            train_crae.train(**there | change, steps=2, resume=True)


def test_where_the_flag_does_not_apply(moved, tmp_path):
    flags, run, old, new = moved
    with pytest.raises(cli.Refused, match="--dataset .*new: is for test, embed and explain only"):
        evaluate.use_model("export", str(run), dataset=str(new), device="cpu")
    train_crae.train(**QUICK, steps=1, out=str(tmp_path / "digits"))
    with pytest.raises(cli.Refused, match="--dataset .*new: the run in .*digits used digits; omit the flag"):
        evaluate.use_model("test", str(tmp_path / "digits"), dataset=str(new), device="cpu")


# ---------------------------------------------------------------- split.csv


def test_split_csv_lists_every_image_by_name(moved):
    flags, run, old, new = moved
    with (run / "split.csv").open() as file:
        rows = {row["file"]: (row["class"], row["split"]) for row in csv.DictReader(file)}
    names = [str(file.relative_to(new)) for file in sorted(new.rglob("*.png"))]
    assert sorted(rows) == names and len(names) == 40
    assert {name: rows[name] for name in names[1::2]} == dict.fromkeys(names[1::2], ("", "unlabelled"))
    assert all(rows[name][0] == Path(name).parent.name for name in names[::2])
    assert sorted(rows[name][1] for name in names[::2]) == ["labelled"] * 18 + ["test"] * 2


def test_split_csv_of_arrays_names_the_key_and_the_position(tmp_path):
    x, y = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8), np.array(["ant", "bee"] * 10)
    np.savez(tmp_path / "x.npz", train_images=x[:10], train_labels=y[:10], val_images=x[10:12],
             val_labels=y[10:12], test_images=x[12:16], test_labels=y[12:16], unlabeled_images=x[16:])
    run = tmp_path / "run"
    train_crae.train(**QUICK, dataset=str(tmp_path / "x.npz"), labels=4, steps=1, out=str(run))
    with (run / "split.csv").open() as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    labelled = [f"train_images[{i}]" for i in np.load(run / "split.npz")["labeled"]]
    assert [name for name, row in rows.items() if row["split"] == "labelled"] == labelled
    assert [name for name, row in rows.items() if row["split"] == "test"] == [
        f"test_images[{i}]" for i in range(4)]
    assert rows["val_images[1]"]["split"] == "validation" and rows["train_images[3]"]["class"] == "bee"
    assert rows["unlabeled_images[3]"] == {"file": "unlabeled_images[3]", "class": "", "split": "unlabelled"}
    assert len(rows) == 20


def test_images_that_are_labelled_and_unlabelled_are_listed_once():
    split = dict(labeled=np.array([1]), unlabeled=np.arange(3), validation=np.arange(0), test=np.array([3]))
    rows = inventory.split_rows(torch.zeros(4, 3, 8, 8), torch.zeros(4).long(), split, ["a"])
    assert [row["split"] for row in rows] == ["unlabelled", "labelled", "unlabelled", "test"]


# ---------------------------------------------------------------- notes


def notes(images, labels, test, capsys, classes=("a", "b", "c")):
    """The notes on images of which the last `test` are the test set."""
    n = len(labels)
    split = dict(labeled=np.arange(3), unlabeled=np.arange(3, n - test), validation=np.arange(0),
                 test=np.arange(n - test, n))
    inventory.print_notes(images, torch.as_tensor(labels), split, list(classes))
    return capsys.readouterr().out.splitlines()


def numbered(n):
    """n different images; the number is in the first two pixels."""
    images = torch.zeros(n, 8, 8, 3, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = torch.arange(n) % 256, torch.arange(n) // 256
    return images.permute(0, 3, 1, 2)


def test_notes_on_small_test_sets_missing_classes_and_uneven_classes(capsys):
    labels = np.arange(600) % 3
    assert notes(numbered(600), labels, 100, capsys) == []
    line, = notes(numbered(600), labels, 99, capsys)
    assert line.startswith("note: the test set has 99 images; one image is 1.0 % of the error")
    uneven = np.where(np.arange(600) < 500, np.arange(600) % 500 // 240, np.arange(600) % 3)    # 240, 240, 20
    line, = notes(numbered(600), uneven, 100, capsys)
    assert line.startswith("note: the classes are very uneven: 240 training images of a, 20 of c; ")
    even = np.where((uneven == 2) | (np.arange(600) % 41 == 0) & (np.arange(600) < 500), 2, uneven)
    assert notes(numbered(600), even, 100, capsys) == []        # less than a factor of ten
    missing = np.where((np.arange(600) >= 500) & (labels == 1), 0, labels)
    assert notes(numbered(600), missing, 100, capsys) == [
        "note: the test set has no images of 1 of 3 classes (b), so the test error says nothing about them"]


def test_images_in_train_and_test_are_found_in_memory_and_on_disk(tmp_path, capsys):
    images = numbered(600)
    images[510], images[520] = images[7], images[300]
    line, = notes(images, np.arange(600) % 3, 100, capsys)
    assert line == ("note: 2 of 100 test images are also among the training images, so the test error is too "
                    "low; for example images[510] is images[7]")
    root = tmp_path / "images"
    make_image_folder(root, n=4)
    (root / "test" / "ö" / "2.png").write_bytes((root / "train" / "a b" / "1.png").read_bytes())
    for stream in False, True:
        images, labels, parts, classes = data.load(str(root), "nowhere", 16, stream=stream)
        copies = inventory.find_copies(images, parts["test"], parts["train"])
        assert copies == {14: 1}
    flags = dict(QUICK, dataset=str(root), labels=4, image_size=16, steps=1, out=str(tmp_path / "run"))
    train_crae.train(**flags)
    assert "for example test/ö/2.png is train/a b/1.png" in capsys.readouterr().out
