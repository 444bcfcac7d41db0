"""The measurements at each evaluation, and the scores of a classifier, against slow loops."""
import statistics

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import augmentation
import data
import devices
import metrics
import settings
import train_baselines
import train_crae
from losses import log_p_z
from models import classify, make_model


def test_scores_of_unlabelled_images_against_a_loop():
    torch.manual_seed(0)
    images, labels, parts, _ = data.load("digits", "nowhere")
    net = make_model("wrn-10-1", 10, 10).eval()
    index = torch.arange(100)
    scores = metrics.measure_unlabeled(net, images, labels, index, 10, log_p_z)
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
    rot_logits[torch.arange(12), y, z] = 3.0                    # R_y alone recognises the rotation
    assert torch.equal(metrics.best_head(rot_logits, z), y)
    rot_logits[0, 2] = 9.0                                      # large logits are not a large probability
    assert torch.equal(metrics.best_head(rot_logits, z), y)


def test_the_error_is_that_of_the_tested_classifier_on_upright_images():
    torch.manual_seed(0)
    images, labels, *_ = data.load("digits", "nowhere")
    net = make_model("wrn-10-1", 10, 10).eval()
    index = torch.arange(1100, 1797)
    with torch.inference_mode():
        logits = torch.cat([classify(net, augmentation.scale(images[i:i + 1])) for i in index])
        predicted = logits.argmax(1)
        five = [labels[i].item() not in sorted(range(10), key=lambda c: -row[c])[:5]
                for i, row in zip(index, logits.tolist())]
        top1, top5 = metrics.error_rates(net, images, labels, index)
        assert top5 == pytest.approx(100 * sum(five) / len(five))
        assert top1 == pytest.approx(100 * (predicted != labels[index]).float().mean().item())
        assert metrics.error_rates(net, images, labels, index[:0]) == (None, None)


def test_which_model_is_measured_on_which_images():
    images, labels, parts, _ = data.load("digits", "nowhere")
    nets = []
    for seed in 0, 1:
        torch.manual_seed(seed)
        nets.append(make_model("wrn-10-0.25", 10, 10).train())
    index = dict(sample=torch.arange(200), validation=torch.arange(200, 500), test=torch.arange(500, 900),
                 raw_test=torch.arange(600, 700))
    scores, matrix = metrics.measure(*nets, images, labels, index, 10, log_p_z)
    assert nets[0].training and nets[1].training
    net, ema = (n.eval() for n in nets)
    with torch.inference_mode():
        unlabeled = metrics.measure_unlabeled(ema, images, labels, index["sample"], 10, log_p_z)
        assert torch.equal(matrix, unlabeled.pop("diversity"))
        expected = unlabeled | dict(
            val_error=metrics.error_rates(ema, images, labels, index["validation"])[0],
            test_error=metrics.error_rates(ema, images, labels, index["test"])[0],
            test_error_raw=metrics.error_rates(net, images, labels, index["raw_test"])[0],
            test_top5_error=None)
        assert scores == expected and scores["test_error"] != scores["test_error_raw"]
        of_net = metrics.measure_unlabeled(net, images, labels, index["sample"], 10, log_p_z)
        assert unlabeled != {k: v for k, v in of_net.items() if k != "diversity"}


def test_the_sample_is_fixed_and_prefers_known_classes():
    labels = torch.cat([torch.arange(10).repeat(3), torch.full((50,), -1)])
    index = dict(unlabeled=torch.arange(80), test=torch.arange(5))
    found = metrics.samples(labels, index, seed=0, quick=False)
    assert sorted(found["sample"].tolist()) == list(range(30))
    assert torch.equal(found["sample"], metrics.samples(labels, index, seed=0, quick=True)["sample"])
    unknown = index | dict(unlabeled=torch.arange(30, 80))
    assert len(metrics.samples(labels, unknown, seed=0, quick=False)["sample"]) == 50
    many = dict(unlabeled=torch.arange(20_000), test=torch.arange(1500))
    for quick, n in (False, 10_000), (True, 1000):
        found = metrics.samples(torch.zeros(20_000, dtype=torch.long), many, 0, quick)
        assert torch.equal(found["raw_test"], found["quick_test"] if quick else many["test"])
        assert [len(found[k].unique()) for k in ("sample", "quick_sample", "quick_test")] == [n, 250, 1000]


