"""Load, split, batches. All images of a run are one uint8 tensor on the device; a subset is an index into it.

    images, labels, parts, classes = load("digits", "data")     # (M, 3, H, W) uint8, (M,) int64
    split = make_split(labels, parts, n_labels=100, validation=0.1, seed=0)     # labeled, unlabeled, ...
    index = {name: torch.as_tensor(part) for name, part in split.items()}
    for x_l, y_l, x_u in training_batches(images, labels, index, 64, 64, range(100), 0, 0, 1, 1): ...

A label of -1 means unknown. If the images do not fit into memory, they stay on disk, and `images` is a
folders.Files.
"""
import functools
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torchvision import datasets
from torchvision.transforms.v2 import functional as TF

import cli
import distributed
import folders
import listing
import presets
import tables

# ---------------------------------------------------------------- load


def load(dataset, data_dir, image_size=None, skip_broken=False, labels_file=None, **reading):
    """Load a named dataset, an .npz file or a folder. Returns

    images: (M, 3, H, W) uint8, channels last in memory, or a folders.Files,
    labels: (M,) int64, -1 if unknown,
    parts: index arrays into the M images: train and, if present, test, validation, unlabeled and labeled,
    classes: the class names, in the order of the labels.

    reading: how the images of a folder are read (the keyword arguments of folders.load_folder).
    """
    if dataset == "imagenet" or dataset not in presets.NAMED and os.path.isdir(dataset):
        root = folders.imagenet_folder(data_dir) if dataset == "imagenet" else Path(dataset)
        images, pieces, classes = folders.load_folder(root, image_size, skip_broken, labels_file=labels_file,
                                                      **reading)
        check_pieces(pieces, classes, root)
    else:
        refuse_folder_flags(dataset, labels_file, **reading)
        pieces, classes = load_arrays(dataset, data_dir)
        check_pieces(pieces, classes, dataset)
        images = join_images(pieces, image_size, dataset)
        sizes = {f"{PREFIXES[part]}_images": len(x) for part, (x, _) in pieces.items()}
        images.sizes = sizes                                    # for the names in split.csv
    labels, parts = join_labels(pieces)
    if labels_file and not tables.is_table(labels_file):
        parts["labeled"] = tables.find_listed(labels_file, pieces["train"][0])      # train comes first
    found = len(parts["train"])
    if dataset == "imagenet" and found != presets.IMAGENET_TRAIN:
        print(f"note: {found:,} training images in {root}, but ILSVRC-2012 has {presets.IMAGENET_TRAIN:,}")
    return images, labels, parts, classes


def refuse_folder_flags(dataset, labels_file=None, stream=None, crop="pad", **others):
    """Refuse flags that only apply to image files."""
    given = {f"--labels_file {labels_file}": labels_file, "--stream": stream,
             "--crop resized": crop == "resized"}
    for flag, value in given.items():
        if value:
            raise cli.Refused(f"{flag}: only applies to image folders and imagenet, not to "
                              f"--dataset {dataset}; omit it")


def load_arrays(dataset, data_dir):
    """The pieces {part: (images, labels)} and classes of a named dataset or an .npz file."""
    names = ", ".join(presets.NAMED)
    if dataset in presets.NAMED:
        return load_named(dataset, data_dir)
    if not os.path.exists(dataset):
        raise cli.Refused(f"--dataset {dataset}: no such file or folder; the named datasets are {names}")
    if not dataset.endswith(".npz"):
        raise cli.Refused(f"--dataset {dataset}: must be a folder, an .npz file or one of {names}")
    return load_npz(dataset)


def check_pieces(pieces, classes, dataset):
    """Every part must contain images, and the training part images of every class."""
    for part, (x, _) in pieces.items():
        if len(x) == 0:
            raise cli.Refused(f"--dataset {dataset}: part '{part}' contains no images; add some or remove it")
    if len(classes) < 2:
        raise cli.Refused(f"--dataset {dataset}: only one class ({classes[0]}); at least two are required")
    missing = set(range(len(classes))) - set(np.unique(pieces["train"][1]).tolist())
    if missing:
        raise cli.Refused(f"--dataset {dataset}: class {classes[min(missing)]} has no training images; "
                          "add some or remove the class")


