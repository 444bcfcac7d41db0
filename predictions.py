"""The predictions of a trained classifier as tables, features and sheets of images, for evaluate.py.

    p = probabilities(net, x, device)                           # (N, C), from uint8 images (N, 3, S, S)
    write_predictions(files, decode, classify, classes, top, out, batch)        # a CSV file and a sheet

A file is a pair (path, None), or (path, what is wrong with it). decode(file) returns (image, None), or
(None, what is wrong with it); an image is a uint8 array (S, S, 3).
"""
import csv
import logging
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import augmentation
import cli
import data
import listing
import plots
import progress
import sheets

# We chose both: three rows of eight images are enough to see what is easy, and five to see what goes wrong.
EXTREMES, WRONG = 24, 40
FIRST = "file", "class", "probability", "error"                 # the first columns of predictions.csv


@torch.inference_mode()
def probabilities(net, x, device):
    """p(y|x) for uint8 images (N, 3, S, S). Returns (N, C) on the CPU.

    In float64, because confident predictions would all be 1 in float32, which the AUC counts as ties.
    """
    return net(augmentation.scale(x.to(device)))[0].float().cpu().double().softmax(-1)


@torch.inference_mode()
def features_of(net, x, device):
    """The backbone's features of uint8 images (N, 3, S, S). Returns (N, F) float32 on the CPU."""
    return net.backbone(augmentation.scale(x.to(device))).float().cpu()


@contextmanager
def quiet():
    """Without PIL's warnings about odd files, and matplotlib's about letters that its font does not have."""
    log = logging.getLogger("PIL")
    level = log.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        log.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            log.setLevel(level)


# ---------------------------------------------------------------- tables


def probability_columns(classes, top, taken):
    """The columns after those in `taken`: one per class, or a class and its probability per rank from 2."""
    if top:
        return [f"{name}_{rank}" for rank in range(2, top + 1) for name in ("class", "probability")]
    return [f"p({name})" if name in taken else name for name in classes]


def probability_cells(p, classes, top):
    """The cells of these columns for one image. p: (C,)"""
    if not top:
        return [f"{value:.6f}" for value in p.tolist()]
    best = p.topk(top)
    ranks = list(zip(best.indices.tolist(), best.values.tolist()))[1:]
    return [cell for c, value in ranks for cell in (classes[c], f"{value:.6f}")]


def tested_rows(names, y, p, classes, top):
    """The rows of evaluation/predictions.csv as dicts."""
    first = "file", "true class", "predicted class", "probability"
    columns = [*first, *probability_columns(classes, top, first)]
    confidence, predicted = (v.tolist() for v in p.max(1))
    return [dict(zip(columns, [name, classes[true], classes[c], f"{value:.6f}",
                               *probability_cells(row, classes, top)]))
            for name, true, c, value, row in zip(names, y.tolist(), predicted, confidence, p)]


def write_predictions(files, decode, classify, classes, top, out, batch):
    """Write one row per file to `out`, batch by batch, and the sheet next to it. Returns how many failed.

    classify(x) returns p(y|x) of uint8 images (N, 3, S, S).
    """
    kept, failed = [], 0                                        # kept: (probability, image, caption)
    with out.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer, columns = csv.writer(file, lineterminator="\n"), probability_columns(classes, top, FIRST)
        writer.writerow([*FIRST, *columns])
        for paths, images, problems in decoded_batches(files, decode, batch):
            answers = iter(classify(to_tensor(images)) if images else ())
            images = iter(images)
            for path, problem in zip(paths, problems):
                if problem:
                    failed += 1
                    writer.writerow([path, "", "", problem, *("" for _ in columns)])
                    continue
                p = next(answers)
                value, name = p.max().item(), classes[p.argmax()]
                writer.writerow([path, name, f"{value:.6f}", "", *probability_cells(p, classes, top)])
                text = f"{caption(name, value)}\n{plots.shorten_start(path.name)}"
                kept.append((value, next(images), text))
            kept.sort(key=lambda item: -item[0])
            del kept[EXTREMES:len(kept) - EXTREMES]
    if kept:
        write_extremes(kept, len(files) - failed, sheet_of(out))
    return failed


def sheet_of(out):
    """The sheet that belongs to a table."""
    return out.with_suffix(".png")


def decoded_batches(files, decode, batch):
    """Yield, per batch of files, their paths, the images that can be read, and a problem or None per file."""
    with (ThreadPoolExecutor() as pool,
          tqdm(total=len(files), unit="image", disable=None, leave=False) as bar):
        for k in range(0, len(files), batch):
            decoded = list(pool.map(decode, files[k:k + batch]))
            yield ([path for path, _ in files[k:k + batch]],
                   [image for image, problem in decoded if problem is None],
                   [problem for _, problem in decoded])
            bar.update(len(decoded))


def to_tensor(images):
    """Images (S, S, 3) as one tensor (N, 3, S, S)."""
    return torch.as_tensor(np.stack(images)).permute(0, 3, 1, 2)


def features_of_files(decoded, features, num_features):
    """The arrays of embeddings.npz from decoded_batches, and {path: problem} of the files without features.

    features(x) returns (N, num_features) for uint8 images (N, 3, S, S).
    """
    names, rows, problems = [], [torch.zeros(0, num_features)], {}
    for paths, images, why in decoded:
        if images:
            rows.append(features(to_tensor(images)))
        names += [str(path) for path, problem in zip(paths, why) if not problem]
        problems |= {path: problem for path, problem in zip(paths, why) if problem}
    return dict(files=np.array(names, dtype=str), features=torch.cat(rows).numpy()), problems


# ---------------------------------------------------------------- sheets


def caption(name, probability):
    return f"{plots.shorten(name, 13)}, {100 * probability:.0f} %"


