"""The table and figure of single runs, their evaluations, and the HTML page of a report."""
import base64
import html.parser
import re

import pytest
from PIL import Image

import cli
import metrics
import overview
import pages
import plots
import report
from helpers import make_run


def own_table(folder):
    """The table "Your runs", as lists of cells."""
    text = (folder / "report.md").read_text().split("## Your runs")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def write(tmp_path):
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    return tmp_path / "report"


def test_the_report_starts_with_every_finished_run(tmp_path, figures):
    runs = tmp_path / "runs"
    # The saved model: 10 %; the median: 50 %.
    make_run(runs, errors=[50.0] * 30 + [10.0], name="digits_a")
    make_run(runs / "sweep", "crae_plus", errors=[5.0], seed=1, name="b", tested=1000)
    make_run(runs, "new_method", "my.npz", "10%", errors=[20.0], name="c")
    make_run(runs, "crae", "my.npz", 40, errors=[1.0], name="d", finished=False)
    make_run(runs, "crae", "x|y", 40, errors=[0.0], name="e", tested=None)      # written by an older version
    out = write(tmp_path)
    text = (out / "report.md").read_text()
    assert text.startswith("# Report\n\n4 finished runs, 1 unfinished.\n\n## Your runs\n")
    head, _, *rows = own_table(out)
    assert head == ["run", "dataset", "labels", "method", "error", "95 % interval", "time"]
    ten, five, twenty = ("{:.2f} to {:.2f}".format(*metrics.wilson(wrong, n))
                         for wrong, n in ((20, 200), (50, 1000), (40, 200)))
    name = report.METHODS["crae_plus"]
    assert rows == [["sweep/b", "digits", "50", name, "5.00", five, "30 s"],
                    ["digits_a", "digits", "50", "CRAE", "10.00", ten, "16 min"],       # 930 seconds
                    ["c", "my.npz", "10% (50)", "new_method", "20.00", twenty, "30 s"],
                    ["e", "x\\|y", "40", "CRAE", "0.00", "", "30 s"]]
    assert "Training time of all 4 runs: 17 min, without evaluations." in text          # 1,020 seconds
    panels = figures["runs.png"].axes
    assert [axes.get_title() for axes in panels] == ["digits", "my.npz", "x|y"]
    # The figure leaves out the dataset, which is in the title.
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["sweep/b", "a"]
    bars = panels[0].containers
    assert [bar.lines[0].get_xydata().tolist() for bar in bars] == [[[5, 0]], [[10, 1]]]
    low, high = bars[1].lines[2][0].get_segments()[0][:, 0]
    assert (low, high) == pytest.approx(metrics.wilson(20, 200))
    assert len({bar.lines[0].get_marker() for bar in bars}) == 2
    names = [text.get_text() for text in figures["runs.png"].legends[0].texts]
    assert names == [name, "CRAE", "new_method"]


def test_the_figure_shows_the_lowest_errors_of_many_runs(tmp_path, figures):
    for seed in range(33):
        make_run(tmp_path / "runs", errors=[50.0 - seed], seed=seed, name=f"run{seed}", diversity=False)
    assert len(own_table(write(tmp_path))) == 2 + 33
    axes, = figures["runs.png"].axes
    assert axes.get_title() == "digits, the 30 lowest of 33 errors"
    assert [text.get_text() for text in axes.get_yticklabels()] == [f"run{k}" for k in range(32, 2, -1)]


def test_evaluations_are_shown_below_the_table(tmp_path):
    run = make_run(tmp_path / "runs" / "my sweep", name="a b", errors=[5.0], diversity=False)
    make_run(tmp_path / "runs", name="c", errors=[6.0], seed=1, diversity=False)
    (run / "evaluation").mkdir()
    Image.new("RGB", (7, 5), "red").save(run / "evaluation" / "wrong.png")
    out = write(tmp_path)
    text = (out / "report.md").read_text()
    assert "### my sweep/a b\n\n![wrong predictions of my sweep/a b](my-sweep-a-b_wrong.png)\n" in text
    assert (out / "my-sweep-a-b_wrong.png").read_bytes() == (run / "evaluation" / "wrong.png").read_bytes()
    assert "confusion" not in text and "### c" not in text


def test_a_single_run_can_be_reported(tmp_path):
    run = make_run(tmp_path, name="only", errors=[5.0])
    report.write_report(str(run), out=str(tmp_path / "report"))
    assert own_table(tmp_path / "report")[2][0] == "only"


