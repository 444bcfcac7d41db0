"""Two recipes for every dataset as plain dicts, the constants of the methods and the paper's results.

`paper` is the paper's table "Experimental details": 2^20 steps on a GPU. `fast` is for minutes on a CPU, and
is not in the paper (docs/recipe.md). A flag on the command line overrides a preset. The keys are:

    labels          number of labelled images to draw; None: the whole training set is labelled
    validation      images held out of the training set: a number, or a fraction of it
    epoch           steps per epoch; None: a tenth of the run
    eval_epochs     epochs between two evaluations; each evaluation writes one row of log.csv
    quick_eval      evaluate on a sample of the images, except at the last step
    unlabeled       unlabelled images per step; None: as many as labelled ones (FixMatch: seven times)
    labeled_copies  four: all rotations of a labelled image; two: upright, and one random rotation
    eta             CRAE: weight of each of the two rotation losses
    ext1_ramp       part of the run over which the weight of extension 1 grows from 0; None: no ramp
    bn_momentum     torch's convention: the weight of the new batch in the running statistics
    ema             decay of the averaged weights that are tested; None: the weights themselves are tested
    ema_horizon     instead of ema: the number of averaged steps as a fraction of the run, with warm-up
    rot_dim         dimension that features are reduced to before the rotation heads; None: no reduction
    image_size      None: keep the size of the images
    crop            pad: reflect-pad by an eighth, then crop; resized: resize a random crop of the file
    optimizer       adam (decoupled weight decay) or sgd (momentum 0.9, L2)
    beta2           the second decay rate of Adam
    schedule        steps_down (warmup and decay_at) or triangle: up, then down to zero
    warmup          fraction of the run over which the learning rate grows linearly
    decay_at        fractions of the run after which the learning rate is divided by 10
    cpu_precision   bf16: on CPUs that support it; fp32. GPUs use bf16
"""
import csv
import os
from pathlib import Path

# Table "Experimental details"; EMA and bn_momentum are MixMatch's, whose settings the paper follows.
cifar10 = dict(labels=250, validation=5000, arch="wrn-28-2", steps=1024 * 1024, epoch=1024, batch=64,
               lr=0.002, weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=True,
               image_size=None, crop="pad", optimizer="adam", warmup=0, decay_at=[], eval_epochs=1,
               unlabeled=None, labeled_copies="four", eta=1.0, ext1_ramp=None, ema_horizon=None,
               beta2=0.999, schedule="steps_down", cpu_precision="fp32", quick_eval=False)
svhn = cifar10 | dict(validation=7325, steps=500 * 1024, flip=False)
svhn_extra = svhn | dict(weight_decay=0.0001)
cifar100 = cifar10 | dict(labels=10000, arch="wrn-28-8.4375", steps=300 * 1024, weight_decay=0.04)

# Not in the paper; we use CIFAR-10's values and SVHN's number of steps.
fashion_mnist = cifar10 | dict(validation=6000, steps=500 * 1024)

# Not in the paper; we chose values for a few minutes on two CPU cores. A short run needs faster averages:
# with bn_momentum 0.001, 61 % of the initial running statistics would remain after 500 steps.
digits = cifar10 | dict(labels=100, validation=0.1, arch="wrn-10-2", steps=800, epoch=20, batch=32, ema=0.98,
                        bn_momentum=0.1, flip=False)

# A user's own .npz file or folder. Not in the paper; we use CIFAR-10's values and a sixteenth of its steps.
# Flips are off, which is right for letters, digits and many medical images; --flip suits photographs.
own_npz = cifar10 | dict(labels=None, validation=0, steps=64 * 1024, flip=False)
own_folder = own_npz | dict(image_size=32)

# Table "Experimental details", the two columns of ILSVRC-2012; bn_momentum and crops are S4L's, whose
# settings the paper follows. An epoch is floor(labelled / batch) steps: 53 and 503 for the table's batch.
# warmup and decay_at are the table's epochs as fractions of the run: 10 of 1000 and 5 of 200; 700, 800, 900
# of 1000 and 140, 160, 180 of 200.
# rot_dim: from the paper's figure, "not drop even when the dimension is reduced from 2048 to 16".
imagenet_1 = cifar10 | dict(
    labels="1%", validation=5005, arch="resnet50v2", steps=1000 * 53, epoch=53, batch=256, lr=0.01,
    weight_decay=0.01, ema=None, bn_momentum=0.01, rot_dim=16, image_size=224, crop="resized",
    optimizer="sgd", warmup=10 / 1000, decay_at=[0.7, 0.8, 0.9],
    eval_epochs=10)                     # we chose 10: an evaluation reads 65,000 images, an epoch 27,000
