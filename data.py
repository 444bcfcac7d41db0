"""Load, split, batches: every image of a run is one uint8 tensor on the device, and a set of images is an index into it.

    images, labels, parts, classes = load("digits", "data")     # (M, 3, H, W) uint8, (M,) int64, who is in which part
    split = make_split(labels, parts, n_labels=100, validation=0.1, seed=0)     # labeled, unlabeled, validation, test
    x_l = images[batch_indices(split["labeled"], 64, step=7, seed=1)]           # (64, 3, H, W)
    x, z = rotate4(augment(x_l, flip=False, gen=gen))           # (256, 3, H, W), (256,)

Nothing in the training path loops over images or leaves the device. A label of -1 means: not known.
Pictures that do not fit into memory stay files: `images` is then a Files, and batches come from the DataLoader's workers.
A step's batch may be shared out among processes and parts; every draw is made for the whole batch (`share_of_batch`).
"""
import fcntl
import functools
import itertools
import math
import os
import signal
import sys
import textwrap
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as TF
from tqdm import tqdm

import presets

SMALLEST = 8                                                    # ours: pixels; augmentation pads by an eighth
ENDINGS = (*datasets.folder.IMG_EXTENSIONS, ".gif")             # of an animated picture the first frame is taken

# ---------------------------------------------------------------- load


def load(dataset, data_dir, image_size=None, skip_broken=False, labels_file=None, **reading):
    """A named dataset, an .npz file or a folder to

    images (M, 3, H, W) uint8 with the memory laid out channels last, or Files: what is not in memory,
    labels (M,) int64, -1 where unknown,
    parts: dict of index arrays into the M images: train, test, and where there are such, validation, unlabeled and labeled,
    classes: the names, in the order of the labels.

    reading: how pictures of a folder are read, the last arguments of load_folder.
    """
    if dataset == "imagenet" or dataset not in presets.NAMED and os.path.isdir(dataset):
        root = imagenet_folder(data_dir) if dataset == "imagenet" else Path(dataset)
        loaded = load_folder(root, image_size, skip_broken, labels_file, **reading)
        found = len(loaded[2]["train"])
        if dataset == "imagenet" and found != presets.IMAGENET_TRAIN:           # unpacked in part?
            print(f"note: {found:,} training images in {root}, and ILSVRC-2012 has {presets.IMAGENET_TRAIN:,}")
        return loaded
    for flag, given in {"labels_file": labels_file, "stream": reading.get("stream"), "crop resized": reading.get("crop") == "resized"}.items():
        if given:
            sys.exit(f"--{flag}: is for folders of pictures and imagenet, which {dataset} is not")
    if dataset in presets.NAMED:
        pieces, classes = load_named(dataset, data_dir)
    elif not os.path.exists(dataset):
        sys.exit(f"--dataset {dataset}: there is no such file or folder, and the known names are "
                 + ", ".join(presets.NAMED))
    elif dataset.endswith(".npz"):
        pieces, classes = load_npz(dataset)
    else:
        sys.exit(f"--dataset {dataset}: must be a folder, an .npz file or one of " + ", ".join(presets.NAMED))

    check_parts(pieces, classes, dataset)
    val_is_test(pieces)
    labels, parts = join_labels(pieces)
    images = [to_uint8_rgb(x, image_size, dataset) for x, _ in pieces.values()]
    if len({x.shape[1:] for x in images}) > 1:
        sys.exit(f"--dataset {dataset}: its parts have images of different sizes; give --image_size")
    return torch.cat(images).permute(0, 3, 1, 2), labels, parts, classes


def check_parts(pieces, classes, dataset):
    """Every part has images, and train some of every class."""
    for part, (x, _) in pieces.items():
        if len(x) == 0:
            sys.exit(f"--dataset {dataset}: its part '{part}' has no images")
    if len(classes) < 2:
        sys.exit(f"--dataset {dataset}: has one class only ({classes[0]}); there must be two or more")
    missing = set(range(len(classes))) - set(np.unique(pieces["train"][1]).tolist())
    if missing:
        sys.exit(f"--dataset {dataset}: no training image of class {classes[min(missing)]}")


def val_is_test(pieces):
    if "test" not in pieces and "validation" in pieces:         # an ImageNet-like layout: train/ and val/
        pieces["test"] = pieces.pop("validation")


