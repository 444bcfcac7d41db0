"""Read the runs in a folder as flat dicts, for report.py and ablations.py.

Reads only config.json, log.csv and diversity.csv of each run.
"""
import csv
import json
import statistics

import run_folder


def read_runs(folder, definition):
    """All runs in a folder, and one line on each thing in it that was skipped.

    definition: the current one of CRAE (presets.DEFINITION); runs of another one are skipped.
    """
    runs, skipped, found = [], [], set()
    for path in sorted(folder.rglob("config.json")):
        found.add(path.parent)
        try:
            run = read_run(path.parent)
        except Exception as error:          # damaged or foreign files cause errors of many types
            why = f"{type(error).__name__}: {error}"
            skipped.append(f"{path.parent}: damaged, or not a run of this repository ({why})")
            continue
        if run["method"] == "rotation":     # the first stage of fine_tune
            continue
        if run["definition"] not in (None, definition):
            skipped.append(f"{path.parent}: used definition {run['definition']} of CRAE, not {definition} "
                           "(docs/deviations.md)")
            continue
        if run["matrices"] is None:
            skipped.append(f"{path.parent / 'diversity.csv'}: damaged")
            run["matrices"] = {}
        add_run(run, runs, skipped)
    return runs, skipped + [f"{path}: not a run" for path in strays(folder, found)]


def add_run(run, runs, skipped):
    """Append a run to `runs`. Of two runs of one experiment only one is kept, a finished one if possible."""
    same = "dataset", "labels", "method", "seed", "changed", "rot_dim"
    twin = next((r for r in runs if all(r[k] == run[k] for k in same)), None)
    if twin and (twin["finished"] or not run["finished"]):
        skipped.append(f"{run['path']}: the same experiment as {twin['path']}, which is counted")
        return
    if twin:
        runs.remove(twin)
        skipped.append(f"{twin['path']}: the same experiment as {run['path']}, which is counted")
    runs.append(run)


def strays(folder, found):
    """Files and folders that neither are runs nor contain any, nor belong to ablations.py."""
    above = {p for path in found for p in path.parents if folder in (p, *p.parents)} - found | {folder}
    inside = sorted(path for parent in above for path in parent.iterdir())
    return [p for p in inside if p not in found | above and p.name not in ("_ablations", ".lock")]


def read_run(path):
    """A run as a flat dict. Raises errors of many types if its files are not as they should be."""
    config = json.loads((path / "config.json").read_text())
    steps = int(config["steps"])
    rows = run_folder.read_rows(path / "log.csv", steps)
    errors, unlabeled = ([(int(r["step"]), float(r[name])) for r in rows if r[name]]
                         for name in ("test_error", "unlabeled_error"))
    rotation = [(int(r["step"]), float(r["rotation_accuracy"])) for r in rows if r.get("rotation_accuracy")]
    finished = bool(rows) and int(rows[-1]["step"]) == steps
    if finished and not errors and config["method"] != "rotation" or int(config["epoch"]) < 1:
        raise ValueError("no test error, or an epoch without steps")
    counted = [error for _, error in errors][-run_folder.rows_that_count(config):]
    top5 = rows[-1].get("test_top5_error") if rows else None
    seconds = rows[-1].get("seconds") if rows else None
    changed, resolved = dict(config["changed"]), config["resolved"]
    labeled = resolved.get("images", {}).get("labeled")
    matrices, classes = read_diversity(path / "diversity.csv")
    return dict(path=path, method=str(config["method"]), dataset=str(config["dataset"]),
                labels=label_count(config, labeled), labeled=labeled, seed=int(config["seed"]),
                rot_dim=config["rot_dim"] and int(config["rot_dim"]), own_dim="rot_dim" not in changed,
                changed={k: v for k, v in changed.items() if k != "rot_dim"},
                definition=config.get("definition", 1) if "select" in config else None,     # None: a baseline
                heads=int(resolved["rotation_heads"]), parameters=int(resolved["parameters"]),
                steps=steps, step=int(rows[-1]["step"]) if rows else 0, epoch=int(config["epoch"]),
                finished=finished, errors=errors, unlabeled=unlabeled, rotation=rotation,
                top5=float(top5) if top5 else None,
                error=statistics.median(counted) if counted else None,
                saved_error=errors[-1][1] if errors else None,
                interval=run_folder.interval_of(errors[-1][1], config) if errors else None,
                counted=run_folder.rows_that_count(config), seconds=float(seconds) if seconds else None,
                matrices=matrices, classes=classes)


def common_steps(curves):
    """The steps that all curves have. curves: dicts {step: value}.

    A run can be evaluated twice at its end: on a sample of the images, and a few steps later on all of them.
    Leaves out the former, which would draw their difference as a jump.
    """
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    if len(steps) > 2 and steps[-1] - steps[-2] < (steps[-2] - steps[-3]) / 2:
        del steps[-2]
    return steps


def label_count(config, labeled):
    """250, "10%", "40 listed" with --labels_file, or "all" if all training images are labelled."""
    value = config["labels"]
    if config.get("labels_file"):
        return f"{labeled} listed" if labeled else "listed"
    return str(value) if str(value).endswith("%") else int(value) if value else "all"


def read_diversity(path):
    """{step: matrix (C, K)}, nan for classes without images, and the class names. Leaves out rows cut off.

    The first is None if the file is damaged.
    """
    matrices, classes = {}, {}
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            for row in csv.DictReader(file):
                if None not in row.values():
                    cells = [float(v) if v else float("nan") for k, v in row.items() if k.startswith("head_")]
                    matrices.setdefault(int(row["step"]), []).append(cells)
                    classes.setdefault(int(row["step"]), []).append(row["class"])
    except FileNotFoundError:               # no rotation heads, or one for all classes
        return {}, []
    except Exception:                       # a foreign file causes errors of many types
        return None, []
    whole = {step: matrix for step, matrix in matrices.items() if len({len(row) for row in matrix}) == 1}
    return whole, classes[min(whole)] if whole else []
