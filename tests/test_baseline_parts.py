"""The parts of the methods against known values; how Mean Teacher, fast-SWA and FixMatch train."""
import copy
import csv
import math

import numpy as np
import pytest
import torch
from torch import nn

import augmentation
import data
import helpers
import presets
import train_baselines as tb
import training
from helpers import generator
from models import frozen_bn, make_model

# ---------------------------------------------------------------- mixup, VAT and MixMatch


def test_shares_are_per_image_beta_distributed_and_folded():
    gen = generator()
    for beta in 0.25, 0.75:
        share = augmentation.mixup_share(20_000, beta, gen, "cpu")
        drawn = np.random.default_rng(0).beta(beta, beta, 20_000)
        levels = np.linspace(0.05, 0.95, 10)
        folded = np.quantile(np.maximum(drawn, 1 - drawn), levels)
        np.testing.assert_allclose(np.quantile(share.numpy(), levels), folded, atol=0.015)
        assert share.min() >= 0.5 and len(share[:100].unique()) > 80            # many round to 1
    a, b = torch.rand(3, 2, 4, 4), torch.rand(3, 2, 4, 4)
    blended = augmentation.blend(torch.tensor([1.0, 0.5, 0.75]), a, b)
    torch.testing.assert_close(blended, torch.stack([a[0], (a[1] + b[1]) / 2, 0.75 * a[2] + 0.25 * b[2]]))


def trained(arch="wrn-10-1"):
    """A network after 30 steps, and 64 images that it has not seen."""
    torch.manual_seed(0)
    net = make_model(arch, 10, 0, aux=False, bn_momentum=0.1)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    images, labels, *_ = data.load("digits", "nowhere")
    for i in range(30):
        optimizer.zero_grad()
        part = slice(32 * i, 32 * i + 32)
        nn.functional.cross_entropy(net(augmentation.scale(images[part]))[0], labels[part]).backward()
        optimizer.step()
    return net, augmentation.scale(images[1000:1064])


def normalized(d, norm):
    return norm * d / d.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


def test_vats_direction_has_norm_epsilon_and_is_worse_than_a_random_one():
    net, x = trained()
    net.zero_grad()
    gen = generator()
    r = tb.worst_direction(net, x, 6.0, gen)
    torch.testing.assert_close(r.flatten(1).norm(dim=1), torch.full((64,), 6.0))
    assert all(p.grad is None for p in net.parameters()) and not r.requires_grad

    def divergence(move):
        with torch.no_grad(), frozen_bn(net):
            p, q = net(x)[0].log_softmax(1), net(x + move)[0].log_softmax(1)
            return (p.exp() * (p - q)).sum(1).mean()

    assert divergence(r) > 5 * divergence(normalized(torch.randn(x.shape, generator=gen), 6)) > 0
    torch.testing.assert_close(tb.kl(net(x)[0], net(x)[0]), torch.tensor(0.0))

    exact = copy.deepcopy(net).double()                         # a smaller step, in float64
    d = normalized(torch.randn(x.shape, generator=generator()).double(), 1e-5).requires_grad_()
    with frozen_bn(exact):
        p, q = exact(x.double())[0].detach().log_softmax(1), exact(x.double() + d)[0].log_softmax(1)
        gradient, = torch.autograd.grad((p.exp() * (p - q)).sum(), d)
    assert nn.functional.cosine_similarity(gradient.flatten(1), r.flatten(1).double()).mean() > 0.9
    with torch.autocast("cpu", torch.bfloat16):                 # as on a GPU; the search is in float32
        half = tb.worst_direction(net, x, 6.0, generator())
    torch.testing.assert_close(half, r)


@pytest.mark.parametrize("size", [1e6, 1.0, 1e-12, 1e-25, 1e-40])
def test_a_direction_has_norm_1_however_small_its_gradient_was(size):
    d = torch.randn(5, 3, 8, 8, generator=generator())
    unit = tb.unit(size * d)
    torch.testing.assert_close(unit.flatten(1).norm(dim=1), torch.ones(5))
    tolerance = 1e-3 if size == 1e-40 else 1e-6                 # float32 has few digits left at this size
    torch.testing.assert_close(unit, normalized(d, 1), atol=tolerance, rtol=tolerance)
    assert not tb.unit(0 * d).any()


