"""Image files on disk: list a folder, check and decode its files, or read them at every step.

    images, pieces, classes = load_folder(Path("my_folder"), image_size=32, skip_broken=False)

`pieces` is a dict with one entry per part (train, test, ...): the files and their labels, -1 if unknown.
`images` holds all of them in this order: a uint8 tensor if they fit into memory, else a `Files`, which reads
batches in worker processes.
"""
import fcntl
import itertools
import math
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as TF
from tqdm import tqdm

import cli
import devices
import distributed

SMALLEST = 8        # pixels; we chose the smallest size that still gives flip_and_crop a padding of one pixel
ENDINGS = (*datasets.folder.IMG_EXTENSIONS, ".gif")     # of an animated image, the first frame is used

# ---------------------------------------------------------------- load


def load_folder(root, image_size, skip_broken, *, crop="pad", flip=False, stream=None, workers=None,
                device="cpu"):
    """The images of a folder, its pieces and its classes (see the top of this file).

    stream: whether images stay on disk; None: only if they do not fit into memory.
    crop, flip, workers: see Files.
    """
    if image_size < SMALLEST:
        raise cli.Refused(f"--image_size {image_size}: too small; give {SMALLEST} or more")
    pieces, classes = list_folder(root)
    if stays_on_disk(pieces, image_size, crop, stream, device):
        if not is_imagenet(classes):                    # its files come from archives with checksums
            pieces = check_files(pieces, root, skip_broken, image_size, crop)
        return Files(all_files(pieces), image_size, crop, flip, workers), pieces, classes
    images, pieces = decode_files(pieces, root, skip_broken, image_size)
    images.files = all_files(pieces)                    # for data.fingerprint
    return images, pieces, classes


def all_files(pieces):
    return [file for files, _ in pieces.values() for file in files]


def check_files(pieces, root, skip_broken, image_size, crop):
    """Read every file once, so that a broken one is reported before training. Returns the readable pieces."""
    def read_to_end(part, i, file):
        with Image.open(file) as image:
            refuse_thin(image, short_side(image_size, crop))
            image.draft("RGB", (1, 1))                  # read a JPEG to its end, but decode only a thumbnail
            image.load()

    return readable(pieces, try_files(read_to_end, pieces, root, skip_broken))


def decode_files(pieces, root, skip_broken, image_size):
    """All images (M, 3, S, S) uint8, channels last in memory, and the readable pieces."""
    images = {part: np.empty((len(files), image_size, image_size, 3), np.uint8)
              for part, (files, _) in pieces.items()}

    def fill(part, i, file):
        images[part][i] = decode(file, image_size)

    good = try_files(fill, pieces, root, skip_broken)
    joined = torch.cat([torch.from_numpy(images[part][good[part]]) for part in pieces])
    return joined.permute(0, 3, 1, 2), readable(pieces, good)


def readable(pieces, good):
    """The files, and their labels, for which `good` is true."""
    return {part: (list(itertools.compress(files, good[part])), labels[good[part]])
            for part, (files, labels) in pieces.items()}


def try_files(read, pieces, root, skip_broken):
    """Call read(part, i, file) for every file. Returns {part: boolean array, true where that succeeded}.

    Files that cannot be read are listed; then they are skipped, or the dataset is refused. Threads suffice,
    because PIL releases the GIL while it decodes.
    """
    def attempt(job):
        try:
            read(*job)
        except Exception as error:                      # PIL raises many kinds of errors for broken files
            return cli.reason(error)

    good, broken = {}, []
    with ThreadPoolExecutor() as pool:
        for part, (files, _) in pieces.items():
            jobs = [(part, i, file) for i, file in enumerate(files)]
            problems = list(tqdm(pool.map(attempt, jobs), f"reading {part}", len(files),
                                 disable=distributed.hide_bar(), leave=False))
            good[part] = np.array([problem is None for problem in problems], bool)
            broken += [(file, problem) for file, problem in zip(files, problems) if problem]
    for file, problem in broken:
        print(f"cannot read {file}: {problem}", file=sys.stderr)
    some = f"{len(broken)} of {sum(map(len, good.values()))} images"
    if broken and not skip_broken:
        raise cli.Refused(f"--dataset {root}: {some} cannot be read, the first is {broken[0][0]} (all are "
                          "listed above); repair or remove them, or give --skip_broken")
    if broken:
        print(f"skipping {some} that cannot be read")
    return good


def stays_on_disk(pieces, image_size, crop, stream, device):
    """Whether images are read at every step: on request, for --crop resized, or if memory is too small.

    Prints the decision.
    """
    size = sum(len(files) for files, _ in pieces.values()) * 3 * image_size ** 2
    copies = distributed.processes_here()               # every process of a machine holds all images
    in_ram = devices.free_memory("cpu") / copies
    free = devices.free_memory(device) if torch.device(device).type == "cuda" else in_ram
    fits = 2 * size < min(free, in_ram)                 # we leave half of the memory to the network
    if stream is False and crop == "resized":
        raise cli.Refused("--nostream: --crop resized needs the original files, not images in memory; "
                          "omit --nostream or give --crop pad")
    on_disk = crop == "resized" or (not fits if stream is None else stream)
    print(f"{'images are read from disk at every step' if on_disk else 'all images are held in memory'} "
          f"({size / 2 ** 30:.2f} GiB at {image_size} pixels, {free / 2 ** 30:.1f} GiB free; --crop {crop})")
    return on_disk


