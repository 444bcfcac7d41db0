"""The fast recipe: its network, its objectives, its learning rate and averages."""
import math
import re
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import augmentation
import cli
import data
import helpers
import models
import train_baselines
import train_crae
import training
from helpers import generator

QUICK = dict(arch="fast-4-8-8", batch=8, unlabeled=4, device="cpu")     # --recipe fast is digits' default
B, C, S, U, ETA, ETA2, T = 3, 4, 8, 2, 0.7, 0.3, 0.5

# ---------------------------------------------------------------- the network


def slow_features(backbone, x, variants):
    """FastNet in evaluation mode, written out."""
    def activate(x):
        return x.clamp_min(0) if "relu" in variants else x * (1 + torch.erf(x / math.sqrt(2))) / 2

    def norm(x, bn):
        mean, var, w, b = (v[:, None, None] for v in (bn.running_mean, bn.running_var, bn.weight, bn.bias))
        return (x - mean) / (var + 1e-5).sqrt() * w + b

    state = backbone.state_dict()
    if "plain" not in variants:
        side, out = x.shape[-1] - 1, 0
        for i in range(2):
            for j in range(2):
                window = x[:, :, i:i + side, j:j + side]
                out = out + torch.einsum("nchw,oc->nohw", window, state["patch_weight"][:, :, i, j])
        x = activate(out + state["patch_bias"][:, None, None])
    for group in range(3):
        x = F.conv2d(F.pad(x, (1, 1, 1, 1)), state[f"convs.{2 * group}.weight"])
        side = x.shape[-1]
        if side >= 4:
            half = side // 2
            corners = [x[:, :, i:2 * half:2, j:2 * half:2] for i in range(2) for j in range(2)]
            x = torch.stack(corners).amax(0)
        x = activate(norm(x, backbone.bns[2 * group]))
        x = F.conv2d(F.pad(x, (1, 1, 1, 1)), state[f"convs.{2 * group + 1}.weight"])
        x = activate(norm(x, backbone.bns[2 * group + 1]))
    return x.flatten(2).mean(-1) if "mean" in variants else x.flatten(2).amax(-1)


@pytest.mark.parametrize("variants, size", [
    *(("", size) for size in (8, 9, 20, 24, 33)), ("-relu", 9), ("-mean", 20), ("-plain", 8),
    ("-relu-mean-plain", 33)])
def test_the_network_is_the_one_written_out(variants, size):
    torch.manual_seed(0)
    net = models.make_model(f"fast-5-7-6{variants}", C, 0, bn_momentum=0.3).double().eval()
    x = augmentation.scale(helpers.random_images(6, size)).double()
    models.whiten(net, x)
    for bn in models.bn_layers(net):
        assert bn.momentum == 0.3 and bn.eps == 1e-5
        for values in bn.running_mean, bn.running_var, bn.weight.data, bn.bias.data:
            values += torch.rand_like(values)
    features = net.backbone(x)
    assert features.shape == (6, 6) and features.std() > 0.01
    torch.testing.assert_close(features, slow_features(net.backbone, x, variants))


def test_the_first_filters_copy_their_input():
    backbone = models.make_model("fast-32-40-48", C, 0).backbone
    for conv in backbone.convs:
        n = conv.in_channels
        x = torch.rand(2, n, 5, 5)
        assert torch.equal(conv(x)[:, :n], x) and conv.bias is None
        assert conv.weight[n:].abs().gt(0).all()                # the others are random
    assert [conv.in_channels for conv in backbone.convs] == [24, 32, 32, 40, 40, 48]


@pytest.mark.parametrize("arch", [
    "fast", "fast-32", "fast-32-128", "fast-32-128-", "fast-32-128-128-", "fast-0-8-8", "fast-8-8-0",
    "fast--8-8", "fast-8-8-8-8", "fast-8-8-8-gelu", "fast-8-8-8-mean-relu", "fast-8-8-8-relu-relu",
    "fast-8.5-8-8", "fast-99999-8-8", "Fast-8-8-8", "fast-8-8-8 "])
def test_bad_names_of_networks_are_refused(arch):
    with pytest.raises(cli.Refused, match=f"--arch {re.escape(arch)}: "):
        models.make_model(arch, 2, 0)


def patches_of(x):
    """All patches of 2 x 2 pixels as rows of 12 values: channel, row, column."""
    n = x.shape[-1] - 1
    corners = [x[:, c, i:i + n, j:j + n] for c in range(3) for i in range(2) for j in range(2)]
    return torch.stack(corners, -1).flatten(0, 2).double()


