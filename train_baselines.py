"""Every other method of the paper's comparisons, on the same splits, network, batches and evaluation as CRAE.

    python train_baselines.py --method s4l --dataset cifar10 --labels 250
    python train_baselines.py --method mixmatch                 on the embedded digits, a minute or two on a CPU
    for m in labeled_only fine_tune s4l; do python train_baselines.py --method $m --resume; done
"""
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import get_swa_multi_avg_fn, update_bn

import training
from data import beside, blend, everyones, mine, mixup_share, rotated_batch, scale, strong_augment, whole
from losses import entropy, sharpen, soft_cross_entropy
from models import frozen_bn, make_model

# An objective is objective(model, x_l, y_l, x_u, *, augment, gen, step, ema, <its constants>) -> {name: loss term}.
#
# BN: a forward pass updates the running statistics unless it stands under frozen_bn, which normalises by the batch's
# statistics and updates nothing. As in the MixMatch code base the labelled pass alone updates them; the exceptions are
# MixMatch (the first interleaved batch), and S4L, rotation and FixMatch (one joint pass of all images).

# ---------------------------------------------------------------- constants
# weight is that of the unlabelled term. What is not here (lr, batch, ema, mostly weight_decay, ...) is the dataset's preset.

# The runs of the MixMatch code base on CIFAR-10, except where another source is named. Also for CIFAR-100, and, ours,
# for every other dataset.
CIFAR10 = dict(
    labeled_only={},
    fine_tune={},
    s4l=dict(weight=1.0),                                       # S4L: w = 1
    pi_model=dict(weight=20.0, weight_decay=0.02),
    pseudo_label=dict(weight=1.0, threshold=0.95),
    mixup=dict(weight=1.0, beta=0.75),
    vat=dict(weight=0.3, epsilon=6.0, entropy_weight=0.06, weight_decay=0.02),
    mean_teacher=dict(weight=50.0, weight_decay=0.2),
    mixmatch=dict(weight=75.0, beta=0.75, temperature=0.5),
    ict=dict(weight=1000.0, beta=0.75),
    swa=dict(weight=20.0, weight_decay=0.02, ema=None),         # ours: the Pi-Model's weight; its average is not an EMA
    fixmatch=dict(weight=1.0, threshold=0.95, lr=0.03, weight_decay=5e-4),      # FixMatch
)
CIFAR100 = CIFAR10 | dict(
    mixmatch=dict(CIFAR10["mixmatch"], weight=150.0),           # MixMatch
    fixmatch=dict(CIFAR10["fixmatch"], weight_decay=1e-3),      # FixMatch
)
SVHN = CIFAR10 | dict(                                          # the MixMatch code base on SVHN; also for SVHN+Extra
    pi_model=dict(weight=5.0, weight_decay=0.2),
    pseudo_label=dict(weight=2.0, threshold=0.95),
    mixup=dict(weight=1.0, beta=0.25),
    mean_teacher=dict(weight=150.0, weight_decay=0.02),
    mixmatch=dict(CIFAR10["mixmatch"], weight=250.0),
    ict=dict(weight=20.0, beta=0.5),
    swa=dict(weight=5.0, weight_decay=0.2, ema=None),           # ours: the Pi-Model's
)
MU = 7                                                          # FixMatch: unlabelled images for a labelled one
SWA_START, SWA_CYCLE, SWA_EVERY = 150 / 480, 30 / 480, 3 / 480  # fast-SWA: epochs of its run of 480
SWA_RAMPDOWN = 210 / 480


def ramp_up(step, ramp):
    """The weight of an unlabelled term as a share of its final one: linear from 0 to 1 over the first `ramp` steps."""
    return min(step / ramp, 1.0)


def ramp_steps(method, steps):
    """Over how many steps an unlabelled term's weight grows. All but MixMatch in the MixMatch code base: 40 %."""
    if method == "mixmatch":
        return min(16_384, 0.4 * steps)                         # MixMatch: 16,384; ours: in a short run 40 %, as the others
    return (SWA_START if method == "swa" else 0.4) * steps      # ours: fast-SWA averages once the weight has grown


# ---------------------------------------------------------------- self-supervised


