"""The file given with --labels_file: a table of images and labels, or a list of image names.

A table has the header `image,label` or `image,label,split`. Its rows say which images are labelled, and with
which class; all other images of the folder are unlabelled. A list has no header and one name per line; it
says which of the images in train/<class>/ keep their label, as in S4L and SimCLR.
"""
import csv
import os
from pathlib import Path

import numpy as np

import cli

PARTS = {"train": "train", "test": "test", "val": "validation", "unlabeled": "unlabeled"}      # in `split`
DELIMITERS = ",;\t"                     # the semicolon is that of spreadsheets in many European languages

# ---------------------------------------------------------------- tables


def is_table(path):
    """Whether the file starts with the header of a table. A file that cannot be read is none."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return delimiter_of(file.readline()) is not None
    except (OSError, ValueError):
        return False


def delimiter_of(header):
    """The delimiter with which the header starts with image,label; None if there is none."""
    return next((d for d in DELIMITERS if columns_of(header.split(d))[:2] == ["image", "label"]), None)


def columns_of(cells):
    return [cell.strip(" \t\r\n\"'").lower() for cell in cells]


def count_listed(path):
    """The number of images that keep their label, for the name of the run. Refuses a file that is damaged."""
    if not is_table(path):
        return len(read_list(path))
    return sum(part == "train" and label != "" for _, _, label, part in read_table(path))


def read_table(path):
    """The rows as (line, image, label, part). The label may be empty, the part is one of PARTS' values."""
    try:
        # utf-8-sig: Excel starts a UTF-8 file with a byte-order mark.
        with open(path, newline="", encoding="utf-8-sig") as file:
            delimiter = delimiter_of(file.readline())
            file.seek(0)
            lines = [(k, [cell.strip() for cell in row])
                     for k, row in enumerate(csv.reader(file, delimiter=delimiter), 1) if any(row)]
    except (OSError, ValueError, csv.Error) as error:
        raise cli.Refused(f"--labels_file {path}: cannot be read ({cli.reason(error)}); give a CSV file in "
                          "UTF-8")
    header, rows = columns_of(lines[0][1]), []
    if header not in (["image", "label"], ["image", "label", "split"]):
        raise cli.Refused(f"--labels_file {path}: the header is {','.join(header)}; it must be image,label "
                          "or image,label,split")
    for line, cells in lines[1:]:
        if len(cells) != len(header) or not cells[0]:
            raise cli.Refused(f"--labels_file {path}: line {line} does not have the {len(header)} values of "
                              "the header; correct it")
        image, label, split = [*cells, ""][:3]
        part = PARTS.get(split.lower() or "train")
        if part is None:
            raise cli.Refused(f"--labels_file {path}: line {line} has split {split}; it must be one of "
                              f"{', '.join(PARTS)}")
        if not label and part in ("test", "validation"):
            raise cli.Refused(f"--labels_file {path}: line {line} is for {split} but has no label; add it")
        rows.append((line, image, label, part))
    if not any(label and part == "train" for _, _, label, part in rows):
        raise cli.Refused(f"--labels_file {path}: lists no labelled training image; add some")
    return rows


def assign(path, root, files):
    """The pieces and classes of a folder whose labels are in a table; files: all images of the folder.

    The label of an image for which split is `unlabeled` is only used for metrics.
    """
    rows = read_table(path)
    classes = sorted({label for _, _, label, part in rows if part == "train" and label}, key=by_number)
    number = {name: k for k, name in enumerate(classes)}
    given = {}                                                  # position of a file: (label, part)
    for (line, name, label, part), i in zip(rows, find_rows(path, root, files, rows)):
        if label and part in ("test", "validation") and label not in number:
            raise cli.Refused(f"--labels_file {path}: line {line} has label {label}, which no training image "
                              "has; correct it")
        part = part if label else "unlabeled"
        if given.setdefault(i, (label, part)) != (label, part):
            raise cli.Refused(f"--labels_file {path}: line {line} lists {name} again, with another label or "
                              "split; remove one of the lines")
    pieces = {}
    for part in PARTS.values():
        own = [i for i in range(len(files)) if given.get(i, ("", "unlabeled"))[1] == part]
        if own:
            labels = [number.get(given[i][0], -1) if i in given else -1 for i in own]
            pieces[part] = [files[i] for i in own], np.array(labels)
    return pieces, classes


def by_number(label):
    """Sorts whole numbers by value, as in .npz files, and before other labels."""
    is_number = label.isascii() and label.isdigit()
    return not is_number, int(label) if is_number else 0, label


def find_rows(path, root, files, rows):
    """The position in `files` of the image of each row.

    An image is given by its path in the folder, or by the last parts of its path if only one file has them.
    """
    paths = {Path(os.path.relpath(file, root)).parts: i for i, file in enumerate(files)}
    names = [Path(name).parts for _, name, *_ in rows]
    lengths, ends = {len(name) for name in names}, {}           # ends: the last parts of all paths
    for i, file in enumerate(files):
        parts = Path(os.path.abspath(file)).parts
        for k in lengths:
            if k <= len(parts):
                ends[parts[-k:]] = -1 if parts[-k:] in ends else i              # -1: several files
    found = [paths.get(name, ends.get(name)) for name in names]
    refuse_unknown(path, [f"{row[1]} (line {row[0]})" for row in rows], found, f"images of {root}",
                   "write its path in the folder")
    return found


def refuse_unknown(path, names, found, images, remedy):
    """Refuse names that no file has (None) or several files have (-1)."""
    table = "" if is_table(path) else " (a table needs the header image,label)"
    for value, problem, hint in [
            (None, f"is not among the {images}", f"correct or remove the line{table}"),
            (-1, f"is the name of several {images}", remedy)]:
        if value in found:
            more = f" ({found.count(value) - 1} more like it)" if found.count(value) > 1 else ""
            raise cli.Refused(f"--labels_file {path}: {names[found.index(value)]} {problem}{more}; {hint}")


# ---------------------------------------------------------------- lists of names


def read_list(path):
    """The file names in a list, one per line, with or without their folder."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise cli.Refused(f"--labels_file {path}: cannot be read ({cli.reason(error)}); give a table with "
                          "the header image,label, or a text file with one image name per line")
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
    refuse_unknown(path, ["/".join(name) for name in names], found, "training images", "write class/name")
    return np.unique(found)
