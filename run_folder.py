"""The run folder: config.json, split, checkpoints, CSV rows, lock and resume.

Its files (docs/runs.md) are complete or absent, even after a power cut. Only the first process writes.
"""
import csv
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torchvision

import cli
import data
import devices
import distributed
import inventory
import metrics
import presets
import settings

MEDIAN_OF = 20                          # MixMatch reports the median error of the last 20 evaluations

# ---------------------------------------------------------------- a folder that exists


def check_folder(config, longer=True):
    """Refuse a folder that holds another run. Returns the final row if this run is finished, else None."""
    out = Path(config["out"])
    if not holds_anything(out):
        return None
    if not config["resume"]:
        raise cli.Refused(f"--out {out}: already exists; add --resume to continue it, or give another --out")
    saved = refuse_other_flags(config, longer, moved=True)
    rows = read_log(out / "log.csv", config["steps"])
    done = rows and int(rows[-1]["step"]) == config["steps"] and (out / "model.pt").exists()
    done = done and saved.get("dataset") == config["dataset"]   # else load_data compares the images first
    return print_result(config, rows) if done else None


def holds_anything(out):
    """Whether the folder holds more than the traces of a run that ended before it wrote its first file."""
    if not os.path.isdir(out):
        return os.path.exists(out)
    return any(".tmp" not in p.suffixes and p.name != ".lock" for p in out.iterdir())


def refuse_other_flags(config, longer=True, moved=False):
    """Refuse to continue the run in a folder with flags other than its own. Returns its config.

    moved: allow another place of the dataset, because load_data will compare the images.
    """
    out = Path(config["out"])
    if not os.path.exists(out / "config.json"):
        raise cli.Refused(f"--out {out}: is not the folder of a run; give another --out")
    try:
        saved = dict(json.loads((out / "config.json").read_text()).items())
    except (ValueError, AttributeError):
        raise cli.Refused(f"--out {out}: config.json is damaged; give another --out") from None
    if "select" in config and "select" in saved and saved.get("definition") != config["definition"]:
        raise cli.Refused(f"--resume: the run in {out} used an earlier definition of CRAE "
                          "(docs/deviations.md); give another --out")
    keep_saved_values(config, saved)
    for name, value in sorted(config.items(), key=lambda item: item[0] == "method"):    # last: may be no flag
        may_differ = name in (*settings.HARMLESS, "command", "paper", "changed", "data")
        if name == "steps":
            # longer: more steps are allowed, because nothing else depends on their number.
            fixed = not longer or config["decay_at"] or config["recipe"] == "fast"
            # None: other --minutes or --pflop than the run's, which are refused below.
            may_differ = value is None or not fixed and value > saved.get(name, value)
        may_differ |= moved and may_have_moved(name, config, saved)
        if not may_differ and name in saved and saved[name] != value:   # `saved` may lack a newer flag
            if name == "image_size" and not os.path.exists(config["dataset"]):  # its preset is not a folder's
                raise cli.Refused(f"--dataset {config['dataset']}: no such folder; if the images of the run "
                                  f"in {out} were moved, give their new place")
            raise cli.Refused(f"--{name} {value}: the run in {out} has {saved[name]}; "
                              "use that value, or give another --out")
    return saved


def may_have_moved(name, config, saved):
    """Whether the flag is a path that may be another place of the run's data."""
    places = config["dataset"], saved.get("dataset")
    if name not in ("dataset", "labels_file") or places[0] == places[1] or {*places} & presets.NAMED.keys():
        return False
    tables = [Path(values.get("labels_file") or "").name for values in (config, saved)]
    return name == "dataset" or tables[0] == tables[1]


def keep_saved_values(config, saved):
    """A resumed run keeps its precision, and the number of steps that --minutes or --pflop gave."""
    # Runs from before the fast recipe have neither, and saved their precision only if it was given.
    saved |= {name: saved.get(name) for name in ("minutes", "pflop")}
    saved["precision"] = saved.get("precision") or devices.default_precision(config["device"], "fp32")
    if "precision" not in config["changed"]:
        config["precision"] = saved["precision"]
    if not config["steps"] and all(saved[name] == config[name] for name in ("minutes", "pflop")):
        settings.set_steps(config, saved["steps"])
    finished = os.path.exists(Path(config["out"], "model.pt")) and config["steps"] == saved.get("steps")
    slow = config["precision"] == "bf16" and config["device"] == "cpu" and not devices.has_bf16()
    if slow and "precision" not in config["changed"] and not finished:
        raise cli.Refused(f"--resume: the run in {config['out']} uses bf16, which this CPU does not "
                          "support; continue on another machine, or give another --out")


