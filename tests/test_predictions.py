"""Tables, sheets and features of predictions, for the test set, for other labelled images and for files."""
import csv
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import augmentation
import data
import evaluate
import helpers
import predictions
import sheets as drawing
import train_crae


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that has learnt something."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_crae.train(recipe="paper", steps=60, batch=16, arch="wrn-10-1", out=str(folder), device="cpu")
    return folder


@pytest.fixture
def sheets(monkeypatch):
    """The groups of images and captions of each sheet that is plotted, by the name of its file."""
    kept, real = {}, drawing.plot_sheet

    def plot_sheet(groups, path):
        kept[path.name] = groups
        real(groups, path)

    monkeypatch.setattr(drawing, "plot_sheet", plot_sheet)
    return kept


def call(*words):
    """The command line `python evaluate.py words`, in this process."""
    return helpers.command_line(evaluate, [str(w) for w in words], evaluate.use_model)


def read_csv(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_hand(run, images):
    """p(y|x) of uint8 images, one image at a time, as lists."""
    net, _ = evaluate.load_model(run)
    with torch.no_grad():
        return [net(augmentation.scale(x[None]))[0].double().softmax(1)[0].tolist() for x in images]


def digits(index):
    images, labels, *_ = data.load("digits", "nowhere")
    return images[index], labels[index]


def save_digits(folder, index, by_class=True):
    """The digits as 8 x 8 PNG files, in one folder per class or in one folder. Returns the files."""
    files = []
    for i, x, y in zip(index, *digits(torch.tensor(index))):
        place = folder / str(y.item()) if by_class else folder
        place.mkdir(parents=True, exist_ok=True)
        files.append(place / f"{i}.png")
        Image.fromarray(x.permute(1, 2, 0).numpy()).save(files[-1])
    return files


# ---------------------------------------------------------------- test


def test_every_test_image_has_a_row_and_wrong_ones_are_shown_most_confident_first(run, sheets):
    call("test", run)
    rows = read_csv(run / "evaluation" / "predictions.csv")
    images, labels = digits(torch.arange(1297, 1797))           # the last 500 are the test set
    p = by_hand(run, images)
    classes = [str(c) for c in range(10)]
    assert list(rows[0]) == ["file", "true class", "predicted class", "probability", *classes]
    wrong = []
    for k, (row, values) in enumerate(zip(rows, p)):
        best = max(range(10), key=lambda c: values[c])
        assert row["file"] == f"test[{k}]" and row["true class"] == str(labels[k].item())
        assert row["predicted class"] == str(best)
        np.testing.assert_allclose([float(row[c]) for c in classes], values, atol=2e-5)
        assert float(row["probability"]) == max(float(row[c]) for c in classes)
        if best != labels[k]:
            wrong.append((max(values), k, best))
    wrong.sort(reverse=True)
    assert len(rows) == 500 and len(wrong) > 40                 # more than the sheet shows
    (heading, cells), = sheets["wrong.png"]
    assert heading.startswith(f"{len(wrong)} of 500 predictions are wrong") and "the first 40" in heading
    assert len(cells) == 40
    for (image, caption), (value, k, best) in zip(cells, wrong):
        np.testing.assert_array_equal(image, images[k].permute(1, 2, 0))
        assert caption == f"{best}, {100 * value:.0f} %\ntrue: {labels[k]}\ntest[{k}]"
    assert np.asarray(Image.open(run / "evaluation" / "wrong.png").convert("L")).std() > 10


def test_top_gives_the_most_probable_classes_instead_of_one_column_per_class(run):
    call("test", run, "--top", 3)
    rows = read_csv(run / "evaluation" / "predictions.csv")
    assert list(rows[0]) == ["file", "true class", "predicted class", "probability",
                             "class_2", "probability_2", "class_3", "probability_3"]
    values, = by_hand(run, digits(torch.tensor([1297 + 17]))[0])
    order = sorted(range(10), key=lambda c: -values[c])[:3]
    names = "predicted class", "class_2", "class_3"
    assert [rows[17][name] for name in names] == [str(c) for c in order]
    cells = [float(rows[17][name]) for name in ("probability", "probability_2", "probability_3")]
    assert cells == pytest.approx([values[c] for c in order], abs=2e-5)


def test_a_warning_if_one_class_is_always_predicted(run, tmp_path, capsys):
    call("test", run)
    assert "warning" not in capsys.readouterr().err
    folder = tmp_path / "constant"
    folder.mkdir()
    for name in "config.json", "split.npz":
        (folder / name).write_bytes((run / name).read_bytes())
    saved = torch.load(run / "model.pt", weights_only=True)
    saved["state"]["classifier.bias"][4] += 1000
    torch.save(saved, folder / "model.pt")
    scores = call("test", folder)
    assert "warning: the model predicts class 4 for every image" in capsys.readouterr().err
    assert scores["auc"] == 0.5 and scores["balanced_accuracy"] == pytest.approx(10)


def test_no_sheet_remains_when_nothing_is_wrong(run, tmp_path):
    images, labels = digits(torch.arange(4))
    path, p = tmp_path / "wrong.png", torch.eye(10)[labels].double()
    names, classes = list("abcd"), list("0123456789")
    predictions.write_wrong(images, torch.arange(4), names, p.roll(1, 1), labels, classes, path)
    assert path.exists()
    predictions.write_wrong(images, torch.arange(4), names, p, labels, classes, path)
    assert not path.exists()


def test_class_names_do_not_collide_with_the_first_columns():
    p = torch.tensor([[0.25, 0.75]])
    rows = predictions.tested_rows(["x"], torch.tensor([0]), p, ["file", "b"], None)
    assert rows == [{"file": "x", "true class": "file", "predicted class": "b", "probability": "0.750000",
                     "p(file)": "0.250000", "b": "0.750000"}]


def test_the_rows_of_a_folder_name_its_files(tmp_path):
    dataset = helpers.make_image_folder(tmp_path / "images")
    for crop in "pad", "resized":                               # in memory, and on disk
        out = tmp_path / crop
        train_crae.train(dataset=dataset, labels=4, image_size=16, crop=crop, steps=1, out=str(out),
                         **helpers.QUICK | dict(batch=2))
        call("test", out, "--device=cpu")
        rows = read_csv(out / "evaluation" / "predictions.csv")
        files = [f"{dataset}/test/{name}/{i}.png" for name in ("a b", "ö") for i in range(6)]
        assert [row["file"] for row in rows] == files
        assert [row["true class"] for row in rows] == 6 * ["a b"] + 6 * ["ö"]
        assert {"a b", "ö"} <= rows[0].keys()


# ---------------------------------------------------------------- other labelled data


@pytest.mark.parametrize("inside", ["", "test", "val"])
def test_other_images_of_a_folder(inside, run, tmp_path, capsys):
    index = [i for i in range(200, 260) if digits(torch.tensor([i]))[1] != 7]
    files = save_digits(tmp_path / "new scans" / inside, index)
    (tmp_path / "new scans" / inside / ".ipynb_checkpoints").mkdir()            # no class
    for name in "3/a.svg", "b.png", "3/notes.txt":
        (tmp_path / "new scans" / inside / name).touch()
    scores = call("test", run, "--other", tmp_path / "new scans")
    images, labels = digits(torch.tensor(index))
    right = [max(range(10), key=lambda c: p[c]) == y for p, y in zip(by_hand(run, images), labels)]
    assert scores["images"] == len(index) and scores["error"] == pytest.approx(100 * (1 - np.mean(right)))
    folder = run / "evaluation" / "other_new scans"
    rows = {row["file"]: row for row in read_csv(folder / "predictions.csv")}
    assert rows.keys() == set(map(str, files))
    assert all(row["true class"] == file.split("/")[-2] for file, row in rows.items())
    assert json.loads((folder / "scores.json").read_text()) == scores
    printed = capsys.readouterr().out
    assert "has no images of 1 of 10 classes: 7" in printed
    for line in ("3/a.svg (.svg files are not read", "b.png (in no folder of a class)"):
        assert f"not read: {os.path.join(inside, line)}" in printed
    assert "not used: 1 other file (.txt)" in printed


def test_other_images_of_an_npz_file(run, tmp_path):
    images, labels = digits(torch.arange(300, 350))
    p = by_hand(run, images)
    error = 100 * np.mean([max(range(10), key=lambda c: values[c]) != y for values, y in zip(p, labels)])
    x, path = images.permute(0, 2, 3, 1).numpy(), tmp_path / "x.npz"
    for arrays in (dict(test_images=x, test_labels=labels.numpy(), train_images=x[:1], train_labels=[9]),
                   dict(train_images=x[..., 0], train_labels=np.array([str(y.item()) for y in labels]))):
        np.savez(path, **arrays)
        assert call("test", run, "--other", path)["error"] == pytest.approx(error)
    rows = read_csv(run / "evaluation" / "other_x" / "predictions.csv")
    assert [row["file"] for row in rows] == [f"train[{k}]" for k in range(50)]


def test_numbers_as_labels_of_named_classes_are_their_places(tmp_path):
    x = np.zeros((3, 8, 8), np.uint8)
    np.savez(tmp_path / "x.npz", test_images=x, test_labels=[2, 0, 1])
    _, labels, _ = predictions.read_other_npz(str(tmp_path / "x.npz"), ["cat", "dog", "cow"], 8)
    assert labels.tolist() == [2, 0, 1]
    np.savez(tmp_path / "x.npz", test_images=x, test_labels=[3, 1, 2])
    _, labels, _ = predictions.read_other_npz(str(tmp_path / "x.npz"), ["1", "2", "3"], 8)      # their names
    assert labels.tolist() == [2, 0, 1]


def test_other_data_that_does_not_suit_the_run_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_digits(tmp_path / "broken", [0, 1])
    (tmp_path / "broken" / "1" / "bad.png").write_bytes(b"not an image")
    for name in "cats/cat", "empty", "noimages/3":
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "words.txt").touch()
    x = np.zeros((2, 8, 8), np.uint8)
    np.savez("labels.npz", test_images=x, test_labels=[3, 10])
    np.savez("short.npz", test_images=x, test_labels=[3])
    np.savez("float.npz", test_images=x / 255, test_labels=[3, 4])
    np.savez("nothing.npz", images=x)
    for name, message in {
        "cats": "its folder cat is not a class of the run; name the folders after its classes: 0, 1",
        "empty": "has no class folders", "noimages": "contains no images",
        "broken": "1 of 3 images cannot be read, the first is broken/1/bad.png",
        "words.txt": "must be a folder with one folder of images per class, or an .npz file",
        "labels.npz": "label 10 is not a class of the run; its classes are 0, 1",
        "short.npz": "test_labels must contain one label for each of the 2 images",
        "float.npz": "test_images must be uint8", "nothing.npz": "test_images and test_labels cannot be read",
    }.items():
        with pytest.raises(SystemExit) as stop:
            call("test", run, "--other", name)
        assert stop.value.code.startswith(f"--other {name}: {message}") and "\n" not in stop.value.code
        assert not (run / "evaluation" / f"other_{name.removesuffix('.npz')}").exists()


