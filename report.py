"""The paper's tables and figures from the logs of runs, the paper's own numbers beside ours.

    python report.py runs/                                      writes report/report.md and its pictures
    python report.py runs/ --out somewhere/

Reads config.json, log.csv and diversity.csv of every run under the folder, and nothing else; no run is needed for an
empty report. An error is the median of a finished run's last 20 evaluations; its mean and standard deviation are over
seeds, whose number stands in brackets.
"""
import csv
import json
import re
import statistics
import sys
from pathlib import Path

import matplotlib

import training

matplotlib.use("Agg")                                           # no screen needed
from matplotlib import pyplot as plt  # noqa: E402

# The paper's tables: title, and rows as method: name.
TABLES = {
    "slfsl": ("SlfSL based SemSL", dict(labeled_only="Labeled-only", fine_tune="Fine-tune", s4l="S4L", crae="CRAE")),
    "sota": ("SOTA SemSL", dict(
        labeled_only="Labeled-only", pi_model="Π-Model", pseudo_label="Pseudo-Label", mixup="Mixup", vat="VAT",
        mean_teacher="Mean Teacher", mixmatch="MixMatch", ict="ICT", swa="SWA", fixmatch="FixMatch (not in the paper)",
        crae="CRAE", crae_plus="CRAE+")),
    "components": ("Components", dict(
        crae="CRAE", crae_ext1="CRAE + ext. 1", crae_plus="CRAE + ext. 1 and 2 (CRAE+)", no_rotation="CRAE without rotation branches",
        no_rotation_ext1="the same + ext. 1", crae_ext2="CRAE + ext. 2 (not in the paper)",
        crae_entmin="CRAE + entropy minimisation (not in the paper)")),
    "ensemble": ("Ensembles", dict(crae="CRAE", random="random select", independent="independent", detach="detached p(y|x)",
                                   crae_plus="CRAE+")),
    "aux_classifier": ("Additional classifier", dict(
        crae="CRAE", crae_no_aux="CRAE without it", crae_plus="CRAE+", crae_plus_no_aux="CRAE+ without it")),
    "heads": ("Number of independent rotation classifiers", dict(independent_2="2", independent_10="10", independent_20="20")),
}
# Names in figures.
METHODS = {method: name.removesuffix(" (not in the paper)") for _, rows in TABLES.values() for method, name in rows.items()} | dict(
    no_rotation_ext1="ext. 1 without rotation branches", crae_no_aux="CRAE, no additional classifier",
    crae_plus_no_aux="CRAE+, no additional classifier") | {f"independent_{k}": f"independent, {k} heads" for k in (2, 10, 20)}

# ---------------------------------------------------------------- reading


def read_runs(folder):
    """All runs under a folder, and a line on everything in it that was passed over."""
    folder = Path(folder)
    runs, passed_over, found = [], [], set()
    for path in sorted(folder.rglob("config.json")):
        found.add(path.parent)
        try:
            run = read_run(path.parent)
        except Exception as error:                              # whatever a foreign or damaged file leads to
            passed_over.append(f"{path.parent}: not a run of this repository, or damaged ({type(error).__name__}: {error})")
            continue
        if run["method"] == "rotation":                         # the first stage of fine_tune
            continue
        if run["matrices"] is None:
            passed_over.append(f"{path.parent / 'diversity.csv'}: damaged")
            run["matrices"] = {}
        same = "dataset", "labels", "method", "seed", "changed", "rot_dim"
        twin = next((r for r in runs if all(r[k] == run[k] for k in same)), None)
        if twin and (twin["finished"] or not run["finished"]):
            passed_over.append(f"{path.parent}: the same experiment as {twin['path']}, which is counted")
            continue
        if twin:
            runs.remove(twin)
            passed_over.append(f"{twin['path']}: the same experiment as {path.parent}, which is counted")
        runs.append(run)
    above = {parent for path in found for parent in path.parents if parent == folder or folder in parent.parents} - found | {folder}
    for path in sorted(path for parent in above for path in parent.iterdir()):
        if path not in found | above and path.name not in ("_ablations", ".lock"):              # ablations.py's
            passed_over.append(f"{path}: no run")
    return runs, passed_over


