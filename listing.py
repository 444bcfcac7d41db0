"""Which files of a folder are images, and which part and class each of them belongs to.

    pieces, classes = list_folder(Path("my_folder"))

`pieces` is a dict with one entry per part (train, test, validation, unlabeled): the files and their labels,
-1 if unknown. No image is skipped silently: files that look like images but are not read are named.
"""
import os
import re
from collections import Counter, defaultdict
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import features
from torchvision import datasets

import cli
import tables

# Not read, unless `endings` says otherwise; our collection of what cameras, scanners and programs write.
LOOK_LIKE_IMAGES = frozenset(re.findall(r"\S+", """\
.heic .heif .hif .avif .jxl .jfif .jpe .jp2 .j2k .j2c .jpf .jpx .ico .cur .icns .svg .svgz .psd .xcf .tga .dds
.pcx .eps .ai .exr .hdr .qoi .apng .emf .wmf .raw .dng .cr2 .cr3 .crw .nef .nrw .arw .sr2 .orf .rw2 .raf .pef
.srw .x3f .3fr .dcm .dicom .nii .czi .nd2 .lsm .vsi .svs .ndpi .mrxs .fits .fit"""))
HEIF = (".heic", ".heif", ".hif")
NAMED = 20                              # unread files of one kind that are named; we chose a number to skim
HELD_OUT = 0.1                          # of the labelled images become the test set; as for .npz files

# ---------------------------------------------------------------- which files are images


@lru_cache
def endings():
    """The endings of the names of image files that we read. Of an animated image, we use the first frame."""
    found = (*datasets.folder.IMG_EXTENSIONS, ".gif")
    if features.check("avif"):                          # depends on how Pillow was built
        found += (".avif",)
    if find_spec("pillow_heif"):
        import pillow_heif
        pillow_heif.register_heif_opener()              # from now on, Pillow opens these files
        found += HEIF
    return found


def is_image(name):
    return str(name).lower().endswith(endings())


def why_unread(name):
    """Why a file that looks like an image is not read, with a remedy; None if it does not look like one."""
    ending = os.path.splitext(name)[1].lower()
    if ending not in LOOK_LIKE_IMAGES or is_image(name):
        return None
    if ending in HEIF:
        return f"to read {ending} files, install the package pillow-heif"
    if ending == ".avif":
        return "this Pillow was built without AVIF; install another one, or convert the file to PNG"
    return f"{ending} files are not read; convert the file to PNG or JPEG"


def is_hidden(name):
    """Hidden folders, such as .ipynb_checkpoints, and the folder that macOS adds to ZIP archives."""
    return name.startswith(".") or name == "__MACOSX"


def is_in_hidden_folder(file, root):
    # Fast, for the million files of ImageNet.
    if os.sep + "." not in os.sep + file and "__MACOSX" not in file:
        return False
    return any(map(is_hidden, Path(os.path.relpath(file, root)).parts[:-1]))


def print_unread(root, files):
    """Name the files that look like images, grouped by ending, and count all others in one line."""
    groups, others = defaultdict(list), []
    for file in sorted(map(str, files)):
        named = is_image(file) or why_unread(file)
        if named and not is_in_hidden_folder(file, root):
            groups[os.path.splitext(file)[1].lower()].append(os.path.relpath(file, root))
        else:
            others.append(file)
    for names in groups.values():
        reason = why_unread(names[0]) or "in no folder of a class"
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        print(f"not read: {', '.join(names[:NAMED])}{more} ({reason})")
    if others:
        kinds = Counter(os.path.splitext(file)[1].lower() or os.path.basename(file) for file in others)
        hidden = sum(is_in_hidden_folder(file, root) for file in others)
        some = f", {hidden} of them in hidden folders" if hidden else ""
        shown = ", ".join(kind for kind, _ in kinds.most_common(5)) + (", ..." if len(kinds) > 5 else "")
        print(f"not used: {len(others)} other file{'' if len(others) == 1 else 's'} ({shown}){some}")


# ---------------------------------------------------------------- list a folder


def list_folder(root, labels_file=None):
    """The pieces and classes of a folder, in one of three forms:

    with a table of labels, all images in it; with train/, the folders train/<class>/*, test/<class>/* and/or
    val/<class>/*, and unlabeled/*; else <class>/* and unlabeled/*.
    """
    if root.resolve() == root.resolve().parent:         # it would search the whole disk
        raise cli.Refused(f"--dataset {root}: is the root of the disk; give the folder of your images")
    unread, table = [], labels_file and tables.is_table(labels_file)
    has_parts = not table and (root / "train").is_dir()
    if table:
        files = list_images(root, unread)
        unread = [file for file in unread if os.path.realpath(file) != os.path.realpath(labels_file)]
    elif has_parts:
        pieces, classes = list_parts(root, unread)
    else:
        pieces, classes = list_flat(root, unread)
    if not table and (root / "unlabeled").is_dir():
        files = list_images(root / "unlabeled", unread)
        pieces["unlabeled"] = files, np.full(len(files), -1)
    print_unread(root, unread)
    if table:
        pieces, classes = tables.assign(labels_file, root, files)
    val_as_test(pieces)
    if "test" not in pieces and not has_parts:          # data.make_split does it for train/ and .npz files
        listed = tables.find_listed(labels_file, pieces["train"][0]) if labels_file and not table else []
        pieces = hold_out_test(pieces, listed, root)
    return pieces, classes


