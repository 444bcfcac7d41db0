"""The paper's claims, and what the runs say about them: paired differences over seeds, one verdict per claim.

The rule was fixed before the runs of docs/reproduction.md, and refined while the first of them ran. A claim
states that a difference between methods is negative: the error of one minus the error of the other for the
same seed, that is for the same labelled images. The 95 % interval of its mean comes from Student's t
distribution over the seeds. The claim

    holds               if the whole interval is below the margin, which is 0 for most claims
    does not hold       if the whole interval is above the margin
    cannot be told      otherwise, and with fewer than three seeds

With several numbers of labels, a claim holds if it holds for all of them that have three seeds, and it does
not hold if it fails for one of them. Nothing corrects for the number of claims: of 20 intervals, one is
expected to miss.
"""
import math
import re
import statistics

import estimates
import plots
import presets
import results
from overview import file_name, label_order, mean_std, table_line, unused_name

LEAST_SEEDS = 3                         # our choice: with two seeds, the interval is +- 9 standard deviations
CHANCE = "chance"                       # in place of a method: a matrix of heads that are all alike
PAR = 1.0                               # our choice of what "costs nothing" and "on a par" allow, in points

# The paper's claims: text, {method: its factor in the difference}, and options of the difference.
# measure: error, the test error (the default); p_y, the error of p(y|x) on unlabelled images; or
# off_diagonal, the share of images whose best rotation head is not that of their class.
# crae/16 is CRAE with --rot_dim 16. `ours` marks a comparison that the paper does not make. These, "CRAE is
# better than fine-tune" and "Extension 1 helps" were added after the rule was fixed.
UPRIGHT = "S4L upright (not in the paper)"     # its class loss is on upright copies only
WITH_MIXMATCH = "CRAE with MixMatch (our addition)"
CLAIMS = [
    ("CRAE is better than S4L", dict(crae=1, s4l=-1), {}),
    (f"CRAE is better than {UPRIGHT}", dict(crae=1, s4l_upright=-1), {}),
    ("S4L is better than labelled-only", dict(s4l=1, labeled_only=-1), {}),
    (f"{UPRIGHT} is better than labelled-only", dict(s4l_upright=1, labeled_only=-1), {}),
    ("CRAE is better than fine-tune", dict(crae=1, fine_tune=-1), {}),
    ("S4L is better than fine-tune", dict(s4l=1, fine_tune=-1), {}),
    (f"{UPRIGHT} is better than fine-tune", dict(s4l_upright=1, fine_tune=-1), {}),
    ("CRAE+ is better than CRAE", dict(crae_plus=1, crae=-1), {}),
    ("Extension 1 helps CRAE", dict(crae_ext1=1, crae=-1), {}),
    ("CRAE is better than the ensemble \"random select\"", dict(crae=1, random=-1), {}),
    ("CRAE is better than the ensemble \"independent\"", dict(crae=1, independent=-1), {}),
    ("CRAE is better than the ensemble with a detached p(y|x)", dict(crae=1, detach=-1), {}),
    ("The additional classifier helps CRAE", dict(crae=1, crae_no_aux=-1), {}),
    ("The additional classifier helps CRAE+", dict(crae_plus=1, crae_plus_no_aux=-1), {}),
    ("The additional classifier helps CRAE more than CRAE+",
     dict(crae=1, crae_no_aux=-1, crae_plus=-1, crae_plus_no_aux=1), {}),
    ("Extension 1 is better than entropy minimisation", dict(crae_ext1=1, crae_entmin=-1), {}),
    ("16 dimensions before the rotation heads cost nothing", {"crae/16": 1, "crae": -1}, dict(margin=PAR)),
    ("The rotation heads of CRAE specialise: the diagonal of the diversity matrix is above chance",
     {"crae": 1, CHANCE: -1}, dict(measure="off_diagonal")),
    ("The rotation heads of CRAE+ specialise more than those of CRAE", dict(crae_plus=1, crae=-1),
     dict(measure="off_diagonal")),
    ("The heads of CRAE specialise more than with a detached p(y|x) (not in the paper)",
     dict(crae=1, detach=-1), dict(measure="off_diagonal", ours=True)),
    ("p(y|x) of CRAE is better than a detached p(y|x) (not in the paper)", dict(crae=1, detach=-1),
     dict(measure="p_y", ours=True)),
    ("Extension 1 makes p(y|x) better (not in the paper)", dict(crae_ext1=1, crae=-1),
     dict(measure="p_y", ours=True)),
    ("CRAE+ is on a par with MixMatch", dict(crae_plus=1, mixmatch=-1), dict(margin=PAR)),
    ("CRAE is better than MixMatch (not claimed in the paper)", dict(crae=1, mixmatch=-1), dict(ours=True)),
    (f"{WITH_MIXMATCH} is better than CRAE", dict(crae_mixmatch=1, crae=-1), dict(ours=True)),
    (f"{WITH_MIXMATCH} is better than MixMatch", dict(crae_mixmatch=1, mixmatch=-1), dict(ours=True)),
]