def test_whitening_makes_patches_white():
    x = augmentation.scale(helpers.random_images(40, 12)).double()
    x = x + x.roll(1, 3) + 0.3 * x.roll(1, 2) + 0.5 * x.mean(1, keepdim=True) + 0.2       # correlated
    before = patches_of(x).T.cov()
    net = models.make_model("fast-4-4-4", C, 0)
    models.whiten(net, x)
    net.double()
    out = F.conv2d(x, net.backbone.patch_weight, net.backbone.patch_bias).permute(0, 2, 3, 1).flatten(0, 2)
    assert torch.allclose(out[:, 12:], -out[:, :12])            # each direction and its negative
    cov, values = out[:, :12].T.cov(), torch.linalg.eigvalsh(before)
    assert out.mean(0).abs().max() < 1e-5 and (before - before.diag().diag()).abs().max() > 0.1
    assert (cov - torch.eye(12)).abs().max() < 0.01 and values.min() > 0.05 * values.mean()
    expected = values / (values + 5e-4 * values.mean())         # airbench's constant
    torch.testing.assert_close(cov.diag(), expected, atol=1e-5, rtol=0)


def test_grey_and_constant_images_get_zero_filters_where_nothing_varies():
    images, *_ = data.load("digits", "nowhere")
    for x, directions in (images[:100], 4), (torch.full((9, 3, 8, 8), 7, dtype=torch.uint8), 0):
        net, x = models.make_model("fast-4-4-4", C, 2), augmentation.scale(x)
        models.whiten(net, x)
        w = net.backbone.patch_weight.flatten(1)
        assert w.isfinite().all() and net.backbone.patch_bias.isfinite().all()
        assert (w.abs().amax(1) > 1e-3).sum() == 2 * directions == 24 - (w == 0).all(1).sum()
        assert all(logits.isfinite().all() for logits in net(x))
        cov = F.conv2d(x, net.backbone.patch_weight)[:, :12].transpose(0, 1).flatten(1).cov()
        strong = cov.diag() > 0.5
        assert strong.sum() == directions
        assert (cov[strong][:, strong] - torch.eye(directions)).abs().sum() < 0.1


def test_filters_are_fixed_and_those_of_a_pretrained_network_stay(tmp_path, monkeypatch):
    seen, real = [], train_crae.crae

    def objective(model, *rest, **more):
        terms = real(model, *rest, **more)
        sum(terms.values()).backward(retain_graph=True)
        seen.append((model.backbone.patch_weight.clone(), model.backbone.patch_weight.grad,
                     model.backbone.patch_bias.grad, model.backbone.convs[0].weight.grad))
        return terms

    monkeypatch.setattr(train_crae, "crae", objective)
    train_crae.train(**QUICK, steps=3, out=str(tmp_path / "run"))
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    for weight, *none, grad in seen:
        assert weight.any() and none == [None, None] and grad.abs().max() > 0
        for net in "net", "ema":
            assert torch.equal(weight, saved[net]["backbone.patch_weight"])

    train_baselines.train(method="fine_tune", **QUICK, steps=2, out=str(tmp_path / "tuned"))
    first = torch.load(tmp_path / "tuned" / "pretrain" / "model.pt", weights_only=True)["state"]
    tuned = torch.load(tmp_path / "tuned" / "last.pt", weights_only=True)["net"]
    for name in "backbone.patch_weight", "backbone.patch_bias":
        assert torch.equal(first[name], tuned[name])            # from all images,
        assert not torch.equal(first[name], saved["net"][name])         # not from the unlabelled ones


# ---------------------------------------------------------------- the objectives, one image at a time


