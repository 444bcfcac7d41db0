"""Sheets of images. Each function takes arrays and texts, not runs, and writes one PNG file.

    plot_demo             two methods side by side (demo.py)
    plot_contact_sheet    images of each class, augmented, rotated and mixed, and their numbers (data.png)
    plot_sheet            images with captions: predictions, wrong predictions (evaluate.py test and predict)
"""
from functools import partial

import numpy as np
from matplotlib.figure import Figure

import plots


def plot_demo(curves, examples, title, path):
    """Left: error curves {name: [(step, error)]}. Right: images that the first reads wrong, the second right.

    examples: dicts with image, wrong and right.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1])
    axes = left.subplots()
    for (name, points), shade in zip(curves.items(), (plots.GREY, plots.BLUE)):
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
        for x, key, shade in (0.3, "wrong", plots.GREY), (0.7, "right", plots.BLUE):
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
            plots.show_image(axes, image)
            axes.set_xlabel(caption, fontsize=8, labelpad=2, parse_math=False)
        top -= -(-len(cells) // PER_ROW) * below
    plots.save_figure(figure, path, dpi=120)