def read_run(path):
    """A run as a flat dict; ValueError or the like where its files are not what they should be."""
    config = json.loads((path / "config.json").read_text())
    steps, heads = int(config["steps"]), config["resolved"]["rotation_heads"]
    rows = training.read_rows(path / "log.csv", steps)
    errors, unlabeled = ([(int(r["step"]), float(r[name])) for r in rows if r[name]] for name in ("test_error", "unlabeled_error"))
    finished = bool(rows) and int(rows[-1]["step"]) == steps
    if finished and not errors and config["method"] != "rotation" or int(config["epoch"]) < 1:
        raise ValueError("no test error, or an epoch of no steps")
    return dict(path=path, method=str(config["method"]), dataset=str(config["dataset"]), seed=int(config["seed"]),
                labels=labels_of(config["labels"]), rot_dim=config["rot_dim"] and int(config["rot_dim"]),
                own_dim="rot_dim" not in config["changed"], changed={k: v for k, v in config["changed"].items() if k != "rot_dim"},
                heads=int(heads), steps=steps,
                step=int(rows[-1]["step"]) if rows else 0, epoch=int(config["epoch"]), finished=finished,
                parameters=int(config["resolved"]["parameters"]), errors=errors, unlabeled=unlabeled,
                error=statistics.median([e for _, e in errors][-training.rows_that_count(config):]) if errors else None,
                top5=float(rows[-1]["test_top5_error"]) if rows and rows[-1].get("test_top5_error") else None,
                matrices=read_diversity(path / "diversity.csv"))


def labels_of(value):
    """250, '10%', or 'all' where no number was drawn."""
    return str(value) if str(value).endswith("%") else int(value) if value else "all"


