"""Every figure without images. Each function takes numbers, not runs, and writes one PNG file.

    plot_curve            errors of one run over its steps (curve.png in the run folder)
    plot_confusion        confusion matrix of a classifier (evaluate.py test)
    plot_runs             errors of single runs with their intervals (report.py, like all figures below)
    plot_labels           error against the number of labelled images
    plot_curves           error curves of several methods
    plot_diversity        unlabelled error over the epochs, and the diversity matrix at some of them
    plot_diversity_pair   the final diversity matrices of CRAE and CRAE+
    plot_rotation_dim     accuracy against the feature dimension before the rotation heads
    plot_mechanism        diagonal, error of p(y|x) and rotation accuracy over the run
    plot_compute          error against FLOPs, extended to a GPU-hour
    plot_claims           differences between methods with their intervals, and the paper's differences
    plot_scaling          time and memory of a step against batch, classes, ... (benchmark.py scaling)

Only this file and sheets.py import matplotlib, without pyplot: they need no display, and leave alone the
figures of a notebook.
"""
import statistics

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

# Dark colours first, because light ones are hard to see on white.
TAB20, TAB20B = colormaps["tab20"].colors, colormaps["tab20b"].colors
PALETTE = [*TAB20[::2], *TAB20B[::4], *TAB20B[1::4], *TAB20B[2::4], *TAB20[1::2], *TAB20B[3::4]]
MOST_MARKERS = 20       # on each line of plot_curve; we chose a number at which they do not touch
CLASSES_SHOWN = 10      # our choice: so many class names are still readable


def colour(k):
    """Colour number k; black for None and for numbers beyond the palette."""
    return PALETTE[k] if k is not None and k < len(PALETTE) else "black"


def save_figure(figure, path, dpi=100):
    figure.savefig(path, dpi=dpi)


def shorten(name, most=15):
    """A class name that fits next to an axis."""
    name = printable(name)
    return name if len(name) <= most else name[:most - 1] + "…"


def shorten_start(name, most=16):
    """A file name that fits below an image: its end, which tells files apart."""
    name = printable(name)
    return name if len(name) <= most else "…" + name[1 - most:]


def shorten_middle(name, most=36):
    """The name of a run that fits next to an axis: method and seed are at its start, other values follow."""
    name = printable(name)
    return name if len(name) <= most else name[:most - 11] + "…" + name[-10:]


def printable(name):
    """The name without what matplotlib cannot draw, such as line breaks and bytes in another encoding."""
    return "".join(c if c.isprintable() else "?" for c in name)


