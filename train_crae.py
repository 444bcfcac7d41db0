"""CRAE and CRAE+: semi-supervised learning via conditional rotation angle estimation (Xu, Liu, Gong).

    python train_crae.py                                        CRAE on the embedded digits, minutes on a CPU
    python train_crae.py --dataset cifar10 --labels 250 --plus  CRAE+ as in the paper
    python train_crae.py --dataset my_folder/ --labels 100 --plus --image_size 64       your own images
    python train_crae.py --dataset cifar10 --select detach      one row of the paper's ablation tables
"""
import cli

# The values of --aux; from Python, True and False work too.
AUX = {"upright": "upright", "all": "all", "none": "none", True: "upright", False: "none"}
FLAGS = cli.DATASET_FLAGS | {
    "plus": (bool, False, "CRAE+: both extensions, the same as --ext1 --ext2"),
    "ext1": (bool, False, "extension 1: the target is the mean prediction over the four rotations, "
                          "sharpened"),
    "ext2": (bool, False, "extension 2: rotation of a mixed image, class of the unmixed image"),
    "entmin": (bool, False, "entropy minimisation instead of extension 1 "
                            "(the paper finds extension 1 better)"),
    "select": (("marginal", "random", "independent", "detach"), "marginal",
               "what selects the rotation head: marginal (CRAE), "
               "or the ensembles random, independent, detach"),
    "heads": (int, None, "number of rotation heads for independent and random; 0: no rotation branches "
                         "(default: one per class)"),
    "aux": (AUX, None, "labelled copies that train the additional classifier, which is used at test time: "
                       "upright, all (four rotations) or none (no additional classifier, same as --noaux) "
                       "(default: upright; with --heads 0: none)"),
    "rot_dim": (int, None, "dimension that features are reduced to before the rotation heads; 0: no "
                           "reduction (default: 0; 16 for imagenet)"),
    "rotations": (("four", "one"), "four",
                  "copies of an unlabelled image per step: all four rotations, or one random rotation; "
                  "extension 1 needs four"),
    "detach_rotated": (bool, False, "our addition: the class loss on rotated labelled copies trains the main "
                                    "classifier, but not the features"),
    "mixmatch": (bool, False, "our addition: MixMatch trains the additional classifier on upright images; "
                              "CRAE's rotation loss on unlabelled images trains the same features; with "
                              "--eta, --temperature and --rot_dim, but no other flag for CRAE's losses"),
} | cli.NETWORK_FLAGS | {
    "eta": (float, None, "weight of each of the two rotation losses: the mean over the labelled copies "
                         "and the mean over the unlabelled copies (default: 1; 2 with --recipe fast, but "
                         "not with --mixmatch)"),
    "eta2": (float, 1.0, "weight of the loss of extension 1, or of the entropy"),
    "temperature": (float, 0.5, "T of the sharpening in extension 1 or MixMatch, in (0, 1]"),
    "ext1_ramp": ([float], None, "two fractions of the run between which the weight of extension 1 grows "
                                 "from 0 to eta2, for example 0.3,0.7; 0,0: no ramp (default: the recipe's)"),
} | cli.RUN_FLAGS

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)      # before torch is imported: a mistyped flag is reported at once

import math
from functools import partial

import torch

import augmentation
import budget
import distributed
import losses
import models
import presets
import run_folder
import settings
import train_baselines
import training

# ---------------------------------------------------------------- the method


def crae(model, x_l, y_l, x_u, *, augment, gen, select, eta, aux, copies=("four", "four"), detach=False, **_):
    """Algorithm 1, Eq. 2. copies: of a labelled and of an unlabelled image, as in rotated_batch."""
    B, sizes = len(x_l), augmentation.rotation_sets(len(x_l), len(x_u), *copies)
    x, y, z = augmentation.rotated_batch(x_l, y_l, x_u, augment, gen, *copies)          # Alg. 1, line 2
    class_logits, aux_logits, rot_logits = model(x, (B, len(y)) if detach else None)
    terms = class_terms(class_logits, aux_logits, y, B, aux)    # Alg. 1, line 3; then lines 4, 5
    return terms | rotation_terms(class_logits, rot_logits, y, z, sizes, select, eta, gen)


