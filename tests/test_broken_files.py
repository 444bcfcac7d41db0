"""Broken and unusual images, links and .npz files are loaded, skipped or refused with a one-line message."""
import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import cli
import data
import evaluate
import folders
import train_crae
from helpers import QUICK

TRIED = settings(max_examples=500, deadline=None, database=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

# ---------------------------------------------------------------- image files


@pytest.fixture
def photos(tmp_path):
    """A folder with two classes of six images each, for training and for testing."""
    root = tmp_path / "my photos"
    dice = np.random.default_rng(0)
    for part in "train", "test":
        for name in "a cat", "ünï":
            (root / part / name).mkdir(parents=True)
            for i in range(6):
                pixels = dice.integers(0, 256, (20, 24, 3), np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


def test_broken_images_stop_before_training_or_are_skipped(photos, tmp_path, capsys, monkeypatch):
    good = (photos / "train" / "a cat" / "0.png").read_bytes()
    bad = photos / "train" / "a cat"
    (bad / "empty.png").touch()
    (bad / "cut.png").write_bytes(good[:len(good) // 2])
    (bad / "text.jpg").write_text("not an image")
    (photos / "test" / "ünï" / "also.jpg").write_bytes(b"\xff\xd8\xff")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)        # stands in for PIL's 89 million
    Image.new("1", (100, 100)).save(bad / "bomb.png")
    (bad / "wrong.jpg").write_bytes(good)                       # a PNG with another ending is read
    frames = [Image.new("RGB", (10, 10), c) for c in ("red", "blue")]
    frames[0].save(bad / "moving.webp", save_all=True, append_images=frames[1:])
    Image.new("RGB", (1, 1)).save(bad / "dot.png")
    flags = dict(dataset=str(photos), labels=4, image_size=16, steps=2, **QUICK, out=str(tmp_path / "run"))
    with pytest.raises(cli.Refused, match="5 of 32 images cannot be read.*--skip_broken") as stop:
        train_crae.train(**flags)
    errors = capsys.readouterr().err
    assert "\n" not in str(stop.value) and not (tmp_path / "run").exists()
    for name in "empty.png", "cut.png", "text.jpg", "also.jpg", "bomb.png":
        assert name in errors
    train_crae.train(**flags, skip_broken=True)
    assert "skipping 5 of 32 images" in capsys.readouterr().out
    images, labels, parts, classes = data.load(str(photos), "nowhere", 16, skip_broken=True)
    assert len(parts["train"]) == 15 and len(parts["test"]) == 12 and len(images) == len(labels) == 27
    assert classes == ["a cat", "ünï"] and labels[:9].tolist() == [0] * 9 and labels[9:15].tolist() == [1] * 6
    assert evaluate.use_model("test", str(tmp_path / "run"), device="cpu")["images"] == 12


def test_skipped_images_do_not_change_the_others(photos):
    before, *_ = data.load(str(photos), "nowhere", 16)
    (photos / "train" / "a cat" / "2.png").write_bytes(b"")
    after, *_ = data.load(str(photos), "nowhere", 16, skip_broken=True)
    assert torch.equal(after, torch.cat([before[:2], before[3:]]))


@pytest.mark.slow
def test_a_decompression_bomb_is_refused(tmp_path):
    file = tmp_path / "bomb.png"
    Image.new("1", (20_000, 20_000)).save(file)
    with pytest.raises(Image.DecompressionBombError):
        folders.decode(file, 32)


def test_images_that_cannot_be_used(tmp_path):
    Image.new("RGB", (1, 60_000)).save(tmp_path / "thin.png")   # at 224 pixels it would have 13 million rows
    with pytest.raises(ValueError, match="1 x 60000 pixels is too long and thin"):
        folders.decode(tmp_path / "thin.png", 224)
    assert folders.decode(tmp_path / "thin.png", 8).shape == (8, 8, 3)
    for part in "train", "test":
        for name in "ab":
            (tmp_path / "folder" / part / name).mkdir(parents=True)
            (tmp_path / "folder" / part / name / "x.png").write_bytes((tmp_path / "thin.png").read_bytes())
    with pytest.raises(cli.Refused, match="4 of 4 images cannot be read"):      # even if they stay on disk
        data.load(str(tmp_path / "folder"), "nowhere", 224, stream=True)
    grey = np.full((8, 8), 0.5, np.float32)
    grey[3, 3] = np.nan
    Image.fromarray(grey).save(tmp_path / "nan.tif")
    with pytest.raises(ValueError, match="some pixels are NaN or infinite"):
        folders.decode(tmp_path / "nan.tif", 8)
    Image.fromarray(np.full((8, 8), 10 ** 6, np.int32)).save(tmp_path / "deep.tif")
    assert (folders.decode(tmp_path / "deep.tif", 8) == 255).all()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    palette.save(tmp_path / "palette.png")
    colour = folders.decode(tmp_path / "palette.png", 8)[0, 0]
    assert colour.tolist() == [200, 100, 50]                    # not its number in the palette


def test_gifs_and_linked_folders_of_unlabelled_images_are_read(photos):
    Image.new("RGB", (10, 10), "red").save(photos / "train" / "a cat" / "moving.gif", save_all=True,
                                           append_images=[Image.new("RGB", (10, 10))])
    (photos / "unlabeled").mkdir()
    (photos.parent / "elsewhere").mkdir()
    for i in range(3):
        Image.new("RGB", (10, 10)).save(photos.parent / "elsewhere" / f"{i}.png")
    os.symlink(photos.parent / "elsewhere", photos / "unlabeled" / "more")
    images, _, parts, _ = data.load(str(photos), "nowhere", 16)
    assert len(parts["train"]) == 13 and len(parts["unlabeled"]) == 3
    assert (images[6, 0] > 200).all()                           # the first frame


def test_links_in_predict(photos, tmp_path):
    train_crae.train(dataset=str(photos), labels=4, image_size=16, steps=1, **QUICK,
                     out=str(tmp_path / "run"))
    (tmp_path / "outside").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "outside" / "x.png")
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "deep" / "good.png")
    os.symlink(tmp_path / "outside" / "x.png", folder / "out.png")
    os.symlink(tmp_path / "outside", folder / "away")
    os.symlink(folder / "deep", folder / "inside")              # its target is predicted under its own path
    os.symlink(folder / "loop.png", folder / "loop.png")
    with pytest.raises(cli.Refused, match="3 of 4 files could not be read"):
        evaluate.use_model("predict", str(tmp_path / "run"), str(folder), out=str(tmp_path / "p.csv"),
                           device="cpu")
    rows = {Path(r["file"]).name: r for r in csv.DictReader((tmp_path / "p.csv").open())}
    assert rows.keys() == {"good.png", "out.png", "away", "loop.png"}
    assert rows["good.png"]["class"] and rows["loop.png"]["error"]
    assert all(rows[name]["error"] == "a link that leaves the folder" for name in ("out.png", "away"))


def test_links_to_classes_work(photos):
    before, *_ = data.load(str(photos), "nowhere", 16)
    for part in "train", "test":
        (photos / part / "a cat").rename(photos.parent / f"cats {part}")
        os.symlink(photos.parent / f"cats {part}", photos / part / "a cat")
    after, _, _, classes = data.load(str(photos), "nowhere", 16)
    assert torch.equal(before, after) and classes == ["a cat", "ünï"]


# ---------------------------------------------------------------- .npz files


DEFECTS = dict(
    none=lambda a, k: None,
    gone=lambda a, k: a.pop(k),
    short=lambda a, k: a.update({k: a[k][:-1]}),
    empty=lambda a, k: a.update({k: a[k][:0]}),
    float=lambda a, k: a.update({k: a[k].astype(np.float32)}),
    bool=lambda a, k: a.update({k: a[k].astype(bool)}),
    negative=lambda a, k: a.update({k: a[k].astype(np.int64) - 1}),
    narrow=lambda a, k: a.update({k: a[k][:, :-1]}),
    flat=lambda a, k: a.update({k: a[k].ravel()}),
    deep=lambda a, k: a.update({k: np.stack([a[k]] * 4, -1)}),
    words=lambda a, k: a.update({k: a[k].astype("U3")}),
    other=lambda a, k: a.update({f"x{k}": a.pop(k)}),
    scalar=lambda a, k: a.update({k: np.array(3)}))


@st.composite
def archives(draw):
    """Correct arrays with up to two defects."""
    size, n = draw(st.sampled_from([1, 7, 8, 8, 8, 8, 9])), draw(st.integers(2, 12))
    classes = draw(st.integers(1, 3))
    arrays = {}
    for part in draw(st.sets(st.sampled_from(["test", "val", "unlabeled"]))) | {"train"}:
        shape = draw(st.sampled_from([(n, size, size), (n, size, size, 3), (n, size, size, 1)]))
        arrays[f"{part}_images"] = np.zeros(shape, np.uint8)
        y = np.arange(n) % classes
        arrays[f"{part}_labels"] = draw(st.sampled_from([y, y, y[:, None]]))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        if arrays:
            name = draw(st.sampled_from(sorted(arrays)))
            if arrays[name].ndim and arrays[name].dtype.kind != "U":
                try:
                    DEFECTS[draw(st.sampled_from(sorted(DEFECTS)))](arrays, name)
                except (IndexError, ValueError):                # a defect that this array cannot have
                    pass
    return arrays


@pytest.mark.slow
def test_random_npz_files_are_loaded_or_refused_with_one_line(tmp_path):
    counted = dict(loaded=0, refused=0)

    @TRIED
    @given(archives(), st.none() | st.integers(1, 12), st.none() | st.sampled_from([8, 9, 16]))
    def load(arrays, n_labels, image_size):
        np.savez(tmp_path / "random.npz", **arrays)
        try:
            images, labels, parts, classes = data.load(str(tmp_path / "random.npz"), "nowhere", image_size)
            split = data.make_split(labels, parts, n_labels, 0, 0)
        except cli.Refused as error:
            assert str(error) and "\n" not in str(error)
            counted["refused"] += 1
        else:
            assert images.dtype == torch.uint8 and images.shape[1] == 3 and len(images) == len(labels)
            assert sorted(np.concatenate(list(split.values()))) == list(range(len(images)))
            assert len(split["labeled"]) and len(split["unlabeled"]) and len(split["test"])
            assert (labels[split["labeled"]] >= 0).all()
            counted["loaded"] += 1

    load()
    assert counted["loaded"] > 10 and counted["refused"] > 100, counted


@pytest.mark.slow
@TRIED
@given(st.binary(max_size=300))
def test_random_bytes_are_not_an_npz_file(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "random.npz"
    path.write_bytes(content)
    with pytest.raises(cli.Refused) as stop:
        data.load(str(path), "nowhere")
    assert "\n" not in str(stop.value)
