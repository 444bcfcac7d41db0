"""Runs of the baselines: fine-tuning, values and names, every method as a script, stop and resume."""
import copy
import csv
import json
import math
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import cli
import data
import helpers
import presets
import run_folder
import train_baselines as tb
import training
from models import make_model

METHODS, TERMS = list(helpers.BASELINES), helpers.BASELINES

# ---------------------------------------------------------------- fine-tuning


@pytest.mark.slow
def test_fine_tuning_begins_with_the_rotation_stage_on_all_images_without_labels(tmp_path, monkeypatch):
    seen, starts = [], []
    real_one, real_two = tb.rotation, tb.labeled_only

    def stage_one(model, x_l, y_l, x_u, **more):
        seen.append((x_l, y_l, x_u))
        return real_one(model, x_l, y_l, x_u, **more)

    def stage_two(model, x_l, y_l, x_u, **more):
        starts.append({k: v.clone() for k, v in model.state_dict().items()})
        assert len(x_u) == 0
        return real_two(model, x_l, y_l, x_u, **more)

    monkeypatch.setattr(tb, "rotation", stage_one)
    monkeypatch.setitem(tb.OBJECTIVES, "fine_tune", stage_two)
    quick = helpers.QUICK | dict(method="fine_tune", steps=30, batch=40)
    tb.train(labels=20, out=str(tmp_path / "run"), **quick)
    x_l, y_l, x_u = (torch.cat(c) for c in zip(*seen))
    assert (y_l == -1).all() and len(seen) == 30 and len(starts) == 30
    images, labels, *_ = data.load("digits", "nowhere")
    split = np.load(tmp_path / "run" / "split.npz")
    training_images = {images[i].numpy().tobytes() for i in [*split["labeled"], *split["unlabeled"]]}
    for x in x_l, x_u:                                  # 1,200 draws: every training image, and no other
        assert {image.numpy().tobytes() for image in x} == training_images
    first = torch.load(tmp_path / "run" / "pretrain" / "model.pt", weights_only=True)
    assert first["method"] == "rotation"
    for name, value in starts[0].items():
        if name.startswith("backbone."):
            assert torch.equal(value, first["state"][name]), name
    new, old = starts[0]["classifier.weight"], first["state"]["classifier.weight"]
    assert not torch.equal(new, old)
    rows = list(csv.DictReader((tmp_path / "run" / "pretrain" / "log.csv").open()))
    assert rows[-1]["test_error"] == rows[-1]["unlabeled_error"] == ""
    assert float(rows[-1]["rotation_accuracy"]) > 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["method"] == "fine_tune"

    seen.clear()                                        # the same first stage for another number of labels
    for place in "run", "run/pretrain", "run/pretrain/model.pt":
        starts.clear()
        out = tmp_path / place.replace("/", "_")
        tb.train(labels=50, pretrained=str(tmp_path / place), out=f"{out}_50", **quick | dict(steps=2))
        conv = "backbone.conv.weight"
        assert not seen and torch.equal(starts[0][conv], first["state"][conv])
        assert not Path(f"{out}_50", "pretrain").exists()
    for path, arch, word in (("run/model.pt", "wrn-10-0.25", "fine_tune"), ("run", "wrn-10-1", "wrn-10-0.25"),
                             ("run/log.csv", "wrn-10-0.25", "cannot be read"),
                             ("nothing", "wrn-10-0.25", "neither a file")):
        with pytest.raises(cli.Refused, match=word) as refused:
            tb.train(labels=50, pretrained=str(tmp_path / path), out=str(tmp_path / "bad"),
                     **quick | dict(arch=arch))
        assert "\n" not in str(refused.value) and not (tmp_path / "bad").exists()