def join_labels(pieces):
    """All labels one after another (M,), and which of the M images belong to which part."""
    ends = np.cumsum([len(x) for x, _ in pieces.values()])
    parts = {part: np.arange(end - len(x), end) for (part, (x, _)), end in zip(pieces.items(), ends)}
    return torch.cat([torch.as_tensor(y, dtype=torch.int64) for _, y in pieces.values()]), parts


def to_uint8_rgb(x, image_size, dataset):
    """Images (n, H, W), (n, H, W, 1) or (n, H, W, 3), to (n, S, S, 3); grey becomes three equal channels."""
    x = torch.as_tensor(x)
    x = x.unsqueeze(-1) if x.ndim == 3 else x                   # (n, H, W, 1 or 3)
    if image_size and x.shape[1:3] != (image_size, image_size):
        x = TF.center_crop(TF.resize(x.permute(0, 3, 1, 2), image_size, antialias=True), image_size).permute(0, 2, 3, 1)
    if x.shape[1] != x.shape[2]:
        sys.exit(f"--dataset {dataset}: images of {x.shape[1]} x {x.shape[2]} pixels; a rotation by 90 degrees needs "
                 "square ones: give --image_size")
    if x.shape[1] < SMALLEST:
        sys.exit(f"--dataset {dataset}: images of {x.shape[1]} pixels are too small; give --image_size {SMALLEST} or more")
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
    urls = [datasets.SVHN.split_list[name][0] for name in names.values()]
    for part, name in names.items():                            # the extra images are unlabelled; their labels only score
        svhn = fetch(datasets.SVHN, data_dir, urls, data_dir, split=name)
        pieces[part] = svhn.data.transpose(0, 2, 3, 1), svhn.labels
    return pieces, [str(i) for i in range(10)]


def fetch(kind, data_dir, urls, folder, **which):
    """A torchvision dataset: downloaded and checksummed by torchvision where it is not there yet."""
    try:
        with one_at_a_time(data_dir):
            return kind(data_dir, download=True, **which)
    except (OSError, RuntimeError, ValueError, EOFError) as error:              # no network, no space, a wrong checksum, damaged files
        sys.exit(f"--data_dir {data_dir}: {kind.__name__} is not there, or damaged, and could not be downloaded "
                 f"({in_short(error)}); fetch {' '.join(urls)} by hand and put it into {folder}")


@contextmanager
def one_at_a_time(data_dir):
    """For downloads and unpacking, which several processes of one run would do at once, and one after another need not do again."""
    with ExitStack() as stack:
        try:
            os.makedirs(data_dir, exist_ok=True)
            fcntl.flock(stack.enter_context(open(Path(data_dir, ".lock"), "a")), fcntl.LOCK_EX)
        except OSError:                                         # not to be written, so nothing will be unpacked there
            pass
        yield


def in_short(error):
    return textwrap.shorten(str(error) or type(error).__name__, 150, placeholder=" ...")       # one line


def load_npz(path):
    """Keys as in MedMNIST: {train,test}_{images,labels}; optional val_images with val_labels, unlabeled_images."""
    try:
        with np.load(path, allow_pickle=False) as file:         # no code in it is run
            arrays = {k: file[k] for k in file.files}
    except Exception as error:                                  # whatever a damaged or foreign file makes numpy raise
        sys.exit(f"--dataset {path}: cannot be read as an .npz file of plain arrays ({in_short(error)})")
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


def load_folder(root, image_size, skip_broken, labels_file=None, crop="pad", flip=False, stream=None, workers=None, device="cpu"):
    """As `load`. Every picture is tried now, once, but those of ImageNet, which came out of archives with checksums.

    crop, flip, workers: of the Files. stream: whether pictures stay on the disk; None: if they do not fit the device.
    """
    if image_size < SMALLEST:
        sys.exit(f"--image_size {image_size}: is too small; give {SMALLEST} or more")
    pieces, classes = list_folder(root)
    on_disk = needs_files(pieces, image_size, crop, stream, device)
    images = {part: np.empty((0 if on_disk else len(files), image_size, image_size, 3), np.uint8) for part, (files, _) in pieces.items()}

    def read(part, i, file):
        if not on_disk:
            images[part][i] = decode(file, image_size)
            return
        with Image.open(file) as image:
            refuse_thin(image, image_size, crop)
            image.draft("RGB", (1, 1))                          # a JPEG is read to its end, but not computed in full
            image.load()

    if not (on_disk and is_imagenet(classes)):
        good = try_files(read, pieces, root, skip_broken)
        pieces = {part: (list(itertools.compress(files, good[part])), labels[good[part]]) for part, (files, labels) in pieces.items()}
    check_parts(pieces, classes, root)
    labels, parts = join_labels(pieces)
    if labels_file:
        parts["labeled"] = find_listed(labels_file, pieces["train"][0])         # train comes first
    files = [f for files, _ in pieces.values() for f in files]
    if on_disk:
        return Files(files, image_size, crop, flip, workers), labels, parts, classes
    images = torch.cat([torch.from_numpy(images[part][good[part]]) for part in pieces]).permute(0, 3, 1, 2)
    images.files = files                                        # for the fingerprint
    return images, labels, parts, classes


