"""The paper's claims, and what the runs say about them: paired differences over seeds, one verdict per claim.

The rule was fixed before the runs. A claim states that a difference between methods is negative: the error
of one minus the error of the other for the same seed, that is for the same labelled images. The 95 % interval
of its mean comes from Student's t distribution over the seeds. The claim

    holds               if the whole interval is below the margin, which is 0 for most claims
    does not hold       if the whole interval is above 0
    cannot be told      otherwise, and with fewer than three seeds

With several numbers of labels, a claim holds if it holds for all of them, and it does not hold if it fails
for one of them.
"""
import math
import statistics

import estimates
import plots
import presets
from overview import file_name, label_order, table_line

LEAST_SEEDS = 3                         # our choice: two seeds give an interval 13 times their deviation
CHANCE = "chance"                       # in place of a method: a matrix of heads that are all alike
# "Costs nothing" and "on a par" are no differences below zero. We allow one point of error.
PAR = 1.0

# The paper's claims: text, {method: its factor in the difference}, and what else differs from the usual case.
# measure: error, or off_diagonal, the share of images whose best rotation head is not that of their class.
# crae/16 is CRAE with --rot_dim 16.
CLAIMS = [
    ("CRAE is better than S4L", dict(crae=1, s4l=-1), {}),
    ("CRAE is better than S4L with its class loss on upright copies", dict(crae=1, s4l_upright=-1), {}),
    ("S4L is better than labelled-only", dict(s4l=1, labeled_only=-1), {}),
    ("S4L with its class loss on upright copies is better than labelled-only",
     dict(s4l_upright=1, labeled_only=-1), {}),
    ("S4L is better than fine-tune", dict(s4l=1, fine_tune=-1), {}),
    ("S4L with its class loss on upright copies is better than fine-tune",
     dict(s4l_upright=1, fine_tune=-1), {}),
    ("CRAE+ is better than CRAE", dict(crae_plus=1, crae=-1), {}),
    ("CRAE is better than the ensemble \"random select\"", dict(crae=1, random=-1), {}),
    ("CRAE is better than the ensemble \"independent\"", dict(crae=1, independent=-1), {}),
    ("CRAE is better than the ensemble with a detached p(y|x)", dict(crae=1, detach=-1), {}),
    ("The additional classifier helps CRAE", dict(crae=1, crae_no_aux=-1), {}),
    ("The additional classifier helps CRAE+", dict(crae_plus=1, crae_plus_no_aux=-1), {}),
    ("The additional classifier helps CRAE more than CRAE+",
     dict(crae=1, crae_no_aux=-1, crae_plus=-1, crae_plus_no_aux=1), {}),
    ("Extension 1 is better than entropy minimisation", dict(crae_ext1=1, crae_entmin=-1), {}),
    ("16 dimensions before the rotation heads cost nothing", {"crae/16": 1, "crae": -1}, dict(margin=PAR)),
    ("The diversity matrix of CRAE becomes diagonal", {"crae": 1, CHANCE: -1}, dict(measure="off_diagonal")),
    ("It becomes more so for CRAE+", dict(crae_plus=1, crae=-1), dict(measure="off_diagonal")),
    ("CRAE+ is on a par with MixMatch", dict(crae_plus=1, mixmatch=-1), dict(margin=PAR)),
]


def mean_diagonal(matrix):
    """How often the head of the true class is the best: 1/K if all heads are alike, 1 if they specialise."""
    own = [row[i] for i, row in enumerate(matrix) if i < len(row) and row[i] == row[i]]
    return statistics.mean(own) if own else math.nan


# ---------------------------------------------------------------- the rule


def values_of(runs, method, measure):
    """{seed: value} of the finished runs of a method, in percent."""
    name, _, dim = method.partition("/")
    values = {}
    for r in runs:
        same_dim = r["rot_dim"] == int(dim) if dim else r["own_dim"]
        if not (r["finished"] and r["method"] == name and same_dim):
            continue
        if measure == "error":
            values[r["seed"]] = r["error"]
        elif r["matrices"]:
            values[r["seed"]] = 100 * (1 - mean_diagonal(r["matrices"][max(r["matrices"])]))
    return values