# ---------------------------------------------------------------- predict


def test_one_column_per_class_and_the_most_and_least_confident_predictions(run, tmp_path, sheets):
    index = list(range(60))
    files = save_digits(tmp_path / "scans", index, by_class=False)
    call("predict", run, tmp_path / "scans", "--out", tmp_path / "p.csv", "--batch", 7)
    rows = {row["file"]: row for row in read_csv(tmp_path / "p.csv")}
    images, _ = digits(torch.tensor(index))
    found = []
    for file, image, values in zip(files, images, by_hand(run, images)):
        row = rows[str(file)]
        assert list(row) == ["file", "class", "probability", "error", *map(str, range(10))]
        np.testing.assert_allclose([float(row[str(c)]) for c in range(10)], values, atol=2e-5)
        best = max(range(10), key=lambda c: values[c])
        assert row["class"] == str(best) and row["error"] == ""
        found.append((values[best], f"{best}, {100 * values[best]:.0f} %\n{file.name}", image))
    found.sort(key=lambda item: -item[0])
    (most, first), (least, last) = sheets["p.png"]
    assert most == "24 most confident of 60 predictions" and least.startswith("24 least confident")
    for cells, expected in (first, found[:24]), (last, found[:-25:-1]):
        assert [text for _, text in cells] == [text for _, text, _ in expected]
        for (image, _), (_, _, x) in zip(cells, expected):
            np.testing.assert_array_equal(image, x.permute(1, 2, 0))
    assert np.asarray(Image.open(tmp_path / "p.png").convert("L")).std() > 10