def mean_diagonal(matrix):
    """How often the head of the true class is the best: 1/K if all heads are alike, 1 if they specialise."""
    own = [row[i] for i, row in enumerate(matrix) if i < len(row) and row[i] == row[i]]
    return statistics.mean(own) if own else math.nan


# ---------------------------------------------------------------- the rule


def runs_of(runs, method):
    """The finished runs of a method. A run with another --rot_dim is another method."""
    name, _, dim = method.partition("/")
    same = [r for r in runs if r["finished"] and r["method"] == name]
    if dim:
        return [r for r in same if r["rot_dim"] == int(dim) and not r["own_dim"]]
    return [r for r in same if r["own_dim"]]


def values_of(runs, method, measure):
    """{seed: value} of the finished runs of a method, in percent. Leaves out what is not known."""
    found = runs_of(runs, method)
    if measure == "error":
        return {r["seed"]: r["error"] for r in found}
    if measure == "p_y":
        return {r["seed"]: r["unlabeled"][-1][1] for r in found if r["unlabeled"]}
    values = {r["seed"]: 100 * (1 - mean_diagonal(r["matrices"][max(r["matrices"])]))
              for r in found if r["matrices"]}
    return {seed: value for seed, value in values.items() if not math.isnan(value)}


def paired_differences(runs, factors, measure="error"):
    """{seed: sum of factor * value over the methods}, for the seeds that all of the methods have."""
    methods = [method for method in factors if method != CHANCE]
    values = {method: values_of(runs, method, measure) for method in methods}
    if CHANCE in factors:
        heads = {r["seed"]: r["heads"] for r in runs_of(runs, methods[0])}
        values[CHANCE] = {seed: 100 * (1 - 1 / heads[seed]) for seed in values[methods[0]]}
    seeds = set.intersection(*map(set, values.values()))
    return {seed: sum(factor * values[method][seed] for method, factor in factors.items())
            for seed in sorted(seeds)}


def paired_interval(differences):
    """The mean and the two ends of its 95 % interval, which are NaN for a single difference."""
    from scipy.stats import t  # takes a second to import

    mean, n = statistics.mean(differences), len(differences)
    if n == 1:
        return mean, math.nan, math.nan
    half = t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def judge(low, high, seeds, margin=0.0):
    """The verdict for one number of labels.

    If all differences are equal, as can happen with few test images, there is no interval.
    """
    if seeds < LEAST_SEEDS or high - low < 1e-9:
        return "cannot be told"
    return "holds" if high < margin else "does not hold" if low > margin else "cannot be told"


def judge_all(rows):
    """The verdict on a claim from its rows, one per number of labels. Only rows with enough seeds count."""
    verdicts = {row["verdict_here"] for row in rows if row["seeds"] >= LEAST_SEEDS}
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if verdicts == {"holds"} else "cannot be told"


# ---------------------------------------------------------------- the table


def paper_difference(dataset, labels, factors):
    """The difference between the paper's errors, None if one of them is missing."""
    errors = {}
    for row in presets.paper_numbers():
        value = dict(error=float(row["value"]), top1_accuracy=100 - float(row["value"])).get(row["metric"])
        if (row["dataset"], row["labels"]) == (dataset, str(labels)) and value is not None:
            errors.setdefault(row["method"], value)             # the paper's own result before a quoted one
    if not set(factors) <= set(errors):
        return None
    return sum(factor * errors[method] for method, factor in factors.items())


