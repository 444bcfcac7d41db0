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
import distributed
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
    refuse_other_flags(config, longer)
    rows = read_log(out / "log.csv", config["steps"])
    done = rows and int(rows[-1]["step"]) == config["steps"] and (out / "model.pt").exists()
    return print_result(config, rows) if done else None


def holds_anything(out):
    """Whether the folder holds more than the traces of a run that ended before it wrote its first file."""
    if not os.path.isdir(out):
        return os.path.exists(out)
    return any(".tmp" not in p.suffixes and p.name != ".lock" for p in out.iterdir())


def refuse_other_flags(config, longer=True):
    """Refuse to continue the run in a folder with flags other than its own."""
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
    for name, value in sorted(config.items(), key=lambda item: item[0] == "method"):    # last: may be no flag
        may_differ = name in (*settings.HARMLESS, "command", "paper", "changed", "data")
        # longer: more steps are allowed, because nothing else depends on their number.
        may_differ |= longer and not config["decay_at"] and name == "steps" and value > saved.get(name, value)
        if not may_differ and name in saved and saved[name] != value:   # `saved` may lack a newer flag
            raise cli.Refused(f"--{name} {value}: the run in {out} has {saved[name]}; "
                              "use that value, or give another --out")


def load_data(config):
    """The images, labels, split and classes of a run; a resumed run keeps its saved split."""
    images, labels, parts, classes = load_images(config)
    config["data"] = data.fingerprint(images, labels, parts)
    number = int(config["data"], 16)
    largest, smallest = distributed.agree(number, -number)
    if largest != -smallest:
        raise cli.Refused(f"--dataset {config['dataset']}: the processes of this run see different images, "
                          "or the same images in a different order")
    saved = Path(config["out"], "split.npz")
    if not os.path.exists(saved):
        return images, labels, draw_split(config, labels, parts), classes
    refuse_other_data(config)
    try:
        with np.load(saved, allow_pickle=False) as file:        # never run code from the file
            split = {part: file[part] for part in ("labeled", "unlabeled", "validation", "test")}
    except Exception as error:                                  # numpy raises many types for damaged files
        raise cli.Refused(f"--out {config['out']}: split.npz cannot be read ({cli.reason(error)}); "
                          "give another --out") from None
    return images, labels, split, classes


def refuse_other_data(config):
    """Refuse other images or another order: the split of a run, and so its errors, belong to its images."""
    saved = json.loads(Path(config["out"], "config.json").read_text()).get("data")
    if saved != config["data"]:
        raise cli.Refused(f"--dataset {config['dataset']}: its images, their labels or their order differ "
                          f"from those of the run in {config['out']}; give another --out")


def draw_split(config, labels, parts):
    """The split of a run. ImageNet follows S4L, with the paper's numbers of labels for 1% and 10%."""
    imagenet, n = config["dataset"] == "imagenet", config["labels"]
    n = presets.imagenet_labeled(n) if imagenet and n else n
    return data.make_split(labels, parts, n, config["validation"], config["seed"], s4l=imagenet)


def load_images(config):
    """data.load with the values of a run."""
    reading = {name: config[name] for name in ("crop", "flip", "stream", "workers", "device")}
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
    """How many of the last evaluations the reported median covers: one if the learning rate decays (S4L)."""
    return 1 if config.get("decay_at") else MEDIAN_OF


def print_result(config, rows):
    """Print the result of a run. Returns its final row as numbers, with the reported error."""
    row = {k: float(v) if v else None for k, v in rows[-1].items()} | dict(median_test_error=None)
    last = [float(r["test_error"]) for r in rows[-rows_that_count(config):] if r["test_error"]]
    if last:
        row["median_test_error"] = statistics.median(last)
        evaluations = f"{len(last)} evaluations" if len(last) > 1 else "evaluation"
        line = (f"test error {row['median_test_error']:.2f} % (median of the last {evaluations}), "
                f"{row['test_error']:.2f} % at the end")
        line += f"; the paper: {config['paper']}" if config["paper"] else ""
    else:                                                       # a stage without a classifier
        line = f"rotation accuracy {row['rotation_accuracy']:.2f} % at the end"
    print(f"{config['out']}: {line}", flush=True)
    return row