@pytest.mark.slow
def test_stage_one_weights_for_other_runs(tmp_path, monkeypatch, capsys):
    """The folder name, a note about other seeds, damaged files; stage two, once begun, needs none of them."""
    monkeypatch.chdir(tmp_path)
    quick = helpers.QUICK | dict(method="fine_tune", steps=2)
    tb.train(**quick, out="first")
    capsys.readouterr()
    tb.train(**quick, labels=50, pretrained="./first/")
    changed = "recipepaper_pretrainedfirst_archwrn-10-0.25_steps2_batch4"
    folder = tmp_path / "runs" / f"digits_50_fine_tune_0_{changed}"
    assert (folder / "model.pt").exists()
    assert "note" not in capsys.readouterr().out.replace("note: 2 steps", "")
    tb.train(**quick, labels=50, pretrained="first", seed=1, out="second")
    assert "with seed 0; with another seed" in capsys.readouterr().out
    saved = torch.load("first/pretrain/model.pt", weights_only=True)
    for change in dict(state={}), dict(state=None), dict(state={"backbone.conv.weight": torch.zeros(2)}):
        torch.save(saved | change, "bad.pt")
        with pytest.raises(cli.Refused, match="--pretrained bad.pt: cannot be read"):
            tb.train(**quick, pretrained="bad.pt", out="third")
        assert not Path("third").exists()
    (folder / "model.pt").unlink()                              # as if killed at the very end
    Path("first").rename("moved")
    tb.train(**quick, labels=50, pretrained="first", resume=True)
    assert (folder / "model.pt").exists()


def test_the_first_stage_has_the_presets_bn_momentum_and_learns_all_but_the_classifier(tmp_path, monkeypatch):
    nets, real = [], training.fit

    def recorded(net, *rest, **loop):
        nets.append(copy.deepcopy(net))
        return real(net, *rest, **loop)

    monkeypatch.setattr(training, "fit", recorded)
    tb.train(method="fine_tune", steps=1, out=str(tmp_path / "run"), **helpers.QUICK)
    assert [net.backbone.bn.momentum for net in nets] == [presets.digits["bn_momentum"]] * 2
    frozen = {name for name, p in nets[0].named_parameters() if not p.requires_grad}
    assert frozen == {"classifier.weight", "classifier.bias"}
    assert all(p.requires_grad for p in nets[1].parameters())


# ---------------------------------------------------------------- constants and names


def test_constants_are_those_of_the_protocol():
    """The table of the protocol, written out again: weight, then weight decay if it is not the preset's."""
    def of(table, method, *names):
        return tuple(table[method].get(name) for name in names)

    for dataset, pi, pl, mx, mt, ic, mm in (
            ("cifar10", (20, 0.02), 1, 0.75, (50, 0.2), (1000, 0.75), (75, 0.75)),
            ("digits", (20, 0.02), 1, 0.75, (50, 0.2), (1000, 0.75), (75, 0.75)),
            ("cifar100", (20, 0.02), 1, 0.75, (50, 0.2), (1000, 0.75), (150, 0.75)),
            ("svhn", (5, 0.2), 2, 0.25, (150, 0.02), (20, 0.5), (250, 0.75)),
            ("svhn_extra", (5, 0.2), 2, 0.25, (180, 0.02), (20, 0.5), (250, 0.25))):
        table = {method: presets.of_baseline(method, dataset, "paper") for method in presets.BASELINES}
        for method in "pi_model", "swa":
            assert of(table, method, "weight", "weight_decay") == pi
        assert of(table, "pseudo_label", "weight", "threshold") == (pl, 0.95)
        assert of(table, "mixup", "weight", "beta") == (1, mx)
        assert of(table, "vat", "weight", "epsilon", "entropy_weight", "weight_decay") == (0.3, 6, 0.06, 0.02)
        assert of(table, "fixmatch", "weight_decay") == (1e-3 if dataset == "cifar100" else 5e-4,)
        assert of(table, "mean_teacher", "weight", "weight_decay") == mt
        assert of(table, "ict", "weight", "beta") == ic
        assert of(table, "mixmatch", "weight", "beta", "temperature") == (*mm, 0.5)
        assert of(table, "fixmatch", "weight", "threshold", "lr") == (1, 0.95, 0.03) and tb.MU == 7
        assert of(table, "s4l", "weight") == (1,) and list(table) == METHODS


