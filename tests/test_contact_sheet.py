"""The contact sheet shows the labelled images of each class, and what augmentation makes of them."""
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import augmentation
import cli
import contact_sheet
import data
import folders
import sheets
import train_baselines
import train_crae
from helpers import QUICK, generator, make_image_folder, random_images, same

CONFIG = dict(seed=0, flip=True, crop="pad", dataset="some/where")


@pytest.fixture
def sheet(monkeypatch, tmp_path):
    """write(images, labels, split, classes, ...) returns what is passed to sheets.plot_contact_sheet."""
    drawn, real = [], sheets.plot_contact_sheet

    def keep(*args):
        drawn.append(args)
        real(*args)

    def write(*loaded, **config):
        contact_sheet.write(loaded, CONFIG | config | dict(out=str(tmp_path)))
        assert Image.open(tmp_path / "data.png").width > 300
        return drawn[-1]

    monkeypatch.setattr(sheets, "plot_contact_sheet", keep)
    return write


def split_of(labeled, n):
    return dict(labeled=np.array(labeled), unlabeled=np.setdiff1d(np.arange(n - 4), labeled),
                validation=np.arange(0), test=np.arange(n - 4, n))


def same_image(a, b):
    return torch.equal(torch.as_tensor(a).permute(2, 0, 1), b)


def test_every_image_is_a_labelled_one_of_its_class(sheet):
    images, labels = random_images(60, 16), torch.arange(60) % 3
    split = split_of(range(24), 60)
    cells, groups, shown, classes, counts, title, _ = sheet(images, labels, split, ["a", "b", "c"])
    assert groups == [["as loaded", ""], ["augmented", "rotated by 90°", "by 180°", "by 270°"],
                      ["mixed (CRAE+)"]]
    assert cells.shape == (7, 3, 3, 16, 16, 3) and shown.tolist() == [0, 1, 2] and classes == ["a", "b", "c"]
    seen = set()
    for r, k, i in np.ndindex(2, 3, 3):
        place, = [j for j in range(60) if same_image(cells[r, k, i], images[j])]
        assert place < 24 and labels[place] == k
        seen.add(place)
    assert len(seen) == 18                                      # no image is shown twice
    assert {part: n.tolist() for part, n in counts.items()} == dict(
        labelled=[8, 8, 8, 0], unlabelled=[11, 11, 10, 0], test=[1, 1, 2, 0])
    assert title == "where: labelled images at 16 pixels"


def test_the_rows_below_are_the_last_row_augmented_rotated_and_mixed(sheet):
    images, labels = random_images(60, 16), torch.arange(60) % 5
    cells, *_ = sheet(images, labels, split_of(range(20), 60), list("abcde"), flip=False)
    cells = torch.as_tensor(cells).flatten(1, 2)                # (7, 10, 16, 16, 3)
    _, base, upright, *turned, mixed = cells
    for x, y in zip(base, upright):                             # shifted by at most two pixels, not flipped
        inner = y[2:-2, 2:-2]
        assert any(torch.equal(inner, x[2 + dy:14 + dy, 2 + dx:14 + dx])
                   for dy in range(-2, 3) for dx in range(-2, 3))
    assert not torch.equal(base, upright)
    for k, rotated in enumerate(turned, 1):
        assert torch.equal(rotated, torch.rot90(upright, k, (1, 2)))
    for i in range(10):
        a, b, m = (x.double() for x in (upright[i], upright[i - 1], mixed[i]))
        share = ((m - b) * (a - b)).sum() / ((a - b) ** 2).sum()
        assert 0.49 < share < 1.01 and (share * a + (1 - share) * b - m).abs().max() < 2


def test_classes_with_few_images_leave_white_cells(sheet):
    images, labels = random_images(40, 8), torch.arange(40) % 2
    labeled = [0, 1, 3, 5]                                      # one of class 0, three of class 1
    cells, groups, *_ = sheet(images, labels, split_of(labeled, 40), ["a", "b"])
    assert groups[0] == ["as loaded"] and cells.shape[:3] == (6, 2, 5)
    white = (cells == 255).all((3, 4, 5))                       # (6, 2, 5)
    assert white.tolist() == [[[False] + [True] * 4, [False] * 3 + [True] * 2]] * 6


