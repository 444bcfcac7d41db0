"""Optimisers, schedules, averaged weights and the training loop; the demo, which learns real digits."""
import csv
import math
import os
import signal

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cli
import metrics
import presets
import progress
import run_folder
import train_baselines
import train_crae
import training
from helpers import QUICK, same
from models import make_model

# ---------------------------------------------------------------- optimisers, schedules, averages


def test_weight_decay_is_decoupled_scaled_by_lr_and_on_kernels_only():
    torch.manual_seed(0)
    net = make_model("wrn-10-1", 10, 10)
    for p in net.parameters():
        p.data += 0.5                                           # no bias of zero
        p.grad = torch.zeros_like(p)                            # Adam alone would not move anything
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    training.make_adam(net, lr=0.01, weight_decay=0.2).step()
    for name, p in net.named_parameters():
        kernel = name.endswith("weight") and ".bn" not in name
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.01 * 0.2 if kernel else 1), msg=name)


def test_adam_constants():
    group = training.make_adam(make_model("wrn-10-1", 2, 0), 0.002, 0.02).param_groups[0]
    assert group["betas"] == (0.9, 0.999) and group["lr"] == 0.002


def test_steps_down_is_s4ls_schedule():
    """The table's epochs: warm-up for 10 of 1000; divided by 10 at 700, 800 and 900."""
    def at(epoch):
        return training.steps_down(epoch * 53 / (1000 * 53), 10 / 1000, [0.7, 0.8, 0.9])

    expected = {0: 0, 5: 0.5, 10: 1, 699: 1, 700: 0.1, 799: 0.1, 800: 0.01, 900: 0.001, 999: 0.001}
    assert {epoch: at(epoch) for epoch in expected} == pytest.approx(expected)
    assert training.steps_down(0, 0, []) == training.steps_down(0.99, 0, []) == 1


def test_sgd_is_s4ls():
    net = make_model("wrn-10-1", 10, 10)
    before = {}
    for name, p in net.named_parameters():
        p.data += 0.5
        p.grad = torch.ones_like(p)
        before[name] = p.detach().clone()
    optimizer = training.make_sgd(net, lr=0.1, weight_decay=0.2)
    for _ in range(2):
        optimizer.step()
    for name, p in net.named_parameters():
        decay = 0.2 if name.endswith("weight") and ".bn" not in name else 0.0
        g1 = 1 + decay * before[name]               # L2: part of the gradient, and so of the momentum
        w1 = before[name] - 0.1 * g1
        torch.testing.assert_close(p.detach(), w1 - 0.1 * (0.9 * g1 + 1 + decay * w1), msg=name)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of three steps that records the weights before and after each step and every evaluated model."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return record(tmp_path_factory.mktemp("recorded") / "run", monkeypatch)


def record(out, monkeypatch):
    kept = dict(weights=[], evaluated=[])
    real_measure, real_adam = metrics.measure, training.make_adam

    def objective(net, *rest, **kwargs):
        kept["sizes"] = len(rest[0]), len(rest[1]), len(rest[2])
        kept["weights"].append([p.detach().clone() for p in net.parameters()])
        kept["net"] = net
        return train_crae.crae(net, *rest, **kwargs, select="marginal", eta=1.0, aux="upright")

    def measure(net, ema, *rest):
        kept["evaluated"].append([{k: v.clone() for k, v in m.state_dict().items()} for m in (net, ema)])
        return real_measure(net, ema, *rest)

    def make_adam(net, lr, weight_decay, beta2):
        kept["optimizer"] = lr, weight_decay, beta2
        return real_adam(net, lr, weight_decay, beta2)

    monkeypatch.setattr(training, "make_adam", make_adam)
    monkeypatch.setattr(metrics, "measure", measure)
    monkeypatch.setitem(presets.digits, "ema", 0.6)
    config = train_crae.configure(recipe="paper", steps=3, batch=4, lr=0.003, weight_decay=0.05, out=str(out),
                                  device="cpu")
    images, labels, split, classes = loaded = run_folder.load_data(config)
    torch.manual_seed(0)
    net = make_model(config["arch"], 10, 10, bn_momentum=0.1)
    row = training.fit(net, objective, loaded, config, unlabeled=4)
    kept["weights"].append([p.detach().clone() for p in kept["net"].parameters()])
    return kept | dict(row=row, out=out, images=images, labels=labels, split=split)


