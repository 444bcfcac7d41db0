"""Several processes and several parts of a batch: they see what one process sees, stop together, and go on alone."""
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ablations
import data
import evaluate
import train_crae
import training
from chaos import everything, same
from processes import ten_steps

HERE = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1")

JOBS = [dict(), dict(plus=True), dict(select="random"), *(dict(method=m) for m in ("s4l", "mixup", "mixmatch", "vat", "fixmatch")),
        dict(method="ict", lr=1e-4),                            # its weight is 1000
        dict(method="fine_tune", steps=4), dict(accumulate=2), dict(method="fixmatch", accumulate=2),
        dict(dataset="PICTURES", labels="50%", image_size=16, stream=True, workers=1),
        dict(dataset="PICTURES", labels="50%", image_size=16, crop="resized", flip=True, workers=1)]
NAMES = ["-".join(map(str, job.values())) or "crae" for job in JOBS]


# ---------------------------------------------------------------- shares of a batch


def shares(world, parts=1):
    for rank in range(world):
        for part in range(parts):
            with data.share_of_batch(rank, world, part, parts):
                yield


@pytest.mark.parametrize("world, parts", [(2, 1), (1, 4), (2, 2)])
def test_shares_are_augmented_as_the_whole(world, parts):
    n = world * parts
    x = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)

    def gen():
        return torch.Generator().manual_seed(3)

    for change in (lambda x: data.augment(x, True, gen()), lambda x: data.strong_augment(x, gen()),
                   lambda x: data.mixup_share(len(x), 0.75, gen())):
        expected = change(x)
        pieces = iter(x.split(8 // n))
        found = torch.cat([change(next(pieces)) for _ in shares(world, parts)])
        assert torch.equal(found, expected)
        assert not torch.equal(torch.cat([change(piece) for piece in x.split(8 // n)]), expected)       # the test can fail


def test_sets_of_images_are_shared_out_one_by_one():
    drawn = torch.arange(12)                                    # two sets of six, three processes
    assert [data.mine(drawn, sets=2).tolist() for _ in shares(3)] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert [data.whole(4) for _ in shares(3, 2)] == [24] * 6 and data.whole(4) == 4


def test_batches_of_all_processes_and_parts_are_the_one_batch():
    index = dict(labeled=torch.arange(10), unlabeled=torch.arange(10, 40))
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1)

    def batches(rank, world, parts):
        return list(data.training_batches(images, torch.arange(40), index, 8, 3, range(2, 5), 0, rank, world, parts))

    one = batches(0, 1, 1)
    assert len(one) == 3 and [len(t) for t in one[0]] == [8, 8, 24]
    shared = [batches(rank, 2, 2) for rank in range(2)]         # (rank, step and part)
    for step in range(3):
        for which in range(3):
            parts = [shared[rank][2 * step + part][which] for rank in range(2) for part in range(2)]
            assert torch.equal(torch.cat(parts), one[step][which])


# ---------------------------------------------------------------- two processes are one


def under_torchrun(folder, jobs):
    return subprocess.run([*TORCHRUN, HERE / "tests" / "processes.py", folder, json.dumps(jobs)], capture_output=True, text=True,
                          env=ENVIRONMENT, timeout=500)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root, dice = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, n in ("train", 20), ("test", 3):
        for c in "ab":
            (root / part / c).mkdir(parents=True)
            for i in range(n):
                Image.fromarray(dice.integers(0, 256, (20, 24, 3), np.uint8)).save(root / part / c / f"{i}.png")
    return str(root)


def job(k, pictures):
    return {name: pictures if value == "PICTURES" else value for name, value in JOBS[k].items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory, pictures):
    folder = tmp_path_factory.mktemp("two")
    done = under_torchrun(folder, [job(k, pictures) for k in range(len(JOBS))])
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def close(a, b):
    return all(torch.allclose(a[k].double(), b[k].double(), atol=1e-5, rtol=1e-5) for k in a)


def last_row(folder):
    return list(csv.DictReader((folder / "log.csv").open()))[-1]


@pytest.mark.parametrize("k", range(len(JOBS)), ids=NAMES)
def test_two_processes_equal_one(two, pictures, tmp_path, k):
    flags = job(k, pictures) | dict(accumulate=1)
    losses, scores, weights = ten_steps(tmp_path / "one", **flags)
    row, saved = last_row(two / str(k)), torch.load(two / str(k) / "last.pt", weights_only=True)
    for name, value in losses.items():
        assert float(row[name]) == pytest.approx(value, abs=1e-5, rel=1e-5), name
    assert close(weights, saved["net"] | {f"ema.{name}": v for name, v in saved["ema"].items()})
    start = ten_steps(tmp_path / "start", **flags | dict(lr=1e-12))[2]
    assert not close(weights, start)                            # ten steps are more than rounding
    for name, value in scores.items():                          # sharded, and exact
        assert row[name] == ("" if value is None else f"{value:.7g}"), name


@pytest.mark.parametrize("k", [0, 2, 3], ids=["crae", "random", "s4l"])
def test_parts_whose_gradients_are_added_up_equal_the_whole_batch(tmp_path, k):
    losses, _, weights = ten_steps(tmp_path / "one", **JOBS[k])
    in_parts, _, others = ten_steps(tmp_path / "parts", accumulate=4, **JOBS[k])
    assert in_parts == pytest.approx(losses, abs=1e-5, rel=1e-5) and close(weights, others)
    (tmp_path / "half").mkdir()
    wrong, _, others = ten_steps(tmp_path / "half" / "one", **JOBS[k] | dict(batch=4))
    assert not close(weights, others)                           # a smaller batch is another thing


def test_parts_go_through_the_network_one_by_one(tmp_path, monkeypatch):
    sizes = []
    real = train_crae.crae
    monkeypatch.setattr(train_crae, "crae", lambda model, x_l, *rest, **kwargs: sizes.append(len(x_l)) or real(model, x_l, *rest, **kwargs))
    train_crae.train(steps=2, batch=8, accumulate=4, arch="wrn-10-0.25", device="cpu", out=str(tmp_path / "run"))
    assert sizes == [2] * 8
    with pytest.raises(SystemExit, match="--batch 8: cannot be shared out equally among 1 processes with --accumulate 3"):
        train_crae.train(steps=2, batch=8, accumulate=3, arch="wrn-10-0.25", device="cpu", out=str(tmp_path / "other"))
    with pytest.raises(SystemExit, match="--sync_bn: is for several GPUs"):
        train_crae.train(sync_bn=True, device="cpu", out=str(tmp_path / "other"))


def test_a_run_of_one_process_goes_on_as_two(tmp_path):
    _, _, whole = ten_steps(tmp_path / "whole" / "0")
    ten_steps(tmp_path / "run" / "0", steps=5)
    done = under_torchrun(tmp_path / "run", [dict(resume=True, accumulate=2)])  # another number of parts, too
    assert done.returncode == 0 and "continuing after step 5 of 10" in done.stdout, done.stderr[-2000:]
    saved = torch.load(tmp_path / "run" / "0" / "last.pt", weights_only=True)
    assert close(saved["net"], {k: whole[k] for k in saved["net"]})
    assert [r["step"] for r in csv.DictReader((tmp_path / "run" / "0" / "log.csv").open())] == ["5", "10"]


@pytest.mark.parametrize("broken, message", [("loss", "loss_(class|aux|rotation) is not finite at step 10"),
                                             ("data", "the processes of this run see different images")])
def test_what_is_wrong_in_one_process_is_said_by_all(tmp_path, broken, message):
    done = under_torchrun(tmp_path / "run", [dict(broken=broken)])
    assert done.returncode and re.search(message, done.stderr), done.stderr[-3000:]
    assert "collective" not in done.stderr and not (tmp_path / "run" / "0" / "model.pt").exists()


# ---------------------------------------------------------------- stops


FLAGS = ["--plus", "--arch=wrn-10-0.25", "--steps=60", "--batch=8", "--device=cpu"]


def start(folder, *more, restarts=0):
    return subprocess.Popen([*TORCHRUN, f"--max-restarts={restarts}", HERE / "train_crae.py", *FLAGS, f"--out={folder}", *more],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def process_of_rank(parent, number):
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    return next(int(c) for c in children if f"RANK={number}\0".encode() in Path(f"/proc/{c}/environ").read_bytes().replace(b"LOCAL_RANK", b""))


def wait_for_save(parent, folder):
    while not (folder / "last.pt").exists():
        assert parent.poll() is None, parent.stderr.read()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = start(folder)
    output, errors = done.communicate(timeout=300)
    assert done.returncode == 0 and output.count("test error") == 4, errors     # three rows and the result, once each
    return everything(folder)


def test_a_signal_to_one_process_stops_all_at_one_step_and_resume_gives_the_same_bits(undisturbed, tmp_path):
    parent = start(tmp_path / "run")
    wait_for_save(parent, tmp_path / "run")
    os.kill(process_of_rank(parent, 1), signal.SIGTERM)
    _, errors = parent.communicate(timeout=100)
    assert parent.returncode and errors.count("stopped after step") == 1, errors
    assert "to continue: torchrun --nproc_per_node=2 train_crae.py --plus" in errors
    assert same(everything(resumed(tmp_path / "run")), undisturbed)


def resumed(folder):
    done = start(folder, "--resume")
    output, errors = done.communicate(timeout=300)
    assert done.returncode == 0 and "continuing after step" in output, errors
    return folder


def test_a_process_that_dies_ends_the_run_without_a_hang(undisturbed, tmp_path):
    parent = start(tmp_path / "run")
    wait_for_save(parent, tmp_path / "run")
    os.kill(process_of_rank(parent, 1), signal.SIGKILL)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode and "another process of this run has ended" in errors and "--resume goes on" in errors, errors
    assert same(everything(resumed(tmp_path / "run")), undisturbed)


def test_torchrun_restarts_a_run_by_itself(undisturbed, tmp_path):
    parent = start(tmp_path / "run", restarts=1)
    wait_for_save(parent, tmp_path / "run")
    os.kill(process_of_rank(parent, 0), signal.SIGKILL)
    output, errors = parent.communicate(timeout=200)
    assert parent.returncode == 0 and "continuing after step" in output, errors
    assert same(everything(tmp_path / "run"), undisturbed)


def test_scripts_that_are_not_for_torchrun_and_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in lambda: ablations.ablate("heads"), lambda: evaluate.evaluate("test", "x"):
        with pytest.raises(SystemExit, match="torchrun is for the training scripts"):
            call()
    with pytest.raises(SystemExit, match="--device cuda:1: each process of torchrun has a GPU of its own"):
        training.check_device("cuda:1")


def test_bad_flags_of_two_processes_are_lines(tmp_path):
    done = subprocess.run([*TORCHRUN, HERE / "train_crae.py", *FLAGS, "--batch=7", f"--out={tmp_path / 'run'}"], capture_output=True, text=True,
                          env=ENVIRONMENT, timeout=100)
    assert done.returncode and "--batch 7: cannot be shared out equally among 2 processes" in done.stderr
    assert "train_crae.py\", line" not in done.stderr and not (tmp_path / "run").exists()