def list_folder(root):
    """train/<class>/*, test/<class>/* and/or val/<class>/*, optional unlabeled/*: {part: (files, labels)}, and the classes."""
    pieces, classes = {}, None
    for part, name in {"train": "train", "test": "test", "validation": "val"}.items():
        if not (root / name).is_dir():
            if part == "train":
                sys.exit(f"--dataset {root}: has no folder train/ (with a folder of images for each class in it)")
            continue
        try:
            found = datasets.ImageFolder(root / name, is_valid_file=lambda file: file.lower().endswith(ENDINGS))
        except FileNotFoundError as error:                      # no class folders, or one with no image in it
            sys.exit(f"--dataset {root}: {' '.join(str(error).split())}")
        classes = classes or found.classes
        if found.classes != classes:
            differ = sorted(set(found.classes) ^ set(classes))
            sys.exit(f"--dataset {root}: the class folders of train/ and {name}/ differ: {', '.join(differ)}")
        pieces[part] = [p for p, _ in found.samples], np.asarray(found.targets)
    if (root / "unlabeled").is_dir():
        files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(root / "unlabeled", followlinks=True)
                       for name in names if name.lower().endswith(ENDINGS))
        pieces["unlabeled"] = files, np.full(len(files), -1)
    val_is_test(pieces)
    return pieces, classes


def imagenet_folder(data_dir):
    """ILSVRC-2012 as train/<wnid>/*.JPEG and val/<wnid>/*.JPEG; its archives are checked and unpacked by torchvision."""
    root = Path(data_dir)
    if not os.path.isdir(root):
        sys.exit(f"--data_dir {data_dir}: there is no such folder; it must hold ILSVRC-2012")
    if not (root / "train").is_dir() or not (root / "val").is_dir() or (root / ".lock").exists():       # there, or being unpacked
        try:
            with one_at_a_time(root):
                for split in "train", "val":
                    if not (root / split).is_dir():
                        datasets.ImageNet(root, split)
        except (OSError, RuntimeError) as error:                # no archives, or one whose checksum is wrong
            sys.exit(f"--data_dir {data_dir}: has no train/<wnid>/ and val/<wnid>/ of ILSVRC-2012, nor its archives "
                     f"({in_short(error)})")
    return root


def needs_files(pieces, image_size, crop, stream, device):
    """Whether pictures are read anew in every step: asked for, needed by the crop, or since they do not fit; said in a line."""
    size = sum(len(files) for files, _ in pieces.values()) * 3 * image_size ** 2
    copies = int(os.environ.get("LOCAL_WORLD_SIZE", 1))         # each process of a machine holds all of them
    free = free_memory(device) if torch.device(device).type == "cuda" else free_memory("cpu") / copies
    fits = 2 * size < min(free, free_memory("cpu") / copies)    # ours: half of it is left to the network
    if stream is False and crop == "resized":
        sys.exit("--nostream: --crop resized cuts its pieces out of the files' full pictures, so these cannot be in memory")
    files = crop == "resized" or (not fits if stream is None else stream)
    print(f"{'reading pictures from disk as they are needed' if files else 'all pictures are held in memory'} "
          f"({size / 2 ** 30:.2f} GiB at {image_size} pixels, {free / 2 ** 30:.1f} GiB free; --crop {crop})")
    return files


def free_memory(device):
    """Bytes that could still be had on a device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):                            # not Linux: all there is
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:                                                        # what a container or Slurm allows may be less
        most, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        return min(free, most - used)
    except (OSError, ValueError):                               # "max": no limit
        return free


def is_imagenet(classes):
    """ILSVRC-2012's thousand class folders, whose pictures came out of archives with checksums."""
    return len(classes) == 1000 and all(c[:1] == "n" and c[1:].isdigit() for c in classes)


