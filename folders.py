"""Image files on disk: check and decode the files of a folder, or read them at every step.

    images, pieces, classes = load_folder(Path("my_folder"), image_size=32, skip_broken=False)

`pieces` is a dict with one entry per part (train, test, ...): the files and their labels (see listing.py).
`images` holds all of them in this order: a uint8 tensor if they fit into memory, else a `Files`, which reads
batches in worker processes. Both have the attributes files, root and levels.
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

import cli
import devices
import distributed
import listing
import progress

SMALLEST = 8        # pixels; we chose the smallest size that still gives flip_and_crop a padding of one pixel

# ---------------------------------------------------------------- load


def load_folder(root, image_size, skip_broken, *, labels_file=None, levels=None, crop="pad", flip=False,
                stream=None, workers=None, device="cpu"):
    """The images of a folder, its pieces and its classes (see the top of this file).

    labels_file: see tables.py. levels: those of an earlier run; None: find_levels.
    stream: whether images stay on disk; None: only if they do not fit into memory.
    crop, flip, workers: see Files.
    """
    if image_size < SMALLEST:
        raise cli.Refused(f"--image_size {image_size}: too small; give {SMALLEST} or more")
    pieces, classes = listing.list_folder(root, labels_file)
    if levels is None:
        levels = {} if is_imagenet(classes) else find_levels(pieces)
    if stays_on_disk(pieces, image_size, crop, stream, device):
        if not is_imagenet(classes):                    # its files come from archives with checksums
            pieces = check_files(pieces, root, skip_broken, image_size, crop)
        images = Files(all_files(pieces), image_size, crop, flip, workers, levels)
    else:
        images, pieces = decode_files(pieces, root, skip_broken, image_size, levels)
        images.files = all_files(pieces)
    images.root, images.levels = root, levels           # for inventory.py and model.pt
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


def decode_files(pieces, root, skip_broken, image_size, levels):
    """All images (M, 3, S, S) uint8, channels last in memory, and the readable pieces."""
    images = {part: np.empty((len(files), image_size, image_size, 3), np.uint8)
              for part, (files, _) in pieces.items()}

    def fill(part, i, file):
        images[part][i] = decode(file, image_size, levels=levels)

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
            problems = list(progress.count_through(pool.map(attempt, jobs), f"reading {part}", len(files)))
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


def decode(file, image_size, crop="pad", levels=None):
    """An image as at test time: resized by its shorter side, then cropped to the centre. (S, S, 3) uint8"""
    image, short = open_rgb(file, levels), short_side(image_size, crop)
    refuse_thin(image, short)
    return np.asarray(TF.center_crop(TF.resize(image, short, antialias=True), image_size))


def short_side(image_size, crop):
    """The length of the shorter side before the centre crop. S4L: 256 for images of 224."""
    return round(image_size * 256 / 224) if crop == "resized" else image_size


def refuse_thin(image, short):
    """Raise an error if the image, resized to this shorter side, would have more pixels than PIL allows."""
    if short ** 2 * max(image.size) / min(image.size) > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"an image of {image.width} x {image.height} pixels is too long and thin")


def open_rgb(file, levels=None):
    """An image of any mode as RGB, turned upright as its EXIF data says, because we predict rotations."""
    listing.endings()                                   # registers pillow-heif, also in a worker process
    with Image.open(file) as image:
        image = ImageOps.exif_transpose(image)
        if is_deep(image):                              # PIL's conversion would clip at 255
            grey, mode = np.asarray(image).astype(np.float64), image.mode
            image = Image.fromarray(to_8_bit(grey, mode, (levels or {}).get(mode[0])))
        return image.convert("RGB")


def random_crop(file, image_size, flip, seed, levels=None):
    """S4L: a random crop of the original image, resized; flipped with probability 1/2 if `flip`. (S, S, 3)"""
    image = open_rgb(file, levels)
    with torch.random.fork_rng(devices=[]):             # RandomResizedCrop takes no generator
        torch.manual_seed(seed)
        box = RandomResizedCrop.get_params(image, scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3))      # S4L
        flipped = flip and torch.rand(()) < 0.5
    image = TF.resized_crop(image, *box, (image_size, image_size), antialias=True)      # bilinear
    return np.asarray(TF.horizontal_flip(image) if flipped else image)


# ---------------------------------------------------------------- images with more than 8 bits

# Our choices. The percentiles ignore dead and hot pixels and burnt-in marks; the numbers make the levels
# exact to about one grey level of 8 bits, and finding them takes seconds.
PERCENTILES = 0.1, 99.9
LEVEL_IMAGES, LEVEL_PIXELS = 1000, 10_000
DEEP_COLOUR = "16-bit colour"           # PIL has no such mode


def is_deep(image):
    """Whether an image has grey values of 12, 16 or 32 bits: PIL's modes I, I;16 and F."""
    return image.mode[0] in "IF"


