"""Load, split, batches: every image of a run is one uint8 tensor on the device, and a set of images is an index into it.

    images, labels, parts, classes = load("digits", "data")     # (M, 3, H, W) uint8, (M,) int64, who is in which part
    split = make_split(labels, parts, n_labels=100, validation=0.1, seed=0)     # labeled, unlabeled, validation, test
    x_l = images[batch_indices(split["labeled"], 64, step=7, seed=1)]           # (64, 3, H, W)
    x, z = rotate4(augment(x_l, flip=False, gen=gen))           # (256, 3, H, W), (256,)

Nothing in the training path loops over images or leaves the device. A label of -1 means: not known.
"""
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torchvision import datasets
from torchvision.transforms.v2 import functional as TF
from tqdm import tqdm

import presets

# ---------------------------------------------------------------- load


def load(dataset, data_dir, image_size=None, skip_broken=False):
    """A named dataset, an .npz file or a folder to

    images (M, 3, H, W) uint8 with the memory laid out channels last,
    labels (M,) int64, -1 where unknown,
    parts: dict of index arrays into the M images: train, test, and where there are such, validation and unlabeled,
    classes: the names, in the order of the labels.
    """
    if dataset in presets.NAMED:
        pieces, classes = load_named(dataset, data_dir)
    elif not os.path.exists(dataset):
        sys.exit(f"--dataset {dataset}: there is no such file or folder, and the known names are "
                 + ", ".join(presets.NAMED))
    elif Path(dataset).is_dir():
        pieces, classes = load_folder(Path(dataset), image_size, skip_broken)
    elif dataset.endswith(".npz"):
        pieces, classes = load_npz(dataset)
    else:
        sys.exit(f"--dataset {dataset}: must be a folder, an .npz file or one of " + ", ".join(presets.NAMED))

    for part, (x, _) in pieces.items():
        if len(x) == 0:
            sys.exit(f"--dataset {dataset}: its part '{part}' has no images")
    if len(classes) < 2:
        sys.exit(f"--dataset {dataset}: has one class only ({classes[0]}); there must be two or more")
    missing = set(range(len(classes))) - set(np.unique(pieces["train"][1]).tolist())
    if missing:
        sys.exit(f"--dataset {dataset}: no training image of class {classes[min(missing)]}")
    if "test" not in pieces and "validation" in pieces:         # an ImageNet-like layout: train/ and val/
        pieces["test"] = pieces.pop("validation")
    images, labels, parts, start = [], [], {}, 0
    for part, (x, y) in pieces.items():
        images.append(to_uint8_rgb(x, image_size, dataset))
        labels.append(torch.as_tensor(y, dtype=torch.int64))
        parts[part] = np.arange(start, start + len(x))
        start += len(x)
    if len({x.shape[1:] for x in images}) > 1:
        sys.exit(f"--dataset {dataset}: its parts have images of different sizes; give --image_size")
    return torch.cat(images).permute(0, 3, 1, 2), torch.cat(labels), parts, classes


def to_uint8_rgb(x, image_size, dataset):
    """Images (n, H, W), (n, H, W, 1) or (n, H, W, 3), to (n, S, S, 3); grey becomes three equal channels."""
    x = torch.as_tensor(x)
    x = x.unsqueeze(-1) if x.ndim == 3 else x                   # (n, H, W, 1 or 3)
    if image_size and x.shape[1:3] != (image_size, image_size):
        x = TF.center_crop(TF.resize(x.permute(0, 3, 1, 2), image_size, antialias=True), image_size).permute(0, 2, 3, 1)
    if x.shape[1] != x.shape[2]:
        sys.exit(f"--dataset {dataset}: images of {x.shape[1]} x {x.shape[2]} pixels; a rotation by 90 degrees needs "
                 "square ones: give --image_size")
    if x.shape[1] < 8:
        sys.exit(f"--dataset {dataset}: images of {x.shape[1]} pixels are too small; give --image_size 8 or more")
    return x.expand(-1, -1, -1, 3).contiguous()