# ---------------------------------------------------------------- list


def list_folder(root):
    """The pieces and classes of train/<class>/*, test/<class>/* and/or val/<class>/*, and of unlabeled/*."""
    pieces, classes = {}, None
    for part, name in {"train": "train", "test": "test", "validation": "val"}.items():
        if not (root / name).is_dir():
            if part == "train":
                raise cli.Refused(f"--dataset {root}: no folder train/; create it with one folder of images "
                                  "per class")
            continue
        files, labels, found = list_classes(root, name)
        classes = classes or found
        if found != classes:
            differ = ", ".join(sorted(set(found) ^ set(classes)))
            raise cli.Refused(f"--dataset {root}: the class folders of train/ and {name}/ differ: {differ}; "
                              "both must have the same classes")
        pieces[part] = files, labels
    if (root / "unlabeled").is_dir():
        files = list_images(root / "unlabeled")
        pieces["unlabeled"] = files, np.full(len(files), -1)
    val_as_test(pieces)
    return pieces, classes


def list_classes(root, name):
    """The files, labels and class names of root/name/<class>/*."""
    try:
        found = datasets.ImageFolder(root / name, is_valid_file=lambda file: file.lower().endswith(ENDINGS))
    except FileNotFoundError as error:                  # no class folders, or a class folder without images
        raise cli.Refused(f"--dataset {root}: {' '.join(str(error).split())}")
    return [file for file, _ in found.samples], np.asarray(found.targets), found.classes


def list_images(folder):
    """All image files in a folder and its subfolders, sorted."""
    return sorted(os.path.join(place, name) for place, _, names in os.walk(folder, followlinks=True)
                  for name in names if name.lower().endswith(ENDINGS))


def val_as_test(pieces):
    """Without a test part, test on the validation part: ImageNet's folders are called train/ and val/."""
    if "test" not in pieces and "validation" in pieces:
        pieces["test"] = pieces.pop("validation")


def read_list(path):
    """The file names in a list, one per line, with or without their folder, as in S4L and SimCLR."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise cli.Refused(f"--labels_file {path}: cannot be read ({cli.reason(error)}); give a text file "
                          "with one image name per line")
    names = [Path(line.strip()).parts[-2:] for line in lines if line.strip()]
    if not names:
        raise cli.Refused(f"--labels_file {path}: contains no image names; write one per line")
    return names


def find_listed(path, train):
    """The positions of the listed files in `train`, the list of training files."""
    names, positions = read_list(path), {}
    for i, file in enumerate(train):
        folder, name = Path(file).parts[-2:]
        positions[folder, name] = i
        positions[name,] = -1 if (name,) in positions else i    # -1: several files have this name
    found = [positions.get(name) for name in names]
    for value, problem, remedy in [
            (None, "is not among the training images", "correct or remove the line"),
            (-1, "is the name of several training images", "write class/name")]:
        if value in found:
            more = f" ({found.count(value) - 1} more like it)" if found.count(value) > 1 else ""
            name = "/".join(names[found.index(value)])
            raise cli.Refused(f"--labels_file {path}: {name} {problem}{more}; {remedy}")
    return np.unique(found)


# ---------------------------------------------------------------- ImageNet


def imagenet_folder(data_dir):
    """The folder of ILSVRC-2012 with train/<wnid>/ and val/<wnid>/. torchvision unpacks the archives."""
    root = Path(data_dir)
    if not os.path.isdir(root):
        raise cli.Refused(f"--data_dir {data_dir}: no such folder; give the folder of ILSVRC-2012")
    unpacked = (root / "train").is_dir() and (root / "val").is_dir()
    if not unpacked or (root / ".lock").exists():       # another process may still be unpacking
        try:
            with one_at_a_time(root):
                for split in "train", "val":
                    if not (root / split).is_dir():
                        datasets.ImageNet(root, split)
        except (OSError, RuntimeError) as error:        # no archives, or a wrong checksum
            raise cli.Refused(f"--data_dir {data_dir}: contains neither train/<wnid>/ and val/<wnid>/ of "
                              f"ILSVRC-2012 nor its archives ({cli.reason(error)}); put the archives into it")
    return root


def is_imagenet(classes):
    """Whether the class folders are the thousand WordNet IDs of ILSVRC-2012."""
    return len(classes) == 1000 and all(c[:1] == "n" and c[1:].isdigit() for c in classes)


@contextmanager
def one_at_a_time(data_dir):
    """Hold a lock while downloading or unpacking, so that only the first process of a run does the work."""
    with ExitStack() as stack:
        try:
            os.makedirs(data_dir, exist_ok=True)
            fcntl.flock(stack.enter_context(open(Path(data_dir, ".lock"), "a")), fcntl.LOCK_EX)
        except OSError:                                 # a read-only folder: nothing will be unpacked into it
            pass
        yield


# ---------------------------------------------------------------- decode


def decode(file, image_size, crop="pad"):
    """An image as at test time: resized by its shorter side, then cropped to the centre. (S, S, 3) uint8"""
    image, short = open_rgb(file), short_side(image_size, crop)
    refuse_thin(image, short)
    return np.asarray(TF.center_crop(TF.resize(image, short, antialias=True), image_size))


def short_side(image_size, crop):
    """The length of the shorter side before the centre crop. S4L: 256 for images of 224."""
    return round(image_size * 256 / 224) if crop == "resized" else image_size


def refuse_thin(image, short):
    """Raise an error if the image, resized to this shorter side, would have more pixels than PIL allows."""
    if short ** 2 * max(image.size) / min(image.size) > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"an image of {image.width} x {image.height} pixels is too long and thin")


def open_rgb(file):
    """An image of any mode as RGB, turned upright as its EXIF data says, because we predict rotations."""
    with Image.open(file) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":                       # 16 or 32 bits: PIL's conversion would clip at 255
            image = Image.fromarray(to_8_bit(np.asarray(image).astype(np.float64), image.mode))
        return image.convert("RGB")


def to_8_bit(grey, mode):
    """Grey values of PIL's modes I, I;16 and F as uint8. White is not standardised; we infer it per image."""
    if not np.isfinite(grey).all():
        raise ValueError("some pixels are NaN or infinite")
    if grey.max() > 65535:
        grey *= 255 / grey.max()
    elif mode.startswith("I;16") or grey.max() > 255:
        grey /= 257
    elif mode == "F" and grey.max() <= 1:
        grey *= 255
    return grey.clip(0, 255).astype(np.uint8)


