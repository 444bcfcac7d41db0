"""The paper's ablation tables and figures. Each table trains the runs it needs and is then printed.

    python ablations.py components --dataset digits --labels 50 --seeds 0,1,2 --jobs 2
    python ablations.py ensemble --dataset cifar10 --labels 250,4000 --seeds 0,1,2,3,4
    python ablations.py rotation_dim --dataset digits --labels 50
    python ablations.py diversity --dataset digits --labels 50

The runs are ordinary runs of the training scripts, in the folder that report.py reads. Finished runs are not
repeated, no matter who started them, and unfinished ones are continued. So the same command continues a
stopped sweep.
"""
import cli

FLAGS = {
    "table": (("components", "ensemble", "aux_classifier", "heads", "rotation_dim", "diversity"),
              cli.WORD, """\
components      CRAE; with ext. 1; with ext. 1 and 2 (CRAE+); without rotation branches; the
                same with ext. 1; with ext. 2 only
ensemble        CRAE, the ensembles random, independent and detached p(y|x), and CRAE+
aux_classifier  CRAE and CRAE+, each with and without the additional classifier
heads           the ensemble independent with 2, 10 and 20 rotation classifiers
rotation_dim    CRAE with fewer and fewer features in front of the rotation heads, and the
                parameters, time and memory of the heads
diversity       the diversity matrices of CRAE and CRAE+ as figures, and the mean of their
                diagonals for every epoch"""),
    "dataset": (str, "digits", "as for train_crae.py"),
    "labels": ([cli.count], None, "numbers of labelled images, for example 250,4000, or shares such as 10% "
                                  "(default: the preset's)"),
    "seeds": ([int], [0], "seeds, for example 0,1,2"),
    "steps": (int, None, "training steps of each run (default: the preset's)"),
    "arch": cli.NETWORK_FLAGS["arch"],
    "batch": (int, None, "labelled images per step, and as many unlabelled ones (default: the preset's)"),
    "image_size": cli.RUN_FLAGS["image_size"],
    "data_dir": cli.RUN_FLAGS["data_dir"],
    "out": (str, "runs", "folder of the runs; tables and figures are written to its _ablations/"),
    "jobs": (int, 1, "runs at the same time; they share the CPU cores or the GPUs"),
    "device": (str, None, "cpu or cuda (default: cuda if available)"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)   # before torch is imported: a mistyped flag is reported at once

import collections
import csv
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

import devices
import models
import plots
import presets
import report
import run_folder
import train_baselines
import train_crae

SCRIPTS = {"train_crae.py": train_crae, "train_baselines.py": train_baselines}

# The rows of each table as flags of train_crae.py, or of the script named by `script`.
ROWS = dict(
    components=[{}, dict(ext1=True), dict(plus=True), dict(heads=0), dict(heads=0, ext1=True),
                dict(ext2=True)],
    ensemble=[{}, dict(select="random"), dict(select="independent"), dict(select="detach"), dict(plus=True)],
    aux_classifier=[{}, dict(aux=False), dict(plus=True), dict(plus=True, aux=False)],
    heads=[dict(select="independent", heads=k) for k in (2, 10, 20)],           # the numbers in the paper
    diversity=[{}, dict(plus=True)],
)


@cli.strict(FLAGS)
def ablate(table, dataset, labels, seeds, jobs, out, device, **others):
    """Train the runs of a table, print it and write it to _ablations/. Returns its rows."""
    cli.refuse_torchrun("ablations.py; --jobs distributes runs over the GPUs")
    if jobs < 1:
        raise cli.Refused(f"--jobs {jobs}: must be 1 or more")
    if min(seeds) < 0:
        raise cli.Refused(f"--seeds {min(seeds)}: must be 0 or more")
    if os.path.exists(out) and not os.path.isdir(out):
        raise cli.Refused(f"--out {out}: is a file; give a folder")
    preset = presets.for_dataset(dataset)
    labels, seeds = list(dict.fromkeys(labels or [preset["labels"]])), list(dict.fromkeys(seeds))
    common = dict(dataset=dataset, device=device, **others)
    rows = rows_of(table, others["arch"] or preset["arch"])
    first = [plan_run(common | dict(labels=n, seed=seeds[0]), out)["config"] for n in labels]
    num_classes = check_splits(table, first)
    for row in rows:
        if row.get("heads") == num_classes:     # the default of `independent`: one experiment has one name
            row.pop("heads")
    runs = [plan_run(row | common | dict(labels=n, seed=seed), out)
            for n in labels for row in rows for seed in seeds]
    for run in runs:
        if run_folder.holds_anything(run["folder"]):
            run_folder.refuse_other_flags(run["config"] | dict(out=str(run["folder"])))
    run_folder.make_folder(out)
    with run_folder.locked(out):
        failed = sweep(runs, jobs, device)
    done = [run for run in runs if is_finished(run)]
    shown = show_table(table, done, [n or "all" for n in labels], num_classes, Path(out))
    if failed:
        raise cli.Refused(f"{len(failed)} of {len(runs)} runs failed; the first is {failed[0]}")
    return shown


def rows_of(table, arch):
    """The flags of each row of a table."""
    if table != "rotation_dim":
        return [dict(row) for row in ROWS[table]]
    return [dict(rot_dim=dim) for dim in dims_of(arch)]


def dims_of(arch):
    """0 (no reduction), the number of features, and every smaller power of two down to 4."""
    models.check_arch(arch)
    features = models.make_model(arch, 2, 0).backbone.num_features
    return [0, features, *(2 ** k for k in range(20, 1, -1) if 2 ** k < features)]


def check_splits(table, configs):
    """Refuse numbers of labels that the data does not have, before any run. Returns the number of classes."""
    _, y, parts, classes = run_folder.load_images(configs[0])
    for config in configs:
        split = run_folder.draw_split(config, y, parts)
        if table == "diversity" and (y[split["unlabeled"]] < 0).all():
            raise cli.Refused(f"--dataset {config['dataset']}: the classes of its unlabelled images are "
                              "unknown, so there is no diversity matrix")
    return len(classes)


def plan_run(flags, out):
    """A run before it starts: script, flags, values, and the folder, named as the script would name it."""
    script = flags.get("script", "train_crae.py")
    table = SCRIPTS[script].FLAGS
    flags = {name: value for name, value in flags.items() if name != "script" and value != table[name][1]}
    config = SCRIPTS[script].configure(**flags)
    return dict(script=script, flags=flags, config=config, folder=Path(out, Path(config["out"]).name))


# ---------------------------------------------------------------- the sweep


def steps_done(run):
    try:
        rows = run_folder.read_rows(run["folder"] / "log.csv", run["config"]["steps"])
        return int(rows[-1]["step"]) if rows else 0
    except (OSError, ValueError, KeyError, csv.Error):          # a damaged log, which the run itself reports
        return 0


def is_finished(run):
    return steps_done(run) == run["config"]["steps"] and (run["folder"] / "model.pt").exists()


def start_run(run, slot, jobs, device):
    """Start a training script as a process with its share of the CPU cores, or with one of the GPUs."""
    words = [f"--{name}={value}" for name, value in run["flags"].items()]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, devices.cores() // jobs)))
    environment = dict(os.environ, OMP_NUM_THREADS=threads)
    if device in (None, "cuda") and torch.cuda.device_count() > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    output = tempfile.TemporaryFile("w+")
    script = Path(__file__).with_name(run["script"])
    command = [sys.executable, script, *words, f"--out={run['folder']}", "--resume"]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment,
                               start_new_session=True)
    return dict(process=process, output=output, run=run, slot=slot)