def load_data(config):
    """The images, labels, split and classes of a run; a resumed run keeps its saved split."""
    file = Path(config["out"], "config.json")
    saved = json.loads(file.read_text()) if os.path.exists(file) else {}
    if saved:                                                   # an earlier version had no levels
        config["levels"] = saved.get("levels", {})
    images, labels, parts, classes = load_images(config)
    config.pop("levels", None)
    if getattr(images, "levels", None):
        config["levels"] = images.levels
    config["data"] = inventory.fingerprint(images, labels, parts, classes, saved.get("data"))
    number = int(config["data"], 16)
    largest, smallest = distributed.agree(number, -number)
    if largest != -smallest:
        raise cli.Refused(f"--dataset {config['dataset']}: the processes of this run see different images, "
                          "or the same images in a different order")
    if saved:
        refuse_other_data(config, saved)
    path = Path(config["out"], "split.npz")
    if not os.path.exists(path):
        split = draw_split(config, labels, parts)
        inventory.print_notes(images, labels, split, classes)
        return images, labels, split, classes
    try:
        with np.load(path, allow_pickle=False) as file:         # never run code from the file
            split = {part: file[part] for part in ("labeled", "unlabeled", "validation", "test")}
    except Exception as error:                                  # numpy raises many types for damaged files
        raise cli.Refused(f"--out {config['out']}: split.npz cannot be read ({cli.reason(error)}); "
                          "give another --out") from None
    return images, labels, split, classes


def refuse_other_data(config, saved):
    """Refuse other images or another order: the split of a run, and so its errors, belong to its images.

    The same images in another place are those of the run, which keeps the name of the first place.
    """
    place, first = config["dataset"], saved.get("dataset")
    if saved.get("data") != config["data"]:
        also = f" (it used {first})" if first != place else ""
        raise cli.Refused(f"--dataset {place}: its images, their labels or their order differ "
                          f"from those of the run in {config['out']}{also}; give another --out")
    if first != place:
        print(f"{place} has the images of the run in {config['out']}, which were in {first}")
        config.update(dataset=first, labels_file=saved.get("labels_file"))


def load_again(config, classes, dataset=None):
    """The images, labels and parts of a finished run, from `dataset` if moved. Refuses other data."""
    run, first, labels_file = config["out"], config["dataset"], config.get("labels_file")
    if dataset and first in presets.NAMED:
        raise cli.Refused(f"--dataset {dataset}: the run in {run} used {first}; omit the flag (--data_dir is "
                          "the folder of downloaded datasets)")
    if not dataset and first not in presets.NAMED and not os.path.exists(first):
        raise cli.Refused(f"RUN {run}: its dataset {first} does not exist; if it was moved, give --dataset")
    if dataset and labels_file and Path(labels_file).is_relative_to(first):     # the table was moved with it
        labels_file = str(Path(dataset, Path(labels_file).relative_to(first)))
    place = settings.same_spelling(dataset or first)
    config = config | dict(dataset=place, labels_file=labels_file, levels=config.get("levels", {}))
    images, labels, parts, found = load_images(config)
    data_now = inventory.fingerprint(images, labels, parts, found, config.get("data"))
    if found != classes or data_now != config.get("data"):
        raise cli.Refused(f"--dataset {place}: its images, labels or classes differ from those of the run in "
                          f"{run}, which used {first}" if dataset else
                          f"RUN {run}: the images or classes of its dataset {first} have changed")
    return images, labels, parts


def draw_split(config, labels, parts):
    """The split of a run. ImageNet follows S4L, with the paper's numbers of labels for 1% and 10%."""
    imagenet, n = config["dataset"] == "imagenet", config["labels"]
    n = presets.imagenet_labeled(n) if imagenet and n else n
    return data.make_split(labels, parts, n, config["validation"], config["seed"], s4l=imagenet)