def predict(model, x):
    """Class logits in float32, for images scaled to [-1, 1]. (N, C)"""
    return model(x)[0].float()


def labeled_only(model, x_l, y_l, x_u, *, augment, **_):
    """Cross-entropy on the labelled images, unrotated."""
    return {"class": F.cross_entropy(predict(model, scale(augment(x_l))), y_l)}


def rotation(model, x_l, y_l, x_u, *, augment, **_):
    """RotNet (Gidaris et al. 2018), stage one of fine_tune: four-way rotation; y_l, unknown there, is not looked at."""
    x, _, z = rotated_batch(x_l, y_l, x_u, augment)
    return {"rotation": F.cross_entropy(model(x)[2][:, 0].float(), z)}


def s4l(model, x_l, y_l, x_u, *, augment, weight, **_):
    """S4L (Zhai et al. 2019): class loss on all labelled copies, rotation loss of one head shared by all classes."""
    x, y_l, z = rotated_batch(x_l, y_l, x_u, augment)           # (N, 3, H, W), (4B,), (N,)
    class_logits, _, rot_logits = model(x)                      # (N, C), _, (N, 1, 4)
    return {"class": F.cross_entropy(class_logits[:len(y_l)].float(), y_l),
            "rotation": weight * F.cross_entropy(rot_logits[:, 0].float(), z)}


# ---------------------------------------------------------------- consistency


def pi_model(model, x_l, y_l, x_u, *, augment, step, weight, ramp, **_):
    """Pi-Model (Laine and Aila 2017): two augmentations of an image agree; gradient through one of them."""
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    with frozen_bn(model):
        with torch.no_grad():
            target = predict(model, scale(augment(x_u))).softmax(-1)            # (B, C)
        p = predict(model, scale(augment(x_u))).softmax(-1)
    terms["consistency"] = weight * ramp_up(step, ramp) * F.mse_loss(p, target)         # the mean over classes, too
    return terms


def mean_teacher(model, x_l, y_l, x_u, *, augment, step, ema, weight, ramp, **_):
    """Mean Teacher (Tarvainen and Valpola 2017): the student agrees with the averaged model on another augmentation."""
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    with torch.no_grad(), frozen_bn(ema):
        target = predict(ema, scale(augment(x_u))).softmax(-1)  # (B, C)
    with frozen_bn(model):
        p = predict(model, scale(augment(x_u))).softmax(-1)
    terms["consistency"] = weight * ramp_up(step, ramp) * F.mse_loss(p, target)
    return terms


def ict(model, x_l, y_l, x_u, *, augment, gen, step, ema, weight, ramp, beta, **_):
    """ICT (Verma et al. 2019): the student at a mixed image agrees with the mix of the teacher's outputs."""
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    x = scale(augment(x_u))
    share = mixup_share(len(x), beta, gen)                      # (B,)
    with torch.no_grad(), frozen_bn(ema):
        q = predict(ema, x).softmax(-1)                         # (B, C)
    with frozen_bn(model):
        p = predict(model, blend(share, x, reversed_batch(x))).softmax(-1)
    terms["consistency"] = weight * ramp_up(step, ramp) * F.mse_loss(p, blend(share, q, reversed_batch(q)))
    return terms


def reversed_batch(x):
    """Whom an image is mixed with in mixup and ICT: the batch from its end. MixMatch."""
    return beside(x, torch.arange(everyones(len(x)), device=x.device).flip(0))


XI = 0.1    # ours; VAT: 1e-6, a difference over which is rounding noise in float32. Cosine of the direction with that of
            # float64 (trained WRN-10-2, digits): 0.02 over 1e-6, 0.98 over 0.1, which a GPU's TF32 resolves, too.


def vat(model, x_l, y_l, x_u, *, augment, gen, step, weight, ramp, epsilon, entropy_weight, **_):
    """VAT (Miyato et al. 2018): the prediction stays where it is when the image moves in the worst direction.

    KL(p(x) || p(x + r)) as in VAT's paper; the MixMatch code base has p(x + r) first.
    """
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    x = scale(augment(x_u))
    r = worst_direction(model, x, epsilon, gen)
    with frozen_bn(model):
        logits = predict(model, x)                              # (B, C)
        divergence = kl(logits.detach(), predict(model, x + r))
    terms["vat"] = weight * ramp_up(step, ramp) * divergence
    terms["entropy"] = entropy_weight * entropy(logits)         # no ramp
    return terms