def try_files(read, pieces, root, skip_broken):
    """read(part, i, file) for all, in threads (PIL lets go of Python's lock while it decodes); {part: which were good}.

    Pictures that cannot be read are listed, and end the run here or are left out.
    """
    def attempt(job):
        try:
            read(*job)
        except Exception as error:                              # PIL raises many things for bad files
            return in_short(error)

    good, broken = {}, []
    with ThreadPoolExecutor() as pool:
        for part, (files, _) in pieces.items():
            jobs = [(part, i, file) for i, file in enumerate(files)]
            problems = list(tqdm(pool.map(attempt, jobs), f"reading {part}", len(files), disable=quiet(), leave=False))
            good[part] = np.array([problem is None for problem in problems], bool)
            broken += [(file, problem) for file, problem in zip(files, problems) if problem]
    for file, problem in broken:
        print(f"cannot read {file}: {problem}", file=sys.stderr)
    if broken and not skip_broken:
        sys.exit(f"--dataset {root}: {len(broken)} images cannot be read, {broken[0][0]} and those listed above; mend or remove "
                 "them, or give --skip_broken")
    if broken:
        print(f"going on without {len(broken)} images that cannot be read")
    return good


def quiet():
    """For tqdm's `disable`: None shows a bar on a terminal; only the first of several processes has one."""
    return True if int(os.environ.get("RANK", 0)) else None


def decode(file, image_size, crop="pad"):
    """Any size, any mode: short side scaled to image_size, centre cropped. S4L: scaled to 256 / 224 of it. (S, S, 3)"""
    picture = open_rgb(file)
    short = refuse_thin(picture, image_size, crop)
    return np.asarray(TF.center_crop(TF.resize(picture, short, antialias=True), image_size))


def refuse_thin(picture, image_size, crop):
    """How long the short side is at test time, unless the picture, scaled so, would fill the memory."""
    short = round(image_size * 256 / 224) if crop == "resized" else image_size
    if short ** 2 * max(picture.size) / min(picture.size) > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"{picture.width} x {picture.height} pixels are too long and thin")
    return short


def open_rgb(file):
    """A picture of any mode, upright by its EXIF note, as RGB."""
    with Image.open(file) as image:
        image = ImageOps.exif_transpose(image)                  # a rotation method must see photographs upright
        if image.mode[0] in "IF":                               # 16 or 32 bits: PIL's own conversion would clip at 255
            grey = np.asarray(image).astype(np.float64)
            if not np.isfinite(grey).all():
                raise ValueError("it has pixels that are not numbers")
            if grey.max() > 65535:                              # ours: there is no agreed white
                grey *= 255 / grey.max()
            elif image.mode.startswith("I;16") or grey.max() > 255:
                grey /= 257
            elif image.mode == "F" and grey.max() <= 1:
                grey *= 255
            image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
        return image.convert("RGB")


class Files(Dataset):
    """Pictures that stay on the disk; item (i, None) is picture i as at test time, (i, seed) a piece of it for training.

    crop "pad": training pieces are the same as at test time, and augmented on the device like images in memory.
    crop "resized", S4L: a random piece of the full picture, scaled to size, and flipped with chance 1/2 where `flip`.
    """

    def __init__(self, files, image_size, crop, flip, workers=None):
        self.files, self.crop, self.flip = np.array(files), crop, flip          # an array is not copied by every worker
        self.shape = (len(files), 3, image_size, image_size)
        self.workers = default_workers() if workers is None else workers

    def __len__(self):
        return len(self.files)

    def __getitem__(self, item):
        i, seed = item
        size, file = self.shape[-1], str(self.files[i])
        try:
            if self.crop == "pad" or seed is None:
                return torch.from_numpy(decode(file, size, self.crop).copy())   # (S, S, 3)
            picture = open_rgb(file)
        except Exception as error:                              # it could be read before
            raise OSError(f"cannot read {file} any more: {in_short(error)}")
        with torch.random.fork_rng(devices=[]):                 # RandomResizedCrop takes no generator
            torch.manual_seed(seed)
            box = RandomResizedCrop.get_params(picture, scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3))        # S4L
            flipped = self.flip and torch.rand(()) < 0.5
        piece = TF.resized_crop(picture, *box, (size, size), antialias=True)    # bilinear
        return torch.from_numpy(np.asarray(TF.horizontal_flip(piece) if flipped else piece).copy())

    def read(self, plan, device):
        """Batches (n, 3, S, S) on the device for an iterable of lists of items, in its order, whoever reads them.

        While a batch is trained on, the next is copied to the device, and workers read those after it.
        """
        cuda = torch.device(device).type == "cuda"
        loader = DataLoader(self, batch_sampler=plan, num_workers=self.workers, pin_memory=cuda,
                            worker_init_fn=leave_signals_to_the_parent)
        side, ahead = torch.cuda.Stream(device) if cuda else None, None
        for x in one_line(loader):
            with torch.cuda.stream(side):                       # None: on a CPU this does nothing
                x = x.permute(0, 3, 1, 2).to(device, non_blocking=True)
            if ahead is not None:
                yield arrived(ahead, side)
            ahead = x
        if ahead is not None:
            yield arrived(ahead, side)


