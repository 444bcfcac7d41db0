"""Figures with images. Each function takes arrays and texts, not runs, and writes one PNG file.

    plot_demo             two methods side by side (demo.py)
    plot_contact_sheet    images of each class, augmented, rotated and mixed, and their numbers (data.png)
    plot_sheet            images with captions: predictions, wrong predictions (evaluate.py test and predict)
    plot_method           CRAE on one image, from left to right (evaluate.py explain)
"""
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Annotation

import plots

BLUE, TRUE, GREY = "#3b75af", "#e8820c", "#777777"      # our choice: orange marks the true class and rotation


def plot_demo(curves, examples, title, path):
    """Left: error curves {name: [(step, error)]}. Right: images that the first reads wrong, the second right.

    examples: dicts with image, wrong and right.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1])
    axes = left.subplots()
    for (name, points), shade in zip(curves.items(), (GREY, BLUE)):
        label = f"{name}: {points[-1][1]:.1f} %"
        axes.plot(*zip(*points), marker="o", markersize=4, color=shade, label=label)
    axes.set(xlabel="step", ylabel="test error (%)", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    first, second = curves
    right.suptitle(f"grey: {first} (wrong); blue: {second} (right)", fontsize=10)
    cells = [*right.subplots(3, 4).flat] if examples else []
    for cell in cells:
        cell.axis("off")
    for cell, example in zip(cells, examples):
        cell.imshow(example["image"], interpolation="nearest")
        for x, key, shade in (0.3, "wrong", GREY), (0.7, "right", BLUE):
            cell.text(x, -0.2, example[key], color=shade, transform=cell.transAxes, ha="center",
                      weight="bold")
    figure.suptitle(title)
    plots.save_figure(figure, path, dpi=120)


# Our choices, in pixels: a small image on the contact sheet, gaps and margins, a line of text, the bars.
CELL, GAP, CLASS_GAP, ROW_GAP, LEFT, RIGHT, LINE, BARS = 88, 3, 7, 12, 118, 76, 21, 220


def plot_contact_sheet(cells, groups, shown, classes, counts, title, path):
    """Images of some classes, one group of columns per class, and the number of images per class and part.

    cells       (R, K, n, S, S, 3) uint8: row, class, image of the class
    groups      captions of the R rows, as a list of lists; a gap separates two groups
    shown       (K,) numbers of the classes; -1: images of unknown class
    classes     names of all C classes
    counts      {part: number of images of each class, and of unknown class (C + 1,)}
    """
    _, K, n, S = cells.shape[:4]
    zoom = max(1, round(CELL / S))                              # whole pixels stay sharp
    size, many = zoom * S, len(classes) > K and -1 not in shown
    left = LEFT + np.arange(K) * (n * (size + GAP) + CLASS_GAP)                 # of each class
    top = [3 * LINE + r * (size + GAP) + g * ROW_GAP for r, g in enumerate(
        g for g, captions in enumerate(groups) for _ in captions)]              # of each row
    below = top[-1] + size + ROW_GAP
    width, height = left[-1] + n * (size + GAP) + RIGHT, below + LINE * (len(counts) + 2) + many * BARS
    sheet = np.full((height, width, 3), 255, np.uint8)
    for r, k, i in np.ndindex(cells.shape[:3]):
        x = left[k] + i * (size + GAP)
        sheet[top[r]:top[r] + size, x:x + size] = cells[r, k, i].repeat(zoom, 0).repeat(zoom, 1)
    figure = Figure(figsize=(width / 100, height / 100))
    axes = figure.add_axes([0, 0, 1, 1])
    axes.imshow(sheet, interpolation="nearest")
    axes.set_axis_off()
    write = partial(axes.text, va="center", fontsize=9, parse_math=False)
    write(8, LINE, title, fontsize=11)
    for y, caption in zip(top, sum(groups, [])):
        write(LEFT - 8, y + size / 2, caption, ha="right")
    centres = left + (n * (size + GAP) - GAP) / 2
    for x, k in zip(centres, shown):                            # a bold letter of 9 points is 7.5 pixels wide
        name = classes[k] if k >= 0 else "without labels"
        write(x, 2.4 * LINE, plots.shorten(name, int(n * size / 7.5)), ha="center", weight="bold")
    write_counts(write, counts, shown, centres, width - RIGHT / 2, below + LINE)
    if many:
        area = [LEFT / width, 0.34 * BARS / height, 1 - (LEFT + RIGHT) / width, 0.5 * BARS / height]
        plot_counts(figure.add_axes(area), counts, classes)
    plots.save_figure(figure, path)


def write_counts(write, counts, shown, centres, right, top):
    """The numbers of images below the classes that are shown; on the right, those of all classes.

    A question mark: the part has images of unknown class, so there may be some of this class.
    """
    write(LEFT - 8, top, "images", ha="right", weight="bold")
    write(right, top, "all", ha="center", weight="bold")
    for k, (part, numbers) in enumerate(counts.items()):
        y = top + (k + 1) * LINE
        write(LEFT - 8, y, part, ha="right")
        write(right, y, f"{sum(numbers):,}", ha="center")
        for x, number in zip(centres, np.asarray(numbers)[shown]):
            write(x, y, f"{number:,}" if number else "?" if numbers[-1] else "–", ha="center")


def plot_counts(axes, counts, classes):
    """The number of images of every class and part; the scale is logarithmic, as labels are few."""
    C = len(classes)
    for part, numbers in counts.items():
        if np.any(numbers[:C]):
            axes.stairs(numbers[:C], np.arange(C + 1) - 0.5, baseline=None, label=part, linewidth=1.5)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlim=(-0.5, C - 0.5), ylim=(0.8, None), ylabel="images per class")
    if C <= 40:
        axes.set_xticks(range(C), [plots.shorten(name, 9) for name in classes], rotation=90, fontsize=8,
                        parse_math=False)
    else:
        axes.set_xlabel(f"number of the class, of {C:,}", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


# For plot_sheet, in inches. Our choices: eight images per row, each with a few short lines below it.
PER_ROW, IMAGE, SPACE, CAPTION_LINE, HEADING = 8, 1.2, 0.12, 0.14, 0.4


def plot_sheet(groups, path):
    """Images in rows of eight with a caption below each. groups: pairs of a heading and (image, caption)s."""
    rows = sum(-(-len(cells) // PER_ROW) for _, cells in groups)
    lines = 1 + max(caption.count("\n") for _, cells in groups for _, caption in cells)
    width, below = PER_ROW * (IMAGE + SPACE) + SPACE, IMAGE + SPACE + lines * CAPTION_LINE
    height = rows * below + len(groups) * HEADING
    figure, top = Figure(figsize=(width, height)), height
    for heading, cells in groups:
        figure.text(SPACE / width, (top - HEADING / 2) / height, heading, fontsize=11, va="center",
                    parse_math=False)
        top -= HEADING
        for k, (image, caption) in enumerate(cells):
            row, column = divmod(k, PER_ROW)
            left, bottom = SPACE + column * (IMAGE + SPACE), top - row * below - IMAGE
            axes = figure.add_axes([left / width, bottom / height, IMAGE / width, IMAGE / height])
            show_image(axes, image)
            axes.set_xlabel(caption, fontsize=8, labelpad=2, parse_math=False)
        top -= -(-len(cells) // PER_ROW) * below
    plots.save_figure(figure, path, dpi=120)


# ---------------------------------------------------------------- the method


def plot_method(copies, p_y, R, p_z, classes, true_class, path):
    """CRAE on one image: its four rotations, p(y|x), the rotation heads R_k(z|x), and p(z|x) by Eq. 1.

    copies  (4, H, W, 3) uint8; copy z is the image rotated by 90 z degrees, an input of the network
    p_y     (4, C) main classifier        R  (4, C, 4) rotation heads        p_z  (4, 4) p(z|x)
    """
    p_y, R, p_z = map(np.asarray, (p_y, R, p_z))
    shown = classes_to_show(p_y, true_class)
    names = [plots.shorten(classes[k], 11) for k in shown]
    figure = Figure(figsize=(9, 6.6))
    method_text(figure, len(shown), len(classes))
    image = figure.add_axes([0.012, 0.395, 0.105, 0.143])
    show_image(image, copies[0])
    name = plots.shorten(classes[true_class], 12)
    gap = " " if len(name) < 6 else "\n"
    image.set_xlabel(f"class:{gap}{name}", fontsize=9, color=TRUE, parse_math=False)
    figure.add_artist(FancyBboxPatch((0.285, 0.087), 0.022, 0.750, boxstyle="round,pad=0.005", edgecolor=GREY,
                                     facecolor="#f0f0f0", transform=figure.transFigure))
    for z, bottom in enumerate((0.680, 0.482, 0.284, 0.086)):
        middle = bottom + 0.079
        copy = figure.add_axes([0.165, bottom + 0.012, 0.095, 0.1295])
        show_image(copy, copies[z])
        copy.set_title(f"z = {90 * z}°", fontsize=9, pad=2, color=TRUE)
        bars, heads, result = (figure.add_axes([left, bottom, width, 0.158])
                               for left, width in ((0.42, 0.125), (0.595, 0.14), (0.825, 0.165)))
        class_bars(bars, p_y[z, shown], names, list(shown).index(true_class))
        show_heads(heads, R[z, shown], p_y[z, shown].argmax(), z)
        rotation_bars(result, p_z[z], z)
        for axes in (heads, result) if z < 3 else ():
            axes.tick_params(labelbottom=False)
        arrow(figure, (0.121, 0.467), (0.160, middle))
        arrow(figure, (0.263, middle), (0.279, middle))
        arrow(figure, (0.314, middle), (0.403 - 0.0065 * max(map(len, names)), middle))
        figure.text(0.570, middle, "×", ha="center", va="center", fontsize=16)
        figure.text(0.762, middle + 0.030, r"$\sum_k$", ha="center", va="center", fontsize=12)
        arrow(figure, (0.742, middle), (0.783, middle))
    plots.save_figure(figure, path, dpi=200)


def classes_to_show(p_y, true_class):
    """All classes, or the most probable ones and the true one if there are too many; in their order."""
    order = p_y.max(0).argsort()[::-1].tolist()                 # (C,)
    order.remove(true_class)
    return np.array(sorted([true_class, *order[:plots.CLASSES_SHOWN - 1]]))


def method_text(figure, shown, num_classes):
    """Eq. 1, the titles of the columns, and what the marks mean."""
    centred = dict(ha="center", va="center")
    figure.text(0.5, 0.965, r"$p(z\,|\,x)\;=\;\sum_k\;p(y=k\,|\,x)\;R_k(z\,|\,x)$", fontsize=13, **centred)
    some = "" if shown == num_classes else f" ({shown} of {num_classes})"
    titles = {0.065: "image", 0.2125: "four rotations\n$x$", 0.470: f"class $k${some}\n$p(y=k\\,|\\,x)$",
              0.665: "rotation head of class $k$\n$R_k(z\\,|\\,x)$", 0.9075: "rotation\n$p(z\\,|\\,x)$"}
    for x, title in titles.items():
        figure.text(x, 0.868, title, ha="center", va="bottom", fontsize=10, linespacing=1.4)
    figure.text(0.2965, 0.462, "one network: backbone and heads", rotation=90, fontsize=9, **centred)
    marks = ("orange: true class, true rotation", "frame: head of the most probable class",
             "heat map: white 0, blue 1")
    figure.text(0.5, 0.018, (" " * 6).join(marks), fontsize=8, color=GREY, **centred)


def show_image(axes, image):
    axes.imshow(image, interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def class_bars(axes, p, names, true):
    """p(y|x) of one copy. The next panel shows the rotation head of a class in the same row."""
    k = np.arange(len(p))
    axes.barh(k, p, height=0.75, color=[TRUE if i == true else BLUE for i in k])
    axes.set(xlim=(0, 1.25), ylim=(len(p) - 0.5, -0.5), xticks=[])
    axes.set_yticks(k, names, fontsize=7, parse_math=False)
    axes.tick_params(length=0, pad=3)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    best = p.argmax()
    axes.text(p[best] + 0.03, best, f"{p[best]:.2f}", fontsize=7.5, va="center_baseline")


def show_heads(axes, R, best, true):
    """R_k(z|x) of one copy as a heat map: one row per class, one column per rotation; frames row `best`."""
    axes.imshow(R, vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="nearest")
    axes.add_patch(Rectangle((-0.47, best - 0.47), 3.94, 0.94, fill=False, edgecolor="black", linewidth=1.3))
    mark_rotations(axes, true)
    axes.set_yticks([])


def rotation_bars(axes, p, true):
    """p(z|x) of one copy."""
    axes.bar(range(4), p, width=0.7, color=[TRUE if z == true else BLUE for z in range(4)])
    for z in range(4):
        weight = "bold" if z == true else None
        axes.text(z, p[z] + 0.03, f"{p[z]:.2f}", ha="center", fontsize=7.5, fontweight=weight)
    axes.set(xlim=(-0.6, 3.6), ylim=(0, 1.2), yticks=[])
    mark_rotations(axes, true)
    axes.spines[["top", "right", "left"]].set_visible(False)


def mark_rotations(axes, true):
    """Rotations on the x axis; an orange triangle marks the true one."""
    axes.set_xticks(range(4), ["0°", "90°", "180°", "270°"], fontsize=8)
    axes.tick_params(length=0, pad=7)
    below = axes.get_xaxis_transform()                          # x in rotations, y as a share of the height
    axes.plot(true, -0.035, marker="^", markersize=5, color=TRUE, clip_on=False, transform=below)


def arrow(figure, start, end):
    style = dict(arrowstyle="-|>", color=GREY, linewidth=1.1, shrinkA=0, shrinkB=0)
    figure.add_artist(Annotation("", end, start, "figure fraction", "figure fraction", arrowprops=style))
