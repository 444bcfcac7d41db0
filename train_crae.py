"""CRAE and CRAE+: semi-supervised learning via conditional rotation angle estimation (Xu, Liu, Gong).

    python train_crae.py                                        CRAE on the embedded digits, minutes on a CPU
    python train_crae.py --dataset cifar10 --labels 250 --plus  CRAE+ as in the paper
    python train_crae.py --dataset my_folder/ --labels 100 --plus --image_size 64       your own images
    python train_crae.py --dataset cifar10 --select detach      one row of the paper's ablation tables
"""
import cli

FLAGS = cli.DATASET_FLAGS | {
    "plus": (bool, False, "CRAE+: both extensions"),
    "ext1": (bool, False, "extension 1 alone: sharpened target, averaged over the four rotations"),
    "ext2": (bool, False, "extension 2 alone: rotation of a mixed image, class of the unmixed image"),
    "entmin": (bool, False, "entropy minimisation instead of extension 1 "
                            "(the paper finds extension 1 better)"),
    "select": (("marginal", "random", "independent", "detach"), "marginal",
               "what selects the rotation head: marginal (CRAE), "
               "or the ensembles random, independent, detach"),
    "heads": (int, None, "number of rotation heads for independent and random; 0: no rotation branches "
                         "(default: one per class)"),
    "aux": (bool, True, "the additional classifier, trained on labelled images only and used at test time"),
    "rot_dim": (int, None, "dimension that features are reduced to before the rotation heads; 0: no "
                           "reduction (default: 0; 16 for imagenet)"),
} | cli.NETWORK_FLAGS | {
    "batch": (int, None, "labelled images per step over all processes, and as many unlabelled ones, each in "
                         "four rotations (default: the preset's)"),
    "eta": (float, 1.0, "weight of the rotation loss"),
    "eta2": (float, 1.0, "weight of the loss of extension 1, or of the entropy"),
    "temperature": (float, 0.5, "T of the sharpening in extension 1, in (0, 1]"),
} | cli.RUN_FLAGS

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)      # before torch is imported: a mistyped flag is reported at once

import math
from functools import partial

import torch
import torch.nn.functional as F

import augmentation
import distributed
import losses
import models
import run_folder
import training

# ---------------------------------------------------------------- the method


def crae(model, x_l, y_l, x_u, *, augment, gen, select, eta, **_):
    """Algorithm 1, Eq. 2."""
    x, y_l, z = augmentation.rotated_batch(x_l, y_l, x_u, augment)      # Alg. 1, line 2
    class_logits, aux_logits, rot_logits = model(x)             # (N, C), (N, C), (N, K, 4)
    terms = class_terms(class_logits, aux_logits, y_l)          # Alg. 1, line 3
    if rot_logits is not None:                                  # Alg. 1, lines 4 and 5
        terms["rotation"] = eta * rotation_loss(class_logits, rot_logits, y_l, z, select, gen)
    return terms


def crae_plus(model, x_l, y_l, x_u, *, augment, gen, select, eta, eta2, temperature, ext1=True, ext2=True,
              entmin=False, **_):
    """Algorithm 2, Eq. 4. Each extension can be left out; entropy minimisation can replace extension 1.

    BN is not specified in the paper. Only the unmixed pass updates the running statistics; the mixed pass
    uses the statistics of its own batch and updates nothing.
    """
    x, y_l, z = augmentation.rotated_batch(x_l, y_l, x_u, augment)      # Alg. 2, line 2
    class_logits, aux_logits, rot_logits = model(x)             # (N, C), (N, C), (N, K, 4)
    terms = class_terms(class_logits, aux_logits, y_l)          # Alg. 2, line 3
    logits_u = class_logits[len(y_l):]                          # (4B, C)
    if ext1:
        p_bar = logits_u.float().softmax(-1).unflatten(0, (4, -1)).mean(0)      # over four rotations, (B, C)
        # Alg. 2, line 4: Eq. 3. The paper does not specify a gradient of the target; we detach it.
        p_hat = losses.sharpen(p_bar, temperature).detach()
        terms["ext1"] = eta2 * losses.soft_cross_entropy(logits_u, p_hat.repeat(4, 1))  # Alg. 2, line 5
    if entmin:
        terms["entropy"] = eta2 * losses.entropy(logits_u)      # all four copies, as in extension 1
    if ext2:
        sizes = [len(x_l)] * 4 + [len(x_u)] * 4
        x_mix = augmentation.mix(x, sizes, gen)                 # Alg. 2, line 6
        with models.frozen_bn(model):
            _, _, rot_logits = model(x_mix)                     # p(z|x_mix, y); p(y|x) is the unmixed image's
    if rot_logits is not None:                                  # Alg. 2, lines 7 and 8
        terms["rotation"] = eta * rotation_loss(class_logits, rot_logits, y_l, z, select, gen)
    return terms


