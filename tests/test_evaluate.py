"""The commands of evaluate.py: files and scores of a test, bad files in predict, and the method's figure."""
import csv
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

import augmentation
import cli
import data
import evaluate
import folders
import helpers
import metrics
import models
import predictions
import sheets
import train_baselines
import train_crae


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that has learnt something."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_crae.train(recipe="paper", steps=60, batch=16, arch="wrn-10-1", out=str(folder), device="cpu")
    return folder


def call(*words):
    """The command line `python evaluate.py words`, in this process."""
    return helpers.command_line(evaluate, [str(w) for w in words], evaluate.use_model)


def copy_of(run, folder, **changed):
    """A copy of a run, with other values in config.json."""
    folder.mkdir()
    for name in "config.json", "model.pt", "split.npz", "last.pt":
        (folder / name).write_bytes((run / name).read_bytes())
    config = json.loads((run / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def read_csv(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------- test


def test_the_test_error_is_that_of_the_log_and_the_files_agree_with_it(run, capsys):
    scores = call("test", run, "--batch", 77)
    rows = read_csv(run / "log.csv")
    assert scores["error"] == pytest.approx(float(rows[-1]["test_error"])) and scores["images"] == 500
    matrix = np.array([[int(v) for k, v in row.items() if k != "true class"]
                       for row in read_csv(run / "evaluation" / "confusion.csv")])
    assert matrix.sum() == 500 and 100 * (1 - np.trace(matrix) / 500) == pytest.approx(scores["error"])
    for c, row in enumerate(read_csv(run / "evaluation" / "classes.csv")):
        error = 100 * (1 - matrix[c, c] / matrix[c].sum())
        assert float(row["error"]) == pytest.approx(error, abs=0.01) and int(row["images"]) == matrix[c].sum()
        assert float(row["recall"]) == pytest.approx(100 - error, abs=0.01) and float(row["auc"]) > 0.5
    assert json.loads((run / "evaluation" / "scores.json").read_text()) == scores
    assert np.asarray(Image.open(run / "evaluation" / "confusion.png").convert("L")).std() > 10
    low, high = metrics.wilson(round(5 * scores["error"]), 500)
    line = f"test error {scores['error']:.2f} % (95 % interval {low:.2f} to {high:.2f} %, 500 images)"
    assert line in capsys.readouterr().out


def test_a_dataset_that_has_changed_is_refused(run, tmp_path):
    copied = copy_of(run, tmp_path / "run", data="00000000")
    for what in "test", "explain":
        with pytest.raises(SystemExit, match="the images or classes of its dataset digits have changed"):
            call(what, copied)


def test_a_folder_for_results_that_cannot_be_created_is_refused(run, tmp_path):
    copied = copy_of(run, tmp_path / "run")
    (copied / "evaluation").touch()                             # a file in its place
    for what in "test", "explain":
        with pytest.raises(SystemExit, match=r"RUN .*: evaluation/ cannot be created in it \(File exists\)"):
            call(what, copied)


# ---------------------------------------------------------------- predict


def test_predictions_for_a_folder_with_broken_files(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images, labels, *_ = data.load("digits", "nowhere")
    folder = tmp_path / "images" / "sub"
    folder.mkdir(parents=True)
    for i in range(5):
        Image.fromarray(images[1300 + i].permute(1, 2, 0).numpy()).save(folder / f"{i} ö,.png")
    Image.fromarray(images[1305, 0].numpy()).resize((40, 30)).save(tmp_path / "grey.png")       # another size
    palette = Image.fromarray(images[1305].permute(1, 2, 0).numpy()).convert("P")
    palette.save(tmp_path / "images" / "palette.gif.png")
    (folder / "broken.jpg").write_bytes(b"not an image")
    (folder / "empty.png").touch()
    (folder / "notes.txt").write_text("ignored")
    (tmp_path / "noimages").mkdir()
    os.symlink(tmp_path / "grey.png", folder / "outside.png")
    os.symlink(folder / "0 ö,.png", folder / "inside.png")
    with pytest.raises(SystemExit) as stop:
        call("predict", run, "images", "nothing.png", "grey.png", "noimages", "--batch", 3)
    assert stop.value.code == "5 of 13 files could not be read; predictions.csv lists the reasons"
    assert "8 images predicted, 5 could not be read" in capsys.readouterr().out
    rows = {row["file"]: row for row in read_csv("predictions.csv")}
    assert rows["nothing.png"]["error"] == "no such file or folder"
    assert "contains no images" in rows["noimages"]["error"]
    assert len(rows) == 13 and rows["images/sub/outside.png"]["error"] == "a link that leaves the folder"
    for name in "broken.jpg", "empty.png":
        row = rows[f"images/sub/{name}"]
        assert row["class"] == row["probability"] == "" and row["error"]
    net, saved = evaluate.load_model(run)
    with torch.no_grad():
        p = net(augmentation.scale(images[1300:1305]))[0].softmax(1)
    for i in range(5):
        row = rows[f"images/sub/{i} ö,.png"]
        assert row["class"] == saved["classes"][p[i].argmax()]
        assert float(row["probability"]) == pytest.approx(p[i].max().item(), abs=1e-4)
    assert rows["images/sub/inside.png"]["class"] == rows["images/sub/0 ö,.png"]["class"]
    assert call("predict", run, "grey.png", "--out", "one.csv") == dict(predicted=1, failed=0)
    assert len(open("one.csv").read().splitlines()) == 2


def test_predict_refuses_images_that_do_not_exist(run, tmp_path):
    with pytest.raises(SystemExit, match="IMAGES nowhere/: no such file or folder"):
        call("predict", run, "nowhere/", "--out", tmp_path / "p.csv")
    assert not (tmp_path / "p.csv").exists()


def test_a_run_from_disk_is_tested_and_predicts_with_its_own_crop(tmp_path):
    rows, cols = np.mgrid[:64, :64]
    for part in "train", "test":
        for k in range(2):
            (tmp_path / "images" / part / f"class {k}").mkdir(parents=True)
            for i in range(4):
                image = np.stack([4 * rows, 4 * cols, 0 * rows + 60 * i + 10 * k], -1).astype(np.uint8)
                Image.fromarray(image).save(tmp_path / "images" / part / f"class {k}" / f"{i}.png")
    run = str(tmp_path / "run")
    row = train_crae.train(dataset=str(tmp_path / "images"), labels=4, crop="resized", image_size=32, steps=2,
                           out=run, **helpers.QUICK | dict(batch=2))
    assert evaluate.use_model("test", run, device="cpu")["error"] == row["test_error"]
    net, saved = evaluate.load_model(tmp_path / "run")
    file = tmp_path / "images" / "test" / "class 1" / "3.png"
    evaluate.use_model("predict", run, str(file), out=str(tmp_path / "p.csv"), device="cpu")
    x = torch.as_tensor(folders.decode(file, 32, "resized").copy()).permute(2, 0, 1)[None]
    assert not np.array_equal(folders.decode(file, 32, "resized"), folders.decode(file, 32))
    answer = read_csv(tmp_path / "p.csv")[0]
    p = predictions.probabilities(net, x, "cpu")
    assert float(answer["probability"]) == pytest.approx(p.max().item(), abs=1e-5)


# ---------------------------------------------------------------- explain


@pytest.fixture
def shown(monkeypatch):
    """The numbers that plot_method is called with; the figure is written as usual."""
    kept, real = {}, sheets.plot_method

    def plot_method(*numbers):
        kept.update(zip(("copies", "p_y", "R", "p_z", "classes", "true_class", "path"), numbers))
        real(*numbers)

    monkeypatch.setattr(sheets, "plot_method", plot_method)
    return kept


def averaged_net(run, weights="ema"):
    """The network of a run with its rotation heads and the averaged weights, straight from the checkpoint."""
    net = models.make_model("wrn-10-1", 10, 10)
    net.load_state_dict(torch.load(run / "last.pt", weights_only=True)[weights])
    return net.double().eval()


def by_hand(net, image):
    """p(y|x) (4, C), R (4, C, 4) and p(z|x) (4, 4) of a uint8 image, one rotation and one head at a time."""
    p_y, R, p_z = [], [], []
    with torch.no_grad():
        for k in range(4):
            x = torch.rot90(image, k, (1, 2)).double() * 2 / 255 - 1
            class_logits, _, rot_logits = net(x[None])
            p_y.append(class_logits[0].softmax(0))
            R.append(rot_logits[0].softmax(1))
            p_z.append(sum(p_y[k][c] * R[k][c] for c in range(10)))             # Eq. 1
    return [torch.stack(v).numpy() for v in (p_y, R, p_z)]


def images_of(run):
    """The test images of a run with their labels, in the order of --image."""
    images, labels, *_ = data.load("digits", "nowhere")
    index = np.load(run / "split.npz")["test"]
    return images[index], labels[index]


def test_explain_shows_the_averaged_model_on_one_test_image(run, shown, capsys):
    result = call("explain", run, "--image", 7)
    path = run / "evaluation" / "method.png"
    assert result == dict(path=str(path), image=7)
    assert np.asarray(Image.open(path).convert("L")).std() > 10
    images, labels = images_of(run)
    assert shown["true_class"] == labels[7] and shown["classes"] == [str(c) for c in range(10)]
    for k in range(4):
        expected = torch.rot90(images[7], k, (1, 2)).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(shown["copies"][k], expected)
    p_y, R, p_z = by_hand(averaged_net(run), images[7])
    for name, expected in dict(p_y=p_y, R=R, p_z=p_z).items():
        np.testing.assert_allclose(shown[name], expected, atol=1e-5)
    live = by_hand(averaged_net(run, "net"), images[7])         # the weights before averaging are others
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(live, (p_y, R, p_z)))
    line = f"test image 7, class {labels[7]}; p(z|x) of the true rotation: "
    assert line + ", ".join(f"{p:.2f}" for p in p_z.diagonal()) in capsys.readouterr().out


def test_without_image_explain_shows_the_first_correct_one(run, shown, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "first_correct", lambda *rest: 5)
    out = tmp_path / "x.png"
    assert call("explain", run, "--out", out) == dict(path=str(out), image=5)
    assert out.stat().st_size > 5000
    np.testing.assert_allclose(shown["p_z"], by_hand(averaged_net(run), images_of(run)[0][5])[2], atol=1e-5)


def test_the_first_correct_image_is_right_in_all_four_rotations():
    def net(x):
        """Rotation: the corner that is the brightest, in red. Class: the green of a pixel at the top left."""
        corners = [(0, 0), (-1, 0), (-1, -1), (0, -1)]          # where rotations move the top left corner
        z = torch.stack([x[:, 0, i, j] for i, j in corners], 1).argmax(1)
        y = ((x[:, 1, 1, 1] + 1) * 255 / 2).round().long()
        rot_logits = 9.0 * torch.nn.functional.one_hot(z, 4).float()
        return 9.0 * torch.nn.functional.one_hot(y, 3).float(), None, rot_logits[:, None].expand(-1, 3, -1)

    labels = torch.arange(8) % 3
    images = labels.to(torch.uint8)[:, None, None, None].repeat(1, 3, 8, 8)     # every pixel shows the class
    images[:, 0] = 0
    images[:, 0, 0, 0] = 200
    images[7, 0] = 0                                            # no bright corner: each copy looks upright
    images[4, 1, 4:] = 2                                        # class 1 if upright, class 2 if rotated
    labels[2] = 0                                               # another class in all rotations
    index = torch.tensor([7, 4, 2, 7, 0, 1])                    # 0 is the first that is right, at place 4
    for batch in 1, 3, 256:
        assert evaluate.first_correct(net, images, labels, index, batch, "cpu") == 4
        assert evaluate.first_correct(net, images, labels, index[:4], batch, "cpu") == 0        # none


@pytest.mark.parametrize("image", [-1, 500])
def test_explain_refuses_an_image_that_is_out_of_range(image, run, tmp_path):
    with pytest.raises(SystemExit, match=f"--image {image}: must be from 0 to 499"):
        call("explain", run, f"--image={image}", "--out", tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("flags", [dict(select="independent"), dict(select="random"), dict(heads=0)])
def test_explain_refuses_a_run_without_class_conditional_heads(flags, tmp_path):
    run = tmp_path / "run"
    train_crae.train(steps=1, out=str(run), **flags, **helpers.QUICK)
    with pytest.raises(SystemExit, match="has no class-conditional rotation heads; give a run of CRAE"):
        call("explain", run)
    assert not (run / "evaluation").exists()


def test_explain_refuses_a_baseline(tmp_path):
    train_baselines.train(method="s4l", steps=1, out=str(tmp_path / "run"), **helpers.QUICK)    # one head
    with pytest.raises(SystemExit, match="its method s4l has no class-conditional rotation heads"):
        call("explain", tmp_path / "run")


def test_explain_uses_detached_heads_and_reduced_features(tmp_path, shown):
    run = tmp_path / "run"
    train_crae.train(steps=1, out=str(run), select="detach", rot_dim=4, aux=False, **helpers.QUICK)
    assert call("explain", run, "--image", 0)["image"] == 0
    np.testing.assert_allclose(shown["p_z"].sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(shown["p_z"], np.einsum("nc,ncz->nz", shown["p_y"], shown["R"]), atol=1e-5)


def test_explain_refuses_damaged_files(run, tmp_path):
    copied = copy_of(run, tmp_path / "run")
    (copied / "last.pt").write_bytes(b"PK not really")
    with pytest.raises(SystemExit, match="last.pt, which contains the rotation heads, cannot be read"):
        call("explain", copied)
    (copied / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="config.json cannot be read"):
        call("explain", copied)


# ---------------------------------------------------------------- bad input


def test_bad_input_gives_a_one_line_error(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "empty", "unfinished", "damaged", "folder":
        (tmp_path / name).mkdir()
    (tmp_path / "unfinished" / "config.json").write_text("{}")
    (tmp_path / "damaged" / "model.pt").write_bytes(b"PK not really")
    (tmp_path / "noconfig").mkdir()
    (tmp_path / "noconfig" / "model.pt").write_bytes((run / "model.pt").read_bytes())
    for words, message in {
        ("best", run): "test, predict, embed, export, explain",
        (): "WHAT is missing, one of test",
        ("test",): "RUN is missing",
        ("test", "nowhere"): "no such run",
        ("test", "unfinished"): "not finished",
        ("test", "damaged"): "cannot be read",
        ("predict", run): "IMAGES are missing",
        ("test", run, "x.png"): "takes no images",
        ("explain", run, "x.png"): "takes no images",
        ("test", run, "--batch", "0"): "--batch",
        ("export", run, "--other", "x"): "--other x: is for test only; omit it",
        ("explain", run, "--top", "3"): "--top 3: is for test and predict only",
        ("test", run, "--force"): "--force True: is for predict and embed only",
        ("test", run, "--top", "11"): "--top 11: must be from 1 to 10, the number of classes",
        ("test", run, "--top", "0"): "--top 0: must be from 1 to 10",
        ("test", run, "--other", "nowhere"): "--other nowhere: no such file or folder",
        ("predict", run, "damaged", "--out", "x.txt"): "--out x.txt: must end in .csv",
        ("embed", run, "damaged", "--out", "x.csv"): "--out x.csv: must end in .npz",
        ("embed", run, "nowhere"): "IMAGES nowhere: no such file or folder",
        ("test", run, "--speed", "9"): "--speed",
        ("test", run, "--image", "3"): "--image 3: is for explain only",
        ("explain", run, "--image", "first"): "--image first: must be a whole number",
        ("export", run, "--out", "x.pt2"): "--out",
        ("explain", run, "--out", "x.pdf"): "--out x.pdf: must end in .png",
        ("explain", run, "--out", "nowhere/x.png"): "--out nowhere: x.png cannot be written",
        ("test", "noconfig"): "config.json",
        ("explain", "noconfig"): "config.json",
        ("predict", run, "damaged", "--out", "nowhere/x.csv"): "--out nowhere/x.csv: cannot be written",
        ("embed", run, "damaged", "--out", "nowhere/x.npz"): "--out nowhere: x.npz cannot be written",
    }.items():
        with pytest.raises(SystemExit) as stop:
            call(*words)
        assert isinstance(stop.value.code, str) and message in stop.value.code and "\n" not in stop.value.code


def test_a_first_stage_is_refused(tmp_path):
    train_baselines.train(method="fine_tune", steps=1, out=str(tmp_path / "run"), **helpers.QUICK)
    for what in "test", "predict", "embed", "export", "explain":
        images = [str(tmp_path)] if what == "predict" else []
        with pytest.raises(cli.Refused, match="is the first stage of fine_tune"):
            evaluate.use_model(what, str(tmp_path / "run" / "pretrain"), *images, device="cpu")
