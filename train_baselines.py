"""The other methods of the paper's comparisons, with the splits, network, batches and evaluation of CRAE.

    python train_baselines.py --method s4l --dataset cifar10 --labels 250
    python train_baselines.py --method mixmatch                 on the embedded digits, minutes on a CPU
    for m in labeled_only fine_tune s4l; do python train_baselines.py --method $m --resume; done
"""
import cli

METHODS = dict(
    labeled_only="cross-entropy on the labelled images alone",
    fine_tune="two stages: rotations, then classes (Gidaris et al. 2018, arXiv 1803.07728)",
    s4l="classes and rotations side by side (Zhai et al. 2019, arXiv 1905.03670)",
    pi_model="Pi-Model: two augmentations agree (Laine and Aila 2017, arXiv 1610.02242)",
    pseudo_label="confident predictions become labels (Lee 2013, ICML workshop)",
    mixup="semi-supervised mixup (Zhang et al. 2018, arXiv 1710.09412)",
    vat="virtual adversarial training (Miyato et al. 2018, arXiv 1704.03976)",
    mean_teacher="agree with the averaged model (Tarvainen and Valpola 2017, arXiv 1703.01780)",
    mixmatch="guess, sharpen, mix (Berthelot et al. 2019, arXiv 1905.02249)",
    ict="interpolation consistency (Verma et al. 2019, arXiv 1903.03825)",
    swa="fast-SWA: Pi-Model, averaged (Athiwaratkun et al. 2019, arXiv 1806.05594)",
    fixmatch="weak and strong augmentation (Sohn et al. 2020, arXiv 2001.07685)",
)
FLAGS = {
    "method": (str, None, "one of\n" + "\n".join(f"  {name:<13} {text}" for name, text in METHODS.items())
               + "\nCRAE, its ensembles and CRAE with entropy minimisation (--entmin) are in train_crae.py"),
} | cli.DATASET_FLAGS | {
    "weight": (float, None, "weight of the unlabelled term; for s4l, of the rotation loss "
                            "(default: the method's constant)"),
    "class_copies": (("all", "upright"), "all",
                     "s4l: labelled copies with a class loss: all four, as in S4L's code, or upright ones"),
    "rotations": (("four", "one"), "four",
                  "s4l: rotations per image and step: all four, as in S4L's code, or one, as in RotNet"),
    "pretrained": (str, None, "fine_tune: reuse the first stage of this run (folder, or pretrain/model.pt)"),
    "cycles": (bool, True, "swa: cyclic learning rate"),
} | cli.NETWORK_FLAGS | {
    "steps": (int, None, "training steps; for fine_tune, of each of the two stages (default: the preset's)"),
    "unlabeled": (int, None, "unlabelled images per step over all processes "
                             "(default: 48 with --recipe fast; otherwise as many as labelled ones, "
                             "for fixmatch seven times as many)"),
} | cli.RUN_FLAGS

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)      # before torch is imported: a mistyped flag is reported at once

import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import augmentation
import budget
import distributed
import losses
import models
import presets
import run_folder
import settings
import training
from augmentation import blend, mixup_share, scale, strong_augment
from models import frozen_bn

# BN: a forward pass updates the running statistics unless it is inside frozen_bn, which normalises with the
# statistics of the batch and updates nothing. As in the MixMatch code base, only the labelled pass updates
# them, except in MixMatch (the first interleaved batch) and in S4L, rotation and FixMatch (one joint pass).

MU = 7                                                          # FixMatch: unlabelled images per labelled one


def ramp_steps(method, steps, recipe):
    """The number of steps over which the weight of the unlabelled term grows.

    In the MixMatch code base, 40 % of the run for all methods but MixMatch, which takes 16,384 steps. In a
    shorter run, and with the fast recipe, we use 40 % for MixMatch too. fast-SWA starts averaging when the
    weight is at its maximum.
    """
    if method == "mixmatch" and recipe == "paper":
        return min(16_384, 0.4 * steps)
    return (training.SWA_START if method == "swa" else 0.4) * steps


# ---------------------------------------------------------------- self-supervised


