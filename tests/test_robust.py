"""Nothing lost, nothing silently wrong: kills, damaged and malicious files, full disks, broken pictures, random input."""
import csv
import json
import os
import pickle
import resource
import shlex
import signal
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import data
import evaluate
import presets
import train_baselines
import train_crae
import training
from chaos import everything, same

HERE = Path(__file__).parent.parent
QUICK = dict(batch=4, arch="wrn-10-0.25", device="cpu")

# ---------------------------------------------------------------- stops


def test_kills_at_random_moments(capsys):
    """The short form of `python tests/chaos.py --kills 100`, as a process of its own: it forks."""
    done = subprocess.run([sys.executable, HERE / "tests" / "chaos.py", "--kills", "9", "--seed", "1"], capture_output=True, text=True)
    assert done.returncode == 0 and "9 kills survived" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def saves_every_step(monkeypatch):
    """CRAE with a hook that is called with the number of the step before it."""
    hooks = []
    real = train_crae.crae

    def hooked(model, *rest, **kwargs):
        for hook in hooks:
            hook(kwargs["step"], model)
        return real(model, *rest, **kwargs)

    monkeypatch.setattr(train_crae, "crae", hooked)
    monkeypatch.setitem(presets.digits, "epoch", 4)
    return hooks, partial(train_crae.train, steps=10, save_minutes=1e-9, **QUICK)


def boom(at, what=RuntimeError):
    def hook(step, model):
        if step == at:
            raise what
    return hook


def test_saves_by_time_keep_what_was_done(saves_every_step, tmp_path):
    hooks, train = saves_every_step
    train(out=str(tmp_path / "whole"))
    hooks.append(boom(7))
    with pytest.raises(RuntimeError):
        train(out=str(tmp_path / "run"))
    for name, step in ("last.pt", 7), ("previous.pt", 6):
        assert torch.load(tmp_path / "run" / name, weights_only=True)["run"]["step"] == step
    hooks.clear()
    seen = []
    hooks.append(lambda step, model: seen.append(step))
    train(out=str(tmp_path / "run"), resume=True, save_minutes=5.0)             # may differ
    assert seen == [7, 8, 9] and same(everything(tmp_path / "run"), everything(tmp_path / "whole"))
    with pytest.raises(SystemExit, match="--save_minutes 0"):
        train(out=str(tmp_path / "other"), save_minutes=0.0)


@pytest.mark.parametrize("number, code", [(signal.SIGUSR1, 143), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_the_step_save_and_tell_how_to_go_on(saves_every_step, tmp_path, capsys, number, code):
    hooks, train = saves_every_step
    hooks.append(lambda step, model: os.kill(os.getpid(), number) if step == 5 else None)
    with pytest.raises(SystemExit) as stop:
        train(out=str(tmp_path / "run"), save_minutes=10.0)
    assert stop.value.code == code and "to continue: python train_crae.py" in capsys.readouterr().err
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 6


def test_a_second_ctrl_c_stops_at_once(saves_every_step, tmp_path):
    hooks, train = saves_every_step
    hooks.append(lambda step, model: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)] if step == 5 else None)
    with pytest.raises(KeyboardInterrupt):
        train(out=str(tmp_path / "run"), save_minutes=10.0)
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 4


