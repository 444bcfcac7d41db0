"""Your runs in one table, then the paper's tables and figures with our numbers next to the paper's.

    python report.py runs/          writes report/report.html, report/report.md and its figures

report.html contains everything, also the figures: one file to send. Reads only config.json, log.csv and
diversity.csv of each run in the folder, and the images of `evaluate.py test`. The paper's tables are shown
for the datasets that were run. In them, the error of a run is the median of its last 20 evaluations; on
ImageNet, where the learning rate decays, it is the last one. A table cell is the mean ± standard deviation
over the seeds of all finished runs, with the number of seeds in brackets.
"""
import cli

FLAGS = {
    "runs": (str, cli.WORD, "folder that contains the runs, for example runs/"),
    "out": (str, "report", "folder for report.html, report.md and the figures"),
    "update": (str, None, "a page whose marked tables become those of the report: docs/reproduction.md"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)   # before torch is imported: a mistyped flag is reported at once

import statistics
import sys
from itertools import chain
from pathlib import Path

import claims
import overview
import pages
import plots
import presets
import results
from overview import file_name, label_order, mean_std, table_line, unused_name

# The paper's tables: title, and rows as method: name.
TABLES = {
    "slfsl": ("Self-supervised methods", dict(
        labeled_only="Labelled-only", fine_tune="Fine-tune", s4l="S4L",
        s4l_upright="S4L, class loss on upright copies (not in the paper)",
        s4l_weight2="S4L, weight 2 (not in the paper)",
        s4l_weight1="S4L, weight 1 instead of the fast recipe's 2 (not in the paper)", crae="CRAE")),
    "sota": ("Semi-supervised methods", dict(
        labeled_only="Labelled-only", pi_model="Π-Model", pseudo_label="Pseudo-Label", mixup="Mixup",
        vat="VAT", mean_teacher="Mean Teacher", mixmatch="MixMatch", ict="ICT", swa="SWA",
        fixmatch="FixMatch (not in the paper)", crae="CRAE", crae_plus="CRAE+",
        crae_mixmatch="CRAE with MixMatch (not in the paper)")),
    "components": ("Components", dict(
        crae="CRAE", crae_ext1="CRAE + ext. 1", crae_plus="CRAE + ext. 1 and 2 (CRAE+)",
        no_rotation="CRAE without rotation branches", no_rotation_ext1="the same + ext. 1",
        crae_ext2="CRAE + ext. 2 (not in the paper)",
        crae_entmin="CRAE + entropy minimisation (not in the paper)",
        crae_ext2_entmin="CRAE + entropy minimisation and ext. 2 (not in the paper)",
        crae_detach_rotated="CRAE, rotated labelled copies do not train the features (not in the paper)")),
    "ensemble": ("Ensembles", dict(
        crae="CRAE", random="random select", independent="independent", detach="detached p(y|x)",
        crae_plus="CRAE+", s4l="S4L", s4l_one_rotation="S4L, one rotation per image (not in the paper)")),
    "aux_classifier": ("Additional classifier", dict(
        crae="CRAE", crae_aux_all="CRAE, all copies train it (not in the paper)",
        crae_no_aux="CRAE without it", crae_plus="CRAE+",
        crae_plus_aux_all="CRAE+, all copies train it (not in the paper)",
        crae_plus_no_aux="CRAE+ without it")),
    "heads": ("Number of independent rotation classifiers", dict(
        independent_2="2", independent_10="10", independent_20="20")),
}
# Rows that the paper compares with a table and prints in the first one.
BORROWED = dict(sota="crae", ensemble="s4l")

# Names of the methods in figures and lists.
METHODS = {method: name.removesuffix(" (not in the paper)")
           for _, rows in TABLES.values() for method, name in rows.items()}
METHODS |= dict(no_rotation_ext1="ext. 1 without rotation branches",
                crae_aux_all="CRAE, additional classifier on all copies",
                crae_plus_aux_all="CRAE+, additional classifier on all copies",
                crae_no_aux="CRAE, no additional classifier",
                crae_plus_no_aux="CRAE+, no additional classifier")
METHODS |= {f"independent_{k}": f"independent, {k} heads" for k in (2, 10, 20)}
# The place of a method is its colour. These came later, so the others keep theirs.
METHODS |= {method: METHODS.pop(method) for method in ("s4l_weight1", "crae_mixmatch")}

CELLS = "A cell is the mean ± standard deviation over seeds (number of seeds)."
PAPER = """\
'paper': the number in the CRAE paper, with the source in square brackets if the paper quotes it. MixMatch's
runs kept one image for validation and took 2^20 steps on every dataset, and its Pseudo-Label has a product of
two means as its loss. ICT's numbers are from a CNN with 13 layers and its own code, SWA's from Mean Teacher
with fast-SWA for 780 epochs."""

# ---------------------------------------------------------------- runs


def setting_of(run):
    """The flags that differ from the preset, as text; empty for the preset itself."""
    return ", ".join(f"{k} {v}" for k, v in sorted(run["changed"].items()))


def without(changed, name):
    return {k: v for k, v in changed.items() if k != name}


def runs_by_steps(runs):
    """Runs with --pflop as runs with --steps, which they equal bit by bit, where such a setting was run.

    So a table of runs of equal length has all of its methods, and none is trained twice.
    """
    same = "changed", "method", "labels", "seed", "rot_dim"
    trained = [[r[k] for k in same] for r in runs if r["finished"]]
    with_steps, found = [r["changed"] for r in runs if "steps" in r["changed"]], []
    for r in runs:
        if r["finished"] and "pflop" in r["changed"]:
            r = r | dict(changed=without(r["changed"], "pflop") | dict(steps=r["steps"]))
            experiment = [r[k] for k in same]
            if r["changed"] in with_steps and experiment not in trained:
                found.append(r)
                trained.append(experiment)
    return found


def equal_steps(runs, of_dataset):
    """For runs with --pflop: the runs with --steps that have the length of one of them, and their setting.

    If there are several such lengths, the smallest: it is that of the method with the most FLOPs per step.
    """
    setting, lengths = runs[0]["changed"] if runs else {}, {r["steps"] for r in runs}
    if "pflop" not in setting:
        return []
    found = [r for r in of_dataset if r["changed"].get("steps") in lengths
             and without(r["changed"], "steps") == without(setting, "pflop")]
    return [r for r in found if r["steps"] == min(other["steps"] for other in found)]


# ---------------------------------------------------------------- tables


def belongs_to(run, method):
    """Whether a run counts in the row of a method. With ten heads, `independent` is `independent_10` too."""
    by_heads = run["method"] == "independent" and method == f"independent_{run['heads']}"
    return (run["method"] == method or by_heads) and run["own_dim"]


def errors_of(runs, method, labels):
    """The errors of all finished runs of a method, in the order of their seeds."""
    chosen = [r for r in runs if belongs_to(r, method) and str(r["labels"]) == str(labels) and r["finished"]]
    return [r["error"] for r in sorted(chosen, key=lambda r: r["seed"])]


def paper_cells(table, dataset):
    """{(labels, method): the paper's error, with the source in square brackets if the paper quotes it}."""
    numbers = [r for r in presets.paper_numbers()
               if r["dataset"] == dataset and r["metric"] in ("error", "top1_accuracy")]
    columns = {r["labels"] for r in numbers if r["table"] == table}
    cells = {}
    for r in numbers:
        borrowed = r["table"] == "slfsl" and r["method"] == BORROWED.get(table) and r["labels"] in columns
        if r["table"] == table or borrowed:
            error = float(r["value"]) if r["metric"] == "error" else 100 - float(r["value"])
            source = r["source"].replace("quoted from ", " [") + "]" if "quoted" in r["source"] else ""
            cells[r["labels"], r["method"]] = f"{error:.2f}{source}"
    return cells


def error_table(table, title, rows, dataset, runs, with_paper):
    """The lines of a table, none if it is empty, and its missing cells (dataset, labels, method).

    A table has the rows of the paper and those with finished runs.
    """
    paper = paper_cells(table, dataset) if with_paper else {}
    # A run that one of the first two tables shows is no reason for another table.
    before = dict(slfsl=[], own=[], sota=["slfsl"]).get(table, ["slfsl", "sota"])
    own = [method for method in rows if not any(method in TABLES[other][1] for other in before)]
    has_runs = any(belongs_to(r, method) for r in runs for method in own)
    ours = {str(r["labels"]) for r in runs if has_runs and any(belongs_to(r, method) for method in rows)}
    columns = sorted({k for k, _ in paper} | ours, key=label_order)
    cells = {(method, k): mean_std(errors_of(runs, method, k)) for method in rows for k in columns}
    rows = {m: n for m, n in rows.items() if any(cells[m, k] or (k, m) in paper for k in columns)}
    if not columns or not rows:
        return [], []
    head = [f"{title}, {dataset}".replace("|", "/")]
    for k in columns:
        head += [f"{k} labels", "paper"] if paper else [f"{k} labels"]
    lines = [table_line(head), "|---" * len(head) + "|"]
    for method, name in rows.items():
        line = [name.replace("|", "\\|")]
        for k in columns:
            line += [cells[method, k], paper.get((k, method), "")] if paper else [cells[method, k]]
        lines.append(table_line(line))
    missing = [(dataset, k, METHODS.get(method, method)) for method in rows for k in columns
               if not cells[method, k] and (k, method) in paper]
    return lines, missing


def imagenet_table(runs):
    """ILSVRC-2012: top-1 and top-5 accuracy of runs with the preset's values, and the missing cells."""
    columns = [(k, metric) for k in ("1%", "10%") for metric in ("top1_accuracy", "top5_accuracy")]
    names = [f"{k} labels, {metric.replace('_accuracy', '').replace('top', 'top-')}" for k, metric in columns]
    head = ["Self-supervised methods, ILSVRC-2012, accuracy", *chain(*((name, "paper") for name in names))]
    lines, missing = [table_line(head), "|---" * len(head) + "|"], []
    numbers = {(r["table"], r["method"], r["labels"], r["metric"]): f"{float(r['value']):.2f}"
               for r in presets.paper_numbers() if r["dataset"] == "imagenet"}
    for method, name in TABLES["slfsl"][1].items():
        paper = [numbers.get(("slfsl", method, *column), "") for column in columns]
        done = [r for r in runs if belongs_to(r, method) and r["finished"] and r["top5"] is not None]
        ours = [mean_std([100 - r[dict(top1_accuracy="error", top5_accuracy="top5")[metric]] for r in done
                          if r["labels"] == k]) for k, metric in columns]
        if any(paper) or done:
            lines.append(table_line([name, *chain(*zip(ours, paper))]))
            missing += [("imagenet", k, name) for (k, metric), cell, number in zip(columns, ours, paper)
                        if metric == "top1_accuracy" and number and not cell]
    # S4L reports these with another preprocessing, so they are not comparable with the rows above.
    for method, name in TABLES["slfsl"][1].items():
        quoted = [numbers.get(("slfsl_reported", method, *column)) for column in columns]
        if any(quoted):
            cells = chain(*(("", f"{number} [s4l]" if number else "") for number in quoted))
            lines.append(table_line([f"{name}, as S4L reports it", *cells]))
    return lines, missing


def rotation_dim_rows(runs, labels):
    """Errors of CRAE per dimension in front of the rotation heads, for the seeds that all dimensions have."""
    chosen = [r for r in runs if r["method"] == "crae" and str(r["labels"]) == str(labels) and r["finished"]]
    dims = sorted({r["rot_dim"] for r in chosen} - {None}, reverse=True)
    if not dims:
        return []
    seeds = set.intersection(*({r["seed"] for r in chosen if r["rot_dim"] == d} for d in dims))
    chosen = [r for r in chosen if r["seed"] in seeds] or chosen        # seeds differ more than dimensions do
    by_dim = {d: [r for r in chosen if r["rot_dim"] == d] for d in (None, *dims)}
    return [dict(rot_dim=d, errors=[r["error"] for r in group], parameters=group[0]["parameters"])
            for d, group in by_dim.items() if group]


# ---------------------------------------------------------------- the numbers of figures


def in_table_order(methods):
    """(method, name, number of its colour) in the order of the tables; methods of no table come last."""
    known = [(method, name, k) for k, (method, name) in enumerate(METHODS.items()) if method in methods]
    return known + [(method, method, None) for method in sorted(methods - set(METHODS))]


def labels_figure(runs, dataset, with_paper):
    """plot_labels: errors against the number of labels.

    Empty if there is nothing to compare that runs.png does not show: other labels, seeds or the paper.
    """
    runs = [r for r in runs if r["finished"] and isinstance(r["labels"], int) and r["own_dim"]]
    paper = {}                              # the paper's own result comes before one that it quotes
    for row in presets.paper_numbers() if with_paper else ():
        if (row["dataset"], row["metric"]) == (dataset, "error") and row["table"] in ("slfsl", "sota"):
            paper.setdefault(row["method"], {}).setdefault(int(row["labels"]), float(row["value"]))
    methods = []
    for method, name, colour in in_table_order({*paper, *(r["method"] for r in runs)}):
        counts = sorted({r["labels"] for r in runs if r["method"] == method})
        ours = [(n, errors_of(runs, method, n)) for n in counts]
        methods.append(dict(name=name, colour=colour, ours=ours, paper=sorted(paper.get(method, {}).items())))
    seeds = max((len(errors) for m in methods for _, errors in m["ours"]), default=0)
    return methods if with_paper and runs or seeds > 1 or len({r["labels"] for r in runs}) > 1 else []


def curves_figure(runs):
    """plot_curves: the mean error over the seeds of each method, of finished runs if there are any."""
    methods = []
    for method, name, colour in in_table_order({r["method"] for r in runs}):
        of_method = [r for r in runs if r["method"] == method]
        curves = [dict(r["errors"]) for r in [r for r in of_method if r["finished"]] or of_method]
        steps = results.common_steps(curves)
        points = [(step, statistics.mean(curve[step] for curve in curves)) for step in steps]
        methods.append(dict(name=f"{name} ({len(curves)})", colour=colour, points=points))
    return methods


def diversity_panel(run, step):
    """One matrix, as plot_diversity and plot_diversity_pair take it."""
    matrix = run["matrices"][step]
    return dict(epoch=step / run["epoch"], matrix=matrix, diagonal=claims.mean_diagonal(matrix),
                name=METHODS[run["method"]], classes=run["classes"])


def diversity_steps(run, count=4):
    """The paper's epochs: 10, 20 and the last. A run without them: `count` evaluations, first to last."""
    steps = sorted(run["matrices"])
    of_paper = [10 * run["epoch"], 20 * run["epoch"], steps[-1]]
    if set(of_paper) <= set(steps) and of_paper == sorted(set(of_paper)):
        return of_paper
    return sorted({steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)})