@pytest.mark.parametrize("dataset, method, expected", [
    ("cifar10", "mean_teacher", dict(weight=50, weight_decay=0.2, lr=0.002, ema=0.999, labels=250,
                                     paper="47.32 %, quoted from mixmatch")),
    ("cifar10", "s4l", dict(weight=1, weight_decay=0.02, paper="32.66 %")),
    ("cifar100", "mixmatch", dict(weight=150, weight_decay=0.04, paper="25.88 %, quoted from mixmatch")),
    ("cifar100", "swa", dict(weight=20, weight_decay=0.02, paper="28.80 %, quoted from fast-swa")),
    ("svhn", "pi_model", dict(weight=5, weight_decay=0.2)),
    ("svhn_extra", "vat", dict(weight=0.3, weight_decay=0.02)),
    ("svhn_extra", "mean_teacher", dict(weight=180, weight_decay=0.02)),
    ("svhn_extra", "mixmatch", dict(weight=250, beta=0.25, weight_decay=0.02)),
    ("svhn_extra", "pseudo_label", dict(weight=2, weight_decay=0.02)),
    ("svhn_extra", "mixup", dict(beta=0.25, weight_decay=0.02)),
    ("svhn_extra", "ict", dict(weight=20, weight_decay=0.02)),
    ("svhn_extra", "s4l", dict(weight=1, weight_decay=0.0001)),
    ("digits", "fixmatch", dict(weight=1, lr=0.03, weight_decay=5e-4, paper=None)),
])
def test_a_run_has_the_values_of_its_method_and_dataset(dataset, method, expected, tmp_path, monkeypatch):
    kept = {}

    def keep(config):
        kept.update(config)
        raise cli.Refused("enough")

    monkeypatch.setattr(run_folder, "load_data", keep)
    flags = dict(method=method, dataset=dataset, recipe="paper", out=str(tmp_path / "run"), device="cpu")
    with pytest.raises(cli.Refused, match="enough"):
        tb.train(**flags)
    assert {k: kept[k] for k in expected} == expected
    with pytest.raises(cli.Refused, match="enough"):    # flags win, and this is no longer the paper's run
        tb.train(**flags, weight=0.7, weight_decay=0.3, lr=0.4)
    assert (kept["weight"], kept["weight_decay"], kept["lr"], kept["paper"]) == (0.7, 0.3, 0.4, None)


def test_every_flag_reaches_its_place(tmp_path, monkeypatch):
    kept = {}
    monkeypatch.setattr(training, "fit", lambda net, objective, loaded, config, **loop: kept.update(
        net=net, objective=objective, config=config, loop=loop))
    flags = dict(arch="wrn-16-1", steps=10, batch=3, lr=0.05, weight_decay=0.6, flip=True, labels=20,
                 image_size=16, seed=4, weight=0.7)
    common = dict(recipe="paper", device="cpu", out=str(tmp_path / "run"))
    tb.train(method="ict", **flags, **common)
    assert kept["objective"].func is tb.ict
    assert kept["objective"].keywords == dict(weight=0.7, beta=0.75, ramp=4)
    assert {k: kept["config"][k] for k in flags} == flags and kept["loop"] == dict(unlabeled=3)
    torch.manual_seed(4)
    net = make_model("wrn-16-1", 10, 0, aux=False)
    assert kept["net"].aux is None and kept["net"].rotation is None
    assert torch.equal(net.classifier.weight, kept["net"].classifier.weight)
    tb.train(method="s4l", **common)
    assert kept["net"].rotation.out_features == 4 and kept["net"].backbone.bn.momentum == 0.1
    assert kept["objective"].keywords == dict(
        weight=1, class_copies="all", rotations="four", labeled_copies="four", ramp=320)
    for variant, name in [(dict(class_copies="upright"), "s4l_upright"), (dict(weight=2.0), "s4l_weight2"),
                          (dict(rotations="one"), "s4l_one_rotation"), (dict(weight=1.0), "s4l"),
                          (dict(class_copies="upright", weight=0.5), "s4l_upright_weight0.5")]:
        tb.train(method="s4l", **variant, **common)
        assert kept["config"]["method"] == name and kept["config"]["changed"] == dict(recipe="paper")
        assert variant.items() <= kept["objective"].keywords.items()
    tb.train(method="vat", **common)
    assert kept["objective"].keywords == dict(weight=0.3, epsilon=6, entropy_weight=0.06, ramp=320)
    tb.train(method="labeled_only", **common)
    assert kept["loop"] == dict(unlabeled=0)
    tb.train(method="fixmatch", **common)
    assert kept["loop"]["unlabeled"] == 7 * 32                  # FixMatch's ratio, the preset's batch
    for method in "fixmatch", "mixmatch", "s4l":
        tb.train(method=method, unlabeled=10, **common)
        assert kept["loop"]["unlabeled"] == 10