def load_named(dataset, data_dir):
    if dataset == "digits":
        from sklearn.datasets import load_digits                # 1,797 digits of 8 x 8 pixels inside scikit-learn
        digits = load_digits()
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)          # its pixels are 0 .. 16
        test = 500                                              # ours: the last 500; the file is ordered by writer
        return {"train": (images[:-test], digits.target[:-test]),
                "test": (images[-test:], digits.target[-test:])}, [str(i) for i in range(10)]
    if dataset in ("cifar10", "cifar100"):
        kind = datasets.CIFAR10 if dataset == "cifar10" else datasets.CIFAR100
        train, test = (fetch(kind, data_dir, [kind.url], data_dir, train=t) for t in (True, False))
        return {"train": (train.data, train.targets), "test": (test.data, test.targets)}, train.classes
    if dataset == "fashion_mnist":
        kind = datasets.FashionMNIST
        urls = [kind.mirrors[0] + file for file, _ in kind.resources]
        train, test = (fetch(kind, data_dir, urls, Path(data_dir, kind.__name__, "raw"), train=t) for t in (True, False))
        return {"train": (train.data, train.targets), "test": (test.data, test.targets)}, train.classes
    pieces = {}
    names = {"train": "train", "test": "test"} | ({"unlabeled": "extra"} if dataset == "svhn_extra" else {})
    for part, name in names.items():                            # the extra images are unlabelled; their labels only score
        svhn = fetch(datasets.SVHN, data_dir, datasets.SVHN.split_list[name][:1], data_dir, split=name)
        pieces[part] = svhn.data.transpose(0, 2, 3, 1), svhn.labels
    return pieces, [str(i) for i in range(10)]


def fetch(kind, data_dir, urls, folder, **which):
    """A torchvision dataset: downloaded and checksummed by torchvision where it is not there yet."""
    try:
        return kind(data_dir, download=True, **which)
    except (OSError, RuntimeError) as error:                    # no network, no space, or a checksum that is wrong
        sys.exit(f"--data_dir {data_dir}: {kind.__name__} is not there and could not be downloaded "
                 f"({' '.join(str(error).split())[:120]}); fetch {' '.join(urls)} by hand and put it into {folder}")


def load_npz(path):
    """Keys as in MedMNIST: {train,test}_{images,labels}; optional val_images with val_labels, unlabeled_images."""
    try:
        with np.load(path, allow_pickle=False) as file:         # no code in it is run
            arrays = {k: file[k] for k in file.files}
    except Exception as error:                                  # whatever a damaged or foreign file makes numpy raise
        sys.exit(f"--dataset {path}: cannot be read as an .npz file of plain arrays ({error})")
    if any(k not in arrays for k in ("train_images", "train_labels")):
        sys.exit(f"--dataset {path}: needs the keys train_images and train_labels (and test_images, test_labels); has "
                 + (", ".join(arrays) or "none"))
    pieces = {}
    for part, prefix in {"train": "train", "test": "test", "validation": "val", "unlabeled": "unlabeled"}.items():
        x, y = arrays.get(f"{prefix}_images"), arrays.get(f"{prefix}_labels")
        if x is None:
            continue
        if x.dtype != np.uint8 or x.size == 0 or not (x.ndim == 3 or x.ndim == 4 and x.shape[-1] in (1, 3)):
            sys.exit(f"--dataset {path}: {prefix}_images must be uint8 of shape (n, height, width), with a last axis of "
                     f"1 or 3 for colour; is {x.dtype} {x.shape}")
        if y is None and part != "unlabeled":
            sys.exit(f"--dataset {path}: has {prefix}_images but no {prefix}_labels")
        if y is not None and y.shape not in ((len(x),), (len(x), 1)):
            sys.exit(f"--dataset {path}: {prefix}_labels must have one label for each of the {len(x)} images; its shape "
                     f"is {y.shape}")
        if y is not None and y.dtype.kind not in "iuU":
            sys.exit(f"--dataset {path}: {prefix}_labels must be whole numbers or strings, not {y.dtype}")
        pieces[part] = x, y
    classes = np.unique(pieces["train"][1])
    for part, (x, y) in pieces.items():
        if y is None:
            pieces[part] = x, np.full(len(x), -1)
            continue
        y = y.reshape(-1)
        if part == "train" and y.dtype.kind == "i" and y.min() < 0:
            sys.exit(f"--dataset {path}: train_labels has {y.min()}; images without a label go into unlabeled_images")
        strange = np.setdiff1d(y, classes)
        if len(strange) and part != "unlabeled":
            sys.exit(f"--dataset {path}: {part} has label {strange[0]}, which train has not")
        pieces[part] = x, np.where(np.isin(y, classes), np.searchsorted(classes, y), -1)
    return pieces, [str(c) for c in classes]


