"""The exported program agrees with the model, also as docs/runs.md uses it, without this repository."""
import ast
import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import augmentation
import data
import evaluate
import exports
import helpers
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


def test_the_exported_program_agrees_with_the_model(run, capsys):
    call("export", run)
    extra = {"classes.json": ""}
    program = torch.export.load(run / "model.pt2", extra_files=extra).module()
    assert json.loads(extra["classes.json"]) == [str(i) for i in range(10)]
    images, *_ = data.load("digits", "nowhere")
    net, _ = evaluate.load_model(run)
    with torch.no_grad():
        for n in 1, 3, 100:
            expected = net(augmentation.scale(images[:n]))[0]
            torch.testing.assert_close(program(images[:n]), expected, atol=1e-5, rtol=1e-4)


def test_an_exported_program_that_differs_is_removed(run, monkeypatch):
    monkeypatch.setattr(exports.Classifier, "forward", lambda self, x: self.net(x.float() / 255)[0])
    with pytest.raises(SystemExit, match="the exported program differs from the model by .*; it was removed"):
        call("export", run)
    assert not (run / "model.pt2").exists()


def documented_lines():
    """The block of Python in docs/runs.md that loads model.pt2."""
    blocks = re.findall(r"```python\n(.*?)```", (helpers.HERE / "docs" / "runs.md").read_text(), re.DOTALL)
    block, = [block for block in blocks if "model.pt2" in block]
    return block


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_the_lines_in_the_docs_classify_a_jpeg_without_this_repository(crop, tmp_path):
    rng = np.random.default_rng(0)
    dataset, alone = helpers.make_image_folder(tmp_path / "images"), tmp_path / "alone"
    train_crae.train(dataset=dataset, labels=4, image_size=16, crop=crop, steps=2, out=str(tmp_path / "run"),
                     **helpers.QUICK | dict(batch=2))
    call("export", tmp_path / "run", "--device=cpu")
    alone.mkdir()
    (tmp_path / "run" / "model.pt2").rename(alone / "model.pt2")
    photo = Image.fromarray(rng.integers(0, 256, (60, 90, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6                                            # orientation: the camera was turned
    photo.save(alone / "photo.jpg", exif=exif)
    lines = documented_lines()
    assert len([line for line in lines.splitlines() if line]) == 10
    done = subprocess.run([sys.executable, "-I", "-c", lines], cwd=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = ast.literal_eval(done.stdout)                     # a dict of classes and probabilities
    call("predict", tmp_path / "run", alone / "photo.jpg", "--out", tmp_path / "p.csv", "--device=cpu")
    with (tmp_path / "p.csv").open(encoding="utf-8") as file:
        row, = csv.DictReader(file)
    assert printed.keys() == {"a b", "ö"}
    for name, p in printed.items():
        assert p == pytest.approx(float(row[name]), abs=1e-5)
