"""Scores against loops, predictions for good and bad files, exported programs, and one line for bad input."""
import csv
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

import data
import evaluate
import train_crae
import training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small run that has learnt something."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_crae.train(steps=60, batch=16, arch="wrn-10-1", out=str(folder), device="cpu")
    return folder


def call(*words):
    return training.command_line(evaluate.evaluate, [str(w) for w in words])


def test_the_test_error_is_the_logs_and_the_files_agree_with_it(run, capsys):
    scores = call("test", run, "--batch", 77)
    rows = list(csv.DictReader((run / "log.csv").open()))
    assert scores["error"] == pytest.approx(float(rows[-1]["test_error"])) and scores["images"] == 500
    with (run / "evaluation" / "confusion.csv").open() as file:
        matrix = np.array([[int(v) for k, v in row.items() if k != "true class"] for row in csv.DictReader(file)])
    assert matrix.sum() == 500 and 100 * (1 - np.trace(matrix) / 500) == pytest.approx(scores["error"])
    by_class = list(csv.DictReader((run / "evaluation" / "classes.csv").open()))
    for c, row in enumerate(by_class):
        assert float(row["error"]) == pytest.approx(100 * (1 - matrix[c, c] / matrix[c].sum()), abs=0.01) and int(row["images"]) == matrix[c].sum()
    assert json.loads((run / "evaluation" / "scores.json").read_text()) == scores
    assert np.asarray(Image.open(run / "evaluation" / "confusion.png").convert("L")).std() > 10
    assert f"test error {scores['error']:.2f} %" in capsys.readouterr().out


def test_a_dataset_that_has_changed_is_refused(run, tmp_path):
    copied = tmp_path / "run"
    copied.mkdir()
    for name in "config.json", "model.pt", "split.npz":
        (copied / name).write_bytes((run / name).read_bytes())
    config = json.loads((run / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | dict(data="00000000")))
    with pytest.raises(SystemExit, match="other images or classes now"):
        call("test", copied)


def test_scores_against_a_loop():
    gen = torch.Generator().manual_seed(0)
    p, y = (3 * torch.randn(200, 12, generator=gen)).softmax(1), torch.randint(12, (200,), generator=gen)
    shy = p.max(1).values < 0.5
    y[shy] = p[shy].argmax(1)                                   # unsure, and right
    scores = evaluate.score(p, y)
    wrong = top5 = 0
    bins = [[] for _ in range(15)]
    for i in range(200):
        order = sorted(range(12), key=lambda c: -p[i, c].item())
        wrong += order[0] != y[i]
        top5 += y[i].item() not in order[:5]
        confidence = p[i, order[0]].item()
        for b in range(15):
            if b / 15 < confidence <= (b + 1) / 15:
                bins[b].append((confidence, order[0] == y[i]))
    assert any(np.mean([r for _, r in b]) > np.mean([c for c, _ in b]) for b in bins if b)      # too shy in some bins, too sure in others
    ece = sum(len(b) / 200 * abs(np.mean([r for _, r in b]) - np.mean([c for c, _ in b])) for b in bins if b)
    assert sum(map(len, bins)) == 200
    assert scores["error"] == pytest.approx(100 * int(wrong) / 200) and scores["top5_error"] == pytest.approx(100 * top5 / 200)
    assert scores["ece"] == pytest.approx(100 * ece, rel=1e-4) and scores["ece"] > 1
    assert "top5_error" not in evaluate.score(p[:, :10], y % 10)
    matrix = evaluate.confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 2]), 3)
    assert matrix.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0]]


