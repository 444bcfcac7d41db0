"""The one loop, `fit`, and its plumbing: strict command line, resolved values, run folder, EMA, evaluation, resume, torchrun.

A script hands `fit` a network and an objective:
objective(model, x_l, y_l, x_u, augment=, gen=, step=, ema=) -> {name: loss term}, which takes what it needs.
The raw uint8 batches x_l, x_u go in; augment(x) gives a new random view of a batch; gen is the step's own generator;
ema is the averaged model, the teacher of some methods.
"""
import copy
import csv
import difflib
import fcntl
import functools
import inspect
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import types
import typing
import zipfile
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import fire
import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm import tqdm

import data
import presets
from losses import log_p_z
from models import check_arch, classifier_state, classify, frozen_bn

HERE = Path(__file__).parent
EVAL_BATCH, EVAL_PIXELS = 1024, 2 ** 23  # ours: images, and their pixels, in one forward pass of an evaluation
SAMPLE = 10_000                         # ours: unlabelled images that are scored at an evaluation
MEDIAN_OF = 20                          # MixMatch: evaluations of which the reported error is the median

# ---------------------------------------------------------------- command line

# What the training scripts' help has in common.
DATA_FLAGS = """\
--dataset       digits (embedded; the default), cifar10, cifar100, svhn, svhn_extra, fashion_mnist (downloaded),
                imagenet (ILSVRC-2012: --data_dir holds train/<wnid>/* and val/<wnid>/*, or its archives),
                a file my.npz (train_images, train_labels, test_images, test_labels, and where you have them
                unlabeled_images, val_images, val_labels) or
                a folder my_folder/ (train/<class>/*, test/<class>/* or val/<class>/*, unlabeled/*)
--labels        number of labelled images to draw from train, or a share of it as in 10%; own data without it: all of
                train is labelled. imagenet: 1% and 10% are the paper's 13,762 and 128,866 images
--labels_file   a list of the labelled pictures instead, a file name a line (such as S4L's and SimCLR's lists)"""
RUN_FLAGS = """\
--flip          random horizontal flips
--image_size    pixels; images are scaled by their short side and centre-cropped
--seed          of the split, the weights and the batches; runs with one seed share one split
--data_dir      where downloaded datasets are kept
--out           this run's folder; without it runs/<dataset>_<labels>_<method>_<seed>_<what differs from the preset>
--device        cpu, cuda, cuda:1; without it cuda where there is one
--deterministic GPUs: torch's deterministic algorithms where it has such, for the same bits in every run; slower
--save_minutes  save at least so often, besides at every evaluation
--accumulate    send a batch through the network in so many parts, and add up their gradients: for a small memory
--precision     bf16 (the default on GPUs) or fp32 (on CPUs)
--compile       torch.compile for the network: faster steps after a minute of compiling
--sync_bn       BN statistics over the GPUs of all processes (torchrun) instead of each one's own
--crop          pad: reflect-pad and crop, as MixMatch; resized: random pieces of the full pictures, as S4L (imagenet's)
--stream        read pictures of a folder from disk in every step; without it if they do not fit into memory
--workers       processes that read pictures from disk; without it one a core
--skip_broken   go on without pictures that cannot be read, and say how many
--resume        continue the run in its folder, start it where there is none, reprint it where it is finished
--help          this text"""

def command_line(train, argv=None):
    """Call train with the flags of the command line, or say in one line what is wrong with them.

    Parameters of train without a default are the words in front of the flags; *parameters take all other words.
    Fire alone would call train first and complain about a misspelled flag afterwards, so here it only gathers the words.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        text = inspect.getdoc(train).replace("DATA_FLAGS", DATA_FLAGS).replace("RUN_FLAGS", RUN_FLAGS)
        return print(inspect.getmodule(train).__doc__ + "\n" + text)
    if any(re.search(r"[\x00-\x1f\x7f\x85\u2028\u2029]", word) for word in argv):     # they would break a line, or a file's name
        sys.exit("a flag has a control character in it, such as the end of a line")
    if "-" in argv or "--" in argv:                             # words that Fire keeps for itself
        sys.exit("a lone - or -- is not a flag; --help lists the flags")
    words, flags = [], {}

    @fire.decorators.SetParseFn(str)                            # every value as it was typed
    def gather(*args, **kwargs):
        words.extend(args)
        flags.update({name.removeprefix("given_"): text for name, text in kwargs.items()})

    # With a prefix in front, Fire does not take --normal for "no rmal".
    fire.Fire(gather, command=[re.sub(r"^--?(?=[A-Za-z])", "--given_", word) for word in argv])
    hints = {name: hint for name, hint in typing.get_type_hints(train).items() if name != "return"}
    arguments = []
    for name, parameter in inspect.signature(train).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments += [parse(name, word, hints[name]) for word in words]
            words = []
        elif parameter.default is parameter.empty:
            if not words:
                choices = ", one of " + ", ".join(typing.get_args(hints[name])) if typing.get_args(hints[name]) else ""
                sys.exit(f"{name.upper()} is missing{choices}; --help shows how it is called")
            arguments.append(parse(name.upper(), words.pop(0), hints[name]))
        else:
            continue
        hints.pop(name)
    if words:
        sys.exit(f"{words[0]}: not a flag; flags are written --name value, and --help lists them")
    for name in list(flags):                                    # --noaux is --aux=False
        if name not in hints and name.startswith("no") and hints.get(name[2:]) in (bool, bool | None):
            if flags.pop(name) != "True":
                sys.exit(f"--{name}: takes no value; write --{name[2:]}=True or --{name}")
            flags[name[2:]] = "False"
    typed = {*argv, *(word.partition("=")[2] for word in argv)}
    for name, text in flags.items():
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            sys.exit(f"--{name}: no such flag; " + (f"did you mean --{close[0]}?" if close else "--help lists the flags"))
        no_value = text == "True" and text not in typed         # what Fire puts in its place
        if no_value and hints[name] not in (bool, bool | None):
            sys.exit(f"--{name}: needs a value")
    values = {name: parse(name, text, hints[name]) for name, text in flags.items()}
    before = {number: signal.signal(number, lambda *_: sys.exit(143)) for number in (signal.SIGTERM, signal.SIGUSR1)}   # until the loop begins
    try:
        return train(*arguments, **values)
    except KeyboardInterrupt:                                   # while data is loaded, or a second Ctrl-C
        sys.exit(130)
    except SystemExit as stop:
        sys.exit(f"process {rank()}: {stop.code}" if rank() and isinstance(stop.code, str) else stop.code)
    except RuntimeError as error:
        if world() == 1 or not re.search("(?i)gloo|nccl|connection|peer", str(error)):
            raise
        print(f"process {rank()} of {world()}: another process of this run has ended ({cause(error)}); what was saved is whole, "
              "and --resume goes on", file=sys.stderr, flush=True)              # now: NCCL may wait for the other one until the end
        sys.exit(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if dist.is_initialized() and not sys.exc_info()[0]:
            dist.destroy_process_group()


def parse(name, text, hint):
    """The typed word as the type that train's signature asks for."""
    flag = name if name.isupper() else f"--{name}"              # RUN: a word without a flag
    if hint == int | str | None:                                # --labels: 250, or 10%
        if re.fullmatch(r"\d+(\.\d+)?%", text, re.ASCII):
            return text
        if not re.fullmatch(r"-?\d+", text, re.ASCII):
            sys.exit(f"{flag} {text}: must be a whole number, or a share such as 10%")
    if typing.get_origin(hint) in (types.UnionType, typing.Union):              # int | None: not giving the flag is the None
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is list:                         # 0,1,2
        return [parse(name, part, typing.get_args(hint)[0]) for part in text.split(",")]
    if typing.get_origin(hint) is typing.Literal:
        if text not in typing.get_args(hint):
            sys.exit(f"{flag} {text}: must be one of {', '.join(typing.get_args(hint))}")
        return text
    if hint is bool:
        if text.lower() not in ("true", "false"):
            sys.exit(f"--{name}={text}: must be true or false; --{name} alone means true")
        return text.lower() == "true"
    try:
        return hint(text)
    except ValueError:
        sys.exit(f"--{name} {text}: must be a {'whole ' if hint is int else ''}number")