def test_two_processes_in_one_folder(saves_every_step, tmp_path):
    hooks, train = saves_every_step
    held = "import sys, time; sys.path.insert(0, sys.argv[1]); import training\nwith training.locked(sys.argv[2]): print('held', flush=True); time.sleep(600)"
    (tmp_path / "run").mkdir()
    other = subprocess.Popen([sys.executable, "-c", held, HERE, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(SystemExit, match="another process is at work in it"):
        train(out=str(tmp_path / "run"))
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
    other.kill()                                                # a crash leaves no lock behind
    other.wait()
    assert train(out=str(tmp_path / "run"))["step"] == 10


# ---------------------------------------------------------------- damaged and malicious files


def truncated(path):
    path.write_bytes(path.read_bytes()[:-200])


def foreign(path):
    torch.save(dict(net=torch.zeros(3)), path)


def of_another_seed(path):
    saved = torch.load(path, weights_only=True)
    torch.save(saved | dict(whose=saved["whose"] | dict(seed=1)), path)


def one_bit(path):
    """In the middle of the largest tensor, where torch.load does not look."""
    with zipfile.ZipFile(path) as file:
        tensor = max((file.read(name) for name in file.namelist() if "/data/" in name), key=len)
    content = bytearray(path.read_bytes())
    content[content.find(tensor) + len(tensor) // 2] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)


@pytest.mark.parametrize("damage", [truncated, foreign, of_another_seed, one_bit, lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"\0" * 5000)])
def test_a_damaged_save_is_named_and_the_one_before_it_used(saves_every_step, tmp_path, capsys, damage):
    hooks, train = saves_every_step
    train(out=str(tmp_path / "whole"))
    hooks.append(boom(7))
    with pytest.raises(RuntimeError):
        train(out=str(tmp_path / "run"))
    hooks.clear()
    damage(tmp_path / "run" / "last.pt")
    train(out=str(tmp_path / "run"), resume=True)
    output = capsys.readouterr()
    assert "last.pt: damaged or foreign" in output.err and "going on from the save before it" in output.err
    assert "continuing after step 6" in output.out
    assert same(everything(tmp_path / "run"), everything(tmp_path / "whole"))


def test_two_damaged_saves_change_nothing(saves_every_step, tmp_path):
    hooks, train = saves_every_step
    hooks.append(boom(7))
    with pytest.raises(RuntimeError):
        train(out=str(tmp_path / "run"))
    for name in "last.pt", "previous.pt":
        truncated(tmp_path / "run" / name)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(SystemExit, match="no save in it can be read; nothing was changed"):
        train(out=str(tmp_path / "run"), resume=True)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}


def test_nothing_is_changed_in_a_finished_run_that_cannot_be_made_longer(saves_every_step, tmp_path):
    _, train = saves_every_step
    train(out=str(tmp_path / "run"))
    for name in "last.pt", "previous.pt":
        truncated(tmp_path / "run" / name)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(SystemExit, match="no save in it can be read; nothing was changed"):
        train(out=str(tmp_path / "run"), steps=12, resume=True)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} and "model.pt" in before


@pytest.mark.parametrize("name, damage, message", [
    ("log.csv", lambda text: text.replace(b"\n4,", b"\n"), "has not the 3 rows|is damaged"), ("log.csv", lambda text: b"\n".join(text.split(b"\n")[:2]), "has not the 3 rows"),
    ("log.csv", lambda text: b"\xff\x00\n\x00", "is damaged|has not"), ("config.json", lambda text: b"[]", "config.json is damaged"),
    ("config.json", lambda text: b"3", "config.json is damaged"), ("config.json", lambda text: text[:50], "config.json is damaged"),
    ("diversity.csv", lambda text: b"a,b\n1,2\n", "diversity.csv is damaged")])
def test_damaged_history_is_refused_not_shortened(saves_every_step, tmp_path, name, damage, message):
    _, train = saves_every_step
    train(out=str(tmp_path / "run"))
    path = tmp_path / "run" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit, match=message) as stop:
        train(out=str(tmp_path / "run"), steps=12, resume=True)
    assert len(str(stop.value).splitlines()) == 1