def worst_direction(model, x, epsilon, gen):
    """r of norm epsilon for each image, by one step of the power iteration from a random direction. (B, 3, H, W)"""
    with frozen_bn(model), torch.autocast(x.device.type, enabled=False):        # a small difference is lost in bfloat16
        with torch.no_grad():
            logits = predict(model, x)
        d = mine(torch.randn(whole(len(x)), *x.shape[1:], generator=gen, device=x.device))
        d = (XI * unit(d)).requires_grad_()
        gradient, = torch.autograd.grad(kl(logits, predict(model, x + d)), d)   # into d alone, not into the weights
    return epsilon * unit(gradient)


def unit(d):
    """Each image's d with norm 1. Of sure predictions it is so small that its square would be 0 in float32: hence ldexp."""
    _, exponent = d.flatten(1).abs().amax(1).frexp()
    return F.normalize(torch.ldexp(d.flatten(1), -exponent.clamp_min(-126)[:, None])).view_as(d)


def kl(p_logits, q_logits):
    """KL(p || q), the mean over images."""
    return F.kl_div(q_logits.log_softmax(-1), p_logits.log_softmax(-1), reduction="batchmean", log_target=True)


# ---------------------------------------------------------------- guessed labels


def pseudo_label(model, x_l, y_l, x_u, *, augment, step, weight, ramp, threshold, **_):
    """Pseudo-Label (Lee 2013): cross-entropy with one's own argmax where max p > threshold, the mean over all images."""
    terms = labeled_only(model, x_l, y_l, x_u, augment=augment)
    with frozen_bn(model):
        logits = predict(model, scale(augment(x_u)))            # (B, C)
    p, guess = logits.detach().softmax(-1).max(-1)              # (B,)
    losses = F.cross_entropy(logits, guess, reduction="none") * (p > threshold)
    terms["pseudo"] = weight * ramp_up(step, ramp) * losses.mean()
    return terms


def mixup(model, x_l, y_l, x_u, *, augment, gen, weight, beta, **_):
    """mixup (Zhang et al. 2018), semi-supervised as in MixMatch: unlabelled images carry their own predictions; no ramp."""
    x_l, x_u = scale(augment(x_l)), scale(augment(x_u))
    with torch.no_grad(), frozen_bn(model):
        q = predict(model, x_u).softmax(-1)                     # (B, C)
    y = F.one_hot(y_l, q.shape[1]).float()
    share_l, share_u = mixup_share(len(x_l), beta, gen), mixup_share(len(x_u), beta, gen)
    logits_l = predict(model, blend(share_l, x_l, reversed_batch(x_l)))
    with frozen_bn(model):
        logits_u = predict(model, blend(share_u, x_u, reversed_batch(x_u)))
    return {"class": soft_cross_entropy(logits_l, blend(share_l, y, reversed_batch(y))),
            "mixup": weight * soft_cross_entropy(logits_u, blend(share_u, q, reversed_batch(q)))}


def mixmatch(model, x_l, y_l, x_u, *, augment, gen, step, weight, ramp, beta, temperature, **_):
    """MixMatch (Berthelot et al. 2019): sharpened guesses, then mixup of labelled and unlabelled images alike."""
    x_l, views = scale(augment(x_l)), [scale(augment(x_u)) for _ in range(2)]
    x, p = mixed_batch(x_l, y_l, views, guess(model, views, temperature), mixup_share(3 * len(x_l), beta, gen, sets=3), gen)
    first, *others = interleave(x.split(len(x_l)))              # each of B images, labelled and unlabelled ones
    logits = [predict(model, first)]
    with frozen_bn(model):
        logits += [predict(model, other) for other in others]
    logits_l, *logits_u = interleave(logits)                    # back in order
    p_l, p_u = p[:len(x_l)], p[len(x_l):]                       # (B, C), (2B, C)
    return {"class": soft_cross_entropy(logits_l, p_l),
            "guess": weight * ramp_up(step, ramp) * F.mse_loss(torch.cat(logits_u).softmax(-1), p_u)}


