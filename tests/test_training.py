"""Optimiser, averages, evaluation, run folder and resume; and the demo's own budget on real digits."""
import csv
import inspect
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import presets
import train_crae
import training
from chaos import everything, same
from losses import log_p_z
from models import classify, make_model

SCRIPT = Path(__file__).parent.parent / "train_crae.py"

# ---------------------------------------------------------------- optimiser and averages


def test_weight_decay_is_decoupled_scaled_by_lr_and_on_kernels_only():
    torch.manual_seed(0)
    net = make_model("wrn-10-1", 10, 10)
    for p in net.parameters():
        p.data += 0.5                                           # no bias of zero
        p.grad = torch.zeros_like(p)                            # Adam alone would not move anything
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    training.make_optimizer(net, lr=0.01, weight_decay=0.2).step()
    for name, p in net.named_parameters():
        kernel = name.endswith("weight") and ".bn" not in name
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.01 * 0.2 if kernel else 1), msg=name)


def test_adam_constants():
    group = training.make_optimizer(make_model("wrn-10-1", 2, 0), 0.002, 0.02).param_groups[0]
    assert group["betas"] == (0.9, 0.999) and group["lr"] == 0.002


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A run of three steps, in which every weight, before and after each step, and every evaluated model is kept."""
    kept = dict(weights=[], evaluated=[])
    real = training.evaluate

    def objective(net, *rest, **kwargs):
        kept["sizes"] = len(rest[0]), len(rest[1]), len(rest[2])
        kept["weights"].append([p.detach().clone() for p in net.parameters()])
        kept["net"] = net
        return train_crae.crae(net, *rest, **kwargs, select="marginal", eta=1.0)

    def evaluate(net, ema, *rest):
        kept["evaluated"].append([{k: v.clone() for k, v in m.state_dict().items()} for m in (net, ema)])
        return real(net, ema, *rest)

    def make_optimizer(net, lr, weight_decay):
        kept["optimizer"] = lr, weight_decay
        return real_optimizer(net, lr, weight_decay)

    real_optimizer = training.make_optimizer
    monkeypatch.setattr(training, "make_optimizer", make_optimizer)
    monkeypatch.setattr(training, "evaluate", evaluate)
    monkeypatch.setitem(presets.digits, "ema", 0.6)
    flags = {name: p.default for name, p in inspect.signature(train_crae.train).parameters.items()}
    flags |= dict(steps=3, batch=4, lr=0.003, weight_decay=0.05, out=str(tmp_path / "run"), device="cpu")
    config = training.resolve(train_crae.train, flags, "crae")
    images, labels, split, classes = training.load_run(config)
    torch.manual_seed(0)
    net = make_model(config["arch"], 10, 10, bn_momentum=0.1)
    row = training.fit(net, objective, images, labels, split, classes, config)
    kept["weights"].append([p.detach().clone() for p in kept["net"].parameters()])
    return kept | dict(row=row, out=tmp_path / "run", images=images, labels=labels, split=split)


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
    assert averaged["backbone.bn.num_batches_tracked"] == 3 and averaged["backbone.bn.running_mean"].abs().max() > 0


def test_the_loop_uses_the_values_of_the_run(recorded):
    assert recorded["optimizer"] == (0.003, 0.05) and recorded["sizes"] == (4, 4, 4)
    assert recorded["row"]["lr"] == 0.003 and recorded["row"]["step"] == 3 and len(recorded["weights"]) == 4
    row = recorded["row"]                                       # labelled and unlabelled images, each counted once
    assert row["images_per_second"] == pytest.approx(3 * (4 + 4) / row["seconds"], rel=1e-4)


def test_model_pt_is_the_ema_model_and_tells_how_to_use_it(recorded):
    saved = torch.load(recorded["out"] / "model.pt", weights_only=True)
    assert saved["classes"] == [str(i) for i in range(10)] and saved["image_size"] == 8
    assert saved["scaling"] == "x * 2 / 255 - 1" and saved["arch"] == presets.digits["arch"]
    assert not any("rot" in k or "aux" in k for k in saved["state"])
    net = make_model(saved["arch"], len(saved["classes"]), rot_heads=0, aux=False).eval()
    net.load_state_dict(saved["state"])
    test = recorded["split"]["test"]
    with torch.no_grad():
        wrong = (net(recorded["images"][test].float() * 2 / 255 - 1)[0].argmax(1) != recorded["labels"][test]).sum()
    assert 100 * wrong.item() / len(test) == pytest.approx(recorded["row"]["test_error"])
    _, averaged = recorded["evaluated"][0]
    assert torch.equal(saved["state"]["classifier.weight"], averaged["aux.weight"])      # the auxiliary one is tested


@pytest.mark.parametrize("flip", [False, True])
def test_batches_come_from_their_own_sets_and_are_flipped_only_where_asked(tmp_path, monkeypatch, flip):
    """Every image carries its own number as its brightness, and a white left half that only a flip can move."""
    numbers = np.arange(60, dtype=np.uint8)
    images = np.broadcast_to(numbers[:, None, None, None], (60, 16, 16, 3)).copy()
    images[:, :, :8, 0] = 255
    np.savez(tmp_path / "numbered.npz", train_images=images[:50], train_labels=numbers[:50] % 5,
             test_images=images[50:], test_labels=numbers[50:] % 5)
    seen = []

    def objective(net, x_l, y_l, x_u, augment, **_):
        seen.append((x_l[:, 1, 0, 0], y_l, x_u[:, 1, 0, 0], augment(x_u)[:, 0, 8, [4, 11]]))    # left and right of the middle
        return {"a": sum(p.sum() for p in net.parameters()) * 0}

    monkeypatch.setattr(train_crae, "crae", objective)
    train_crae.train(dataset=str(tmp_path / "numbered.npz"), labels=10, flip=flip, steps=20, batch=4, arch="wrn-10-0.25",
                     out=str(tmp_path / "run"), device="cpu")
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
    train_crae.train(steps=5, batch=2, arch="wrn-10-0.25", out=str(tmp_path / "run"), device="cpu")
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").open()))
    assert [(r["step"], r["epoch"], r["loss_a"], r["loss_b"]) for r in rows] == [
        ("2", "1", "1.5", "2"), ("4", "2", "3.5", "2"), ("5", "2.5", "5", "2")]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path, monkeypatch):
    def diverge(net, *rest, **_):
        diverge.steps += 1
        bad = float("nan") if diverge.steps == 4 else 1.0
        return {"good": sum(p.sum() for p in net.parameters()) * 0, "bad": torch.tensor(bad)}

    diverge.steps = 0
    monkeypatch.setattr(train_crae, "crae", diverge)
    monkeypatch.setitem(presets.digits, "epoch", 2)
    with pytest.raises(SystemExit, match="loss_bad is not finite at step 4"):
        train_crae.train(steps=6, batch=2, arch="wrn-10-0.25", out=str(tmp_path / "run"), device="cpu")
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["run"]["step"] == 2
    assert [r["step"] for r in csv.DictReader((tmp_path / "run" / "log.csv").open())] == ["2"]


# ---------------------------------------------------------------- learning rate, memory, precision


def test_steps_down_is_s4ls_schedule():
    """The table's epochs: warm-up 10 of 1000, tenths at 700, 800, 900."""
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
        g1 = 1 + decay * before[name]                           # L2: part of the gradient, and so of the momentum
        w1 = before[name] - 0.1 * g1
        torch.testing.assert_close(p.detach(), w1 - 0.1 * (0.9 * g1 + 1 + decay * w1), msg=name)


