"""train_crae.py as a user runs it: names, files, flags, bad input."""
import json
import math
import os
import re
from functools import partial

import numpy as np
import pytest
import torch

import cli
import data
import helpers
import losses
import presets
import train_crae
import training
from models import make_model
from train_crae import crae, crae_plus

WORDS = helpers.words_of(**helpers.FOUR_STEPS)
CHANGED = "recipepaper_archwrn-10-0.25_steps4_batch4"
FILES = {".lock", "config.json", "split.npz", "split.csv", "data.png", "log.csv", "curve.png", "last.pt",
         "model.pt"}
NAMES = {
    "": "crae", "--plus": "crae_plus", "--ext1": "crae_ext1", "--ext2": "crae_ext2",
    "--select detach": "detach", "--select random": "random",
    "--select independent --heads 2": "independent_2", "--heads 0": "no_rotation",
    "--heads 0 --ext1": "no_rotation_ext1", "--entmin": "crae_entmin", "--entmin --ext2": "crae_ext2_entmin",
    "--noaux": "crae_no_aux", "--plus --aux false": "crae_plus_no_aux", "--aux none": "crae_no_aux",
    "--aux all": "crae_aux_all", "--plus --aux=all": "crae_plus_aux_all", "--aux": "crae",
    "--aux upright --select detach": "detach", "--aux all --select random": "random_aux_all",
}