def logits_of(model, x):
    """Class logits, at least in float32, of images scaled to [-1, 1]. (N, C)"""
    return losses.wide(model(x)[0])


def labeled_only(model, x_l, y_l, x_u, *, augment, **_):
    """Cross-entropy on the upright labelled images."""
    return {"class": losses.class_loss(logits_of(model, scale(augment(x_l))), y_l)}


def rotation(model, x_l, y_l, x_u, *, augment, **_):
    """RotNet (Gidaris et al. 2018), the first stage of fine_tune: predict the rotation; ignores y_l."""
    x, _, z = augmentation.rotated_batch(x_l, y_l, x_u, augment)
    return {"rotation": losses.class_loss(model(x)[2][:, 0], z)}


def s4l(model, x_l, y_l, x_u, *, augment, gen, weight, class_copies="all", rotations="four",
        labeled_copies="four", **_):
    """S4L (Zhai et al. 2019): class loss on labelled copies, rotation loss of one head for all classes.

    The rotation loss is the mean over all copies, which is the mean of the two means in S4L's code.
    """
    if rotations == "one" and labeled_copies == "four":
        labeled_copies = "one"
    x, y, z = augmentation.rotated_batch(x_l, y_l, x_u, augment, gen, labeled_copies, rotations)
    class_logits, _, rot_logits = model(x)                      # (N, C), _, (N, 1, 4)
    n = len(y) if class_copies == "all" else len(x_l)           # the first copies are the upright ones
    N = sum(augmentation.rotation_sets(len(x_l), len(x_u), labeled_copies, rotations))
    return {"class": losses.class_loss(class_logits[:n], y[:n]),
            "rotation": weight * losses.class_loss(rot_logits[-N:, 0], z[-N:])}


# ---------------------------------------------------------------- consistency


def pi_model(model, x_l, y_l, x_u, *, augment, step, weight, ramp, **_):
    """Pi-Model (Laine and Aila 2017): two augmentations agree; gradient through one of them."""
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    with frozen_bn(model):
        with torch.no_grad():
            target = logits_of(model, scale(augment(x_u))).softmax(-1)            # (B, C)
        p = logits_of(model, scale(augment(x_u))).softmax(-1)
    # The mean is over the classes, too.
    terms["consistency"] = weight * training.ramp_up(step, 0, ramp) * F.mse_loss(p, target)
    return terms


def mean_teacher(model, x_l, y_l, x_u, *, augment, step, ema, weight, ramp, **_):
    """Mean Teacher (Tarvainen and Valpola 2017): agree with the averaged model on another augmentation."""
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    with torch.no_grad(), frozen_bn(ema):
        target = logits_of(ema, scale(augment(x_u))).softmax(-1)  # (B, C)
    with frozen_bn(model):
        p = logits_of(model, scale(augment(x_u))).softmax(-1)
    terms["consistency"] = weight * training.ramp_up(step, 0, ramp) * F.mse_loss(p, target)
    return terms


def ict(model, x_l, y_l, x_u, *, augment, gen, step, ema, weight, ramp, beta, **_):
    """ICT (Verma et al. 2019): the output on a mixed image agrees with the teacher's mixed outputs."""
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    x = scale(augment(x_u))
    share = mixup_share(len(x), beta, gen, x.device)            # (B,)
    with torch.no_grad(), frozen_bn(ema):
        q = logits_of(ema, x).softmax(-1)                         # (B, C)
    with frozen_bn(model):
        p = logits_of(model, blend(share, x, reversed_batch(x))).softmax(-1)
    target = blend(share, q, reversed_batch(q))
    terms["consistency"] = weight * training.ramp_up(step, 0, ramp) * F.mse_loss(p, target)
    return terms


def reversed_batch(x):
    """The partners in mixup and ICT: the batch in reverse order, as in the MixMatch code base."""
    order = torch.arange(distributed.gathered_size(len(x)), device=x.device).flip(0)
    return distributed.gather_rows(x, order)


