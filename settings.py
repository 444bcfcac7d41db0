"""The values of a run, by precedence: the given flags, the method's constants, the dataset's preset."""
import math
import os
import shlex
from pathlib import Path

import cli
import devices
import distributed
import models
import presets
import tables

# Flags that are not part of the experiment, so a resumed run may change them. accumulate and sync_bn change
# what BN and the mixing see (docs/scaling.md); a run may need them to continue on other GPUs.
HARMLESS = ("out", "device", "data_dir", "resume", "save_minutes", "workers", "stream", "compile", "sync_bn",
            "accumulate")


def resolve(flags, table, script, method, named_by_method=(), constants=None, supervised=False):
    """All values of a run, by precedence: the given flags, the method's constants, the dataset's preset.

    table: the script's flags. named_by_method: flags that are part of the method's name, so that the default
    name of the folder does not repeat them. supervised: the method uses no unlabelled images.
    """
    flags = flags | dict(dataset=same_spelling(flags["dataset"]))
    check_values(flags)
    listed = tables.count_listed(flags["labels_file"]) if flags["labels_file"] else None
    listed = None if flags["labels"] else listed                # --labels draws some of a table's labels
    given = {k: v for k, v in flags.items() if v is not None and v != table[k][1]}
    usual = presets.default_recipe(flags["dataset"])
    flags["recipe"] = flags["recipe"] or usual
    preset = presets.for_dataset(flags["dataset"], listed or flags["labels"], flags["batch"], flags["recipe"])
    preset |= constants or {}
    config = dict(method=method) | flags | {k: v for k, v in preset.items() if flags.get(k) is None}
    config["method"] = method                                   # a variant of a baseline has its own name
    config["steps"] = None if flags["minutes"] or flags["pflop"] else config["steps"]   # budget.set_steps
    set_steps(config, config["steps"])
    if listed:
        config["labels"] = None
    if config["arch"].startswith("fast") and (config["image_size"] or SMALLEST_FAST) < SMALLEST_FAST:
        raise cli.Refused(f"--image_size {config['image_size']}: --arch {config['arch']} needs "
                          f"{SMALLEST_FAST} pixels or more")
    if not 0 <= config["weight_decay"] < math.inf:
        raise cli.Refused(f"--weight_decay {config['weight_decay']}: must be 0 or more, and finite")
    models.check_arch(config["arch"])
    config["device"] = devices.select(config["device"], config["deterministic"])
    precision = devices.default_precision(config["device"], config["cpu_precision"])
    config["precision"] = config["precision"] or precision
    join_processes(config, supervised)
    changed = differences(given, table, preset | dict(recipe=usual), named_by_method)
    config["out"] = config["out"] or default_folder(config, listed, changed)
    config["rot_dim"] = config.get("rot_dim") or None           # 0: no reduction, even if the preset has one
    config["changed"] = {k: v for k, v in changed.items() if k != "pretrained"}
    config["command"] = command_of(script, given)
    config["paper"] = None if changed else presets.paper_error(config["dataset"], config["labels"], method)
    return config


SMALLEST_FAST = 8                       # pixels: a smaller image would leave FastNet nothing to pool
EVALUATIONS = 10                        # per run with --recipe fast; we chose enough points for a curve


