"""Cores and memory on Linux and on systems without its interfaces, such as macOS; the FLOPs of a step."""
import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import augmentation
import devices
import folders
import run_folder
import train_baselines
import train_crae
from helpers import BASELINES, HERE, QUICK, generator, random_images
from models import make_model


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert devices.cores() == 3


@pytest.mark.parametrize("count, expected", [(6, 6), (None, 1)])
def test_cores_without_sched_getaffinity(monkeypatch, count, expected):
    """As on macOS; None: the number of cores is unknown."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert devices.cores() == expected


@pytest.mark.parametrize("cores, processes, workers", [(8, 1, 8), (8, 3, 2), (2, 4, 1)])
def test_processes_of_a_machine_divide_its_cores_among_their_workers(monkeypatch, cores, processes, workers):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert folders.default_workers() == workers


def test_free_memory_without_proc_and_cgroups(monkeypatch):
    """As on macOS: all physical memory counts as free."""
    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    monkeypatch.setattr(devices.Path, "read_text", missing)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert devices.free_memory("cpu") == physical > 0


# ---------------------------------------------------------------- speed


class TwoLayers(nn.Module):
    """48 inputs, 5 hidden units, 3 classes: 48 * 5 and 5 * 3 products per image."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(48, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(self.first(x.flatten(1))), None, None


@pytest.mark.parametrize("mu", [0, 1, 7])
def test_flops_of_a_step_agree_with_those_counted_by_hand(mu):
    """Forward: 2 FLOPs per product. Backward: as many for the weights, and for the inputs of `second`."""
    def objective(model, x_l, y_l, x_u, **_):
        assert (len(x_l), len(y_l), len(x_u)) == (6, 6, 6 * mu)
        return {"class": model(torch.cat([x_l, x_u]).float())[0].mean()}

    counted = devices.step_flops(lambda config, num_classes: (TwoLayers(), objective, dict(unlabeled=6 * mu)),
                                 dict(batch=6), 3, image_size=4)
    assert counted == 6 * (1 + mu) * 2 * (2 * 48 * 5 + 3 * 5 * 3)


CRAE = [dict(), dict(plus=True), dict(heads=0), dict(select="random"), dict(entmin=True, ext2=True)]


@pytest.mark.parametrize("module, flags", [*((train_crae, flags) for flags in CRAE),
                                           *((train_baselines, dict(method=m)) for m in BASELINES)], ids=str)
def test_fake_tensors_cost_what_a_real_step_costs(module, flags):
    config = module.configure(**QUICK, **flags)
    net, objective, loop = module.build(config, 10)
    x, y = random_images(4 + loop["unlabeled"]), torch.arange(4)
    with FlopCounterMode(display=False) as counter:
        terms = objective(net, x[:4], y, x[4:], augment=lambda x: x, gen=generator(), step=0, ema=net)
        sum(terms.values()).backward()
    assert devices.step_flops(module.build, config, 10, 8) == counter.get_total_flops() > 1e6
    assert torch.zeros(1).sum().item() == 0                     # tensors are real again


def test_flop_rate(monkeypatch):
    """The fake clock measures 2, 5 and 3 seconds, of which the fastest counts."""
    config = train_crae.configure(**QUICK)
    net, *_ = train_crae.build(config, 10)
    with FlopCounterMode(display=False) as counter:
        sum(logits.sum() for logits in net(torch.zeros(32, 3, 8, 8))).backward()        # 8 * batch copies
    clock = iter([0, 2, 2, 7, 7, 10])
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(clock))
    assert devices.flop_rate(net, config, 8, seconds=9) == counter.get_total_flops() / 2


# ---------------------------------------------------------------- the memory of a step