def paired_differences(runs, factors, measure="error"):
    """{seed: sum of factor * value over the methods}, for the seeds that all of the methods have."""
    values = {method: values_of(runs, method, measure) for method in factors if method != CHANCE}
    if CHANCE in factors:
        heads = next((r["heads"] for r in runs if r["matrices"]), math.nan)
        seeds = set().union(*values.values())
        values[CHANCE] = dict.fromkeys(seeds, 100 * (1 - 1 / heads))
    seeds = set.intersection(*(set(of_method) for of_method in values.values()))
    return {seed: sum(factor * values[method][seed] for method, factor in factors.items())
            for seed in sorted(seeds)}


def paired_interval(differences):
    """The mean and the two ends of its 95 % interval. Needs two differences or more."""
    from scipy.stats import t  # takes a second to import

    mean, n = statistics.mean(differences), len(differences)
    half = t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def judge(low, high, seeds, margin=0.0):
    """The verdict for one number of labels."""
    if seeds < LEAST_SEEDS:
        return "cannot be told"
    return "holds" if high < margin else "does not hold" if low > 0 else "cannot be told"


def judge_all(verdicts):
    """The verdict on a claim from those for each number of labels."""
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if set(verdicts) == {"holds"} else "cannot be told"


# ---------------------------------------------------------------- the table


def paper_difference(dataset, labels, factors):
    """The difference between the paper's errors, None if one of them is missing."""
    errors = {}
    for row in presets.paper_numbers():
        if (row["dataset"], row["labels"], row["metric"]) == (dataset, str(labels), "error"):
            errors.setdefault(row["method"], float(row["value"]))
    errors |= {f"{name}_upright": value for name, value in errors.items() if name == "s4l"}
    if not set(factors) <= set(errors):
        return None
    return sum(factor * errors[method] for method, factor in factors.items())


def claim_rows(runs):
    """One dict per claim and number of labels that has paired runs. runs: of one dataset and setting."""
    rows = []
    for claim, factors, more in CLAIMS:
        of_claim = []
        for labels in sorted({r["labels"] for r in runs}, key=label_order):
            some = [r for r in runs if r["labels"] == labels]
            found = list(paired_differences(some, factors, more.get("measure", "error")).values())
            if not found:
                continue
            mean, low, high = paired_interval(found) if len(found) > 1 else (found[0], math.nan, math.nan)
            paper = None if more.get("measure") else paper_difference(some[0]["dataset"], labels, factors)
            of_claim.append(dict(claim=claim, labels=labels, paper=paper, mean=mean, low=low, high=high,
                                 seeds=len(found), says=judge(low, high, len(found), more.get("margin", 0))))
        verdict = judge_all([row["says"] for row in of_claim])
        rows += [row | dict(verdict=verdict) for row in of_claim]
    return rows


def claim_table(rows):
    """The lines of a table with one line per claim and number of labels."""
    head = ["claim", "labels", "difference in the paper", "here", "95 % interval", "seeds", "verdict"]
    lines, before = [table_line(head), "|---" * len(head) + "|"], None
    for row in rows:
        paper = "–" if row["paper"] is None else f"{row['paper']:+.2f}"
        interval = "–" if math.isnan(row["low"]) else f"{row['low']:+.2f} to {row['high']:+.2f}"
        first = row["claim"] != before
        lines.append(table_line([row["claim"].replace("|", "\\|") if first else "", str(row["labels"]), paper,
                                 f"{row['mean']:+.2f}", interval, str(row["seeds"]),
                                 f"**{row['verdict']}**" if first else ""]))
        before = row["claim"]
    return lines


# ---------------------------------------------------------------- figures


