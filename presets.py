"""The paper's table "Experimental details" as plain dicts, one full dict a dataset. A flag given by hand wins over it.

    labels        labelled images that are drawn; None: all of train is labelled
    validation    images taken out of train; a number, or a share of it
    epoch         steps of an epoch
    eval_epochs   epochs between two evaluations, each a row of the log
    bn_momentum   torch's: the share of the new batch in the running statistics
    ema           decay of the averaged weights that are tested; None: no average, the weights themselves
    rot_dim       dimension reduction in front of the rotation heads; None: no reduction
    image_size    None: as the images come
    crop          pad: reflect-pad by an eighth and crop; resized: a random piece of the full picture, scaled to size
    optimizer     adam (with decoupled weight decay) or sgd (momentum 0.9, L2)
    warmup        share of the run in which the learning rate grows from 0
    decay_at      shares of the run after which the learning rate is a tenth of what it was
"""
import os

# Table: Experimental details, with MixMatch's ema and bn_momentum (the paper follows its settings).
cifar10 = dict(labels=250, validation=5000, arch="wrn-28-2", steps=1024 * 1024, epoch=1024, batch=64, lr=0.002,
               weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=True, image_size=None, crop="pad",
               optimizer="adam", warmup=0, decay_at=[], eval_epochs=1)
svhn = dict(labels=250, validation=7325, arch="wrn-28-2", steps=500 * 1024, epoch=1024, batch=64, lr=0.002,
            weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=False, image_size=None, crop="pad",
            optimizer="adam", warmup=0, decay_at=[], eval_epochs=1)
svhn_extra = dict(labels=250, validation=7325, arch="wrn-28-2", steps=500 * 1024, epoch=1024, batch=64, lr=0.002,
                  weight_decay=0.0001, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=False, image_size=None, crop="pad",
                  optimizer="adam", warmup=0, decay_at=[], eval_epochs=1)
cifar100 = dict(labels=10000, validation=5000, arch="wrn-28-8.4375", steps=300 * 1024, epoch=1024, batch=64, lr=0.002,
                weight_decay=0.04, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=True, image_size=None, crop="pad",
                optimizer="adam", warmup=0, decay_at=[], eval_epochs=1)

# ours: Fashion-MNIST is not in the paper. CIFAR-10's values, SVHN's number of steps.
fashion_mnist = dict(labels=250, validation=6000, arch="wrn-28-2", steps=500 * 1024, epoch=1024, batch=64, lr=0.002,
                     weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=True, image_size=None, crop="pad",
                     optimizer="adam", warmup=0, decay_at=[], eval_epochs=1)

# ours: small enough for two CPU cores and three minutes. A short run needs faster averages: with bn_momentum 0.001
# 61 % of the initial running statistics are still there after 500 steps.
digits = dict(labels=100, validation=0.1, arch="wrn-10-2", steps=800, epoch=20, batch=32, lr=0.002,
              weight_decay=0.02, ema=0.98, bn_momentum=0.1, rot_dim=None, flip=False, image_size=None, crop="pad",
              optimizer="adam", warmup=0, decay_at=[], eval_epochs=1)

# ours: a person's own .npz file or folder. CIFAR-10's values, a sixteenth of its steps, and no flip, which is right
# for letters, digits and many medical pictures; --flip for photographs.
own_npz = dict(labels=None, validation=0, arch="wrn-28-2", steps=64 * 1024, epoch=1024, batch=64, lr=0.002,
               weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=False, image_size=None, crop="pad",
               optimizer="adam", warmup=0, decay_at=[], eval_epochs=1)
own_folder = dict(own_npz, image_size=32)

# Table: Experimental details, its two columns for ILSVRC-2012, with S4L's bn_momentum and crops (the paper follows its
# settings). An epoch is floor(labelled / batch) steps, 53 and 503 at the table's batch; warmup and decay_at are the
# table's epochs as shares of the run: 10 of 1000 and 5 of 200; 700, 800, 900 and 140, 160, 180.
# rot_dim: the paper's figure, "not drop even when the dimension is reduced from 2048 to 16".
imagenet_1 = dict(labels="1%", validation=5005, arch="resnet50v2", steps=1000 * 53, epoch=53, batch=256, lr=0.01,
                  weight_decay=0.01, ema=None, bn_momentum=0.01, rot_dim=16, flip=True, image_size=224, crop="resized",
                  optimizer="sgd", warmup=10 / 1000, decay_at=[0.7, 0.8, 0.9],
                  eval_epochs=10)      # ours: 65,000 pictures are read for an evaluation, 27,000 in an epoch
imagenet_10 = dict(labels="10%", validation=50046, arch="resnet50v2", steps=200 * 503, epoch=503, batch=256, lr=0.1,
                   weight_decay=0.001, ema=None, bn_momentum=0.01, rot_dim=16, flip=True, image_size=224, crop="resized",
                   optimizer="sgd", warmup=5 / 200, decay_at=[0.7, 0.8, 0.9],
                   eval_epochs=1)
IMAGENET_LABELED = {"1%": 13762, "10%": 128866}                 # Table: literal counts
IMAGENET_TRAIN = 1_281_167

NAMED = dict(digits=digits, cifar10=cifar10, cifar100=cifar100, svhn=svhn, svhn_extra=svhn_extra,
             fashion_mnist=fashion_mnist, imagenet=imagenet_10)


def for_dataset(dataset, labels=None, batch=None):
    """The preset of a named dataset, or of a path; ImageNet's also depends on the number of labels and on the batch."""
    if dataset == "imagenet":
        return for_imagenet(labels, batch)
    if dataset in NAMED:
        return dict(NAMED[dataset])
    return dict(own_folder if os.path.isdir(dataset) else own_npz)


def for_imagenet(labels, batch):
    """The table's column for 1 % or 10 %, whose epochs are floor(labelled / batch) steps; ours: below 5 % that for 1 %."""
    n = imagenet_labeled(labels or imagenet_10["labels"])
    column = imagenet_1 if n < 0.05 * IMAGENET_TRAIN else imagenet_10
    epoch = max(1, n // (batch or column["batch"]))
    return column | dict(epoch=epoch, steps=column["steps"] // column["epoch"] * epoch)


def imagenet_labeled(labels):
    """A number of labels, or a share of ILSVRC-2012's training images, as a number."""
    if isinstance(labels, int):
        return labels
    return IMAGENET_LABELED.get(labels) or round(float(labels.rstrip("%")) / 100 * IMAGENET_TRAIN)
