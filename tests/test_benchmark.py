"""The benchmark compares what it says, in turn, and calculates ImageNet's cost correctly."""
import csv
import time
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import benchmark
import cli
import estimates
import helpers
import timing

TINY = SimpleNamespace(arch="wrn-10-0.25", classes=3, size=8, batch=2, repeats=1, device="cpu", quick=True,
                       busy=False)
TINY_FLAGS = dict(arch="wrn-10-0.25", classes=3, image_size=8, batch=2, repeats=1, device="cpu", quick=True)


@pytest.mark.slow
def test_the_table_has_every_row_and_a_csv_file(tmp_path):
    done = helpers.run_script("benchmark.py", *helpers.words_of(**TINY_FLAGS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    printed = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(printed) == 24
    for row, line in zip(rows, printed):
        assert row["measurement"] in line and f" {row['ratio']} " in line and float(row["ratio"]) >= 0
        assert (row["met"] in ("yes", "no")) == bool(row["target"])


@pytest.mark.slow
def test_scaling_measures_and_plots_every_axis(tmp_path):
    done = helpers.run_script("benchmark.py", "scaling", "--arch=wrn-10-0.25", "--image_size=8", "--batch=4",
                              "--repeats=1", "--device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["axis"] for row in rows} == {"labelled images per step", "classes", "image size", "width",
                                             "processes"}
    assert all(float(row["seconds"]) > 0 and float(row["mib"]) > 0 for row in rows)
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_a_pair_is_measured_in_turn_after_a_warm_up():
    calls = []
    times = timing.in_turn([lambda: calls.append("a"), lambda: calls.append("b")],
                           SimpleNamespace(repeats=3, device="cpu", busy=False))
    assert "".join(calls) == "ab" * 4 and [len(found) for found in times] == [3, 3]


def test_on_a_busy_machine_waiting_does_not_count():
    wait, = timing.in_turn([lambda: time.sleep(0.2)], SimpleNamespace(repeats=2, device="cpu", busy=True))
    assert max(wait) < 0.1


def test_a_row_compares_the_best_times_and_the_medians():
    row = benchmark.make_row("x", [0.2, 0.3, 0.9], [0.1, 0.2, 0.2], target="<= 1.9")
    assert row == dict(measurement="x", ratio="2.00", ratio_of_medians="1.50", target="<= 1.9", met="no",
                       ours="200", reference="100", unit="ms")
    row = benchmark.make_row("x", [0.2], [0.4], target=">= 5", faster=True, factor=3)
    assert (row["ratio"], row["met"]) == ("6.00", "yes")
    assert benchmark.make_row("x", [1.0], [1.0])["met"] == ""


def test_steps_are_those_of_the_training_scripts():
    for method in "crae", "crae_plus", "mixmatch":
        step, state, _ = timing.step_of(method, TINY)
        before = [w.clone() for w in state.weights]
        step(), step()
        assert not any(map(torch.equal, before, state.weights))


@pytest.mark.parametrize("method", ["crae", "crae_plus", "mixmatch", "fixmatch", "vat"])
def test_the_bare_passes_of_a_row_are_those_of_the_step(method):
    n = TINY.batch
    of_crae = dict(crae=dict(trained=[8 * n]), crae_plus=dict(trained=[8 * n, 8 * n]))
    step, state, _ = timing.step_of(method, TINY)
    of_method = (of_crae | benchmark.passes_of_baselines(n))[method]
    assert images_per_pass(step, state.net) == sorted(sum(of_method.values(), []))
    if method != "vat":                                         # torch cannot count FLOPs of autograd.grad
        bare = timing.bare_passes(state.net, TINY.size, state.autocast, **of_method)
        assert timing.flops_of(bare) == pytest.approx(timing.flops_of(step), rel=0.02)


def images_per_pass(function, net):
    """The number of images of every forward pass of the network, sorted."""
    seen = []
    hook = net.backbone.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    function()
    hook.remove()
    return sorted(seen)


@pytest.mark.parametrize("flags, message", [
    (dict(repeats=0), "--repeats 0"), (dict(out="nowhere"), "--out nowhere"),
    (dict(arch="vgg"), "--arch vgg"), (dict(parts=["growth"]), "PARTS growth"),
    (dict(parts=["scaling"], arch="resnet50v2"), "--arch resnet50v2")])
def test_bad_flags_are_refused_before_any_work(flags, message):
    with pytest.raises(cli.Refused, match=message):
        benchmark.measure_speed(**flags)


def test_pil_draws_the_same_operations():
    images = timing.pil_images(40, 16)
    assert timing.pil_rotations(images).shape == (160, 3, 16, 16)
    strong = timing.pil_strong(images)
    assert strong.shape == (40, 3, 16, 16) and strong.dtype == torch.uint8


def test_batches_from_disk_are_measured_as_well_as_those_from_memory(tmp_path):
    for c in "ab":
        (tmp_path / "train" / c).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (9, 9), (40 * i, 0, 0)).save(tmp_path / "train" / c / f"{i}.png")
    result = benchmark.measure_speed(arch="wrn-10-0.25", image_size=8, batch=2, repeats=1, device="cpu",
                                     folder=str(tmp_path))
    assert len([name for name in result if "disk" in name]) == 2 and result["batches from memory"] > 0


def test_the_calculation_for_imagenet(capsys):
    """By hand: 2048 copies of 3 x 8.18 GFLOP on one A100, at a fifth of 312 TFLOP/s.

    Eight GPUs are eight times as fast, apart from the time for sending gradients.
    """
    result = estimates.calculate_imagenet()
    seconds = 2048 * 3 * 8.182658048e9 / (0.2 * 312e12)
    assert result["A100 80 GB", 1] == pytest.approx(512 / seconds, rel=1e-3)
    sending = 2 * 7 / 8 * 4 * 27_699_120 / 300e9
    assert result["A100 80 GB", 8] == pytest.approx(512 / (seconds / 8 + sending), rel=1e-3)
    text = capsys.readouterr().out
    assert "8,196,000 parameters" in text and "100,768 parameters" in text
    assert "CALCULATED" in text and "--accumulate" in text