def crae_plus(model, x_l, y_l, x_u, *, augment, gen, select, eta, eta2, temperature, aux, step=0,
              copies=("four", "four"), detach=False, ramp=(0, 0), ext1=True, ext2=True, entmin=False, **_):
    """Algorithm 2, Eq. 4. Each extension can be left out; entropy minimisation can replace extension 1.

    BN is not specified in the paper. Only the unmixed pass updates the running statistics; the mixed pass
    uses the statistics of its own batch and updates nothing.
    """
    B, sizes = len(x_l), augmentation.rotation_sets(len(x_l), len(x_u), *copies)
    x, y, z = augmentation.rotated_batch(x_l, y_l, x_u, augment, gen, *copies)          # Alg. 2, line 2
    class_logits, aux_logits, rot_logits = model(x, (B, len(y)) if detach else None)
    terms = class_terms(class_logits, aux_logits, y, B, aux)    # Alg. 2, line 3
    logits_u = class_logits[len(y):]                            # (4U, C)
    weight = eta2 * training.ramp_up(step, *ramp)               # the paper has no ramp
    if ext1:
        p_bar = losses.wide(logits_u).softmax(-1).unflatten(0, (4, -1)).mean(0)         # 4 copies: (U, C)
        # Alg. 2, line 4: Eq. 3. The paper does not specify a gradient of the target; we detach it.
        p_hat = losses.sharpen(p_bar, temperature).detach()
        terms["ext1"] = weight * losses.soft_cross_entropy(logits_u, p_hat.repeat(4, 1))        # line 5
    if entmin:
        terms["entropy"] = weight * losses.entropy(logits_u)    # all copies, as in extension 1
    if ext2:
        x_mix = augmentation.mix(x[-sum(sizes):], sizes, gen)   # Alg. 2, line 6
        with models.frozen_bn(model):
            _, _, rot_logits = model(x_mix)                     # p(z|x_mix, y); p(y|x) is the unmixed image's
    return terms | rotation_terms(class_logits, rot_logits, y, z, sizes, select, eta, gen)      # lines 7, 8


def crae_mixmatch(model, x_l, y_l, x_u, *, augment, gen, select, eta, step=0, **constants):
    """Our addition, not in the paper: MixMatch on upright images, then CRAE on one rotated copy per image.

    Mixing keeps MixMatch from memorising the few labelled images. An unmixed loss on them would undo this
    (docs/recipe.md), so labelled copies train p(y|x) and the rotation heads, but not the features. They
    train linear layers only, so every second labelled image suffices. The pass of the rotated copies uses the
    BN statistics of its own batch and updates nothing.
    """
    terms = train_baselines.mixmatch(model, x_l, y_l, x_u, augment=augment, gen=gen, step=step,
                                     predict=aux_logits_of, **constants)
    x_l, y_l = x_l[::2], y_l[::2]
    x, y, z = augmentation.rotated_batch(x_l, y_l, x_u, augment, gen, "one", "one")
    with models.frozen_bn(model):
        class_logits, _, rot_logits = model(x, (0, len(y)), detach_heads=True)
    terms["rotated_class"] = losses.class_loss(class_logits[:len(y)], y)
    return terms | rotation_terms(class_logits, rot_logits, y, z, [len(x_l), len(x_u)], select, eta, gen)


def aux_logits_of(model, x):
    """Logits of the additional classifier, at least in float32. (N, C)"""
    return losses.wide(model(x)[1])


def class_terms(class_logits, aux_logits, y, upright, aux):
    """L_ce(p(y|x_l), y_l) of both classifiers; labelled copies come first, and among them the upright ones.

    The main classifier provides p(y|x) for all rotations, so it learns from all rotated copies. The
    additional classifier is the one that is tested, on upright images; the paper trains it on "the loss
    incurred from the labeled data only". We use upright copies (aux="all" is the other reading), weight 1.
    """
    terms = {"class": losses.class_loss(class_logits[:len(y)], y)}
    if aux_logits is not None:
        n = len(y) if aux == "all" else upright
        terms["aux"] = losses.class_loss(aux_logits[:n], y[:n])
    return terms