def small_net(seed=0):
    """models.Net without BN, so that the logits of an image do not depend on the rest of the batch."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * S * S, 6), nn.Tanh())
    backbone.num_features = 6
    return models.Net(backbone, C, C, None, True, partial(nn.init.normal_, std=0.7))


def batch():
    return helpers.tiny_batch([2, 0, 3], U, S)


def turned(image, k):
    return torch.rot90(image.double() * 2 / 255 - 1, int(k), (1, 2))


def copies_of(images, how, gen):
    """[(copy, index of its image, rotation, whether its rotation is predicted)], image by image."""
    if how == "four":
        return [(turned(x, k), i, k, True) for k in range(4) for i, x in enumerate(images)]
    z = torch.randint(0, 4, (len(images),), generator=gen).tolist()
    random = [(turned(x, z[i]), i, z[i], True) for i, x in enumerate(images)]
    return random if how == "one" else [(turned(x, 0), i, 0, False) for i, x in enumerate(images)] + random


def mixed(x, sizes, gen):
    """In place of augmentation.mix; its own tests are in test_augmentation.py."""
    assert len(x) == sum(sizes)
    return 0.7 * x + 0.3 * x.roll(1, 0)


def slow_terms(net, x_l, y_l, x_u, copies, detach, ext1, ext2, weight):
    gen = generator(5)
    labeled, unlabeled = copies_of(x_l, copies[0], gen), copies_of(x_u, copies[1], gen)
    counted = [c for c in labeled if c[3]] + unlabeled
    partners = dict(zip(map(id, counted), [counted[-1], *counted]))

    def p_z(copy):                                              # of each head, (C, 4)
        x = 0.7 * copy[0] + 0.3 * partners[id(copy)][0] if ext2 else copy[0]
        return net.rotation(net.backbone(x[None]))[0].view(C, 4).softmax(1)

    def p_y(copy, head, fixed=False):
        h = net.backbone(copy[0][None])
        return head(h.detach() if fixed else h)[0].softmax(0)

    terms = {k: [] for k in ("class", "aux", "rotation_labeled", "rotation_unlabeled")}
    for n, copy in enumerate(labeled):
        y, upright = y_l[copy[1]], n < B
        terms["class"].append(-p_y(copy, net.classifier, detach and not upright)[y].log())
        if upright:
            terms["aux"].append(-p_y(copy, net.aux)[y].log())
        if copy[3]:
            terms["rotation_labeled"].append(-ETA * p_z(copy)[y, copy[2]].log())
    for copy in unlabeled:
        terms["rotation_unlabeled"].append(-ETA * (p_y(copy, net.classifier) @ p_z(copy)[:, copy[2]]).log())
    if ext1:
        terms["ext1"] = []
        for i in range(U):
            p = [p_y(copy, net.classifier) for copy in unlabeled if copy[1] == i]
            target = (sum(p) / 4).detach() ** (1 / T)
            terms["ext1"] += [-weight * (target / target.sum() * q.log()).sum() for q in p]
    return {name: sum(values) / len(values) for name, values in terms.items()}


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("copies", [("two", "four"), ("four", "one"), ("two", "one"), ("four", "four")])
@pytest.mark.parametrize("ext1, ext2", [(False, False), (True, False), (False, True), (True, True)])
def test_objectives_with_other_copies_and_detached_features(copies, detach, ext1, ext2, monkeypatch):
    if ext1 and copies[1] == "one":
        return                                                  # refused: extension 1 averages four rotations
    monkeypatch.setattr(augmentation, "mix", mixed)
    x_l, y_l, x_u = batch()
    net = small_net()
    slow = deepcopy(net).double()
    objective, more = train_crae.crae, {}
    if ext1 or ext2:
        objective, more = train_crae.crae_plus, dict(eta2=ETA2, temperature=T, ext1=ext1, ext2=ext2, step=4,
                                                     ramp=(3, 7))
    terms = objective(net, x_l, y_l, x_u, augment=training.unchanged, gen=generator(5), select="marginal",
                      eta=ETA, aux="upright", copies=copies, detach=detach, **more)
    expected = slow_terms(slow, x_l, y_l, x_u, copies, detach, ext1, ext2, ETA2 / 4)
    reached = helpers.assert_same_terms(terms, expected, net, slow)
    assert reached["rotation_unlabeled"] == {"backbone", "classifier", "rotation"}
    assert reached["class"] == {"backbone", "classifier"} and reached["aux"] == {"backbone", "aux"}


def test_rotated_labelled_copies_do_not_train_detached_features():
    """The gradient into the features is that of the upright copies alone, half of the mean over both."""
    x_l, y_l, x_u = batch()
    gradients = {}
    for detach in True, False:
        net = small_net()
        terms = train_crae.crae(net, x_l, y_l, x_u, augment=training.unchanged, gen=generator(5), eta=1.0,
                                select="marginal", aux="upright", copies=("two", "four"), detach=detach)
        terms["class"].backward()
        gradients[detach] = net.backbone[1].weight.grad, net.classifier.weight.grad
    upright = small_net()
    (F.cross_entropy(upright(augmentation.scale(x_l))[0], y_l) / 2).backward()
    torch.testing.assert_close(gradients[True][0], upright.backbone[1].weight.grad)
    torch.testing.assert_close(gradients[True][1], gradients[False][1])    # the classifier learns from both
    assert (gradients[True][0] - gradients[False][0]).abs().max() > 1e-3
    assert (gradients[True][1] - upright.classifier.weight.grad).abs().max() > 1e-3


@pytest.mark.parametrize("labeled, rotations, class_copies", [
    ("two", "four", "all"), ("two", "four", "upright"), ("two", "one", "all"), ("four", "four", "all"),
    ("four", "one", "all")])
def test_s4l_with_other_copies(labeled, rotations, class_copies):
    x_l, y_l, x_u = batch()
    model, slow = helpers.Linear(S, C, 1), helpers.Linear(S, C, 1).double()
    terms = train_baselines.s4l(model, x_l, y_l, x_u, augment=training.unchanged, gen=generator(5),
                                weight=0.6, class_copies=class_copies, rotations=rotations,
                                labeled_copies=labeled)
    gen = generator(5)
    of_labeled = copies_of(x_l, "one" if (labeled, rotations) == ("four", "one") else labeled, gen)
    of_both = of_labeled + copies_of(x_u, rotations, gen)
    classes = [F.cross_entropy(slow(c[0][None])[0], y_l[c[1]][None]) for c in of_labeled]
    classes = classes[:B] if class_copies == "upright" else classes
    turns = [F.cross_entropy(slow(c[0][None])[2][:, 0], torch.tensor([c[2]])) for c in of_both if c[3]]
    expected = {"class": sum(classes) / len(classes), "rotation": 0.6 * sum(turns) / len(turns)}
    helpers.assert_same_terms(terms, expected, model, slow)


def test_the_weight_of_extension_1_grows_between_two_parts_of_the_run():
    assert [training.ramp_up(step, 3, 7) for step in (0, 3, 4, 5, 7, 99)] == [0, 0, 0.25, 0.5, 1, 1]
    assert training.ramp_up(0, 0, 0) == 1                       # no ramp
    config = train_crae.configure(plus=True, steps=50, **QUICK)
    assert train_crae.build(config, 10)[1].keywords["ramp"] == pytest.approx([15, 35])
    config = train_crae.configure(plus=True, steps=50, ext1_ramp=[0.0, 0.0], **QUICK)
    assert train_crae.build(config, 10)[1].keywords["ramp"] == [0, 0]
    config = train_crae.configure(plus=True, steps=50, **QUICK, recipe="paper")
    assert train_crae.build(config, 10)[1].keywords["ramp"] == [0, 0]


# ---------------------------------------------------------------- schedule and averages


def test_the_learning_rate_rises_and_falls_to_zero():
    at = partial(training.triangle, warmup=0.2)
    expected = {0: 0.2, 0.1: 0.6, 0.2: 1, 0.6: 0.5, 0.9: 0.125, 1: 0}
    assert {t: at(t) for t in expected} == pytest.approx(expected)
    values = [at(step / 1000) for step in range(1000)]
    assert max(values) == at(0.2) == 1 and 0 < values[-1] < 0.002
    config = train_crae.configure(steps=10, **QUICK)
    assert training.schedule_of(config)(0.6) == pytest.approx(0.5)
    assert training.schedule_of(train_crae.configure(steps=10, **QUICK, recipe="paper"))(0.6) == 1


def test_the_average_forgets_the_initial_weights_and_keeps_a_part_of_the_run():
    weights = torch.randn(60, 3, generator=generator())
    for horizon in 20.0, 5.0:
        averages, expected = [torch.full((3,), 100.0)], torch.full((3,), 100.0)
        for step, w in enumerate(weights):
            training.warm_ema(averages, [w], step, horizon)
            decay = min((horizon - 1) / horizon, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * w
            torch.testing.assert_close(averages[0], expected, atol=1e-5, rtol=1e-5)
        assert averages[0].abs().max() < 4                      # the start has left
    for horizon in 0.3, 1.0:                                    # shorter than a step: the weights themselves
        training.warm_ema(averages, [weights[0]], 50, horizon)
        assert torch.equal(averages[0], weights[0])
    averages, config = [torch.zeros(1)], train_crae.configure(steps=1000, **QUICK)
    training.average_of(config)(averages, [torch.ones(1)], 900)
    assert averages[0].item() == pytest.approx(0.1)             # 1 % of 1000 steps
