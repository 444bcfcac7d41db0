"""Several processes and parts of a batch see what one process sees, stop together, and resume."""
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
import augmentation
import cli
import data
import devices
import distributed
import evaluate
import helpers
import train_baselines
import train_crae
from processes import ten_steps

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1")

FAST = dict(recipe="fast", arch="fast-4-8-8", precision="fp32", unlabeled=12)
IMAGES = dict(dataset="IMAGES", labels="50%", image_size=16, workers=1, lr=0.002)       # IMAGES: see `job`
JOBS = [
    dict(), dict(plus=True), dict(select="random"),
    *(dict(method=m) for m in ("s4l", "mixup", "mixmatch", "vat", "fixmatch")),
    dict(method="ict", lr=1e-4),                                # its weight is 1000
    dict(method="fine_tune", steps=4), dict(accumulate=2), dict(method="fixmatch", accumulate=2),
    dict(plus=True, unlabeled=12), dict(select="random", unlabeled=4), dict(method="mixmatch", unlabeled=4),
    dict(method="mixup", unlabeled=12), dict(unlabeled=12, accumulate=2),
    FAST, dict(FAST, plus=True), dict(FAST, rotations="one", accumulate=2), dict(FAST, method="s4l"),
    dict(FAST, method="mixmatch"), dict(FAST, method="fine_tune", steps=4), dict(FAST, mixmatch=True),
    dict(**IMAGES, stream=True), dict(**IMAGES, crop="resized", flip=True),
]
NAMES = ["-".join(map(str, job.values())) or "crae" for job in JOBS]


# ---------------------------------------------------------------- shares of a batch


def shares(world, parts=1):
    """Enter every share of a batch, one after the other."""
    for rank in range(world):
        for part in range(parts):
            with distributed.share_of_batch(rank, world, part, parts):
                yield