@pytest.mark.slow
@pytest.mark.parametrize("plus", [False, True])
def test_a_note_before_the_first_step_if_it_does_not_fit_into_memory(tmp_path, monkeypatch, capsys, plus):
    flags = dict(plus=plus, steps=1, batch=8, arch="wrn-10-1", device="cpu")
    needs = []
    for k, accumulate in enumerate([1, 2]):
        monkeypatch.setattr(devices, "free_memory", lambda device: 1)
        train_crae.train(**flags, accumulate=accumulate, out=str(tmp_path / f"{plus}{k}"))
        output = capsys.readouterr().out
        assert output.index("note: a step needs about") < output.index("step 1/1")
        monkeypatch.setattr(devices, "free_memory", lambda device: 10 ** 12)
        train_crae.train(**flags, accumulate=accumulate, out=str(tmp_path / f"fits{plus}{k}"))
        assert "a step needs" not in capsys.readouterr().out
        net, gen = make_model("wrn-10-1", 10, 10), torch.Generator()
        config = dict(batch=8, accumulate=accumulate, optimizer="adam", precision="fp32")
        objective = partial(train_crae.crae_plus if plus else train_crae.crae, select="marginal", eta=1.0,
                            eta2=1.0, temperature=0.5, aux="upright")
        augment = partial(augmentation.flip_and_crop, flip=False, gen=gen)
        lines = []
        monkeypatch.setattr("builtins.print", lambda text, **_: lines.append(text))
        for free in 2 ** 20, 2 ** 24, 2 ** 28:
            monkeypatch.setattr(devices, "free_memory", lambda device: free)
            devices.warn_of_memory(net, objective, 32, config, unlabeled=8, augment=augment, gen=gen)
        monkeypatch.undo()
        assert len(lines) >= 2 and "--accumulate 8" in lines[0]
        x = torch.zeros(16 // accumulate, 3, 32, 32, dtype=torch.uint8)
        y = torch.zeros(8 // accumulate, dtype=torch.long)
        fixed, each = devices.kept_for_backward(net, lambda n: objective(
            net, x[:n], y[:n], x[len(y):len(y) + n], augment=lambda x: x, gen=gen))
        kept = fixed + each * len(y)
        needs.append(each * len(y))
        noted = float(re.search(r"about ([\d.]+) GiB", lines[-1])[1]) * 2 ** 30
        weights = 4 * sum(p.numel() for p in net.parameters())
        assert noted == pytest.approx(kept + 3 * weights, rel=0.1, abs=0.06 * 2 ** 30)
    assert needs[0] == pytest.approx(2 * needs[1], rel=0.05)


def test_what_is_kept_for_the_gradients_is_counted():
    layer = torch.nn.Linear(100, 10)
    kept = devices.kept_for_backward(layer, lambda n: layer(torch.zeros(50 * n, 100)).relu())
    assert kept == (0, 4 * 50 * (100 + 10))
    with torch.autocast("cpu", torch.bfloat16):      # keeps one copy of the weights, whatever the batch
        fixed, each = devices.kept_for_backward(
            layer, lambda n: layer(torch.zeros(50 * n, 100, requires_grad=True)))
    assert (fixed, each) == (2 * 100 * 10, 2 * 50 * 100)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt belongs to glibc")
@pytest.mark.parametrize("keep", [True, False])
def test_kept_memory_has_fewer_page_faults(keep):
    program = f"""
import resource, torch, devices
if {keep}: devices.keep_freed_memory()
for _ in range(20):
    torch.ones(2 ** 24)                                         # 64 MiB: 16,384 pages of 4 KiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    faults = 0
    for sign, times in (1, "range(20)"), (-1, "range(0)"):
        words = [sys.executable, "-c", program.replace("range(20)", times)]
        done = subprocess.run(words, cwd=HERE, capture_output=True, check=True)
        faults += sign * int(done.stdout)
    # glibc before 2.38 does not find every freed block again, because torch asks for aligned ones.
    assert (faults < 0.5 * 20 * 16_384) == keep


def test_training_keeps_freed_memory_once_the_images_are_loaded(tmp_path, monkeypatch):
    order, real = [], run_folder.load_data
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: order.append("keep"))
    monkeypatch.setattr(run_folder, "load_data", lambda config: order.append("load") or real(config))
    train_crae.train(**QUICK, steps=1, out=str(tmp_path / "run"))
    assert order == ["load", "keep"]
