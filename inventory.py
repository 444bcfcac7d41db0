"""What the data of a run consists of: names of its images, fingerprint, split.csv, and notes on problems."""
import hashlib
import os
import zlib
from pathlib import Path

import numpy as np
import torch

import distributed
import folders

FEW_TEST_IMAGES = 100           # we chose it: below, one image is more than a percent of the error
UNEVEN = 10                     # largest by smallest class; we chose it: the error hides such a small class
PARTS = {"labeled": "labelled", "unlabeled": "unlabelled", "validation": "validation", "test": "test"}

# ---------------------------------------------------------------- which images these are


def image_names(images):
    """The path of each image relative to the dataset; for arrays, its position, such as train_images[7]."""
    if hasattr(images, "files"):                                # a folder, in memory or on disk
        return [os.path.relpath(file, images.root) for file in images.files]
    sizes = getattr(images, "sizes", {"images": len(images)})
    return [f"{key}[{i}]" for key, n in sizes.items() for i in range(n)]


def fingerprint(images, labels, parts, classes, like=None):
    """A checksum of the images, labels and parts, in their order.

    For a folder, it covers the paths in it, the sizes of the files and the classes, so that a folder can be
    moved, but not exchanged. like: the fingerprint of an earlier run. Eight digits come from a version that
    used the last two parts of each path; we still use them for ImageNet, whose sizes take too long to read.
    """
    value = zlib.crc32(labels.numpy())
    for part, index in parts.items():
        value = zlib.crc32(f"{part} {len(index)}".encode(), value)
    if not hasattr(images, "files"):
        for chunk in images.permute(0, 2, 3, 1).split(10_000):
            value = zlib.crc32(chunk.numpy(), value)
        return f"{value:08x}"
    if folders.is_imagenet(classes) or like and len(like) == 8:
        names = ["/".join(Path(str(file)).parts[-2:]) for file in images.files]
        return f"{checksum(names, value):08x}"
    sizes = [str(os.path.getsize(file)) for file in images.files]
    # 12 digits: distributed.agree exchanges floating-point numbers, which are exact up to 2^53.
    return f"{checksum([*classes, *image_names(images)], value):08x}{checksum(sizes) & 0xffff:04x}"


def checksum(words, value=0):
    return zlib.crc32("\n".join(words).encode(errors="surrogateescape"), value)


def split_rows(images, labels, split, classes):
    """The rows of split.csv: every image once, with its class if known. On ImageNet, S4L's labelled images
    are also among the unlabelled ones; here they are labelled.
    """
    names, labels, rows = image_names(images), labels.tolist(), {}
    for part, word in PARTS.items():
        for i in split[part].tolist():
            known = classes[labels[i]] if labels[i] >= 0 else ""
            rows.setdefault(i, {"file": names[i], "class": known, "split": word})
    return [rows[i] for i in sorted(rows)]


# ---------------------------------------------------------------- notes


def print_notes(images, labels, split, classes):
    """Print what makes a test error misleading: few test images, uneven classes, copies in train and test."""
    if distributed.rank():
        return
    labels, test = labels.numpy(), split["test"]
    counts = np.bincount(labels[test], minlength=len(classes))
    if len(test) < FEW_TEST_IMAGES:
        print(f"note: the test set has {len(test)} images; one image is {100 / len(test):.1f} % of the "
              "error, so small differences between runs mean little")
    missing = [name for name, n in zip(classes, counts) if not n]
    if missing:
        shown = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        print(f"note: the test set has no images of {len(missing)} of {len(classes)} classes ({shown}), "
              "so the test error says nothing about them")
    training = np.union1d(split["labeled"], split["unlabeled"])
    counts = np.bincount(labels[training][labels[training] >= 0], minlength=len(classes))
    most, fewest = counts.argmax(), counts.argmin()
    if counts[most] >= UNEVEN * counts[fewest]:
        print(f"note: the classes are very uneven: {counts[most]:,} training images of {classes[most]}, "
              f"{counts[fewest]:,} of {classes[fewest]}; look at the error of each class (evaluate.py test)")
    copies = {} if folders.is_imagenet(classes) else find_copies(images, test, np.setdiff1d(training, test))
    if copies:
        names = image_names(images)
        i, k = next(iter(copies.items()))
        print(f"note: {len(copies):,} of {len(test):,} test images are also among the training images, so "
              f"the test error is too low; for example {names[i]} is {names[k]}")


def find_copies(images, test, training):
    """The test images that equal a training image: {position: position of the first such training image}."""
    if isinstance(images, torch.Tensor):
        pixels = images.permute(0, 2, 3, 1).numpy()             # contiguous, as the images are channels last

        def content(i):
            return pixels[i].tobytes()
    else:
        sizes = {i: os.path.getsize(images.files[i]) for i in (*test.tolist(), *training.tolist())}
        shared = {sizes[i] for i in test.tolist()} & {sizes[i] for i in training.tolist()}
        # Only files of equal size can be equal, so few files are read.
        test, training = (np.array([i for i in part.tolist() if sizes[i] in shared], np.int64)
                          for part in (test, training))

        def content(i):
            return Path(images.files[i]).read_bytes()

    first = {}
    wanted = {i: hashlib.blake2b(content(i)).digest() for i in test.tolist()}
    hashes = set(wanted.values())
    for i in training.tolist():
        digest = hashlib.blake2b(content(i)).digest()
        if digest in hashes:
            first.setdefault(digest, i)
    return {i: first[digest] for i, digest in wanted.items() if digest in first}


# ---------------------------------------------------------------- numbers per class


def count_images(labels, split, num_classes):
    """{part: images per class (C + 1,)}; the last number counts images of unknown class."""
    labels = np.asarray(labels)
    known = {part: np.where(labels[i] < 0, num_classes, labels[i]) for part, i in split.items()}
    return {PARTS[part]: np.bincount(y, minlength=num_classes + 1) for part, y in known.items() if len(y)}