def mean_and_deviation(values):
    """Returns the mean and the standard deviation; the latter is 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0


# ---------------------------------------------------------------- one run


def plot_curve(rows, path, title):
    """Errors of one run over its steps; `rows` are the rows of log.csv."""
    columns = dict(rotation_accuracy="rotation, unlabelled", test_error_raw="test, raw weights",
                   unlabeled_error="unlabelled, p(y|x)", val_error="validation, averaged weights",
                   test_error="test, averaged weights")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for column, label in columns.items():
        points = [(int(r["step"]), float(r[column])) for r in rows if r[column]]
        if column == "rotation_accuracy":
            points = [(step, 100 - value) for step, value in points]            # as an error, like the others
        if points:
            markers = min(len(points), MOST_MARKERS)
            marked = np.linspace(0, len(points) - 1, markers).round().astype(int).tolist()
            axes.plot(*zip(*points), label=label, linewidth=2 if column == "test_error" else 1, marker="o",
                      markersize=4, markevery=marked)
    axes.set(xlabel="step", ylabel="error (%)", ylim=(0, None))
    axes.set_title(printable(title), parse_math=False)
    axes.legend()
    axes.grid(alpha=0.3)
    save_figure(figure, path, dpi=120)


def plot_confusion(matrix, classes, title, path):
    """Rows: true classes; columns: predicted classes. Up to 20 classes are shown with names and counts."""
    matrix, C = np.asarray(matrix), len(classes)                # (C, C)
    share = matrix / matrix.sum(1, keepdims=True).clip(min=1)
    size = max(5.5, 0.5 * C) if C <= 20 else 7
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(share, vmin=0, vmax=1, cmap="Blues")
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(printable(title), parse_math=False, fontsize=9)
    if C <= 20:
        names = [shorten(name) for name in classes]
        upright = max(map(len, names)) <= 2
        axes.xaxis.set_ticks(range(C), names, rotation=0 if upright else 90, parse_math=False)
        axes.yaxis.set_ticks(range(C), names, rotation=0, parse_math=False)
        for i, j in zip(*matrix.nonzero()):
            axes.text(j, i, int(matrix[i, j]), ha="center", va="center", fontsize=8,
                      color="white" if share[i, j] > 0.5 else "black")
    figure.colorbar(shown, label="share of the true class")
    save_figure(figure, path, dpi=120)


# ---------------------------------------------------------------- several runs

MARKERS = "osv^DPX*<>"                                           # so that methods differ not only in colour


def plot_runs(panels, path):
    """Errors of single runs with their 95 % intervals, one row per run, the lowest error on top.

    panels: dicts with `title` and `runs`: dicts with `name`, `method`, `colour` (a number), `error` and
    `interval`, a pair or None
    """
    sizes = [max(2.5, len(p["runs"])) for p in panels]                          # in rows
    figure = Figure(figsize=(7.5, 0.7 + sum(0.24 * n + 0.75 for n in sizes)), layout="constrained")
    methods = list(dict.fromkeys(r["method"] for p in panels for r in p["runs"]))
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=sizes)[:, 0]
    named = {}                                                  # method: what the legend shows
    for axes, p in zip(all_axes, panels):
        for y, r in enumerate(p["runs"]):
            low, high = r["interval"] or (r["error"], r["error"])
            style = dict(color=colour(r["colour"]), marker=MARKERS[methods.index(r["method"]) % len(MARKERS)])
            named[r["method"]] = axes.errorbar(r["error"], y, xerr=[[r["error"] - low], [high - r["error"]]],
                                               capsize=3, linestyle="", **style)
        names = [shorten_middle(r["name"]) for r in p["runs"]]
        axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
        axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, None))
        axes.set_title(shorten_start(p["title"], 70), fontsize=10, parse_math=False)
        axes.grid(alpha=0.3)
    all_axes[-1].set_xlabel("test error of the saved model (%), 95 % interval")
    figure.legend(named.values(), named.keys(), fontsize=8, loc="outside lower center", ncols=3)
    save_figure(figure, path, dpi=120)


def plot_labels(methods, title, with_paper, path):
    """Error against the number of labels: ours with error bars, the paper's dashed in the same colour.

    methods: dicts with `name`, `colour` (a number), `ours` [(labels, errors)], `paper` [(labels, error)]
    """
    counts = sorted({n for m in methods for n, _ in [*m["ours"], *m["paper"]]})
    figure, axes = wide_figure(len(methods))
    for k, m in enumerate(methods):
        aside = 1 + 0.15 * ((k + 0.5) / len(methods) - 0.5)     # so that error bars do not hide each other
        if m["ours"]:
            means, deviations = zip(*(mean_and_deviation(errors) for _, errors in m["ours"]))
            axes.errorbar([n * aside for n, _ in m["ours"]], means, deviations, label=m["name"], capsize=3,
                          color=colour(m["colour"]), marker=MARKERS[k % len(MARKERS)])
        if m["paper"]:
            label, marker = (None, "") if m["ours"] else (f"{m['name']} (paper)", ".")
            axes.plot(*zip(*m["paper"]), color=colour(m["colour"]), linestyle="--", alpha=0.7, marker=marker,
                      label=label)
    if with_paper:
        axes.plot([], [], linestyle="--", color="grey", label="the paper's")
    if len(counts) > 1:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0.5 * counts[0], 1.5 * counts[0])
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set_xlabel("labelled images")
    finish_errors(figure, axes, title, path)


def plot_curves(methods, title, path):
    """Test error over the steps. methods: dicts of `name`, `colour` (a number), `points` [(step, error)]."""
    figure, axes = wide_figure(len(methods))
    for k, m in enumerate(methods):
        steps, errors = zip(*m["points"]) if m["points"] else ((), ())
        axes.plot(steps, errors, color=colour(m["colour"]), label=m["name"], linewidth=1.2,
                  marker=MARKERS[k % len(MARKERS)], markersize=5, markevery=max(1, len(steps) // 8))
    ends = [m["points"][-1][0] for m in methods if m["points"]] or [1]
    axes.set(xlabel="step", xscale="log" if max(ends) > 4 * min(ends) else "linear")    # 4: our choice
    low, high = axes.get_ylim()
    finish_errors(figure, axes, title, path, bottom=low if low > 0.4 * high else 0)     # 0.4: our choice


def wide_figure(names):
    """A figure with room for the legend on its right; returns it and its axes."""
    figure = Figure(figsize=(7.5, max(4.5, 0.6 + 0.19 * names)), layout="constrained")
    return figure, figure.subplots()


def finish_errors(figure, axes, title, path, bottom=0):
    axes.set(ylabel="test error (%)", ylim=(bottom, 1.05 * axes.get_ylim()[1]))     # room for the markers
    axes.set_title(printable(title), parse_math=False)
    axes.grid(alpha=0.3)
    if not axes.get_legend():
        figure.legend(fontsize=8, loc="outside right upper")
    save_figure(figure, path)


def plot_diversity(errors, panels, title, path):
    """The paper's figure: error of p(y|x) on unlabelled images, and below it the matrix at some epochs.

    errors: [(epoch, error)]; panels: dicts with `epoch`, `matrix` (C, K), `diagonal` (its mean) and `classes`
    """
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    figure.suptitle(printable(title), fontsize=10, parse_math=False)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1])
    curve = above.subplots()
    curve.plot(*zip(*errors), color="tab:red", marker="o" if len(errors) < 3 else "")
    curve.set(xlabel="epoch", ylabel="error of p(y|x),\nunlabelled images (%)", ylim=(0, None))
    for panel in panels:
        curve.axvline(panel["epoch"], color="grey", linewidth=0.8, linestyle=":")
    curve.grid(alpha=0.3)
    all_axes = below.subplots(1, max(4, len(panels)), squeeze=False)[0]         # one panel: on the left
    for axes in all_axes[len(panels):]:
        axes.set_axis_off()
    for axes, panel in zip(all_axes, panels):
        caption = f"epoch {panel['epoch']:.4g}\ndiagonal {panel['diagonal']:.2f}"
        classes = panel["classes"] if axes is all_axes[0] else ()
        shown = show_diversity(axes, panel["matrix"], caption, classes)
        axes.set_xlabel("rotation head", fontsize=9)
        axes.tick_params(labelleft=axes is all_axes[0])         # the rows of all panels are the same
    below.colorbar(shown, ax=list(all_axes))
    all_axes[0].set_ylabel("class", fontsize=9)
    save_figure(figure, path)


def plot_diversity_pair(panels, title, path):
    """The paper's figure: two matrices side by side; panels as in plot_diversity, each with a `name`."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    both = figure.subplots(1, 2)
    figure.suptitle(printable(title), fontsize=10, parse_math=False)
    for axes, panel in zip(both, panels):
        caption = f"{panel['name']}, epoch {panel['epoch']:.4g}, diagonal {panel['diagonal']:.2f}"
        show_diversity(axes, panel["matrix"], caption, panel["classes"])
        axes.set(xlabel="rotation head", ylabel="class")
    figure.colorbar(both[0].images[0], ax=both, shrink=0.8)
    save_figure(figure, path)