# ---------------------------------------------------------------- all methods from start to end


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return helpers.save_few_digits(tmp_path_factory.mktemp("few") / "few.npz")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_twenty_images_can_be_overfitted(method, few, tmp_path, monkeypatch):
    monkeypatch.setitem(presets.own_npz, "bn_momentum", 0.1)
    monkeypatch.setitem(presets.own_npz, "ema", 0.9)
    monkeypatch.setitem(presets.own_npz, "epoch", 50)           # the losses are means over the last 50 steps
    monkeypatch.setattr(tb, "MU", 2)
    lr = None if method == "fixmatch" else 0.005
    row = tb.train(method=method, dataset=few, recipe="paper", arch="wrn-10-1", steps=200, batch=20, lr=lr,
                   device="cpu", out=str(tmp_path / "run"))
    assert row["test_error"] <= 5, row                          # rounding may flip one image; chance is 90
    # Mixed labels have entropy, and the weight of ICT is 1000.
    assert row["loss_class"] < (1.2 if method in ("mixup", "mixmatch", "ict") else 0.3)
    assert row["unlabeled_error"] is None and row["val_error"] is None


FILES = {".lock", "config.json", "split.npz", "split.csv", "data.png", "log.csv", "curve.png", "last.pt",
         "model.pt"}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_as_a_subprocess(method, tmp_path):
    words = helpers.words_of(method=method, **helpers.QUICK, steps=6)
    done = helpers.run_script("train_baselines.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / f"digits_100_{method}_0_recipepaper_archwrn-10-0.25_steps6_batch4"
    assert done.stdout.strip().splitlines()[-1].startswith(f"runs/{folder.name}: test error ")
    assert {p.name for p in folder.iterdir()} == FILES | ({"pretrain"} if method == "fine_tune" else set())
    header, row = (line.split(",") for line in (folder / "log.csv").read_text().splitlines())
    losses = [f"loss_{term}" for term in TERMS[method]]
    scores = ["rotation_accuracy", "unlabeled_error", "val_error", "test_error", "test_error_raw",
              "test_top5_error"]
    assert header == ["step", "epoch", "seconds", "images_per_second", "lr", *losses, *scores]
    values = dict(zip(header, row))
    may_be_empty = "rotation_accuracy", "test_top5_error"
    assert all(math.isfinite(float(v)) for k, v in values.items() if k not in may_be_empty)
    assert values["test_top5_error"] == ""                      # five of ten classes would be half of them
    assert (values["rotation_accuracy"] != "") == (method == "s4l")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_continues_to_the_same_bits(method, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(presets.digits, "epoch", 2)
    flags = helpers.QUICK | dict(method=method, steps=6, batch=8, resume=True)
    tb.train(**flags, out=str(tmp_path / "whole"))

    stages = ["rotation", "labeled_only"] if method == "fine_tune" else [method]
    # A signal in the middle of step 4, or of the last step of stage one; then stage two must not begin.
    step_of, at = {}, dict(rotation=5)
    for stage in stages:
        real = tb.rotation if stage == "rotation" else tb.OBJECTIVES[method]

        def stopping(model, x_l, y_l, x_u, real=real, stage=stage, **more):
            if more["step"] == at.get(stage, 3) and stage not in step_of:
                step_of[stage] = more["step"]
                os.kill(os.getpid(), signal.SIGTERM)
            return real(model, x_l, y_l, x_u, **more)

        if stage == "rotation":
            monkeypatch.setattr(tb, "rotation", stopping)
        else:
            monkeypatch.setitem(tb.OBJECTIVES, method, stopping)
    for stage in stages:
        with pytest.raises(SystemExit) as stop:
            helpers.command_line(tb, helpers.words_of(**flags, out=tmp_path / "stopped"))
        assert stop.value.code == 143
        assert stage == "rotation" or f"--method={method}" in capsys.readouterr().err
        folder = tmp_path / "stopped" / ("pretrain" if stage == "rotation" else "")
        assert torch.load(folder / "last.pt", weights_only=True)["run"]["step"] == at.get(stage, 3) + 1
    tb.train(**flags, out=str(tmp_path / "stopped"))
    whole, stopped = helpers.everything_in(tmp_path / "whole"), helpers.everything_in(tmp_path / "stopped")
    assert len(step_of) == len(stages) and len(whole) == 7 * len(stages) and helpers.same(whole, stopped)
    tb.train(**flags | dict(seed=1), out=str(tmp_path / "other"))
    other = helpers.everything_in(tmp_path / "other")
    assert not any(helpers.same(whole[name], other[name]) for name in whole if "curve.png" not in name)


@pytest.mark.slow
def test_only_methods_without_a_schedule_can_be_made_longer(tmp_path):
    quick = helpers.QUICK | dict(batch=2)
    for method in METHODS:
        tb.train(method=method, steps=2, out=str(tmp_path / method), **quick)
        longer = dict(method=method, steps=3, resume=True, out=str(tmp_path / method), **quick)
        if method in ("labeled_only", "s4l", "mixup"):
            assert tb.train(**longer)["step"] == 3
        else:
            with pytest.raises(cli.Refused, match="--steps 3: the run in .* has 2"):
                tb.train(**longer)


# ---------------------------------------------------------------- the command line


def test_help_names_every_flag_and_every_method_with_its_paper(capsys):
    with pytest.raises(SystemExit) as stop:
        helpers.command_line(tb, ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in tb.FLAGS:
        assert re.search(rf"^ *--{name}\s", text, re.M), name
    for method in METHODS:
        line = re.search(rf"^ +{method} .*$", text, re.M)
        assert line and (method == "labeled_only" or re.search(r"\(.*\d{4}.*\)", line[0])), method


BAD = {                                                         # flags: what the message must contain
    "--method crae": ", ".join(METHODS), "": "labeled_only, fine_tune", "--method": "--method: needs",
    "--method entmin": "--entmin", "--method s4l --weight -1": "--weight",
    "--method s4l --weight nan": "--weight",
    "--method fine_tune --weight 2": "no unlabelled term", "--method s4l --pretrained x": "--pretrained",
    "--method fine_tune --pretrained nothing": "--pretrained", "--method ict --nocycles": "--nocycles",
    "--method ict --plus": "--plus", "--method vat --steps 0": "--steps",
    "--method vat --labels 3": "--labels", "--metod vat": "--method",
    "--method vat --class_copies upright": "--class_copies", "--method ict --rotations one": "--rotations",
    "--method s4l --rotations one --class_copies upright": "--class_copies",
    "--method s4l --rotations two": "four, one", "--method labeled_only --unlabeled 5": "--unlabeled",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_gives_a_one_line_error_before_any_work(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "fit", lambda *a, **k: pytest.fail("training began"))
    with pytest.raises(SystemExit) as stop:
        helpers.command_line(tb, flags.split())
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code and BAD[flags] in stop.value.code
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""