def diversity_figures(runs, title, folder, start):
    """Plot the diversity of one run of CRAE and one of CRAE+, and their last matrices side by side.

    Shows the first run of each. Returns {file: methods}.
    """
    complete = [r for r in runs if r["finished"] and r["matrices"] and r["unlabeled"]]
    pair = {r["method"]: r for r in complete[::-1] if r["method"] in ("crae", "crae_plus")}
    for method, run in pair.items():
        errors = [(step / run["epoch"], error) for step, error in run["unlabeled"]]
        caption, path = f"{METHODS[method]}, {title}, seed {run['seed']}", folder / f"{start}_{method}.png"
        panels = [diversity_panel(run, step) for step in diversity_steps(run)]
        plots.plot_diversity(errors, panels, caption, path)
    if len(pair) == 2:
        last = [diversity_panel(pair[m], max(pair[m]["matrices"])) for m in ("crae", "crae_plus")]
        plots.plot_diversity_pair(last, title, folder / f"{start}.png")
    names = {f"{start}_{method}.png": METHODS[method] for method in sorted(pair)}
    return names | ({f"{start}.png": "CRAE and CRAE+"} if len(pair) == 2 else {})


# ---------------------------------------------------------------- the report


@cli.strict(FLAGS)
def write_report(runs, out, update):
    """Write report.md, its figures and report.html. Returns the path of report.md."""
    folder, out = Path(runs), Path(out)
    if not folder.is_dir():
        raise cli.Refused(f"RUNS {folder}: no such folder")
    if out.exists() and not out.is_dir():
        raise cli.Refused(f"--out {out}: is a file; give a folder")
    if update and not Path(update).is_file():
        raise cli.Refused(f"--update {update}: no such file")
    found, skipped = results.read_runs(folder, presets.DEFINITION)
    unfinished = [r for r in found if not r["finished"]]
    finished = [r for r in found if r["finished"]]
    counts = f"{len(finished)} finished run{'s' * (len(finished) != 1)}, {len(unfinished)} unfinished"
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = ["# Report", "", f"{counts}.", "", *overview.write_overview(finished, folder, METHODS, out)]
        lines, missing = write_sections(found, out)
        text += explanation(found) + lines
        text += bullet_list("Unfinished, not counted", [f"{r['path']}: step {r['step']} of {r['steps']}"
                                                        for r in unfinished])
        text += bullet_list("Not run, or not finished", missing_lines(missing))
        text += bullet_list("Skipped", skipped)
        (out / "report.md").write_text("\n".join(text) + "\n", encoding="utf-8", errors="replace")
        pages.write_page(text, out, f"Report: {counts}", out / "report.html")
    except OSError as error:
        raise cli.Refused(f"--out {out}: cannot be written ({error.strerror})")
    if update:
        pages.update_tables(Path(update), text)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    print(f"{out / 'report.html'} and {out / 'report.md'}: {counts}, "
          f"{len(missing)} table cells without a finished run")
    return str(out / "report.md")


