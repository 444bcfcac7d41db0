"""demo.py: two runs, two errors and a figure."""
import numpy as np
import pytest

import demo
import evaluate
import plots
import sheets
from helpers import run_script


def test_the_demo_shows_both_errors_and_a_figure(tmp_path, capsys):
    errors = demo.compare(steps=60, out=str(tmp_path))
    assert list(errors) == ["labelled images only", "CRAE+"]
    printed = capsys.readouterr().out
    assert "50 labelled and 1,117 unlabelled images, 500 test images" in printed
    for name, error in errors.items():
        run = tmp_path / ("demo_crae_plus_50_0" if name == "CRAE+" else "demo_labeled_only_50_0")
        assert evaluate.use_model("test", str(run), device="cpu")["error"] == pytest.approx(error)
        assert f"{error:5.2f} %  ({round(5 * error)} wrong)" in printed
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    before = (tmp_path / "demo_crae_plus_50_0" / "model.pt").stat().st_mtime_ns
    assert demo.compare(steps=60, out=str(tmp_path)) == errors                  # nothing is trained again
    assert (tmp_path / "demo_crae_plus_50_0" / "model.pt").stat().st_mtime_ns == before


def test_bad_flags_are_refused_in_one_line(tmp_path):
    for words, expected in (["--labels=ten"], "must be a whole number"), (["--lables=5"], "--labels?"):
        done = run_script("demo.py", *words, cwd=tmp_path)
        assert done.returncode and expected in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_figure_shows_every_example_with_both_answers(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path, **_: drawn.append(figure))
    examples = [dict(image=np.full((8, 8, 3), 20 * k, np.uint8), wrong=k, right=k + 1) for k in range(9)]
    curves = {"labelled images only": [(1, 9.0), (2, 5.0)], "CRAE+": [(1, 8.0), (2, 3.0)]}
    sheets.plot_demo(curves, examples, "title", tmp_path / "demo.png")
    left, right = drawn[0].subfigs
    shown = [axes for axes in right.axes if axes.images]
    assert [int(axes.images[0].get_array().max()) for axes in shown] == [20 * k for k in range(9)]
    answers = [[text.get_text() for text in axes.texts] for axes in shown]
    assert answers == [[str(k), str(k + 1)] for k in range(9)]
    assert [line.get_ydata()[-1] for line in left.axes[0].lines] == [5.0, 3.0]