@pytest.mark.parametrize("has_heads", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_the_images_of_an_evaluation_are_counted(has_heads, quick):
    images, labels, _, _ = data.load("digits", "nowhere")
    index = dict(sample=torch.arange(40), quick_sample=torch.arange(10), quick_test=torch.arange(20),
                 validation=torch.arange(30), test=torch.arange(50), raw_test=torch.arange(25))
    passed = []
    nets = [make_model("wrn-10-0.25", 10, 10 * has_heads, aux=has_heads) for _ in range(2)]
    for net in nets:
        net.backbone.register_forward_hook(lambda _, x, y: passed.append(len(y)))
    metrics.measure(*nets, images, labels, index, 10, log_p_z, quick)
    assert sum(passed) == metrics.images_measured(index, quick, has_heads)


@pytest.mark.parametrize("script, flags, most", [
    (train_crae, {}, 0.05), (train_crae, dict(plus=True), 0.05), (train_crae, dict(steps=1000), 0.06),
    (train_baselines, dict(method="mixmatch"), 0.05), (train_baselines, dict(method="labeled_only"), 0.11)])
def test_evaluations_are_a_small_part_of_a_run_with_the_fast_recipe(script, flags, most):
    """In FLOPs, on CIFAR-10. labeled_only is the exception; docs/recipe.md names it."""
    config = script.configure(dataset="cifar10", recipe="fast", device="cpu", **flags)
    index = dict(unlabeled=torch.arange(44_000), test=torch.arange(10_000), validation=torch.arange(5000))
    index |= metrics.samples(torch.zeros(44_000, dtype=torch.long), index, 0, config["quick_eval"])
    has_heads = config["method"].startswith("crae")
    net = make_model(config["arch"], 10, 10, aux=True)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        net.eval()(torch.zeros(1, 3, 26, 26))
    quick, last = (metrics.images_measured(index, quick, has_heads) for quick in (True, False))
    # The last evaluation is in float32. A pass of this network takes 1.6 times as long as in bfloat16.
    evaluations = counter.get_total_flops() * ((settings.EVALUATIONS - 1) * quick + 1.6 * last)
    steps = config["steps"] * devices.step_flops(script.build, config, 10, 26)
    assert evaluations / (evaluations + steps) < most


# ---------------------------------------------------------------- a trained classifier


def outside(share, wrong, n):
    """Whether an error rate of `share` makes `wrong` of n errors implausible, by the normal approximation."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return abs(wrong / n - share) > z * (share * (1 - share) / n) ** 0.5


def test_the_wilson_interval_holds_every_plausible_error_rate():
    """Wilson's definition, tried for each rate on a fine grid, instead of the formula for its ends."""
    grid = np.arange(0, 100.0005, 0.001)
    for wrong, n in (0, 10), (1, 10), (5, 10), (10, 10), (40, 500), (1707, 10_000):
        plausible = [share for share in grid if not outside(share / 100, wrong, n)]
        assert metrics.wilson(wrong, n) == pytest.approx((min(plausible), max(plausible)), abs=0.0015)
    assert metrics.wilson(0, 10)[0] == 0 and metrics.wilson(10, 10)[1] == 100


def auc_by_pairs(p, positive):
    """The AUC by its definition: one comparison per pair."""
    pairs = [(a, b) for a, x in zip(p, positive) if x for b, y in zip(p, positive) if not y]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def test_auc_against_all_pairs_with_many_ties():
    rng = np.random.default_rng(0)
    for levels in 2, 5, 1000:                                   # 1000: hardly any ties
        p = rng.integers(0, levels, 60) / levels
        positive = rng.random(60) < 0.2 + 0.6 * p
        area = metrics.auc(torch.tensor(p), torch.tensor(positive))
        assert area == pytest.approx(auc_by_pairs(p, positive)) and 0.5 < area < 1
    p = torch.tensor([0.1, 0.2, 0.9])
    assert metrics.auc(p, p > 0.5) == 1 and metrics.auc(-p, p > 0.5) == 0
    assert metrics.auc(p * 0, p > 0.5) == 0.5
    assert metrics.auc(p, p > 1) is None and metrics.auc(p, p > 0) is None


def test_scores_against_a_loop():
    gen = torch.Generator().manual_seed(0)
    p = (3 * torch.randn(200, 12, generator=gen)).softmax(1)
    y = torch.randint(12, (200,), generator=gen)
    unsure = p.max(1).values < 0.5
    y[unsure] = p[unsure].argmax(1)                             # unsure, and right
    y[y == 11] = 0                                              # a class without images
    scores = metrics.scores_of(p, y)
    wrong = top5 = 0
    bins, right_of, images_of = [[] for _ in range(15)], [0] * 12, [0] * 12
    for i in range(200):
        order = sorted(range(12), key=lambda c: -p[i, c].item())
        wrong += order[0] != y[i]
        top5 += y[i].item() not in order[:5]
        images_of[y[i]] += 1
        right_of[y[i]] += order[0] == y[i].item()
        confidence = p[i, order[0]].item()
        for b in range(15):
            if b / 15 < confidence <= (b + 1) / 15:
                bins[b].append((confidence, order[0] == y[i]))
    # Confidence is too low in some bins and too high in others.
    assert any(np.mean([r for _, r in b]) > np.mean([c for c, _ in b]) for b in bins if b)
    ece = sum(len(b) / 200 * abs(np.mean([r for _, r in b]) - np.mean([c for c, _ in b])) for b in bins if b)
    assert sum(map(len, bins)) == 200
    assert scores["error"] == pytest.approx(100 * int(wrong) / 200)
    assert (scores["error_low"], scores["error_high"]) == metrics.wilson(int(wrong), 200)
    assert scores["top5_error"] == pytest.approx(100 * top5 / 200)
    assert scores["ece"] == pytest.approx(100 * ece, rel=1e-4) and scores["ece"] > 1
    recalls = [r / n for r, n in zip(right_of, images_of) if n]
    assert len(recalls) == 11 and scores["balanced_accuracy"] == pytest.approx(100 * np.mean(recalls))
    assert abs(scores["balanced_accuracy"] - (100 - scores["error"])) > 0.1     # the classes are uneven
    areas = [auc_by_pairs(p[:, c].tolist(), (y == c).tolist()) for c in range(11)]
    assert scores["auc"] == pytest.approx(np.mean(areas))
    assert "top5_error" not in metrics.scores_of(p[:, :10], y % 10)


def test_the_rows_of_the_classes():
    y = torch.tensor([0, 0, 0, 0, 2, 2])
    p = torch.tensor([[8, 1, 1], [8, 1, 1], [8, 1, 1], [2, 3, 5], [7, 1, 2], [1, 1, 8]]) / 10
    matrix = metrics.confusion_matrix(p.argmax(1), y, 3)
    assert matrix.tolist() == [[3, 0, 1], [0, 0, 0], [1, 0, 1]]
    a, b, c = metrics.class_rows(matrix, p, y, ["a", "b", "c"])
    assert a == {"class": "a", "images": 4, "error": "25.00", "precision": "75.00", "recall": "75.00",
                 "auc": f"{7 / 8:.4f}"}                         # 0.2 is above 0.1, but not above 0.7
    assert b == {"class": "b", "images": 0, "error": "", "precision": "", "recall": "", "auc": ""}
    assert c["precision"] == c["recall"] == c["error"] == "50.00"
    one = metrics.scores_of(p[:, :1], torch.zeros(6, dtype=torch.long))         # no pair of classes
    assert one["auc"] is None and one["balanced_accuracy"] == 100