def explanation(found):
    """What the tables by dataset show."""
    if not found:
        return []
    in_paper = {r["dataset"] for r in found} & {r["dataset"] for r in presets.paper_numbers()}
    return ["## Means over seeds", "", CELLS + (f" {PAPER}" if in_paper else ""), ""]


def bullet_list(title, items):
    return [f"## {title}", "", *(f"- {item}" for item in items), ""] if items else []


def missing_lines(missing):
    """One line per dataset and number of labels, with the methods that are missing."""
    places = {}
    for dataset, labels, method in missing:
        places.setdefault((dataset, labels), []).append(method)
    return [f"{dataset}, {k} labels: {', '.join(methods)}" for (dataset, k), methods in places.items()]


def write_sections(found, out):
    """One section per dataset and setting, with figures. Returns the lines and the cells that are missing."""
    lines, missing, taken = [], [], set()
    in_order = dict.fromkeys(r["dataset"] for r in [*presets.paper_numbers(), *found])
    for dataset in [d for d in in_order if any(r["dataset"] == d for r in found)]:
        runs = [r for r in found if r["dataset"] == dataset]
        if dataset == "imagenet":
            rows, absent = imagenet_table([r for r in runs if not setting_of(r)])
            lines += ["## imagenet, accuracies", "", f"Accuracies in percent: {what_counts(runs)}.", ""]
            lines, missing = [*lines, *rows, ""], missing + absent
        stem = unused_name(file_name(dataset), taken)
        runs += runs_by_steps(runs)
        for setting in dict.fromkeys(["", *map(setting_of, runs)]):
            of_setting = [r for r in runs if setting_of(r) == setting]
            start = unused_name(f"{stem}_{file_name(setting)}", taken) if setting else stem
            same_steps = equal_steps(of_setting, runs)
            rows, absent = write_setting(of_setting, same_steps, dataset, setting, start, out)
            lines, missing = lines + rows, missing + absent
        lines += claims.write_compute(runs, dataset, stem, METHODS, taken, out)
    return lines, list(dict.fromkeys(missing))