def random_crop(file, image_size, flip, seed):
    """S4L: a random crop of the original image, resized; flipped with probability 1/2 if `flip`. (S, S, 3)"""
    image = open_rgb(file)
    with torch.random.fork_rng(devices=[]):             # RandomResizedCrop takes no generator
        torch.manual_seed(seed)
        box = RandomResizedCrop.get_params(image, scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3))      # S4L
        flipped = flip and torch.rand(()) < 0.5
    image = TF.resized_crop(image, *box, (image_size, image_size), antialias=True)      # bilinear
    return np.asarray(TF.horizontal_flip(image) if flipped else image)


# ---------------------------------------------------------------- stream


class Files(Dataset):
    """Images that stay on disk. Item (i, None) is image i for testing, item (i, seed) for training.

    crop "pad": the same as at test time; flips and crops follow on the device, as for images in memory.
    crop "resized": see random_crop.
    """

    def __init__(self, files, image_size, crop, flip, workers=None):
        self.files = np.array(files)                    # workers would copy a list, but share an array
        self.crop, self.flip = crop, flip
        self.shape = (len(files), 3, image_size, image_size)
        self.workers = default_workers() if workers is None else workers

    def __len__(self):
        return len(self.files)

    def __getitem__(self, item):
        i, seed = item
        size, file = self.shape[-1], str(self.files[i])
        try:
            if self.crop == "pad" or seed is None:
                pixels = decode(file, size, self.crop)
            else:
                pixels = random_crop(file, size, self.flip, seed)
        except Exception as error:                      # the file was readable when the run started
            raise OSError(f"--dataset: {file} can no longer be read ({cli.reason(error)}); "
                          "restore it and run again")
        return torch.from_numpy(pixels.copy())          # (S, S, 3)

    def batches(self, plan, device):
        """Batches (n, 3, S, S) on the device for an iterable of lists of items, in the same order.

        While one batch is used, the next is copied to the device, and workers read those that follow.
        """
        cuda = torch.device(device).type == "cuda"
        loader = DataLoader(self, batch_sampler=plan, num_workers=self.workers, pin_memory=cuda,
                            worker_init_fn=start_worker)
        side, ahead = torch.cuda.Stream(device) if cuda else None, None
        for x in without_traceback(loader):
            with torch.cuda.stream(side):               # does nothing if side is None
                x = x.permute(0, 3, 1, 2).to(device, non_blocking=True)
            if ahead is not None:
                yield ready(ahead, side)
            ahead = x
        if ahead is not None:
            yield ready(ahead, side)


def without_traceback(loader):
    """The batches of a loader. If a worker cannot read a file, we show the last line of its traceback."""
    try:
        yield from loader
    except OSError as error:
        raise cli.Refused(str(error).strip().splitlines()[-1].removeprefix("OSError: "))


def ready(x, side):
    """A batch that was copied on another CUDA stream, ready for use on the current one."""
    if side:
        torch.cuda.current_stream(x.device).wait_stream(side)
        x.record_stream(torch.cuda.current_stream(x.device))
    return x


def start_worker(worker):
    """Workers ignore Ctrl-C, which reaches them too: the process that they read for stops them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in signal.SIGTERM, signal.SIGUSR1:
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)


def default_workers():
    """Our choice: one worker per CPU core, divided among the processes on this machine."""
    return max(1, devices.cores() // distributed.processes_here())