def class_terms(class_logits, aux_logits, y_l):
    """L_ce(p(y|x_l), y_l) over all rotated copies of the labelled images, for both classifiers.

    The paper specifies neither the copies nor the weight of the additional classifier; we use all copies and
    weight 1.
    """
    n = len(y_l)
    terms = {"class": F.cross_entropy(class_logits[:n].float(), y_l)}
    if aux_logits is not None:
        terms["aux"] = F.cross_entropy(aux_logits[:n].float(), y_l)
    return terms


def rotation_loss(class_logits, rot_logits, y_l, z, select, gen):
    """L_ce(p(z|x), z), the mean over all copies; the first copies are labelled.

    select is what chooses the rotation head. marginal: p(y|x), Eq. 1. The other values are the ensemble
    baselines of the ablation. detach: the same without gradient into p(y|x); random: one random head per
    image and step; independent: every head learns from every image.
    """
    if select == "independent":
        return losses.independent_rotation_loss(rot_logits, z).mean()
    n, (N, K, _) = len(y_l), rot_logits.shape
    if select == "random":
        sizes = [N // 8] * 8                                    # rotations of labelled, then of unlabelled
        k = distributed.randint(0, K, N, gen=gen, device=z.device, sizes=sizes)
        return losses.labeled_rotation_loss(rot_logits, k, z).mean()    # the loss of head k
    logits_u = class_logits[n:].detach() if select == "detach" else class_logits[n:]
    return torch.cat([losses.labeled_rotation_loss(rot_logits[:n], y_l, z[:n]),
                      losses.unlabeled_rotation_loss(logits_u, rot_logits[n:], z[n:])]).mean()


def mean_p_z(class_logits, rot_logits):
    """p(z|x) of random and independent ensembles: Eq. 1 with equal weights, the mean of the heads. (N, 4)"""
    return losses.log_p_z(torch.zeros_like(rot_logits[:, :, 0]), rot_logits)


# ---------------------------------------------------------------- the experiment


@cli.strict(FLAGS)
def train(**flags):
    """Train CRAE or CRAE+ and return the final row of the log."""
    config = configure(**flags)
    row = run_folder.check_folder(config)
    if row:
        return row
    loaded = run_folder.load_data(config)
    num_classes, heads, select = len(loaded[-1]), config["heads"], config["select"]
    K = num_classes if heads is None else heads
    if select in ("marginal", "detach") and K not in (0, num_classes):
        raise cli.Refused(f"--heads {heads}: --select {select} needs one head for each of the {num_classes} "
                          "classes; omit the flag")
    torch.manual_seed(config["seed"])                           # the initial weights
    net = models.make_model(config["arch"], num_classes, K, config["rot_dim"], config["aux"],
                            config["bn_momentum"])
    extended = config["ext1"] or config["ext2"] or config["entmin"]
    constants = (("select", "eta", "eta2", "temperature", "ext1", "ext2", "entmin") if extended
                 else ("select", "eta"))
    objective = partial(crae_plus if extended else crae, **{name: config[name] for name in constants})
    p_z = losses.log_p_z if select in ("marginal", "detach") else mean_p_z
    return training.fit(net, objective, loaded, config, p_z=p_z)


@cli.strict(FLAGS)
def configure(**flags):
    """Check the flags and return all values of the run."""
    ext1, ext2, heads = flags["plus"] or flags["ext1"], flags["plus"] or flags["ext2"], flags["heads"]
    for name, remedy in dict(eta="--heads 0 trains without rotation branches",
                             eta2="without --plus, --ext1 and --entmin it is not used").items():
        if not 0 < flags[name] < math.inf:
            raise cli.Refused(f"--{name} {flags[name]}: must be greater than 0 and finite; {remedy}")
    if not 0 < flags["temperature"] <= 1:
        raise cli.Refused(f"--temperature {flags['temperature']}: must be in (0, 1]")
    if heads is not None and heads < 0:
        raise cli.Refused(f"--heads {heads}: must be 0 or more")
    if heads == 0 and (ext2 or flags["rot_dim"] or flags["select"] != "marginal"):
        raise cli.Refused("--heads 0: leaves no rotation branches for --plus, --ext2, --select or --rot_dim; "
                          "--ext1 is possible")
    if flags["entmin"] and ext1:
        raise cli.Refused("--entmin: replaces extension 1; omit --plus and --ext1 (--ext2 is possible)")
    method = method_name(ext1, ext2, flags["entmin"], flags["select"], heads, flags["aux"])
    named = "plus", "ext1", "ext2", "entmin", "select", "heads", "aux"          # by method_name
    return run_folder.resolve(flags, FLAGS, __file__, method, named) | dict(ext1=ext1, ext2=ext2)


def method_name(ext1, ext2, entmin, select, heads, aux):
    """As in paper_results.csv: crae, crae_plus, crae_ext1, no_rotation, detach, crae_plus_no_aux, ..."""
    name = "no_rotation" if heads == 0 else "crae" if select == "marginal" else select
    if heads and select in ("random", "independent"):
        name += f"_{heads}"
    name += "_plus" if ext1 and ext2 else "_ext1" if ext1 else "_ext2" if ext2 else ""
    return name + ("_entmin" if entmin else "") + ("" if aux else "_no_aux")


if __name__ == "__main__":
    cli.run(train, ARGUMENTS)