def rotation_terms(class_logits, rot_logits, y, z, sizes, select, eta, gen):
    """L_ce(p(z|x), z): the mean over labelled copies (the first ones) and the mean over unlabelled copies.

    Only the last sum(sizes) copies count, see augmentation.rotation_sets.

    select is what chooses the rotation head. marginal: p(y|x), Eq. 1. The other values are the ensemble
    baselines of the ablation. detach: the same without a gradient into p(y|x); random: one random head per
    image and step; independent: every head learns from every image.
    """
    if rot_logits is None:
        return {}
    N, K = sum(sizes), rot_logits.shape[1]
    y = y[len(z) - N:]
    class_logits, rot_logits, z, n = class_logits[-N:], rot_logits[-N:], z[-N:], len(y)
    if select == "independent":
        labeled, unlabeled = losses.independent_rotation_loss(rot_logits, z).tensor_split([n])
    elif select == "random":
        k = distributed.randint(0, K, N, gen=gen, device=z.device, sizes=sizes)
        labeled, unlabeled = losses.labeled_rotation_loss(rot_logits, k, z).tensor_split([n])   # of head k
    else:
        logits_u = class_logits[n:].detach() if select == "detach" else class_logits[n:]
        labeled = losses.labeled_rotation_loss(rot_logits[:n], y, z[:n])        # (4B,)
        unlabeled = losses.unlabeled_rotation_loss(logits_u, rot_logits[n:], z[n:])
    return {"rotation_labeled": eta * labeled.mean(), "rotation_unlabeled": eta * unlabeled.mean()}


def mean_p_z(class_logits, rot_logits):
    """p(z|x) of random and independent ensembles: Eq. 1 with equal weights, the mean of the heads. (N, 4)"""
    return losses.log_p_z(torch.zeros_like(rot_logits[:, :, 0]), rot_logits)


# ---------------------------------------------------------------- the experiment


@cli.strict(FLAGS)
def train(**flags):
    """Train CRAE or CRAE+ and return the final row of the log."""
    config = configure(**flags)
    ramps = config["mixmatch"] or config["ext1_ramp"]           # they depend on the number of steps
    row = run_folder.check_folder(config, longer=not ramps)
    if row:
        return row
    loaded = run_folder.load_data(config)
    if not config["steps"]:
        budget.set_steps(config, [build], loaded)
    net, objective, loop = build(config, len(loaded[-1]))
    return training.fit(net, objective, loaded, config, **loop)


def build(config, num_classes):
    """The network, the objective and the arguments of training.fit."""
    heads, select = config["heads"], config["select"]
    K = num_classes if heads is None else heads
    if select in ("marginal", "detach") and K not in (0, num_classes):
        raise cli.Refused(f"--heads {heads}: --select {select} needs one head for each of the {num_classes} "
                          "classes; omit the flag")
    torch.manual_seed(config["seed"])                           # the initial weights
    net = models.make_model(config["arch"], num_classes, K, config["rot_dim"], config["aux"] != "none",
                            config["bn_momentum"])
    extended = config["ext1"] or config["ext2"] or config["entmin"]
    constants = {name: config[name] for name in ("select", "eta", "aux")}
    constants |= dict(copies=(config["labeled_copies"], config["rotations"]), detach=config["detach_rotated"])
    if extended:
        constants |= {name: config[name] for name in ("eta2", "temperature", "ext1", "ext2", "entmin")}
        constants["ramp"] = [part * config["steps"] for part in config["ext1_ramp"] or (0, 0)]
    if config["mixmatch"]:
        constants = {name: config[name] for name in ("select", "eta", "weight", "beta", "temperature")}
        constants["ramp"] = train_baselines.ramp_steps("mixmatch", config["steps"], config["recipe"])
    method = crae_mixmatch if config["mixmatch"] else crae_plus if extended else crae
    objective = partial(method, **constants)
    p_z = losses.log_p_z if select in ("marginal", "detach") else mean_p_z
    # Without rotation branches, CRAE sees no unlabelled image.
    unlabeled = (config["unlabeled"] or config["batch"]) if K or extended else 0
    return net, objective, dict(p_z=p_z, unlabeled=unlabeled)