def load_images(config):
    """data.load with the values of a run."""
    reading = {name: config[name] for name in ("crop", "flip", "stream", "workers", "device")}
    reading["levels"] = config.get("levels")                    # of images with more than 8 bits
    return data.load(config["dataset"], config["data_dir"], config["image_size"], config["skip_broken"],
                     config["labels_file"], **reading)


# ---------------------------------------------------------------- locks


@contextmanager
def hold(out):
    """Create the run folder and lock it, in the first process only."""
    if distributed.rank():
        yield
        return
    make_folder(out)
    with locked(out):
        yield


@contextmanager
def locked(folder):
    """Lock a folder, or refuse it if another process has. A lock ends with its process, however that ends."""
    try:
        file = Path(folder, ".lock").open("a")                  # NFS locks open files, but not folders
    except OSError as error:
        raise cli.Refused(f"--out {folder}: cannot be written ({error.strerror})") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise cli.Refused(f"--out {folder}: another process is using it; "
                              "wait, or give another --out") from None
        except OSError as error:                                # a file system without locks
            print(f"note: {folder} cannot be locked ({error.strerror}); make sure only one process uses it")
        yield


# ---------------------------------------------------------------- writing


def make_folder(out):
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.Refused(f"--out {out}: cannot be written ({error.strerror})") from None


