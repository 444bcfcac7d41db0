"""The one loop, `fit`, and its plumbing: strict command line, resolved values, run folder, EMA, evaluation, resume.

A script hands `fit` a network and an objective:
objective(model, x_l, y_l, x_u, augment=, gen=, step=, ema=) -> {name: loss term}, which takes what it needs.
The raw uint8 batches x_l, x_u go in; augment(x) gives a new random view of a batch; gen is the step's own generator;
ema is the averaged model, the teacher of some methods.
"""
import copy
import csv
import difflib
import fcntl
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
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import fire
import numpy as np
import torch
import torchvision
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm import tqdm

import data
import presets
from losses import log_p_z
from models import check_arch, classifier_state, classify

HERE = Path(__file__).parent
EVAL_BATCH = 1024                       # ours: images in one forward pass of an evaluation
SAMPLE = 10_000                         # ours: unlabelled images that are scored at an evaluation
MEDIAN_OF = 20                          # MixMatch: the reported error is the median of the last 20 evaluations

# ---------------------------------------------------------------- command line


def command_line(train, argv=None):
    """Call train with the flags of the command line, or say in one line what is wrong with them.

    Parameters of train without a default are the words in front of the flags; *parameters take all other words.
    Fire alone would call train first and complain about a misspelled flag afterwards, so here it only gathers the words.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        return print(inspect.getmodule(train).__doc__ + "\n" + inspect.getdoc(train))
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
    try:
        return train(*arguments, **values)
    except KeyboardInterrupt:                                   # while data is loaded, or a second Ctrl-C
        sys.exit(130)


def parse(name, text, hint):
    """The typed word as the type that train's signature asks for."""
    flag = name if name.isupper() else f"--{name}"              # RUN: a word without a flag
    if isinstance(hint, types.UnionType):                       # int | None: not giving the flag is the None
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
    preset = presets.for_dataset(flags["dataset"]) | constants
    config = dict(method=method) | flags | {k: v for k, v in preset.items() if flags.get(k) is None}
    for name in "steps", "batch", "lr", "image_size", "rot_dim", "labels", "save_minutes":
        if config[name] is not None and not (0 < config[name] < math.inf):
            sys.exit(f"--{name} {config[name]}: must be more than 0, and finite")
    if not 0 <= config["weight_decay"] < math.inf:
        sys.exit(f"--weight_decay {config['weight_decay']}: must be 0 or more, and finite")
    if not 0 <= config["seed"] < 2 ** 32:
        sys.exit(f"--seed {config['seed']}: must be 0 or more, and less than 2^32")
    check_arch(config["arch"])
    config["device"] = check_device(config["device"], config["deterministic"])

    default = {k: p.default for k, p in inspect.signature(train).parameters.items()}
    given = {k: v for k, v in flags.items() if v != default[k] and v is not None}
    changed = {k: v for k, v in given.items() if preset.get(k, default[k]) != v}
    for name in {"dataset", "labels", "seed", "out", "device", "data_dir", "resume", "save_minutes", "deterministic", *unnamed}:
        changed.pop(name, None)
    if not config["out"]:
        dataset = Path(config["dataset"]).resolve().name.removesuffix(".npz")
        others = [f"{k}{Path(v).name if isinstance(v, str) else v}" for k, v in changed.items()]        # no slash in a name
        name = [dataset, config["labels"] or "all", method, config["seed"], *others]
        config["out"] = str(Path("runs", "_".join(map(str, name))))
    words = [f"--{k}" if v is True else f"--{k}={shlex.quote(str(v))}" for k, v in given.items() if k != "resume"]
    config["changed"] = {k: v for k, v in changed.items() if k != "pretrained"}         # what makes it another setting
    config["command"] = " ".join(["python", Path(inspect.getsourcefile(train)).name, *words])
    config["paper"] = None if changed else paper_error(config["dataset"], config["labels"], method)
    return config


