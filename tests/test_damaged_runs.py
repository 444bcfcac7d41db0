"""Damaged, foreign and malicious files in the run folder: refused or replaced, never executed."""
import csv
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

import cli
import data
import evaluate
import presets
import run_folder
import train_baselines
import train_crae
from helpers import QUICK, everything_in, same
from test_run_folder import boom

# ---------------------------------------------------------------- checkpoints


def truncated(path):
    path.write_bytes(path.read_bytes()[:-200])


def foreign(path):
    torch.save(dict(net=torch.zeros(3)), path)


def of_another_seed(path):
    saved = torch.load(path, weights_only=True)
    torch.save(saved | dict(whose=saved["whose"] | dict(seed=1)), path)


def one_bit(path):
    """Flip a bit in the middle of the largest tensor, which torch.load does not check."""
    with zipfile.ZipFile(path) as file:
        tensor = max((file.read(name) for name in file.namelist() if "/data/" in name), key=len)
    content = bytearray(path.read_bytes())
    content[content.find(tensor) + len(tensor) // 2] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncated, foreign, of_another_seed, one_bit,
                                    lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"\0" * 5000)])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(hooked, tmp_path, capsys, damage):
    hooks, train = hooked
    train(out=str(tmp_path / "whole"))
    hooks.append(boom(7))
    with pytest.raises(RuntimeError):
        train(out=str(tmp_path / "run"))
    hooks.clear()
    damage(tmp_path / "run" / "last.pt")
    train(out=str(tmp_path / "run"), resume=True)
    output = capsys.readouterr()
    assert "last.pt: damaged, or from another run" in output.err
    assert "using the checkpoint before it" in output.err
    assert "continuing after step 6" in output.out
    assert same(everything_in(tmp_path / "run"), everything_in(tmp_path / "whole"))


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_two_damaged_checkpoints_change_nothing(hooked, tmp_path):
    hooks, train = hooked
    hooks.append(boom(7))
    with pytest.raises(RuntimeError):
        train(out=str(tmp_path / "run"))
    for name in "last.pt", "previous.pt":
        truncated(tmp_path / "run" / name)
    before = contents(tmp_path / "run")
    with pytest.raises(cli.Refused, match="no checkpoint in it can be read; nothing was changed"):
        train(out=str(tmp_path / "run"), resume=True)
    assert before == contents(tmp_path / "run")


def test_nothing_is_changed_in_a_finished_run_that_cannot_be_made_longer(hooked, tmp_path):
    _, train = hooked
    train(out=str(tmp_path / "run"))
    for name in "last.pt", "previous.pt":
        truncated(tmp_path / "run" / name)
    before = contents(tmp_path / "run")
    with pytest.raises(cli.Refused, match="no checkpoint in it can be read; nothing was changed"):
        train(out=str(tmp_path / "run"), steps=12, resume=True)
    assert before == contents(tmp_path / "run") and "model.pt" in before


# ---------------------------------------------------------------- logs and config.json


MISSING = "log.csv is missing rows: the checkpoint at step 10 expects 3"


@pytest.mark.parametrize("name, damage, message", [
    ("log.csv", lambda text: text.replace(b"\n4,", b"\n"), f"{MISSING}|is damaged"),
    ("log.csv", lambda text: b"\n".join(text.split(b"\n")[:2]), MISSING),
    ("log.csv", lambda text: b"\xff\x00\n\x00", f"is damaged|{MISSING}"),
    ("config.json", lambda text: b"[]", "config.json is damaged"),
    ("config.json", lambda text: b"3", "config.json is damaged"),
    ("config.json", lambda text: text[:50], "config.json is damaged"),
    ("diversity.csv", lambda text: b"a,b\n1,2\n", "diversity.csv is damaged")])
def test_damaged_history_is_refused_not_shortened(hooked, tmp_path, name, damage, message):
    _, train = hooked
    train(out=str(tmp_path / "run"))
    path = tmp_path / "run" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(cli.Refused, match=message) as stop:
        train(out=str(tmp_path / "run"), steps=12, resume=True)
    assert len(str(stop.value).splitlines()) == 1


def test_a_class_name_that_was_cut_off_inside_a_character(tmp_path, monkeypatch):
    """And a class name that is not valid in any encoding."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    names = np.array(["hünd", "kätz"])
    np.savez(tmp_path / "x.npz", train_images=images, train_labels=names[np.arange(40) % 2],
             test_images=images[:4], test_labels=names[np.arange(4) % 2])
    monkeypatch.setitem(presets.own_npz, "epoch", 2)
    flags = dict(dataset=str(tmp_path / "x.npz"), labels=4, **QUICK)
    train_crae.train(**flags, steps=2, out=str(tmp_path / "run"))
    with (tmp_path / "run" / "diversity.csv").open("ab") as file:
        file.write("4,hü".encode()[:-1])
    assert train_crae.train(**flags, steps=4, resume=True, out=str(tmp_path / "run"))["step"] == 4
    rows = list(csv.DictReader((tmp_path / "run" / "diversity.csv").open(encoding="utf-8")))
    assert [(r["step"], r["class"]) for r in rows] == [
        ("2", "hünd"), ("2", "kätz"), ("4", "hünd"), ("4", "kätz")]
    run_folder.write_rows(tmp_path / "odd.csv", [{"step": 1, "class": "x\udcff"}], "w")
    assert run_folder.read_rows(tmp_path / "odd.csv", 9) == [{"step": "1", "class": "x\udcff"}]


# ---------------------------------------------------------------- malicious files


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_file_is_run(tmp_path):
    trap = tmp_path / "trap"
    flags = dict(steps=2, **QUICK, out=str(tmp_path / "run"))
    train_crae.train(**flags)
    evil = dict(net=Malicious(trap), method="rotation", arch="wrn-10-0.25", state=Malicious(trap))
    pickle.loads(pickle.dumps(Malicious(trap)))                 # the trap works
    trap.rmdir()
    for name in "last.pt", "model.pt":
        torch.save(evil, tmp_path / "run" / name)
    with pytest.raises(cli.Refused, match="cannot be read"):
        evaluate.use_model("test", str(tmp_path / "run"), device="cpu")
    with pytest.raises(cli.Refused, match="cannot be read"):
        train_baselines.train(method="fine_tune", pretrained=str(tmp_path / "run" / "model.pt"),
                              out=str(tmp_path / "x"), **QUICK)
    (tmp_path / "run" / "model.pt").unlink()
    with pytest.raises(cli.Refused, match="no checkpoint in it can be read"):
        train_crae.train(**flags, resume=True)
    objects = np.array([Malicious(trap)], object)
    np.savez(tmp_path / "evil.npz", train_images=objects, train_labels=np.array([0]))
    with pytest.raises(cli.Refused, match="cannot be read"):
        data.load(str(tmp_path / "evil.npz"), "nowhere")
    np.savez(tmp_path / "run" / "split.npz", labeled=objects)
    with pytest.raises(cli.Refused, match="split.npz cannot be read"):
        train_crae.train(**flags, resume=True)
    assert not trap.exists()