def test_guess_and_mixed_batch_of_mixmatch_against_a_loop():
    B, C = 5, 4
    model, y_l = helpers.Linear(8, C, K=1, sureness=4), torch.tensor([2, 0, 3, 1, 0])
    x_l, x_u = helpers.random_images(2 * B, seed=1).split(B)
    x_l, views = augmentation.scale(x_l), [augmentation.scale(x_u), augmentation.scale(x_u.roll(1, 2))]
    q = tb.guess_labels(model, views, 0.5)
    assert not q.requires_grad
    for i in range(B):
        p = [model(v[i:i + 1])[0][0].softmax(0) for v in views]
        p_bar = [(p[0][c].item() + p[1][c].item()) / 2 for c in range(C)]
        for c in range(C):
            assert q[i, c].item() == pytest.approx(p_bar[c] ** 2 / sum(v ** 2 for v in p_bar), rel=1e-4)
    share = torch.linspace(0.5, 1.0, 3 * B)
    x, p = tb.mixed_batch(x_l, y_l, views, q, share, [B] * 3, generator(3))
    unmixed = [*x_l, *views[0], *views[1]]
    labels = [torch.eye(C)[y] for y in y_l] + 2 * list(q)
    partner = torch.randperm(3 * B, generator=generator(3)).tolist()
    assert any(j >= B for j in partner[:B]) and any(j < B for j in partner[B:])         # both kinds mix
    for i, j in enumerate(partner):
        torch.testing.assert_close(x[i], share[i] * unmixed[i] + (1 - share[i]) * unmixed[j])
        torch.testing.assert_close(p[i], share[i] * labels[i] + (1 - share[i]) * labels[j])


def test_interleaving_mixes_the_sets():
    x = torch.cat([torch.arange(8) + 100 * k for k in range(3)])
    assert [x[i].tolist() for i in tb.interleaved([8, 8, 8], "cpu")] == [
        [0, 1, 102, 103, 104, 205, 206, 207], [100, 101, 2, 3, 4, 105, 106, 107],
        [200, 201, 202, 203, 204, 5, 6, 7]]


@pytest.mark.parametrize("sizes", [[8, 8, 8], [6, 3, 3], [3, 12, 12], [2, 5, 5], [1, 1, 1]])
def test_interleaved_passes_contain_every_image_once(sizes):
    order = tb.interleaved(sizes, "cpu")
    assert torch.cat(order).sort().values.tolist() == list(range(sum(sizes)))
    if min(sizes) >= 3:                                         # each pass has images of the labelled set
        assert all((i < sizes[0]).any() and (i >= sizes[0]).any() for i in order)


# ---------------------------------------------------------------- Mean Teacher


def test_the_teacher_after_three_steps_is_the_average_by_hand(tmp_path, monkeypatch):
    weights, teachers = [], []
    real = tb.mean_teacher

    def recorded(model, *rest, ema, **more):
        weights.append([p.detach().clone() for p in model.parameters()])
        teachers.append([p.detach().clone() for p in ema.parameters()])
        assert ema.training and not any(p.requires_grad for p in ema.parameters())
        return real(model, *rest, ema=ema, **more)

    monkeypatch.setitem(tb.OBJECTIVES, "mean_teacher", recorded)
    monkeypatch.setitem(presets.digits, "ema", 0.6)
    monkeypatch.setitem(presets.digits, "epoch", 2)             # an evaluation in between
    tb.train(method="mean_teacher", steps=4, out=str(tmp_path / "run"), **helpers.QUICK)
    by_hand = weights[0]
    assert all(map(torch.equal, teachers[0], by_hand))
    for step in 1, 2, 3:
        by_hand = [0.6 * a + 0.4 * w for a, w in zip(by_hand, weights[step])]
        for a, b in zip(teachers[step], by_hand):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert not all(map(torch.equal, teachers[3], weights[3]))


# ---------------------------------------------------------------- fast-SWA


def test_fast_swa_is_the_mean_of_the_weights_it_collects():
    steps, average, collected = 480, [torch.zeros(3)], []
    for step in range(steps):
        weights = [torch.full((3,), float(step ** 2))]
        training.fast_swa(average, weights, step, steps)
        done = step + 1
        if done < 150:
            assert torch.equal(average[0], weights[0])
        elif (done - 150) % 3 == 0:
            collected.append(float(step ** 2))
        if collected:
            mean = torch.full((3,), sum(collected) / len(collected))
            torch.testing.assert_close(average[0], mean, rtol=1e-4, atol=0)
    assert len(collected) == 111


def test_cyclic_learning_rate_repeats_the_end_of_the_ramp_down():
    factors = [training.cyclic(epoch / 480) for epoch in range(480)]
    for epoch in range(180):
        assert factors[epoch] == pytest.approx(0.5 * (1 + math.cos(math.pi * epoch / 210)))
    for epoch in range(180, 480):
        assert factors[epoch] == pytest.approx(factors[150 + (epoch - 180) % 30], abs=1e-9)
    assert factors[0] == 1 and factors[180] > 3 * factors[179]


