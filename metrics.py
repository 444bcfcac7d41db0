"""The measurements at each evaluation, and the scores of a trained classifier with its interval.

At an evaluation, counts stay on the device. They are read back once per set of images, because a GPU would
have to wait for the CPU if they were read after each batch.
"""
import math

import torch

import augmentation
import data
import distributed
import progress
from models import classify

# We chose these limits: images per forward pass, and their pixels (at most 167 images of 224 x 224 pixels).
# On a CPU, the maps of more images do not fit into its cache (docs/speed.md).
EVAL_BATCH, CPU_EVAL_BATCH, EVAL_PIXELS = 1024, 256, 2 ** 23
# Images to measure at an evaluation; we chose these numbers. With quick evaluations, all of them together
# take about 3 % of the fast recipe's 2000 steps of CRAE, and a tenth of those of labelled-only, which are
# cheap.
SAMPLE = 10_000                         # unlabelled images
QUICK_SAMPLE, QUICK_TEST = 250, 1000    # unlabelled and test images at a quick evaluation
FINAL_SAMPLE = 1000                     # unlabelled images at the last evaluation, if the others are quick
Z = 1.959964                            # a normal variable lies within +-Z with a probability of 95 %
BINS = 15                               # Guo et al. 2017: bins of the expected calibration error

# ---------------------------------------------------------------- at each evaluation


def samples(labels, index, seed, quick):
    """The images that evaluations measure if not all are measured: the same at every evaluation."""
    unlabeled = index["unlabeled"]
    known = unlabeled[(labels.to(unlabeled.device)[unlabeled] >= 0)]
    sample = draw(known if len(known) else unlabeled, FINAL_SAMPLE if quick else SAMPLE, seed, 0)
    quick_test = draw(index["test"], QUICK_TEST, seed, 1)
    return dict(sample=sample, quick_sample=sample[:QUICK_SAMPLE], quick_test=quick_test,
                raw_test=quick_test if quick else index["test"])


def images_measured(index, quick, has_heads):
    """The number of images that pass through the network in an evaluation; a rotated copy is an image."""
    copies = 4 if has_heads else 1
    if quick:
        return copies * len(index["quick_sample"]) + len(index["quick_test"])
    others = sum(len(index[part]) for part in ("validation", "test", "raw_test"))
    return copies * len(index["sample"]) + others


def draw(pool, n, seed, number):
    gen = torch.Generator().manual_seed(distributed.seed_of(seed, "sample", number))
    order = torch.randperm(len(pool), generator=gen)
    return pool[order[:n].to(pool.device)]


@torch.inference_mode()
def measure(net, ema, images, labels, index, num_classes, p_z, quick=False, watch=progress.unwatched):
    """Returns the scores of a row of the log, in percent (None: not measured), and the diversity matrix.

    quick: only the averaged model, on a sample of the unlabelled and of the test images.
    watch(words, batches, images) iterates over the batches of a set of images; see progress.start_evaluation.
    """
    net.eval(), ema.eval()
    sample, test = (index["quick_sample"], index["quick_test"]) if quick else (index["sample"], index["test"])
    scores = measure_unlabeled(ema, images, labels, sample, num_classes, p_z, watch)
    matrix = scores.pop("diversity")
    # The order of the columns of log.csv: a run that is resumed appends to a log that has it.
    scores |= dict.fromkeys(("val_error", "test_error", "test_error_raw", "test_top5_error"))
    if not quick:
        scores["val_error"], _ = error_rates(ema, images, labels, index["validation"], watch,
                                             "validation images")
    scores["test_error"], top5 = error_rates(ema, images, labels, test, watch, "test images")
    if not quick:
        scores["test_error_raw"] = scores["test_error"]
        if differ(net, ema):
            scores["test_error_raw"], _ = error_rates(net, images, labels, index["raw_test"], watch,
                                                      "test images, raw weights")
    scores["test_top5_error"] = top5 if num_classes > 10 else None
    net.train(), ema.train()                # as a teacher, the averaged model uses the statistics of a batch
    return scores, matrix