def find_levels(pieces):
    """One scale for all images with more than 8 bits: {"I" or "F": [black, white]}; empty if there are none.

    Microscopes and X-ray detectors use a part of the 16 bits, which no file states, and brightness differs
    between images for a reason. So black and white are percentiles over the images, the same for all of them.
    """
    seen = [part for part in pieces if part not in ("test", "validation")]
    files = [file for part in seen for file in pieces[part][0]]
    with ThreadPoolExecutor() as pool:
        modes = list(pool.map(deep_mode, files))
        levels = {}
        for kind, name in dict(I="12 or 16 bits", F="floating-point numbers").items():
            deep = [file for file, mode in zip(files, modes) if mode and mode[0] == kind]
            some = deep[::math.ceil(len(deep) / LEVEL_IMAGES) or 1]
            pixels = [grey for grey in pool.map(some_pixels, some) if grey is not None]
            black, white = np.percentile(np.concatenate(pixels), PERCENTILES).tolist() if pixels else (0, 0)
            if white > black:                           # else: one grey value, and to_8_bit infers its white
                levels[kind] = [black, white]
                print(f"{len(deep):,} of {len(files):,} images have {name}: grey values from {black:g} to "
                      f"{white:g} become 0 to 255, in all images alike")
    colour = modes.count(DEEP_COLOUR)
    if colour:
        print(f"note: {colour:,} of {len(files):,} images have 16 bits per colour; Pillow reads the upper 8, "
              "so images that only use the lower ones are dark")
    return levels


def deep_mode(file):
    """The mode of an image with more than 8 bits; None for others, and for files that cannot be read."""
    try:
        listing.endings()
        with Image.open(file) as image:                 # reads only the header
            in_colour = any(";16" in str(tile[-1]) for tile in image.tile)
            return image.mode if is_deep(image) else DEEP_COLOUR if in_colour else None
    except Exception:                                   # reported when the file is read
        return None


def some_pixels(file):
    """At most LEVEL_PIXELS finite grey values from all over an image; None if it cannot be read."""
    try:
        with Image.open(file) as image:
            grey = np.asarray(image).astype(np.float64).ravel()
    except Exception:                                   # reported when the file is read
        return None
    grey = grey[::math.ceil(len(grey) / LEVEL_PIXELS)]
    return grey[np.isfinite(grey)]


def to_8_bit(grey, mode, levels=None):
    """Grey values of PIL's modes I, I;16 and F as uint8.

    levels: black and white. Without them, no image of this kind was in the dataset; we infer white per image.
    """
    if not np.isfinite(grey).all():
        raise ValueError("some pixels are NaN or infinite")
    if levels:
        black, white = levels
        return np.rint((grey - black) * (255 / (white - black))).clip(0, 255).astype(np.uint8)
    if grey.max() > 65535:
        grey *= 255 / grey.max()
    elif mode.startswith("I;16") or grey.max() > 255:
        grey /= 257
    elif mode == "F" and grey.max() <= 1:
        grey *= 255
    return grey.clip(0, 255).astype(np.uint8)


# ---------------------------------------------------------------- stream


class Files(Dataset):
    """Images that stay on disk. Item (i, None) is image i for testing, item (i, seed) for training.

    crop "pad": the same as at test time; flips and crops follow on the device, as for images in memory.
    crop "resized": see random_crop.
    """

    def __init__(self, files, image_size, crop, flip, workers=None, levels=None):
        self.files = np.array(files)                    # workers would copy a list, but share an array
        self.crop, self.flip, self.levels = crop, flip, levels
        self.shape = (len(files), 3, image_size, image_size)
        self.workers = default_workers() if workers is None else workers

    def __len__(self):
        return len(self.files)

    def __getitem__(self, item):
        i, seed = item
        size, file = self.shape[-1], str(self.files[i])
        try:
            if self.crop == "pad" or seed is None:
                pixels = decode(file, size, self.crop, self.levels)
            else:
                pixels = random_crop(file, size, self.flip, seed, self.levels)
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