def claim_rows(runs, same_steps=()):
    """One dict per claim and number of labels that has paired runs. runs: of one dataset and setting.

    same_steps: runs of equal length, if those in `runs` have equal compute. They add the key `same_steps`,
    the differences that they show, but do not change a verdict.
    """
    rows = []
    for claim, factors, options in CLAIMS:
        measure, margin = options.get("measure", "error"), options.get("margin", 0.0)
        found = []
        for labels in sorted({r["labels"] for r in runs}, key=label_order):
            some, others = ([r for r in group if r["labels"] == labels] for group in (runs, same_steps))
            differences = list(paired_differences(some, factors, measure).values())
            if not differences:
                continue
            mean, low, high = paired_interval(differences)
            in_paper = measure == "error" and not options.get("ours")
            paper = paper_difference(some[0]["dataset"], labels, factors) if in_paper else None
            found.append(dict(claim=claim, labels=labels, paper=paper, mean=mean, low=low, high=high,
                              seeds=len(differences), measure=measure, margin=margin,
                              same_steps=list(paired_differences(others, factors, measure).values()),
                              verdict_here=judge(low, high, len(differences), margin)))
        rows += [row | dict(verdict=judge_all(found)) for row in found]
    return rows


def claim_table(rows, steps=None):
    """The lines of a table: one per claim and number of labels. steps: of the runs of `same_steps`."""
    second = any(row["same_steps"] for row in rows)
    head = ["claim", "verdict", "labels", "difference in the paper", "here", "95 % interval", "seeds",
            "verdict of this row", *([f"all with {steps:,} steps (seeds)"] if second else [])]
    lines, before = [table_line(head), "|---" * len(head) + "|"], None
    for row in rows:
        paper = "–" if row["paper"] is None else f"{row['paper']:+.2f}"
        first = row["claim"] != before
        claim, verdict = (row["claim"].replace("|", "\\|"), row["verdict"]) if first else ("", "")
        cells = [claim, verdict, str(row["labels"]), paper, f"{row['mean']:+.2f}",
                 interval_text(row["low"], row["high"]), str(row["seeds"]), row["verdict_here"]]
        if second and row["same_steps"]:
            mean, low, high = paired_interval(row["same_steps"])
            cells += [f"{mean:+.2f}, {interval_text(low, high)} ({len(row['same_steps'])})"]
        elif second:
            cells += [""]
        lines.append(table_line(cells))
        before = row["claim"]
    return lines


def interval_text(low, high):
    return "–" if math.isnan(low) else f"{low:+.2f} to {high:+.2f}"


# ---------------------------------------------------------------- figures


def claim_lines(rows):
    """plot_claims: the differences between test errors that have enough seeds.

    A star in a short name of a claim stands for its note: (not in the paper), (our addition), ...
    """
    notes = r" \([^)]* (paper|addition)\)"
    return [row | dict(name=re.sub(notes, "*", row["claim"]), verdict=row["verdict_here"])
            for row in rows if row["measure"] == "error" and row["seeds"] >= LEAST_SEEDS]


def mechanism_lines(runs, names):
    """plot_mechanism: diagonal, error of p(y|x) and rotation accuracy over the run, mean over seeds.

    x is a fraction of the run, because methods with the same FLOPs take different numbers of steps.
    """
    methods = []
    for method in "crae", "crae_plus", "detach":
        found = runs_of(runs, method)
        panels = []
        for column in "matrices", "unlabeled", "rotation":
            curves = [dict(r[column]) for r in found]
            points = []
            for step in results.common_steps(curves):
                values = [curve[step] for curve in curves]
                values = [100 * mean_diagonal(v) for v in values] if column == "matrices" else values
                points.append((step / found[0]["steps"], statistics.mean(values)))
            panels.append(points)
        if all(panels):
            methods.append(dict(name=f"{names[method]} ({len(found)})", colour=list(names).index(method),
                                panels=panels))
    return methods


def compute_points(runs, names):
    """plot_compute: [(PFLOP, {seed: error})] per method that has several budgets."""
    methods, order = [], list(names)
    others = sorted({r["method"] for r in runs} - set(names))
    for method in order + others:
        points = {}
        for r in runs_of(runs, method):
            points.setdefault(float(r["changed"]["pflop"]), {})[r["seed"]] = r["error"]
        if len(points) > 1:
            methods.append(dict(name=names.get(method, method), points=sorted(points.items()),
                                colour=order.index(method) if method in names else None))
    return methods