def load_folder(root, image_size, skip_broken):
    """train/<class>/*, test/<class>/* and/or val/<class>/*, optional unlabeled/*; every image is read now, once."""
    pieces, classes, broken = {}, None, []
    for part, name in {"train": "train", "test": "test", "validation": "val"}.items():
        if not (root / name).is_dir():
            if part == "train":
                sys.exit(f"--dataset {root}: has no folder train/ (with a folder of images for each class in it)")
            continue
        try:
            found = datasets.ImageFolder(root / name)
        except FileNotFoundError as error:                      # no class folders, or one with no image in it
            sys.exit(f"--dataset {root}: {' '.join(str(error).split())}")
        classes = classes or found.classes
        if found.classes != classes:
            differ = sorted(set(found.classes) ^ set(classes))
            sys.exit(f"--dataset {root}: the class folders of train/ and {name}/ differ: {', '.join(differ)}")
        pieces[part] = read_images([p for p, _ in found.samples], found.targets, image_size, name, broken)
    if (root / "unlabeled").is_dir():
        files = sorted(str(p) for p in (root / "unlabeled").rglob("*")
                       if p.suffix.lower() in datasets.folder.IMG_EXTENSIONS)
        pieces["unlabeled"] = read_images(files, np.full(len(files), -1), image_size, "unlabeled", broken)
    for file, problem in broken:
        print(f"cannot read {file}: {problem}", file=sys.stderr)
    if broken and not skip_broken:
        sys.exit(f"--dataset {root}: {len(broken)} images cannot be read, {broken[0][0]} and those listed above; mend or remove "
                 "them, or give --skip_broken")
    if broken:
        print(f"going on without {len(broken)} images that cannot be read")
    return pieces, classes


def read_images(files, labels, image_size, name, broken):
    """Image files to (n, S, S, 3) uint8 and their labels, decoded in threads (PIL lets go of Python's lock while it does).

    A file that cannot be read is left out and goes into the list `broken`.
    """
    images, good = np.empty((len(files), image_size, image_size, 3), np.uint8), np.zeros(len(files), bool)

    def read(i):
        try:
            images[i], good[i] = decode(files[i], image_size), True
        except Exception as error:                              # PIL raises many things for bad files
            return files[i], " ".join(str(error).split()) or type(error).__name__

    with ThreadPoolExecutor() as pool:
        found = list(tqdm(pool.map(read, range(len(files))), f"reading {name}", len(files), disable=None, leave=False))
    broken.extend(filter(None, found))
    return images[good], np.asarray(labels)[good]


def decode(file, image_size):
    """Any size, any mode: upright by its EXIF note, short side scaled to image_size, centre cropped, RGB. (S, S, 3)"""
    with Image.open(file) as image:
        image = ImageOps.exif_transpose(image)                  # a rotation method must see photographs upright
        if image.mode[0] in "IF":                               # 16 or 32 bits: PIL's own conversion would clip at 255
            grey = np.asarray(image).astype(np.float64)
            if image.mode.startswith("I;16") or grey.max() > 255:
                grey /= 257
            elif image.mode == "F" and grey.max() <= 1:
                grey *= 255
            image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
        image = TF.resize(image.convert("RGB"), image_size, antialias=True)
        return np.asarray(TF.center_crop(image, image_size))