def join_labels(pieces):
    """The labels of all pieces (M,), and for each part, which of the M images belong to it."""
    ends = np.cumsum([len(x) for x, _ in pieces.values()])
    parts = {part: np.arange(end - len(x), end) for (part, (x, _)), end in zip(pieces.items(), ends)}
    return torch.cat([torch.as_tensor(y, dtype=torch.int64) for _, y in pieces.values()]), parts


def join_images(pieces, image_size, dataset):
    """The images of all pieces. (M, 3, H, W)"""
    images = [to_square_rgb(x, image_size, dataset) for x, _ in pieces.values()]
    if len({x.shape[1:] for x in images}) > 1:
        raise cli.Refused(f"--dataset {dataset}: the parts have images of different sizes; give --image_size")
    return torch.cat(images).permute(0, 3, 1, 2)


def to_square_rgb(x, image_size, dataset):
    """Images (n, H, W), (n, H, W, 1) or (n, H, W, 3) as (n, S, S, 3); grey becomes three equal channels."""
    x = torch.as_tensor(x)
    x = x.unsqueeze(-1) if x.ndim == 3 else x                   # (n, H, W, 1 or 3)
    if image_size and x.shape[1:3] != (image_size, image_size):
        x = TF.resize(x.permute(0, 3, 1, 2), image_size, antialias=True)        # the shorter side
        x = TF.center_crop(x, image_size).permute(0, 2, 3, 1)
    height, width = x.shape[1:3]
    if height != width:
        raise cli.Refused(f"--dataset {dataset}: images of {height} x {width} pixels are not square, which "
                          "rotation by 90 degrees requires; give --image_size")
    if height < folders.SMALLEST:
        raise cli.Refused(f"--dataset {dataset}: images of {height} x {width} pixels are too small; "
                          f"give --image_size {folders.SMALLEST} or more")
    return x.expand(-1, -1, -1, 3).contiguous()


# ---------------------------------------------------------------- named datasets


def load_named(dataset, data_dir):
    """The pieces and classes of a dataset that scikit-learn contains or torchvision downloads.

    A file <data_dir>/<dataset>.npz, with the keys of your own data, replaces the download.
    """
    if dataset == "digits":
        return load_digits()
    if os.path.exists(Path(data_dir, f"{dataset}.npz")):
        return load_named_npz(dataset, Path(data_dir, f"{dataset}.npz"))
    if dataset.startswith("svhn"):
        return load_svhn(dataset, data_dir)
    if dataset == "fashion_mnist":
        kind = datasets.FashionMNIST
        urls = [kind.mirrors[0] + file for file, _ in kind.resources]
        folder = Path(data_dir, kind.__name__, "raw")
    else:
        kind = datasets.CIFAR10 if dataset == "cifar10" else datasets.CIFAR100
        urls, folder = [kind.url], data_dir
    train, test = (fetch(kind, data_dir, urls, folder, train=t) for t in (True, False))
    return {"train": (train.data, train.targets), "test": (test.data, test.targets)}, train.classes


# In the order of their numbers; torchvision reads these names from the downloaded files.
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def load_named_npz(dataset, path):
    """The pieces and classes of a named dataset in an .npz file, whose labels are the class numbers."""
    pieces, found = load_npz(str(path))
    numbers = [str(k) for k in range(presets.NUM_CLASSES[dataset])]
    if found != numbers:
        raise cli.Refused(f"--data_dir {path.parent}: the labels in {path.name} must be 0 to {numbers[-1]}, "
                          f"as in {dataset}; correct or remove the file")
    with np.load(path) as arrays:
        has_validation = "val_images" in arrays.files
    if has_validation:
        raise cli.Refused(f"--data_dir {path.parent}: {path.name} contains val_images, but the validation "
                          f"images of {dataset} are drawn from its training images; remove them")
    needed = {"test"} | ({"unlabeled"} if dataset == "svhn_extra" else set())
    if needed - pieces.keys():
        missing = " and ".join(f"{part}_images" for part in sorted(needed - pieces.keys()))
        raise cli.Refused(f"--data_dir {path.parent}: {path.name} contains no {missing}; "
                          "add them, or remove the file")
    names = dict(cifar10=CIFAR10_CLASSES, fashion_mnist=datasets.FashionMNIST.classes)
    return pieces, names.get(dataset, numbers)