@cli.strict(FLAGS)
def configure(**flags):
    """Check the flags and return all values of the run."""
    ext1, ext2, heads = flags["plus"] or flags["ext1"], flags["plus"] or flags["ext2"], flags["heads"]
    for name, remedy in dict(eta="--heads 0 trains without rotation branches",
                             eta2="without --plus, --ext1 and --entmin it is not used").items():
        if flags[name] is not None and not 0 < flags[name] < math.inf:
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
    if heads == 0 and flags["aux"] not in (None, "none"):
        raise cli.Refused(f"--aux {flags['aux']}: --heads 0 tests the classifier that learned from rotated "
                          "images; omit one of the two flags")
    supervised = heads == 0 and not (ext1 or flags["entmin"])
    if supervised and flags["unlabeled"]:
        raise cli.Refused(f"--unlabeled {flags['unlabeled']}: without --ext1 or --entmin, --heads 0 uses no "
                          "unlabelled images; omit the flag")
    if flags["rotations"] == "one" and (ext1 or heads == 0):
        raise cli.Refused("--rotations one: extension 1 averages four rotations, and --heads 0 predicts "
                          "none; omit the flag")
    ramp = flags["ext1_ramp"]
    if ramp and not (len(ramp) == 2 and 0 <= ramp[0] <= ramp[1] <= 1):
        raise cli.Refused(f"--ext1_ramp {','.join(map(str, ramp))}: must be two fractions of the run, "
                          "for example 0.3,0.7")
    if heads == 0 and flags["detach_rotated"]:
        raise cli.Refused("--detach_rotated: --heads 0 tests the main classifier; omit one of the two flags")
    aux = flags["aux"] or ("none" if heads == 0 else "upright")
    method = method_name(ext1, ext2, flags["entmin"], flags["select"], heads, aux)
    method += "_detach_rotated" if flags["detach_rotated"] else "_mixmatch" if flags["mixmatch"] else ""
    named = "plus", "ext1", "ext2", "entmin", "select", "heads", "aux", "detach_rotated", "mixmatch"
    constants = of_mixmatch(flags) if flags["mixmatch"] else {}
    config = settings.resolve(flags, FLAGS, __file__, method, named, constants, supervised)
    if config["crop"] == "resized" and flags["mixmatch"]:
        raise cli.Refused("--mixmatch: needs several views of an image, but --crop resized makes one when it "
                          "reads the file; omit --mixmatch")
    return config | dict(ext1=ext1, ext2=ext2, aux=aux, definition=presets.DEFINITION)


def of_mixmatch(flags):
    """The constants of --mixmatch, which has its own losses: refuses the flags that change those of CRAE."""
    usual = dict(plus=False, ext1=False, ext2=False, entmin=False, select="marginal", heads=None, aux=None,
                 rotations="four", detach_rotated=False, eta2=FLAGS["eta2"][1], ext1_ramp=None)
    for name, value in usual.items():
        if flags[name] != value:
            raise cli.Refused(f"--mixmatch: has losses of its own; omit --{name}")
    return presets.of_baseline("mixmatch", flags["dataset"], flags["recipe"]) | dict(eta=presets.MIXMATCH_ETA)


def method_name(ext1, ext2, entmin, select, heads, aux):
    """As in paper_results.csv: crae, crae_plus, crae_ext1, no_rotation, detach, crae_plus_no_aux, ..."""
    name = "no_rotation" if heads == 0 else "crae" if select == "marginal" else select
    if heads and select in ("random", "independent"):
        name += f"_{heads}"
    name += "_plus" if ext1 and ext2 else "_ext1" if ext1 else "_ext2" if ext2 else ""
    name += "_entmin" if entmin else ""
    return name if heads == 0 else name + dict(upright="", all="_aux_all", none="_no_aux")[aux]


if __name__ == "__main__":
    cli.run(train, ARGUMENTS)
