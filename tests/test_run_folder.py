"""The run folder: result, split, resume and lock; kills and full disks lose nothing."""
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import cli
import metrics
import plots
import presets
import run_folder
import settings
import train_baselines
import train_crae
from helpers import HERE, QUICK, everything_in, run_script, same, words_of

# ---------------------------------------------------------------- the result


def result_line(folder, config, rows, capsys):
    """The line that print_result prints, without the folder, and the row that it returns."""
    row = run_folder.print_result(config | dict(out=str(folder)), rows)
    return capsys.readouterr().out.removeprefix(f"{folder}: "), row


def test_the_result_is_the_median_of_the_last_20_and_the_saved_models_error_with_its_interval(tmp_path,
                                                                                              capsys):
    rows = [dict(step=str(i), test_error=str(float(i))) for i in range(1, 31)]
    config, stage_one = dict(paper="10.76 %"), [dict(step="1", test_error="", rotation_accuracy="75")]
    (tmp_path / "config.json").write_text(json.dumps(dict(resolved=dict(images=dict(test=200)))))
    line, row = result_line(tmp_path, config, rows, capsys)
    assert row["median_test_error"] == 20.5 and row["test_error"] == 30         # of 11 .. 30
    assert row["interval"] == metrics.wilson(60, 200)           # 30 % of 200
    assert line == ("test error 20.50 % (median of the last 20 evaluations); "
                    "saved model: 30.00 % (95 % interval 24.07 to 36.68 %); the paper: 10.76 %\n")
    line, row = result_line(tmp_path, dict(paper=None, decay_at=[0.5]), rows, capsys)   # only the last counts
    assert line == "test error 30.00 % (95 % interval 24.07 to 36.68 %)\n" and row["median_test_error"] == 30
    line, row = result_line(tmp_path, config, stage_one, capsys)                # it has no classifier
    assert line == "rotation accuracy 75.00 % at the end\n"
    assert row["median_test_error"] is row["interval"] is None
    (tmp_path / "config.json").write_text("{}")                 # the number of test images is not known
    line, row = result_line(tmp_path, dict(paper=None), rows[:1], capsys)
    assert line == "test error 1.00 %\n" and row["interval"] is None


def test_the_papers_error_is_given_only_for_the_papers_setting():
    def paper(method="crae_plus", **flags):
        flags = {name: default for name, (_, default, _) in train_crae.FLAGS.items()} | flags
        return settings.resolve(flags, train_crae.FLAGS, "train_crae.py", method)["paper"]

    assert paper(dataset="cifar10", labels=250) == "10.76 %"
    assert paper(dataset="cifar10", labels=4000) == "5.98 %"
    assert paper("crae", dataset="svhn", labels=1000) == "5.76 %"
    assert paper("ict", dataset="cifar10", labels=4000) == "7.29 %, quoted from ict"
    assert paper("crae", dataset="imagenet", labels="1%") == "50.74 %"          # 100 - the top-1 accuracy
    assert paper(dataset="cifar10", labels=251) is paper(dataset="digits") is None
    assert paper(dataset="cifar10", labels=250, steps=20) is None


# ---------------------------------------------------------------- splits, and runs that exist


def test_every_method_and_length_of_run_shares_one_split_per_seed(tmp_path):
    splits = []
    for i, flags in enumerate([dict(), dict(plus=True), dict(select="random", steps=2),
                               dict(heads=0, arch="wrn-16-0.25")]):
        train_crae.train(**QUICK | dict(steps=1, batch=2) | flags, out=str(tmp_path / str(i)))
        with np.load(tmp_path / str(i) / "split.npz") as file:
            splits.append({k: file[k].tolist() for k in file.files})
    assert all(split == splits[0] for split in splits)
    assert sorted(sum(splits[0].values(), [])) == list(range(1797))     # disjoint, and no image is missing


def test_resume_uses_the_saved_split_and_refuses_other_flags(tmp_path):
    flags = QUICK | dict(steps=2, batch=2, out=str(tmp_path / "run"))
    train_crae.train(**flags)
    with pytest.raises(cli.Refused, match="already exists"):
        train_crae.train(**flags)
    for other in dict(batch=3), dict(lr=0.1), dict(plus=True), dict(seed=1), dict(steps=1):
        with pytest.raises(cli.Refused, match=f"--({'|'.join([*other, 'method'])}) .* has "):
            train_crae.train(**flags | other, resume=True)
    saved = dict(np.load(tmp_path / "run" / "split.npz"))
    saved["labeled"], saved["unlabeled"][:100] = saved["unlabeled"][:100].copy(), saved["labeled"]
    np.savez(tmp_path / "run" / "split.npz", **saved)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert np.array_equal(run_folder.load_data(config)[2]["labeled"], saved["labeled"])
    row = train_crae.train(**flags | dict(steps=3), resume=True)        # more steps are allowed
    assert row["step"] == 3