def mechanism_lines(runs, names):
    """plot_mechanism: diagonal, error of p(y|x) and rotation accuracy over the run, mean over seeds.

    A point is a fraction of the run, because methods with the same FLOPs take different numbers of steps.
    """
    methods = []
    for method in "crae", "crae_plus", "detach":
        of_method = [r for r in runs if r["method"] == method and r["own_dim"] and r["finished"]]
        panels = []
        for column in "matrices", "unlabeled", "rotation":
            points = {}
            for r in of_method:
                for step, value in dict(r[column]).items():
                    value = 100 * mean_diagonal(value) if column == "matrices" else value
                    points.setdefault(round(step / r["steps"], 2), []).append(value)
            panels.append([(x, statistics.mean(v)) for x, v in sorted(points.items())
                           if len(v) == len(of_method)])
        if all(panels):
            methods.append(dict(name=f"{names[method]} ({len(of_method)})", panels=panels))
    return methods


def compute_points(runs, names):
    """plot_compute: [(PFLOP, errors)] per method that has several budgets."""
    methods = []
    for colour, (method, name) in enumerate(names.items()):
        points = {}
        for r in runs:
            if r["method"] == method:
                points.setdefault(float(r["changed"]["pflop"]), []).append(r["error"])
        if len(points) > 1:
            methods.append(dict(name=name, colour=colour, points=sorted(points.items())))
    return methods


def compute_table(methods, title, mean_std):
    """The lines of a table: one row per method, one column per budget."""
    budgets = sorted({x for m in methods for x, _ in m["points"]})
    head = [title, *(f"{x:g} PFLOP" for x in budgets)]
    rows = [[m["name"], *(mean_std(dict(m["points"]).get(x, [])) for x in budgets)] for m in methods]
    return [table_line(head), "|---" * len(head) + "|", *map(table_line, rows)]


def write_claims(runs, dataset, setting, stem, names, out):
    """The verdicts and the mechanism of one dataset and setting as lines of the report; writes the figure."""
    rows = claim_rows(runs)
    lines = []
    if any(row["seeds"] >= LEAST_SEEDS for row in rows):
        lines += [f"### The paper's claims, {dataset}{f', {setting}' if setting else ''}", "",
                  "A difference is negative if the claim is right for these runs. The verdict follows from "
                  "the 95 % interval of the mean paired difference (claims.py). In percentage points.", "",
                  *claim_table(rows), ""]
    for labels in sorted({r["labels"] for r in runs}, key=label_order):
        methods = mechanism_lines([r for r in runs if r["labels"] == labels], names)
        if len(methods) > 1:
            name = f"{stem}_{labels}_mechanism.png".replace(" ", "-")
            plots.plot_mechanism(methods, f"{dataset}, {labels} labels (number of seeds)", out / name)
            lines += [f"![the mechanism of CRAE, {dataset}, {labels} labels]({name})", ""]
    return lines


def write_compute(runs, dataset, stem, names, mean_std, out):
    """Error against compute: a table and a figure for runs that differ in --pflop, method and seed only."""
    groups, lines = {}, []
    for r in runs:
        if r["finished"] and r["own_dim"] and "pflop" in r["changed"]:
            others = ", ".join(f"{k} {v}" for k, v in sorted(r["changed"].items()) if k != "pflop")
            groups.setdefault((r["labels"], others), []).append(r)
    for labels, others in sorted(groups, key=lambda group: (label_order(group[0]), group[1])):
        methods = compute_points(groups[labels, others], names)
        if methods:
            title = ", ".join(filter(None, [f"{dataset}, {labels} labels", others]))
            name = "_".join(filter(None, [stem, file_name(str(labels)), file_name(others), "compute.png"]))
            plots.plot_compute(methods, estimates.GPU_HOUR / 1e15, title, out / name)
            lines += [f"### Error against compute, {title}", "", *compute_table(methods, "method", mean_std),
                      "", f"![error against compute, {title}]({name})", ""]
    return lines