def test_ema_averages_weights_by_hand_and_copies_bn_statistics(recorded):
    (live, averaged), = recorded["evaluated"]
    by_hand = recorded["weights"][0]
    for weights in recorded["weights"][1:]:
        by_hand = [0.6 * a + 0.4 * w for a, w in zip(by_hand, weights)]
    names = [name for name, _ in recorded["net"].named_parameters()]
    for name, expected in zip(names, by_hand):
        torch.testing.assert_close(averaged[name], expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(live["backbone.conv.weight"], averaged["backbone.conv.weight"])
    for name in set(live) - set(names):                         # buffers
        assert torch.equal(live[name], averaged[name]), name
    assert averaged["backbone.bn.num_batches_tracked"] == 3
    assert averaged["backbone.bn.running_mean"].abs().max() > 0


def test_the_loop_uses_the_values_of_the_run(recorded):
    assert recorded["optimizer"] == (0.003, 0.05, 0.999) and recorded["sizes"] == (4, 4, 4)
    row = recorded["row"]
    assert row["lr"] == 0.003 and row["step"] == 3 and len(recorded["weights"]) == 4
    # Labelled and unlabelled images are each counted once.
    assert row["images_per_second"] == pytest.approx(3 * (4 + 4) / row["seconds"], rel=1e-4)


def test_model_pt_is_the_ema_model_and_contains_how_to_use_it(recorded):
    saved = torch.load(recorded["out"] / "model.pt", weights_only=True)
    assert saved["classes"] == [str(i) for i in range(10)] and saved["image_size"] == 8
    assert saved["scaling"] == "x * 2 / 255 - 1" and saved["arch"] == presets.digits["arch"]
    assert not any("rot" in k or "aux" in k for k in saved["state"])
    net = make_model(saved["arch"], len(saved["classes"]), rot_heads=0, aux=False).eval()
    net.load_state_dict(saved["state"])
    test = recorded["split"]["test"]
    with torch.no_grad():
        predicted = net(recorded["images"][test].float() * 2 / 255 - 1)[0].argmax(1)
    wrong = (predicted != recorded["labels"][test]).sum()
    assert 100 * wrong.item() / len(test) == pytest.approx(recorded["row"]["test_error"])
    _, averaged = recorded["evaluated"][0]
    assert torch.equal(saved["state"]["classifier.weight"], averaged["aux.weight"])     # aux is tested


# ---------------------------------------------------------------- batches, logged losses


@pytest.mark.parametrize("flip", [False, True])
def test_batches_come_from_their_own_sets_and_are_flipped_only_on_request(tmp_path, monkeypatch, flip):
    """The brightness of an image is its number; its left half is white, which only a flip can move."""
    numbers = np.arange(60, dtype=np.uint8)
    images = np.broadcast_to(numbers[:, None, None, None], (60, 16, 16, 3)).copy()
    images[:, :, :8, 0] = 255
    np.savez(tmp_path / "numbered.npz", train_images=images[:50], train_labels=numbers[:50] % 5,
             test_images=images[50:], test_labels=numbers[50:] % 5)
    seen = []

    def objective(net, x_l, y_l, x_u, augment, **_):
        sides = augment(x_u)[:, 0, 8, [4, 11]]                  # left and right of the middle
        seen.append((x_l[:, 1, 0, 0], y_l, x_u[:, 1, 0, 0], sides))
        return {"a": sum(p.sum() for p in net.parameters()) * 0}

    monkeypatch.setattr(train_crae, "crae", objective)
    train_crae.train(dataset=str(tmp_path / "numbered.npz"), labels=10, flip=flip, steps=20, **QUICK,
                     out=str(tmp_path / "run"))
    x_l, y_l, x_u, sides = (torch.cat(column) for column in zip(*seen))
    split = np.load(tmp_path / "run" / "split.npz")
    assert set(x_l.tolist()) == set(split["labeled"]) and torch.equal(y_l, x_l.long() % 5)
    assert set(x_u.tolist()) == set(split["unlabeled"]) and len(split["unlabeled"]) == 40
    flipped = (sides[:, 1] == 255) & (sides[:, 0] != 255)
    assert 0.2 < flipped.float().mean() < 0.8 if flip else not flipped.any()
    assert (flipped | (sides[:, 0] == 255)).all()


def test_logged_losses_are_means_over_the_interval(tmp_path, monkeypatch):
    seen = []

    def constant(net, *rest, **_):
        seen.append(len(seen) + 1.0)
        return {"a": sum(p.sum() for p in net.parameters()) * 0 + seen[-1], "b": torch.tensor(2.0)}

    monkeypatch.setattr(train_crae, "crae", constant)
    monkeypatch.setitem(presets.digits, "epoch", 2)
    train_crae.train(steps=5, **QUICK | dict(batch=2), out=str(tmp_path / "run"))
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").open()))
    assert [(r["step"], r["epoch"], r["loss_a"], r["loss_b"]) for r in rows] == [
        ("2", "1", "1.5", "2"), ("4", "2", "3.5", "2"), ("5", "2.5", "5", "2")]


# ---------------------------------------------------------------- values that are not finite


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path, monkeypatch):
    def diverge(net, *rest, **_):
        diverge.steps += 1
        bad = float("nan") if diverge.steps == 4 else 1.0
        return {"good": sum(p.sum() for p in net.parameters()) * 0, "bad": torch.tensor(bad)}

    diverge.steps = 0
    monkeypatch.setattr(train_crae, "crae", diverge)
    monkeypatch.setitem(presets.digits, "epoch", 2)
    with pytest.raises(cli.Refused, match="loss_bad is not finite at step 4"):
        train_crae.train(steps=6, **QUICK | dict(batch=2), out=str(tmp_path / "run"))
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 2
    assert [r["step"] for r in csv.DictReader((tmp_path / "run" / "log.csv").open())] == ["2"]