def last_line(output):
    output.seek(0)
    return (output.read().strip().splitlines() or ["no output"])[-1]


def sweep(runs, jobs, device):
    """Finish all runs, `jobs` at a time. Returns one line per run that failed."""
    waiting = collections.deque(run for run in runs if not is_finished(run))
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them already finished", flush=True)
    running, failed = [], []
    total = sum(run["config"]["steps"] for run in runs)
    done = {run["folder"]: steps_done(run) for run in runs}
    with cli.stop_signals() as stop, tqdm(total=total, initial=sum(done.values()), unit="step", disable=None,
                                          smoothing=0) as bar:
        try:
            while (running or waiting) and not stop:
                while waiting and len(running) < jobs:
                    slot = min(set(range(jobs)) - {job["slot"] for job in running})
                    running.append(start_run(waiting.popleft(), slot, jobs, device))
                time.sleep(0.5)
                done |= {job["run"]["folder"]: steps_done(job["run"]) for job in running}
                for job in [job for job in running if job["process"].poll() is not None]:
                    running.remove(job)
                    line = last_line(job["output"])
                    bar.write(line)
                    if job["process"].returncode:
                        failed.append(f"{job['run']['folder']}: {line}")
                bar.n = sum(done.values())
                ended = len(runs) - len(waiting) - len(running)
                bar.set_postfix_str(f"{ended} of {len(runs)} runs", refresh=True)
        finally:                                # whatever ends the sweep, its runs save and end as well
            for job in running:
                job["process"].send_signal(signal.SIGTERM)
            for job in running:
                job["process"].wait()
    if stop:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        raise cli.Stopped(stop[0], f"stopped; to continue: python {command}")
    return failed


# ---------------------------------------------------------------- the tables