def load_digits():
    """scikit-learn's 1,797 digits of 8 x 8 pixels, ordered by writer. We use the last 500 as the test set.

    Its file is read directly, because importing scikit-learn takes a third as long as importing torch does.
    """
    package = Path(find_spec("sklearn").origin).parent
    rows = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")   # (1797, 64 + 1)
    images = np.round(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)     # pixels are 0 to 16
    labels = rows[:, -1].astype(np.int64)
    train, test = slice(None, -500), slice(-500, None)
    pieces = {"train": (images[train], labels[train]), "test": (images[test], labels[test])}
    return pieces, [str(i) for i in range(10)]


def load_svhn(dataset, data_dir):
    """SVHN. In svhn_extra, its extra images are unlabelled; their labels are only used for metrics."""
    names = {"train": "train", "test": "test"} | ({"unlabeled": "extra"} if dataset == "svhn_extra" else {})
    urls = [datasets.SVHN.split_list[name][0] for name in names.values()]
    pieces = {}
    for part, name in names.items():
        svhn = fetch(datasets.SVHN, data_dir, urls, data_dir, split=name)
        pieces[part] = svhn.data.transpose(0, 2, 3, 1), svhn.labels
    return pieces, [str(i) for i in range(10)]


def fetch(kind, data_dir, urls, folder, **which):
    """A torchvision dataset. torchvision downloads it if necessary and verifies its checksum."""
    try:
        with folders.one_at_a_time(data_dir):
            return kind(data_dir, download=True, **which)
    except (OSError, RuntimeError, ValueError, EOFError) as error:      # no network, full disk, damaged files
        raise cli.Refused(f"--data_dir {data_dir}: {kind.__name__} is missing or damaged and cannot be "
                          f"downloaded ({cli.reason(error)}); "
                          f"download {' '.join(urls)} by hand into {folder}")


# ---------------------------------------------------------------- .npz files

# The key names are MedMNIST's; we added unlabeled.
PREFIXES = {"train": "train", "test": "test", "validation": "val", "unlabeled": "unlabeled"}


def load_npz(path):
    """The pieces and classes of an .npz file with the keys of MedMNIST.

    Keys: {train,test}_{images,labels}; optional: val_images and val_labels, unlabeled_images.
    """
    arrays = read_npz(path)
    pieces = {part: (arrays[f"{prefix}_images"], arrays.get(f"{prefix}_labels"))
              for part, prefix in PREFIXES.items() if f"{prefix}_images" in arrays}
    for part, (x, y) in pieces.items():
        check_images(path, PREFIXES[part], x)
        check_labels(path, PREFIXES[part], y, len(x))
    classes = np.unique(pieces["train"][1])
    pieces = {part: (x, class_numbers(path, part, y, classes, len(x))) for part, (x, y) in pieces.items()}
    listing.val_as_test(pieces)
    return pieces, [str(c) for c in classes]


def read_npz(path):
    """All arrays of the file; those of the training part must be present."""
    try:
        with np.load(path, allow_pickle=False) as file:         # never run code from the file
            arrays = {key: file[key] for key in file.files}
    except Exception as error:                                  # numpy raises many types for damaged files
        raise cli.Refused(f"--dataset {path}: cannot be read as an .npz file of plain arrays "
                          f"({cli.reason(error)}); write it with numpy.savez")
    if "train_images" not in arrays or "train_labels" not in arrays:
        raise cli.Refused(f"--dataset {path}: must contain train_images and train_labels (and should contain "
                          f"test_images and test_labels); found {', '.join(arrays) or 'no arrays'}")
    return arrays


def check_images(path, prefix, x):
    if x.dtype != np.uint8 or x.size == 0 or not (x.ndim == 3 or x.ndim == 4 and x.shape[-1] in (1, 3)):
        raise cli.Refused(f"--dataset {path}: {prefix}_images must be uint8 with shape (n, height, width) or "
                          f"(n, height, width, 1 or 3); got {x.dtype} {x.shape}")


def check_labels(path, prefix, y, n):
    if y is None and prefix != "unlabeled":
        raise cli.Refused(f"--dataset {path}: contains {prefix}_images but no {prefix}_labels; add them")
    if y is not None and y.shape not in ((n,), (n, 1)):
        raise cli.Refused(f"--dataset {path}: {prefix}_labels must contain one label for each of the {n} "
                          f"images; got shape {y.shape}")
    if y is not None and y.dtype.kind not in "iuU":
        raise cli.Refused(f"--dataset {path}: {prefix}_labels must be integers or strings; got {y.dtype}")