@pytest.mark.parametrize("seconds, text", [
    (None, ""), (0.4, "0 s"), (99.4, "99 s"), (100, "2 min"), (5910, "98 min"), (6000, "1 h 40 min"),
    (3 * 3600 + 5 * 60, "3 h 05 min")])
def test_durations(seconds, text):
    assert overview.duration(seconds) == text


# ---------------------------------------------------------------- report.html


class Page(html.parser.HTMLParser):
    """The texts of a page by tag, and its images."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.images, self.rows, self.addresses = [], {}, [], [], []
        self.feed(text)
        assert not self.open                                    # every tag is closed

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [attributes[name] for name in ("src", "href") if name in attributes]
        if tag == "img":
            self.images.append(attributes)
        elif tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)


def test_the_page_holds_the_whole_report_and_needs_no_other_file(tmp_path):
    make_run(tmp_path / "runs", errors=[20.0, 10.0])
    make_run(tmp_path / "runs", "crae_plus", "my <b> & pics|", errors=[5.0])
    (tmp_path / "runs" / "stray.txt").touch()
    out = write(tmp_path)
    text, page = (out / "report.md").read_text(), Page((out / "report.html").read_text(encoding="utf-8"))
    assert page.texts["h1"] == ["Report"]
    for level in 2, 3:
        headings = re.findall(rf"^{'#' * level} (.*)$", text, re.MULTILINE)
        assert page.texts.get(f"h{level}", []) == headings
    tables = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    cells = [[cell.strip().replace("\\|", "|") for cell in line[2:-2].split(" | ")] for line in tables]
    assert page.rows == cells and any("my <b> & pics|" in row for row in cells)
    assert any("stray.txt: not a run" in item for item in page.texts["li"])
    names = re.findall(r"^!\[(.*)\]\((.*)\)$", text, re.MULTILINE)
    assert len(names) > 3 and [image["alt"] for image in page.images] == [alt for alt, _ in names]
    for image, (_, name) in zip(page.images, names):
        start, code = image["src"].split(",")
        assert start == "data:image/png;base64"
        assert base64.b64decode(code) == (out / name).read_bytes()
    assert all(address.startswith("data:") for address in page.addresses)       # nothing is loaded


def test_lines_of_a_paragraph_and_of_a_list_belong_together(tmp_path):
    lines = ["# A & B", "", "one", "two", "", "- x", "- y <i>", "three", "| a |", "|---|", "| 1 \\| 2 |"]
    pages.write_page(lines, tmp_path, "<title>", tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "<p>one two</p>" in text and "<ul>\n<li>x</li>\n<li>y &lt;i&gt;</li>\n</ul>" in text
    page = Page(text)
    assert page.texts["title"] == ["<title>"] and page.texts["h1"] == ["A & B"]
    assert page.texts["p"] == ["one two", "three"] and page.rows == [["a"], ["1 | 2"]]


def test_names_in_another_encoding_do_not_stop_the_report(tmp_path):
    make_run(tmp_path / "runs", dataset="pics\udcff", errors=[5.0])
    out = write(tmp_path)
    for name in "report.md", "report.html":
        assert "pics?" in (out / name).read_text(encoding="utf-8")
    assert plots.printable("pics\udcff\n") == "pics??"


def test_the_tables_between_the_marks_of_a_page_become_those_of_the_report(tmp_path):
    lines = ["# Report", "", "## a, with b 1 (differs from the preset)", "text", "", "| x |", "|---|",
             "| 1 |", "", "![x](y.png)", "", "| y |", "|---|", "", "### c", "", "| z |", "|---|"]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables of: a, with b 1 -->\n| old |\n\nold\n<!-- end of tables -->\n"
                    "middle\n<!-- tables of: c -->\n<!-- end of tables -->\n| after |\n")
    for _ in range(2):                                          # the second time, nothing changes
        pages.update_tables(page, lines)
        assert page.read_text() == (
            "before\n<!-- tables of: a, with b 1 -->\n| x |\n|---|\n| 1 |\n\n| y |\n|---|\n"
            "<!-- end of tables -->\nmiddle\n"
            "<!-- tables of: c -->\n| z |\n|---|\n<!-- end of tables -->\n| after |\n")
    page.write_text("<!-- tables of: d -->\n<!-- end of tables -->\n")
    with pytest.raises(cli.Refused, match="--update .*page.md: the report has no section 'd'"):
        pages.update_tables(page, lines)