@pytest.mark.parametrize("flags", NAMES)
def test_every_variant_runs_and_has_the_papers_name(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    row = helpers.command_line(train_crae, [*flags.split(), *WORDS])
    folder = tmp_path / "runs" / f"digits_100_{NAMES[flags]}_0_{CHANGED}"
    has_heads, K = "--heads 0" not in flags, 2 if "heads 2" in flags else 10
    assert {p.name for p in folder.iterdir()} == FILES | ({"diversity.csv"} if has_heads else set())
    assert math.isfinite(row["loss_class"]) and (row["rotation_accuracy"] is not None) == has_heads
    if has_heads:
        header, *lines = (folder / "diversity.csv").read_text().splitlines()
        assert header == "step,class," + ",".join(f"head_{k}" for k in range(K)) and len(lines) == 10
        assert all(abs(sum(map(float, line.split(",")[2:])) - 1) < 1e-3 for line in lines)


@pytest.mark.slow
def test_the_script_from_start_to_end(tmp_path):
    run = partial(helpers.run_script, "train_crae.py", "--plus", *WORDS, "--lr", "1e-3", cwd=tmp_path)
    done = run()
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / f"digits_100_crae_plus_0_{CHANGED}_lr0.001"
    result = r"test error \d+\.\d\d % \(95 % interval \d+\.\d\d to \d+\.\d\d %\)$"
    assert re.search(result, done.stdout.strip())
    assert "100 labelled, 1,067 unlabelled, 130 validation, 500 test" in done.stdout
    config = json.loads((folder / "config.json").read_text())
    assert config["lr"] == 0.001 and config["weight_decay"] == 0.02
    assert config["versions"]["torch"] == torch.__version__
    script = os.path.relpath(helpers.HERE / "train_crae.py", tmp_path)          # from where it was started
    flags = "--recipe=paper --plus --arch=wrn-10-0.25 --steps=4 --batch=4 --lr=0.001 --device=cpu"
    assert config["command"] == f"python {script} {flags}"
    assert config["labels"] == 100 and "git_commit" in config and config["ext1"] and config["ext2"]
    assert config["resolved"]["rotation_heads"] == 10 and config["resolved"]["image_size"] == 8
    header = (folder / "log.csv").read_text().splitlines()[0]
    assert header == ("step,epoch,seconds,images_per_second,lr,loss_class,loss_aux,loss_ext1,"
                      "loss_rotation_labeled,loss_rotation_unlabeled,rotation_accuracy,unlabeled_error,"
                      "val_error,test_error,test_error_raw,test_top5_error")
    again = run()
    assert again.returncode != 0 and "--resume" in again.stderr
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    reprint = helpers.run_script("train_crae.py", "--plus", *WORDS, "--lr", "1e-3", "--resume", cwd=tmp_path)
    assert reprint.returncode == 0 and reprint.stdout.strip() == done.stdout.strip().splitlines()[-1]
    assert files == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_every_flag_reaches_its_place(tmp_path, monkeypatch):
    kept = {}
    monkeypatch.setattr(training, "fit", lambda net, objective, loaded, config, **loop: kept.update(
        net=net, objective=objective, config=config, **loop))
    flags = dict(select="random", heads=7, ext1=True, aux=False, rot_dim=5, arch="wrn-16-1", eta=0.3,
                 eta2=0.4, temperature=0.9, steps=9, batch=3, lr=0.05, weight_decay=0.6, flip=True, labels=20,
                 image_size=16, seed=4, rotations="four", ext1_ramp=[0.2, 0.5])
    paper = partial(train_crae.train, recipe="paper", device="cpu", out=str(tmp_path / "run"))
    paper(**flags)
    assert kept["objective"].func is crae_plus and kept["objective"].keywords == dict(
        select="random", eta=0.3, aux="none", eta2=0.4, temperature=0.9, ext1=True, ext2=False, entmin=False,
        copies=("four", "four"), detach=False, ramp=[0.2 * 9, 0.5 * 9])
    assert {k: kept["config"][k] for k in flags} == flags | dict(aux="none")
    assert kept["p_z"] is train_crae.mean_p_z and kept["unlabeled"] == 3
    net = kept["net"]
    assert net.aux is None and net.rotation.out_features == 28 and net.reduce.out_features == 5
    assert len(net.backbone.blocks) == 6 and net.backbone.bn.momentum == 0.1    # the preset's
    torch.manual_seed(4)                                        # the seed determines the initial weights
    assert torch.equal(net.classifier.weight, make_model("wrn-16-1", 10, 7, 5, aux=False).classifier.weight)
    paper(eta=0.3, rotations="one", detach_rotated=True)
    assert kept["objective"].func is crae
    assert kept["objective"].keywords == dict(
        select="marginal", eta=0.3, aux="upright", copies=("four", "one"), detach=True)
    assert kept["p_z"] is losses.log_p_z and kept["net"].aux is not None
    for recipe, weight in ("paper", 75.0), ("fast", 30.0):      # elsewhere, the fast recipe has eta = 2
        paper(mixmatch=True, steps=1000, recipe=recipe)
        assert kept["objective"].func is train_crae.crae_mixmatch and kept["objective"].keywords == dict(
            select="marginal", eta=1.0, weight=weight, beta=0.75, temperature=0.5, ramp=400)
    assert kept["config"]["method"] == "crae_mixmatch" and kept["net"].aux is not None
    paper(unlabeled=11)
    assert kept["unlabeled"] == 11
    paper(heads=0)
    assert kept["unlabeled"] == 0
    for value, aux in {True: "upright", False: "none", "all": "all"}.items():
        paper(aux=value)
        assert kept["objective"].keywords["aux"] == aux and (kept["net"].aux is None) == (aux == "none")


def test_without_rotation_branches_no_unlabelled_image_is_used(tmp_path):
    """Two datasets that differ only in unlabelled images give the same bits; with ext. 1 they do not."""
    images, labels, *_ = data.load("digits", "nowhere")
    pixels = images.permute(0, 2, 3, 1).numpy()
    for name, unlabeled in ("a", pixels[200:300]), ("b", 255 - pixels[200:300]):
        np.savez(tmp_path / f"{name}.npz", train_images=pixels[:40], train_labels=labels[:40].numpy(),
                 test_images=pixels[100:150], test_labels=labels[100:150].numpy(),
                 unlabeled_images=unlabeled)

    def weights(name, **flags):
        out = tmp_path / f"run_{name}_{'_'.join(flags)}"
        flags |= dict(dataset=str(tmp_path / f"{name}.npz"), heads=0, steps=3, out=str(out))
        train_crae.train(**flags, **helpers.QUICK)
        saved = torch.load(out / "last.pt", weights_only=True)
        return saved["net"] | {f"ema.{k}": v for k, v in saved["ema"].items()}

    assert helpers.same(weights("a"), weights("b"))             # BN statistics included
    assert not helpers.same(weights("a", ext1=True), weights("b", ext1=True))
    assert not any("aux" in key for key in weights("b", entmin=True))           # no additional classifier


def test_a_run_with_an_earlier_definition_cannot_be_resumed(tmp_path):
    flags = dict(steps=2, out=str(tmp_path / "run"), **helpers.QUICK)
    train_crae.train(**flags)
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    assert config["definition"] == presets.DEFINITION
    first = {k: v for k, v in config.items() if k != "definition"} | dict(aux=True)
    for old in dict(config, definition=1), first:
        path.write_text(json.dumps(old))
        with pytest.raises(cli.Refused, match="earlier definition"):
            train_crae.train(**flags, resume=True)
    s4l = {k: v for k, v in config.items() if k not in ("definition", "select")} | dict(method="s4l")
    path.write_text(json.dumps(s4l))                            # the run of a baseline has no definition
    with pytest.raises(cli.Refused, match="--method crae: .* has s4l"):
        train_crae.train(**flags, resume=True)


def test_help_names_every_flag_and_does_not_train(tmp_path):
    for flags in ["--help"], ["--dataset", "cifar10", "--help"], ["-h"]:
        done = helpers.run_script("train_crae.py", *flags, cwd=tmp_path)
        assert done.returncode == 0 and not list(tmp_path.iterdir())
        for name in train_crae.FLAGS:
            assert re.search(rf"^ *--{name}\s", done.stdout, re.M), name


BAD = {                                                         # flags: what the message must contain
    "--epochs 3": "--epochs", "--lable 250": "--labels", "digits": "digits", "--plus maybe": "--plus",
    "--plus=maybe": "--plus", "--labels 0": "--labels", "--labels 5": "--labels", "--labels 1e3": "--labels",
    "--labels 2000": "--labels", "--labels many": "--labels", "--dataset imagnet": "cifar100",
    "--dataset missing/": "no such file", "--dataset missing.npz": "no such file", "--arch wrn-12-2": "6n",
    "--arch vgg": "--arch", "--steps -5": "--steps", "--steps 0": "--steps", "--batch 0": "--batch",
    "--lr 0": "--lr", "--lr nan": "--lr", "--lr fast": "--lr", "--weight_decay -1": "--weight_decay",
    "--eta 0": "--eta", "--eta2 -1": "--eta2", "--temperature 2": "--temperature",
    "--device cuda:99": "--device", "--device tpu9": "--device", "--select best": "marginal, random",
    "--heads -1": "--heads", "--heads 3": "--heads", "--heads 0 --plus": "--heads",
    "--unlabeled 0": "--unlabeled", "--heads 0 --unlabeled 5": "--unlabeled",
    "--unlabeled 3 --accumulate 2": "--unlabeled",
    "--aux maybe": "upright, all, none", "--aux=1": "--aux", "--noaux=3": "--noaux",
    "--heads 0 --aux all": "--aux", "--heads 0 --aux": "--aux", "--entmin --plus": "--entmin",
    "--entmin --ext1": "--entmin", "--rot_dim -1": "--rot_dim",
    "--rotations one --ext1": "--rotations one", "--rotations one --plus": "--rotations one",
    "--rotations one --heads 0": "--rotations one", "--rotations two": "--rotations",
    "--ext1_ramp 0.3": "--ext1_ramp 0.3: must be two", "--ext1_ramp 0.7,0.3": "--ext1_ramp 0.7,0.3",
    "--ext1_ramp 0.5,1.5": "--ext1_ramp", "--ext1_ramp 0.1,0.2,0.3": "--ext1_ramp",
    "--mixmatch --plus": "omit --plus", "--mixmatch --heads 0": "omit --heads",
    "--mixmatch --aux none": "omit --aux", "--mixmatch --select detach": "omit --select",
    "--mixmatch --ext1_ramp 0,1": "omit --ext1_ramp", "--mixmatch --eta2 2": "omit --eta2",
    "--mixmatch --rotations one": "omit --rotations", "--mixmatch --detach_rotated": "omit --detach_rotated",
    "--mixmatch --dataset imagenet": "--mixmatch: needs several views",
    "--detach_rotated --heads 0": "--detach_rotated", "--recipe slow": "fast, paper",
    "--recipe fast --dataset imagenet": "--recipe fast", "--minutes 5 --steps 7": "--minutes 5: --steps 7",
    "--minutes 0": "--minutes", "--minutes -1": "--minutes", "--minutes inf": "--minutes",
    "--minutes nan": "--minutes", "--minutes 1e30": "--minutes", "--image_size 7": "8 pixels or more",
    "--seed -1": "--seed", "--image_size 4": "--image_size", "--plus - --seed 1": "lone",
    "--noplus=3": "--noplus", "--flip 1": "--flip", "--out train_crae.py": "--out",
    "--resume --out folder": "--out", "--out": "--out: needs", "--noout": "--noout",
    "--normalize": "--normalize", "--device meta": "--device",
    "--seed 4294967296": "--seed", "--lr 1e400": "--lr",
    "--resume --out damaged": "damaged", f"--dataset {'x' * 300}": "no such file", "-labels 5": "--labels",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_gives_a_one_line_error_before_any_work(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_crae.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "something").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").touch()
    monkeypatch.setattr(training, "fit", lambda *a, **k: pytest.fail("training began"))
    with pytest.raises(SystemExit) as stop:
        helpers.command_line(train_crae, flags.split())
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code and BAD[flags] in stop.value.code
    assert {p.name for p in tmp_path.iterdir()} == {"train_crae.py", "folder", "damaged"}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flags", [
    "--epochs 3", "--plus=maybe", "word",                       # reported before torch is imported
    *(pytest.param(flags, marks=pytest.mark.slow) for flags in ("--dataset nothing", "--steps -5")),
])
def test_bad_input_as_a_subprocess(flags, tmp_path):
    done = helpers.run_script("train_crae.py", *flags.split(), cwd=tmp_path)
    assert done.returncode != 0 and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == "" and not list(tmp_path.iterdir())