imagenet_10 = imagenet_1 | dict(labels="10%", validation=50046, steps=200 * 503, epoch=503, lr=0.1,
                                weight_decay=0.001, warmup=5 / 200, eval_epochs=1)
IMAGENET_LABELED = {"1%": 13762, "10%": 128866}                 # the table's literal counts
IMAGENET_TRAIN = 1_281_167

NAMED = dict(digits=digits, cifar10=cifar10, cifar100=cifar100, svhn=svhn, svhn_extra=svhn_extra,
             fashion_mnist=fashion_mnist, imagenet=imagenet_10)
# Known without loading the data: number of classes, and pixels per side.
NUM_CLASSES = dict.fromkeys(NAMED, 10) | dict(cifar100=100, imagenet=1000)
IMAGE_SIZE = dict.fromkeys(NAMED, 32) | dict(digits=8, fashion_mnist=28, imagenet=224)


# The fast recipe: what it replaces in the dicts above. Chosen on validation images (docs/recipe.md); the
# style of the network and of the learning rate is airbench's.
fast = dict(arch="fast-32-128-128", steps=2000, epoch=None, batch=64, unlabeled=48, labeled_copies="two",
            eta=2.0, ext1_ramp=[0.3, 0.7], image_size=26, lr=0.003, beta2=0.99, weight_decay=0.02,
            optimizer="adam", schedule="triangle", warmup=0.2, ema=None, ema_horizon=0.01, bn_momentum=0.1,
            cpu_precision="bf16", quick_eval=True)
# Digits have 8 pixels; enlarged, they keep more of their shape when FastNet pools. 600 steps are a minute.
FAST_FOR = dict(digits=dict(image_size=16, steps=600), fashion_mnist=dict(image_size=20))
FAST_BY_DEFAULT = "digits", "fashion_mnist"                     # and users' own data


def default_recipe(dataset):
    return "paper" if dataset in NAMED and dataset not in FAST_BY_DEFAULT else "fast"


def for_dataset(dataset, labels=None, batch=None, recipe=None):
    """The preset of a named dataset or of a path; ImageNet's also depends on the labels and the batch."""
    if dataset == "imagenet":
        return for_imagenet(labels, batch)
    if dataset in NAMED:
        preset = dict(NAMED[dataset])
    else:
        preset = dict(own_folder if os.path.isdir(dataset) else own_npz)
    if (recipe or default_recipe(dataset)) == "fast":
        own = {} if dataset in NAMED else dict(image_size=preset["image_size"])
        preset |= fast | own | FAST_FOR.get(dataset, {})
    return preset