def plot_mechanism(methods, title, path):
    """Three panels over the run. methods: dicts with `name`, `colour` and `panels`: [(fraction, value)]."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    figure.suptitle(printable(title), fontsize=10, parse_math=False)
    titles = "diagonal of the diversity matrix", "error of p(y|x), unlabelled images", "rotation accuracy"
    for k, axes in enumerate(figure.subplots(1, 3)):
        for m, marker in zip(methods, MARKERS):
            style = dict(color=colour(m["colour"]), marker=marker, markersize=4, label=m["name"])
            axes.plot(*zip(*m["panels"][k]), **style)
        axes.set(xlabel="fraction of the run", ylabel="%")
        axes.set_title(titles[k], fontsize=9)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    save_figure(figure, path, dpi=120)


def power_law(points, gpu_hour):
    """The power law through the last two budgets, continued to gpu_hour: budgets and errors.

    Both are empty unless the error falls. Only seeds that both budgets have count. Two budgets alone are no
    evidence of a power law, so it takes three.
    """
    (x, first), (x2, last) = points[-2:]
    seeds = first.keys() & last.keys()
    y, y2 = (statistics.mean(errors[seed] for seed in seeds) if seeds else 0 for errors in (first, last))
    if len(points) < 3 or not 0 < y2 < y or x2 >= gpu_hour:
        return [], []
    ahead = np.geomspace(x2, gpu_hour)
    return ahead, y2 * (ahead / x2) ** (np.log(y2 / y) / np.log(x2 / x))


def plot_compute(methods, gpu_hour, title, path):
    """Error against PFLOP; dashed: a guess for gpu_hour, which is in PFLOP.

    methods: dicts with `name`, `colour` (a number), `points` [(PFLOP, {seed: error})]
    """
    figure, axes = wide_figure(len(methods))
    for k, m in enumerate(methods):
        budgets, errors = zip(*m["points"])
        means, deviations = zip(*(mean_and_deviation([*by_seed.values()]) for by_seed in errors))
        label, (ahead, guess) = m["name"], power_law(m["points"], gpu_hour)
        if len(ahead):
            axes.plot(ahead, guess, color=colour(m["colour"]), linestyle="--", alpha=0.6)
            label += f" ({guess[-1]:.1f} %)"
        style = dict(color=colour(m["colour"]), marker=MARKERS[k % len(MARKERS)])
        axes.errorbar(budgets, means, deviations, label=label, capsize=3, **style)
        single = [(x, mean) for x, mean, by_seed in zip(budgets, means, errors) if len(by_seed) == 1]
        if single:                              # one seed has no error bar, which could look like a small one
            axes.plot(*zip(*single), linestyle="", markerfacecolor="white", zorder=3, **style)
    axes.axvline(gpu_hour, color="grey", linestyle=":")
    axes.set(xscale="log", xlabel="training PFLOP; open marker: one seed; "
                                  "dashed: guess for one hour of an A100 (in brackets)")
    axes.legend(fontsize=8)                     # inside: the errors at the smallest budgets leave room
    finish_errors(figure, axes, title, path)


def plot_claims(rows, title, path):
    """One line per claim and number of labels: the difference, its 95 % interval, and the paper's difference.

    rows: dicts with `name`, `labels`, `mean`, `low`, `high`, `paper` (or None), `margin` and `verdict` (for
    this number of labels). A difference on the left of the margin supports the claim.
    """
    shades = {"holds": "#2a7f3f", "does not hold": "#b8332a", "cannot be told": "#777777"}
    of_paper = dict(color="black", marker="D", markerfacecolor="none", markersize=5, linestyle="")
    figure = Figure(figsize=(8.5, 0.24 * len(rows) + 1.4), layout="constrained")
    axes, ticks = figure.subplots(), []
    for y, row in enumerate(rows):
        style = dict(color=shades[row["verdict"]], linewidth=2, solid_capstyle="butt")
        axes.plot([row["low"], row["high"]], [y, y], **style)
        axes.plot(row["mean"], y, marker="o", markersize=5, **style)
        axes.plot([row["margin"]] * 2, [y - 0.5, y + 0.5], color="black", linewidth=0.8)
        if row["paper"] is not None:
            axes.plot(row["paper"], y, **of_paper)
        first = not y or row["name"] != rows[y - 1]["name"]
        if first:
            axes.axhline(y - 0.5, color="#dddddd", linewidth=0.8, zorder=0)
        ticks.append(f"{printable(row['name']) if first else ''}   {row['labels']} labels")
    axes.set_yticks(range(len(rows)), ticks, fontsize=8, parse_math=False)
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel("difference between test errors in points; left of the line: as claimed\n"
                    "*: not in the paper", fontsize=9)
    axes.grid(alpha=0.3, axis="x")
    for verdict, shade in shades.items():
        axes.plot([], [], color=shade, marker="o", linewidth=2, markersize=5, label=verdict)
    if any(row["paper"] is not None for row in rows):
        axes.plot([], [], label="in the paper", **of_paper)
    figure.suptitle(printable(title), fontsize=10, parse_math=False)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    save_figure(figure, path, dpi=120)


def show_diversity(axes, matrix, title, classes=()):
    """Row: true class, by name if there are few; column: the head that gives the true rotation the highest
    probability, from 0.
    """
    axes.set_title(title, fontsize=9)
    axes.locator_params(integer=True)
    if 0 < len(classes) <= CLASSES_SHOWN:
        axes.set_yticks(range(len(classes)), [shorten(str(name), 11) for name in classes], fontsize=7,
                        parse_math=False)
    return axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")


def plot_rotation_dim(rows, title, path):
    """Accuracy against rot_dim; rows: dicts with `rot_dim` (None: no reduction), `errors` (one per seed)."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    reduced = [r for r in rows if r["rot_dim"]]
    dims = [r["rot_dim"] for r in reduced]
    means, deviations = zip(*(mean_and_deviation(r["errors"]) for r in reduced))
    axes.errorbar(dims, [100 - mean for mean in means], deviations, marker="o", capsize=3, label="reduced")
    for r in rows:
        if r["rot_dim"] is None:
            accuracy = 100 - statistics.mean(r["errors"])
            axes.axhline(accuracy, color="grey", linestyle="--", label="no reduction")
    axes.set_xscale("log", base=2)
    axes.set_xticks(dims, [str(d) for d in dims])
    axes.set(xlabel="dimension in front of the rotation heads", ylabel="test accuracy (%)")
    axes.set_title(printable(title), parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot_scaling(rows, path):
    """Time and memory relative to the first point of each axis; rows have axis, value, seconds and mib."""
    names = list(dict.fromkeys(row["axis"] for row in rows))
    figure = Figure(figsize=(3.2 * len(names), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        points = [row for row in rows if row["axis"] == name]
        values = [row["value"] for row in points]
        for column, text in ("seconds", "time"), ("mib", "memory"):
            heights = [float(row[column]) for row in points]
            axes.plot(values, [h / heights[0] for h in heights], marker="o", label=text)
        axes.plot(values, [v / values[0] for v in values], color="grey", linestyle=":", label="proportional")
        axes.loglog(base=2)
        axes.set_xticks(values, [f"{v:g}" for v in values])
        axes.set(xlabel=name)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("relative to the first point")
    figure.axes[0].legend()
    save_figure(figure, path)