def one_line(loader):
    """The loader's batches; a worker's traceback about a file becomes its last line."""
    try:
        yield from loader
    except OSError as error:
        sys.exit(str(error).strip().splitlines()[-1].removeprefix("OSError: "))


def arrived(x, side):
    """A batch that was copied on another stream, ready for use on this one."""
    if side:
        torch.cuda.current_stream(x.device).wait_stream(side)
        x.record_stream(torch.cuda.current_stream(x.device))
    return x


def leave_signals_to_the_parent(worker):
    """Ctrl-C reaches workers too, but who ends them is the process they read for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in signal.SIGTERM, signal.SIGUSR1:
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)


def default_workers():
    """ours: the cores, shared out among this machine's processes."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


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


def draw(labels, pool, n, rng, at_least=0, uniform=False):
    """n images out of pool, matching its distribution of classes unless `uniform`; the rest of the pool as well."""
    if uniform:
        drawn = rng.permutation(pool)[:n]
        return np.sort(drawn), np.setdiff1d(pool, drawn)
    names, counts = np.unique(labels[pool], return_counts=True)
    shares = apportion(counts, n, at_least)
    drawn = np.concatenate([rng.permutation(pool[labels[pool] == c])[:k] for c, k in zip(names, shares)])
    return np.sort(drawn), np.setdiff1d(pool, drawn)


def fingerprint(images, labels, parts):
    """A checksum of all images (of a folder: their names), labels and parts, in their order."""
    value = zlib.crc32(labels.numpy())
    for part, index in parts.items():
        value = zlib.crc32(f"{part} {len(index)}".encode(), value)
    if hasattr(images, "files"):                                # in memory or not
        names = "\n".join("/".join(Path(str(file)).parts[-2:]) for file in images.files)
        return f"{zlib.crc32(names.encode(errors='surrogateescape'), value):08x}"
    for piece in images.permute(0, 2, 3, 1).split(10_000):
        value = zlib.crc32(piece.numpy(), value)
    return f"{value:08x}"


def make_split(labels, parts, n_labels, validation, seed, s4l=False):
    """labeled, unlabeled, validation and test as index arrays, from the split's own seed and nothing else.

    MixMatch's protocol: labelled images follow the distribution of classes, and neither they nor the validation images
    are among the unlabelled ones. n_labels None: all of train is labelled, and there is no validation but a given one;
    "10%": that share of train. parts["labeled"]: the labelled images themselves, instead of a draw.
    s4l, for ImageNet: both are drawn whatever the class, and the unlabelled images are all of train.
    """
    labels, train = labels.numpy(), parts["train"]
    num_classes = len(np.unique(labels[train]))
    if "test" in parts:
        test = parts["test"]
    else:                                                       # ours: 10 %, the same images whatever the seed
        test, train = draw(labels, train, max(1, round(0.1 * len(train))), np.random.default_rng(0))
        print(f"no test part: {len(test)} of {len(test) + len(train)} training images (10 %) are held out as the test set")
    given = parts.get("unlabeled", np.arange(0))
    if isinstance(n_labels, str):
        n_labels = round(float(n_labels.rstrip("%")) / 100 * len(train))
    listed = parts.get("labeled")
    if listed is not None:
        listed = np.intersect1d(listed, train)                  # without a test part some of them may be held out for it
        n_labels = len(listed)

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
        held, rest = draw(labels, train if listed is None else np.setdiff1d(train, listed), min(n, len(train)), rng, uniform=s4l)
        rest = rest if listed is None else np.union1d(rest, listed)
    spare = 0 if len(given) else 1                              # at least one unlabelled image
    if n_labels > len(rest) - spare:
        sys.exit(f"--labels {n_labels}: too many; of {len(train)} training images {len(train) - len(rest)} are for "
                 f"validation, so give {len(rest) - spare} or fewer")
    labeled, rest = (draw(labels, rest, n_labels, rng, at_least=1, uniform=s4l) if listed is None else
                     (listed, np.setdiff1d(rest, listed)))
    rest = train if s4l else rest
    if len(np.unique(labels[labeled])) < num_classes and not s4l:
        sys.exit(f"--labels {n_labels}: a class has too few images to be labelled")
    return dict(labeled=labeled, unlabeled=np.concatenate([rest, given]), validation=held, test=test)