def test_a_run_whose_learning_rate_decays_cannot_be_made_longer(tmp_path, monkeypatch):
    monkeypatch.setitem(presets.digits, "decay_at", [0.5])
    flags = dict(batch=2, arch="wrn-10-0.25", out=str(tmp_path / "run"), device="cpu")
    assert train_crae.train(**flags, steps=2)["lr"] == pytest.approx(0.0002)
    with pytest.raises(SystemExit, match="--steps 3: the run in .* has 2"):
        train_crae.train(**flags, steps=3, resume=True)


@pytest.mark.parametrize("plus", [False, True])
def test_a_step_that_the_device_would_not_hold_is_said_before_it(tmp_path, monkeypatch, capsys, plus):
    flags = dict(plus=plus, steps=1, batch=8, arch="wrn-10-1", device="cpu")
    needs = []
    for k, accumulate in enumerate([1, 2]):
        monkeypatch.setattr(data, "free_memory", lambda device: 1)
        train_crae.train(**flags, accumulate=accumulate, out=str(tmp_path / f"{plus}{k}"))
        output = capsys.readouterr().out
        assert output.index("note: a step would need about") < output.index("step 1/1")
        monkeypatch.setattr(data, "free_memory", lambda device: 10 ** 12)
        train_crae.train(**flags, accumulate=accumulate, out=str(tmp_path / f"fits{plus}{k}"))
        assert "would need" not in capsys.readouterr().out
        net, gen = make_model("wrn-10-1", 10, 10), torch.Generator()
        config = dict(batch=8, accumulate=accumulate, optimizer="adam")
        objective = partial(train_crae.crae_plus if plus else train_crae.crae, select="marginal", eta=1.0, eta2=1.0, temperature=0.5)
        lines = []
        monkeypatch.setattr("builtins.print", lambda text, **_: lines.append(text))
        for free in 2 ** 20, 2 ** 24, 2 ** 28:
            monkeypatch.setattr(data, "free_memory", lambda device: free)
            training.warn_of_memory(net, objective, 32, config, nullcontext, partial(data.augment, flip=False, gen=gen), gen, 1)
        monkeypatch.undo()
        assert len(lines) >= 2 and "--accumulate 8" in lines[0]
        x, y = torch.zeros(16 // accumulate, 3, 32, 32, dtype=torch.uint8), torch.zeros(8 // accumulate, dtype=torch.long)
        fixed, each = training.kept_for_backward(net, lambda n: objective(net, x[:n], y[:n], x[len(y):len(y) + n], augment=lambda x: x, gen=gen))
        kept = fixed + each * len(y)
        needs.append(each * len(y))
        said = float(re.search(r"about ([\d.]+) GiB", lines[-1])[1]) * 2 ** 30
        assert said == pytest.approx(kept + 3 * 4 * sum(p.numel() for p in net.parameters()), rel=0.1, abs=0.06 * 2 ** 30)
    assert needs[0] == pytest.approx(2 * needs[1], rel=0.05)


def test_what_is_kept_for_the_gradients_is_counted():
    layer = torch.nn.Linear(100, 10)
    assert training.kept_for_backward(layer, lambda n: layer(torch.zeros(50 * n, 100)).relu()) == (0, 4 * 50 * (100 + 10))
    with torch.autocast("cpu", torch.bfloat16):                 # its copy of the weights is kept once, whatever the batch
        fixed, each = training.kept_for_backward(layer, lambda n: layer(torch.zeros(50 * n, 100, requires_grad=True)))
    assert (fixed, each) == (2 * 100 * 10, 2 * 50 * 100)


@pytest.mark.parametrize("precision, dtype", [(None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision(tmp_path, monkeypatch, precision, dtype):
    seen = []
    real = train_crae.crae

    def look(model, *rest, **kwargs):
        model.classifier.register_forward_hook(lambda m, x, y: seen.append(y.dtype))
        return real(model, *rest, **kwargs)

    monkeypatch.setattr(train_crae, "crae", look)
    row = train_crae.train(precision=precision, steps=1, batch=4, arch="wrn-10-0.25", device="cpu", out=str(tmp_path / "run"))
    assert seen[0] == dtype and row["loss_class"] > 0
    assert all(v.dtype != torch.bfloat16 for v in torch.load(tmp_path / "run" / "model.pt", weights_only=True)["state"].values())


def test_a_compiled_network_trains_as_the_other_and_is_saved_without_traces(tmp_path):
    flags = dict(plus=True, steps=3, batch=4, arch="wrn-10-0.25", device="cpu")
    rows = [train_crae.train(**flags, compile=c, out=str(tmp_path / str(c))) for c in (False, True)]
    for name in "loss_class", "loss_rotation", "loss_ext1":
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3)
    saved = [torch.load(tmp_path / str(c) / "last.pt", weights_only=True)["net"] for c in (False, True)]
    assert saved[0].keys() == saved[1].keys()
    assert train_crae.train(**flags | dict(steps=4), resume=True, out=str(tmp_path / "True"))["step"] == 4


# ---------------------------------------------------------------- evaluation


def test_scores_of_unlabelled_images_against_a_loop():
    torch.manual_seed(0)
    images, labels, parts, _ = data.load("digits", "nowhere")
    net = make_model("wrn-10-1", 10, 10).eval()
    index = torch.arange(100)
    scores = training.score_unlabeled(net, images, labels, index, 10, log_p_z)
    wrong, right, counts = 0, 0, np.zeros((10, 10))
    with torch.no_grad():
        for i in range(100):
            for k in range(4):
                x = torch.rot90(images[i:i + 1], k, (2, 3)).float() * 2 / 255 - 1
                class_logits, _, rot_logits = net(x)
                p_y, R = class_logits[0].softmax(0), rot_logits[0].softmax(1)
                wrong += k == 0 and p_y.argmax() != labels[i]
                right += (p_y @ R).argmax() == k
                counts[labels[i], R[:, k].argmax()] += 1
    assert scores["unlabeled_error"] == pytest.approx(100 * int(wrong) / 100)
    assert scores["rotation_accuracy"] == pytest.approx(100 * int(right) / 400)
    np.testing.assert_allclose(scores["diversity"].numpy(), counts / counts.sum(1, keepdims=True), atol=1e-6)


def test_diversity_of_heads_that_know_their_class():
    y, z = torch.arange(12) % 3, torch.arange(12) % 4
    rot_logits = torch.zeros(12, 3, 4)
    rot_logits[torch.arange(12), y, z] = 3.0                    # R_y alone recognises the angle
    assert torch.equal(training.best_head(rot_logits, z), y)
    rot_logits[0, 2] = 9.0                                      # large logits are not a large probability
    assert torch.equal(training.best_head(rot_logits, z), y)


def test_error_is_the_test_classifiers_on_upright_images():
    torch.manual_seed(0)
    images, labels, *_ = data.load("digits", "nowhere")
    net = make_model("wrn-10-1", 10, 10).eval()
    index = torch.arange(1100, 1797)
    with torch.inference_mode():
        logits = torch.cat([classify(net, data.scale(images[i:i + 1])) for i in index])
        predicted = logits.argmax(1)
        five = [labels[i].item() not in sorted(range(10), key=lambda c: -row[c])[:5] for i, row in zip(index, logits.tolist())]
        assert training.errors(net, images, labels, index)[1] == pytest.approx(100 * sum(five) / len(five))
        assert training.errors(net, images, labels, index)[0] == pytest.approx(
            100 * (predicted != labels[index]).float().mean().item())
        assert training.errors(net, images, labels, index[:0]) == (None, None)


def test_which_model_is_scored_on_which_images():
    images, labels, parts, _ = data.load("digits", "nowhere")
    nets = []
    for seed in 0, 1:
        torch.manual_seed(seed)
        nets.append(make_model("wrn-10-0.25", 10, 10).train())
    index = dict(sample=torch.arange(200), validation=torch.arange(200, 500), test=torch.arange(500, 900))
    scores, matrix = training.evaluate(*nets, images, labels, index, 10, log_p_z)
    assert nets[0].training and nets[1].training
    net, ema = (n.eval() for n in nets)
    with torch.inference_mode():
        unlabeled = training.score_unlabeled(ema, images, labels, index["sample"], 10, log_p_z)
        assert torch.equal(matrix, unlabeled.pop("diversity"))
        expected = unlabeled | dict(val_error=training.errors(ema, images, labels, index["validation"])[0],
                                    test_error=training.errors(ema, images, labels, index["test"])[0],
                                    test_error_raw=training.errors(net, images, labels, index["test"])[0],
                                    test_top5_error=None)
        assert scores == expected and scores["test_error"] != scores["test_error_raw"]
        assert unlabeled != {k: v for k, v in training.score_unlabeled(
            net, images, labels, index["sample"], 10, log_p_z).items() if k != "diversity"}


def test_the_sample_is_fixed_and_prefers_known_classes():
    labels = torch.cat([torch.arange(10).repeat(3), torch.full((50,), -1)])
    sample = training.sample_of_unlabeled(labels, torch.arange(80), seed=0)
    assert sorted(sample.tolist()) == list(range(30))
    assert torch.equal(sample, training.sample_of_unlabeled(labels, torch.arange(80), seed=0))
    assert len(training.sample_of_unlabeled(labels, torch.arange(30, 80), seed=0)) == 50
    many = training.sample_of_unlabeled(torch.zeros(20_000, dtype=torch.long), torch.arange(20_000), seed=0)
    assert len(many.unique()) == 10_000


def test_reported_error_is_the_median_of_the_last_20_beside_the_papers(capsys):
    rows = [dict(step=str(i), test_error=str(float(i))) for i in range(1, 31)]
    config = dict(out="runs/x", paper="10.76 %")
    assert training.report(config, rows)["median_test_error"] == 20.5           # of 11 .. 30
    assert capsys.readouterr().out == ("runs/x: test error 20.50 % (median of the last 20 evaluations), 30.00 % at the "
                                       "end; the paper: 10.76 %\n")
    assert training.report(config | dict(paper=None), rows)["test_error"] == 30
    assert "the paper" not in capsys.readouterr().out
    assert training.report(config, [dict(step="1", test_error="", rotation_accuracy="75")])["median_test_error"] is None
    assert capsys.readouterr().out == "runs/x: rotation accuracy 75.00 % at the end\n"      # a stage without a classifier


def test_the_papers_error_stands_beside_a_run_only_in_its_setting():
    def paper(method="crae_plus", **flags):
        flags = {k: p.default for k, p in inspect.signature(train_crae.train).parameters.items()} | flags
        return training.resolve(train_crae.train, flags, method)["paper"]

    assert paper(dataset="cifar10", labels=250) == "10.76 %" and paper(dataset="cifar10", labels=4000) == "5.98 %"
    assert paper("crae", dataset="svhn", labels=1000) == "5.76 %"
    assert paper("ict", dataset="cifar10", labels=4000) == "7.29 %, quoted from ict"
    assert paper("crae", dataset="imagenet", labels="1%") == "50.74 %"          # 100 - the top-1 accuracy
    assert paper(dataset="cifar10", labels=251) is paper(dataset="digits") is paper(dataset="cifar10", labels=250, steps=20) is None


# ---------------------------------------------------------------- splits and folders


def test_every_method_and_length_of_run_shares_one_split_of_a_seed(tmp_path):
    splits = []
    for i, flags in enumerate([dict(), dict(plus=True), dict(select="random", steps=2), dict(heads=0, arch="wrn-16-0.25")]):
        train_crae.train(**dict(steps=1, arch="wrn-10-0.25") | flags, batch=2, out=str(tmp_path / str(i)), device="cpu")
        with np.load(tmp_path / str(i) / "split.npz") as file:
            splits.append({k: file[k].tolist() for k in file.files})
    assert all(split == splits[0] for split in splits)
    assert sorted(sum(splits[0].values(), [])) == list(range(1797))             # disjoint, and every image somewhere


def test_resume_uses_the_saved_split_and_refuses_other_flags(tmp_path):
    flags = dict(steps=2, batch=2, arch="wrn-10-0.25", out=str(tmp_path / "run"), device="cpu")
    train_crae.train(**flags)
    with pytest.raises(SystemExit, match="exists already"):
        train_crae.train(**flags)
    for other in dict(batch=3), dict(lr=0.1), dict(plus=True), dict(seed=1), dict(steps=1):
        with pytest.raises(SystemExit, match=f"--({'|'.join([*other, 'method'])}) .* has "):
            train_crae.train(**flags | other, resume=True)
    saved = dict(np.load(tmp_path / "run" / "split.npz"))
    saved["labeled"], saved["unlabeled"][:100] = saved["unlabeled"][:100].copy(), saved["labeled"]
    np.savez(tmp_path / "run" / "split.npz", **saved)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert np.array_equal(training.load_run(config)[2]["labeled"], saved["labeled"])
    row = train_crae.train(**flags | dict(steps=3), resume=True)                # a run may be made longer
    assert row["step"] == 3


def test_a_run_from_before_a_flag_was_there_can_be_resumed(tmp_path):
    flags = dict(steps=2, batch=2, arch="wrn-10-0.25", out=str(tmp_path / "run"), device="cpu")
    train_crae.train(**flags)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    for name in "entmin", "paper", "changed":
        config.pop(name)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert train_crae.train(**flags, resume=True)["step"] == 2


def test_a_run_that_is_made_longer_is_finished_only_with_its_new_model(tmp_path, monkeypatch):
    flags = dict(batch=2, arch="wrn-10-0.25", out=str(tmp_path / "run$x^"), device="cpu")
    train_crae.train(**flags, steps=2)
    old = (tmp_path / "run$x^" / "model.pt").read_bytes()

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "draw_curve", die)              # killed between the last row and the model
        with pytest.raises(KeyboardInterrupt):
            train_crae.train(**flags, steps=4, resume=True)
    train_crae.train(**flags, steps=4, resume=True)
    assert (tmp_path / "run$x^" / "model.pt").read_bytes() != old


# ---------------------------------------------------------------- resume


FLAGS = ["--plus", "--arch=wrn-10-0.25", "--steps=60", "--batch=8", "--device=cpu"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run([sys.executable, SCRIPT, *FLAGS, f"--out={folder}"], check=True, capture_output=True)
    return everything(folder)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_continues_to_the_same_bits(undisturbed, tmp_path, number, code):
    folder, command = tmp_path / "run", [sys.executable, SCRIPT, *FLAGS, f"--out={tmp_path / 'run'}", "--resume"]
    stops = 0
    for row in 1, 2:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not (folder / "log.csv").exists() or len((folder / "log.csv").read_text().splitlines()) <= row:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate()
        assert process.returncode == code, errors
        stops += 1
        if code > 0:
            assert "to continue: python train_crae.py --plus --arch=wrn-10-0.25 --steps=60" in errors and "--resume" in errors
    assert stops == 2
    subprocess.run(command, check=True, capture_output=True)
    assert same(everything(folder), undisturbed)


def test_half_a_row_and_rows_past_the_checkpoint_are_dropped(undisturbed, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    subprocess.run([sys.executable, SCRIPT, *FLAGS, f"--out={folder}"], check=True, capture_output=True)
    before = everything(folder)
    with (folder / "log.csv").open("a") as file:
        file.write((folder / "log.csv").read_text().splitlines()[-1].replace("60,", "61,", 1) + "\n6")
    (folder / "model.pt").unlink()                              # killed just before the end
    subprocess.run([sys.executable, SCRIPT, *FLAGS, f"--out={folder}", "--resume"], check=True, capture_output=True)
    assert same(everything(folder), before) and same(before, undisturbed)


def test_comparison_of_runs_sees_a_difference(undisturbed, tmp_path):
    folder = tmp_path / "run"
    subprocess.run([sys.executable, SCRIPT, *FLAGS, "--seed=1", f"--out={folder}"], check=True, capture_output=True)
    other = everything(folder)
    assert other.keys() == undisturbed.keys() and not any(same(other[k], undisturbed[k]) for k in other if k != "curve.png")


# ---------------------------------------------------------------- the demo


def test_the_demo_learns_the_digits(tmp_path):
    """make demo's command and budget: 100 labels, CRAE+. Chance is 90 %."""
    row = train_crae.train(plus=True, out=str(tmp_path / "run"), device="cpu")
    assert row["median_test_error"] < 10
    assert row["unlabeled_error"] < 10 and row["rotation_accuracy"] > 85
    assert (tmp_path / "run" / "curve.png").stat().st_size > 5000
