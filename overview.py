"""The first part of the report: all finished runs in one table and one figure, and their evaluations."""
import re
import shutil
import statistics
from pathlib import Path

import plots

SHOWN = 30                                  # runs per dataset in the figure; we chose what fits on a screen


def write_overview(runs, folder, names, out):
    """Write the figure, and copy the evaluations of the runs. Returns the lines of this part of the report.

    runs: finished ones, as in results.read_runs; folder: where they are; names: those of the methods.
    """
    if not runs:
        return []
    runs = sorted(runs, key=lambda r: (r["dataset"], label_order(r["labels"]), r["saved_error"]))
    lines = ["## Your runs", "",
             "Errors of the saved models on their test sets, in percent. The 95 % interval (Wilson) covers "
             "the choice of the test images, but not that of the seed or of the labelled images.", "",
             table_line(["run", "dataset", "labels", "method", "error", "95 % interval", "time"]),
             "|---" * 7 + "|"]
    for r in runs:
        low_high = "{:.2f} to {:.2f}".format(*r["interval"]) if r["interval"] else ""
        cells = [run_name(r, folder), r["dataset"], labels_text(r), names.get(r["method"], r["method"]),
                 f"{r['saved_error']:.2f}", low_high, duration(r["seconds"])]
        lines.append(table_line([cell.replace("|", "\\|") for cell in cells]))
    total = duration(sum(r["seconds"] or 0 for r in runs))
    lines += ["", f"Training time of all {len(runs)} runs: {total}, without evaluations."]
    datasets = dict.fromkeys(r["dataset"] for r in runs)
    plots.plot_runs([panel(runs, dataset, folder, names) for dataset in datasets], out / "runs.png")
    return [*lines, "", "![errors of the runs with their 95 % intervals](runs.png)", "",
            *copy_evaluations(runs, folder, out)]


def panel(runs, dataset, folder, names):
    """One dataset, as plot_runs takes it: its runs with the lowest errors first."""
    chosen = sorted((r for r in runs if r["dataset"] == dataset), key=lambda r: r["saved_error"])
    some = f", the {SHOWN} lowest of {len(chosen)} errors" if len(chosen) > SHOWN else ""
    order = list(names)
    known = f"{Path(dataset).name.removesuffix('.npz')}_"       # default names start with it
    return dict(title=f"{dataset}{some}",
                runs=[dict(name=run_name(r, folder).removeprefix(known),
                           method=names.get(r["method"], r["method"]),
                           colour=order.index(r["method"]) if r["method"] in names else None,
                           error=r["saved_error"], interval=r["interval"]) for r in chosen[:SHOWN]])


def copy_evaluations(runs, folder, out):
    """Copy the images that `evaluate.py test` wrote. Returns the lines that show them."""
    lines = []
    for r in runs:
        name = run_name(r, folder)
        found = {"confusion.png": "confusion matrix", "wrong.png": "wrong predictions"}
        found = {file: text for file, text in found.items() if (r["path"] / "evaluation" / file).is_file()}
        lines += [f"### {name}", ""] if found else []
        for file, text in found.items():
            target = f"{file_name(name.replace('/', '-'))}_{file}"
            shutil.copyfile(r["path"] / "evaluation" / file, out / target)
            lines += [f"![{text} of {name}]({target})", ""]
    return lines


def run_name(run, folder):
    """The path of a run inside the folder of runs; the folder itself may be a run."""
    inside = run["path"].relative_to(folder)
    return str(inside) if inside.name else run["path"].resolve().name


def file_name(text):
    """The name of a dataset, or the end of its path, as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", Path(text).name)


def unused_name(name, taken):
    """The start of the names of some figures: at most 100 characters, and an underscore or more if taken."""
    name = name[:100]
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def label_order(labels):
    """Sort key of label counts: 40 listed, 250, 4000, 1%, all."""
    text = str(labels).split()[0].rstrip("%")
    return (0, float(text)) if text.replace(".", "").isdigit() else (1, 0.0)


def labels_text(run):
    """The labels as given, and their number if that is not the same."""
    given = str(run["labels"])
    return f"{given} ({run['labeled']:,})" if run["labeled"] and (given == "all" or "%" in given) else given


def duration(seconds):
    """'45 s', '12 min' or '3 h 05 min'; empty if unknown."""
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def mean_std(errors):
    """'12.34 ± 0.56 (3)', '12.34 (1)', or an empty text."""
    std = f" ± {statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
    return f"{statistics.mean(errors):.2f}{std} ({len(errors)})" if errors else ""


def table_line(cells):
    return "| " + " | ".join(cells) + " |"
