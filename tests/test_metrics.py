"""The measurements at each evaluation, against slow loops over single images."""
import numpy as np
import pytest
import torch

import augmentation
import data
import metrics
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
    index = dict(sample=torch.arange(200), validation=torch.arange(200, 500), test=torch.arange(500, 900))
    scores, matrix = metrics.measure(*nets, images, labels, index, 10, log_p_z)
    assert nets[0].training and nets[1].training
    net, ema = (n.eval() for n in nets)
    with torch.inference_mode():
        unlabeled = metrics.measure_unlabeled(ema, images, labels, index["sample"], 10, log_p_z)
        assert torch.equal(matrix, unlabeled.pop("diversity"))
        expected = unlabeled | dict(
            val_error=metrics.error_rates(ema, images, labels, index["validation"])[0],
            test_error=metrics.error_rates(ema, images, labels, index["test"])[0],
            test_error_raw=metrics.error_rates(net, images, labels, index["test"])[0],
            test_top5_error=None)
        assert scores == expected and scores["test_error"] != scores["test_error_raw"]
        of_net = metrics.measure_unlabeled(net, images, labels, index["sample"], 10, log_p_z)
        assert unlabeled != {k: v for k, v in of_net.items() if k != "diversity"}


def test_the_sample_is_fixed_and_prefers_known_classes():
    labels = torch.cat([torch.arange(10).repeat(3), torch.full((50,), -1)])
    sample = metrics.sample_of_unlabeled(labels, torch.arange(80), seed=0)
    assert sorted(sample.tolist()) == list(range(30))
    assert torch.equal(sample, metrics.sample_of_unlabeled(labels, torch.arange(80), seed=0))
    assert len(metrics.sample_of_unlabeled(labels, torch.arange(30, 80), seed=0)) == 50
    many = metrics.sample_of_unlabeled(torch.zeros(20_000, dtype=torch.long), torch.arange(20_000), seed=0)
    assert len(many.unique()) == 10_000