def what_counts(runs):
    """Which evaluations are reported."""
    texts = ["a run's last evaluation" if n == 1 else f"the median of a run's last {n} evaluations"
             for n in sorted({r["counted"] for r in runs})]
    return " or ".join(texts)


def write_setting(runs, same_steps, dataset, setting, stem, out):
    """The tables and figures of one dataset and setting, and the paper's missing cells."""
    in_paper = any((r["dataset"], r["metric"]) == (dataset, "error") for r in presets.paper_numbers())
    with_paper = in_paper and not setting
    if not runs and not with_paper:
        return [], []
    why = " (differs from the preset, so the tables of errors are without the paper's)" if in_paper else ""
    counts = f"Test errors in percent: {what_counts(runs)}." if runs else "No run has the preset's values."
    lines, missing = [f"## {dataset}{f', with {setting}{why}' if setting else ''}", "", counts, ""], []
    for table, (title, rows) in tables_of(runs, dataset, setting).items():
        rows, absent = error_table(table, title, rows, dataset, runs, with_paper)
        lines += [*rows, ""] if rows else []
        missing += absent
    lines += write_figures(runs, dataset, stem, with_paper, out)
    return lines + claims.write_claims(runs, same_steps, dataset, setting, stem, METHODS, out), missing


def tables_of(runs, dataset, setting):
    """The tables of a dataset, like TABLES: those of the paper, or one with all methods for your own data."""
    if dataset == "imagenet" and not setting:
        return {}                           # it has a table of its own
    names = {method: name for method, name, _ in in_table_order({r["method"] for r in runs})}
    if dataset not in presets.NAMED:
        return {"own": ("Method", names)}
    return TABLES | {"": ("Others", {m: name for m, name in names.items() if m not in METHODS})}


