"""The paper's tables and ablations, one command per table. Each trains the runs it needs and is then printed.

    python ablations.py self_supervised --dataset cifar10 --labels 250,4000 --seeds 0,1,2,3,4 --dry_run
    python ablations.py components --dataset digits --labels 50 --seeds 0,1,2 --jobs 2
    python ablations.py rotation_dim --dataset imagenet --labels 10% --processes 8 --accumulate 2
    python ablations.py diversity --dataset digits --labels 50

The runs are ordinary runs of the training scripts, in the folder that report.py reads. Finished runs are not
repeated, no matter who started them, and unfinished ones are continued. So the same command continues a
stopped sweep. With --dry_run, it prints the commands of the runs and an estimate of their time.
"""
import cli

FLAGS = {
    "table": (("self_supervised", "state_of_the_art", "components", "ensemble", "aux_classifier", "heads",
               "rotation_dim", "diversity", "compare"), cli.WORD, """\
self_supervised   labelled-only, fine-tune, S4L, CRAE; also S4L with its class loss on
                  upright copies, and with weight 2
state_of_the_art  labelled-only, the semi-supervised baselines, CRAE and CRAE+; on the
                  paper's datasets, only the baselines of the paper's table
components        CRAE; with ext. 1; with ext. 1 and 2 (CRAE+); without rotation branches;
                  the same with ext. 1; with ext. 2 only; with entropy minimisation
                  instead of ext. 1, without and with ext. 2; with --detach_rotated
ensemble          CRAE, the ensembles random, independent and detached p(y|x), CRAE+; also
                  S4L, and S4L with one rotation per image
aux_classifier    CRAE and CRAE+, each with the additional classifier on upright copies, on
                  all copies, and without it
heads             the ensemble independent with 2, 10 and 20 rotation classifiers
rotation_dim      CRAE with fewer and fewer features in front of the rotation heads, and
                  the parameters, time and memory of the heads
diversity         the diversity matrices of CRAE and CRAE+ as figures, and the mean of
                  their diagonals for every epoch
compare           which method for my data: labelled-only, S4L, CRAE, CRAE+, MixMatch, and CRAE
                  with MixMatch, with the fast recipe"""),
    "dataset": (str, "digits", "as for train_crae.py"),
    "labels": ([cli.count], None, "numbers of labelled images, for example 250,4000, or shares such as 10% "
                                  "(default: the preset's)"),
    "recipe": cli.DATASET_FLAGS["recipe"],
    "labels_file": cli.DATASET_FLAGS["labels_file"],
    "seeds": ([int], [0], "seeds, for example 0,1,2"),
    "steps": (int, None, "training steps of each run (default: the preset's)"),
    "minutes": (float, None, "minutes per run instead of --steps"),
    "pflop": (float, None, "10^15 FLOPs per run instead of --steps: equal compute for all methods"),
    "arch": cli.NETWORK_FLAGS["arch"],
    "batch": cli.NETWORK_FLAGS["batch"],
    "image_size": cli.RUN_FLAGS["image_size"],
    "flip": cli.RUN_FLAGS["flip"],
    "data_dir": cli.RUN_FLAGS["data_dir"],
    "skip_broken": cli.RUN_FLAGS["skip_broken"],
    "out": (str, "runs", "folder of the runs; tables and figures are written to its _ablations/"),
    "jobs": (int, 1, "runs at the same time; they share the CPU cores or the GPUs"),
    "processes": (int, 1, "processes per run, each with its own GPU (torchrun)"),
    "accumulate": cli.RUN_FLAGS["accumulate"],
    "device": (str, None, "cpu or cuda (default: cuda if available)"),
    "dry_run": (bool, False, "print the commands with their steps, an estimate of their hours on this device "
                             "and what is finished; train nothing"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)   # before torch is imported: a mistyped flag is reported at once

import os
import statistics
import time
from pathlib import Path

import torch

import augmentation
import claims
import devices
import models
import plots
import presets
import report
import results
import run_folder
import sweeps


def baseline(method, **flags):
    """A row that train_baselines.py trains."""
    return dict(script="train_baselines.py", method=method, **flags)


# The rows of each table as flags of train_crae.py, or of the script named by `script`.
ROWS = dict(
    self_supervised=[baseline("labeled_only"), baseline("fine_tune"), baseline("s4l"),
                     baseline("s4l", class_copies="upright"), baseline("s4l", weight=2.0), {}],
    state_of_the_art=[*map(baseline, ("labeled_only", "pi_model", "pseudo_label", "mixup", "vat",
                                      "mean_teacher", "mixmatch", "ict", "swa", "fixmatch")),
                      {}, dict(plus=True)],
    components=[{}, dict(ext1=True), dict(plus=True), dict(heads=0), dict(heads=0, ext1=True),
                dict(ext2=True), dict(entmin=True), dict(entmin=True, ext2=True), dict(detach_rotated=True)],
    ensemble=[{}, dict(select="random"), dict(select="independent"), dict(select="detach"), dict(plus=True),
              baseline("s4l"), baseline("s4l", rotations="one")],
    aux_classifier=[{}, dict(aux="all"), dict(aux="none"),
                    dict(plus=True), dict(plus=True, aux="all"), dict(plus=True, aux="none")],
    heads=[dict(select="independent", heads=k) for k in (2, 10, 20)],           # the numbers in the paper
    diversity=[{}, dict(plus=True)],
    compare=[baseline("labeled_only"), baseline("s4l", class_copies="upright"), {}, dict(plus=True),
             baseline("mixmatch"), dict(mixmatch=True)],
)
REPORTED = dict(self_supervised="slfsl", state_of_the_art="sota")       # other names in report.TABLES


@cli.strict(FLAGS)
def ablate(table, dataset, labels, seeds, jobs, processes, out, device, dry_run, **others):
    """Train the runs of a table, print it and write it to _ablations/. Returns its rows.

    With dry_run: print the commands of the runs. Returns one dict per run.
    """
    cli.refuse_torchrun("ablations.py; --jobs distributes runs over the GPUs")
    check_sweep(seeds, jobs, processes, out, device)
    if table == "compare" and dataset != "imagenet":            # which has no fast recipe
        others["recipe"] = others["recipe"] or "fast"
    preset = presets.for_dataset(dataset, recipe=others["recipe"])
    labels, seeds = list(dict.fromkeys(labels or [preset["labels"]])), list(dict.fromkeys(seeds))
    common = dict(dataset=dataset, device=device, **others)
    rows = rows_of(table, dataset, others["arch"] or preset["arch"])
    first = [sweeps.plan_run(common | dict(labels=n, seed=seeds[0]), out)["config"] for n in labels]
    check_batch(first[0], processes)
    known = dry_run and first[0]["dataset"] in presets.NAMED
    num_classes, image_size = known_shape(first[0]) if known else check_splits(table, first)
    for row in rows:
        if row.get("heads") == num_classes:     # the default of `independent`: one experiment has one name
            row.pop("heads")
    runs = [sweeps.plan_run(row | common | dict(labels=n, seed=seed), out)
            for n in labels for row in rows for seed in seeds]
    runs = list({run["folder"]: run for run in runs}.values())  # S4L has weight 2 in the fast recipe anyway
    for run in runs:
        if run_folder.holds_anything(run["folder"]):
            run_folder.refuse_other_flags(run["config"] | dict(out=str(run["folder"])))
    if dry_run:
        return sweeps.print_plan(runs, num_classes, image_size, jobs, processes)
    run_folder.make_folder(out)
    with run_folder.locked(out):
        failed = sweeps.sweep(runs, jobs, processes, device)
    done = [run for run in runs if sweeps.is_finished(run)]
    shown = show_table(table, done, num_classes, Path(out))
    if failed:
        raise cli.Refused(f"{len(failed)} of {len(runs)} runs failed; the first is {failed[0]}")
    return shown


# ---------------------------------------------------------------- the plan


def check_sweep(seeds, jobs, processes, out, device):
    """Refuse values out of range, and more processes than GPUs."""
    for name, value, least in ("jobs", jobs, 1), ("processes", processes, 1), ("seeds", min(seeds), 0):
        if value < least:
            raise cli.Refused(f"--{name} {value}: must be {least} or more")
    if os.path.exists(out) and not os.path.isdir(out):
        raise cli.Refused(f"--out {out}: is a file; give a folder")
    if processes == 1:
        return
    if device not in (None, "cpu", "cuda"):
        raise cli.Refused(f"--device {device}: with --processes, each process has its own GPU; "
                          "omit the flag, or give cpu or cuda")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if (gpus or jobs > 1) and jobs * processes > gpus:
        raise cli.Refused(f"--processes {processes}: with --jobs {jobs}, the runs need "
                          f"{jobs * processes} GPUs, but there are {gpus}; give fewer")


def check_batch(config, processes):
    batch, unlabeled, parts = config["batch"], config["unlabeled"], processes * config["accumulate"]
    if batch % parts:
        raise cli.Refused(f"--processes {processes}: a batch of {batch} cannot be divided equally among them "
                          f"with --accumulate {config['accumulate']}; give a --batch divisible by {parts}")
    if (unlabeled or 0) % parts:
        raise cli.Refused(f"--processes {processes}: the recipe's {unlabeled} unlabelled images per step "
                          "cannot be divided equally among them with --accumulate "
                          f"{config['accumulate']}; give other numbers")


def rows_of(table, dataset, arch):
    """The flags of each row of a table."""
    if table == "rotation_dim":
        return [dict(rot_dim=dim) for dim in dims_of(arch)]
    rows = [dict(row) for row in ROWS[table]]
    in_paper = {r["method"] for r in presets.paper_numbers()
                if (r["table"], r["dataset"]) == ("sota", dataset)}
    if table == "state_of_the_art" and in_paper:        # the paper's baselines, and CRAE and CRAE+
        rows = [row for row in rows if "method" not in row or row["method"] in in_paper]
    return rows


def dims_of(arch):
    """0 (no reduction), the number of features, and every smaller power of two down to 4."""
    models.check_arch(arch)
    with torch.device("meta"):                  # no weights
        features = models.make_model(arch, 2, 0).backbone.num_features
    return [0, features, *(2 ** k for k in range(20, 1, -1) if 2 ** k < features)]


def known_shape(config):
    """The number of classes and the size of the images of a named dataset, without its data."""
    dataset = config["dataset"]
    return presets.NUM_CLASSES[dataset], config["image_size"] or presets.IMAGE_SIZE[dataset]


def check_splits(table, configs):
    """Refuse numbers of labels that the data does not have, before any run.

    Returns the number of classes and the size of the images. Reads no image of ImageNet, only its file names.
    """
    images, y, parts, classes = run_folder.load_images(configs[0])
    for config in configs:
        split = run_folder.draw_split(config, y, parts)
        if table == "diversity" and (y[split["unlabeled"]] < 0).all():
            raise cli.Refused(f"--dataset {config['dataset']}: the classes of its unlabelled images are "
                              "unknown, so there is no diversity matrix")
    return len(classes), images.shape[-1]


# ---------------------------------------------------------------- the tables


def show_table(table, runs, num_classes, out):
    """Print the table and write it to _ablations/ with its figures. Returns its rows."""
    folder = out / "_ablations"
    run_folder.make_folder(folder)
    if not runs:
        return []
    done = [results.read_run(run["folder"]) for run in runs]
    labels = list(dict.fromkeys(r["labels"] for r in done))     # as results.label_count writes them
    setting = report.file_name(report.setting_of(done[0]))
    dataset = "_".join(filter(None, [report.file_name(done[0]["dataset"]), setting]))
    if table == "rotation_dim":
        rows = rotation_dim_table(done, labels, runs[0]["config"], num_classes, dataset, folder)
    elif table == "diversity":
        rows = diversity_table(done, labels, dataset, folder)
    elif table == "compare":
        rows = compare_table(done, labels)
    else:
        rows = method_table(table, done, labels)
    if not rows:
        return []
    # One file per setting.
    path = folder / f"{table}_{dataset}_{'_'.join(map(str, labels)).replace(' ', '-')}.csv"
    run_folder.write_whole(path, lambda tmp: run_folder.write_rows(tmp, rows, "w"))
    print_table(rows)
    figures = ", ".join(p.name for p in sorted(folder.glob(f"{table}_{dataset}*.png"))) or "no figures"
    print(f"{path}, {figures}; for all tables and figures: python report.py {out}")
    if table == "compare":
        print("\n".join(verdict([row for row in rows if row["labels"] == n], n) for n in labels))
    return rows


def print_table(rows):
    """Print about 20 rows if there is one per epoch, else all."""
    shown = rows if len(rows) < 40 else rows[::len(rows) // 20]
    widths = {k: max(len(str(row[k])) for row in [*rows, {k: k}]) for k in rows[0]}
    for row in [{k: k for k in rows[0]}, *shown]:
        print("  ".join(f"{row[k]!s:<{widths[k]}}" for k in row).rstrip())


def method_table(table, done, labels):
    """One row per number of labels and method; the paper's numbers only for the preset's values."""
    name = REPORTED.get(table, table)
    paper = {} if report.setting_of(done[0]) else report.paper_cells(name, done[0]["dataset"])
    rows = []
    for n in labels:
        for method in report.TABLES[name][1]:
            errors = report.errors_of(done, method, n)
            if errors:
                rows.append(dict(labels=n, method=report.METHODS[method], error=report.mean_std(errors),
                                 paper=paper.get((str(n), method), "")))
    return rows


def compare_table(done, labels):
    """One row per number of labels and method, the lowest error first, with 95 % intervals.

    The steps show whether --minutes gave every method enough of them.
    """
    rows = []
    for n in labels:
        of_labels, of_methods = [r for r in done if r["labels"] == n], []
        for method in dict.fromkeys(r["method"] for r in of_labels):
            runs = [r for r in of_labels if r["method"] == method]
            errors = [r["saved_error"] for r in runs]
            low, high = (statistics.mean(ends) for ends in zip(*(r["interval"] for r in runs)))
            of_methods.append(dict(labels=n, method=report.METHODS[method], error=report.mean_std(errors),
                                   low=f"{low:.2f}", high=f"{high:.2f}",
                                   steps=f"{statistics.mean(r['steps'] for r in runs):.0f}",
                                   minutes=f"{statistics.mean(r['seconds'] for r in runs) / 60:.1f}"))
        rows += sorted(of_methods, key=lambda row: float(row["error"].split()[0]))
    return rows


def verdict(rows, labels):
    """What the comparison says, in one sentence: intervals that overlap do not tell methods apart."""
    best, *others = rows
    alike = [row["method"] for row in others if float(row["low"]) <= float(best["high"])]
    text = f"With {labels} labels, {best['method']} has the lowest error"
    if not alike:
        return f"{text}, and its 95 % interval overlaps with no other."
    return (f"{text}, but its 95 % interval overlaps with that of {', '.join(alike)}: this test set cannot "
            "tell them apart; more --seeds or test images would say more.")


def diversity_table(done, labels, dataset, folder):
    """One row per run and epoch, and the paper's two figures for the first seed."""
    for n in labels:
        some = [r for r in done if r["labels"] == n]
        report.diversity_figures(some, f"{dataset}, {n} labels", folder, f"diversity_{dataset}_{n}")
    return [dict(labels=r["labels"], method=report.METHODS[r["method"]], seed=r["seed"],
                 epoch=f"{step / r['epoch']:g}", mean_diagonal=f"{claims.mean_diagonal(matrix):.4f}")
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

    Time: the fastest of `repeats`, or of those within two seconds; other programs disturb it least. Memory is
    calculated: four float32 copies of the parameters (weights, gradient, Adam's two averages), and the
    reduced features and logits with their gradients.
    """
    device = torch.device(config["device"])
    torch.manual_seed(0)
    net = models.make_model(config["arch"], num_classes, num_classes, rot_dim).to(device)
    heads = torch.nn.Sequential(*filter(None, (net.reduce, net.rotation)))
    labeled, unlabeled = (augmentation.COPIES[config[name]] for name in ("labeled_copies", "rotations"))
    copies = labeled * config["batch"] + unlabeled * (config["unlabeled"] or config["batch"])
    features = torch.randn(copies, net.backbone.num_features, device=device, requires_grad=True)
    times = []
    while len(times) < repeats and sum(times) < 2:
        before = time.perf_counter()
        heads(features).sum().backward()
        devices.synchronize(device)
        times.append(time.perf_counter() - before)
    parameters = sum(p.numel() for p in heads.parameters())
    activations = copies * ((rot_dim or 0) + 4 * num_classes)
    return parameters, 1e6 * min(times), 4 * (4 * parameters + 2 * activations)


if __name__ == "__main__":
    cli.run(ablate, ARGUMENTS)
