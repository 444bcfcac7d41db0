"""What the figures show: the numbers given to them, in the right places, and readable names."""
import numpy as np
import pytest
from PIL import Image

import plots
import sheets
from helpers import HERE


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, in order."""
    kept, real = [], plots.save_figure

    def save_figure(figure, path, **options):
        kept.append(figure)
        real(figure, path, **options)

    monkeypatch.setattr(plots, "save_figure", save_figure)
    return kept


def example(C, seed=0):
    """Random copies (4, 8, 8, 3), p(y|x) (4, C), R (4, C, 4) and p(z|x) (4, 4) of an image."""
    rng = np.random.default_rng(seed)
    p_y, R = rng.dirichlet(np.ones(C), 4), rng.dirichlet(np.ones(4), (4, C))
    return rng.integers(0, 256, (4, 8, 8, 3), np.uint8), p_y, R, np.einsum("nc,ncz->nz", p_y, R)


def panels(figure):
    """The axes of plot_method: the image, and for each rotation its copy, p(y|x), R and p(z|x)."""
    image, *others = figure.axes
    return image, [others[4 * z:4 * z + 4] for z in range(4)]


def test_the_confusion_matrix_has_the_true_class_in_rows(tmp_path, figures):
    plots.plot_confusion(np.array([[8, 2], [0, 5]]), ["a", "b"], "title", tmp_path / "x.png")
    axes = figures[0].axes[0]
    matrix = np.asarray(axes.images[0].get_array())
    assert matrix.tolist() == pytest.approx(np.array([[0.8, 0.2], [0.0, 1.0]]))
    assert axes.get_ylabel() == "true class"
    assert {(t.get_position(), t.get_text()) for t in axes.texts} == {
        ((0, 0), "8"), ((1, 0), "2"), ((1, 1), "5")}            # (column, row)


def test_the_contact_sheet_has_every_image_once_and_all_numbers(tmp_path, figures):
    cells = np.random.default_rng(0).integers(0, 250, (3, 2, 2, 8, 8, 3), np.uint8)
    groups, classes = [["first", ""], ["last"]], ["an $ant_1$", "bee"]
    counts = dict(labelled=np.array([4, 3, 0]), unlabelled=np.array([0, 0, 1234]))
    sheets.plot_contact_sheet(cells, groups, np.array([0, 1]), classes, counts, "title", tmp_path / "x.png")
    axes, = figures[0].axes
    shown = np.asarray(axes.images[0].get_array())
    picture = np.asarray(Image.open(tmp_path / "x.png").convert("RGB"))
    assert picture.shape == shown.shape                         # whole pixels, so that images stay sharp
    left = np.flatnonzero((shown != 255).any((0, 2)))[0]
    top = np.flatnonzero((shown != 255).any((1, 2)))[0]
    size = 88
    for r, k, i in np.ndindex(3, 2, 2):
        y = top + r * (size + sheets.GAP) + (sheets.ROW_GAP if r == 2 else 0)
        x = left + (2 * k + i) * (size + sheets.GAP) + k * sheets.CLASS_GAP
        for pixels in shown, picture:
            assert np.array_equal(pixels[y:y + size:11, x:x + size:11], cells[r, k, i])
    texts = [text.get_text() for text in axes.texts]
    assert texts[:6] == ["title", "first", "", "last", "an $ant_1$", "bee"]
    assert texts[6:] == ["images", "all", "labelled", "7", "4", "3", "unlabelled", "1,234", "?", "?"]


def test_the_contact_sheet_counts_all_of_many_classes(tmp_path, figures):
    cells = np.zeros((1, 2, 1, 8, 8, 3), np.uint8)
    counts = dict(labelled=np.array([1, 2, 30, 0]), test=np.array([5, 6, 7, 0]))
    sheets.plot_contact_sheet(cells, [["x"]], np.array([0, 2]), ["a", "b", "c" * 30], counts, "t",
                             tmp_path / "x.png")
    sheet, bars = figures[0].axes
    assert {p.get_label(): p.get_data().values.tolist() for p in bars.patches} == dict(
        labelled=[1, 2, 30], test=[5, 6, 7])
    assert [tick.get_text() for tick in bars.get_xticklabels()] == ["a", "b", "cccccccc…"]
    texts = [text.get_text() for text in sheet.texts]
    assert texts[-8:] == ["labelled", "33", "1", "30", "test", "18", "5", "7"]


def test_the_curve_shows_each_column_that_has_values(tmp_path, figures):
    rows = [dict(step="20", test_error="30.5", test_error_raw="40", val_error="", unlabeled_error="",
                 rotation_accuracy="75"),
            dict(step="40", test_error="20", test_error_raw="25", val_error="", unlabeled_error="22",
                 rotation_accuracy="90")]
    plots.plot_curve(rows, tmp_path / "curve.png", "a $\\frac$ title")
    lines = {line.get_label(): line.get_xydata().tolist() for line in figures[0].axes[0].lines}
    assert lines == {"rotation, unlabelled": [[20, 25], [40, 10]],              # as an error
                     "test, raw weights": [[20, 40], [40, 25]], "unlabelled, p(y|x)": [[40, 22]],
                     "test, averaged weights": [[20, 30.5], [40, 20]]}
    assert np.asarray(Image.open(tmp_path / "curve.png").convert("L")).std() > 5


@pytest.mark.parametrize("n", [1, 2, 10, 20, 21, 1024])
def test_the_curve_has_markers_at_both_ends_and_at_most_twenty(n, tmp_path, figures):
    """A short run has a marker per evaluation, so that even a single one is visible."""
    rows = [dict(step=str(k), test_error="5", test_error_raw="" if k < n else "6", val_error="",
                 unlabeled_error="", rotation_accuracy="") for k in range(1, n + 1)]
    plots.plot_curve(rows, tmp_path / "curve.png", "title")
    raw, tested = figures[0].axes[0].lines
    assert raw.get_marker() == tested.get_marker() == "o"
    assert raw.get_markevery() == [0] and raw.get_xydata().tolist() == [[n, 6]]
    marked = tested.get_markevery()
    assert len(set(marked)) == min(n, 20) and (marked[0], marked[-1]) == (0, n - 1)
    gaps = np.diff(marked)
    assert n == 1 or gaps.max() - gaps.min() <= 1               # evenly spaced


def test_curves_have_a_logarithmic_axis_if_their_lengths_differ_a_lot(tmp_path, figures):
    def scale(*ends):
        methods = [dict(name=str(end), colour=0, points=[(1, 50.0), (end, 40.0)]) for end in ends]
        plots.plot_curves([*methods, dict(name="none", colour=3, points=[])], "t", tmp_path / "curves.png")
        return figures[-1].axes[0].get_xscale()

    assert [scale(100, 400), scale(100, 401), scale()] == ["linear", "log", "linear"]


def test_curves_start_at_zero_unless_that_would_leave_the_figure_half_empty(tmp_path, figures):
    def bottom(last):
        methods = [dict(name="a", colour=0, points=[(1, 50.0), (2, last)])]
        plots.plot_curves(methods, "t", tmp_path / "curves.png")
        return figures[-1].axes[0].get_ylim()[0]

    assert bottom(10.0) == 0 and 25 < bottom(30.0) < 30


def test_the_claims_show_each_interval_with_the_colour_of_its_verdict(tmp_path, figures):
    def row(name, labels, mean, verdict, paper=None, margin=0.0):
        return dict(name=name, labels=labels, mean=mean, low=mean - 1, high=mean + 2, verdict=verdict,
                    paper=paper, margin=margin)

    rows = [row("a $x$", 50, -4.0, "holds", paper=-6.0), row("a $x$", 100, 5.0, "does not hold"),
            row("b", 50, 0.5, "cannot be told", margin=1.0)]
    plots.plot_claims(rows, "title", tmp_path / "x.png")
    axes, = figures[0].axes
    drawn = {tuple(map(tuple, line.get_xydata().tolist())): line.get_color() for line in axes.lines}
    shades = [drawn[(r["low"], y), (r["high"], y)] for y, r in enumerate(rows)]
    assert shades == [drawn[(r["mean"], y),] for y, r in enumerate(rows)]
    legend = {line.get_label(): line.get_color() for line in axes.lines if not len(line.get_xdata())}
    assert shades == [legend[r["verdict"]] for r in rows] and len({*shades}) == 3
    assert ((-6.0, 0),) in drawn and ((0.0, 0.5), (0.0, 1.5)) in drawn and ((1.0, 1.5), (1.0, 2.5)) in drawn
    ticks = [" ".join(tick.get_text().split()) for tick in axes.get_yticklabels()]
    assert ticks == ["a $x$ 50 labels", "100 labels", "b 50 labels"]
    assert axes.get_ylim() == (2.5, -0.5)                       # the first claim is at the top


def test_the_figure_of_the_method_shows_the_numbers_of_each_rotation(tmp_path, figures):
    copies, p_y, R, p_z = example(C=3)
    sheets.plot_method(copies, p_y, R, p_z, ["cat", "dog", "$x$"], 1, tmp_path / "x.png")
    image, rotations = panels(figures[0])
    np.testing.assert_array_equal(image.images[0].get_array(), copies[0])
    assert image.get_xlabel() == "class: dog"
    for z, (copy, bars, heads, result) in enumerate(rotations):
        np.testing.assert_array_equal(copy.images[0].get_array(), copies[z])
        assert copy.get_title() == f"z = {90 * z}°"
        np.testing.assert_allclose([bar.get_width() for bar in bars.patches], p_y[z])
        assert [t.get_text() for t in bars.get_yticklabels()] == ["cat", "dog", "$x$"]
        np.testing.assert_allclose(heads.images[0].get_array(), R[z])           # one row per class
        np.testing.assert_allclose([bar.get_height() for bar in result.patches], p_z[z])
        assert [t.get_text() for t in result.texts] == [f"{p:.2f}" for p in p_z[z]]
        frame, = heads.patches
        assert round(frame.get_y() + frame.get_height() / 2) == p_y[z].argmax()
    assert Image.open(tmp_path / "x.png").size == (1800, 1320)


def test_the_figure_of_the_method_marks_the_true_class_and_rotation(tmp_path, figures):
    sheets.plot_method(*example(C=3), ["cat", "dog", "bird"], 1, tmp_path / "x.png")
    marked = sheets.Rectangle((0, 0), 1, 1, facecolor=sheets.TRUE).get_facecolor()
    for z, (_, bars, heads, result) in enumerate(panels(figures[0])[1]):
        assert [bar.get_facecolor() == marked for bar in bars.patches] == [False, True, False]
        assert [bar.get_facecolor() == marked for bar in result.patches] == [k == z for k in range(4)]
        for axes in heads, result:
            triangle, = axes.lines
            assert triangle.get_xdata() == [z]


def test_the_figure_of_the_method_shows_ten_of_many_classes(tmp_path, figures):
    copies, p_y, R, p_z = example(C=30)
    names = [f"a very long name of class {k}" for k in range(30)]
    true = int(p_y.max(0).argmin())                             # the least probable class is shown, too
    sheets.plot_method(copies, p_y, R, p_z, names, true, tmp_path / "x.png")
    most = set(p_y.max(0).argsort()[-9:].tolist())
    shown = sorted(most | {true})
    assert len(shown) == 10 and sheets.classes_to_show(p_y, true).tolist() == shown
    for z, (_, bars, heads, result) in enumerate(panels(figures[0])[1]):
        np.testing.assert_allclose([bar.get_width() for bar in bars.patches], p_y[z, shown])
        np.testing.assert_allclose(heads.images[0].get_array(), R[z, shown])
        np.testing.assert_allclose([bar.get_height() for bar in result.patches], p_z[z])
        assert {len(t.get_text()) for t in bars.get_yticklabels()} == {11}
    assert any("(10 of 30)" in t.get_text() for t in figures[0].texts)


def test_the_labels_of_the_diversity_figure_are_inside_it(tmp_path, figures):
    names = [f"a long name of class {k}" for k in range(10)]
    panels = [dict(epoch=k, matrix=np.eye(10), diagonal=1.0, classes=names) for k in range(4)]
    plots.plot_diversity([(0, 80.0), (3, 60.0)], panels, "title", tmp_path / "x.png")
    figure, = figures
    labels = [axes.xaxis.label for axes in figure.axes if axes.get_xlabel() == "rotation head"]
    assert len(labels) == 4
    assert all(label.get_window_extent().y0 >= figure.bbox.y0 for label in labels)


def test_a_sheet_has_each_image_above_its_caption_in_rows_of_eight(tmp_path, figures):
    rng = np.random.default_rng(0)
    groups = [(f"heading {g}", [(image, f"$x$ {g} {k}") for k, image in enumerate(images)])
              for g, images in enumerate(rng.integers(0, 256, (n, 8, 8, 3), np.uint8) for n in (11, 3))]
    sheets.plot_sheet(groups, tmp_path / "x.png")
    figure, = figures
    assert [text.get_text() for text in figure.texts] == ["heading 0", "heading 1"]
    cells = groups[0][1] + groups[1][1]
    boxes = [axes.get_position() for axes in figure.axes]
    for axes, (image, caption) in zip(figure.axes, cells):
        np.testing.assert_array_equal(axes.images[0].get_array(), image)
        assert axes.get_xlabel() == caption
    assert len({round(box.y0, 6) for box in boxes}) == 3        # two rows, and one of the second group
    assert boxes[8].x0 == pytest.approx(boxes[0].x0) and boxes[8].y1 < boxes[0].y0 < boxes[0].y1
    assert boxes[11].y1 < figure.texts[1].get_position()[1] < boxes[8].y0       # below its heading
    figure.draw_without_rendering()
    frame = figure.bbox
    for axes in figure.axes:                                    # captions are inside, and do not overlap
        box = axes.xaxis.label.get_window_extent()
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0
        assert not any(box.overlaps(other.bbox) for other in figure.axes)


def test_the_end_of_a_long_file_name_is_shown():
    assert plots.shorten_start("1234567890ab.png") == "1234567890ab.png"
    assert plots.shorten_start("x1234567890abc.png") == "…34567890abc.png"
    assert plots.shorten_start("a\udcff\nb") == "a??b"


def test_long_names_are_shortened_and_colours_beyond_the_palette_are_black():
    assert plots.shorten("fifteen letters") == "fifteen letters"
    assert plots.shorten("sixteen  letters") == "sixteen  lette…"
    name = "digits_100_crae_plus_0_archwrn-10-2_steps200_flipTrue"
    assert plots.shorten_middle(name) == "digits_100_crae_plus_0_ar…0_flipTrue"
    assert plots.shorten_middle("a") == "a"
    assert len({plots.colour(k) for k in range(40)}) == 40
    assert plots.colour(0) != plots.colour(1) and plots.colour(None) == plots.colour(40) == "black"


def test_only_plots_and_sheets_import_matplotlib_and_it_opens_no_window():
    texts = {path.name: path.read_text() for path in HERE.glob("*.py")}
    using = [name for name, text in texts.items() if "import matplotlib" in text or "from matplotlib" in text]
    assert {*using} == {"plots.py", "sheets.py"}
    assert not any("import pyplot" in texts[name] for name in using)
