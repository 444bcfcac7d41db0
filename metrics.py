"""The measurements at each evaluation: errors, rotation accuracy and the diversity matrix.

Counts stay on the device. They are read back once per set of images, because a GPU would have to wait for
the CPU if they were read after each batch.
"""
import torch

import augmentation
import data
import distributed
from models import classify

# We chose both limits: images per forward pass, and their pixels (at most 167 images of 224 x 224 pixels).
EVAL_BATCH, EVAL_PIXELS = 1024, 2 ** 23
SAMPLE = 10_000                         # unlabelled images to measure at an evaluation; we chose this number


def sample_of_unlabeled(labels, unlabeled, seed):
    """At most SAMPLE unlabelled images, the same at every evaluation; of known class if there are any."""
    known = unlabeled[(labels.to(unlabeled.device)[unlabeled] >= 0)]
    pool = known if len(known) else unlabeled
    gen = torch.Generator().manual_seed(distributed.seed_of(seed, "sample", 0))
    order = torch.randperm(len(pool), generator=gen)
    return pool[order[:SAMPLE].to(pool.device)]


@torch.inference_mode()
def measure(net, ema, images, labels, index, num_classes, p_z):
    """Returns the scores of a row of the log, in percent (None: not measured), and the diversity matrix."""
    net.eval(), ema.eval()
    scores = measure_unlabeled(ema, images, labels, index["sample"], num_classes, p_z)
    matrix = scores.pop("diversity")
    scores["val_error"], _ = error_rates(ema, images, labels, index["validation"])
    scores["test_error"], top5 = error_rates(ema, images, labels, index["test"])
    pairs = zip(net.state_dict().values(), ema.state_dict().values())
    averaged = torch.stack([(live != mean).any() for live, mean in pairs]).any().item()
    scores["test_error_raw"] = (error_rates(net, images, labels, index["test"])[0] if averaged
                                else scores["test_error"])
    scores["test_top5_error"] = top5 if num_classes > 10 else None
    net.train(), ema.train()                # as a teacher, the averaged model uses the statistics of a batch
    return scores, matrix


def eval_batch(images):
    return max(4, min(EVAL_BATCH, EVAL_PIXELS // images.shape[-1] ** 2))


def error_rates(net, images, labels, index):
    """Top-1 and top-5 error of the tested classifier on upright images, in percent."""
    if not len(index):
        return None, None
    wrong = torch.zeros(2, dtype=torch.int64, device=labels.device)
    local = index[distributed.rank()::distributed.world()]
    for x, i in data.test_batches(images, local, eval_batch(images), labels.device):
        logits, y = classify(net, augmentation.scale(x)), labels[i.to(labels.device, non_blocking=True)]
        first = logits.argmax(1, keepdim=True)                  # (n, 1)
        five = logits.topk(min(5, logits.shape[1])).indices     # (n, 5)
        wrong += torch.stack([(top != y[:, None]).all(1).sum() for top in (first, five)])
    return tuple(100 * n / len(index) for n in distributed.total(wrong).tolist())


def measure_unlabeled(net, images, labels, index, num_classes, p_z):
    """Error of p(y|x) (main classifier, upright images), accuracy of p(z|x) and the paper's diversity matrix.

    Entry (i, j) of the matrix: how often, among copies of images of class i, R_j gives the true rotation a
    higher probability than all other heads do. (C, K), rows sum to one.
    """
    K, device = net.rotation.out_features // 4 if net.rotation else 0, labels.device
    found = torch.zeros(3 + num_classes * K, dtype=torch.int64, device=device)
    unknown, wrong, right, cells = found.split([1, 1, 1, num_classes * K])      # views of `found`
    unknown += (labels[index.to(device)] < 0).sum()
    local = index[distributed.rank()::distributed.world()]
    for x, i in data.test_batches(images, local, eval_batch(images) // 4, device):
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