def test_a_class_name_that_was_cut_off_inside_a_letter(tmp_path, monkeypatch):
    """And one that no encoding has."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(tmp_path / "x.npz", train_images=images, train_labels=np.array(["hünd", "kätz"])[np.arange(40) % 2], test_images=images[:4],
             test_labels=np.array(["hünd", "kätz"] * 2))
    monkeypatch.setitem(presets.own_npz, "epoch", 2)
    flags = dict(dataset=str(tmp_path / "x.npz"), labels=4, **QUICK)
    train_crae.train(**flags, steps=2, out=str(tmp_path / "run"))
    with (tmp_path / "run" / "diversity.csv").open("ab") as file:
        file.write("4,hü".encode()[:-1])
    assert train_crae.train(**flags, steps=4, resume=True, out=str(tmp_path / "run"))["step"] == 4
    rows = list(csv.DictReader((tmp_path / "run" / "diversity.csv").open(encoding="utf-8")))
    assert [(r["step"], r["class"]) for r in rows] == [("2", "hünd"), ("2", "kätz"), ("4", "hünd"), ("4", "kätz")]
    training.write_rows(tmp_path / "odd.csv", [{"step": 1, "class": "x\udcff"}], "w")
    assert training.read_rows(tmp_path / "odd.csv", 9) == [{"step": "1", "class": "x\udcff"}]


def test_other_images_are_refused_though_there_are_as_many(tmp_path):
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8), np.arange(40) % 2

    def train(images, labels, steps, test=images[:6], test_labels=labels[:6]):
        np.savez(tmp_path / "x.npz", train_images=images, train_labels=labels, test_images=test, test_labels=test_labels)
        return train_crae.train(dataset=str(tmp_path / "x.npz"), labels=4, steps=steps, **QUICK, resume=True, out=str(tmp_path / "run"))

    train(images, labels, 2)
    for changed in (images[::-1], labels), (images, labels[::-1]), (images[:39], labels[:39], 3, images[:7], labels[:7]):
        with pytest.raises(SystemExit, match="its images, labels or their order are not those"):
            train(*changed[:2], 3, *changed[3:])
    assert train(images, labels, 3)["step"] == 3


def test_a_run_that_came_while_the_data_was_loaded_is_not_continued_by_another(saves_every_step, tmp_path, monkeypatch):
    _, train = saves_every_step
    real, first = training.load_run, []

    def slow(config):
        loaded = real(config)
        if not first:
            first.append(1)
            train(out=str(tmp_path / "run"), seed=0)            # another process, while this one loads
        return loaded

    monkeypatch.setattr(training, "load_run", slow)
    with pytest.raises(SystemExit, match="--seed 1: the run in .* has 0"):
        train(out=str(tmp_path / "run"), seed=1)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 0


def test_the_first_stage_does_not_write_into_a_folder_that_is_held(tmp_path):
    flags = dict(method="fine_tune", steps=2, **QUICK, out=str(tmp_path / "run"))
    with training.hold(tmp_path / "run"):
        with pytest.raises(SystemExit, match="another process is at work in it"):
            train_baselines.train(**flags)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


class Dead(BaseException):
    """Stands in for SIGKILL: no handler of the run sees it."""


def test_death_at_every_touch_of_the_disk(tmp_path, monkeypatch):
    """Every sync, rename, row and save of a short run is once the last thing it does; --resume then ends in the same files,
    and no save that was complete is lost."""
    monkeypatch.setitem(presets.digits, "epoch", 2)
    flags = dict(steps=3, save_minutes=1e-9, **QUICK)
    train_crae.train(**flags, out=str(tmp_path / "whole"))
    whole, calls, saved, begun = everything(tmp_path / "whole"), dict(n=0, at=0), [], []

    def dying(real, half=False):
        def call(*args, **kwargs):
            calls["n"] += 1
            if calls["n"] == calls["at"]:
                if half:
                    args[1].write(b"half")
                raise Dead
            return real(*args, **kwargs)
        return call

    real_save, real_crae = training.save_state, train_crae.crae

    def save(folder, state):
        real_save(folder, state)
        saved.append(state["run"]["step"])

    monkeypatch.setattr(training, "save_state", save)
    monkeypatch.setattr(train_crae, "crae", lambda *rest, **kwargs: begun.append(kwargs["step"]) or real_crae(*rest, **kwargs))
    for k in range(1, 200):
        calls.update(n=0, at=k)
        saved.clear()
        out = tmp_path / f"run{k}"
        with monkeypatch.context() as patch:
            for module, name in (training, "sync"), (os, "replace"), (training, "write_rows"), (torch, "save"):
                patch.setattr(module, name, dying(getattr(module, name), half=name == "save"))
            try:
                train_crae.train(**flags, out=str(out))
                break                                           # there was no k-th touch
            except Dead:
                pass
        before = saved[-1] if saved else 0
        begun.clear()
        train_crae.train(**flags, out=str(out), resume=True)
        assert same(everything(out), whole), k
        assert (begun[0] if begun else 3) >= before, k
    assert k > 20


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_file_is_run(tmp_path, capsys):
    trap = tmp_path / "trap"
    train_crae.train(steps=2, **QUICK, out=str(tmp_path / "run"))
    evil = dict(net=Malicious(trap), method="rotation", arch="wrn-10-0.25", state=Malicious(trap))
    pickle.loads(pickle.dumps(Malicious(trap)))                 # the trap works
    trap.rmdir()
    for name in "last.pt", "model.pt":
        torch.save(evil, tmp_path / "run" / name)
    with pytest.raises(SystemExit, match="cannot be read"):
        evaluate.evaluate("test", str(tmp_path / "run"), device="cpu")
    with pytest.raises(SystemExit, match="cannot be read"):
        train_baselines.train(method="fine_tune", pretrained=str(tmp_path / "run" / "model.pt"), out=str(tmp_path / "x"), **QUICK)
    (tmp_path / "run" / "model.pt").unlink()
    with pytest.raises(SystemExit, match="no save in it can be read"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / "run"), resume=True)
    np.savez(tmp_path / "evil.npz", train_images=np.array([Malicious(trap)], object), train_labels=np.array([0]))
    with pytest.raises(SystemExit, match="cannot be read"):
        data.load(str(tmp_path / "evil.npz"), "nowhere")
    np.savez(tmp_path / "run" / "split.npz", labeled=np.array([Malicious(trap)], object))
    with pytest.raises(SystemExit, match="split.npz cannot be read"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / "run"), resume=True)
    assert not trap.exists()


# ---------------------------------------------------------------- numbers that are not finite, disks that are full


def test_a_term_that_is_not_finite_is_named_with_its_step_and_never_saved(saves_every_step, tmp_path, monkeypatch):
    real = train_crae.crae

    def diverge(model, *rest, **kwargs):
        terms = real(model, *rest, **kwargs)
        return terms | dict(rotation=terms["rotation"] * (float("inf") if kwargs["step"] >= 5 else 1.0))

    monkeypatch.setattr(train_crae, "crae", diverge)
    _, train = saves_every_step
    for minutes, last in (10.0, 4), (1e-9, 5):                  # at the next evaluation, or at the next save
        with pytest.raises(SystemExit, match="loss_rotation is not finite at step 6"):
            train(out=str(tmp_path / f"run{last}"), save_minutes=minutes)
        saved = torch.load(tmp_path / f"run{last}" / "last.pt", weights_only=True)
        assert saved["run"]["step"] == last and all(v.isfinite().all() for v in saved["net"].values())
        assert [r["step"] for r in csv.DictReader((tmp_path / f"run{last}" / "log.csv").open())] == ["4"]


def test_weights_that_are_not_finite(saves_every_step, tmp_path):
    """A gradient that is not finite in the last step before an evaluation: every loss so far is finite, the weights are not."""
    hooks, train = saves_every_step
    hooks.append(lambda step, model: model.aux.bias.register_hook(lambda grad: grad * float("nan")) if step == 7 else None)
    with pytest.raises(SystemExit, match="a weight is not finite at step 8"):
        train(out=str(tmp_path / "run"), save_minutes=10.0)
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 4


class Waits(TorchDispatchMode):
    """Counts how often a number of a tensor is asked for, which on a GPU waits for it."""
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("flags", [dict(), dict(plus=True), dict(select="random"), dict(accumulate=2)])
def test_no_wait_for_the_device_inside_a_step(tmp_path, flags):
    """Numbers leave the device at evaluations and saves alone: more steps ask for no more of them."""
    counts = []
    for steps in 2, 6:
        with Waits() as waits:
            train_crae.train(**flags, steps=steps, **QUICK, out=str(tmp_path / str(steps)))
        counts.append(waits.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("limit", [40_000, 90_000])
def test_a_full_disk_is_one_line_and_leaves_whole_files(tmp_path, limit):
    """A limit on the size of files stands in for the full disk: last.pt does not fit."""
    command = [sys.executable, HERE / "train_crae.py", "--steps=40", "--batch=4", "--arch=wrn-10-1", "--device=cpu", f"--out={tmp_path / 'run'}"]
    full = subprocess.run(command, capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    lines = [line for line in full.stderr.splitlines() if "step/s" not in line and line.strip()]
    assert full.returncode == 1 and "cannot be written (File too large)" in lines[-1] and "Traceback" not in full.stderr, full.stderr
    assert not list((tmp_path / "run").glob("*.tmp*"))
    json.loads((tmp_path / "run" / "config.json").read_text())
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_that_cannot_be_written_are_one_line(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "write_rows", full)
    with pytest.raises(SystemExit, match="log.csv cannot be written \\(No space left on device\\)"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / "run"))


def test_a_folder_that_cannot_be_written_or_has_too_long_a_name(tmp_path, monkeypatch):
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *rest, **kwargs: real(path, *rest, **kwargs) if path.name != ".lock" else full())

    def full():
        raise OSError(30, "Read-only file system")

    with pytest.raises(SystemExit, match="cannot be written \\(Read-only file system\\)"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / "run"))
    with pytest.raises(SystemExit, match="cannot be written \\(File name too long\\)"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / ("x" * 300)))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="--out .*file/run: cannot be written"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / "file" / "run"))


# ---------------------------------------------------------------- pictures


@pytest.fixture
def pictures(tmp_path):
    root = tmp_path / "my pictures"
    dice = np.random.default_rng(0)
    for part in "train", "test":
        for name in "a cat", "ünï":
            (root / part / name).mkdir(parents=True)
            for i in range(6):
                Image.fromarray(dice.integers(0, 256, (20, 24, 3), np.uint8)).save(root / part / name / f"{i}.png")
    return root


def test_broken_pictures_stop_before_training_or_are_left_out(pictures, tmp_path, capsys, monkeypatch):
    good = (pictures / "train" / "a cat" / "0.png").read_bytes()
    bad = pictures / "train" / "a cat"
    (bad / "empty.png").touch()
    (bad / "cut.png").write_bytes(good[:len(good) // 2])
    (bad / "text.jpg").write_text("not a picture")
    (pictures / "test" / "ünï" / "also.jpg").write_bytes(b"\xff\xd8\xff")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)        # stands in for PIL's 89 million
    Image.new("1", (100, 100)).save(bad / "bomb.png")
    (bad / "wrong.jpg").write_bytes(good)                       # a PNG by another name is read
    frames = [Image.new("RGB", (10, 10), c) for c in ("red", "blue")]
    frames[0].save(bad / "moving.webp", save_all=True, append_images=frames[1:])
    Image.new("RGB", (1, 1)).save(bad / "dot.png")
    with pytest.raises(SystemExit, match="5 images cannot be read.*--skip_broken") as stop:
        train_crae.train(dataset=str(pictures), labels=4, image_size=16, steps=2, **QUICK, out=str(tmp_path / "run"))
    errors = capsys.readouterr().err
    assert "\n" not in str(stop.value) and not (tmp_path / "run").exists()
    for name in "empty.png", "cut.png", "text.jpg", "also.jpg", "bomb.png":
        assert name in errors
    train_crae.train(dataset=str(pictures), labels=4, image_size=16, steps=2, **QUICK, skip_broken=True, out=str(tmp_path / "run"))
    assert "going on without 5 images" in capsys.readouterr().out
    images, labels, parts, classes = data.load(str(pictures), "nowhere", 16, skip_broken=True)
    assert len(parts["train"]) == 15 and len(parts["test"]) == 12 and len(images) == len(labels) == 27
    assert classes == ["a cat", "ünï"] and labels[:9].tolist() == [0] * 9 and labels[9:15].tolist() == [1] * 6
    assert evaluate.evaluate("test", str(tmp_path / "run"), device="cpu")["images"] == 12


def test_pictures_left_out_leave_the_others_what_they_were(pictures):
    before, *_ = data.load(str(pictures), "nowhere", 16)
    (pictures / "train" / "a cat" / "2.png").write_bytes(b"")
    after, *_ = data.load(str(pictures), "nowhere", 16, skip_broken=True)
    assert torch.equal(after, torch.cat([before[:2], before[3:]]))


def test_a_decompression_bomb_is_refused(tmp_path):
    file = tmp_path / "bomb.png"
    Image.new("1", (20_000, 20_000)).save(file)
    with pytest.raises(Image.DecompressionBombError):
        data.decode(file, 32)


def test_pictures_that_are_no_pictures_for_us(tmp_path):
    Image.new("RGB", (1, 60_000)).save(tmp_path / "thin.png")   # scaled to 224 pixels it would have 13 million rows
    with pytest.raises(ValueError, match="1 x 60000 pixels are too long and thin"):
        data.decode(tmp_path / "thin.png", 224)
    assert data.decode(tmp_path / "thin.png", 8).shape == (8, 8, 3)
    for part in "train", "test":
        for name in "ab":
            (tmp_path / "folder" / part / name).mkdir(parents=True)
            (tmp_path / "folder" / part / name / "x.png").write_bytes((tmp_path / "thin.png").read_bytes())
    with pytest.raises(SystemExit, match="4 images cannot be read"):            # before training, also where they stay on disk
        data.load(str(tmp_path / "folder"), "nowhere", 224, stream=True)
    grey = np.full((8, 8), 0.5, np.float32)
    grey[3, 3] = np.nan
    Image.fromarray(grey).save(tmp_path / "nan.tif")
    with pytest.raises(ValueError, match="not numbers"):
        data.decode(tmp_path / "nan.tif", 8)
    Image.fromarray(np.full((8, 8), 10 ** 6, np.int32)).save(tmp_path / "deep.tif")
    assert (data.decode(tmp_path / "deep.tif", 8) == 255).all()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    palette.save(tmp_path / "palette.png")
    assert data.decode(tmp_path / "palette.png", 8)[0, 0].tolist() == [200, 100, 50]            # the colour, not its number


def test_gifs_and_linked_folders_of_unlabelled_pictures_are_read(pictures):
    Image.new("RGB", (10, 10), "red").save(pictures / "train" / "a cat" / "moving.gif", save_all=True, append_images=[Image.new("RGB", (10, 10))])
    (pictures / "unlabeled").mkdir()
    (pictures.parent / "elsewhere").mkdir()
    for i in range(3):
        Image.new("RGB", (10, 10)).save(pictures.parent / "elsewhere" / f"{i}.png")
    os.symlink(pictures.parent / "elsewhere", pictures / "unlabeled" / "more")
    images, _, parts, _ = data.load(str(pictures), "nowhere", 16)
    assert len(parts["train"]) == 13 and len(parts["unlabeled"]) == 3 and (images[6, 0] > 200).all()            # its first frame


def test_links_in_predict(pictures, tmp_path):
    train_crae.train(dataset=str(pictures), labels=4, image_size=16, steps=1, **QUICK, out=str(tmp_path / "run"))
    (tmp_path / "outside").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "outside" / "x.png")
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "deep" / "good.png")
    os.symlink(tmp_path / "outside" / "x.png", folder / "out.png")
    os.symlink(tmp_path / "outside", folder / "away")
    os.symlink(folder / "deep", folder / "inside")              # what it leads to is predicted in its own place
    os.symlink(folder / "loop.png", folder / "loop.png")
    with pytest.raises(SystemExit) as stop:
        evaluate.evaluate("predict", str(tmp_path / "run"), str(folder), out=str(tmp_path / "p.csv"), device="cpu")
    rows = {Path(r["file"]).name: r for r in csv.DictReader((tmp_path / "p.csv").open())}
    assert stop.value.code == 1 and rows.keys() == {"good.png", "out.png", "away", "loop.png"}
    assert rows["good.png"]["class"] and all(rows[name]["error"] == "a link that leaves the folder" for name in ("out.png", "away"))
    assert rows["loop.png"]["error"]


def test_links_to_classes_work(pictures):
    before, *_ = data.load(str(pictures), "nowhere", 16)
    for part in "train", "test":
        (pictures / part / "a cat").rename(pictures.parent / f"cats {part}")
        os.symlink(pictures.parent / f"cats {part}", pictures / part / "a cat")
    after, _, _, classes = data.load(str(pictures), "nowhere", 16)
    assert torch.equal(before, after) and classes == ["a cat", "ünï"]


# ---------------------------------------------------------------- the command line under fire

GOOD = dict(dataset="digits", labels=["50", "100"], steps=["1", "7"], batch=["1", "8"], lr=["0.1", "1e-3"], weight_decay=["0", "0.1"], seed=["0", "7"],
            eta=["0.5", "2"], eta2=["1"], temperature=["0.5", "1"], image_size=["8", "16"], rot_dim=["1", "16"], heads=["0", "10"], weight=["0", "3.5"],
            save_minutes=["0.5"], out=["new", "new/er"], select=["marginal", "detach", "random"], arch=["wrn-10-1", "wrn-16-0.5"])
NUMBERS = st.sampled_from(["0", "1", "99999999999", "1%", "200%", "%", "3", "10", "50", "100", "-1", "1e3", "1e-3", "0.5", "nan", "inf", "1e999", "many", "", "9" * 30, "0x10", "５", "5\n", "x\ny", "\r"])
BOOLS = st.sampled_from(["true", "false", "True", "FALSE", "maybe", "1", ""])
WORDS = st.sampled_from(["", "x", "x\ny", "\u2028", "a b", "ö", "--", "-", "../x", "x\0y", "runs/x", "$(x)", "[1]", "{'a': 1}", "None", "x" * 300, "--steps"])


def values(hint):
    text = str(hint)
    kind = BOOLS if "bool" in text else NUMBERS if "int" in text or "float" in text else WORDS
    choices = st.sampled_from([*getattr(hint, "__args__", ()), "x"]) if "Literal" in text else None
    return kind | st.text(max_size=5) if choices is None else choices


def command_lines(train, **fixed):
    """Lists of words: known flags with likely and unlikely values in all ways of writing, unknown flags, stray words."""
    hints = {k: v for k, v in train.__annotations__.items() if k not in ("return", "device", "data_dir")}
    good = st.sampled_from(sorted(hints.keys() & GOOD.keys())).flatmap(
        lambda name: st.sampled_from(GOOD[name] if isinstance(GOOD[name], list) else [GOOD[name]]).map(lambda value: [f"--{name}={value}"]))
    any_value = st.sampled_from(sorted(hints)).flatmap(lambda name: (fixed[name] if name in fixed else values(hints[name])).flatmap(
        lambda value: st.sampled_from([[f"--{name}={value}"], [f"--{name}", str(value)], [f"--{name}"], [f"--no{name}"], [f"-{name}", str(value)]])))
    stray = st.sampled_from([["word"], ["--unknown", "3"], ["--lable=3"], ["--"], ["-"], ["--steps"]])
    sane, wild = st.lists(good, max_size=6), st.lists(st.one_of(any_value, any_value, any_value, good, stray), max_size=6)
    one_wild = st.tuples(st.lists(good, max_size=3), any_value).map(lambda pair: [*pair[0], pair[1]])          # nothing else is wrong
    return st.one_of(sane, wild, one_wild, one_wild).map(lambda parts: sum(parts, []))


SMALL_NETS = st.sampled_from(["wrn-10-99999999", "wrn-100000-1", "wrn-10-1", "wrn-10-0.25", "wrn-16-0.5", "wrn-11-1", "wrn-10-0", "vgg", "wrn-10--1", "WRN-10-1", ""])
DATASETS = st.sampled_from(["digits", "digits", "digits", "nothing", "", ".", "x.npz", "/dev/null", "x" * 300, "x/" * 2500, "imagenet"])
METHODS = st.sampled_from([*train_baselines.OBJECTIVES, *train_baselines.OBJECTIVES, "crae", "", "FixMatch"])
TRIED = settings(max_examples=500, deadline=None, database=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def under_fire(train, words, monkeypatch, folder, counted):
    """Either a configuration whose training could begin, or one line; and no folder left behind."""
    begun = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(training, "fit", lambda net, objective, images, labels, split, classes, config, *rest, **loop: begun.append(config) or {})
    monkeypatch.setattr(train_baselines, "stage_one", lambda net, *rest: net.backbone.state_dict())
    try:
        training.command_line(train, words)
    except SystemExit as stop:
        assert isinstance(stop.code, str) and len(stop.code.splitlines()) == 1, (words, stop.code)
        assert not begun, words
    else:
        assert begun or {"--help", "-h"} & set(words), words
        for config in begun:
            assert config["steps"] > 0 and config["batch"] > 0 and config["lr"] > 0 and Path(config["out"]).name
            json.dumps(config)
    assert not list(folder.iterdir()), words
    counted["resolved" if begun else "refused"] += 1


@pytest.mark.parametrize("train, fixed", [(train_crae.train, dict(arch=SMALL_NETS, dataset=DATASETS)),
                                          (train_baselines.train, dict(arch=SMALL_NETS, dataset=DATASETS, method=METHODS))])
def test_random_flags_resolve_or_are_one_line(train, fixed, monkeypatch, tmp_path):
    counted = dict(resolved=0, refused=0)
    prefix = [] if train is train_crae.train else ["--method=pi_model"]

    @TRIED
    @given(command_lines(train, **fixed), st.booleans())
    def fire_at(words, with_method):
        under_fire(train, (prefix if with_method else []) + words, monkeypatch, tmp_path, counted)

    fire_at()
    assert counted["resolved"] > 20 and counted["refused"] > 100, counted


@pytest.mark.parametrize("train", [train_crae.train, train_baselines.train])
def test_every_flag_with_every_odd_value_alone(train, monkeypatch, tmp_path):
    """What a list of random flags hides behind its first mistake."""
    odd = ["0", "-1", "1e3", "nan", "inf", "9" * 30, "99999999999", "", "x", "x" * 300, "../" * 900, "１", "1%", "101%", "0%", "-5%", "true", "None"]
    first, counted = ["--method=fine_tune"] if train is train_baselines.train else [], dict(resolved=0, refused=0)
    for name in train.__annotations__:
        if name not in ("return", "device", "data_dir", "resume"):
            for value in odd:
                under_fire(train, [*first, f"--{name}={value}"], monkeypatch, tmp_path, counted)
    assert counted["resolved"] > 10 and counted["refused"] > 200, counted


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_while_the_data_is_loaded(number, tmp_path):
    """Slurm's signal must not look like a crash, wherever it comes."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import time, data, train_crae, training\n"
            "data.load = lambda *rest, **kwargs: (print('loading', flush=True), time.sleep(60))\n"
            "training.command_line(train_crae.train, ['--out', sys.argv[2]])")
    run = subprocess.Popen([sys.executable, "-c", code, HERE, tmp_path / "run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "loading\n"
    run.send_signal(number)
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 143 and not errors and not (tmp_path / "run").exists()


DEFECTS = dict(
    none=lambda a, k: None, gone=lambda a, k: a.pop(k), short=lambda a, k: a.update({k: a[k][:-1]}), empty=lambda a, k: a.update({k: a[k][:0]}),
    float=lambda a, k: a.update({k: a[k].astype(np.float32)}), bool=lambda a, k: a.update({k: a[k].astype(bool)}),
    negative=lambda a, k: a.update({k: a[k].astype(np.int64) - 1}), narrow=lambda a, k: a.update({k: a[k][:, :-1]}),
    flat=lambda a, k: a.update({k: a[k].ravel()}), deep=lambda a, k: a.update({k: np.stack([a[k]] * 4, -1)}),
    words=lambda a, k: a.update({k: a[k].astype("U3")}), other=lambda a, k: a.update({f"x{k}": a.pop(k)}), scalar=lambda a, k: a.update({k: np.array(3)}))


@st.composite
def archives(draw):
    """Arrays as they should be, and then up to two defects."""
    size, n, classes = draw(st.sampled_from([1, 7, 8, 8, 8, 8, 9])), draw(st.integers(2, 12)), draw(st.integers(1, 3))
    arrays = {}
    for part in draw(st.sets(st.sampled_from(["test", "val", "unlabeled"]))) | {"train"}:
        arrays[f"{part}_images"] = np.zeros(draw(st.sampled_from([(n, size, size), (n, size, size, 3), (n, size, size, 1)])), np.uint8)
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


def test_random_npz_files_load_or_are_one_line(tmp_path):
    counted = dict(loaded=0, refused=0)

    @TRIED
    @given(archives(), st.none() | st.integers(1, 12), st.none() | st.sampled_from([8, 9, 16]))
    def load(arrays, n_labels, image_size):
        np.savez(tmp_path / "random.npz", **arrays)
        try:
            images, labels, parts, classes = data.load(str(tmp_path / "random.npz"), "nowhere", image_size)
            split = data.make_split(labels, parts, n_labels, 0, 0)
        except SystemExit as stop:
            assert isinstance(stop.code, str) and "\n" not in stop.code
            counted["refused"] += 1
        else:
            assert images.dtype == torch.uint8 and images.shape[1] == 3 and len(images) == len(labels)
            assert sorted(np.concatenate(list(split.values()))) == list(range(len(images)))
            assert len(split["labeled"]) and len(split["unlabeled"]) and len(split["test"]) and (labels[split["labeled"]] >= 0).all()
            counted["loaded"] += 1

    load()
    assert counted["loaded"] > 10 and counted["refused"] > 100, counted


@TRIED
@given(st.binary(max_size=300))
def test_random_bytes_are_no_npz(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "random.npz"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        data.load(str(path), "nowhere")
    assert "\n" not in str(stop.value.code)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("method", ["mean_teacher", "swa", "s4l"])
def test_evaluating_more_often_changes_nothing_in_training(method, tmp_path, monkeypatch):
    states = []
    for epoch in 2, 3, 6:
        monkeypatch.setitem(presets.digits, "epoch", epoch)
        train_baselines.train(method=method, steps=6, **QUICK, out=str(tmp_path / str(epoch)))
        saved = torch.load(tmp_path / str(epoch) / "last.pt", weights_only=True)
        states.append({k: saved[k] for k in ("net", "ema", "optimizer")})
    assert same(states[0], states[1]) and same(states[0], states[2])


def test_the_saved_command_repeats_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_crae.train(plus=True, steps=3, lr=0.01, eta=0.5, labels=20, **QUICK)
    first, = (tmp_path / "runs").iterdir()
    command = json.loads((first / "config.json").read_text())["command"]
    before = everything(first)
    (tmp_path / "runs").rename(tmp_path / "before")
    words = shlex.split(command)
    assert words[0] == "python" and Path(words[1]).resolve() == HERE / "train_crae.py"         # from where it was started
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True,
                   env=dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads())))
    assert same(everything(first), before)


def test_deterministic_asks_torch_for_it(tmp_path):
    train_crae.train(steps=2, **QUICK, deterministic=True, out=str(tmp_path / "run"))
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    train_crae.train(steps=2, **QUICK, out=str(tmp_path / "other"))
    assert not torch.are_deterministic_algorithms_enabled()
