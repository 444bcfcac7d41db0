"""The paper's table "Experimental details" as plain dicts, one full dict a dataset. A flag given by hand wins over it.

    labels        labelled images that are drawn; None: all of train is labelled
    validation    images taken out of train; a number, or a share of it
    epoch         steps between two evaluations
    bn_momentum   torch's: the share of the new batch in the running statistics
    ema           decay of the averaged weights that are tested
    rot_dim       dimension reduction in front of the rotation heads; None: no reduction
    image_size    None: as the images come
"""
import os

# Table: Experimental details, with MixMatch's ema and bn_momentum (the paper follows its settings).
cifar10 = dict(labels=250, validation=5000, arch="wrn-28-2", steps=1024 * 1024, epoch=1024, batch=64, lr=0.002,
               weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=True, image_size=None)
svhn = dict(labels=250, validation=7325, arch="wrn-28-2", steps=500 * 1024, epoch=1024, batch=64, lr=0.002,
            weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=False, image_size=None)
svhn_extra = dict(labels=250, validation=7325, arch="wrn-28-2", steps=500 * 1024, epoch=1024, batch=64, lr=0.002,
                  weight_decay=0.0001, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=False, image_size=None)
cifar100 = dict(labels=10000, validation=5000, arch="wrn-28-8.4375", steps=300 * 1024, epoch=1024, batch=64, lr=0.002,
                weight_decay=0.04, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=True, image_size=None)

# ours: Fashion-MNIST is not in the paper. CIFAR-10's values, SVHN's number of steps.
fashion_mnist = dict(labels=250, validation=6000, arch="wrn-28-2", steps=500 * 1024, epoch=1024, batch=64, lr=0.002,
                     weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=True, image_size=None)

# ours: small enough for two CPU cores and three minutes. A short run needs faster averages: with bn_momentum 0.001
# 61 % of the initial running statistics are still there after 500 steps.
digits = dict(labels=100, validation=0.1, arch="wrn-10-2", steps=800, epoch=20, batch=32, lr=0.002,
              weight_decay=0.02, ema=0.98, bn_momentum=0.1, rot_dim=None, flip=False, image_size=None)

# ours: a person's own .npz file or folder. CIFAR-10's values, a sixteenth of its steps, and no flip, which is right
# for letters, digits and many medical pictures; --flip for photographs.
own_npz = dict(labels=None, validation=0, arch="wrn-28-2", steps=64 * 1024, epoch=1024, batch=64, lr=0.002,
               weight_decay=0.02, ema=0.999, bn_momentum=0.001, rot_dim=None, flip=False, image_size=None)
own_folder = dict(own_npz, image_size=32)

NAMED = dict(digits=digits, cifar10=cifar10, cifar100=cifar100, svhn=svhn, svhn_extra=svhn_extra,
             fashion_mnist=fashion_mnist)


def for_dataset(dataset):
    """The preset of a named dataset, or of a path."""
    if dataset in NAMED:
        return dict(NAMED[dataset])
    return dict(own_folder if os.path.isdir(dataset) else own_npz)