# ---------------------------------------------------------------- split


def apportion(counts, n, at_least=0):
    """n places shared out in proportion to counts, by the largest remainder; nobody gets less than at_least."""
    quota = n * counts / counts.sum()
    shares = np.maximum(np.floor(quota).astype(np.int64), at_least)
    while shares.sum() < n:
        shares[np.argmax(quota - shares)] += 1
    while shares.sum() > n:
        shares[np.argmax(np.where(shares > at_least, shares - quota, -np.inf))] -= 1
    return shares


def draw(labels, pool, n, rng, at_least=0):
    """n images out of pool, matching its distribution of classes; the rest of the pool as well."""
    names, counts = np.unique(labels[pool], return_counts=True)
    shares = apportion(counts, n, at_least)
    drawn = np.concatenate([rng.permutation(pool[labels[pool] == c])[:k] for c, k in zip(names, shares)])
    return np.sort(drawn), np.setdiff1d(pool, drawn)


def make_split(labels, parts, n_labels, validation, seed):
    """labeled, unlabeled, validation and test as disjoint index arrays, from the split's own seed and nothing else.

    MixMatch's protocol: labelled images follow the distribution of classes, and neither they nor the validation images
    are among the unlabelled ones. n_labels None: all of train is labelled, and there is no validation but a given one.
    """
    labels, train = labels.numpy(), parts["train"]
    num_classes = len(np.unique(labels[train]))
    if "test" in parts:
        test = parts["test"]
    else:                                                       # ours: 10 %, the same images whatever the seed
        test, train = draw(labels, train, max(1, round(0.1 * len(train))), np.random.default_rng(0))
        print(f"no test part: {len(test)} of {len(test) + len(train)} training images (10 %) are held out as the test set")
    given = parts.get("unlabeled", np.arange(0))

    if n_labels is None:
        if not len(given):
            sys.exit("--labels: all training images are labelled and there are no unlabelled ones; give --labels N "
                     "to use N labels, or add an unlabelled part (unlabeled/ or unlabeled_images)")
        return dict(labeled=train, unlabeled=given, validation=parts.get("validation", np.arange(0)), test=test)

    if n_labels < num_classes:
        sys.exit(f"--labels {n_labels}: with {num_classes} classes some class would have none; give {num_classes} or more")
    rng = np.random.default_rng([seed, 0])                      # 0: the split's stream; training draws from others
    if "validation" in parts:
        held, rest = parts["validation"], train
    else:
        n = round(validation * len(train)) if isinstance(validation, float) else validation
        held, rest = draw(labels, train, min(n, len(train)), rng)
    spare = 0 if len(given) else 1                              # at least one unlabelled image
    if n_labels > len(rest) - spare:
        sys.exit(f"--labels {n_labels}: too many; of {len(train)} training images {len(train) - len(rest)} are for "
                 f"validation, so give {len(rest) - spare} or fewer")
    labeled, rest = draw(labels, rest, n_labels, rng, at_least=1)
    if len(np.unique(labels[labeled])) < num_classes:
        sys.exit(f"--labels {n_labels}: a class has too few images to be labelled")
    return dict(labeled=labeled, unlabeled=np.concatenate([rest, given]), validation=held, test=test)


# ---------------------------------------------------------------- batches


def seed_of(seed, stream, step):
    """One number from (seed, stream, step), so that a step's randomness depends on nothing that came before it."""
    return int(np.random.SeedSequence([seed, stream, step]).generate_state(1)[0])


@functools.lru_cache(maxsize=4)                                 # this pass and the next, of two streams
def permutation(n, seed, stream, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(seed, stream, epoch)))


