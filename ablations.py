"""The tables and figures of the paper's ablation section: each trains the runs it needs, then shows its table.

    python ablations.py components --dataset digits --labels 50 --seeds 0,1,2 --jobs 2
    python ablations.py ensemble --dataset cifar10 --labels 250,4000 --seeds 0,1,2,3,4
    python ablations.py rotation_dim --dataset digits --labels 50
    python ablations.py diversity --dataset digits --labels 50

The runs are runs of train_crae.py, in the folder that `python report.py` reads. Finished ones are not repeated, also if
another table or a person has made them; unfinished ones are continued. So the same command continues a stopped sweep.
"""
import collections
import csv
import inspect
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

import presets
import report
import train_crae
import training
from models import check_arch, make_model

# What each row is, as flags of train_crae.py.
ROWS = dict(
    components=[{}, dict(ext1=True), dict(plus=True), dict(heads=0), dict(heads=0, ext1=True), dict(ext2=True)],
    ensemble=[{}, dict(select="random"), dict(select="independent"), dict(select="detach"), dict(plus=True)],
    aux_classifier=[{}, dict(aux=False), dict(plus=True), dict(plus=True, aux=False)],
    heads=[dict(select="independent", heads=k) for k in (2, 10, 20)],           # the paper's
    diversity=[{}, dict(plus=True)],
)


def ablate(table: Literal["components", "ensemble", "aux_classifier", "heads", "rotation_dim", "diversity"],
           dataset: str = "digits", labels: list[int | str | None] | None = None, seeds: list[int] = [0], steps: int | None = None,
           arch: str | None = None, batch: int | None = None, image_size: int | None = None, data_dir: str = "data",
           out: str = "runs", jobs: int = 1, device: str | None = None) -> list:
    """TABLE           one of
        components      CRAE, + ext. 1, + ext. 1 and 2 (CRAE+), without rotation branches, the same + ext. 1, + ext. 2 alone
        ensemble        CRAE against random select, independent, detached p(y|x), and CRAE+
        aux_classifier  CRAE and CRAE+ with and without the additional classifier
        heads           the independent ensemble with 2, 10 and 20 rotation classifiers
        rotation_dim    CRAE with fewer and fewer features in front of the rotation heads; parameters, time and memory
        diversity       the matrices of the rotation heads of CRAE and CRAE+, as pictures and as one number an epoch

    --dataset       as for train_crae.py; without it digits
    --labels        numbers of labelled images, 250,4000 or just one, or shares such as 10%; without it the preset's
    --seeds         0,1,2 or just one
    --steps         training steps of each run; without it the preset's
    --arch          wrn-<depth>-<width> or resnet50v2; without it the preset's
    --batch         labelled images in a step, and as many unlabelled ones; without it the preset's
    --image_size    pixels
    --data_dir      where downloaded datasets are kept
    --out           the folder that holds the runs; pictures and tables go to its _ablations/
    --jobs          runs side by side; they share out the cores, or the GPUs
    --device        cpu, cuda; without it cuda where there is one
    --help          this text
    """
    training.refuse_torchrun("ablations.py; --jobs shares out the GPUs")
    if jobs < 1:
        sys.exit(f"--jobs {jobs}: must be 1 or more")
    if min(seeds) < 0:
        sys.exit(f"--seeds {min(seeds)}: must be 0 or more")
    if os.path.exists(out) and not os.path.isdir(out):
        sys.exit(f"--out {out}: is a file")
    common = dict(dataset=dataset, steps=steps, arch=arch, batch=batch, image_size=image_size, data_dir=data_dir, device=device)
    preset = presets.for_dataset(dataset)
    rows = ([dict(rot_dim=dim) for dim in dims_of(arch or preset["arch"])] if table == "rotation_dim" else
            [dict(row) for row in ROWS[table]])
    labels, seeds = list(dict.fromkeys(labels or [preset["labels"]])), list(dict.fromkeys(seeds))
    num_classes = check_data(table, [settle(common | dict(labels=n, seed=seeds[0]), out)["config"] for n in labels])
    for row in rows:
        if row.get("heads") == num_classes:                     # the ensemble's own number: one experiment, one name
            row.pop("heads")
    runs = [settle(row | common | dict(labels=n, seed=seed), out) for n in labels for row in rows for seed in seeds]
    for run in runs:
        if training.holds_anything(run["folder"]):
            training.refuse_other_flags(run["config"] | dict(out=str(run["folder"])))
    training.make_folder(out)
    with training.locked(out):
        failed = sweep(runs, jobs, device)
    shown = show(table, [run for run in runs if finished(run)], [n or "all" for n in labels], num_classes, Path(out))
    if failed:
        sys.exit(f"{len(failed)} of {len(runs)} runs failed, the first: {failed[0]}")
    return shown