def test_a_run_from_before_a_flag_existed_can_be_resumed(tmp_path):
    flags = QUICK | dict(steps=2, batch=2, out=str(tmp_path / "run"))
    train_crae.train(**flags)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    for name in "entmin", "paper", "changed":
        config.pop(name)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert train_crae.train(**flags, resume=True)["step"] == 2


@pytest.mark.parametrize("flags", [dict(mixmatch=True), dict(plus=True, ext1_ramp=[0.3, 0.7])])
def test_a_run_whose_ramp_depends_on_its_length_cannot_be_made_longer(tmp_path, flags):
    flags = QUICK | flags | dict(steps=2, out=str(tmp_path / "run"))
    train_crae.train(**flags)
    with pytest.raises(cli.Refused, match="--steps 3: the run in .* has 2"):
        train_crae.train(**flags | dict(steps=3), resume=True)


def test_a_run_whose_learning_rate_decays_cannot_be_made_longer(tmp_path, monkeypatch):
    monkeypatch.setitem(presets.digits, "decay_at", [0.5])
    flags = QUICK | dict(batch=2, out=str(tmp_path / "run"))
    assert train_crae.train(**flags, steps=2)["lr"] == pytest.approx(0.0002)
    with pytest.raises(cli.Refused, match="--steps 3: the run in .* has 2"):
        train_crae.train(**flags, steps=3, resume=True)


def test_a_run_that_is_made_longer_is_finished_only_with_its_new_model(tmp_path, monkeypatch):
    flags = QUICK | dict(batch=2, out=str(tmp_path / "run$x^"))
    train_crae.train(**flags, steps=2)
    old = (tmp_path / "run$x^" / "model.pt").read_bytes()

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plots, "plot_curve", die)                 # killed between the last row and the model
        with pytest.raises(KeyboardInterrupt):
            train_crae.train(**flags, steps=4, resume=True)
    train_crae.train(**flags, steps=4, resume=True)
    assert (tmp_path / "run$x^" / "model.pt").read_bytes() != old


def test_other_images_are_refused_even_if_their_number_is_the_same(tmp_path):
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8), np.arange(40) % 2

    def train(images, labels, steps, test=images[:6], test_labels=labels[:6]):
        np.savez(tmp_path / "x.npz", train_images=images, train_labels=labels, test_images=test,
                 test_labels=test_labels)
        return train_crae.train(dataset=str(tmp_path / "x.npz"), labels=4, steps=steps, **QUICK, resume=True,
                                out=str(tmp_path / "run"))

    train(images, labels, 2)
    for changed in [(images[::-1], labels), (images, labels[::-1]),
                    (images[:39], labels[:39], 3, images[:7], labels[:7])]:
        with pytest.raises(cli.Refused, match="its images, their labels or their order differ from those"):
            train(*changed[:2], 3, *changed[3:])
    assert train(images, labels, 3)["step"] == 3


@pytest.mark.slow
def test_the_saved_command_repeats_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_crae.train(plus=True, steps=3, lr=0.01, eta=0.5, labels=20, **QUICK)
    first, = (tmp_path / "runs").iterdir()
    command = json.loads((first / "config.json").read_text())["command"]
    before = everything_in(first)
    (tmp_path / "runs").rename(tmp_path / "before")
    words = shlex.split(command)
    assert words[0] == "python"
    assert Path(words[1]).resolve() == HERE / "train_crae.py"           # relative to where it was started
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True,
                   env=dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads())))
    assert same(everything_in(first), before)


# ---------------------------------------------------------------- stop and resume