def differ(net, ema):
    """Whether the averaged weights differ from the weights."""
    pairs = zip(net.state_dict().values(), ema.state_dict().values())
    return torch.stack([(live != mean).any() for live, mean in pairs]).any().item()


def eval_batch(images, device=None):
    """Images per forward pass. None: for BN statistics, which depend on the batch but not on the device."""
    most = CPU_EVAL_BATCH if device and device.type == "cpu" else EVAL_BATCH
    return max(4, min(most, EVAL_PIXELS // images.shape[-1] ** 2))


def error_rates(net, images, labels, index, watch=progress.unwatched, words="images"):
    """Top-1 and top-5 error of the tested classifier on upright images, in percent."""
    if not len(index):
        return None, None
    wrong = torch.zeros(2, dtype=torch.int64, device=labels.device)
    local = index[distributed.rank()::distributed.world()]
    batches = data.test_batches(images, local, eval_batch(images, labels.device), labels.device)
    for x, i in watch(words, batches, len(local)):
        logits, y = classify(net, augmentation.scale(x)), labels[i.to(labels.device, non_blocking=True)]
        first = logits.argmax(1, keepdim=True)                  # (n, 1)
        five = logits.topk(min(5, logits.shape[1])).indices     # (n, 5)
        wrong += torch.stack([(top != y[:, None]).all(1).sum() for top in (first, five)])
    return tuple(100 * n / len(index) for n in distributed.total(wrong).tolist())


def measure_unlabeled(net, images, labels, index, num_classes, p_z, watch=progress.unwatched):
    """Error of p(y|x) (main classifier, upright images), accuracy of p(z|x) and the paper's diversity matrix.

    Entry (i, j) of the matrix: how often, among copies of images of class i, R_j gives the true rotation a
    higher probability than all other heads do. (C, K), rows sum to one.
    """
    K, device = net.rotation.out_features // 4 if net.rotation else 0, labels.device
    found = torch.zeros(3 + num_classes * K, dtype=torch.int64, device=device)
    unknown, wrong, right, cells = found.split([1, 1, 1, num_classes * K])      # views of `found`
    unknown += (labels[index.to(device)] < 0).sum()
    local = index[distributed.rank()::distributed.world()]
    batches = data.test_batches(images, local, eval_batch(images, device) // 4, device)
    for x, i in watch("unlabelled images", batches, len(local)):
        x, z = augmentation.rotate4(x) if K else (x, None)      # (4n, 3, H, W), (4n,)
        class_logits, _, rot_logits = net(augmentation.scale(x))
        y = labels[i.to(device, non_blocking=True)]             # (n,)
        wrong += (class_logits[:len(i)].argmax(1) != y).sum()   # the first n are upright
        if K:
            right += (p_z(class_logits, rot_logits).argmax(1) == z).sum()
        if K > 1:                                               # the matrix is not used if a class is unknown
            cell = y.clamp_min(0).repeat(4) * K + best_head(rot_logits, z)      # (4n,)
            cells.index_add_(0, cell, torch.ones_like(cell))    # bincount would make a GPU wait
    found = distributed.total(found).cpu()
    unknown, wrong, right = found[:3].tolist()
    counts = found[3:].view(num_classes, K)
    return dict(rotation_accuracy=100 * right / (4 * len(index)) if K else None,
                unlabeled_error=100 * wrong / len(index) if not unknown else None,
                diversity=counts / counts.sum(1, keepdim=True) if not unknown and K > 1 else None)


def best_head(rot_logits, z):
    """argmax_j R_j(z|x): the head that gives the true rotation the highest probability. (N,)"""
    log_R = rot_logits.float().log_softmax(-1)                  # (N, K, 4)
    return log_R[torch.arange(len(z), device=z.device), :, z].argmax(1)


def diversity_rows(step, matrix, classes):
    """The rows of diversity.csv for one evaluation; a class without images in the sample has empty cells."""
    if matrix is None:
        return []
    return [{"step": step, "class": name}
            | {f"head_{j}": "" if v != v else f"{v:.5f}" for j, v in enumerate(row)}
            for name, row in zip(classes, matrix.tolist())]


# ---------------------------------------------------------------- a trained classifier


def wilson(wrong, n):
    """The 95 % interval of an error rate, in percent, from `wrong` errors on n images (Wilson 1927).

    Unlike error +- 2 standard deviations, it stays between 0 and 100 % and is useful for few images.
    """
    centre, square = wrong + Z ** 2 / 2, Z ** 2
    half = Z * math.sqrt(wrong * (n - wrong) / n + square / 4)
    return tuple(100 * min(max(end / (n + square), 0.0), 1.0) for end in (centre - half, centre + half))


def scores_of(p, y):
    """The scores of p(y|x) (N, C) for labels y (N,). All are in percent but the AUC, which is from 0 to 1."""
    confidence, top = p.max(1)
    wrong, matrix = int((top != y).sum()), confusion_matrix(top, y, p.shape[1])
    low, high = wilson(wrong, len(y))
    recalls = [recall for _, recall in precision_and_recall(matrix) if recall is not None]
    areas = [area for c in range(p.shape[1]) if (area := auc(p[:, c], y == c)) is not None]
    scores = dict(error=100 * wrong / len(y), error_low=low, error_high=high, images=len(y))
    if p.shape[1] > 10:
        scores["top5_error"] = 100 * (1 - (p.topk(5).indices == y[:, None]).any(1).double().mean().item())
    return scores | dict(balanced_accuracy=sum(recalls) / len(recalls),
                         auc=sum(areas) / len(areas) if areas else None,
                         ece=100 * calibration_error(confidence, top == y))


def confusion_matrix(predicted, y, num_classes):
    """Entry (i, j): how many images of class i were predicted as class j. (C, C)"""
    counts = torch.bincount(y * num_classes + predicted, minlength=num_classes ** 2)
    return counts.view(num_classes, num_classes)


def precision_and_recall(matrix):
    """(precision, recall) of each class, in percent; None without predictions or images of the class."""
    right, predicted, true = matrix.diagonal().tolist(), matrix.sum(0).tolist(), matrix.sum(1).tolist()
    return [tuple(100 * r / n if n else None for n in counts) for r, *counts in zip(right, predicted, true)]


def auc(p, positive):
    """How often a positive image has a higher p than a negative one; a tie counts half. None without pairs.

    From the sum of ranks (Mann and Whitney 1947), which needs one sort instead of all pairs. (N,), (N,) bool
    """
    n = int(positive.sum())
    pairs = n * (len(p) - n)
    if not pairs:
        return None
    _, place, counts = p.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2               # ties share their mean
    return (ranks[place[positive]].sum().item() - n * (n + 1) / 2) / pairs


def calibration_error(confidence, right):
    """Guo et al. 2017: |accuracy - mean confidence| in BINS bins of equal width, weighted by image counts."""
    which = (confidence * BINS).ceil().long().clamp(1, BINS) - 1                # bins (a, b]
    gap = torch.zeros(BINS, dtype=torch.float64).index_add_(0, which, right.double() - confidence.double())
    return (gap.abs().sum() / len(right)).item()


def class_rows(matrix, p, y, classes):
    """The rows of classes.csv. A score that does not exist, such as the error without images, is empty."""
    rows = []
    for c, (name, (precision, recall)) in enumerate(zip(classes, precision_and_recall(matrix))):
        row = dict(error=None if recall is None else 100 - recall, precision=precision, recall=recall)
        row = {k: "" if v is None else f"{v:.2f}" for k, v in row.items()}
        area = auc(p[:, c], y == c)
        rows.append({"class": name, "images": int(matrix[c].sum())} | row
                    | dict(auc="" if area is None else f"{area:.4f}"))
    return rows