@pytest.mark.parametrize("world, parts", [(2, 1), (1, 4), (2, 2)])
def test_shares_are_augmented_like_the_whole_batch(world, parts):
    n = world * parts
    x = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)

    def gen():
        return helpers.generator(3)

    for change in (lambda x: augmentation.flip_and_crop(x, True, gen()),
                   lambda x: augmentation.strong_augment(x, gen()),
                   lambda x: augmentation.mixup_share(len(x), 0.75, gen(), "cpu")):
        expected = change(x)
        pieces = iter(x.split(8 // n))
        found = torch.cat([change(next(pieces)) for _ in shares(world, parts)])
        assert torch.equal(found, expected)
        outside = torch.cat([change(piece) for piece in x.split(8 // n)])
        assert not torch.equal(outside, expected)               # the test can fail


def test_each_set_of_images_is_split_separately():
    drawn = torch.arange(12)                                    # two sets of six, three processes
    found = [distributed.local_rows(drawn, sizes=[2, 2]).tolist() for _ in shares(3)]
    assert found == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert [distributed.global_size(4) for _ in shares(3, 2)] == [24] * 6 and distributed.global_size(4) == 4


def test_batches_of_all_processes_and_parts_are_the_one_batch():
    index = dict(labeled=torch.arange(10), unlabeled=torch.arange(10, 40))
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1)

    def batches(*share):
        return list(data.training_batches(images, torch.arange(40), index, 8, 3 * 8, range(2, 5), 0, *share))

    one = batches(0, 1, 1)
    assert len(one) == 3 and [len(t) for t in one[0]] == [8, 8, 24]
    shared = [batches(rank, 2, 2) for rank in range(2)]         # (rank, step and part)
    for step in range(3):
        for which in range(3):
            parts = [shared[rank][2 * step + part][which] for rank in range(2) for part in range(2)]
            assert torch.equal(torch.cat(parts), one[step][which])


# ---------------------------------------------------------------- two processes are one


def under_torchrun(folder, jobs):
    command = [*TORCHRUN, helpers.HERE / "tests" / "processes.py", folder, json.dumps(jobs)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    root, dice = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, n in ("train", 20), ("test", 3):
        for c in "ab":
            (root / part / c).mkdir(parents=True)
            for i in range(n):
                pixels = dice.integers(0, 256, (20, 24, 3), np.uint8)
                Image.fromarray(pixels).save(root / part / c / f"{i}.png")
    return str(root)


def job(k, image_folder):
    return {name: image_folder if value == "IMAGES" else value for name, value in JOBS[k].items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory, image_folder):
    """The folder of all jobs, run by two processes."""
    folder = tmp_path_factory.mktemp("two")
    done = under_torchrun(folder, [job(k, image_folder) for k in range(len(JOBS))])
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def close(a, b, rel=1e-5):
    return all(torch.allclose(a[k].double(), b[k].double(), atol=rel, rtol=rel) for k in a)


def rows_of_log(folder):
    with (folder / "log.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("k", range(len(JOBS)), ids=NAMES)
def test_two_processes_equal_one(two, image_folder, tmp_path, k):
    flags = job(k, image_folder) | dict(accumulate=1)
    losses, scores, weights = ten_steps(tmp_path / "one", **flags)
    row = rows_of_log(two / str(k))[-1]
    saved = torch.load(two / str(k) / "last.pt", weights_only=True)
    # VAT normalises a tiny gradient. On some CPUs (not on all), its rounding changes the direction by 1 %.
    vat = flags.get("method") == "vat"
    for name, value in losses.items():
        assert float(row[name]) == pytest.approx(value, abs=1e-5, rel=0.02 if vat else 1e-5), name
    averages = {f"ema.{name}": v for name, v in saved["ema"].items()}
    assert close(weights, saved["net"] | averages, 1e-3 if vat else 1e-5)
    start = ten_steps(tmp_path / "start", **flags | dict(lr=1e-12))[2]
    assert not close(weights, start)                            # ten steps are more than rounding
    for name, value in scores.items() if not vat else ():       # each process scores a part; the sum is exact
        assert row[name] == ("" if value is None else f"{value:.7g}"), name


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 2, 3], ids=["crae", "random", "s4l"])
def test_parts_whose_gradients_are_added_equal_the_whole_batch(tmp_path, k):
    losses, _, weights = ten_steps(tmp_path / "one", **JOBS[k])
    losses_in_parts, _, others = ten_steps(tmp_path / "parts", accumulate=4, **JOBS[k])
    assert losses_in_parts == pytest.approx(losses, abs=1e-5, rel=1e-5) and close(weights, others)
    _, _, others = ten_steps(tmp_path / "half" / "one", **JOBS[k] | dict(batch=4))
    assert not close(weights, others)                           # a smaller batch gives other weights


def test_parts_go_through_the_network_one_by_one(tmp_path, monkeypatch):
    sizes, real = [], train_crae.crae

    def recorded(model, x_l, *rest, **more):
        sizes.append(len(x_l))
        return real(model, x_l, *rest, **more)

    monkeypatch.setattr(train_crae, "crae", recorded)
    quick = dict(steps=2, batch=8, arch="wrn-10-0.25", device="cpu")
    train_crae.train(**quick, accumulate=4, out=str(tmp_path / "run"))
    assert sizes == [2] * 8
    message = "--batch 8: cannot be divided equally among 1 processes with --accumulate 3"
    with pytest.raises(cli.Refused, match=message):
        train_crae.train(**quick, accumulate=3, out=str(tmp_path / "other"))
    with pytest.raises(cli.Refused, match="--sync_bn: needs several GPUs"):
        train_crae.train(sync_bn=True, device="cpu", out=str(tmp_path / "other"))
    with pytest.raises(cli.Refused, match="--unlabeled 48: cannot be divided equally"):
        train_crae.configure(accumulate=32, device="cpu")
    train_crae.configure(accumulate=32, device="cpu", heads=0)  # these use no unlabelled images
    train_baselines.configure(method="labeled_only", accumulate=32, device="cpu")


@pytest.mark.slow
def test_a_run_of_one_process_continues_as_two(tmp_path):
    _, _, whole = ten_steps(tmp_path / "whole" / "0")
    ten_steps(tmp_path / "run" / "0", steps=5)
    done = under_torchrun(tmp_path / "run", [dict(resume=True, accumulate=2)])  # another number of parts, too
    assert done.returncode == 0 and "continuing after step 5 of 10" in done.stdout, done.stderr[-2000:]
    saved = torch.load(tmp_path / "run" / "0" / "last.pt", weights_only=True)
    assert close(saved["net"], {k: whole[k] for k in saved["net"]})
    assert [row["step"] for row in rows_of_log(tmp_path / "run" / "0")] == ["5", "10"]


@pytest.mark.slow
@pytest.mark.parametrize("broken, message", [("loss", "loss_(class|aux|rotation) is not finite at step 10"),
                                             ("data", "the processes of this run see different images")])
def test_an_error_in_one_process_is_reported_by_all(tmp_path, broken, message):
    done = under_torchrun(tmp_path / "run", [dict(broken=broken)])
    assert done.returncode and re.search(message, done.stderr), done.stderr[-3000:]
    assert "collective" not in done.stderr and not (tmp_path / "run" / "0" / "model.pt").exists()


# ---------------------------------------------------------------- stops


WORDS = ["--recipe=paper", "--plus", "--arch=wrn-10-0.25", "--steps=60", "--batch=8", "--device=cpu"]


def start(folder, *more, restarts=0):
    command = [*TORCHRUN, f"--max-restarts={restarts}", helpers.HERE / "train_crae.py", *WORDS,
               f"--out={folder}", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=ENVIRONMENT)


def process_of_rank(parent, rank):
    """The process ID of the child with this rank."""
    def environment(child):
        return Path(f"/proc/{child}/environ").read_bytes().split(b"\0")

    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    return next(int(child) for child in children if f"RANK={rank}".encode() in environment(child))


def wait_for_checkpoint(parent, folder):
    while not (folder / "last.pt").exists():
        assert parent.poll() is None, parent.stderr.read()
        time.sleep(0.01)


def resumed(folder):
    done = start(folder, "--resume")
    output, errors = done.communicate(timeout=300)
    assert done.returncode == 0 and "continuing after step" in output, errors
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = start(folder)
    output, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors
    assert output.count("test error") == 4, errors              # three rows and the result, once each
    return helpers.everything_in(folder)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_step_and_resume_gives_the_same_bits(undisturbed, tmp_path):
    parent = start(tmp_path / "run")
    wait_for_checkpoint(parent, tmp_path / "run")
    os.kill(process_of_rank(parent, 1), signal.SIGTERM)
    _, errors = parent.communicate(timeout=100)
    assert parent.returncode and errors.count("stopped after step") == 1, errors
    assert "to continue: torchrun --nproc_per_node=2 train_crae.py --recipe=paper --plus" in errors
    assert helpers.same(helpers.everything_in(resumed(tmp_path / "run")), undisturbed)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_without_a_hang(undisturbed, tmp_path):
    parent = start(tmp_path / "run")
    wait_for_checkpoint(parent, tmp_path / "run")
    os.kill(process_of_rank(parent, 1), signal.SIGKILL)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode and "another process of this run has ended" in errors, errors
    assert "--resume continues the run" in errors, errors
    assert helpers.same(helpers.everything_in(resumed(tmp_path / "run")), undisturbed)


@pytest.mark.slow
def test_torchrun_restarts_a_run_by_itself(undisturbed, tmp_path):
    parent = start(tmp_path / "run", restarts=1)
    wait_for_checkpoint(parent, tmp_path / "run")
    os.kill(process_of_rank(parent, 0), signal.SIGKILL)
    output, errors = parent.communicate(timeout=200)
    assert parent.returncode == 0 and "continuing after step" in output, errors
    assert helpers.same(helpers.everything_in(tmp_path / "run"), undisturbed)


def test_scripts_and_devices_that_torchrun_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in lambda: ablations.ablate("heads"), lambda: evaluate.use_model("test", "x"):
        with pytest.raises(cli.Refused, match="torchrun is for the training scripts"):
            call()
    with pytest.raises(cli.Refused, match="--device cuda:1: under torchrun each process has its own GPU"):
        devices.select("cuda:1")


@pytest.mark.slow
def test_bad_flags_of_two_processes_are_reported_without_a_traceback(tmp_path):
    command = [*TORCHRUN, helpers.HERE / "train_crae.py", *WORDS, "--batch=7", f"--out={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=100)
    assert done.returncode and "--batch 7: cannot be divided equally among 2 processes" in done.stderr
    assert "train_crae.py\", line" not in done.stderr and not (tmp_path / "run").exists()