def show_table(table, runs, labels, num_classes, out):
    """Print the table and write it to _ablations/ with its figures. Returns its rows."""
    folder = out / "_ablations"
    run_folder.make_folder(folder)
    if not runs:
        return []
    done = [report.read_run(run["folder"]) for run in runs]
    setting = report.file_name(report.setting_of(done[0]))
    dataset = "_".join(filter(None, [report.file_name(done[0]["dataset"]), setting]))
    if table == "rotation_dim":
        rows = rotation_dim_table(done, labels, runs[0]["config"], num_classes, dataset, folder)
    elif table == "diversity":
        rows = diversity_table(done, labels, dataset, folder)
    else:
        rows = method_table(table, done, labels)
    if not rows:
        return []
    path = folder / f"{table}_{dataset}_{'_'.join(map(str, labels))}.csv"       # one file per setting
    run_folder.write_whole(path, lambda tmp: run_folder.write_rows(tmp, rows, "w"))
    print_table(rows)
    figures = ", ".join(p.name for p in sorted(folder.glob(f"{table}_{dataset}*.png"))) or "no figures"
    print(f"{path}, {figures}; for all tables and figures: python report.py {out}")
    return rows


def print_table(rows):
    """Print about 20 rows if there is one per epoch, else all."""
    shown = rows if len(rows) < 40 else rows[::len(rows) // 20]
    widths = {k: max(len(str(row[k])) for row in [*rows, {k: k}]) for k in rows[0]}
    for row in [{k: k for k in rows[0]}, *shown]:
        print("  ".join(f"{row[k]!s:<{widths[k]}}" for k in row).rstrip())


def method_table(table, done, labels):
    """One row per number of labels and method; the paper's numbers only for the preset's values."""
    paper = {}
    if not report.setting_of(done[0]):
        paper = {(r["labels"], r["method"]): r["value"] for r in presets.paper_numbers()
                 if r["table"] == table and r["dataset"] == done[0]["dataset"]}
    rows = []
    for n in labels:
        for method in report.TABLES[table][1]:
            errors = report.errors_of(done, method, n)
            if errors:
                rows.append(dict(labels=n, method=report.METHODS[method], error=report.mean_std(errors),
                                 paper=paper.get((str(n), method), "")))
    return rows


def diversity_table(done, labels, dataset, folder):
    """One row per run and epoch, and the paper's two figures for the first seed."""
    for n in labels:
        some = [r for r in done if r["labels"] == n]
        report.diversity_figures(some, f"{dataset}, {n} labels", folder, f"diversity_{dataset}_{n}")
    return [dict(labels=r["labels"], method=report.METHODS[r["method"]], seed=r["seed"],
                 epoch=f"{step / r['epoch']:g}", mean_diagonal=f"{report.mean_diagonal(matrix):.4f}")
            for r in done for step, matrix in r["matrices"].items()]


def rotation_dim_table(done, labels, config, num_classes, dataset, folder):
    """One row per dimension: errors, and parameters, time and memory of the rotation heads; and a figure."""
    rows = []
    for n in labels:
        of_labels = report.rotation_dim_rows(done, n)
        for row in of_labels:
            parameters, microseconds, memory = head_cost(config, num_classes, row["rot_dim"])
            rows.append(dict(labels=n, rot_dim=row["rot_dim"] or "no reduction",
                             error=report.mean_std(row["errors"]), head_parameters=parameters,
                             head_microseconds=f"{microseconds:.0f}", head_kilobytes=f"{memory / 1024:.0f}"))
        path = folder / f"rotation_dim_{dataset}_{n}.png"
        if of_labels:
            plots.plot_rotation_dim(of_labels, f"{dataset}, {n} labels", path)
    return rows


def head_cost(config, num_classes, rot_dim, repeats=50):
    """Parameters, microseconds and bytes of the rotation heads, forward and backward, for one step.

    Time: the fastest of `repeats`, which other programs disturb least. Memory is calculated: four float32
    copies of the parameters (weights, gradient, Adam's two averages), and the reduced features and logits
    with their gradients.
    """
    device = torch.device(config["device"])
    torch.manual_seed(0)
    net = models.make_model(config["arch"], num_classes, num_classes, rot_dim).to(device)
    heads = torch.nn.Sequential(*filter(None, (net.reduce, net.rotation)))
    copies = 8 * config["batch"]                # four rotations of labelled and unlabelled images
    features = torch.randn(copies, net.backbone.num_features, device=device, requires_grad=True)
    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        heads(features).sum().backward()
        devices.synchronize(device)
        times.append(time.perf_counter() - before)
    parameters = sum(p.numel() for p in heads.parameters())
    activations = copies * ((rot_dim or 0) + 4 * num_classes)
    return parameters, 1e6 * min(times), 4 * (4 * parameters + 2 * activations)


if __name__ == "__main__":
    cli.run(ablate, ARGUMENTS)