def set_steps(config, steps):
    """Set the number of steps, and what depends on it."""
    config["steps"] = steps
    if steps and config["recipe"] == "fast":
        config["epoch"] = max(1, steps // EVALUATIONS)


def same_spelling(dataset):
    """One spelling for paths: pics, pics/ and ./pics are the same dataset."""
    path = os.path.normpath(dataset) if dataset else ""
    return dataset if path in presets.NAMED else path


def check_values(flags):
    """Refuse values that are out of range for every dataset."""
    if flags["labels"] is not None and flags["labels_file"] and not tables.is_table(flags["labels_file"]):
        raise cli.Refused(f"--labels {flags['labels']}: --labels_file already lists the labelled images; "
                          "omit one of the two flags")
    lengths = [f"--{name} {flags[name]:g}" for name in ("steps", "pflop", "minutes") if flags[name]]
    if len(lengths) > 1:
        raise cli.Refused(f"{lengths[-1]}: {lengths[0]} already sets the length; omit one of the two flags")
    if flags["recipe"] == "fast" and flags["dataset"] == "imagenet":
        raise cli.Refused("--recipe fast: its network is too small for imagenet; omit the flag")
    for name in ("steps", "minutes", "pflop", "batch", "unlabeled", "lr", "image_size", "labels",
                 "save_minutes", "accumulate"):
        value = flags.get(name)
        number = float(value.rstrip("%")) if isinstance(value, str) else value
        if value is not None and not 0 < number < math.inf:
            raise cli.Refused(f"--{name} {value}: must be greater than 0 and finite")
    for name in "rot_dim", "workers":
        if (flags.get(name) or 0) < 0:
            raise cli.Refused(f"--{name} {flags[name]}: must be 0 or more")
    # Our choice: more than enough.
    limits = dict(workers=2 ** 10, image_size=2 ** 13, rot_dim=2 ** 16, heads=2 ** 16, batch=2 ** 20,
                  unlabeled=2 ** 20, steps=2 ** 53, minutes=2 ** 20, pflop=2 ** 40)
    for name, limit in limits.items():
        if (flags.get(name) or 0) > limit:
            raise cli.Refused(f"--{name} {flags[name]}: must be {limit} or less")
    if isinstance(flags["labels"], str) and float(flags["labels"].rstrip("%")) > 100:
        raise cli.Refused(f"--labels {flags['labels']}: must be 100% or less")
    if not 0 <= flags["seed"] < 2 ** 32:
        raise cli.Refused(f"--seed {flags['seed']}: must be 0 or more and less than 2^32")


def join_processes(config, supervised):
    """Join torchrun's other processes. Refuses a --batch or --sync_bn that does not suit them."""
    distributed.join(config["device"])
    world, parts = distributed.world(), config["accumulate"]
    for name in ("batch",) if supervised else ("batch", "unlabeled"):
        if (config[name] or 0) % (world * parts):
            raise cli.Refused(f"--{name} {config[name]}: cannot be divided equally among {world} processes "
                              f"with --accumulate {parts}; give a multiple of {world * parts}")
    if config["sync_bn"] and not (world > 1 and config["device"] != "cpu"):
        raise cli.Refused("--sync_bn: needs several GPUs with one process each (torchrun)")
    restarts, = distributed.agree(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    config["resume"] |= restarts > 0                            # torchrun --max-restarts


def differences(given, table, preset, named_by_method):
    """The given flags that differ from the preset and make this another experiment."""
    implied = {"dataset", "labels", "seed", "deterministic", *HARMLESS, *named_by_method}
    changed = {k: v for k, v in given.items() if k not in implied and preset.get(k, table[k][1]) != v}
    if changed.get("rot_dim") == 0 and not preset["rot_dim"]:   # no reduction, as without the flag
        changed.pop("rot_dim")
    return changed


def default_folder(config, listed, changed):
    """runs/<dataset>_<labels>_<method>_<seed>_<differences from the preset>"""
    dataset = os.path.basename(os.path.abspath(config["dataset"])).removesuffix(".npz")
    others = [f"{k}{Path(v).name if isinstance(v, str) else v}" for k, v in changed.items()]    # no slashes
    name = [dataset, listed or config["labels"] or "all", config["method"], config["seed"], *others]
    return str(Path("runs", "_".join(map(str, name))))


def command_of(script, given):
    """The command line that repeats the run."""
    words = [f"--{k}" if v is True else f"--{k}={shlex.quote(str(v))}"
             for k, v in given.items() if k != "resume"]
    return " ".join(["python", shlex.quote(os.path.relpath(script)), *words])


def command_to_continue(config):
    world, here = distributed.world(), distributed.processes_here()
    if world == 1:
        return f"{config['command']} --resume"
    machines = f"--nnodes={world // here} " if world > here else ""
    return config["command"].replace("python", f"torchrun {machines}--nproc_per_node={here}", 1) + " --resume"