@pytest.mark.parametrize("n, groups", [(1, [1]), (24, [24]), (30, [24, 6]), (48, [24, 24])])
def test_a_sheet_shows_no_image_twice(n, groups, sheets, tmp_path):
    kept = [(1 - k / 100, np.zeros((8, 8, 3), np.uint8), str(k)) for k in range(n)]
    predictions.write_extremes(kept, n, tmp_path / "x.png")
    shown = [[text for _, text in cells] for _, cells in sheets["x.png"]]
    assert [len(cells) for cells in shown] == groups and len(set(sum(shown, []))) == n
    if len(groups) == 2:
        assert shown[1][0] == str(n - 1)                        # the least confident comes first


def test_predictions_and_features_are_not_overwritten_without_force(run, tmp_path):
    file, = save_digits(tmp_path, [5], by_class=False)
    for what, out, others in ("predict", "p.csv", ["p.png"]), ("embed", "p.npz", []):
        call(what, run, file, "--out", tmp_path / out)
        for name in out, *others:
            (tmp_path / out).unlink(missing_ok=True)
            (tmp_path / name).write_text("mine")
            with pytest.raises(SystemExit, match="already exists; give --force to overwrite it"):
                call(what, run, file, "--out", tmp_path / out)
            assert (tmp_path / name).read_text() == "mine"
        call(what, run, file, "--out", tmp_path / out, "--force")
        assert all((tmp_path / name).read_bytes() != b"mine" for name in (out, *others))