def paper_error(dataset, labels, method):
    """The paper's test error as text, and where it was quoted from if it is not its own; None if it has none."""
    with (HERE / "paper_results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["dataset"], row["labels"], row["method"], row["metric"]) == (dataset, str(labels), method, "error"):
                quoted = f", {row['source']}" if row["source"].startswith("quoted") else ""
                return f"{float(row['value']):.2f} %{quoted}"


def check_device(device, deterministic=False):
    """The device, set up for speed, or for the same bits in every run; without a name the GPU where there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise RuntimeError
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):                      # no such device; torch built without CUDA
        sys.exit(f"--device {device}: torch has no such device here; leave the flag out, or give cpu, cuda or cuda:<number>")
    if device != "cpu":
        torch.set_float32_matmul_precision("high")              # TF32 where autocast leaves float32
        torch.backends.cudnn.benchmark = not deterministic      # all training batches have one shape
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")             # what cuBLAS asks for
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    return device


# ---------------------------------------------------------------- a run's folder


def check_folder(config, longer=True):
    """Refuse a folder that is in use, or whose run had other flags; the final row if its run is finished, else None.

    longer: a run may be resumed with more steps, since none of its values depends on their number.
    """
    out = Path(config["out"])
    inside = os.path.exists(out)
    if os.path.isdir(out):                                      # a run that was killed before its first file has left these
        inside = [p.name for p in out.iterdir() if ".tmp" not in p.suffixes and p.name != ".lock"]
    if not inside:
        return None
    if not config["resume"]:
        sys.exit(f"--out {out}: exists already; add --resume to continue that run, or give another --out")
    refuse_other_flags(config, longer)
    rows = read_rows(out / "log.csv", config["steps"])
    done = rows and int(rows[-1]["step"]) == config["steps"] and (out / "model.pt").exists()
    return report(config, rows) if done else None


def refuse_other_flags(config, longer=True):
    """Only the run that a folder holds may be continued in it."""
    out = Path(config["out"])
    if not (out / "config.json").exists():
        sys.exit(f"--out {out}: is not a run's folder; give another --out")
    try:
        saved = json.loads((out / "config.json").read_text())
    except ValueError:
        sys.exit(f"--out {out}: its config.json is damaged; give another --out")
    for name, value in config.items():
        may_differ = name in ("out", "device", "data_dir", "command", "resume", "paper", "changed", "save_minutes")
        may_differ |= longer and name == "steps" and value > saved.get(name, value)
        if not may_differ and name in saved and saved[name] != value:           # not in it: a flag younger than the run
            sys.exit(f"--{name} {value}: the run in {out} has {saved[name]}; give that, or another --out")


def load_run(config):
    """The images of a run and its split: drawn from the seed, or the saved one when the run is resumed."""
    images, labels, parts, classes = data.load(config["dataset"], config["data_dir"], config["image_size"], config["skip_broken"])
    saved = Path(config["out"], "split.npz")
    if saved.exists():
        try:
            with np.load(saved, allow_pickle=False) as file:    # no code in it is run
                split = {part: file[part] for part in ("labeled", "unlabeled", "validation", "test")}
        except Exception as error:                              # whatever a damaged or foreign file makes numpy raise
            sys.exit(f"--out {config['out']}: its split.npz cannot be read ({cause(error)}); give another --out")
        if sum(map(len, split.values())) != len(labels):
            sys.exit(f"--dataset {config['dataset']}: has {len(labels)} images now, and the split in {saved} is of "
                     f"{sum(map(len, split.values()))}; give another --out")
    else:
        split = data.make_split(labels, parts, config["labels"], config["validation"], config["seed"])
    return images, labels, split, classes


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
                    numpy=np.__version__, cuda=torch.version.cuda)
    record = config | dict(resolved=resolved, versions=versions, git_commit=commit or None, git_changed=changed)
    if (out / "config.json").exists():                          # a resumed run keeps the record of its start
        record = json.loads((out / "config.json").read_text()) | {k: config[k] for k in ("steps", "changed", "paper")}
    make_folder(out)
    write_whole(out / "config.json", lambda tmp: tmp.write_text(json.dumps(record, indent=2) + "\n"))
    if not (out / "split.npz").exists():                        # the labelled images of a run never change
        write_whole(out / "split.npz", lambda tmp: np.savez(tmp, **split))


def make_folder(out):
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {out}: cannot be written ({error.strerror})")


def write_whole(path, write):
    """A file that is there whole or not at all, also after a power cut: written beside its place, synced, then renamed."""
    tmp = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        write(tmp)
        sync(tmp)
        os.replace(tmp, path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:                    # torch.save makes a RuntimeError of a full disk
        tmp.unlink(missing_ok=True)
        sys.exit(f"--out {path.parent}: {path.name} cannot be written ({cause(error)}); what was saved before is whole")


def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cause(error):
    return getattr(error, "strerror", None) or " ".join(str(error).split())[:100]


def save_state(folder, state):
    """last.pt, and the save before it as previous.pt; killed between two renames, one of them is there."""
    write_whole(folder / "next.pt", lambda tmp: torch.save(state, tmp))
    if (folder / "last.pt").exists():
        os.replace(folder / "last.pt", folder / "previous.pt")
    os.replace(folder / "next.pt", folder / "last.pt")
    sync(folder)


def load_state(folder, device, load):
    """Give the newest save that is whole to `load`; False if there is none. A damaged one is named and left as it is."""
    saves = [folder / name for name in ("last.pt", "previous.pt") if (folder / name).exists()]
    for k, path in enumerate(saves):
        try:
            load(torch.load(path, map_location=device, weights_only=True))      # no code in it is run
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
    with path.open(newline="") as file:
        return [r for r in csv.DictReader(file) if None not in r.values() and int(r["step"]) <= last_step]


def write_rows(path, rows, mode):
    if not rows:
        return
    with path.open(mode, newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


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
    rows = read_rows(path, last_step)
    path.unlink(missing_ok=True) if not rows else write_whole(path, lambda tmp: write_rows(tmp, rows, "w"))
    return rows


# ---------------------------------------------------------------- training


def make_optimizer(net, lr, weight_decay):
    """Adam with decoupled weight decay on conv and dense kernels only: not on biases, not on BN. MixMatch."""
    kernels = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([dict(params=kernels, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)],
                             lr=lr, betas=(0.9, 0.999), fused=True)


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
        schedule=constant, average=None, refresh_bn=copy_bn, mu=1):
    """Train net in its run's folder up to config["steps"], from where the folder's checkpoint left it; the final row.

    p_z(class_logits, rot_logits)           log p(z|x), for the logged accuracy of the rotation
    optimizer(net, lr, weight_decay)        makes a torch optimiser; without it make_optimizer's AdamW
    schedule(progress)                      the learning rate as a share of config["lr"], progress from 0 to 1
    average(averages, weights, step)        updates the averaged weights after a step; without it EMA, decay config["ema"]
    refresh_bn(ema, net, batches)           gives the averaged model its BN statistics before it is evaluated
    mu                                      unlabelled images in a step, as a multiple of config["batch"]
    """
    make_folder(config["out"])
    with locked(config["out"]):
        return run_steps(net, objective, images, labels, split, classes, config, p_z, optimizer, schedule, average, refresh_bn, mu)


def run_steps(net, objective, images, labels, split, classes, config, p_z, optimizer, schedule, average, refresh_bn, mu):
    """The loop itself; fit has its words."""
    resolved = resolved_values(net, images, split, classes)
    print_config(config, resolved)
    write_config(config, split, resolved)
    Path(config["out"], "model.pt").unlink(missing_ok=True)     # its being there says that the run is finished
    steps, epoch, batch, seed, out = (config[k] for k in ("steps", "epoch", "batch", "seed", "out"))
    device = torch.device(config["device"])
    images, labels = images.to(device), labels.to(device)       # uint8, for the whole run
    index = {part: torch.as_tensor(i, device=device) for part, i in split.items()}
    index["sample"] = sample_of_unlabeled(labels, index["unlabeled"], seed)
    net = net.to(device, memory_format=torch.channels_last).train()
    ema = copy.deepcopy(net).requires_grad_(False)
    optimizer = (optimizer or make_optimizer)(net, config["lr"], config["weight_decay"])
    average = average or get_ema_multi_avg_fn(config["ema"])
    weights, averages = list(net.parameters()), list(ema.parameters())
    gen = torch.Generator(device)
    augment = partial(data.augment, flip=config["flip"], gen=gen)

    log, matrices = Path(out, "log.csv"), Path(out, "diversity.csv")
    # terms: the losses, summed since the row at row_step; bad: the first step at which a term was not finite, or 0
    run = dict(step=0, row_step=0, seconds=0.0, terms={}, bad={})

    def load(saved):
        net.load_state_dict(saved["net"])
        ema.load_state_dict(saved["ema"])
        optimizer.load_state_dict(saved["optimizer"])
        run.update(saved["run"])

    if load_state(Path(out), device, load):
        print(f"continuing after step {run['step']} of {steps}")
    rows = keep_rows(log, run["step"])
    keep_rows(matrices, run["step"])

    def save():
        """What is saved is finite: a step that was not ends the run here, at the latest."""
        check_finite(run, weights, out)
        state = dict(net=net.state_dict(), ema=ema.state_dict(), optimizer=optimizer.state_dict(),
                     run=run | dict(seconds=run["seconds"] + time.perf_counter() - tick))
        save_state(Path(out), state)

    with stop_signals() as stop, tqdm(total=steps, initial=run["step"], unit="step", disable=None) as bar:
        tick, tick_step, saved_at = time.perf_counter(), run["step"], time.perf_counter()
        for step in range(run["step"], steps):
            gen.manual_seed(data.seed_of(seed, 3, step))        # streams: 0 split, 1 and 2 batches, 3 all else
            i_l = data.batch_indices(index["labeled"], batch, step, seed, 1)
            i_u = data.batch_indices(index["unlabeled"], mu * batch, step, seed, 2)
            for group in optimizer.param_groups:
                group["lr"] = config["lr"] * schedule(step / steps)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                terms = objective(net, images[i_l], labels[i_l], images[i_u], augment=augment, gen=gen, step=step, ema=ema)
            optimizer.zero_grad()
            sum(terms.values()).backward()
            optimizer.step()
            average(averages, weights, step)
            run["terms"] = {k: run["terms"].get(k, 0) + v.detach() for k, v in terms.items()}
            run["step"] = step + 1
            for k, v in terms.items():                          # no wait for the device
                first = run["bad"].get(k, torch.zeros((), device=device))
                run["bad"][k] = torch.where((first == 0) & ~v.detach().isfinite(), run["step"], first)
            bar.update()

            if run["step"] % epoch == 0 or run["step"] == steps:
                losses = {f"loss_{k}": v.item() / (run["step"] - run["row_step"]) for k, v in run["terms"].items()}
                passed = time.perf_counter() - tick             # the line above waited for the device
                check_finite(run, weights, out)
                parts = index["sample"].tensor_split(math.ceil(len(index["sample"]) / EVAL_BATCH))
                refresh_bn(ema, net, (data.scale(augment(images[i])) for i in parts))
                scores, matrix = evaluate(net, ema, images, labels, index, len(classes), p_z)
                row = dict(step=run["step"], epoch=run["step"] / epoch, seconds=run["seconds"] + passed,
                           images_per_second=(1 + mu) * batch * (run["step"] - tick_step) / passed,
                           lr=optimizer.param_groups[0]["lr"], **losses, **scores)
                rows.append({k: "" if v is None else v if isinstance(v, int) else f"{v:.7g}" for k, v in row.items()})
                append_rows(log, rows[-1:])
                append_rows(matrices, diversity_rows(run["step"], matrix, classes))
                run.update(row_step=run["step"], seconds=run["seconds"] + passed, terms={})
                tick, tick_step, saved_at = time.perf_counter(), run["step"], time.perf_counter()
                save()
                bar.write(progress_line(rows[-1], steps))
            elif time.perf_counter() - saved_at > 60 * config["save_minutes"]:
                save()
                saved_at = time.perf_counter()
            if stop and run["step"] < steps:
                save()
                bar.close()
                print(f"stopped after step {run['step']}; to continue: {config['command']} --resume", file=sys.stderr)
                sys.exit(128 + stop[0])

        info = dict(method=config["method"], dataset=config["dataset"], seed=seed, arch=config["arch"],
                    image_size=images.shape[-1], scaling="x * 2 / 255 - 1", classes=classes)
        bar.close()
        write_whole(Path(out, "curve.png"), lambda tmp: draw_curve(rows, tmp, Path(out).name))
        write_whole(Path(out, "model.pt"), lambda tmp: torch.save(info | dict(state=classifier_state(ema)), tmp))
        row = report(config, rows)
        if stop:                                                # in the last step: it is done, but another stage may follow
            sys.exit(128 + stop[0])
    return row


def check_finite(run, weights, out):
    bad = {f"loss_{name}": int(first) for name, first in run["bad"].items() if first}
    if not torch.stack([w.isfinite().all() for w in weights]).all():
        bad = bad or {"a weight": run["step"]}
    if bad:
        name, step = min(bad.items(), key=lambda item: item[1])
        sys.exit(f"{name} is not finite at step {step}; what was saved before is in {out}; a smaller --lr may help")


@contextmanager
def locked(folder):
    """Refuse a folder that another process holds; the lock goes when its process does, however that ends."""
    with Path(folder, ".lock").open("a") as file:               # NFS locks files that are open for writing, not folders
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
    known = unlabeled[labels[unlabeled] >= 0]
    pool = known if len(known) else unlabeled
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(data.seed_of(seed, 4, 0)))
    return pool[order[:SAMPLE].to(pool.device)]


@torch.inference_mode()
def evaluate(net, ema, images, labels, index, num_classes, p_z):
    """The scores of a row of the log, in percent, None where there is nothing to score; and the diversity matrix."""
    net.eval(), ema.eval()
    scores = score_unlabeled(ema, images, labels, index["sample"], num_classes, p_z)
    matrix = scores.pop("diversity")
    scores["val_error"] = error(ema, images, labels, index["validation"])
    scores["test_error"] = error(ema, images, labels, index["test"])
    scores["test_error_raw"] = error(net, images, labels, index["test"])
    net.train(), ema.train()                                    # as a teacher the averaged model uses its batch's statistics
    return scores, matrix


def error(net, images, labels, index):
    """Percent of upright images that the test classifier gets wrong."""
    if not len(index):
        return None
    wrong = sum((classify(net, data.scale(images[i])).argmax(1) != labels[i]).sum() for i in index.split(EVAL_BATCH))
    return 100 * wrong.item() / len(index)


def score_unlabeled(net, images, labels, index, num_classes, p_z):
    """Error of p(y|x) (the main classifier, upright images), accuracy of p(z|x) and the paper's diversity matrix.

    Entry (i, j) of the matrix: how often, among copies whose true class is i, R_j gives the true rotation the highest
    probability of all heads. (C, K), rows sum to one.
    """
    wrong, right, counts = 0, 0, None
    known = bool((labels[index] >= 0).all())
    for i in index.split(EVAL_BATCH // 4):
        x, z = data.rotate4(images[i]) if net.rotation else (images[i], None)   # (4n, 3, H, W), (4n,)
        class_logits, _, rot_logits = net(data.scale(x))
        wrong += (class_logits[:len(i)].argmax(1) != labels[i]).sum()           # the first n copies are the upright ones
        if rot_logits is not None:
            right += (p_z(class_logits, rot_logits).argmax(1) == z).sum()
            K = rot_logits.shape[1]
            if known and K > 1:
                best = best_head(rot_logits, z)                 # (4n,)
                pairs = torch.bincount(labels[i].repeat(4) * K + best, minlength=num_classes * K)
                counts = pairs.view(num_classes, K) + (0 if counts is None else counts)
    rotation = rot_logits is not None
    return dict(rotation_accuracy=100 * right.item() / (4 * len(index)) if rotation else None,
                unlabeled_error=100 * wrong.item() / len(index) if known else None,
                diversity=None if counts is None else counts / counts.sum(1, keepdim=True))


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
    for name, word in dict(test_error="test error", unlabeled_error="unlabelled error",
                           rotation_accuracy="rotation accuracy").items():
        if row[name]:
            cells.append(f"{word} {float(row[name]):.2f} %")
    return "   ".join([*cells, f"{float(row['images_per_second']):,.0f} images/s"])


def print_config(config, resolved):
    for name, value in config.items():
        print(f"{name:>14}  {value}")
    print(f"{'images':>14}  " + ", ".join(f"{n:,} {part}" for part, n in resolved["images"].items()))
    print(f"{'network':>14}  {resolved['parameters']:,} parameters, {resolved['rotation_heads']} rotation heads, "
          f"{resolved['num_classes']} classes, {resolved['image_size']} pixels")
    print(f"training; a line here and in {config['out']}/log.csv every {config['epoch']} steps", flush=True)
    kept = (1 - config["bn_momentum"]) ** config["steps"], (config["ema"] or 0) ** config["steps"]
    if config["ema"] and max(kept) > 0.05:                                        # ours: from here on the tested model is visibly unfinished
        print(f"note: {config['steps']} steps are few for this preset: {kept[0]:.0%} of the initial BN statistics and "
              f"{kept[1]:.0%} of the initial weights are left in the model that is tested, so expect a high error")


def report(config, rows):
    """Print the run's result and return its final row, as numbers, with the reported error."""
    row = {k: float(v) if v else None for k, v in rows[-1].items()} | dict(median_test_error=None)
    last = [float(r["test_error"]) for r in rows[-MEDIAN_OF:] if r["test_error"]]
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