def test_ten_of_many_classes_and_no_classes(sheet):
    images = random_images(90, 100)
    cells, _, shown, _, counts, *_ = sheet(images, torch.arange(90) % 30, split_of(range(60), 90),
                                           [str(k) for k in range(30)])
    assert cells.shape[:3] == (7, 10, 1) and cells.shape[-2] == contact_sheet.LARGEST
    assert len(set(shown)) == 10 and sorted(shown) == shown.tolist() and len(counts["labelled"]) == 31
    labels = torch.full((90,), -1)                              # the first stage of fine_tune
    cells, _, shown, _, counts, title, _ = sheet(images, labels, split_of(range(60), 90), ["a", "b"])
    assert shown.tolist() == [-1] and cells.shape[:3] == (7, 1, 10)
    assert counts["labelled"].tolist() == [0, 0, 60]
    assert title == "where: images at 100 pixels"


def test_a_question_mark_where_images_of_unknown_class_may_belong_to_a_class():
    written = []
    sheets.write_counts(lambda x, y, text, **style: written.append(text), {
        "labelled": [1200, 0, 0], "unlabelled": [0, 3, 5]}, np.array([0, 1]), [0, 0], 0, 0)
    assert written == ["images", "all", "labelled", "1,200", "1,200", "–", "unlabelled", "8", "?", "3"]


def test_images_on_disk_are_augmented_as_they_are_read(sheet, tmp_path, monkeypatch):
    root = make_image_folder(tmp_path / "images", n=6)
    real, crops = folders.random_crop, []

    def keep(*args):
        crops.append(real(*args))
        return crops[-1]

    monkeypatch.setattr(folders, "random_crop", keep)
    for crop in "pad", "resized":
        images, labels, parts, classes = data.load(root, "nowhere", 16, stream=True, crop=crop, workers=0)
        split = data.make_split(labels, parts, 8, 0, seed=0)
        cells, *_ = sheet(images, labels, split, classes, crop=crop)
        tested = [images[i, None].numpy() for i in split["labeled"]]
        augmented = [x for x in cells[1].reshape(-1, 16, 16, 3) if not (x == 255).all()]
        assert all(any(np.array_equal(x, y) for y in tested) for x in cells[0, :, 0])
        assert len(crops) == (8 if crop == "resized" else 0) and len(augmented) == 8
        assert crop == "pad" or np.array_equal(augmented, crops)
        assert not any(map(np.array_equal, augmented, cells[0].reshape(-1, 16, 16, 3)))
    for file in images.files:
        Path(file).write_bytes(b"")
    with pytest.raises(cli.Refused, match="png can no longer be read"):
        sheet(images, labels, split, classes, crop=crop)


def test_the_sheet_draws_no_random_number_of_the_training(tmp_path, monkeypatch):
    flags = dict(QUICK, steps=3, plus=True)
    train_crae.train(**flags, out=str(tmp_path / "with"))
    before = torch.get_rng_state()
    contact_sheet.write((random_images(20), torch.arange(20) % 2, split_of(range(8), 20), ["a", "b"]),
                        CONFIG | dict(out=str(tmp_path)))
    assert torch.equal(torch.get_rng_state(), before)
    when = []
    monkeypatch.setattr(contact_sheet, "write", lambda loaded, config: when.append(config["out"]))
    train_crae.train(**flags, out=str(tmp_path / "without"))
    assert when == [str(tmp_path / "without")] and not (tmp_path / "without" / "data.png").exists()
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("with", "without"))
    assert all(same(a[name], b[name]) for name in ("net", "ema", "optimizer"))
    # Not a tautology: other random numbers would change the weights.
    real = augmentation.flip_and_crop
    monkeypatch.setattr(augmentation, "flip_and_crop", lambda x, flip, gen: real(x, flip, generator(7)))
    train_crae.train(**flags, out=str(tmp_path / "other"))
    assert not same(torch.load(tmp_path / "other" / "last.pt", weights_only=True)["net"], a["net"])


def test_it_is_written_after_the_first_step_and_not_again(hooked, tmp_path):
    hooks, train = hooked
    seen = []
    hooks.append(lambda step, model: seen.append((tmp_path / "run" / "data.png").exists()))
    train(out=str(tmp_path / "run"))
    assert seen == [False] + [True] * 9
    (tmp_path / "run" / "data.png").unlink()
    train(out=str(tmp_path / "run"), steps=12, resume=True)
    assert not (tmp_path / "run" / "data.png").exists()


@pytest.mark.slow
def test_both_stages_of_fine_tune_have_a_sheet(tmp_path):
    train_baselines.train(method="fine_tune", steps=2, out=str(tmp_path / "run"), **QUICK)
    sizes = [Image.open(tmp_path / "run" / place / "data.png").size for place in ("", "pretrain")]
    assert sizes[0] != sizes[1]