@distributed.first_process_only
def write_whole(path, write):
    """Write a temporary file, sync it and rename it: `path` is complete or absent, even after a power cut."""
    tmp = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        write(tmp)
        sync(tmp)
        os.replace(tmp, path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:                    # torch.save: RuntimeError if the disk is full
        tmp.unlink(missing_ok=True)                             # frees space if the disk was full
        raise cannot_write(path, error) from None


def cannot_write(path, error):
    return cli.Refused(f"--out {path.parent}: {path.name} cannot be written ({cli.reason(error)}); "
                       "everything saved earlier is intact")


def sync(path):
    """Wait until a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@distributed.first_process_only
def write_config(config, split, resolved):
    """Write split.npz and config.json, with all values and what is needed to repeat the run."""
    out = Path(config["out"])
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                    torchvision=torchvision.__version__, cuda=torch.version.cuda,
                    threads=torch.get_num_threads())
    record = config | dict(resolved=resolved, versions=versions) | git_state()
    if (out / "config.json").exists():                          # a resumed run keeps the record of its start
        saved = json.loads((out / "config.json").read_text())
        threads = saved.get("versions", {}).get("threads")
        if config["device"] == "cpu" and threads != versions["threads"]:
            print(f"note: the run started with {threads} threads and continues with {versions['threads']}; "
                  "rounding differs, so results will not be bit-identical (OMP_NUM_THREADS sets the number)")
        longer = ("steps", "changed", "paper", "command") if config["steps"] != saved["steps"] else ()
        record = saved | {k: config[k] for k in longer}
    make_folder(out)
    write_whole(out / "config.json", lambda tmp: tmp.write_text(json.dumps(record, indent=2) + "\n"))
    if not (out / "split.npz").exists():                        # the labelled images of a run never change
        write_whole(out / "split.npz", lambda tmp: np.savez(tmp, **split))


@distributed.first_process_only
def write_split_csv(out, images, labels, split, classes):
    """Write split.npz for readers: which image is in which part. A resumed run keeps the file."""
    if not (out / "split.csv").exists():
        rows = inventory.split_rows(images, labels, split, classes)
        write_whole(out / "split.csv", lambda tmp: write_rows(tmp, rows, "w"))


def git_state():
    """The commit of this repository, and whether files differ from it."""
    git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True)
    try:
        commit = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        changed = bool(git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip())
    except OSError:                                             # git is not installed
        commit, changed = "", False
    return dict(git_commit=commit or None, git_changed=changed)


# ---------------------------------------------------------------- checkpoints


def save_tensors(saved, path):
    """torch.save through an open file, which keeps the system's message for a full disk."""
    with path.open("wb") as file:
        torch.save(saved, file)


def read_tensors(path, device="cpu"):
    """Read what save_tensors wrote. Runs no code from the file; unlike torch.load, detects flipped bits."""
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()
    if damaged:
        raise ValueError(f"{damaged} in it has a wrong checksum")
    return torch.load(path, map_location=device, weights_only=True)


@distributed.first_process_only
def save_checkpoint(folder, checkpoint):
    """Write last.pt and keep the one before it as previous.pt; one of them exists at every moment."""
    write_whole(folder / "next.pt", lambda tmp: save_tensors(checkpoint, tmp))
    if (folder / "last.pt").exists():
        os.replace(folder / "last.pt", folder / "previous.pt")
    os.replace(folder / "next.pt", folder / "last.pt")
    sync(folder)


def load_checkpoint(folder, device, load):
    """Pass the newest intact checkpoint to `load`. Returns whether there was one; keeps damaged files."""
    found = [folder / name for name in ("last.pt", "previous.pt") if (folder / name).exists()]
    for k, path in enumerate(found):
        try:
            load(read_tensors(path, device))
            return True
        except Exception as error:                              # torch raises many types for damaged files
            remedy = "; using the checkpoint before it" if k + 1 < len(found) else ""
            print(f"{path}: damaged, or from another run ({cli.reason(error)}){remedy}", file=sys.stderr)
    if found:
        raise cli.Refused(f"--out {folder}: no checkpoint in it can be read; nothing was changed. "
                          f"To start again, remove {' and '.join(path.name for path in found)}")
    return False


# ---------------------------------------------------------------- CSV rows


def read_rows(path, last_step):
    """The rows of a log up to last_step, without a row that was cut off in the middle."""
    if not path.exists():
        return []
    # surrogateescape: class names may be in any encoding, and may be cut off inside a character.
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return [r for r in csv.DictReader(file) if None not in r.values() and int(r["step"]) <= last_step]


def read_log(path, last_step):
    """read_rows for a run that depends on them."""
    try:
        return read_rows(path, last_step)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise cli.Refused(f"--out {path.parent}: {path.name} is damaged ({cli.reason(error)}); "
                          "nothing was changed") from None


def write_rows(path, rows, mode):
    if not rows:
        return
    with path.open(mode, newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


@distributed.first_process_only
def append_rows(path, rows):
    """Append rows to a log and sync it, before the checkpoint that expects them is written."""
    try:
        write_rows(path, rows, "a")
        if rows:
            sync(path)
    except OSError as error:
        raise cannot_write(path, error) from None


def keep_rows(path, last_step):
    """Cut a log back to the step of the checkpoint. Returns the rows that remain."""
    rows = read_log(path, last_step)
    distributed.wait_for_all()                                  # until every process has read it
    if rows:
        write_whole(path, lambda tmp: write_rows(tmp, rows, "w"))
    elif distributed.rank() == 0:
        path.unlink(missing_ok=True)
    return rows


# ---------------------------------------------------------------- the result


def rows_that_count(config):
    """How many of the last evaluations the reported median covers: one if the learning rate decays."""
    return 1 if config.get("decay_at") or config.get("recipe") == "fast" else MEDIAN_OF


def interval_of(error, record):
    """The 95 % interval of a test error, in percent. record: the contents of config.json.

    None if there is no test error, or if the record does not state the number of test images.
    """
    n = record.get("resolved", {}).get("images", {}).get("test")
    return metrics.wilson(round(error / 100 * n), n) if n and error is not None else None


def print_result(config, rows):
    """Print the result of a run. Returns its final row as numbers, with the reported error and `interval`.

    The saved model is the one of the last row, and `interval` belongs to its error.
    """
    row = {k: float(v) if v else None for k, v in rows[-1].items()} | dict(median_test_error=None)
    last = [float(r["test_error"]) for r in rows[-rows_that_count(config):] if r["test_error"]]
    path = Path(config["out"], "config.json")
    row["interval"] = interval_of(row["test_error"], json.loads(path.read_text()) if path.exists() else {})
    if last:
        row["median_test_error"] = statistics.median(last)
        line = f"{row['test_error']:.2f} %"
        if row["interval"]:
            line += " (95 % interval {:.2f} to {:.2f} %)".format(*row["interval"])
        if len(last) > 1:
            line = (f"{row['median_test_error']:.2f} % (median of the last {len(last)} evaluations); "
                    f"saved model: {line}")
        line = f"test error {line}" + (f"; the paper: {config['paper']}" if config["paper"] else "")
    else:                                                       # a stage without a classifier
        line = f"rotation accuracy {row['rotation_accuracy']:.2f} % at the end"
    print(f"{config['out']}: {line}", flush=True)
    return row