# VAT uses 1e-6, but in float32 a difference over 1e-6 is rounding noise; we chose 0.1. Cosine with the
# direction in float64 (trained WRN-10-2, digits): 0.02 with 1e-6, 0.98 with 0.1, which TF32 resolves too.
XI = 0.1


def vat(model, x_l, y_l, x_u, *, augment, gen, step, weight, ramp, epsilon, entropy_weight, **_):
    """VAT (Miyato et al. 2018): the prediction does not change when the image moves in the worst direction.

    KL(p(x) || p(x + r)) as in the VAT paper; the MixMatch code base swaps the two.
    """
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    x = scale(augment(x_u))
    r = worst_direction(model, x, epsilon, gen)
    with frozen_bn(model):
        logits = logits_of(model, x)                              # (B, C)
        divergence = kl(logits.detach(), logits_of(model, x + r))
    terms["vat"] = weight * training.ramp_up(step, 0, ramp) * divergence
    terms["entropy"] = entropy_weight * losses.entropy(logits)         # no ramp
    return terms


def worst_direction(model, x, epsilon, gen):
    """r of norm epsilon per image, by one power iteration from a random direction. (B, 3, H, W)"""
    with frozen_bn(model), torch.autocast(x.device.type, enabled=False):    # bfloat16 loses small differences
        with torch.no_grad():
            logits = logits_of(model, x)
        d = distributed.randn(*x.shape, gen=gen, device=x.device)
        d = (XI * unit(d)).requires_grad_()
        gradient, = torch.autograd.grad(kl(logits, logits_of(model, x + d)), d)   # into d, not the weights
    return epsilon * unit(gradient)


def unit(d):
    """d with norm 1 per image. ldexp: confident predictions give tiny d, whose squares underflow."""
    _, exponent = d.flatten(1).abs().amax(1).frexp()
    return F.normalize(torch.ldexp(d.flatten(1), -exponent.clamp_min(-126)[:, None])).view_as(d)


def kl(p_logits, q_logits):
    """KL(p || q), mean over the images."""
    return F.kl_div(q_logits.log_softmax(-1), p_logits.log_softmax(-1), reduction="batchmean",
                    log_target=True)


# ---------------------------------------------------------------- labels from predictions


def pseudo_label(model, x_l, y_l, x_u, *, augment, step, weight, ramp, threshold, **_):
    """Pseudo-Label (Lee 2013): cross-entropy with the argmax if max p > threshold; mean over all images."""
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    with frozen_bn(model):
        logits = logits_of(model, scale(augment(x_u)))            # (B, C)
    p, label = logits.detach().softmax(-1).max(-1)              # (B,)
    masked = F.cross_entropy(logits, label, reduction="none") * (p > threshold)
    terms["pseudo"] = weight * training.ramp_up(step, 0, ramp) * masked.mean()
    return terms


def mixup(model, x_l, y_l, x_u, *, augment, gen, weight, beta, **_):
    """mixup (Zhang et al. 2018), semi-supervised as in MixMatch: predictions become labels; no ramp."""
    x_l, x_u = scale(augment(x_l)), scale(augment(x_u))
    with torch.no_grad(), frozen_bn(model):
        q = logits_of(model, x_u).softmax(-1)                     # (B, C)
    y = F.one_hot(y_l, q.shape[1]).float()
    share_l, share_u = (mixup_share(len(x), beta, gen, x.device) for x in (x_l, x_u))
    logits_l = logits_of(model, blend(share_l, x_l, reversed_batch(x_l)))
    with frozen_bn(model):
        logits_u = logits_of(model, blend(share_u, x_u, reversed_batch(x_u)))
    return {"class": losses.soft_cross_entropy(logits_l, blend(share_l, y, reversed_batch(y))),
            "mixup": weight * losses.soft_cross_entropy(logits_u, blend(share_u, q, reversed_batch(q)))}