def resolve(train, flags, method, unnamed=(), constants={}):
    """Every value of a run, checked: what was given by hand, and the method's constants and the dataset's preset for the rest.

    Flags that the method's name tells already (`unnamed`) do not appear again in the default name of the run's folder.
    """
    own = os.path.normpath(flags["dataset"]) if flags["dataset"] else ""
    if own not in presets.NAMED:                                # pics, pics/ and ./pics are one dataset
        flags = flags | dict(dataset=own)
    if flags.get("labels") is not None and flags.get("labels_file"):
        sys.exit(f"--labels {flags['labels']}: --labels_file names the labelled images already; leave one of them out")
    if flags.get("rot_dim") is not None and flags["rot_dim"] < 0:
        sys.exit(f"--rot_dim {flags['rot_dim']}: must be 0 or more; 0: no reduction")
    for name in "steps", "batch", "lr", "image_size", "labels", "save_minutes", "accumulate":
        value = flags.get(name)
        if value is not None and not 0 < (float(value.rstrip("%")) if isinstance(value, str) else value) < math.inf:
            sys.exit(f"--{name} {value}: must be more than 0, and finite")
    most_of = dict(workers=2 ** 10, image_size=2 ** 13, rot_dim=2 ** 16, batch=2 ** 20, heads=2 ** 16, steps=2 ** 53)       # ours: beyond any machine
    for name, most in most_of.items():
        if (flags.get(name) or 0) > most:
            sys.exit(f"--{name} {flags[name]}: must be {most} or less")
    if str(flags.get("labels"))[-1] == "%" and float(flags["labels"].rstrip("%")) > 100:
        sys.exit(f"--labels {flags['labels']}: is more than all")
    in_list = len(data.read_list(flags["labels_file"])) if flags.get("labels_file") else None
    preset = presets.for_dataset(flags["dataset"], in_list or flags.get("labels"), flags.get("batch")) | constants
    config = dict(method=method) | flags | {k: v for k, v in preset.items() if flags.get(k) is None}
    if in_list:
        config["labels"] = None
    if not 0 <= config["weight_decay"] < math.inf:
        sys.exit(f"--weight_decay {config['weight_decay']}: must be 0 or more, and finite")
    if not 0 <= config["seed"] < 2 ** 32:
        sys.exit(f"--seed {config['seed']}: must be 0 or more, and less than 2^32")
    if (config["workers"] or 0) < 0:
        sys.exit(f"--workers {config['workers']}: must be 0 or more")
    check_arch(config["arch"])
    config["device"] = check_device(config["device"], config["deterministic"])
    if config["batch"] % (world() * config["accumulate"]):
        sys.exit(f"--batch {config['batch']}: cannot be shared out equally among {world()} processes with --accumulate "
                 f"{config['accumulate']}; give a multiple of {world() * config['accumulate']}")
    if config["sync_bn"] and not (world() > 1 and config["device"] != "cpu"):
        sys.exit("--sync_bn: is for several GPUs, one process each (torchrun)")
    restarts, = agree(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    config["resume"] |= restarts > 0                            # torchrun --max-restarts

    default = {k: p.default for k, p in inspect.signature(train).parameters.items()}
    given = {k: v for k, v in flags.items() if v != default[k] and v is not None}
    changed = {k: v for k, v in given.items() if preset.get(k, default[k]) != v}
    if changed.get("rot_dim") == 0 and not preset["rot_dim"]:   # no reduction, as without the flag
        changed.pop("rot_dim")
    for name in {"dataset", "labels", "seed", "out", "device", "data_dir", "resume", "save_minutes", "deterministic", "workers",
                 "stream", "compile", "sync_bn", "accumulate", *unnamed}:
        changed.pop(name, None)
    if not config["out"]:
        dataset = os.path.basename(os.path.abspath(config["dataset"])).removesuffix(".npz")
        others = [f"{k}{Path(v).name if isinstance(v, str) else v}" for k, v in changed.items()]        # no slash in a name
        name = [dataset, in_list or config["labels"] or "all", method, config["seed"], *others]
        config["out"] = str(Path("runs", "_".join(map(str, name))))
    words = [f"--{k}" if v is True else f"--{k}={shlex.quote(str(v))}" for k, v in given.items() if k != "resume"]
    config["rot_dim"] = config["rot_dim"] or None               # 0: no reduction, also where the preset has one
    config["changed"] = {k: v for k, v in changed.items() if k != "pretrained"}         # what makes it another setting
    config["command"] = " ".join(["python", shlex.quote(os.path.relpath(inspect.getsourcefile(train))), *words])
    config["paper"] = None if changed else paper_error(config["dataset"], config["labels"], method)
    return config


def paper_error(dataset, labels, method):
    """The paper's test error as text, and where it was quoted from if it is not its own; None if it has none."""
    with (HERE / "paper_results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            value = dict(error=float(row["value"]), top1_accuracy=100 - float(row["value"])).get(row["metric"])
            if (row["dataset"], row["labels"], row["method"]) == (dataset, str(labels), method) and value is not None:
                quoted = f", {row['source']}" if row["source"].startswith("quoted") else ""
                return f"{value:.2f} %{quoted}"


def check_device(device, deterministic=False):
    """The device, set up for speed, or for the same bits in every run; without a name the GPU where there is one.

    Started by torchrun, a process joins the others here, and has the GPU of its number.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device != "cuda":
            sys.exit(f"--device {device}: each process of torchrun has a GPU of its own; leave the flag out, or give cpu or cuda")
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise RuntimeError
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):                      # no such device; torch built without CUDA
        sys.exit(f"--device {device}: torch has no such device here; leave the flag out, or give cpu, cuda or cuda:<number>")
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")              # TF32 where autocast leaves float32
        torch.backends.cudnn.benchmark = not deterministic      # all training batches have one shape
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")             # what cuBLAS asks for
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    join_processes(device)
    return device


# ---------------------------------------------------------------- processes
# torchrun starts n of them. All hold the same weights, each trains on its share of every batch, and the first alone
# writes and prints. Without torchrun there is one, and none of this does anything.


def join_processes(device):
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return
    store, number, processes = next(dist.rendezvous("env://"))
    # Started again by torchrun, processes must not meet the addresses that those before them have left in its store. Machines
    # count starts each for itself, so that with several of them torchrun must make a new store (docs/scaling.md).
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "cpu:gloo" + (",cuda:nccl" if device != "cpu" else "")            # signals are agreed on over gloo
    dist.init_process_group(backend, store=store, rank=number, world_size=processes)
    if rank():
        sys.stdout = open(os.devnull, "w")


def refuse_torchrun(script):
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.exit(f"torchrun is for the training scripts, not for {script}")


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def agree(*numbers):
    """The largest of each number over all processes; so they do the same. On the CPU: the GPU is not waited for."""
    if world() == 1:
        return numbers
    numbers = torch.tensor(numbers, dtype=torch.float64)        # of one type everywhere, and exact for all that is counted here
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def wait_for_all():
    agree(0)


def total(x):
    """The sum of a tensor over all processes."""
    if world() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def average_bn(net):
    """Each process has BN statistics of its own share; the mean of them is everybody's, as after one joint update."""
    if world() > 1:
        buffers = [b for b in net.buffers() if b.is_floating_point()]
        means = total(torch.cat([b.flatten() for b in buffers])) / world()
        torch._foreach_copy_(buffers, [m.view_as(b) for m, b in zip(means.split([b.numel() for b in buffers]), buffers)])


def first_process_only(write):
    """For functions that write into a run's folder."""
    @functools.wraps(write)
    def maybe(*args, **kwargs):
        if rank() == 0:
            return write(*args, **kwargs)
    return maybe


# ---------------------------------------------------------------- a run's folder


def check_folder(config, longer=True):
    """Refuse a folder that is in use, or whose run had other flags; the final row if its run is finished, else None.

    longer: a run may be resumed with more steps, since none of its values depends on their number.
    """
    out = Path(config["out"])
    if not holds_anything(out):
        return None
    if not config["resume"]:
        sys.exit(f"--out {out}: exists already; add --resume to continue that run, or give another --out")
    refuse_other_flags(config, longer)
    rows = read_log(out / "log.csv", config["steps"])
    done = rows and int(rows[-1]["step"]) == config["steps"] and (out / "model.pt").exists()
    return report(config, rows) if done else None


def holds_anything(out):
    """Whether something is at a run's place, but for what a run that was killed before its first file has left."""
    if not os.path.isdir(out):
        return os.path.exists(out)
    return any(".tmp" not in p.suffixes and p.name != ".lock" for p in out.iterdir())


def refuse_other_flags(config, longer=True):
    """Only the run that a folder holds may be continued in it."""
    out = Path(config["out"])
    if not os.path.exists(out / "config.json"):
        sys.exit(f"--out {out}: is not a run's folder; give another --out")
    try:
        saved = dict(json.loads((out / "config.json").read_text()).items())
    except (ValueError, AttributeError):
        sys.exit(f"--out {out}: its config.json is damaged; give another --out")
    for name, value in sorted(config.items(), key=lambda item: item[0] == "method"):            # which is no flag of train_crae.py: last
        may_differ = name in ("out", "device", "data_dir", "command", "resume", "paper", "changed", "save_minutes", "workers", "stream",
                              "compile", "data", "accumulate", "sync_bn")       # the last two: for another number of GPUs
        may_differ |= longer and not config["decay_at"] and name == "steps" and value > saved.get(name, value)
        if not may_differ and name in saved and saved[name] != value:           # not in it: a flag younger than the run
            sys.exit(f"--{name} {value}: the run in {out} has {saved[name]}; give that, or another --out")


def load_run(config):
    """The images of a run and its split: drawn from the seed, or the saved one when the run is resumed."""
    images, labels, parts, classes = load_images(config)
    config["data"] = data.fingerprint(images, labels, parts)
    number = int(config["data"], 16)
    largest, smallest = agree(number, -number)
    if largest != -smallest:
        sys.exit(f"--dataset {config['dataset']}: the processes of this run see different images, or in another order")
    saved = Path(config["out"], "split.npz")
    if os.path.exists(saved):
        refuse_other_data(config)
        try:
            with np.load(saved, allow_pickle=False) as file:    # no code in it is run
                split = {part: file[part] for part in ("labeled", "unlabeled", "validation", "test")}
        except Exception as error:                              # whatever a damaged or foreign file makes numpy raise
            sys.exit(f"--out {config['out']}: its split.npz cannot be read ({cause(error)}); give another --out")
    else:
        split = draw_split(config, labels, parts)
    return images, labels, split, classes


def refuse_other_data(config):
    """The split of a run, and so its errors, belong to the images that it began with, in their order."""
    saved = json.loads(Path(config["out"], "config.json").read_text()).get("data")
    if saved != config["data"]:
        sys.exit(f"--dataset {config['dataset']}: its images, labels or their order are not those that the run in {config['out']} began "
                 "with; give another --out")


def draw_split(config, labels, parts):
    """data.make_split, for a run's values; ImageNet has S4L's protocol, and the paper's numbers of labels for 1% and 10%."""
    imagenet = config["dataset"] == "imagenet"
    n = presets.imagenet_labeled(config["labels"]) if imagenet and config["labels"] else config["labels"]
    return data.make_split(labels, parts, n, config["validation"], config["seed"], s4l=imagenet)


def load_images(config):
    """data.load, for a run's values."""
    reading = {name: config[name] for name in ("crop", "flip", "stream", "workers", "device")}
    return data.load(config["dataset"], config["data_dir"], config["image_size"], config["skip_broken"], config["labels_file"], **reading)


@first_process_only
def write_config(config, split, resolved):
    """config.json with all values, given and resolved, and what is needed to repeat the run; and split.npz."""
    out = Path(config["out"])
    git = partial(subprocess.run, cwd=HERE, capture_output=True, text=True)
    try:
        commit = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        changed = bool(git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip())
    except OSError:                                             # no git on this machine
        commit, changed = "", False
    versions = dict(python=platform.python_version(), torch=torch.__version__, torchvision=torchvision.__version__,
                    numpy=np.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads())
    record = config | dict(resolved=resolved, versions=versions, git_commit=commit or None, git_changed=changed)
    if (out / "config.json").exists():                          # a resumed run keeps the record of its start
        saved = json.loads((out / "config.json").read_text())
        threads = saved.get("versions", {}).get("threads")
        if config["device"] == "cpu" and threads != versions["threads"]:
            print(f"note: the run began with {threads} threads and goes on with {versions['threads']}: other roundings, so other bits "
                  "(OMP_NUM_THREADS sets their number)")
        longer = ("steps", "changed", "paper", "command") if config["steps"] != saved["steps"] else ()
        record = saved | {k: config[k] for k in longer}
    make_folder(out)
    write_whole(out / "config.json", lambda tmp: tmp.write_text(json.dumps(record, indent=2) + "\n"))
    if not (out / "split.npz").exists():                        # the labelled images of a run never change
        write_whole(out / "split.npz", lambda tmp: np.savez(tmp, **split))


def make_folder(out):
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {out}: cannot be written ({error.strerror})")


@first_process_only
def write_whole(path, write):
    """A file that is there whole or not at all, also after a power cut: written beside its place, synced, then renamed."""
    tmp = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        write(tmp)
        sync(tmp)
        os.replace(tmp, path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:                    # torch.save makes a RuntimeError of a full disk
        tmp.unlink(missing_ok=True)                             # which, where it was the disk, frees some of it
        sys.exit(f"--out {path.parent}: {path.name} cannot be written ({cause(error)}); what was saved before is whole")


def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cause(error):
    """Why, in a few words: the system's own, where it was the reason of the reason."""
    system = next((e for e in (error, error.__context__, error.__cause__) if getattr(e, "strerror", None)), None)
    return system.strerror if system else data.in_short(error)


def save_tensors(saved, path):
    """torch.save through an open file, which keeps the system's words for a full disk."""
    with path.open("wb") as file:
        torch.save(saved, file)


def read_tensors(path, device="cpu"):
    """What save_tensors wrote: no code in it is run, and a flipped bit is seen, which torch.load does not look for."""
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()
    if damaged:
        raise ValueError(f"{damaged} in it has a wrong checksum")
    return torch.load(path, map_location=device, weights_only=True)


@first_process_only
def save_state(folder, state):
    """last.pt, and the save before it as previous.pt; killed between two renames, one of them is there."""
    write_whole(folder / "next.pt", lambda tmp: save_tensors(state, tmp))
    if (folder / "last.pt").exists():
        os.replace(folder / "last.pt", folder / "previous.pt")
    os.replace(folder / "next.pt", folder / "last.pt")
    sync(folder)


def load_state(folder, device, load):
    """Give the newest save that is whole to `load`; False if there is none. A damaged one is named and left as it is."""
    saves = [folder / name for name in ("last.pt", "previous.pt") if (folder / name).exists()]
    for k, path in enumerate(saves):
        try:
            load(read_tensors(path, device))
            return True
        except Exception as error:                              # whatever a damaged or foreign file makes torch raise
            print(f"{path}: damaged or foreign ({cause(error)})" + ("; going on from the save before it" if k + 1 < len(saves) else ""),
                  file=sys.stderr)
    if saves:
        sys.exit(f"--out {folder}: no save in it can be read; nothing was changed. Remove {' and '.join(p.name for p in saves)} to begin again")
    return False


def read_rows(path, last_step):
    """The rows of a log up to last_step; later ones, and one that was cut off in the middle, are left out."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:     # any name of a class, also one cut off in a letter
        return [r for r in csv.DictReader(file) if None not in r.values() and int(r["step"]) <= last_step]


def read_log(path, last_step):
    """read_rows, for a run that counts on them."""
    try:
        return read_rows(path, last_step)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        sys.exit(f"--out {path.parent}: its {path.name} is damaged ({cause(error)}); nothing was changed")


def write_rows(path, rows, mode):
    if not rows:
        return
    with path.open(mode, newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


@first_process_only
def append_rows(path, rows):
    """Rows at the end of a log, on the disk before the save that counts on them."""
    try:
        write_rows(path, rows, "a")
        if rows:
            sync(path)
    except OSError as error:
        sys.exit(f"--out {path.parent}: {path.name} cannot be written ({cause(error)}); what was saved before is whole")


def keep_rows(path, last_step):
    """Cut a log back to the checkpoint's step."""
    rows = read_log(path, last_step)
    wait_for_all()                                              # until everybody has read it
    if rows:
        write_whole(path, lambda tmp: write_rows(tmp, rows, "w"))
    elif rank() == 0:
        path.unlink(missing_ok=True)
    return rows


# ---------------------------------------------------------------- training


def kernels_decay(net, weight_decay):
    """Weight decay on conv and dense kernels only: not on biases, not on BN. MixMatch, S4L, FixMatch."""
    return [dict(params=[p for p in net.parameters() if p.ndim > 1], weight_decay=weight_decay),
            dict(params=[p for p in net.parameters() if p.ndim <= 1], weight_decay=0.0)]


def make_optimizer(net, lr, weight_decay):
    """Adam with decoupled weight decay. MixMatch."""
    return torch.optim.AdamW(kernels_decay(net, weight_decay), lr=lr, betas=(0.9, 0.999), fused=True)


def make_sgd(net, lr, weight_decay, nesterov=False):
    """SGD with momentum 0.9, and L2. S4L; with Nesterov's momentum FixMatch."""
    return torch.optim.SGD(kernels_decay(net, weight_decay), lr=lr, momentum=0.9, nesterov=nesterov)


def steps_down(progress, warmup, decay_at):
    """The learning rate as a share of its largest: linear from 0 in the warm-up, a tenth after each of `decay_at`. S4L."""
    return min(1.0, progress / warmup if warmup else 1.0) * 0.1 ** sum(progress >= at for at in decay_at)


def constant(progress):
    return 1.0


def copy_bn(ema, net, batches):
    """BN statistics are the live model's. MixMatch."""
    for averaged, live in zip(ema.buffers(), net.buffers()):
        averaged.copy_(live)


def resolved_values(net, images, split, classes):
    """What is found in the data and the network, for config.json."""
    return dict(num_classes=len(classes), image_size=images.shape[-1], images={k: len(i) for k, i in split.items()},
                rotation_heads=net.rotation.out_features // 4 if net.rotation else 0,
                parameters=sum(p.numel() for p in net.parameters()))


def fit(net, objective, images, labels, split, classes, config, p_z=log_p_z, optimizer=None,
        schedule=None, average=None, refresh_bn=copy_bn, mu=1):
    """Train net in its run's folder up to config["steps"], from where the folder's checkpoint left it; the final row.

    p_z(class_logits, rot_logits)           log p(z|x), for the logged accuracy of the rotation
    optimizer(net, lr, weight_decay)        makes a torch optimiser; without it config["optimizer"]
    schedule(progress)                      the learning rate as a share of config["lr"], progress from 0 to 1; without it
                                            config's warmup and decay_at
    average(averages, weights, step)        updates the averaged weights after a step; without it EMA, decay config["ema"]
    refresh_bn(ema, net, batches)           gives the averaged model its BN statistics before it is evaluated
    mu                                      unlabelled images in a step, as a multiple of config["batch"]
    """
    wait_for_all()                                              # all have looked at the folder as it was
    with hold(config["out"]):
        if os.path.exists(Path(config["out"], "config.json")):  # of this run, or of one that came while the data was loaded
            refuse_other_flags(config)
        optimizer = optimizer or dict(adam=make_optimizer, sgd=make_sgd)[config["optimizer"]]
        schedule = schedule or partial(steps_down, warmup=config["warmup"], decay_at=config["decay_at"])
        average = average or get_ema_multi_avg_fn(config["ema"] or 0.0)         # 0: the weights themselves
        row = run_steps(net, objective, images, labels, split, classes, config, p_z, optimizer, schedule, average, refresh_bn, mu)
        wait_for_all()                                          # the first process has written everything
    return row


def run_steps(net, objective, images, labels, split, classes, config, p_z, optimizer, schedule, average, refresh_bn, mu):
    """The loop itself; fit has its words."""
    resolved = resolved_values(net, images, split, classes)
    print_config(config, resolved)
    steps, epoch, batch, seed, out, parts = (config[k] for k in ("steps", "epoch", "batch", "seed", "out", "accumulate"))
    device = torch.device(config["device"])
    labels = labels.to(device)
    if isinstance(images, torch.Tensor):
        images = images.to(device)                              # uint8, for the whole run
    index = {part: torch.as_tensor(i, device=device if isinstance(images, torch.Tensor) else "cpu") for part, i in split.items()}
    index["sample"] = sample_of_unlabeled(labels, index["unlabeled"], seed)
    net = net.to(device, memory_format=torch.channels_last).train()
    gen = torch.Generator(device)
    augment = partial(data.augment, flip=config["flip"], gen=gen) if config["crop"] == "pad" else cropped_already
    precision = config["precision"] or ("bf16" if device.type == "cuda" else "fp32")
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=precision == "bf16")
    warn_of_memory(net, objective, images.shape[-1], config, autocast, augment, gen, mu)        # each process by itself
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net) if config["sync_bn"] else net
    ema = copy.deepcopy(net).requires_grad_(False)
    optimizer = optimizer(net, config["lr"], config["weight_decay"])
    weights, averages = list(net.parameters()), list(ema.parameters())
    log, matrices = Path(out, "log.csv"), Path(out, "diversity.csv")
    # terms: the losses, summed since the row at row_step; bad: the first step at which a term was not finite, or 0
    run = dict(step=0, row_step=0, rows=0, seconds=0.0, terms={}, bad={})
    whose = {name: config[name] for name in ("method", "dataset", "seed", "data")}

    def load(saved):
        if saved["whose"] != whose:
            raise ValueError(f"of the run {saved['whose']}")
        net.load_state_dict(saved["net"])
        ema.load_state_dict(saved["ema"])
        optimizer.load_state_dict(saved["optimizer"])
        run.update(saved["run"])

    if load_state(Path(out), device, load):
        print(f"continuing after step {run['step']} of {steps}")
    if len(read_log(log, run["step"])) != run["rows"]:
        sys.exit(f"--out {out}: its log.csv has not the {run['rows']} rows that the save at step {run['step']} counts on; nothing was changed")
    wait_for_all()
    write_config(config, split, resolved)
    if rank() == 0:
        Path(out, "model.pt").unlink(missing_ok=True)           # its being there says that the run is finished
    rows = keep_rows(log, run["step"])
    keep_rows(matrices, run["step"])

    def save():
        """What is saved is finite: a step that was not ends the run here, at the latest."""
        check_finite(run, weights, out)
        state = dict(whose=whose, net=net.state_dict(), ema=ema.state_dict(), optimizer=optimizer.state_dict(),
                     run=run | dict(seconds=run["seconds"] + time.perf_counter() - tick,
                                    terms={k: total(v) / world() for k, v in run["terms"].items()}))
        save_state(Path(out), state)
        wait_for_all()

    if config["compile"]:
        net.compile()
    model = net if world() == 1 else DistributedDataParallel(net, forward_sync_buffers=False, gradient_as_bucket_view=True)
    batches = data.training_batches(images, labels, index, batch, mu, range(run["step"], steps), seed, rank(), world(), parts)

    with stop_signals() as stop, tqdm(total=steps, initial=run["step"], unit="step", disable=data.quiet()) as bar:
        tick, tick_step, saved_at = time.perf_counter(), run["step"], time.perf_counter()
        for step in range(run["step"], steps):
            for group in optimizer.param_groups:
                group["lr"] = config["lr"] * schedule(step / steps)
            optimizer.zero_grad()
            for part in range(parts):
                x_l, y_l, x_u = next(batches)
                gen.manual_seed(data.seed_of(seed, 3, step))    # streams: 0 split, 1 and 2 batches, 5 crops, 3 all else
                with data.share_of_batch(rank(), world(), part, parts), nullcontext() if part == parts - 1 else unsynced(model):
                    with autocast():
                        terms = objective(model, x_l, y_l, x_u, augment=augment, gen=gen, step=step, ema=ema)
                    (sum(terms.values()) / parts).backward()
                run["terms"] = run["terms"] | {k: run["terms"].get(k, 0) + v.detach().double() / parts for k, v in terms.items()}
                for k, v in terms.items():                      # no wait for the device
                    first = run["bad"].get(k, torch.zeros((), device=device))
                    run["bad"][k] = torch.where((first == 0) & ~v.detach().isfinite(), step + 1, first)
            optimizer.step()
            average(averages, weights, step)
            average_bn(net)
            run["step"] = step + 1
            bar.update()
            signal_number, due = map(int, agree(stop[0] if stop else 0, time.perf_counter() - saved_at > 60 * config["save_minutes"]))

            if run["step"] % (epoch * config["eval_epochs"]) == 0 or run["step"] == steps:
                losses = {f"loss_{k}": total(v).item() / world() / (run["step"] - run["row_step"]) for k, v in run["terms"].items()}
                passed = time.perf_counter() - tick             # the line above waited for the device
                check_finite(run, weights, out)
                size = math.ceil(len(index["sample"]) / math.ceil(len(index["sample"]) / eval_batch(images)))
                refresh_bn(ema, net, (data.scale(augment(x)) for x, _ in data.in_pieces(images, index["sample"], size, device)))
                average_bn(ema)
                scores, matrix = evaluate(net, ema, images, labels, index, len(classes), p_z)
                row = dict(step=run["step"], epoch=run["step"] / epoch, seconds=run["seconds"] + passed,
                           images_per_second=(1 + mu) * batch * (run["step"] - tick_step) / passed,
                           lr=optimizer.param_groups[0]["lr"], **losses, **scores)
                rows.append({k: "" if v is None else v if isinstance(v, int) else f"{v:.7g}" for k, v in row.items()})
                append_rows(log, rows[-1:])
                append_rows(matrices, diversity_rows(run["step"], matrix, classes))
                run.update(row_step=run["step"], rows=len(rows), seconds=run["seconds"] + passed, terms={})
                tick, tick_step, saved_at = time.perf_counter(), run["step"], time.perf_counter()
                save()
                if rank() == 0:
                    bar.write(progress_line(rows[-1], steps))
            elif due:
                save()
                saved_at = time.perf_counter()
            if signal_number and run["step"] < steps:
                save()
                bar.close()
                if rank() == 0:
                    print(f"stopped after step {run['step']}; to continue: {start_command(config)} --resume", file=sys.stderr)
                sys.exit(128 + signal_number)

        info = dict(method=config["method"], dataset=config["dataset"], seed=seed, arch=config["arch"], crop=config["crop"],
                    image_size=images.shape[-1], scaling="x * 2 / 255 - 1", classes=classes)
        bar.close()
        write_whole(Path(out, "curve.png"), lambda tmp: draw_curve(rows, tmp, Path(out).name))
        write_whole(Path(out, "model.pt"), lambda tmp: save_tensors(info | dict(state=classifier_state(ema)), tmp))
        row = report(config, rows)
        signal_number, = map(int, agree(stop[0] if stop else 0))
        if signal_number:                                       # in the last step: it is done, but another stage may follow
            sys.exit(128 + signal_number)
    return row


def start_command(config):
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    machines = f"--nnodes={world() // here} " if world() > here else ""
    return config["command"] if world() == 1 else config["command"].replace("python", f"torchrun {machines}--nproc_per_node={here}", 1)


def cropped_already(x):
    """augment for --crop resized, whose pieces and flips are made where the pictures are read."""
    return x


def unsynced(model):
    """Gradients of all but the last part of a batch are not exchanged yet."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def warn_of_memory(net, objective, size, config, autocast, augment, gen, mu):
    """Say, before the first step, if the device would not hold it: what a step keeps for its gradients is counted on few images."""
    device = gen.device
    images = config["batch"] // (world() * config["accumulate"])                # labelled images in a pass
    free = data.free_memory(device) / (1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    state = weights * (3 if config["optimizer"] == "adam" else 2)               # gradients, and the optimiser's averages

    def forward(n):
        with frozen_bn(net), autocast():
            return net(torch.zeros(n, 3, size, size, device=device))

    fixed, each = kept_for_backward(net, forward)
    if state + fixed + each * images * 16 * max(1, mu) < free:  # no method here sends more copies of an image through the network
        return
    model = copy.deepcopy(net)

    def step(n):
        x, y = torch.zeros(n + n * mu, 3, size, size, dtype=torch.uint8, device=device), torch.zeros(n, dtype=torch.int64, device=device)
        with autocast():
            return objective(model, x[:n], y, x[n:], augment=augment, gen=gen, step=0, ema=copy.deepcopy(model))

    fixed, each = kept_for_backward(model, step)
    need = {n: state + fixed + each * (images // n) for n in range(1, images + 1) if images % n == 0}
    if need[1] > free:
        n = next((n for n in need if need[n] < free), images)
        print(f"note: a step would need about {need[1] / 2 ** 30:.1f} GiB and {device} has {free / 2 ** 30:.1f} GiB free; --accumulate "
              f"{n * config['accumulate']} would need about {need[n] / 2 ** 30:.1f} GiB", flush=True)


def kept_for_backward(model, forward):
    """Bytes of the tensors that forward(n images) keeps for its gradients, the weights not counted: fixed, and for each image."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(n):
        sizes = {}

        def keep(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = forward(n)                                 # it must live on, or another tensor takes its place
        del result
        return sum(size for place, size in sizes.items() if place not in weights)

    two, four = kept(2), kept(4)                                # autocast's copies of the weights are in both
    return two - (four - two), (four - two) / 2


def check_finite(run, weights, out):
    names = sorted(run["bad"])
    firsts = agree(*(-int(run["bad"][name]) or -math.inf for name in names)) if names else []
    bad = {f"loss_{name}": int(-first) for name, first in zip(names, firsts) if first > -math.inf}
    if not torch.stack([w.isfinite().all() for w in weights]).all():
        bad = bad or {"a weight": run["step"]}
    if bad:
        name, step = min(bad.items(), key=lambda item: item[1])
        sys.exit(f"{name} is not finite at step {step}; what was saved before is in {out}; a smaller --lr may help")


@contextmanager
def hold(out):
    """The run's folder for the first process alone, made if it is not there."""
    if rank():
        yield
        return
    make_folder(out)
    with locked(out):
        yield


@contextmanager
def locked(folder):
    """Refuse a folder that another process holds; the lock goes when its process does, however that ends."""
    try:
        file = Path(folder, ".lock").open("a")                  # NFS locks files that are open for writing, not folders
    except OSError as error:
        sys.exit(f"--out {folder}: cannot be written ({error.strerror})")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"--out {folder}: another process is at work in it; wait for it, or give another --out")
        except OSError as error:                                # a file system without locks
            print(f"note: {folder} cannot be locked ({error.strerror}); see to it that only one process works in it")
        yield


@contextmanager
def stop_signals():
    """Collects Ctrl-C, SIGTERM and Slurm's SIGUSR1, so that the loop can end its step and save; a second Ctrl-C stops at once."""
    caught = []

    def catch(number, frame):
        caught.append(signal.SIGTERM if number == signal.SIGUSR1 else number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- evaluation


def sample_of_unlabeled(labels, unlabeled, seed):
    """At most SAMPLE unlabelled images, the same at every evaluation; those whose class is known, if there are any."""
    known = unlabeled[(labels.to(unlabeled.device)[unlabeled] >= 0)]
    pool = known if len(known) else unlabeled
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(data.seed_of(seed, 4, 0)))
    return pool[order[:SAMPLE].to(pool.device)]


@torch.inference_mode()
def evaluate(net, ema, images, labels, index, num_classes, p_z):
    """The scores of a row of the log, in percent, None where there is nothing to score; and the diversity matrix."""
    net.eval(), ema.eval()
    scores = score_unlabeled(ema, images, labels, index["sample"], num_classes, p_z)
    matrix = scores.pop("diversity")
    scores["val_error"], _ = errors(ema, images, labels, index["validation"])
    scores["test_error"], top5 = errors(ema, images, labels, index["test"])
    averaged = not all(map(torch.equal, net.state_dict().values(), ema.state_dict().values()))
    scores["test_error_raw"] = errors(net, images, labels, index["test"])[0] if averaged else scores["test_error"]
    scores["test_top5_error"] = top5 if num_classes > 10 else None
    net.train(), ema.train()                                    # as a teacher the averaged model uses its batch's statistics
    return scores, matrix


def eval_batch(images):
    return max(4, min(EVAL_BATCH, EVAL_PIXELS // images.shape[-1] ** 2))        # 167 at 224 pixels


def errors(net, images, labels, index):
    """Percent of upright images whose class is not the test classifier's first guess, and not among its first five."""
    if not len(index):
        return None, None
    wrong = torch.zeros(2, dtype=torch.int64, device=labels.device)
    for x, i in data.in_pieces(images, index[rank()::world()], eval_batch(images), labels.device):
        logits = classify(net, data.scale(x))
        first = logits.argmax(1, keepdim=True)                  # (n, 1)
        five = logits.topk(min(5, logits.shape[1])).indices     # (n, 5)
        wrong += torch.stack([(guess != labels[i][:, None]).all(1).sum() for guess in (first, five)])
    return tuple(100 * n / len(index) for n in total(wrong).tolist())


def score_unlabeled(net, images, labels, index, num_classes, p_z):
    """Error of p(y|x) (the main classifier, upright images), accuracy of p(z|x) and the paper's diversity matrix.

    Entry (i, j) of the matrix: how often, among copies whose true class is i, R_j gives the true rotation the highest
    probability of all heads. (C, K), rows sum to one.
    """
    K = net.rotation.out_features // 4 if net.rotation else 0
    wrong, right, counts = (torch.zeros(shape, dtype=torch.int64, device=labels.device) for shape in ((), (), (num_classes, K)))
    known = bool((labels.to(index.device)[index] >= 0).all())
    for x, i in data.in_pieces(images, index[rank()::world()], eval_batch(images) // 4, labels.device):
        x, z = data.rotate4(x) if K else (x, None)              # (4n, 3, H, W), (4n,)
        class_logits, _, rot_logits = net(data.scale(x))
        wrong += (class_logits[:len(i)].argmax(1) != labels[i]).sum()           # the first n copies are the upright ones
        if K:
            right += (p_z(class_logits, rot_logits).argmax(1) == z).sum()
        if known and K > 1:
            best = best_head(rot_logits, z)                     # (4n,)
            counts += torch.bincount(labels[i].repeat(4) * K + best, minlength=num_classes * K).view(num_classes, K)
    counts = total(counts)
    return dict(rotation_accuracy=100 * total(right).item() / (4 * len(index)) if K else None,
                unlabeled_error=100 * total(wrong).item() / len(index) if known else None,
                diversity=counts / counts.sum(1, keepdim=True) if known and K > 1 else None)


def best_head(rot_logits, z):
    """argmax_j R_j(z|x): which head gives the true rotation the highest probability. (N,)"""
    log_R = rot_logits.float().log_softmax(-1)                  # (N, K, 4)
    return log_R[torch.arange(len(z), device=z.device), :, z].argmax(1)


def diversity_rows(step, matrix, classes):
    if matrix is None:
        return []
    return [{"step": step, "class": name} | {f"head_{j}": f"{v:.5f}" if v == v else "" for j, v in enumerate(row)}
            for name, row in zip(classes, matrix.tolist())]     # v != v: no image of that class in the sample


# ---------------------------------------------------------------- what a person sees


def progress_line(row, steps):
    cells = [f"step {row['step']}/{steps}"]
    for name, word in dict(test_error="test error", test_top5_error="top-5", unlabeled_error="unlabelled error",
                           rotation_accuracy="rotation accuracy").items():
        if row.get(name):
            cells.append(f"{word} {float(row[name]):.2f} %")
    return "   ".join([*cells, f"{float(row['images_per_second']):,.0f} images/s"])


def print_config(config, resolved):
    for name, value in config.items():
        print(f"{name:>14}  {value}")
    print(f"{'images':>14}  " + ", ".join(f"{n:,} {part}" for part, n in resolved["images"].items()))
    if world() > 1:
        print(f"{'processes':>14}  {world()}, each with {config['batch'] // world()} labelled images of a batch")
    print(f"{'network':>14}  {resolved['parameters']:,} parameters, {resolved['rotation_heads']} rotation heads, "
          f"{resolved['num_classes']} classes, {resolved['image_size']} pixels")
    print(f"training; a line here and in {config['out']}/log.csv every {config['epoch'] * config['eval_epochs']} steps", flush=True)
    kept = (1 - config["bn_momentum"]) ** config["steps"], (config["ema"] or 0) ** config["steps"]
    if config["ema"] and max(kept) > 0.05:                                        # ours: from here on the tested model is visibly unfinished
        print(f"note: {config['steps']} steps are few for this preset: {kept[0]:.0%} of the initial BN statistics and "
              f"{kept[1]:.0%} of the initial weights are left in the model that is tested, so expect a high error")


def rows_that_count(config):
    """MixMatch: the reported error is the median of the last 20 evaluations; S4L, whose learning rate decays: the last one."""
    return 1 if config.get("decay_at") else MEDIAN_OF


def report(config, rows):
    """Print the run's result and return its final row, as numbers, with the reported error."""
    row = {k: float(v) if v else None for k, v in rows[-1].items()} | dict(median_test_error=None)
    last = [float(r["test_error"]) for r in rows[-rows_that_count(config):] if r["test_error"]]
    if last:
        row["median_test_error"] = statistics.median(last)
        line = (f"test error {row['median_test_error']:.2f} % (median of the last {len(last)} evaluation{'s'[:len(last) - 1]}), "
                f"{row['test_error']:.2f} % at the end")
        line += f"; the paper: {config['paper']}" if config["paper"] else ""
    else:                                                       # a stage without a classifier
        line = f"rotation accuracy {row['rotation_accuracy']:.2f} % at the end"
    print(f"{config['out']}: {line}", flush=True)
    return row


def draw_curve(rows, path, title):
    import matplotlib
    matplotlib.use("Agg")                                       # no screen needed
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, word in dict(rotation_accuracy="rotation, unlabelled", test_error_raw="test, raw weights",
                           unlabeled_error="unlabelled, p(y|x)", val_error="validation, averaged weights",
                           test_error="test, averaged weights").items():
        points = [(int(r["step"]), float(r[name])) for r in rows if r[name]]
        if name == "rotation_accuracy":
            points = [(step, 100 - value) for step, value in points]            # as an error, like the others
        if points:
            axes.plot(*zip(*points), label=word, linewidth=2 if name == "test_error" else 1)
    axes.set(xlabel="step", ylabel="error (%)", ylim=(0, None))
    axes.set_title(title, parse_math=False)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