def test_predictions_for_a_folder_with_broken_files(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images, labels, *_ = data.load("digits", "nowhere")
    folder = tmp_path / "pictures" / "sub"
    folder.mkdir(parents=True)
    for i in range(5):
        Image.fromarray(images[1300 + i].permute(1, 2, 0).numpy()).save(folder / f"{i} ö,.png")
    Image.fromarray(images[1305, 0].numpy()).resize((40, 30)).save(tmp_path / "grey.png")      # another size and mode
    Image.fromarray(images[1305].permute(1, 2, 0).numpy()).convert("P").save(tmp_path / "pictures" / "palette.gif.png")
    (folder / "broken.jpg").write_bytes(b"not a picture")
    (folder / "empty.png").touch()
    (folder / "notes.txt").write_text("not looked at")
    (tmp_path / "nopictures").mkdir()
    os.symlink(tmp_path / "grey.png", folder / "outside.png")
    os.symlink(folder / "0 ö,.png", folder / "inside.png")
    with pytest.raises(SystemExit) as stop:
        call("predict", run, "pictures", "nothing.png", "grey.png", "nopictures", "--batch", 3)
    assert stop.value.code == 1 and "8 pictures predicted, 5 could not be read" in capsys.readouterr().out
    rows = {row["file"]: row for row in csv.DictReader(open("predictions.csv"))}
    assert rows["nothing.png"]["error"] == "no such file or folder" and "no pictures" in rows["nopictures"]["error"]
    assert len(rows) == 13 and rows["pictures/sub/outside.png"]["error"] == "a link that leaves the folder"
    for name in "broken.jpg", "empty.png":
        row = rows[f"pictures/sub/{name}"]
        assert row["class"] == row["probability"] == "" and row["error"]
    net, saved = evaluate.load_model(run)
    with torch.no_grad():
        p = net(data.scale(images[1300:1305]))[0].softmax(1)
    for i in range(5):
        row = rows[f"pictures/sub/{i} ö,.png"]
        assert row["class"] == saved["classes"][p[i].argmax()] and float(row["probability"]) == pytest.approx(p[i].max().item(), abs=1e-4)
    assert rows["pictures/sub/inside.png"]["class"] == rows["pictures/sub/0 ö,.png"]["class"]
    assert call("predict", run, "grey.png", "--out", "one.csv") == dict(predicted=1, failed=0)
    assert len(open("one.csv").read().splitlines()) == 2


def test_the_exported_program_agrees_with_the_model(run, capsys):
    call("export", run)
    extra = {"classes.json": ""}
    program = torch.export.load(run / "model.pt2", extra_files=extra).module()
    assert json.loads(extra["classes.json"]) == [str(i) for i in range(10)]
    images, *_ = data.load("digits", "nowhere")
    net, _ = evaluate.load_model(run)
    with torch.no_grad():
        for n in 1, 3, 100:
            torch.testing.assert_close(program(images[:n]), net(data.scale(images[:n]))[0], atol=1e-5, rtol=1e-4)


def test_an_exported_program_that_differs_is_removed(run, monkeypatch):
    monkeypatch.setattr(evaluate.Classifier, "forward", lambda self, x: self.net(x.float() / 255)[0])
    with pytest.raises(SystemExit, match="differs"):
        call("export", run)
    assert not (run / "model.pt2").exists()


def test_bad_input_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "empty", "unfinished", "damaged", "folder":
        (tmp_path / name).mkdir()
    (tmp_path / "unfinished" / "config.json").write_text("{}")
    (tmp_path / "damaged" / "model.pt").write_bytes(b"PK not really")
    (tmp_path / "noconfig").mkdir()
    (tmp_path / "noconfig" / "model.pt").write_bytes((run / "model.pt").read_bytes())
    for words, message in {("best", run): "test, predict, export", (): "WHAT is missing, one of test", ("test",): "RUN is missing",
                           ("test", "nowhere"): "no such run", ("test", "unfinished"): "not finished", ("test", "damaged"): "cannot be read",
                           ("predict", run): "IMAGES are missing", ("test", run, "x.png"): "takes no images",
                           ("test", run, "--batch", "0"): "--batch", ("test", run, "--speed", "9"): "--speed",
                           ("export", run, "--out", "x.pt2"): "--out", ("test", "noconfig"): "config.json",
                           ("predict", run, "damaged", "--out", "empty"): "--out"}.items():
        with pytest.raises(SystemExit) as stop:
            call(*words)
        assert isinstance(stop.value.code, str) and message in stop.value.code and "\n" not in stop.value.code


def test_pictures_of_which_none_is_there(run, tmp_path):
    with pytest.raises(SystemExit, match="IMAGES nowhere/: there is no such file or folder"):
        call("predict", run, "nowhere/", "--out", tmp_path / "p.csv")
    assert not (tmp_path / "p.csv").exists()


def test_a_first_stage_is_refused(tmp_path):
    import train_baselines
    train_baselines.train(method="fine_tune", steps=1, batch=4, arch="wrn-10-0.25", device="cpu", out=str(tmp_path / "run"))
    for what in "test", "predict", "export":
        with pytest.raises(SystemExit, match="is the first stage of fine_tune"):
            evaluate.evaluate(what, str(tmp_path / "run" / "pretrain"), *([str(tmp_path)] if what == "predict" else []), device="cpu")


def test_the_confusion_picture_has_the_true_class_in_rows(tmp_path, monkeypatch):
    shown = []
    real = evaluate.plt.Axes.imshow
    monkeypatch.setattr(evaluate.plt.Axes, "imshow", lambda axes, x, **kwargs: shown.append((axes, x)) or real(axes, x, **kwargs))
    evaluate.draw_confusion(torch.tensor([[8, 2], [0, 5]]), ["a", "b"], "title", tmp_path / "x.png")
    axes, matrix = shown[0]
    assert matrix.tolist() == pytest.approx(np.array([[0.8, 0.2], [0.0, 1.0]])) and axes.get_ylabel() == "true class"
    assert {(t.get_position(), t.get_text()) for t in axes.texts} == {((0, 0), "8"), ((1, 0), "2"), ((1, 1), "5")}     # (column, row)


def test_a_run_from_disk_is_tested_and_predicts_with_its_own_crop(tmp_path):
    rows, cols = np.mgrid[:64, :64]
    for part in "train", "test":
        for k in range(2):
            (tmp_path / "pictures" / part / f"class {k}").mkdir(parents=True)
            for i in range(4):
                picture = np.stack([4 * rows, 4 * cols, 0 * rows + 60 * i + 10 * k], -1).astype(np.uint8)
                Image.fromarray(picture).save(tmp_path / "pictures" / part / f"class {k}" / f"{i}.png")
    row = train_crae.train(dataset=str(tmp_path / "pictures"), labels=4, crop="resized", image_size=32, steps=2, batch=2, arch="wrn-10-0.25",
                           device="cpu", out=str(tmp_path / "run"))
    assert evaluate.evaluate("test", str(tmp_path / "run"), device="cpu")["error"] == row["test_error"]
    net, saved = evaluate.load_model(tmp_path / "run")
    file = tmp_path / "pictures" / "test" / "class 1" / "3.png"
    evaluate.evaluate("predict", str(tmp_path / "run"), str(file), out=str(tmp_path / "p.csv"), device="cpu")
    x = torch.as_tensor(data.decode(file, 32, "resized").copy()).permute(2, 0, 1)[None]
    assert not np.array_equal(data.decode(file, 32, "resized"), data.decode(file, 32))
    answer = list(csv.DictReader((tmp_path / "p.csv").open()))[0]
    assert float(answer["probability"]) == pytest.approx(evaluate.probabilities(net, x, "cpu").max().item(), abs=1e-5)