def test_a_term_that_is_not_finite_is_named_with_its_step_and_never_saved(hooked, tmp_path, monkeypatch):
    real = train_crae.crae

    def diverge(model, *rest, **kwargs):
        terms = real(model, *rest, **kwargs)
        factor = float("inf") if kwargs["step"] >= 5 else 1.0
        return terms | dict(rotation_labeled=terms["rotation_labeled"] * factor)

    monkeypatch.setattr(train_crae, "crae", diverge)
    _, train = hooked
    for minutes, last in (10.0, 4), (1e-9, 5):                  # at the next evaluation or checkpoint
        with pytest.raises(cli.Refused, match="loss_rotation_labeled is not finite at step 6"):
            train(out=str(tmp_path / f"run{last}"), save_minutes=minutes)
        saved = torch.load(tmp_path / f"run{last}" / "last.pt", weights_only=True)
        assert saved["run"]["step"] == last and all(v.isfinite().all() for v in saved["net"].values())
        rows = list(csv.DictReader((tmp_path / f"run{last}" / "log.csv").open()))
        assert [r["step"] for r in rows] == ["4"]


def test_weights_that_are_not_finite(hooked, tmp_path):
    """A gradient is not finite in the last step before an evaluation: the losses are, the weights are not."""
    hooks, train = hooked

    def spoil(step, model):
        if step == 7:
            model.aux.bias.register_hook(lambda grad: grad * float("nan"))

    hooks.append(spoil)
    with pytest.raises(cli.Refused, match="a weight is not finite at step 8"):
        train(out=str(tmp_path / "run"), save_minutes=10.0)
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 4


# ---------------------------------------------------------------- signals


def send(number, at, times=1):
    """A hook that sends a signal to this process before step `at`."""
    def hook(step, model):
        if step == at:
            for _ in range(times):
                os.kill(os.getpid(), number)
    return hook