def class_numbers(path, part, y, classes, n):
    """The position of each label in `classes`; -1 for unlabelled images of unknown class. (n,)"""
    if y is None:
        return np.full(n, -1)
    y = y.reshape(-1)
    if part == "train" and y.dtype.kind == "i" and y.min() < 0:
        raise cli.Refused(f"--dataset {path}: train_labels contains {y.min()}; put images without a label "
                          "into unlabeled_images")
    unknown = np.setdiff1d(y, classes)
    if len(unknown) and part != "unlabeled":
        raise cli.Refused(f"--dataset {path}: {PREFIXES[part]}_labels contains label {unknown[0]}, which is "
                          "not in train_labels; correct the labels")
    return np.where(np.isin(y, classes), np.searchsorted(classes, y), -1)


# ---------------------------------------------------------------- split


def make_split(labels, parts, n_labels, validation, seed, s4l=False):
    """labeled, unlabeled, validation and test as index arrays; the split depends only on the seed.

    MixMatch's protocol: labelled images follow the class distribution. Neither they nor the validation images
    are among the unlabelled images.
    n_labels: a number, a percentage of the training images such as "10%", or None: all are labelled.
    parts["labeled"]: if present, these are the labelled images, and none are drawn.
    s4l: S4L's protocol for ImageNet: draw regardless of class; the unlabelled images are all training images.
    """
    labels = labels.numpy()
    num_classes = len(np.unique(labels[parts["train"]]))
    train, test = split_off_test(labels, parts)
    extra = parts.get("unlabeled", np.arange(0))
    listed = np.intersect1d(parts["labeled"], train) if "labeled" in parts else None    # without test images
    n_labels = count_labels(n_labels, len(train), listed)
    if n_labels is None:
        if not len(extra):
            raise cli.Refused("--labels: all training images are labelled and there are no unlabelled ones; "
                              "give --labels N to use only N labels, or add images without labels "
                              "(unlabeled/ or unlabeled_images)")
        held_out = parts.get("validation", np.arange(0))
        return dict(labeled=train, unlabeled=extra, validation=held_out, test=test)
    if n_labels < num_classes:
        raise cli.Refused(f"--labels {n_labels}: too few for {num_classes} classes; "
                          f"give {num_classes} or more")

    rng = np.random.default_rng([seed, distributed.STREAMS["split"]])
    held_out, rest = split_off_validation(labels, parts, train, listed, validation, rng, s4l)
    most = len(rest) - (0 if len(extra) else 1)                 # leave at least one unlabelled image
    if n_labels > most:
        raise cli.Refused(f"--labels {n_labels}: too many for {len(train)} training images, "
                          f"{len(train) - len(rest)} of which are for validation; give at most {most}")
    if listed is None:
        labeled, rest = sample(labels, rest, n_labels, rng, at_least=1, uniform=s4l)
    else:
        labeled, rest = listed, np.setdiff1d(rest, listed)
    if len(np.unique(labels[labeled])) < num_classes and not s4l:
        raise cli.Refused(f"--labels {n_labels}: at least one class has no labelled image; give more labels, "
                          "or list images of every class in --labels_file")
    unlabeled = np.concatenate([train if s4l else rest, extra])
    return dict(labeled=labeled, unlabeled=unlabeled, validation=held_out, test=test)


def split_off_test(labels, parts):
    """The training and test images. If there is no test part, we hold out 10%, the same for every seed."""
    train = parts["train"]
    if "test" in parts:
        return train, parts["test"]
    test, rest = sample(labels, train, max(1, round(0.1 * len(train))), np.random.default_rng(0))
    print(f"no test part: {len(test)} of {len(train)} training images (10%) are held out as the test set")
    return rest, test


def split_off_validation(labels, parts, train, listed, validation, rng, s4l):
    """The validation images and the remaining training images. Listed images are not used for validation."""
    if "validation" in parts:
        return parts["validation"], train
    n = round(validation * len(train)) if isinstance(validation, float) else validation
    pool = train if listed is None else np.setdiff1d(train, listed)
    held_out, rest = sample(labels, pool, min(n, len(train)), rng, uniform=s4l)
    return held_out, rest if listed is None else np.union1d(rest, listed)