def test_predict_prints_no_warnings_about_odd_files(run, tmp_path, recwarn):
    file = tmp_path / "猫.jpg"                                  # a letter that the font does not have
    cut_off = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"
    Image.new("RGB", (9, 9)).save(file, exif=cut_off)

    def warned():
        return {name for w in recwarn for name in ("EXIF", "Glyph") if name in str(w.message)}

    ImageOps.exif_transpose(Image.open(file))
    drawing.plot_sheet([("x", [(np.zeros((8, 8, 3), np.uint8), file.name)])], tmp_path / "x.png")
    assert warned() == {"EXIF", "Glyph"}                        # this file causes both warnings
    recwarn.clear()
    call("predict", run, file, "--out", tmp_path / "p.csv")
    assert not warned()


# ---------------------------------------------------------------- embed


def features_by_hand(run, images):
    net, _ = evaluate.load_model(run)
    with torch.no_grad():
        return torch.cat([net.backbone(augmentation.scale(x[None])) for x in images]).numpy()


def test_features_of_files(run, tmp_path, capsys):
    index = [3, 4, 5, 6, 7]
    save_digits(tmp_path / "scans", index, by_class=False)
    (tmp_path / "scans" / "4.png").write_bytes(b"not an image")
    with pytest.raises(SystemExit) as stop:
        call("embed", run, tmp_path / "scans", "--out", tmp_path / "x.npz", "--batch", 2)
    assert stop.value.code.startswith("1 of 5 files could not be read; ")
    assert f"cannot read {tmp_path}/scans/4.png: " in capsys.readouterr().err
    arrays = np.load(tmp_path / "x.npz", allow_pickle=False)
    assert arrays["files"].tolist() == [str(tmp_path / "scans" / f"{i}.png") for i in (3, 5, 6, 7)]
    expected = features_by_hand(run, digits(torch.tensor([3, 5, 6, 7]))[0])
    assert arrays["features"].dtype == np.float32 and expected.shape == (4, 64)
    np.testing.assert_allclose(arrays["features"], expected, atol=1e-5)


def test_features_of_the_test_set_have_labels(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("embed", run) == dict(embedded=500, failed=0)
    arrays = np.load("embeddings.npz", allow_pickle=False)
    images, labels = digits(torch.arange(1297, 1797))
    assert arrays["files"][17] == "test[17]" and arrays["labels"].tolist() == [str(y.item()) for y in labels]
    np.testing.assert_allclose(arrays["features"][:5], features_by_hand(run, images[:5]), atol=1e-5)


def test_features_of_no_readable_file(run, tmp_path):
    (tmp_path / "x.png").touch()
    with pytest.raises(SystemExit, match="1 of 1 files could not be read"):
        call("embed", run, tmp_path / "x.png", "--out", tmp_path / "x.npz")
    assert np.load(tmp_path / "x.npz")["features"].shape == (0, 64)