def check_data(table, configs):
    """What the data would refuse is refused now, for each number of labels; the number of classes."""
    _, y, parts, classes = training.load_images(configs[0])
    for config in configs:
        split = training.draw_split(config, y, parts)
        if table == "diversity" and (y[split["unlabeled"]] < 0).all():
            sys.exit(f"--dataset {config['dataset']}: the classes of its unlabelled images are not known, so there is no diversity matrix")
    return len(classes)


def dims_of(arch):
    """No reduction, then the feature width and every power of two below it, down to 4."""
    check_arch(arch)
    width = make_model(arch, 2, 0).backbone.num_features
    return [0, width, *(2 ** k for k in range(20, 1, -1) if 2 ** k < width)]


def settle(flags, out):
    """A run before it begins: its flags, its values and its folder, named as train_crae.py would name it."""
    defaults = {name: p.default for name, p in inspect.signature(train_crae.train).parameters.items()}
    flags = {k: v for k, v in flags.items() if v != defaults[k]}
    every = defaults | flags
    method = train_crae.method_name(every["plus"] or every["ext1"], every["plus"] or every["ext2"], every["entmin"], every["select"],
                                    every["heads"], every["aux"])
    config = training.resolve(train_crae.train, every, method, unnamed=train_crae.NAMED_BY_METHOD)
    config |= dict(ext1=every["plus"] or every["ext1"], ext2=every["plus"] or every["ext2"])            # as train_crae.py does
    return dict(flags=flags, config=config, folder=Path(out, Path(config["out"]).name))


# ---------------------------------------------------------------- the sweep


def steps_done(run):
    try:
        rows = training.read_rows(run["folder"] / "log.csv", run["config"]["steps"])
        return int(rows[-1]["step"]) if rows else 0
    except (OSError, ValueError, KeyError, csv.Error):          # a damaged log: train_crae.py will say so
        return 0


def finished(run):
    return steps_done(run) == run["config"]["steps"] and (run["folder"] / "model.pt").exists()