FLAGS = ["--recipe=paper", "--plus", "--arch=wrn-10-0.25", "--steps=60", "--batch=8", "--device=cpu"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_script("train_crae.py", *FLAGS, f"--out={folder}", check=True)
    return everything_in(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_continues_to_the_same_bits(undisturbed, tmp_path, number, code):
    folder = tmp_path / "run"
    command = [sys.executable, HERE / "train_crae.py", *FLAGS, f"--out={folder}", "--resume"]
    stops = 0
    for row in 1, 2:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        log = folder / "log.csv"
        while not log.exists() or len(log.read_text().splitlines()) <= row:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate()
        assert process.returncode == code, errors
        stops += 1
        if code > 0:
            assert "to continue: python train_crae.py --recipe=paper --plus --arch=wrn-10-0.25 --st" in errors
            assert "--resume" in errors
    assert stops == 2
    subprocess.run(command, check=True, capture_output=True)
    assert same(everything_in(folder), undisturbed)


@pytest.mark.slow
def test_half_a_row_and_rows_past_the_checkpoint_are_dropped(undisturbed, tmp_path):
    folder = tmp_path / "run"
    run_script("train_crae.py", *FLAGS, f"--out={folder}", check=True)
    before = everything_in(folder)
    with (folder / "log.csv").open("a") as file:
        last = (folder / "log.csv").read_text().splitlines()[-1]
        file.write(last.replace("60,", "61,", 1) + "\n6")
    (folder / "model.pt").unlink()                              # killed just before the end
    run_script("train_crae.py", *FLAGS, f"--out={folder}", "--resume", check=True)
    assert same(everything_in(folder), before) and same(before, undisturbed)


@pytest.mark.slow
def test_the_comparison_of_runs_sees_a_difference(undisturbed, tmp_path):
    folder = tmp_path / "run"
    run_script("train_crae.py", *FLAGS, "--seed=1", f"--out={folder}", check=True)
    other = everything_in(folder)
    assert other.keys() == undisturbed.keys()
    assert not any(same(other[k], undisturbed[k]) for k in other if k != "curve.png")


@pytest.mark.slow
@pytest.mark.parametrize("kills, methods", [(9, "CRAE+,MixMatch,fine-tune"), (5, "fast")])
def test_kills_at_random_moments(kills, methods):
    """The short form of `python tests/chaos.py --kills 100`, in a process of its own because it forks."""
    done = run_script("tests/chaos.py", "--kills", kills, "--seed", "1", "--methods", methods)
    assert done.returncode == 0 and f"{kills} kills survived" in done.stdout, done.stdout + done.stderr


def boom(at):
    """A hook that fails before step `at`."""
    def hook(step, model):
        if step == at:
            raise RuntimeError
    return hook


def test_timed_checkpoints_keep_what_was_done(hooked, tmp_path):
    hooks, train = hooked
    train(out=str(tmp_path / "whole"))
    hooks.append(boom(7))
    with pytest.raises(RuntimeError):
        train(out=str(tmp_path / "run"))
    for name, step in ("last.pt", 7), ("previous.pt", 6):
        assert torch.load(tmp_path / "run" / name, weights_only=True)["run"]["step"] == step
    hooks.clear()
    seen = []
    hooks.append(lambda step, model: seen.append(step))
    train(out=str(tmp_path / "run"), resume=True, save_minutes=5.0)     # this flag may change
    assert seen == [7, 8, 9] and same(everything_in(tmp_path / "run"), everything_in(tmp_path / "whole"))
    with pytest.raises(cli.Refused, match="--save_minutes 0"):
        train(out=str(tmp_path / "other"), save_minutes=0.0)


class Dead(BaseException):
    """Stands in for SIGKILL: no handler of the run sees it."""


@pytest.mark.slow
def test_death_at_every_write_to_disk(tmp_path, monkeypatch):
    """A short run dies once at each sync, rename, row and checkpoint that it writes.

    --resume must then end with the same files, and must not lose a complete checkpoint.
    """
    monkeypatch.setitem(presets.digits, "epoch", 2)
    flags = dict(steps=3, save_minutes=1e-9, **QUICK)
    train_crae.train(**flags, out=str(tmp_path / "whole"))
    whole, calls, saved, begun = everything_in(tmp_path / "whole"), dict(n=0, at=0), [], []

    def dying(real, half=False):
        def call(*args, **kwargs):
            calls["n"] += 1
            if calls["n"] == calls["at"]:
                if half:
                    args[1].write(b"half")
                raise Dead
            return real(*args, **kwargs)
        return call

    real_save, real_crae = run_folder.save_checkpoint, train_crae.crae

    def save(folder, checkpoint):
        real_save(folder, checkpoint)
        saved.append(checkpoint["run"]["step"])

    def crae(*rest, **kwargs):
        begun.append(kwargs["step"])
        return real_crae(*rest, **kwargs)

    monkeypatch.setattr(run_folder, "save_checkpoint", save)
    monkeypatch.setattr(train_crae, "crae", crae)
    writes = (run_folder, "sync"), (os, "replace"), (run_folder, "write_rows"), (torch, "save")
    for k in range(1, 200):
        calls.update(n=0, at=k)
        saved.clear()
        out = tmp_path / f"run{k}"
        with monkeypatch.context() as patch:
            for module, name in writes:
                patch.setattr(module, name, dying(getattr(module, name), half=name == "save"))
            try:
                train_crae.train(**flags, out=str(out))
                break                                           # there was no k-th write
            except Dead:
                pass
        before = saved[-1] if saved else 0
        begun.clear()
        train_crae.train(**flags, out=str(out), resume=True)
        assert same(everything_in(out), whole), k
        assert (begun[0] if begun else 3) >= before, k
    assert k > 20


# ---------------------------------------------------------------- locks


@pytest.mark.slow
def test_two_processes_in_one_folder(hooked, tmp_path):
    hooks, train = hooked
    held = ("import sys, time; sys.path.insert(0, sys.argv[1]); import run_folder\n"
            "with run_folder.locked(sys.argv[2]): print('held', flush=True); time.sleep(600)")
    (tmp_path / "run").mkdir()
    other = subprocess.Popen([sys.executable, "-c", held, HERE, tmp_path / "run"],
                             stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(cli.Refused, match="another process is using it"):
        train(out=str(tmp_path / "run"))
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
    other.kill()                                                # a crash leaves no lock behind
    other.wait()
    assert train(out=str(tmp_path / "run"))["step"] == 10


def test_a_run_that_started_while_data_was_loaded_is_not_continued_by_another(hooked, tmp_path, monkeypatch):
    _, train = hooked
    real, first = run_folder.load_data, []

    def slow(config):
        loaded = real(config)
        if not first:
            first.append(1)
            train(out=str(tmp_path / "run"), seed=0)            # another process, while this one loads
        return loaded

    monkeypatch.setattr(run_folder, "load_data", slow)
    with pytest.raises(cli.Refused, match="--seed 1: the run in .* has 0"):
        train(out=str(tmp_path / "run"), seed=1)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 0


def test_the_first_stage_does_not_write_into_a_folder_that_is_locked(tmp_path):
    flags = dict(method="fine_tune", steps=2, **QUICK, out=str(tmp_path / "run"))
    with run_folder.hold(tmp_path / "run"):
        with pytest.raises(cli.Refused, match="another process is using it"):
            train_baselines.train(**flags)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


# ---------------------------------------------------------------- disks that are full or cannot be written


@pytest.mark.slow
@pytest.mark.parametrize("limit", [40_000, 90_000])
def test_a_full_disk_gives_a_one_line_error_and_leaves_complete_files(tmp_path, limit):
    """A file-size limit stands in for the full disk: last.pt does not fit."""
    words = words_of(**QUICK | dict(arch="wrn-10-1"), steps=40, out=tmp_path / "run")
    full = run_script("train_crae.py", *words,
                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    lines = [line for line in full.stderr.splitlines() if "step/s" not in line and line.strip()]
    assert full.returncode == 1 and "cannot be written (File too large)" in lines[-1], full.stderr
    assert "Traceback" not in full.stderr, full.stderr
    assert not list((tmp_path / "run").glob("*.tmp*"))
    json.loads((tmp_path / "run" / "config.json").read_text())
    done = run_script("train_crae.py", *words, "--resume")
    assert done.returncode == 0, done.stderr


def test_rows_that_cannot_be_written_give_a_one_line_error(tmp_path, monkeypatch):
    real = run_folder.write_rows

    def full(path, *rest):
        if path.name.startswith(file):
            raise OSError(28, "No space left on device")
        real(path, *rest)

    monkeypatch.setattr(run_folder, "write_rows", full)
    for file in "log", "split":
        with pytest.raises(cli.Refused, match=f"{file}.csv cannot be written \\(No space left on device\\)"):
            train_crae.train(steps=2, **QUICK, out=str(tmp_path / file))


def test_a_folder_that_cannot_be_written_or_has_too_long_a_name(tmp_path, monkeypatch):
    real = Path.open

    def read_only(path, *rest, **kwargs):
        if path.name == ".lock":
            raise OSError(30, "Read-only file system")
        return real(path, *rest, **kwargs)

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(cli.Refused, match="cannot be written \\(Read-only file system\\)"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / "run"))
    with pytest.raises(cli.Refused, match="cannot be written \\(File name too long\\)"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / ("x" * 300)))


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(cli.Refused, match="--out .*file/run: cannot be written"):
        train_crae.train(steps=2, **QUICK, out=str(tmp_path / "file" / "run"))