def read_diversity(path):
    """{step: C rows of K numbers}, nan for a class without images; a row that was cut off is left out. None: damaged."""
    matrices = {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if None not in row.values():
                    matrices.setdefault(int(row["step"]), []).append(
                        [float(v) if v else float("nan") for k, v in row.items() if k.startswith("head_")])
    except FileNotFoundError:                                   # no heads, or one for all classes
        return {}
    except Exception:                                           # whatever a foreign file leads to
        return None
    return {step: matrix for step, matrix in matrices.items() if len({len(row) for row in matrix}) == 1}


def paper_numbers():
    with (training.HERE / "paper_results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def setting_of(run):
    """What was changed by hand against the preset, as text; empty: the dataset's own setting."""
    return ", ".join(f"{k} {v}" for k, v in sorted(run["changed"].items()))


def number(text):
    """Label counts in order: 250, 4000, 1%, all."""
    return (0, float(str(text).rstrip("%"))) if str(text).rstrip("%").replace(".", "").isdigit() else (1, 0.0)


def file_name(dataset):
    """A dataset's name as part of a file's name; of a path its end."""
    return re.sub(r"[^\w.-]+", "-", Path(dataset).name)


# ---------------------------------------------------------------- tables


def mean_std(errors):
    """'12.34 ± 0.56 (3)', '12.34 (1)', or nothing."""
    if not errors:
        return ""
    std = f" ± {statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
    return f"{statistics.mean(errors):.2f}{std} ({len(errors)})"


def is_of(run, method):
    """Whether a run belongs in a method's row; independent with ten classes, and so ten heads, is independent_10 as well."""
    own_number = run["method"] == "independent" and method == f"independent_{run['heads']}"
    return (run["method"] == method or own_number) and run["own_dim"]


def errors_of(runs, method, labels):
    """The errors of the finished runs of a method, in order of their seeds."""
    chosen = [r for r in runs if is_of(r, method) and str(r["labels"]) == str(labels) and r["finished"]]
    return [r["error"] for r in sorted(chosen, key=lambda r: r["seed"])]


def table(name, title, rows, dataset, runs, with_paper):
    """The lines of one table in Markdown, and which of the paper's cells are missing; no lines if it has nothing to show."""
    paper = {(r["labels"], r["method"]): r for r in paper_numbers()
             if with_paper and r["dataset"] == dataset and r["metric"] == "error"
             and (r["table"] == name or (name, r["table"], r["method"]) == ("sota", "slfsl", "crae"))}          # in both of its tables
    own = [method for method in rows if (name, method) != ("sota", "crae")]     # which alone makes no comparison with others
    ours = {str(r["labels"]) for r in runs if any(is_of(r, method) for method in own)}
    columns = sorted({k for k, _ in paper} | ours, key=number)
    cells = {(method, k): mean_std(errors_of(runs, method, k)) for method in rows for k in columns}
    rows = {m: n for m, n in rows.items() if any(cells[m, k] or (k, m) in paper for k in columns)} if paper else rows
    if not columns or not rows:
        return [], []
    head = [cell for k in columns for cell in ([f"{k} labels", "paper"] if paper else [f"{k} labels"])]
    lines = ["| " + " | ".join([f"{title}, {dataset}".replace("|", "/"), *head]) + " |", "|---" * (len(head) + 1) + "|"]
    missing = []
    for method, label in rows.items():
        line = [label.replace("|", "\\|")]
        for k in columns:
            line.append(cells[method, k])
            if not cells[method, k] and (not paper or (k, method) in paper):
                missing.append((dataset, k, METHODS.get(method, method)))
            if paper:
                theirs = paper.get((k, method))
                quoted = " " + theirs["source"].replace("quoted from ", "[") + "]" if theirs and "quoted" in theirs["source"] else ""
                line.append(f"{float(theirs['value']):.2f}{quoted}" if theirs else "")
        lines.append("| " + " | ".join(line) + " |")
    return lines, missing


def imagenet_table(runs):
    """ILSVRC-2012: top-1 and top-5 accuracies of the runs with the preset's values, beside the paper's; and what is missing."""
    numbers = [r for r in paper_numbers() if r["dataset"] == "imagenet" and r["table"] == "slfsl"]
    columns = [(k, m) for k in ("1%", "10%") for m in ("top1_accuracy", "top5_accuracy")]
    names = [f"{k} labels, {m.replace('_accuracy', '').replace('top', 'top-')}" for k, m in columns]
    lines = ["| SlfSL based SemSL, ILSVRC-2012, accuracy | " + " | ".join(f"{n} | paper" for n in names) + " |",
             "|---" * (2 * len(columns) + 1) + "|"]
    missing = []
    for method, label in TABLES["slfsl"][1].items():
        theirs = {(r["labels"], r["metric"]): f"{float(r['value']):.2f}" for r in numbers if r["method"] == method}
        done = [r for r in runs if is_of(r, method) and r["finished"] and r["top5"] is not None]
        cells = {(k, m): mean_std([100 - (r["top5"] if m == "top5_accuracy" else r["error"]) for r in done if r["labels"] == k])
                 for k, m in columns}
        if theirs or done:
            lines.append(f"| {label} | " + " | ".join(f"{cells[c]} | {theirs.get(c, '')}" for c in columns) + " |")
            missing += [("imagenet", k, label) for k in ("1%", "10%") if not cells[k, "top1_accuracy"]]
    quoted = {(r["method"], r["labels"], r["metric"]): f"{float(r['value']):.2f} [s4l]" for r in paper_numbers()
              if r["table"] == "slfsl_reported"}                # another preprocessing: not to be held against the others
    lines += [f"| {label}, as S4L reports it | " + " | ".join(f" | {quoted.get((method, *c), '')}" for c in columns) + " |"
              for method, label in TABLES["slfsl"][1].items() if any(m == method for m, *_ in quoted)]
    return lines, missing


def rotation_dim_rows(runs, labels):
    """Error of CRAE by the dimension in front of the rotation heads, over the seeds that all of them have; None comes first."""
    chosen = [r for r in runs if r["method"] == "crae" and str(r["labels"]) == str(labels) and r["finished"]]
    dims = sorted({r["rot_dim"] for r in chosen} - {None}, reverse=True)
    if not dims:
        return []
    seeds = set.intersection(*({r["seed"] for r in chosen if r["rot_dim"] == d} for d in dims))
    chosen = [r for r in chosen if r["seed"] in seeds] or chosen                # seeds differ by more than dimensions do
    return [dict(rot_dim=d, errors=[r["error"] for r in chosen if r["rot_dim"] == d],
                 parameters=next(r["parameters"] for r in chosen if r["rot_dim"] == d))
            for d in ([None] if any(r["rot_dim"] is None for r in chosen) else []) + dims]


# ---------------------------------------------------------------- figures


def save(figure, path):
    figure.savefig(path, dpi=100)
    plt.close(figure)


def names_of(runs):
    """The methods of some runs with their names, in the order of the tables."""
    found = {r["method"] for r in runs}
    return {m: METHODS.get(m, m) for m in [*METHODS, *sorted(found - set(METHODS))] if m in found}


def colour_of(method):
    """One colour a method, the same in all figures."""
    colours = [*plt.get_cmap("tab20").colors, *plt.get_cmap("tab20b").colors]
    return colours[list(METHODS).index(method)] if method in METHODS else "black"


def draw_error_against_labels(runs, dataset, with_paper, path):
    """Ours with error bars, the paper's dashed in the same colour; False, and no picture, if there is nothing to show."""
    runs = [r for r in runs if r["finished"] and isinstance(r["labels"], int) and r["own_dim"]]
    if not runs:
        return False
    theirs = {}                                                 # the paper's own run stands before a number that it quotes
    for row in paper_numbers():
        if with_paper and (row["dataset"], row["metric"]) == (dataset, "error") and row["table"] in ("slfsl", "sota"):
            theirs.setdefault(row["method"], {}).setdefault(int(row["labels"]), float(row["value"]))
    methods = {m: METHODS.get(m, m) for m in [*METHODS, *sorted({r["method"] for r in runs} - set(METHODS))]
               if m in theirs or any(r["method"] == m for r in runs)}
    counts = {n for points in theirs.values() for n in points} | {r["labels"] for r in runs}
    figure, axes = plt.subplots(figsize=(7.5, max(4.5, 0.6 + 0.19 * len(methods))), layout="constrained")      # room for the names
    for k, (method, name) in enumerate(methods.items()):
        points = [(n, errors_of(runs, method, n)) for n in sorted({r["labels"] for r in runs if r["method"] == method})]
        aside = 1 + 0.15 * ((k + 0.5) / len(methods) - 0.5)     # so that bars do not cover each other
        if points:
            axes.errorbar([n * aside for n, _ in points], [statistics.mean(e) for _, e in points],
                          [statistics.stdev(e) if len(e) > 1 else 0 for _, e in points], label=name, capsize=3,
                          color=colour_of(method), marker="osv^D"[k % 5])
        if method in theirs:
            axes.plot(*zip(*sorted(theirs[method].items())), linestyle="--", alpha=0.7, color=colour_of(method), marker="" if points else ".",
                      label=None if points else f"{name} (paper)")
    if with_paper:
        axes.plot([], [], linestyle="--", color="grey", label="the paper's")
    if len(counts) > 1:
        axes.set_xscale("log")
    axes.set_xticks(sorted(counts), [str(n) for n in sorted(counts)])
    axes.minorticks_off()
    axes.set(xlabel="labelled images", ylabel="test error (%)", ylim=(0, None))
    axes.set_title(dataset, parse_math=False)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    save(figure, path)
    return True


def draw_curves(runs, title, path):
    """Test error of the averaged weights over the steps, the mean of a method's seeds: of its finished ones if there are any."""
    figure, axes = plt.subplots(figsize=(7.5, max(4.5, 0.6 + 0.19 * len(names_of(runs)))), layout="constrained")
    for method, name in names_of(runs).items():
        curves = [dict(r["errors"]) for r in runs if r["method"] == method and r["finished"]]
        curves = curves or [dict(r["errors"]) for r in runs if r["method"] == method]
        steps = sorted(set.intersection(*map(set, curves)))
        axes.plot(steps, [statistics.mean(c[s] for c in curves) for s in steps], color=colour_of(method),
                  label=f"{name} ({len(curves)})", linewidth=1.2, marker="o" if len(steps) < 3 else "")
    axes.set(xlabel="step", ylabel="test error (%)", ylim=(0, None))
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    save(figure, path)


def mean_diagonal(matrix):
    """How often a class's own head knows its rotation best: 1/K for heads that are all alike, 1 for specialised ones."""
    own = [row[i] for i, row in enumerate(matrix) if i < len(row) and row[i] == row[i]]
    return statistics.mean(own) if own else float("nan")


def show_matrix(axes, matrix, title):
    """Row: the true class, column: the head that knows the rotation best, both counted from 0."""
    axes.set_title(title, fontsize=9)
    axes.locator_params(integer=True)
    return axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")


def draw_diversity(run, title, path, count=4):
    """The paper's figure: error of p(y|x) on unlabelled images above, the matrix at several epochs below."""
    matrices = run["matrices"]
    points = [(step / run["epoch"], error) for step, error in run["unlabeled"]]
    steps = sorted(matrices)
    chosen = sorted({steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)})
    figure = plt.figure(figsize=(8, 5), layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    above, below = figure.subfigures(2, 1, height_ratios=[1.2, 1])
    axes = above.subplots()
    axes.plot(*zip(*points), color="tab:red", marker="o" if len(points) < 3 else "")
    axes.set(xlabel="epoch", ylabel="error of p(y|x),\nunlabelled images (%)", ylim=(0, None))
    for step in chosen:
        axes.axvline(step / run["epoch"], color="grey", linewidth=0.8, linestyle=":")
    axes.grid(alpha=0.3)
    panels = below.subplots(1, len(chosen), squeeze=False)[0]
    for panel, step in zip(panels, chosen):
        shown = show_matrix(panel, matrices[step], f"epoch {step / run['epoch']:g}\ndiagonal {mean_diagonal(matrices[step]):.2f}")
    below.colorbar(shown, ax=list(panels))
    below.supylabel("class", fontsize=9)
    below.supxlabel("rotation head", fontsize=9)
    save(figure, path)


def draw_diversity_pair(crae, plus, title, path):
    """The paper's other figure: the last matrices of CRAE and CRAE+ side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(6, 3.4), layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    for a, run, name in zip(axes, (crae, plus), ("CRAE", "CRAE+")):
        last = max(run["matrices"])
        show_matrix(a, run["matrices"][last], f"{name}, epoch {last / run['epoch']:g}, diagonal {mean_diagonal(run['matrices'][last]):.2f}")
        a.set(xlabel="rotation head", ylabel="class")
    figure.colorbar(axes[0].images[0], ax=axes, shrink=0.8)
    save(figure, path)


def draw_rotation_dim(rows, title, path):
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    reduced = [r for r in rows if r["rot_dim"]]
    axes.errorbar([r["rot_dim"] for r in reduced], [100 - statistics.mean(r["errors"]) for r in reduced],
                  [statistics.stdev(r["errors"]) if len(r["errors"]) > 1 else 0 for r in reduced], marker="o", capsize=3, label="reduced")
    for r in rows:
        if r["rot_dim"] is None:
            axes.axhline(100 - statistics.mean(r["errors"]), color="grey", linestyle="--", label="no reduction")
    axes.set_xscale("log", base=2)
    axes.set_xticks([r["rot_dim"] for r in reduced], [str(r["rot_dim"]) for r in reduced])
    axes.set(xlabel="dimension in front of the rotation heads", ylabel="test accuracy (%)")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


# ---------------------------------------------------------------- the report


def report(runs: str, out: str = "report") -> str:
    """RUNS           the folder that holds the runs, for instance runs/

    --out          where report.md and the pictures go; without it report/
    --help         this text
    """
    folder, out = Path(runs), Path(out)
    if not folder.is_dir():
        sys.exit(f"RUNS {folder}: there is no such folder")
    if out.exists() and not out.is_dir():
        sys.exit(f"--out {out}: is a file")
    found, passed_over = read_runs(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lines, missing = write_sections(found, out)
        unfinished = [r for r in found if not r["finished"]]
        text = ["# Report", "", f"{len(found) - len(unfinished)} finished runs, {len(unfinished)} unfinished. Test errors in "
                "percent: the median of a run's last 20 evaluations, mean ± standard deviation over seeds (number of seeds). "
                "'paper': the number of the CRAE paper, in square brackets whom it quotes; MixMatch's runs kept one image for "
                "validation.", "", *lines]
        text += section("Unfinished, and not counted", [f"{r['path']}: step {r['step']} of {r['steps']}"
                                                        for r in unfinished])
        places = list(dict.fromkeys((dataset, k) for dataset, k, _ in missing))
        text += section("Not run, or not finished", [
            f"{dataset}, {k} labels: " + ", ".join(m for *place, m in missing if place == [dataset, k]) for dataset, k in places])
        text += section("Passed over", passed_over)
        (out / "report.md").write_text("\n".join(text) + "\n")
    except OSError as error:
        sys.exit(f"--out {out}: cannot be written ({error.strerror})")
    for line in passed_over:
        print(f"passed over: {line}", file=sys.stderr)
    print(f"{out / 'report.md'}: {len(found) - len(unfinished)} finished runs, {len(unfinished)} unfinished, "
          f"{len(missing)} cells of the tables without a finished run")
    return str(out / "report.md")


def section(title, items):
    return [f"## {title}", "", *(f"- {item}" for item in items), ""] if items else []


def write_sections(found, out):
    """The report's lines, dataset by dataset and setting by setting, with the pictures; and the paper's missing cells."""
    lines, missing, taken = [], [], set()
    datasets = list(dict.fromkeys([*(r["dataset"] for r in paper_numbers()), *(r["dataset"] for r in found)]))
    for dataset in datasets:
        of_dataset = [r for r in found if r["dataset"] == dataset]
        if dataset == "imagenet":
            rows, missing_here = imagenet_table([r for r in of_dataset if not setting_of(r)])
            lines, missing = [*lines, "## imagenet, accuracies", "", *rows, ""], missing + missing_here
        settings = list(dict.fromkeys(["", *map(setting_of, of_dataset)]))
        stem = file_name(dataset)
        while stem in taken:                                    # another dataset whose path ends in the same name
            stem += "_"
        taken.add(stem)
        for k, setting in enumerate(settings):
            runs = [r for r in of_dataset if setting_of(r) == setting]
            with_paper = setting == "" and any((r["dataset"], r["metric"]) == (dataset, "error") for r in paper_numbers())
            if runs or with_paper:
                lines += [f"## {dataset}" + (f", with {setting} (not the preset's, so no number of the paper)" if setting else ""), ""]
                others = sorted({r["method"] for r in runs} - {m for _, rows in TABLES.values() for m in rows})
                tables = TABLES | {"": ("Others", {m: m for m in others})}
                for name, (title, rows) in ({} if dataset == "imagenet" and not setting else tables).items():  # it has a table of its own
                    rows, absent = table(name, title, rows, dataset, runs, with_paper)
                    lines += [*rows, ""] if rows else []
                    missing += absent
                lines += write_figures(runs, dataset, stem + (f"_setting{k}" if k else ""), with_paper, out)
    return lines, list(dict.fromkeys(missing))


def write_figures(runs, dataset, stem, with_paper, out):
    """The pictures of one setting of a dataset, and the lines that show them."""
    lines = []

    def picture(name, text):
        lines.extend([f"![{text}]({name})", ""])
        return out / name

    if draw_error_against_labels(runs, dataset, with_paper, out / f"{stem}_labels.png"):
        picture(f"{stem}_labels.png", "error against labels")
    for labels in sorted({r["labels"] for r in runs}, key=number):
        some = [r for r in runs if r["labels"] == labels and r["own_dim"]]
        title = f"{dataset}, {labels} labels"
        if any(r["errors"] for r in some):
            draw_curves([r for r in some if r["errors"]], f"{title} (number of seeds)", picture(f"{stem}_{labels}_curves.png", f"error curves, {title}"))
        pair = {}
        for method in "crae", "crae_plus":
            run = next((r for r in some if r["method"] == method and r["finished"] and r["matrices"] and r["unlabeled"]), None)
            if run:
                pair[method] = run
                draw_diversity(run, f"{METHODS[method].split(' (')[0]}, {title}, seed {run['seed']}",
                               picture(f"{stem}_{labels}_diversity_{method}.png", f"diversity of the rotation heads, {title}"))
        if len(pair) == 2:
            draw_diversity_pair(*pair.values(), title, picture(f"{stem}_{labels}_diversity.png", f"CRAE against CRAE+, {title}"))
        rows = rotation_dim_rows(runs, labels)
        if rows:
            lines += [f"| Dimension, {title} | error | parameters of the network |", "|---|---|---|",
                      *(f"| {r['rot_dim'] or 'no reduction'} | {mean_std(r['errors'])} | {r['parameters']:,} |" for r in rows), ""]
            draw_rotation_dim(rows, title, picture(f"{stem}_{labels}_rotation_dim.png", f"accuracy against rotation dimension, {title}"))
    return lines


if __name__ == "__main__":
    training.command_line(report)