def write_figures(runs, dataset, stem, with_paper, out):
    """Plot the figures of one dataset and setting. Returns the lines that show them."""
    lines = []

    def add(name, text):
        lines.extend([f"![{text}]({name})", ""])
        return out / name

    methods = labels_figure(runs, dataset, with_paper)
    if methods:
        plots.plot_labels(methods, dataset, with_paper, add(f"{stem}_labels.png", "error against labels"))
    for labels in sorted({r["labels"] for r in runs}, key=label_order):
        some = [r for r in runs if r["labels"] == labels and r["own_dim"]]
        title, start = f"{dataset}, {labels} labels", f"{stem}_{labels}".replace(" ", "-")
        with_errors = [r for r in some if r["errors"]]
        if any(len(r["errors"]) > 1 for r in with_errors):      # one evaluation is no curve
            path = add(f"{start}_curves.png", f"error curves, {title}")
            plots.plot_curves(curves_figure(with_errors), f"{title} (number of seeds)", path)
        for name, methods in diversity_figures(some, title, out, f"{start}_diversity").items():
            add(name, f"diversity of the rotation heads, {methods}, {title}")
        rows = rotation_dim_rows(runs, labels)
        if rows:
            lines += [f"| Dimension, {title} | error | parameters of the network |", "|---|---|---|"]
            lines += [table_line([str(r["rot_dim"] or "no reduction"), mean_std(r["errors"]),
                                  f"{r['parameters']:,}"]) for r in rows] + [""]
            path = add(f"{start}_rotation_dim.png", f"accuracy against rotation dimension, {title}")
            plots.plot_rotation_dim(rows, title, path)
    return lines


if __name__ == "__main__":
    cli.run(write_report, ARGUMENTS)