def read_list(path):
    """The pictures that a list names, one a line: n01440764_10026.JPEG, or with its folder in front, as S4L and SimCLR do."""
    try:
        names = [Path(line.strip()).parts[-2:] for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        sys.exit(f"--labels_file {path}: cannot be read ({in_short(error)})")
    return names or sys.exit(f"--labels_file {path}: names no image")


def find_listed(path, train):
    """Places in `train`, the training files, of those that a list names."""
    names, places = read_list(path), {}
    for i, file in enumerate(train):
        folder, name = Path(file).parts[-2:]
        places[folder, name] = i
        places[name,] = -1 if (name,) in places else i          # -1: the name of several files
    found = [places.get(name) for name in names]
    for problem, words in (None, "is not among the training images"), (-1, "is the name of several training images"):
        if problem in found:
            more = found.count(problem) - 1
            sys.exit(f"--labels_file {path}: {'/'.join(names[found.index(problem)])} {words}" + (f"; {more} more like it" if more else ""))
    return np.unique(found)


# ---------------------------------------------------------------- a share of a batch

_share = (0, 1, 0, 1)                                           # this process, of how many; part of its share, of how many


@contextmanager
def share_of_batch(rank, world, part, parts):
    """Inside, images are one part of one process's share of a step's batch, and draws are made for the whole batch.

    So n processes, or n parts whose gradients are added up, see what one process would see at once.
    """
    global _share
    before, _share = _share, (rank, world, part, parts)
    try:
        yield
    finally:
        _share = before


def whole(n):
    """How many images the whole batch has where n of them are here."""
    return n * _share[1] * _share[3]


def mine(drawn, sets=1):
    """The rows that belong to the images here, of what was drawn for the whole batch: `sets` sets of images, each shared out."""
    rank, world, part, parts = _share
    return rows_of(drawn, sets, rank * parts + part, world * parts)


def rows_of(drawn, sets, k, n):
    return drawn if n == 1 else drawn.unflatten(0, (sets, n, -1))[:, k].flatten(0, 1)


def everyone(x, sets=1):
    """x of all processes as one batch, in the order that one process would have; no gradient."""
    world = _share[1]
    if world == 1:
        return x
    x = x.detach().contiguous()
    theirs = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(theirs, x)
    return torch.stack(theirs).unflatten(1, (sets, -1)).transpose(0, 1).flatten(0, 2)


def beside(x, order, sets=1):
    """x[order], where `order` is one of the images of all processes; of parts each has an order of its own."""
    rank, world, *_ = _share
    return everyone(x, sets)[rows_of(order, sets, rank, world)]


def everyones(n):
    """How many images all processes have where n are here: the length of an order for `beside`."""
    return n * _share[1]


# ---------------------------------------------------------------- batches


def seed_of(*numbers):
    """One number from (seed, stream, step), so that a step's randomness depends on nothing that came before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@functools.lru_cache(maxsize=16)                                # this pass and the next, of two streams; small sets have several a batch
def permutation(n, seed, stream, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(seed, stream, epoch)))


def batch_indices(index, batch, step, seed, stream):
    """Batch number `step` of an endless stream in which every pass over the data is a new permutation. (batch,)"""
    n = len(index)
    place = torch.arange(step * batch, (step + 1) * batch)      # places in the endless stream
    epochs = range(step * batch // n, ((step + 1) * batch - 1) // n + 1)        # the passes over the data they lie in
    order = torch.cat([place[:0], *(permutation(n, seed, stream, e)[place[place // n == e] % n] for e in epochs)])
    return index[order.to(index.device, non_blocking=True)]


def training_batches(images, labels, index, batch, mu, steps, seed, rank, world, parts):
    """x_l, y_l, x_u for each part of this process's share of each of the steps, on the device of `labels`."""
    def plan():
        for step in steps:
            i_l = batch_indices(index["labeled"], batch, step, seed, 1)
            i_u = batch_indices(index["unlabeled"], mu * batch, step, seed, 2)
            place = torch.arange(len(i_l) + len(i_u)).split([len(i_l), len(i_u)])
            for part in range(rank * parts, (rank + 1) * parts):
                yield step, *(i.tensor_split(world * parts)[part] for i in (i_l, i_u, *place))

    if isinstance(images, torch.Tensor):
        for _, i_l, i_u, *_ in plan():
            yield images[i_l], labels[i_l], images[i_u]
        return
    items = ([(int(i), seed_of(seed, 5, step, int(k))) for i, k in zip(torch.cat([i_l, i_u]), torch.cat([k_l, k_u]))]
             for step, i_l, i_u, k_l, k_u in plan())
    for x, (_, i_l, i_u, *_) in zip(images.read(items, labels.device), plan()):
        yield x[:len(i_l)], labels[i_l.to(labels.device, non_blocking=True)], x[len(i_l):]


def in_pieces(images, index, size, device):
    """The images of an index as at test time, (n, 3, S, S) on the device with n at most `size`, and which these are."""
    which = [i for i in index.split(size) if len(i)]            # a process may have none
    if isinstance(images, torch.Tensor):
        return ((images[i].to(device), i) for i in which)
    return zip(images.read(([(int(k), None) for k in i] for i in which), device), which)


def augment(x, flip, gen):
    """Horizontal flip with chance 1/2 where `flip`, then reflect-pad by an eighth of the size and a random crop.

    x (N, 3, S, S) uint8 to the same, each image with its own draw; every offset from 0 to 2 pad is reached. MixMatch.
    """
    N, _, S, _ = x.shape
    pad, grid = S // 8, torch.arange(S, device=x.device)        # 4 at 32

    def source(flipped):                                        # which row or column of x each one of the crop is
        offset = mine(torch.randint(-pad, pad + 1, (whole(N), 1), generator=gen, device=x.device))
        i = S - 1 - (S - 1 - (grid + offset).abs()).abs()       # reflected at both borders, (N, S)
        return torch.where(flipped, S - 1 - i, i)

    upright = torch.zeros(N, 1, dtype=torch.bool, device=x.device)
    rows = source(upright)                                      # (N, S)
    cols = source(mine(torch.rand(whole(N), 1, generator=gen, device=x.device)) < 0.5 if flip else upright)
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
    sets = 8                                                    # labelled and unlabelled ones in four rotations each
    alpha = 0.5 + 0.5 * mine(torch.rand(whole(len(x)), generator=gen, device=x.device), sets)
    partner = torch.randperm(everyones(len(x)), generator=gen, device=x.device)
    if _share[1] == 1:
        return blend(alpha, x, x[partner])
    pixels = ((x + 1) * 127.5).round().byte()                   # as they were before `scale`: a quarter to send
    return blend(alpha, x, scale(beside(pixels, partner, sets)))


def mixup_share(n, beta, gen, sets=1):
    """lambda ~ Beta(beta, beta), one for each of n images, and the larger of lambda and 1 - lambda. MixMatch. (n,)"""
    concentration = torch.full((2, whole(n)), float(beta), device=gen.device)
    a, b = torch._standard_gamma(concentration, generator=gen)  # torch.distributions.Beta would take no generator
    share = mine(a / (a + b), sets)
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
        op = mine(torch.randint(14, (whole(len(x)), 1, 1, 1), generator=gen, device=x.device))
        u = mine(torch.rand(whole(len(x)), 1, 1, 1, generator=gen, device=x.device))
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
    side, row, col = (S * mine(r) for r in torch.rand(3, whole(N), 1, generator=gen, device=x.device))          # (N, 1) each
    place = torch.arange(S, device=x.device) + 0.5              # the middle of a pixel
    rows, cols = ((place - centre).abs() < side / 4 for centre in (row, col))   # (N, S); the square's side is side / 2
    return torch.where((rows[:, :, None] & cols[:, None, :]).unsqueeze(1), 127, x)