def compute_table(methods):
    """The lines of a table: one row per method, one column per budget."""
    budgets = sorted({x for m in methods for x, _ in m["points"]})
    head = ["method", *(f"{x:g} PFLOP" for x in budgets)]
    rows = [[m["name"], *(mean_std([*dict(m["points"]).get(x, {}).values()]) for x in budgets)]
            for m in methods]
    return [table_line(head), "|---" * len(head) + "|", *map(table_line, rows)]


def length_table(runs, names):
    """The lines of a table: the steps of a run and its minutes of training, per method and budget.

    Minutes are the median over the seeds, because other programs slow some runs down.
    """
    budgets, rows = sorted({float(r["changed"]["pflop"]) for r in runs}), []
    for method in [m for m in names if runs_of(runs, m)]:
        found, cells = runs_of(runs, method), []
        for budget in budgets:
            some = [r for r in found if float(r["changed"]["pflop"]) == budget]
            minutes = statistics.median(r["seconds"] or math.nan for r in some) / 60 if some else 0
            cells.append(f"{some[0]['steps']:,} steps, {minutes:.1f} min" if some else "")
        # The first stage of fine_tune is a run of its own.
        stage = " (second of two stages)" if method == "fine_tune" else ""
        rows.append([names[method] + stage, *cells])
    head = ["method", *(f"{x:g} PFLOP" for x in budgets)]
    return [table_line(head), "|---" * len(head) + "|", *map(table_line, rows)]


def write_claims(runs, same_steps, dataset, setting, stem, names, out):
    """The verdicts and the mechanism of one dataset and setting as lines of the report; writes the figure."""
    rows = claim_rows(runs, same_steps)
    lines = []
    if any(row["seeds"] >= LEAST_SEEDS for row in rows):
        title = ", ".join(filter(None, [f"The paper's claims, {dataset}", setting]))
        lines += [f"### {title}", "",
                  "A negative difference supports the claim. Differences and intervals are in percentage "
                  "points. The verdict on a claim follows from the 95 % intervals of the mean paired "
                  "differences in all of its rows by the rule in claims.py.", "",
                  *claim_table(rows, same_steps[0]["steps"] if same_steps else None), ""]
        shown = claim_lines(rows)
        if shown:
            plots.plot_claims(shown, title, out / f"{stem}_claims.png")
            lines += [f"![{title}]({stem}_claims.png)", ""]
    for labels in sorted({r["labels"] for r in runs}, key=label_order):
        methods = mechanism_lines([r for r in runs if r["labels"] == labels], names)
        if len(methods) > 1:
            name = f"{stem}_{labels}_mechanism.png".replace(" ", "-")
            plots.plot_mechanism(methods, f"{dataset}, {labels} labels (number of seeds)", out / name)
            lines += [f"![the mechanism of CRAE, {dataset}, {labels} labels]({name})", ""]
    return lines


def write_compute(runs, dataset, stem, names, taken, out):
    """Error against compute: a table and a figure for runs that differ in --pflop, method and seed only."""
    groups, lines = {}, []
    for r in runs:
        if "pflop" in r["changed"]:
            others = ", ".join(f"{k} {v}" for k, v in sorted(r["changed"].items()) if k != "pflop")
            groups.setdefault((r["labels"], others), []).append(r)
    for labels, others in sorted(groups, key=lambda key: (label_order(key[0]), key[1])):
        methods = compute_points(groups[labels, others], names)
        if methods:
            title = ", ".join(filter(None, [f"{dataset}, {labels} labels", others]))
            start = "_".join(filter(None, [stem, file_name(f"{labels} labels"), file_name(others)]))
            name = f"{unused_name(start, taken)}_compute.png"
            plots.plot_compute(methods, estimates.GPU_HOUR / 1e15, title, out / name)
            lines += [f"## Error against compute, {title}", "", *compute_table(methods), "",
                      f"![error against compute, {title}]({name})", "",
                      f"### Length of the runs, {title}", "",
                      "Minutes of training: median over the seeds, without evaluations.", "",
                      *length_table(groups[labels, others], names), ""]
    return lines
