"""CRAE and CRAE+: semi-supervised learning via conditional rotation angle estimation (Xu, Liu, Gong).

    python train_crae.py                                        CRAE on the embedded digits, a few minutes on a CPU
    python train_crae.py --dataset cifar10 --labels 250 --plus  CRAE+ as in the paper
    python train_crae.py --dataset my_folder/ --labels 100 --plus --image_size 64       your own pictures
    python train_crae.py --dataset cifar10 --select detach      a row of the paper's ablation tables
"""
import math
import sys
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

import training
from data import mine, mix, rotated_batch, whole
from losses import (entropy, independent_rotation_loss, labeled_rotation_loss, log_p_z, sharpen,
                    soft_cross_entropy, unlabeled_rotation_loss)
from models import frozen_bn, make_model

# ---------------------------------------------------------------- the method


def crae(model, x_l, y_l, x_u, augment, gen, *, select, eta, **_):
    """Algorithm 1, Eq. 2."""
    x, y_l, z = rotated_batch(x_l, y_l, x_u, augment)           # Alg. 1, line 2
    class_logits, aux_logits, rot_logits = model(x)             # (N, C), (N, C), (N, K, 4)
    terms = class_terms(class_logits, aux_logits, y_l)          # Alg. 1, line 3
    if rot_logits is not None:
        terms["rotation"] = eta * rotation_loss(class_logits, rot_logits, y_l, z, select, gen)         # lines 4, 5
    return terms


def crae_plus(model, x_l, y_l, x_u, augment, gen, *, select, eta, eta2, temperature, ext1=True, ext2=True, entmin=False, **_):
    """Algorithm 2, Eq. 4; either extension can be left out, and entropy minimisation take the place of extension 1.

    ours: only the unmixed pass updates BN's running statistics; the mixed one uses its own batch's and updates nothing.
    """
    x, y_l, z = rotated_batch(x_l, y_l, x_u, augment)           # Alg. 2, line 2
    class_logits, aux_logits, rot_logits = model(x)             # (N, C), (N, C), (N, K, 4)
    terms = class_terms(class_logits, aux_logits, y_l)          # Alg. 2, line 3
    if ext1:
        logits_u = class_logits[len(y_l):]                      # (4B, C)
        p_bar = logits_u.float().softmax(-1).unflatten(0, (4, -1)).mean(0)      # over the four rotations, (B, C)
        p_hat = sharpen(p_bar, temperature).detach()            # Alg. 2, line 4: Eq. 3; ours: no gradient
        terms["ext1"] = eta2 * soft_cross_entropy(logits_u, p_hat.repeat(4, 1))         # Alg. 2, line 5
    if entmin:
        terms["entropy"] = eta2 * entropy(class_logits[len(y_l):])              # ours: all four copies, as extension 1
    if ext2:
        x_mix = mix(x, gen)                                     # Alg. 2, line 6
        with frozen_bn(model):
            _, _, rot_logits = model(x_mix)                     # p(z|x_mix, y); p(y|x) stays that of the unmixed image
    if rot_logits is not None:
        terms["rotation"] = eta * rotation_loss(class_logits, rot_logits, y_l, z, select, gen)         # lines 7, 8
    return terms


def class_terms(class_logits, aux_logits, y_l):
    """L_ce(p(y|x_l), y_l), ours: on all rotated copies; the auxiliary classifier sees only these, weight 1."""
    n = len(y_l)
    terms = {"class": F.cross_entropy(class_logits[:n].float(), y_l)}
    if aux_logits is not None:
        terms["aux"] = F.cross_entropy(aux_logits[:n].float(), y_l)
    return terms


def rotation_loss(class_logits, rot_logits, y_l, z, select, gen):
    """L_ce(p(z|x), z); ours: the mean over all copies, labelled (the first ones) and unlabelled. A scalar.

    select: who chooses the rotation head? marginal: p(y|x), Eq. 1. The ensemble baselines of the ablation: detach, the
    same without gradient into p(y|x); random, a die an image; independent, nobody: every head learns from every image.
    """
    if select == "independent":
        return independent_rotation_loss(rot_logits, z).mean()
    if select == "random":
        N, K, _ = rot_logits.shape
        k = mine(torch.randint(K, (whole(N),), generator=gen, device=z.device), sets=8)
        return labeled_rotation_loss(rot_logits, k, z).mean()   # the loss of head k
    n = len(y_l)
    logits_u = class_logits[n:].detach() if select == "detach" else class_logits[n:]
    return torch.cat([labeled_rotation_loss(rot_logits[:n], y_l, z[:n]),
                      unlabeled_rotation_loss(logits_u, rot_logits[n:], z[n:])]).mean()


def mean_p_z(class_logits, rot_logits):
    """p(z|x) of the random and independent ensembles: the mean of the heads, Eq. 1 with equal weights. (N, 4)"""
    return log_p_z(torch.zeros_like(rot_logits[:, :, 0]), rot_logits)


# ---------------------------------------------------------------- the experiment