def write_extremes(kept, total, path):
    """The most and the least confident predictions; kept: (probability, image, caption), in that order."""
    most, least = kept[:EXTREMES], kept[max(EXTREMES, len(kept) - EXTREMES):][::-1]
    title = f"{len(most)} most confident of {total:,} predictions" if least else "Most confident first"
    groups = [(title, most)]
    if least:
        groups.append((f"{len(least)} least confident, the least confident first", least))
    sheets.plot_sheet([(heading, [(image, text) for _, image, text in group]) for heading, group in groups],
                     path)


def write_wrong(images, index, names, p, y, classes, path):
    """A sheet of the wrong predictions, most confident first. Without any, removes an earlier sheet.

    names: those of the files, which a reader may want to look at.
    """
    confidence, predicted = p.max(1)
    wrong = (predicted != y).nonzero()[:, 0]
    if not len(wrong):
        path.unlink(missing_ok=True)
        return
    order = wrong[confidence[wrong].argsort(descending=True, stable=True)][:WRONG]
    shown = torch.cat([x for x, _ in data.test_batches(images, index[order], WRONG, "cpu")])
    cells = [(x.permute(1, 2, 0).numpy(),
              f"{caption(classes[predicted[k]], confidence[k])}\ntrue: {plots.shorten(classes[y[k]], 13)}\n"
              f"{plots.shorten_start(os.path.basename(names[k]))}") for x, k in zip(shown, order)]
    some = f" (the first {WRONG})" if len(wrong) > WRONG else ""
    heading = (f"{len(wrong):,} of {len(y):,} predictions are wrong; predicted and true class, "
               "most confident first")
    sheets.plot_sheet([(heading + some, cells)], path)


# ---------------------------------------------------------------- other labelled data


def load_other(path, saved, decode):
    """Labelled images of the run's classes from another place: images, labels and names, as at test time."""
    if not os.path.exists(path):
        raise cli.Refused(f"--other {path}: no such file or folder")
    if os.path.isdir(path):
        images, labels, names = read_other_folder(Path(path), saved["classes"], decode)
    elif path.endswith(".npz"):
        images, labels, names = read_other_npz(path, saved["classes"], saved["image_size"])
    else:
        raise cli.Refused(f"--other {path}: must be a folder with one folder of images per class, "
                          "or an .npz file")
    absent = [name for c, name in enumerate(saved["classes"]) if c not in set(labels.tolist())]
    if absent:
        print(f"note: --other {path} has no images of {len(absent)} of {len(saved['classes'])} classes: "
              f"{', '.join(absent[:5])}{' ...' if len(absent) > 5 else ''}")
    return images, labels, names


def read_other_folder(root, classes, decode):
    """The images of root/test/<class>/*, of root/val/<class>/* or of root/<class>/*. All must be readable."""
    place = next((root / part for part in ("test", "val") if (root / part).is_dir()), root)
    found = listing.subfolders(place)
    unknown = [name for name in found if name not in classes]
    if unknown or not found:
        problem = f"its folder {unknown[0]} is not a class of the run" if unknown else "has no class folders"
        raise cli.Refused(f"--other {root}: {problem}; name the folders after its classes: "
                          f"{', '.join(classes[:10])}{' ...' if len(classes) > 10 else ''}")
    unread = [entry.path for entry in os.scandir(place) if entry.is_file()]     # in no folder of a class
    listed = [(Path(file), classes.index(name)) for name in found
              for file in listing.list_images(place / name, unread)]
    listing.print_unread(root, unread)
    if not listed:
        raise cli.Refused(f"--other {root}: contains no images; put them into one folder per class")
    with ThreadPoolExecutor() as pool:
        jobs = [(file, None) for file, _ in listed]
        decoded = list(progress.count_through(pool.map(decode, jobs), "reading", len(jobs)))
    broken = [(file, problem) for (file, _), (_, problem) in zip(listed, decoded) if problem]
    if broken:
        raise cli.Refused(f"--other {root}: {len(broken)} of {len(listed)} images cannot be read, the first "
                          f"is {broken[0][0]} ({broken[0][1]}); repair or remove them")
    files, labels = zip(*listed)
    return to_tensor([image for image, _ in decoded]), torch.tensor(labels), [str(file) for file in files]


def read_other_npz(path, classes, image_size):
    """The images test_images, or else train_images, and their labels, which must be classes of the run."""
    try:
        with np.load(path, allow_pickle=False) as file:         # never run code from the file
            prefix = "test" if "test_images" in file.files else "train"
            x, y = file[f"{prefix}_images"], file[f"{prefix}_labels"]
    except Exception as error:                                  # numpy raises many types for damaged files
        raise cli.Refused(f"--other {path}: test_images and test_labels cannot be read "
                          f"({cli.reason(error)}); write them with numpy.savez")
    try:
        data.check_images(path, prefix, x)
        data.check_labels(path, prefix, y, len(x))
        images = data.to_square_rgb(x, image_size, path).permute(0, 3, 1, 2)
    except cli.Refused as error:
        raise cli.Refused(str(error).replace("--dataset", "--other", 1))
    texts = [str(label) for label in y.reshape(-1).tolist()]
    # Named datasets have names and their files numbers: there, label 3 means the fourth class.
    numbered = y.dtype.kind in "iu" and not any(name.isdigit() for name in classes)
    known = [str(c) for c in range(len(classes))] if numbered else classes
    unknown = sorted(set(texts) - set(known))
    if unknown:
        raise cli.Refused(f"--other {path}: label {unknown[0]} is not a class of the run; its classes are "
                          f"{', '.join(known[:10])}{' ...' if len(known) > 10 else ''}")
    labels = torch.tensor([known.index(text) for text in texts])
    return images, labels, [f"{prefix}[{k}]" for k in range(len(texts))]