def test_recomputed_bn_statistics_are_those_of_the_batches():
    torch.manual_seed(0)
    net, ema = (make_model("wrn-10-0.25", 10, 0, aux=False, bn_momentum=0.1) for _ in range(2))
    batches = [torch.randn(6, 3, 8, 8) for _ in range(3)]
    training.recompute_bn(ema, net, iter(batches))
    first = ema.backbone.blocks[0].bn1
    inputs = [ema.backbone.conv(x).detach() for x in batches]
    torch.testing.assert_close(first.running_mean, sum(h.mean((0, 2, 3)) for h in inputs) / 3)
    torch.testing.assert_close(first.running_var, sum(h.var((0, 2, 3)) for h in inputs) / 3)
    assert first.momentum == 0.1 and ema.training and net.backbone.bn.num_batches_tracked == 0


@pytest.mark.slow
def test_swa_run_averages_weights_refreshes_bn_and_cycles(tmp_path, monkeypatch):
    refreshed, rates, weights, augmented = [], {}, [], []
    real_recompute, real_objective = training.recompute_bn, tb.pi_model
    real_augment = augmentation.flip_and_crop

    def recompute(ema, net, batches):
        augmented.clear()                                       # from here on, the images of the statistics
        real_recompute(ema, net, batches)
        refreshed.append(torch.cat(augmented))

    def augment(x, flip, gen):
        augmented.append(x)
        return real_augment(x, flip=flip, gen=gen)

    def objective(model, *rest, **more):
        weights.append(model.backbone.conv.weight.detach().clone())             # after the step before
        return real_objective(model, *rest, **more)

    monkeypatch.setattr(augmentation, "flip_and_crop", augment)
    monkeypatch.setattr(training, "recompute_bn", recompute)
    monkeypatch.setitem(tb.OBJECTIVES, "swa", objective)
    monkeypatch.setitem(presets.digits, "epoch", 10)
    for cycles in True, False:
        out = tmp_path / str(cycles)
        weights.clear()
        tb.train(method="swa", steps=48, cycles=cycles, out=str(out), **helpers.QUICK)
        rates[cycles] = [float(row["lr"]) for row in csv.DictReader((out / "log.csv").open())]
        saved = torch.load(out / "last.pt", weights_only=True)
        after = weights[1:] + [saved["net"]["backbone.conv.weight"]]    # after step 1, ..., after step 48
        mean = torch.stack(after[14:]).mean(0)                  # from step 15 = 48 * 150 / 480 on
        torch.testing.assert_close(saved["ema"]["backbone.conv.weight"], mean)
    assert len(refreshed) == 10
    images, *_ = data.load("digits", "nowhere")
    unlabeled = {images[i].numpy().tobytes() for i in np.load(tmp_path / "True" / "split.npz")["unlabeled"]}
    assert {x.numpy().tobytes() for x in refreshed[0]} == unlabeled             # no test image among them
    cyclic = [0.002 * training.cyclic(step / 48) for step in (9, 19, 29, 39, 47)]
    assert rates[True] == pytest.approx(cyclic, rel=1e-5)
    assert rates[False] == [0.002] * 5
    saved = torch.load(tmp_path / "True" / "last.pt", weights_only=True)
    running_means = [saved[name]["backbone.bn.running_mean"] for name in ("ema", "net")]
    assert not torch.equal(*running_means)


# ---------------------------------------------------------------- FixMatch


def test_fixmatch_has_its_own_optimiser_schedule_and_ratio(tmp_path, monkeypatch):
    sizes, real = [], tb.fixmatch

    def recorded(model, x_l, y_l, x_u, **more):
        sizes.append((len(x_l), len(x_u)))
        return real(model, x_l, y_l, x_u, **more)

    monkeypatch.setitem(tb.OBJECTIVES, "fixmatch", recorded)
    row = tb.train(method="fixmatch", steps=4, out=str(tmp_path / "run"), **helpers.QUICK | dict(batch=3))
    assert sizes == [(3, 21)] * 4
    assert row["lr"] == pytest.approx(0.03 * math.cos(7 * math.pi * 3 / 4 / 16), rel=1e-5)
    assert row["images_per_second"] == pytest.approx(4 * 24 / row["seconds"], rel=1e-4)
    net = make_model("wrn-10-0.25", 10, 0, aux=False)
    optimizer = training.make_sgd(net, 0.03, 5e-4, nesterov=True)
    assert all(g["momentum"] == 0.9 and g["nesterov"] for g in optimizer.param_groups)
    for p in net.parameters():
        p.data += 0.5
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer.step()
    for name, p in net.named_parameters():              # the first step of Nesterov is 1.9 times the gradient
        kernel = name.endswith("weight") and ".bn" not in name
        factor = 1 - 0.03 * 1.9 * 5e-4 if kernel else 1
        torch.testing.assert_close(p.detach(), before[name] * factor, msg=name)