def for_imagenet(labels, batch):
    """The table's column for 1 % or 10 %; below 5 % of the labels we use the column for 1 %."""
    n = imagenet_labeled(labels or imagenet_10["labels"])
    column = imagenet_1 if n < 0.05 * IMAGENET_TRAIN else imagenet_10
    epoch = max(1, n // (batch or column["batch"]))
    return column | dict(epoch=epoch, steps=column["steps"] // column["epoch"] * epoch)


def imagenet_labeled(labels):
    """The number of labelled images: `labels` itself, or that percentage of ILSVRC-2012's training images."""
    if isinstance(labels, int):
        return labels
    return IMAGENET_LABELED.get(labels) or round(float(labels.rstrip("%")) / 100 * IMAGENET_TRAIN)


# ---------------------------------------------------------------- constants of the methods

# A run with another definition cannot be resumed. 1: additional classifier on all copies, one mean over all
# rotation losses. 2: additional classifier on upright copies, one mean per set (docs/deviations.md).
DEFINITION = 2

# `weight` is the weight of the unlabelled term. The rest (lr, batch, ema, ...) is in the dataset's preset.

# From the runs of the MixMatch code base on CIFAR-10, unless another source is named. Also used for CIFAR-100
# and, because no source has constants for them, for all other datasets.
BASELINES = dict(
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
    swa=dict(weight=20.0, weight_decay=0.02, ema=None),         # we use the Pi-Model's; the average is no EMA
    fixmatch=dict(weight=1.0, threshold=0.95, lr=0.03, weight_decay=5e-4),      # FixMatch
)
BASELINES_CIFAR100 = BASELINES | dict(
    mixmatch=dict(BASELINES["mixmatch"], weight=150.0),         # MixMatch
    fixmatch=dict(BASELINES["fixmatch"], weight_decay=1e-3),    # FixMatch
)
BASELINES_SVHN = BASELINES | dict(                              # the MixMatch code base on SVHN
    pi_model=dict(weight=5.0, weight_decay=0.2),
    pseudo_label=dict(weight=2.0, threshold=0.95),
    mixup=dict(weight=1.0, beta=0.25),
    mean_teacher=dict(weight=150.0, weight_decay=0.02),
    mixmatch=dict(BASELINES["mixmatch"], weight=250.0),
    ict=dict(weight=20.0, beta=0.5),
    swa=dict(weight=5.0, weight_decay=0.2, ema=None),           # we use the Pi-Model's
)
BASELINES_SVHN_EXTRA = BASELINES_SVHN | dict(                   # the MixMatch code base, runs/table7.sh
    pseudo_label=dict(BASELINES_SVHN["pseudo_label"], weight_decay=0.02),
    mixup=dict(BASELINES_SVHN["mixup"], weight_decay=0.02),
    mean_teacher=dict(weight=180.0, weight_decay=0.02),
    mixmatch=dict(BASELINES_SVHN["mixmatch"], beta=0.25, weight_decay=0.02),
    ict=dict(BASELINES_SVHN["ict"], weight_decay=0.02),
)


# With the fast recipe, a method has only the constants of its loss. The others are those of BASELINES.
BASELINES_FAST = {method: {k: v for k, v in constants.items() if k not in ("lr", "weight_decay", "ema")}
                  for method, constants in BASELINES.items()}
# Chosen on validation images, among four values each (docs/recipe.md).
BASELINES_FAST["s4l"] = dict(weight=2.0)
BASELINES_FAST["mixmatch"] |= dict(weight=30.0)
BASELINES_FAST["mean_teacher"] |= dict(weight=30.0)
BASELINES_FAST["fixmatch"] |= dict(weight=3.0)
BASELINES_FAST["pi_model"] |= dict(weight=10.0)
BASELINES_FAST["pseudo_label"] |= dict(weight=10.0)
BASELINES_FAST["mixup"] |= dict(weight=0.3)
BASELINES_FAST["vat"] |= dict(weight=0.1)
BASELINES_FAST["ict"] |= dict(weight=300.0)
BASELINES_FAST["swa"] |= dict(weight=30.0)

# train_crae.py --mixmatch, our addition: its eta, also chosen on validation images. MixMatch's constants are
# those above.
MIXMATCH_ETA = 1.0


def of_baseline(method, dataset, recipe):
    """The constants of a baseline; what they do not contain comes from the preset of the dataset."""
    own = dict(cifar100=BASELINES_CIFAR100, svhn=BASELINES_SVHN, svhn_extra=BASELINES_SVHN_EXTRA)
    if (recipe or default_recipe(dataset)) == "fast":
        return BASELINES_FAST[method]
    return own.get(dataset, BASELINES)[method]


# ---------------------------------------------------------------- the paper's results


def paper_numbers():
    """All numbers from the paper's tables, one dict per row of paper_results.csv."""
    with Path(__file__).with_name("paper_results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def paper_error(dataset, labels, method):
    """The paper's test error as text, with the source if the paper quotes it; None if the paper has none."""
    for row in paper_numbers():
        value = dict(error=float(row["value"]), top1_accuracy=100 - float(row["value"])).get(row["metric"])
        same = (row["dataset"], row["labels"], row["method"]) == (dataset, str(labels), method)
        if same and value is not None:
            quoted = f", {row['source']}" if row["source"].startswith("quoted") else ""
            return f"{value:.2f} %{quoted}"