def train(dataset: str = "digits", labels: int | str | None = None, labels_file: str | None = None, plus: bool = False, ext1: bool = False,
          ext2: bool = False, entmin: bool = False, select: Literal["marginal", "random", "independent", "detach"] = "marginal",
          heads: int | None = None, aux: bool = True, rot_dim: int | None = None, arch: str | None = None,
          steps: int | None = None, batch: int | None = None, lr: float | None = None,
          weight_decay: float | None = None, eta: float = 1.0, eta2: float = 1.0,      # ours, no ramp-up
          temperature: float = 0.5,                             # MixMatch
          flip: bool | None = None, image_size: int | None = None, seed: int = 0, data_dir: str = "data",
          out: str | None = None, device: str | None = None, deterministic: bool = False,
          save_minutes: float = 10.0,                           # ours
          accumulate: int = 1, precision: Literal["bf16", "fp32"] | None = None, compile: bool = False, sync_bn: bool = False,
          crop: Literal["pad", "resized"] | None = None, stream: bool | None = None, workers: int | None = None,
          skip_broken: bool = False, resume: bool = False) -> dict:
    """Flags, each as --name value or --name=value; a true-or-false flag also as --name or --noname.
    What is not given comes from the dataset's preset in presets.py, the paper's table.

    DATA_FLAGS
    --plus          CRAE+: both extensions
    --ext1          extension 1 alone: sharpened target, averaged over the four rotations
    --ext2          extension 2 alone: rotation of a mixed image, class of the unmixed one
    --entmin        entropy minimisation in place of extension 1 (the paper: extension 1 is better); with --ext2 or alone
    --select        who selects the rotation head: marginal (CRAE), or the ensembles random, independent, detach
    --heads         number of rotation heads, for independent and random; 0: no rotation branches; else one a class
    --aux           the additional classifier, trained on labels alone and used at test time; on, off by --noaux
    --rot_dim       dimension of the features in front of the rotation heads; 0: no reduction, the default but for imagenet (16)
    --arch          wrn-<depth>-<width>, for instance wrn-28-2, or resnet50v2
    --steps         training steps
    --batch         labelled images in a step, of all processes together, and as many unlabelled ones (each in four rotations)
    --lr            learning rate
    --weight_decay  decoupled weight decay (imagenet: L2), on kernels only
    --eta           weight of the rotation loss
    --eta2          weight of extension 1's loss, or of the entropy
    --temperature   T of extension 1's sharpening, in (0, 1]
    RUN_FLAGS
    """
    flags = dict(locals())
    ext1, ext2 = plus or ext1, plus or ext2
    if not 0 < eta < math.inf:
        sys.exit(f"--eta {eta}: must be more than 0; --heads 0 trains without rotation branches")
    if not 0 < eta2 < math.inf:
        sys.exit(f"--eta2 {eta2}: must be more than 0; without --plus, --ext1 and --entmin it is not used")
    if not 0 < temperature <= 1:
        sys.exit(f"--temperature {temperature}: must be in (0, 1]")
    if heads is not None and heads < 0:
        sys.exit(f"--heads {heads}: must be 0 or more")
    if heads == 0 and (ext2 or rot_dim or select != "marginal"):
        sys.exit("--heads 0: leaves no rotation branches for --plus, --ext2, --select or --rot_dim; --ext1 is possible")
    if entmin and ext1:
        sys.exit("--entmin: takes the place of extension 1; leave --plus and --ext1 out, --ext2 is possible")
    config = training.resolve(train, flags, method_name(ext1, ext2, entmin, select, heads, aux),
                              unnamed=NAMED_BY_METHOD)
    config |= dict(ext1=ext1, ext2=ext2)                        # --plus is both
    row = training.check_folder(config)
    if row:
        return row
    images, labels, split, classes = training.load_run(config)
    K = len(classes) if heads is None else heads
    if select in ("marginal", "detach") and K not in (0, len(classes)):
        sys.exit(f"--heads {heads}: --select {select} needs a head for each of the {len(classes)} classes; leave it out")
    torch.manual_seed(seed)                                     # the initial weights
    net = make_model(config["arch"], len(classes), K, config["rot_dim"], aux, config["bn_momentum"])
    if ext1 or ext2 or entmin:
        objective = partial(crae_plus, select=select, eta=eta, eta2=eta2, temperature=temperature, ext1=ext1, ext2=ext2,
                            entmin=entmin)
    else:
        objective = partial(crae, select=select, eta=eta)
    p_z = log_p_z if select in ("marginal", "detach") else mean_p_z
    return training.fit(net, objective, images, labels, split, classes, config, p_z)


NAMED_BY_METHOD = "plus", "ext1", "ext2", "entmin", "select", "heads", "aux"


def method_name(ext1, ext2, entmin, select, heads, aux):
    """As in paper_results.csv: crae, crae_plus, crae_ext1, no_rotation, detach, independent_20, crae_plus_no_aux, ..."""
    name = "no_rotation" if heads == 0 else "crae" if select == "marginal" else select
    if heads and select in ("random", "independent"):
        name += f"_{heads}"
    name += "_plus" if ext1 and ext2 else "_ext1" if ext1 else "_ext2" if ext2 else ""
    return name + ("_entmin" if entmin else "") + ("" if aux else "_no_aux")


if __name__ == "__main__":
    training.command_line(train)