def count_labels(n_labels, n_train, listed):
    """The number of labelled images; None: all."""
    if listed is not None:
        return len(listed)
    if isinstance(n_labels, str):                               # a percentage such as "10%"
        return round(float(n_labels.rstrip("%")) / 100 * n_train)
    return n_labels


def sample(labels, pool, n, rng, at_least=0, uniform=False):
    """Draw n images from pool, in proportion to its classes unless `uniform`. Returns them and the rest."""
    if uniform:
        drawn = rng.permutation(pool)[:n]
    else:
        classes, counts = np.unique(labels[pool], return_counts=True)
        shares = apportion(counts, n, at_least)
        drawn = [rng.permutation(pool[labels[pool] == c])[:k] for c, k in zip(classes, shares)]
        drawn = np.concatenate(drawn)
    return np.sort(drawn), np.setdiff1d(pool, drawn)


def apportion(counts, n, at_least=0):
    """Divide n in proportion to counts by the largest remainder method; every share is at least at_least."""
    quota = n * counts / counts.sum()
    shares = np.maximum(np.floor(quota).astype(np.int64), at_least)
    while shares.sum() < n:
        shares[np.argmax(quota - shares)] += 1
    while shares.sum() > n:
        shares[np.argmax(np.where(shares > at_least, shares - quota, -np.inf))] -= 1
    return shares


# ---------------------------------------------------------------- batches


# The cache holds this and the next epoch of both streams; small datasets have several epochs per batch.
@functools.lru_cache(maxsize=16)
def permutation(n, seed, stream, epoch):
    """The order of n images in one epoch of a stream. (n,)"""
    gen = torch.Generator().manual_seed(distributed.seed_of(seed, stream, epoch))
    return torch.randperm(n, generator=gen)


def batch_indices(index, batch, step, seed, stream):
    """Batch number `step` of an endless stream in which every epoch is a new permutation. (batch,)"""
    n = len(index)
    place = torch.arange(step * batch, (step + 1) * batch)      # places in the endless stream
    epochs = range(step * batch // n, ((step + 1) * batch - 1) // n + 1)        # the epochs they lie in
    order = [permutation(n, seed, stream, epoch)[place[place // n == epoch] % n] for epoch in epochs]
    order = torch.cat([place[:0], *order])                      # place[:0]: a batch of 0 has no epochs
    return index[order.to(index.device, non_blocking=True)]


def plan_batches(index, batch, unlabeled, steps, seed, rank, world, parts):
    """Yield step, i_l, i_u and their places in the whole batch, per step and part of this process's share."""
    for step in steps:
        i_l = batch_indices(index["labeled"], batch, step, seed, "labeled")
        i_u = batch_indices(index["unlabeled"], unlabeled, step, seed, "unlabeled")
        place_l, place_u = torch.arange(len(i_l) + len(i_u)).split([len(i_l), len(i_u)])
        for share in range(rank * parts, (rank + 1) * parts):
            yield step, *(i.tensor_split(world * parts)[share] for i in (i_l, i_u, place_l, place_u))


def training_batches(images, labels, index, batch, unlabeled, steps, seed, rank, world, parts):
    """Yield x_l, y_l, x_u for every step and part of this process's share, on the device of `labels`.

    batch and unlabeled: the numbers of labelled and unlabelled images per step, over all processes and parts.
    """
    plan = functools.partial(plan_batches, index, batch, unlabeled, steps, seed, rank, world, parts)
    if isinstance(images, torch.Tensor):
        for _, i_l, i_u, *_ in plan():
            yield images[i_l], labels[i_l], images[i_u]
        return
    items = ([(int(i), distributed.seed_of(seed, "crops", step, int(place)))
              for i, place in zip(torch.cat([i_l, i_u]), torch.cat([place_l, place_u]))]
             for step, i_l, i_u, place_l, place_u in plan())
    for x, (_, i_l, *_) in zip(images.batches(items, labels.device), plan()):
        yield x[:len(i_l)], labels[i_l.to(labels.device, non_blocking=True)], x[len(i_l):]


def test_batches(images, index, size, device):
    """The images of an index as at test time: pairs of x (n, 3, S, S), n <= size, and their indices."""
    chunks = [i for i in index.split(size) if len(i)]           # a process may have no images
    if isinstance(images, torch.Tensor):
        return ((images[i].to(device), i) for i in chunks)
    return zip(images.batches(([(int(k), None) for k in i] for i in chunks), device), chunks)