@pytest.mark.parametrize("number, code", [(signal.SIGUSR1, 143), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_finish_the_step_save_and_print_how_to_continue(hooked, tmp_path, capsys, number, code):
    hooks, train = hooked
    hooks.append(send(number, at=5))
    with pytest.raises(SystemExit) as stop:
        cli.run(train, dict(out=str(tmp_path / "run"), save_minutes=10.0))
    assert stop.value.code == code and "to continue: python train_crae.py" in capsys.readouterr().err
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 6


def test_in_python_a_signal_raises_stopped_which_says_how_to_continue(hooked, tmp_path):
    hooks, train = hooked
    hooks.append(send(signal.SIGUSR1, at=5))
    with pytest.raises(cli.Stopped, match="to continue: python train_crae.py") as stop:
        train(out=str(tmp_path / "run"), save_minutes=10.0)
    assert stop.value.number == signal.SIGTERM and isinstance(stop.value, KeyboardInterrupt)
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 6


def test_a_second_ctrl_c_stops_at_once(hooked, tmp_path):
    hooks, train = hooked
    hooks.append(send(signal.SIGINT, at=5, times=2))
    with pytest.raises(KeyboardInterrupt) as stop:
        train(out=str(tmp_path / "run"), save_minutes=10.0)
    assert not isinstance(stop.value, cli.Stopped)
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 4


# ---------------------------------------------------------------- precision, compiled networks, the device


@pytest.mark.parametrize("precision, dtype", [(None, torch.float32), ("fp32", torch.float32),
                                              ("bf16", torch.bfloat16)])
def test_precision(tmp_path, monkeypatch, precision, dtype):
    seen = []
    real = train_crae.crae

    def look(model, *rest, **kwargs):
        model.classifier.register_forward_hook(lambda m, x, y: seen.append(y.dtype))
        return real(model, *rest, **kwargs)

    monkeypatch.setattr(train_crae, "crae", look)
    row = train_crae.train(precision=precision, steps=1, **QUICK, out=str(tmp_path / "run"))
    assert seen[0] == dtype and row["loss_class"] > 0
    saved = torch.load(tmp_path / "run" / "model.pt", weights_only=True)["state"]
    assert all(v.dtype != torch.bfloat16 for v in saved.values())


@pytest.mark.slow
def test_a_compiled_network_trains_and_is_saved_like_an_uncompiled_one(tmp_path):
    flags = dict(plus=True, steps=3, **QUICK)
    rows = [train_crae.train(**flags, compile=c, out=str(tmp_path / str(c))) for c in (False, True)]
    for name in "loss_class", "loss_rotation_labeled", "loss_rotation_unlabeled", "loss_ext1":
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3)
    saved = [torch.load(tmp_path / str(c) / "last.pt", weights_only=True)["net"] for c in (False, True)]
    assert saved[0].keys() == saved[1].keys()
    assert train_crae.train(**flags | dict(steps=4), resume=True, out=str(tmp_path / "True"))["step"] == 4


class Waits(TorchDispatchMode):
    """Counts how often the value of a tensor is requested, which means waiting for the device on a GPU."""
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **kwargs or {})


@pytest.mark.slow
@pytest.mark.parametrize("flags", [dict(), dict(plus=True), dict(select="random"), dict(accumulate=2)])
def test_no_wait_for_the_device_inside_a_step(tmp_path, monkeypatch, flags):
    """Numbers leave the device only at evaluations and checkpoints: more steps request no more of them."""
    counts, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(progress, "FIRST_READ", math.inf)       # even on a busy machine

    def counted(x):                                             # tolist of a CPU tensor is not dispatched
        waits.count += 1
        return tolist(x)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    for steps in 2, 6:
        with Waits() as waits:
            train_crae.train(**flags, steps=steps, **QUICK, out=str(tmp_path / str(steps)))
        counts.append(waits.count)
    assert counts[0] == counts[1] > 0


# ---------------------------------------------------------------- the same bits


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mean_teacher", "swa", "s4l"])
def test_evaluating_more_often_does_not_change_training(method, tmp_path, monkeypatch):
    states = []
    for epoch in 2, 3, 6:
        monkeypatch.setitem(presets.digits, "epoch", epoch)
        train_baselines.train(method=method, steps=6, **QUICK, out=str(tmp_path / str(epoch)))
        saved = torch.load(tmp_path / str(epoch) / "last.pt", weights_only=True)
        states.append({k: saved[k] for k in ("net", "ema", "optimizer")})
    assert same(states[0], states[1]) and same(states[0], states[2])


def test_deterministic_turns_on_torchs_deterministic_algorithms(tmp_path):
    train_crae.train(steps=2, **QUICK, deterministic=True, out=str(tmp_path / "run"))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    train_crae.train(steps=2, **QUICK, out=str(tmp_path / "other"))
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------- the demo


@pytest.mark.slow
def test_the_demo_learns_the_digits(tmp_path):
    """The command and budget of `make demo`: 100 labels, CRAE+. Chance is 90 %."""
    row = train_crae.train(plus=True, out=str(tmp_path / "run"), device="cpu")
    assert row["median_test_error"] < 10
    assert row["unlabeled_error"] < 10 and row["rotation_accuracy"] > 85
    assert (tmp_path / "run" / "curve.png").stat().st_size > 5000