def mixmatch(model, x_l, y_l, x_u, *, augment, gen, step, weight, ramp, beta, temperature, predict=logits_of,
             **_):
    """MixMatch (Berthelot et al. 2019): sharpened guesses, then mixup of labelled and unlabelled images.

    predict(model, x): the logits of the classifier that it trains
    """
    x_l, views = scale(augment(x_l)), [scale(augment(x_u)) for _ in range(2)]
    q, sizes = guess_labels(model, views, temperature, predict), [len(x_l), *map(len, views)]
    share = mixup_share(sum(sizes), beta, gen, x_l.device, sizes)       # (B + 2U,)
    x, p = mixed_batch(x_l, y_l, views, q, share, sizes, gen)
    order = interleaved(sizes, x.device)                        # three passes with a mixture of all sets
    first, *others = x[torch.cat(order)].split([*map(len, order)])
    logits = [predict(model, first)]
    with frozen_bn(model):
        logits += [predict(model, other) for other in others]
    logits = torch.cat(logits)[torch.cat(order).argsort()]      # back in order
    B = len(x_l)
    return {"class": losses.soft_cross_entropy(logits[:B], p[:B]),
            "guess": weight * training.ramp_up(step, 0, ramp) * F.mse_loss(logits[B:].softmax(-1), p[B:])}


def guess_labels(model, views, temperature, predict=logits_of):
    """MixMatch's guessed labels: the sharpened mean prediction over the views, without gradient. (B, C)"""
    with torch.no_grad(), frozen_bn(model):
        p = torch.stack([predict(model, x).softmax(-1) for x in views]).mean(0)
        return losses.sharpen(p, temperature)


def mixed_batch(x_l, y_l, views, q, share, sizes, gen):
    """Labelled images, then all views of unlabelled ones, each mixed with a random partner among all."""
    x = torch.cat([x_l, *views])                                # (3B, 3, H, W)
    p = torch.cat([F.one_hot(y_l, q.shape[1]).float(), *[q] * len(views)])      # (3B, C)
    partner = distributed.randperm(len(x), gen=gen, device=x.device)
    x_j, p_j = (distributed.gather_rows(t, partner, sizes) for t in (x, p))
    return blend(share, x, x_j), blend(share, p, p_j)