def batch_indices(index, batch, step, seed, stream):
    """Batch number `step` of an endless stream in which every pass over the data is a new permutation. (batch,)"""
    n = len(index)
    place = torch.arange(step * batch, (step + 1) * batch)      # places in the endless stream
    epochs = range(step * batch // n, ((step + 1) * batch - 1) // n + 1)        # the passes over the data they lie in
    order = torch.cat([place[:0], *(permutation(n, seed, stream, e)[place[place // n == e] % n] for e in epochs)])
    return index[order.to(index.device, non_blocking=True)]


def augment(x, flip, gen):
    """Horizontal flip with chance 1/2 where `flip`, then reflect-pad by an eighth of the size and a random crop.

    x (N, 3, S, S) uint8 to the same, each image with its own draw; every offset from 0 to 2 pad is reached. MixMatch.
    """
    N, _, S, _ = x.shape
    pad, grid = S // 8, torch.arange(S, device=x.device)        # 4 at 32

    def source(flipped):                                        # which row or column of x each one of the crop is
        offset = torch.randint(-pad, pad + 1, (N, 1), generator=gen, device=x.device)
        i = S - 1 - (S - 1 - (grid + offset).abs()).abs()       # reflected at both borders, (N, S)
        return torch.where(flipped, S - 1 - i, i)

    upright = torch.zeros(N, 1, dtype=torch.bool, device=x.device)
    rows = source(upright)                                      # (N, S)
    cols = source(torch.rand(N, 1, generator=gen, device=x.device) < 0.5 if flip else upright)
    first_pixel = torch.arange(N, device=x.device)[:, None, None] * S * S
    pixels = first_pixel + rows[:, :, None] * S + cols[:, None, :]              # (N, S, S)
    flat = x.permute(0, 2, 3, 1).reshape(N * S * S, 3)
    return flat.index_select(0, pixels.flatten()).view(N, S, S, 3).permute(0, 3, 1, 2)


def rotate4(x):
    """(N, 3, S, S) to its four rotations (4N, 3, S, S), all images at 0, then all at 90, 180, 270 degrees; and z (4N,)."""
    x = x.permute(0, 2, 3, 1)                                   # channels last in memory, before and after
    z = torch.arange(4, device=x.device).repeat_interleave(len(x))
    return torch.cat([torch.rot90(x, k, (1, 2)) for k in range(4)]).permute(0, 3, 1, 2), z


def scale(x):
    """uint8 to float32 in [-1, 1], no whitening. MixMatch."""
    return x.float().mul_(2 / 255).sub_(1)


def rotated_batch(x_l, y_l, x_u, augment):
    """x (N, 3, H, W) labelled first, y (4B,), z (N,), N = 8B. ours: all four rotations of every image, from one crop."""
    x_l, z_l = rotate4(augment(x_l))                            # (4B, 3, H, W), (4B,)
    x_u, z_u = rotate4(augment(x_u))
    return scale(torch.cat([x_l, x_u])), y_l.repeat(4), torch.cat([z_l, z_u])


# ---------------------------------------------------------------- mixing


def blend(share, a, b):
    """share a + (1 - share) b with a share (N,) for each of the N images or distributions."""
    share = share.view(-1, *[1] * (a.ndim - 1))
    return share * a + (1 - share) * b


def mix(x, gen):
    """Ext. 2: x_mix = alpha x_i + (1 - alpha) x_j. ours: alpha ~ U[0.5, 1] an image, x_j by a permutation of all."""
    alpha = 0.5 + 0.5 * torch.rand(len(x), generator=gen, device=x.device)
    partner = torch.randperm(len(x), generator=gen, device=x.device)
    return blend(alpha, x, x[partner])


def mixup_share(n, beta, gen):
    """lambda ~ Beta(beta, beta), one for each of n images, and the larger of lambda and 1 - lambda. MixMatch. (n,)"""
    concentration = torch.full((2, n), float(beta), device=gen.device)
    a, b = torch._standard_gamma(concentration, generator=gen)  # torch.distributions.Beta would take no generator
    share = a / (a + b)
    return torch.maximum(share, 1 - share)


# ---------------------------------------------------------------- strong augmentation


def strong_augment(x, gen):
    """FixMatch's RandAugment on a batch: two operations an image, drawn anew with their strengths, then Cutout.

    x (N, 3, S, S) uint8 to the same. The operations and their ranges are FixMatch's (its table of transformations).
    ours: both operations always act (its code skips each with chance 1/2); where an image is moved, what comes in is
    grey; an operation is computed for the whole batch and kept for the images that drew it, since an index of another
    length in every step would make the GPU wait for the CPU.
    """
    for _ in range(2):
        op = torch.randint(14, (len(x), 1, 1, 1), generator=gen, device=x.device)
        u = torch.rand(len(x), 1, 1, 1, generator=gen, device=x.device)
        for k, changed in enumerate((*colour_ops(x, u), move(x, op, u))):
            x = torch.where(op == k if k < 8 else op >= 9, changed, x)          # 8 is the identity
    return cutout(x, gen).contiguous(memory_format=torch.channels_last)


def colour_ops(x, u):
    """The eight operations on colour, all of the same x, with strength u in [0, 1)."""
    f = x.float()
    grey = TF.rgb_to_grayscale(f)                               # (N, 1, S, S)
    around = F.avg_pool2d(F.pad(f, (1, 1, 1, 1), mode="replicate"), 3, stride=1)        # the mean of 3 x 3 pixels
    smooth = (9 * around + 4 * f) / 13                          # PIL's smoothing: the pixel counts 5, its neighbours 1
    keep = 0.05 + 0.9 * u                                       # FixMatch: in [0.05, 0.95]
    coarse = 2 ** (4 - (5 * u).floor())                         # FixMatch: 4 to 8 of the 8 bits are left
    return (TF.autocontrast(x), TF.equalize(x),
            (keep * f).byte(),                                  # brightness: towards black
            (keep * f + (1 - keep) * grey).byte(),              # colour: towards grey
            (keep * f + (1 - keep) * grey.mean((1, 2, 3), keepdim=True)).byte(),        # contrast: towards the mean
            (keep * f + (1 - keep) * smooth).byte(),            # sharpness: towards its blur
            ((f / coarse).floor() * coarse).byte(),             # posterise
            torch.where(f < 256 * u, x, 255 - x))               # solarise: what is brighter than the threshold


def move(x, op, u):
    """Operations 9 to 13: rotate, shear and translate, by one affine map an image and bilinear sampling."""
    N, _, S, _ = x.shape
    op, way = op.view(-1), 2 * u.view(-1) - 1                   # way in [-1, 1)
    angle = torch.where(op == 9, way * (torch.pi / 6), 0)       # FixMatch: rotate by up to 30 degrees
    shear_x, shear_y, shift_x, shift_y = (torch.where(op == k, 0.3 * way, 0) for k in (10, 11, 12, 13))  # FixMatch: 0.3
    rows = [torch.stack([angle.cos(), shear_x - angle.sin(), 2 * shift_x], 1),
            torch.stack([shear_y + angle.sin(), angle.cos(), 2 * shift_y], 1)]
    with torch.autocast(x.device.type, enabled=False):          # bfloat16 would round the places to a tenth of a pixel
        grid = F.affine_grid(torch.stack(rows, 1), (N, 3, S, S), align_corners=False)   # (N, S, S, 2)
        moved = F.grid_sample(x.float() - 127, grid, align_corners=False)       # outside: 0, that is grey
    return (moved + 127).round().clamp(0, 255).byte()


def cutout(x, gen):
    """FixMatch: a square of up to half the size, anywhere, becomes grey (127)."""
    N, _, S, _ = x.shape
    side, row, col = S * torch.rand(3, N, 1, generator=gen, device=x.device)    # (N, 1) each
    place = torch.arange(S, device=x.device) + 0.5              # the middle of a pixel
    rows, cols = ((place - centre).abs() < side / 4 for centre in (row, col))   # (N, S); the square's side is side / 2
    return torch.where((rows[:, :, None] & cols[:, None, :]).unsqueeze(1), 127, x)