def list_parts(root, unread):
    """The pieces and classes of train/<class>/*, test/<class>/* and val/<class>/*."""
    pieces, classes = {}, None
    for part, name in {"train": "train", "test": "test", "validation": "val"}.items():
        if not (root / name).is_dir():
            continue
        found = class_folders(root, root / name)
        classes = classes or found
        if not set(found) <= set(classes):
            differ = ", ".join(sorted(set(found) ^ set(classes)))
            raise cli.Refused(f"--dataset {root}: the class folders of train/ and {name}/ differ: {differ}; "
                              f"every class of {name}/ must be in train/")
        pieces[part] = list_classes(root / name, classes, unread)
    refuse_empty(root, pieces, classes)
    unread += [entry.path for entry in os.scandir(root) if entry.is_file()]
    others = sorted(set(subfolders(root)) - {"train", "test", "val", "unlabeled"})
    if others:
        print(f"not used: {', '.join(f'{name}/' for name in others)} "
              "(only train/, test/, val/ and unlabeled/ are used)")
    return pieces, classes


def list_flat(root, unread):
    """The pieces and classes of <class>/*."""
    folders = [name for name in subfolders(root) if name != "unlabeled"]
    parts = [name for name in folders if name in ("test", "val")]
    if parts or not folders:
        found = f", only {parts[0]}/" if parts else ""
        raise cli.Refused(f"--dataset {root}: no folder train/{found}; create it with one folder of images "
                          "per class, or put the folders of the classes into it directly")
    if "unlabelled" in folders:                         # else it would be a class
        raise cli.Refused(f"--dataset {root}: rename unlabelled/ to unlabeled/, the name of the part")
    inner = next((name for name in folders if (root / name / "train").is_dir()), None)
    if inner:
        raise cli.Refused(f"--dataset {root}: no folder train/, but {inner}/ has one; "
                          f"give --dataset {root / inner}")
    pieces = {"train": list_classes(root, folders, unread)}
    refuse_empty(root, pieces, folders)
    return pieces, folders


def subfolders(folder):
    """The names of the folders in a folder, sorted, without the hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not is_hidden(entry.name))


def class_folders(root, folder):
    found = subfolders(folder)
    if not found:
        raise cli.Refused(f"--dataset {root}: {folder.name}/ contains no class folder; create one folder of "
                          "images per class")
    return found


def list_classes(folder, classes, unread):
    """The files and labels of folder/<class>/*. Adds files that are not read to `unread`."""
    def is_read(file):
        good = is_image(file) and not is_in_hidden_folder(file, folder)
        if not good:
            unread.append(file)
        return good

    there = {name: k for k, name in enumerate(classes) if (folder / name).is_dir()}
    samples = datasets.folder.make_dataset(folder, there, is_valid_file=is_read, allow_empty=True)
    unread += [entry.path for entry in os.scandir(folder) if entry.is_file()]   # in no folder of a class
    return [file for file, _ in samples], np.array([label for _, label in samples], np.int64)


def refuse_empty(root, pieces, classes):
    """Refuse a class without training images. A class without test images is only noted (notes.py)."""
    empty = [name for k, name in enumerate(classes) if not (pieces["train"][1] == k).any()]
    if empty:
        raise cli.Refused(f"--dataset {root}: found no image in the class folder {', '.join(empty)}; add "
                          f"some, or remove the folder (names of images end in {', '.join(endings())})")


def list_images(folder, unread):
    """All image files in a folder and its subfolders, sorted. Adds files that are not read to `unread`."""
    files = [os.path.join(place, name) for place, _, names in os.walk(folder, followlinks=True)
             for name in names]
    good = [is_image(file) and not is_in_hidden_folder(file, folder) for file in files]
    unread += [file for file, read in zip(files, good) if not read]
    return sorted(file for file, read in zip(files, good) if read)


def val_as_test(pieces):
    """Without a test part, test on the validation part: ImageNet's folders are called train/ and val/."""
    if "test" not in pieces and "validation" in pieces:
        pieces["test"] = pieces.pop("validation")


def hold_out_test(pieces, listed, root):
    """Move a tenth of the training images, at least one per class, to a test part; the same for every seed.

    Images in `listed` (positions) are not moved, because they are to be labelled. The only image of a class
    stays in training.
    """
    files, labels = pieces["train"]
    free, rng, test = np.setdiff1d(np.arange(len(files)), listed), np.random.default_rng(0), []
    for k in np.unique(labels):
        own, count = free[labels[free] == k], (labels == k).sum()
        test += rng.permutation(own)[:min(max(1, round(HELD_OUT * count)), count - 1)].tolist()
    if not test:
        raise cli.Refused(f"--dataset {root}: no test set, and too few images to hold one out; add images")
    train, test = np.setdiff1d(np.arange(len(files)), test), np.sort(test)
    print(f"no test set is given: {len(test)} of {len(files)} labelled images (a tenth, at least one per "
          "class) are held out as the test set")
    moved = {part: ([files[i] for i in own], labels[own])
             for part, own in (("train", train), ("test", test))}
    return moved | {part: piece for part, piece in pieces.items() if part != "train"}