def interleaved(sizes, device):
    """The images of each pass: part i of the first set swaps places with part i of set i. MixMatch.

    So every pass, and its BN, contains labelled and unlabelled images. The sets may differ in size.
    """
    n, sets = len(sizes), torch.arange(sum(sizes), device=device).split(sizes)
    parts = [list(indices.split([(i + 1) * len(indices) // n - i * len(indices) // n for i in range(n)]))
             for indices in sets]
    for i in range(1, n):
        parts[0][i], parts[i][i] = parts[i][i], parts[0][i]
    return [torch.cat(part) for part in parts]


def fixmatch(model, x_l, y_l, x_u, *, augment, gen, weight, threshold, **_):
    """FixMatch (Sohn et al. 2020): the confident argmax of the weak view labels the strong view; no ramp."""
    weak, strong = augment(x_u), strong_augment(augment(x_u), gen)              # (mu B, 3, H, W)
    logits = logits_of(model, scale(torch.cat([augment(x_l), weak, strong])))
    logits_l, logits_w, logits_s = logits.split([len(x_l), len(x_u), len(x_u)])
    p, label = logits_w.detach().softmax(-1).max(-1)            # (mu B,)
    masked = F.cross_entropy(logits_s, label, reduction="none") * (p >= threshold)
    return {"class": F.cross_entropy(logits_l, y_l), "pseudo": weight * masked.mean()}


# ---------------------------------------------------------------- the experiment

OBJECTIVES = dict(labeled_only=labeled_only, fine_tune=labeled_only, s4l=s4l, pi_model=pi_model,
                  pseudo_label=pseudo_label, mixup=mixup, vat=vat, mean_teacher=mean_teacher,
                  mixmatch=mixmatch, ict=ict, swa=pi_model, fixmatch=fixmatch)
SUPERVISED = "labeled_only", "fine_tune"                        # for fine_tune: its second stage
SEVERAL_VIEWS = "pi_model", "mean_teacher", "mixmatch", "swa", "fixmatch"       # of an image per step


@cli.strict(FLAGS)
def train(**flags):
    """Train a baseline and return the final row of the log."""
    config = configure(**flags)
    # All other methods ramp or decay.
    row = run_folder.check_folder(config, longer=config["base"] in ("labeled_only", "s4l", "mixup"))
    if row:
        return row
    in_stage_two = os.path.exists(Path(config["out"], "last.pt"))
    backbone = None
    if config["pretrained"] and not in_stage_two:
        backbone = find_pretrained(config["pretrained"], f"--pretrained {config['pretrained']}", config)
    loaded = run_folder.load_data(config)
    if not config["steps"]:
        two_stages = config["base"] == "fine_tune" and not config["pretrained"]
        budget.set_steps(config, [build_stage_one, build] if two_stages else [build], loaded)
    net, objective, loop = build(config, len(loaded[-1]))
    if config["base"] == "fine_tune" and not in_stage_two:
        net.backbone.load_state_dict(backbone or stage_one(net, loaded, config))
    return training.fit(net, objective, loaded, config, **loop)


def build(config, num_classes):
    """The network, the objective and the arguments of training.fit that differ from CRAE's."""
    method, steps = config["base"], config["steps"]
    torch.manual_seed(config["seed"])                           # the initial weights
    net = models.make_model(config["arch"], num_classes, int(method == "s4l"), aux=False,
                            bn_momentum=config["bn_momentum"])
    constants = presets.of_baseline(method, config["dataset"], config["recipe"])
    own = {name: config[name] for name in constants if name not in ("lr", "weight_decay", "ema")}
    own |= {k: config[k] for k in ("class_copies", "rotations", "labeled_copies") if method == "s4l"}
    objective = partial(OBJECTIVES[method], ramp=ramp_steps(method, steps, config["recipe"]), **own)
    schedule = training.cyclic if config["cycles"] else training.constant
    sgd = dict(optimizer=partial(training.make_sgd, nesterov=True), schedule=training.cosine_7_16)
    loop = dict(
        fixmatch=sgd if config["recipe"] == "paper" else {},    # the fast recipe is alike for all methods
        swa=dict(average=partial(training.fast_swa, steps=steps), refresh_bn=training.recompute_bn,
                 schedule=schedule))
    return net, objective, loop.get(method, {}) | dict(unlabeled=unlabeled_of(config))


def unlabeled_of(config):
    """The number of unlabelled images per step."""
    if config["base"] in SUPERVISED:
        return 0
    return config["unlabeled"] or (MU if config["base"] == "fixmatch" else 1) * config["batch"]


@cli.strict(FLAGS)
def configure(**flags):
    """Check the flags and return all values of the run."""
    method, weight, pretrained = flags["method"], flags["weight"], flags["pretrained"]
    if method not in OBJECTIVES:
        given = f"--method {method}: must" if method else "--method: needs a value; it must"
        raise cli.Refused(f"{given} be one of {', '.join(OBJECTIVES)}; CRAE and entropy minimisation "
                          "(--entmin) are in train_crae.py")
    constants = presets.of_baseline(method, flags["dataset"], flags["recipe"])
    if weight is not None and "weight" not in constants:
        raise cli.Refused(f"--weight {weight}: {method} has no unlabelled term")
    if weight is not None and not 0 <= weight < math.inf:
        raise cli.Refused(f"--weight {weight}: must be 0 or more, and finite")
    if pretrained and method != "fine_tune":
        raise cli.Refused(f"--pretrained {pretrained}: only --method fine_tune has a first stage")
    if not flags["cycles"] and method != "swa":
        raise cli.Refused("--nocycles: only --method swa has cycles")
    for name in "class_copies", "rotations":
        if flags[name] != FLAGS[name][1] and method != "s4l":
            raise cli.Refused(f"--{name} {flags[name]}: only --method s4l has this choice")
    if (flags["class_copies"], flags["rotations"]) == ("upright", "one"):
        raise cli.Refused("--class_copies upright: --rotations one has no upright copies; omit one of them")
    if flags["unlabeled"] and method == "labeled_only":
        raise cli.Refused(f"--unlabeled {flags['unlabeled']}: labeled_only uses no unlabelled images")
    flags["pretrained"] = pretrained and str(Path(pretrained))  # one spelling
    named = ("method", "class_copies", "rotations", *(["weight"] if method == "s4l" else []))
    name = variant_name(flags, constants.get("weight"))
    config = settings.resolve(flags, FLAGS, __file__, name, named, constants, method == "labeled_only")
    config |= dict(base=method, rot_dim=None)                   # a single head needs no reduction
    if config["crop"] == "resized" and method in SEVERAL_VIEWS:
        possible = ", ".join(m for m in OBJECTIVES if m not in SEVERAL_VIEWS)
        raise cli.Refused(f"--method {method}: needs several views of an image, but --crop resized makes one "
                          f"when it reads the file; {possible} are possible")
    return config


def variant_name(flags, usual_weight):
    """The method; variants of S4L have their own names, so that tables can show them side by side."""
    name, weight = flags["method"], flags["weight"]
    name += "_upright" if flags["class_copies"] == "upright" else ""
    name += "_one_rotation" if flags["rotations"] == "one" else ""
    other_weight = flags["method"] == "s4l" and weight not in (None, usual_weight)
    return name + (f"_weight{weight:g}" if other_weight else "")


def stage_one(net, loaded, config):
    """fine_tune: predict rotations on all training images, without labels. Returns the backbone's weights."""
    images, labels, split, classes = loaded
    with run_folder.hold(config["out"]):                        # mark the run as started
        run_folder.write_config(config, split, training.resolved_values(net, images, split, classes))
    stage = config | dict(method="rotation", out=f"{config['out']}/pretrain", resume=True, paper=None)
    if not run_folder.check_folder(stage, longer=False):
        others = np.setdiff1d(split["labeled"], split["unlabeled"])             # empty on ImageNet
        everything = np.concatenate([others, split["unlabeled"]])               # both streams draw from it
        parts = dict(labeled=everything, unlabeled=everything, validation=everything[:0], test=everything[:0])
        net, objective, loop = build_stage_one(config, len(classes))
        training.fit(net, objective, (images, torch.full_like(labels, -1), parts, classes), stage, **loop)
    return find_pretrained(stage["out"], f"--out {config['out']}: its first stage", config)


def build_stage_one(config, num_classes):
    """As `build`, for the first stage of fine_tune."""
    net = models.make_model(config["arch"], num_classes, 1, aux=False, bn_momentum=config["bn_momentum"])
    net.classifier.requires_grad_(False)                        # not part of this stage
    return net, rotation, dict(unlabeled=config["unlabeled"] or config["batch"])


def find_pretrained(path, source, config):
    """The backbone's weights from a run's folder, its pretrain/ or the file itself; errors name `source`."""
    places = Path(path), Path(path, "pretrain", "model.pt"), Path(path, "model.pt")
    file = next(filter(os.path.isfile, places), None)
    if not file:
        raise cli.Refused(f"{source}: neither a file nor a folder that contains pretrain/model.pt")
    try:
        saved = run_folder.read_tensors(file)
        method, arch, seed = saved["method"], saved["arch"], saved["seed"]
        trained_on = f"{saved['dataset']} at {saved['image_size']} pixels"
        weights = {k.removeprefix("backbone."): v
                   for k, v in saved["state"].items() if k.startswith("backbone.")}
        if (method, arch) == ("rotation", config["arch"]):
            models.make_model(arch, 2, 0).backbone.load_state_dict(weights)
    except Exception as error:                                  # torch raises many types for damaged files
        raise cli.Refused(f"{source}: cannot be read as a saved model ({cli.reason(error)})") from None
    if (method, arch) != ("rotation", config["arch"]):
        raise cli.Refused(f"{source}: holds a {arch} trained with method {method}; fine_tune needs the "
                          f"weights of a first stage (<run>/pretrain/model.pt) for {config['arch']}")
    if saved["dataset"] != config["dataset"] or seed != config["seed"]:
        print(f"note: the first stage was trained on {trained_on} with seed {seed}; with another seed it may "
              "have seen validation images of this run, without labels")
    return weights


if __name__ == "__main__":
    cli.run(train, ARGUMENTS)