def guess(model, views, temperature):
    """MixMatch's label for an unlabelled image: the sharpened mean prediction over its views, no gradient. (B, C)"""
    with torch.no_grad(), frozen_bn(model):
        return sharpen(torch.stack([predict(model, x).softmax(-1) for x in views]).mean(0), temperature)


def mixed_batch(x_l, y_l, views, q, share, gen):
    """Labelled images, then all views of the unlabelled ones, each mixed with a random other of all of them."""
    x = torch.cat([x_l, *views])                                # (3B, 3, H, W)
    p = torch.cat([F.one_hot(y_l, q.shape[1]).float(), *[q] * len(views)])      # (3B, C)
    partner = torch.randperm(everyones(len(x)), generator=gen, device=x.device)
    return blend(share, x, beside(x, partner, 3)), blend(share, p, beside(p, partner, 3))


def interleave(batches):
    """Swap the i-th part of the first of n batches with the i-th part of the i-th one; done twice, nothing has changed."""
    n, B = len(batches), len(batches[0])
    parts = [list(batch.split([(i + 1) * B // n - i * B // n for i in range(n)])) for batch in batches]
    for i in range(1, n):
        parts[0][i], parts[i][i] = parts[i][i], parts[0][i]
    return [torch.cat(part) for part in parts]


def fixmatch(model, x_l, y_l, x_u, *, augment, gen, weight, threshold, **_):
    """FixMatch (Sohn et al. 2020): the weak view's argmax, where it is sure, is the label of the strong view; no ramp."""
    weak, strong = augment(x_u), strong_augment(augment(x_u), gen)              # (mu B, 3, H, W)
    logits = predict(model, scale(torch.cat([augment(x_l), weak, strong])))
    logits_l, logits_w, logits_s = logits.split([len(x_l), len(x_u), len(x_u)])
    p, label = logits_w.detach().softmax(-1).max(-1)            # (mu B,)
    losses = F.cross_entropy(logits_s, label, reduction="none") * (p >= threshold)
    return {"class": F.cross_entropy(logits_l, y_l), "pseudo": weight * losses.mean()}


def cosine_7_16(progress):
    """FixMatch: cos(7 pi t / 16 T)."""
    return math.cos(7 * math.pi * progress / 16)


# ---------------------------------------------------------------- fast-SWA, on the Pi-Model


def cyclic(progress):
    """fast-SWA (Athiwaratkun et al. 2019): cosine ramp-down; its last cycle before averaging ends is then repeated."""
    first_end = SWA_START + SWA_CYCLE                           # the first cycle belongs to the ramp-down
    if progress >= first_end:
        progress = SWA_START + (progress - first_end) % SWA_CYCLE
    return 0.5 * (1 + math.cos(math.pi * progress / SWA_RAMPDOWN))


def fast_swa(averages, weights, step, steps):
    """The plain mean of the weights at every SWA_EVERY of training from SWA_START on; the weights themselves before."""
    start, every = round(SWA_START * steps), max(1, round(SWA_EVERY * steps))
    n = max(0, step + 1 - start)                                # steps since the start, this one included
    if n % every == 0:
        get_swa_multi_avg_fn()(averages, weights, n // every)   # the mean of n // every + 1 models


def recompute_bn(ema, net, batches):
    """fast-SWA: the averaged weights get statistics of their own, from augmented unlabelled images."""
    update_bn(batches, ema)


# ---------------------------------------------------------------- the experiment

OBJECTIVES = dict(labeled_only=labeled_only, fine_tune=labeled_only, s4l=s4l, pi_model=pi_model, pseudo_label=pseudo_label,
                  mixup=mixup, vat=vat, mean_teacher=mean_teacher, mixmatch=mixmatch, ict=ict, swa=pi_model,
                  fixmatch=fixmatch)

SEVERAL_VIEWS = "pi_model", "mean_teacher", "mixmatch", "swa", "fixmatch"       # of an unlabelled image in one step


def train(method: str | None = None, dataset: str = "digits", labels: int | str | None = None, labels_file: str | None = None,
          weight: float | None = None, pretrained: str | None = None, cycles: bool = True, arch: str | None = None,
          steps: int | None = None, batch: int | None = None, lr: float | None = None, weight_decay: float | None = None,
          flip: bool | None = None, image_size: int | None = None, seed: int = 0, data_dir: str = "data",
          out: str | None = None, device: str | None = None, deterministic: bool = False,
          save_minutes: float = 10.0,                           # ours
          accumulate: int = 1, precision: Literal["bf16", "fp32"] | None = None, compile: bool = False, sync_bn: bool = False,
          crop: Literal["pad", "resized"] | None = None, stream: bool | None = None, workers: int | None = None,
          skip_broken: bool = False, resume: bool = False) -> dict:
    """Flags, each as --name value or --name=value; a true-or-false flag also as --name or --noname.
    What is not given comes from the method's constants in this file and the dataset's preset in presets.py.

    --method        one of
        labeled_only    cross-entropy on the labelled images alone
        fine_tune       rotation prediction, then fine-tuning: two stages (Gidaris et al. 2018, arXiv 1803.07728)
        s4l             class and rotation prediction side by side (Zhai et al. 2019, arXiv 1905.03670)
        pi_model        Pi-Model: two augmentations agree (Laine and Aila 2017, arXiv 1610.02242)
        pseudo_label    Pseudo-Label: sure predictions become labels (Lee 2013, ICML workshop)
        mixup           semi-supervised mixup (Zhang et al. 2018, arXiv 1710.09412)
        vat             virtual adversarial training (Miyato et al. 2018, arXiv 1704.03976)
        mean_teacher    agree with the averaged model (Tarvainen and Valpola 2017, arXiv 1703.01780)
        mixmatch        MixMatch: guess, sharpen, mix (Berthelot et al. 2019, arXiv 1905.02249)
        ict             interpolation consistency (Verma et al. 2019, arXiv 1903.03825)
        swa             fast-SWA: weights of the Pi-Model averaged over cycles (Athiwaratkun et al. 2019, arXiv 1806.05594)
        fixmatch        FixMatch: weak and strong augmentation (Sohn et al. 2020, arXiv 2001.07685)
                    CRAE, its ensembles, and CRAE with entropy minimisation (--entmin) are train_crae.py
    DATA_FLAGS
    --weight        weight of the unlabelled term (of the rotation loss for s4l)
    --pretrained    fine_tune: the folder of another fine_tune run, or its pretrain/model.pt; its first stage is used
    --cycles        swa: cyclic learning rate; on, --nocycles for a constant one
    --arch          wrn-<depth>-<width>, for instance wrn-28-2, or resnet50v2
    --steps         training steps; fine_tune: of each of its two stages
    --batch         labelled images in a step, of all processes together, and as many unlabelled ones (fixmatch: seven
                    times as many)
    --lr            learning rate
    --weight_decay  decoupled weight decay (fixmatch, imagenet: L2), on kernels only
    RUN_FLAGS
    """
    pretrained = pretrained and str(Path(pretrained))           # one spelling
    flags = dict(locals())
    if method not in OBJECTIVES:
        sys.exit((f"--method {method}: must" if method else "--method: needs a value; it must") + " be one of "
                 + ", ".join(OBJECTIVES) + "; CRAE and entropy minimisation on it (--entmin) are train_crae.py")
    per_dataset = dict(cifar100=CIFAR100, svhn=SVHN, svhn_extra=SVHN).get(dataset, CIFAR10)
    constants = per_dataset[method]
    if weight is not None and ("weight" not in constants or not 0 <= weight < math.inf):
        sys.exit(f"--weight {weight}: " + ("must be 0 or more, and finite" if "weight" in constants else
                                           f"{method} has no unlabelled term"))
    if pretrained and method != "fine_tune":
        sys.exit(f"--pretrained {pretrained}: only --method fine_tune has a first stage")
    if not cycles and method != "swa":
        sys.exit("--nocycles: only --method swa has cycles")
    config = training.resolve(train, flags, method, unnamed=("method",), constants=constants)
    config["rot_dim"] = None                                    # CRAE's: one head needs no reduction
    if config["crop"] == "resized" and method in SEVERAL_VIEWS:
        sys.exit(f"--method {method}: needs several views of an image, and --crop resized makes one where the picture is read; "
                 f"{', '.join(m for m in OBJECTIVES if m not in SEVERAL_VIEWS)} can be used")
    steps = config["steps"]
    row = training.check_folder(config, longer=method in ("labeled_only", "s4l", "mixup"))     # no value depends on steps
    if row:
        return row
    in_stage_two = os.path.exists(Path(config["out"], "last.pt"))
    backbone = find_pretrained(pretrained, f"--pretrained {pretrained}", config) if pretrained and not in_stage_two else None
    images, labels, split, classes = training.load_run(config)
    torch.manual_seed(seed)                                     # the initial weights
    net = make_model(config["arch"], len(classes), int(method == "s4l"), aux=False, bn_momentum=config["bn_momentum"])
    if method == "fine_tune" and not in_stage_two:
        net.backbone.load_state_dict(backbone or stage_one(net, images, labels, split, classes, config))
    own = {name: config[name] for name in constants if name not in ("lr", "weight_decay", "ema")}
    objective = partial(OBJECTIVES[method], ramp=ramp_steps(method, steps), **own)
    schedule = cyclic if cycles else training.constant
    loop = dict(labeled_only=dict(mu=0), fine_tune=dict(mu=0),  # what differs from CRAE's loop
                fixmatch=dict(mu=MU, optimizer=partial(training.make_sgd, nesterov=True), schedule=cosine_7_16),
                swa=dict(average=partial(fast_swa, steps=steps), refresh_bn=recompute_bn, schedule=schedule))
    return training.fit(net, objective, images, labels, split, classes, config, **loop.get(method, {}))


def stage_one(net, images, labels, split, classes, config):
    """fine_tune: rotation prediction on all training images, none of whose labels is known; the backbone's weights."""
    with training.hold(config["out"]):
        training.write_config(config, split, training.resolved_values(net, images, split, classes))     # the run has begun
    stage = config | dict(method="rotation", out=str(Path(config["out"], "pretrain")), resume=True, paper=None)
    if not training.check_folder(stage, longer=False):
        others = np.setdiff1d(split["labeled"], split["unlabeled"])             # on ImageNet there are none
        everything = np.concatenate([others, split["unlabeled"]])               # both streams draw from all of them
        parts = dict(labeled=everything, unlabeled=everything, validation=everything[:0], test=everything[:0])
        rotation_net = make_model(config["arch"], len(classes), 1, aux=False, bn_momentum=config["bn_momentum"])
        rotation_net.classifier.requires_grad_(False)           # no part of this stage
        training.fit(rotation_net, rotation, images, torch.full_like(labels, -1), parts, classes, stage)
    return find_pretrained(stage["out"], f"--out {config['out']}: its first stage", config)


def find_pretrained(path, flag, config):
    """The backbone's weights in a run's folder, its pretrain/, or the file itself; `flag` is whom an error names."""
    places = Path(path), Path(path, "pretrain", "model.pt"), Path(path, "model.pt")
    file = next(filter(os.path.isfile, places), None)
    if not file:
        sys.exit(f"{flag}: there is no such file, and no pretrain/model.pt in such a folder")
    try:
        saved = training.read_tensors(file)
        method, arch, seed = saved["method"], saved["arch"], saved["seed"]
        trained_on = f"{saved['dataset']} at {saved['image_size']} pixels"
        weights = {k.removeprefix("backbone."): v for k, v in saved["state"].items() if k.startswith("backbone.")}
        if (method, arch) == ("rotation", config["arch"]):
            make_model(arch, 2, 0).backbone.load_state_dict(weights)
    except Exception as error:                                  # whatever a damaged or foreign file makes torch raise
        sys.exit(f"{flag}: cannot be read as a saved model ({training.cause(error)})")
    if (method, arch) != ("rotation", config["arch"]):
        sys.exit(f"{flag}: has a {arch} of method {method}; needed are the weights of a first stage "
                 f"(<run>/pretrain/model.pt) for {config['arch']}")
    if saved["dataset"] != config["dataset"] or seed != config["seed"]:
        print(f"note: the first stage was trained on {trained_on} with seed {seed}; with another seed it may have seen "
              "this run's validation images, without labels")
    return weights


if __name__ == "__main__":
    training.command_line(train)