def start(run, place, jobs, device):
    """train_crae.py as a process of its own, with its share of the cores or one of the GPUs."""
    words = [f"--{k}={v}" for k, v in run["flags"].items()]
    environment = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs))))
    if device in (None, "cuda") and torch.cuda.device_count() > 1:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = gpus if gpus != [""] else [str(k) for k in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    output = tempfile.TemporaryFile("w+")
    script = Path(train_crae.__file__)
    process = subprocess.Popen([sys.executable, script, *words, f"--out={run['folder']}", "--resume"], stdout=output,
                               stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    return dict(process=process, output=output, run=run, place=place)


def last_line(output):
    output.seek(0)
    return (output.read().strip().splitlines() or ["no output"])[-1]


def sweep(runs, jobs, device):
    """All runs to their end, `jobs` at a time; stopped, they save what they have. What failed, a line each."""
    waiting = collections.deque(run for run in runs if not finished(run))
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before", flush=True)
    running, failed, total = [], [], sum(run["config"]["steps"] for run in runs)
    done = {run["folder"]: steps_done(run) for run in runs}
    with training.stop_signals() as stop, tqdm(total=total, initial=sum(done.values()), unit="step", disable=None,
                                               smoothing=0) as bar:
        try:
            while (running or waiting) and not stop:
                while waiting and len(running) < jobs:
                    free = min(set(range(jobs)) - {job["place"] for job in running})
                    running.append(start(waiting.popleft(), free, jobs, device))
                time.sleep(0.5)
                done |= {job["run"]["folder"]: steps_done(job["run"]) for job in running}
                for job in [job for job in running if job["process"].poll() is not None]:
                    running.remove(job)
                    line = last_line(job["output"])
                    bar.write(line)
                    if job["process"].returncode:
                        failed.append(f"{job['run']['folder']}: {line}")
                bar.n = sum(done.values())
                bar.set_postfix_str(f"{len(runs) - len(waiting) - len(running)} of {len(runs)} runs", refresh=True)
        finally:                                                # whatever ended the sweep, its runs save and end with it
            for job in running:
                job["process"].send_signal(signal.SIGTERM)
            for job in running:
                job["process"].wait()
    if stop:
        print(f"stopped; to continue: python {shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}", file=sys.stderr)
        sys.exit(128 + stop[0])
    return failed


# ---------------------------------------------------------------- what it shows


def show(table, runs, labels, num_classes, out):
    """The table, printed, returned and in _ablations/, with the pictures that belong to it."""
    folder = out / "_ablations"
    folder.mkdir(parents=True, exist_ok=True)
    if not runs:
        return []
    done = [report.read_run(run["folder"]) for run in runs]
    dataset = "_".join(filter(None, [report.file_name(done[0]["dataset"]), report.file_name(report.setting_of(done[0]))]))
    if table == "rotation_dim":
        rows = [row for n in labels for row in dim_rows(done, n, runs[0]["config"], num_classes)]
        for n in labels:
            report.draw_rotation_dim(report.rotation_dim_rows(done, n), f"{dataset}, {n} labels", folder / f"rotation_dim_{dataset}_{n}.png")
    elif table == "diversity":
        rows = diversity_rows(done, labels, dataset, folder)
        if not rows:
            return []
    else:
        paper = {} if report.setting_of(done[0]) else {(r["labels"], r["method"]): r["value"] for r in report.paper_numbers()
                                                       if r["table"] == table and r["dataset"] == done[0]["dataset"]}
        rows = [dict(labels=n, method=report.METHODS[method], error=report.mean_std(report.errors_of(done, method, n)),
                     paper=paper.get((str(n), method), "")) for n in labels for method in report.TABLES[table][1]
                if report.errors_of(done, method, n)]
    path = folder / f"{table}_{dataset}_{'_'.join(map(str, labels))}.csv"        # one for each setting: none is overwritten
    training.write_whole(path, lambda tmp: training.write_rows(tmp, rows, "w"))
    widths = {k: max(len(str(row[k])) for row in [*rows, {k: k}]) for k in rows[0]}
    shown = rows if len(rows) < 40 else rows[:: len(rows) // 20]        # an epoch's line for twenty of them is enough here
    for row in [{k: k for k in rows[0]}, *shown]:
        print("  ".join(f"{row[k]!s:<{widths[k]}}" for k in row).rstrip())
    print(f"{path}, {', '.join(p.name for p in sorted(folder.glob(f'{table}_{dataset}*.png'))) or 'no pictures'}; "
          f"all tables and figures: python report.py {out}")
    return rows


def dim_rows(done, labels, config, num_classes):
    """Errors beside what the rotation heads cost: parameters, time and memory at this batch."""
    rows = []
    for row in report.rotation_dim_rows(done, labels):
        parameters, microseconds, memory = head_cost(config, num_classes, row["rot_dim"])
        rows.append(dict(labels=labels, rot_dim=row["rot_dim"] or "no reduction", error=report.mean_std(row["errors"]),
                         head_parameters=parameters, head_microseconds=f"{microseconds:.0f}", head_kilobytes=f"{memory / 1024:.0f}"))
    return rows


def head_cost(config, num_classes, rot_dim, repeats=50):
    """The rotation heads alone, forward and backward, for the 8 B copies of a step.

    Time: the fastest of `repeats`, which other programs disturb least. Memory, calculated: four float32 copies of the parameters (weights, gradient, Adam's
    two averages), and the reduced features and logits with their gradients.
    """
    device = torch.device(config["device"])
    torch.manual_seed(0)
    net = make_model(config["arch"], num_classes, num_classes, rot_dim).to(device)
    heads = torch.nn.Sequential(*filter(None, (net.reduce, net.rotation)))
    features = torch.randn(8 * config["batch"], net.backbone.num_features, device=device, requires_grad=True)
    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        heads(features).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - before)
    parameters = sum(p.numel() for p in heads.parameters())
    activations = len(features) * ((rot_dim or 0) + 4 * num_classes)
    return parameters, 1e6 * min(times), 4 * (4 * parameters + 2 * activations)


def diversity_rows(done, labels, dataset, folder):
    """One number an epoch for each run, and the paper's two figures for the first seed."""
    for n in labels:
        first = {m: r for m in ("crae", "crae_plus") for r in done[::-1] if r["method"] == m and r["labels"] == n and r["matrices"]}
        for method, run in first.items():
            report.draw_diversity(run, f"{report.METHODS[method]}, {dataset}, {n} labels, seed {run['seed']}",
                                  folder / f"diversity_{dataset}_{n}_{method}.png")
        if len(first) == 2:
            report.draw_diversity_pair(*first.values(), f"{dataset}, {n} labels", folder / f"diversity_{dataset}_{n}.png")
    return [dict(labels=r["labels"], method=report.METHODS[r["method"]], seed=r["seed"], epoch=f"{step / r['epoch']:g}",
                 mean_diagonal=f"{report.mean_diagonal(matrix):.4f}")
            for r in done for step, matrix in r["matrices"].items()]


if __name__ == "__main__":
    training.command_line(ablate)
