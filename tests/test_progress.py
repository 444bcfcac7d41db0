"""What the user sees during a run, with a clock that only moves when a test says so; then real runs."""
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import devices
import distributed
import progress
import train_baselines
import train_crae
from helpers import HERE, QUICK, everything_in, same

CONFIG = dict(steps=1000, epoch=100, eval_epochs=1, device="cpu", dataset="cifar10", method="crae", base=None,
              pretrained=None, precision="bf16")


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(distributed, "hide_bar", lambda: True)  # even if the tests run in a terminal
    return clock


@contextmanager
def shown_run(row_step=0, **values):
    run = dict(step=row_step, row_step=row_step, terms={})
    with progress.show(run, CONFIG | values) as shown:
        yield shown


def take_steps(shown, clock, n, seconds):
    """n steps; the loss "a" of step t is t, and "b" is 0.5."""
    for _ in range(n):
        clock.now += seconds
        shown.run["step"] += 1
        for name, value in dict(a=shown.run["step"], b=0.5).items():
            shown.run["terms"][name] = shown.run["terms"].get(name, 0) + torch.tensor(float(value))
        progress.after_step(shown)


ROW = dict(step="100", loss_a="7", loss_b="8", test_error="12.345", test_top5_error="", unlabeled_error="",
           rotation_accuracy="50", images_per_second="1234.5")


def evaluate(shown, clock, *seconds, images=10):
    """An evaluation of one set with one batch per given number of seconds."""
    watch = progress.start_evaluation(shown)
    batches = [("x", range(images))] * len(seconds)
    for _, of_batch in zip(watch("test images", batches, images * len(seconds)), seconds):
        clock.now += of_batch
    shown.run.update(row_step=shown.run["step"], terms={})
    progress.after_evaluation(shown, ROW)


@pytest.fixture
def lines(clock, monkeypatch):
    """The printed lines with their times, in seconds since the start."""
    printed, start = [], clock.now
    monkeypatch.setattr(progress, "say", lambda shown, text: printed.append((clock.now - start, text)))
    return printed


# ---------------------------------------------------------------- the time left


def test_the_evaluations_left_are_those_that_the_loop_will_make():
    for steps in range(1, 14):
        for every in range(1, 8):
            at = [step for step in range(1, steps + 1) if step % every == 0 or step == steps]     # as in fit
            for row_step in range(steps + 1):
                left = progress.evaluations_left(dict(row_step=row_step), dict(steps=steps, epoch=every,
                                                                               eval_epochs=1))
                assert left == sum(step > row_step for step in at), (steps, every, row_step)


def test_the_time_left_is_that_of_steps_and_evaluations_without_the_first_step(clock, lines):
    with shown_run() as shown:
        take_steps(shown, clock, 1, 50)                         # compiles, for example
        assert progress.time_left_text(shown, clock.now) == []
        take_steps(shown, clock, 99, 2)
        assert progress.time_left(shown, clock.now) == pytest.approx(900 * 2)
        assert progress.time_left_text(shown, clock.now) == ["30.0 minutes left plus evaluations"]
        evaluate(shown, clock, 10, 20)
        assert progress.time_left(shown, clock.now) == pytest.approx(900 * 2 + 9 * 30)
        take_steps(shown, clock, 100, 2)
        assert progress.time_left_text(shown, clock.now) == ["31.2 minutes left"]       # 800 * 2 + 9 * 30


def test_the_time_left_falls_during_an_evaluation(clock, lines):
    with shown_run() as shown:
        take_steps(shown, clock, 100, 2)
        evaluate(shown, clock, 30)
        take_steps(shown, clock, 100, 2)
        progress.start_evaluation(shown)
        before = progress.time_left(shown, clock.now)
        clock.now += 12
        assert progress.time_left(shown, clock.now) == pytest.approx(before - 12)
        clock.now += 100                                        # longer than the one before: 8 are left
        assert progress.time_left(shown, clock.now) == pytest.approx(800 * 2 + 8 * 30)


def test_a_resumed_run_is_timed_from_its_first_step_in_this_session(clock, lines):
    with shown_run(row_step=600) as shown:
        take_steps(shown, clock, 21, 3)
        assert progress.time_left(shown, clock.now) == pytest.approx(379 * 3)


def test_durations():
    seconds = 0, 42.4, 59.4, 59.6, 1800, 3600, 359_784, 444_444_120
    assert [progress.duration(s) for s in seconds] == [
        "0 seconds", "42 seconds", "59 seconds", "1.0 minutes", "30.0 minutes", "1.0 hours", "99.9 hours",
        "123,457 hours"]


# ---------------------------------------------------------------- reads


@pytest.mark.parametrize("seconds", [0.1, 3, 25])
def test_the_losses_are_read_at_most_every_ten_seconds(seconds, clock, lines, monkeypatch):
    reads, real = [], progress.read_losses
    monkeypatch.setattr(progress, "read_losses", lambda run: reads.append(clock.now) or real(run))
    start = clock.now
    with shown_run() as shown:
        take_steps(shown, clock, int(100 / seconds), seconds)
    gaps = [b - a for a, b in zip(reads, reads[1:])]
    assert min(gaps) >= 9.999 and max(gaps) < 10 + seconds      # and not later than necessary
    assert reads[0] - start <= 5 + 2 * seconds


def test_the_losses_are_means_since_the_last_row(clock, lines):
    with shown_run() as shown:
        take_steps(shown, clock, 6, 1)
        assert shown.losses == dict(a=(1 + 2 + 3 + 4 + 5 + 6) / 6, b=0.5)
        evaluate(shown, clock, 1)
        assert shown.losses == dict(a=7, b=8)                   # those of the row, until the next read
        take_steps(shown, clock, 9, 1)
        assert shown.losses == dict(a=sum(range(7, 16)) / 9, b=0.5)


def test_other_processes_neither_read_nor_print(clock, lines, monkeypatch):
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(progress, "read_losses", lambda run: pytest.fail("a read"))
    with shown_run() as shown:
        take_steps(shown, clock, 50, 10)
        evaluate(shown, clock, 50, 50)
    assert not lines


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize("seconds", [0.25, 7, 16, 29, 45])
def test_there_is_a_line_at_least_every_half_minute(seconds, clock, lines):
    """Also during evaluations; a longer step or batch has one line each."""
    with shown_run() as shown:
        take_steps(shown, clock, int(200 / seconds), seconds)
        evaluate(shown, clock, *[seconds] * int(200 / seconds))
        take_steps(shown, clock, 2, seconds)
    progressed = [(at, line) for at, line in lines if line.startswith("step")]
    gaps = [(b - a, line) for (a, _), (b, line) in zip([(0, ""), *progressed], progressed)]
    assert 180 < progressed[-1][0] and max(gap for gap, _ in gaps) <= max(30, seconds)
    assert min(gap for gap, line in gaps if "images/s" not in line) >= 15       # and not many more
    assert any("evaluating, test images " in line for _, line in progressed)


def test_what_a_line_contains(clock, lines):
    with shown_run() as shown:
        take_steps(shown, clock, 33, 1)
        evaluate(shown, clock, 20, 20, 20)
    assert [line for _, line in lines if line.startswith("step")] == [
        "step 30/1000   a 13.5, b 0.5   16.2 minutes left plus evaluations",
        "step 33/1000   evaluating, test images 33%   a 13.5, b 0.5   16.1 minutes left plus evaluations",
        "step 33/1000   evaluating, test images 67%   a 13.5, b 0.5   16.1 minutes left plus evaluations",
        "step 33/1000   evaluating, test images 100%   a 13.5, b 0.5   16.1 minutes left plus evaluations",
        "step 33/1000   test error 12.35 %   rotation accuracy 50.00 %   1,234 images/s   a 7, b 8   "
        "26.1 minutes left"]


def test_the_last_line_has_no_time_left(clock, lines):
    with shown_run(steps=10) as shown:
        take_steps(shown, clock, 10, 6)
        evaluate(shown, clock, 1)
    assert "step 10/10   test error" in lines[-1][1] and "left" not in lines[-1][1]


# ---------------------------------------------------------------- how long it will take


def test_the_run_says_how_long_it_takes_and_again_with_evaluations(clock, lines):
    with shown_run() as shown:
        take_steps(shown, clock, 100, 0.5)
        assert lines[0] == (5.5, "about 8.2 minutes left for 989 steps, plus 10 evaluations, which take an "
                                 "unknown time")
        evaluate(shown, clock, 20)
        assert lines[-1][1] == "about 10.5 minutes left for 900 steps and 9 evaluations"
        take_steps(shown, clock, 99, 0.5)
        evaluate(shown, clock, 20)
    assert sum("about" in line for _, line in lines) == 2


def test_evaluations_that_were_timed_before_the_first_report_are_included_at_once(clock, lines):
    with shown_run(epoch=2) as shown:
        take_steps(shown, clock, 2, 1)
        evaluate(shown, clock, 1)
        take_steps(shown, clock, 5, 1)
    about = [line for _, line in lines if "about" in line]
    assert about == ["about 24.9 minutes left for 995 steps and 499 evaluations"]


SHORTER = "fewer --steps (or --minutes), a smaller --arch or --image_size, or a GPU"


@pytest.mark.parametrize("values, hint", [
    (dict(), f"to make it shorter: {SHORTER}"), (dict(recipe="fast"), f"to make it shorter: {SHORTER}"),
    (dict(recipe="paper"), f"to make it shorter: --recipe fast, {SHORTER}"),
    (dict(recipe="paper", precision="fp32"),
     f"to make it shorter: --recipe fast, --precision bf16, {SHORTER}"),
    (dict(recipe="paper", dataset="imagenet"), f"to make it shorter: {SHORTER}"),
    (dict(device="cuda"), None), (dict(steps=700), None)])
def test_more_than_an_hour_on_a_cpu_prints_what_would_make_it_shorter(values, hint, clock, lines,
                                                                      monkeypatch):
    monkeypatch.setattr(devices, "has_bf16", lambda: True)
    with shown_run(**values) as shown:
        take_steps(shown, clock, 40, 4)                         # 1000 steps: 67 minutes; 700: 47 minutes
    assert [line for _, line in lines if "shorter" in line] == ([hint] if hint else [])


def test_precision_is_no_advice_on_a_cpu_without_bf16(monkeypatch):
    monkeypatch.setattr(devices, "has_bf16", lambda: False)
    assert "bf16" not in progress.how_to_shorten(CONFIG | dict(precision="fp32"))


def test_a_last_evaluation_with_more_images_takes_longer(clock, lines):
    run = dict(step=0, row_step=0, terms={})
    with progress.show(run, CONFIG | dict(steps=300), sizes=(10, 50)) as shown:
        take_steps(shown, clock, 100, 1)
        evaluate(shown, clock, 20)
        assert progress.time_left(shown, clock.now) == pytest.approx(200 + 20 + 100)
        run["row_step"] = 100
        take_steps(shown, clock, 100, 1)
        evaluate(shown, clock, 20)
        run["row_step"] = 200
        take_steps(shown, clock, 100, 1)
        assert progress.time_left(shown, clock.now) == pytest.approx(100)
        watch = progress.start_evaluation(shown)
        next(watch("test images", iter([("x", range(10))]), 10))
        clock.now += 40
        assert progress.time_left(shown, clock.now) == pytest.approx(60)


@pytest.mark.parametrize("minutes, advised", [(20, False), (40, True)])
def test_both_stages_of_fine_tune_count_for_the_hour(minutes, advised, clock, lines):
    stage = dict(base="fine_tune", method="rotation", steps=1000)
    with shown_run(**stage) as shown:
        take_steps(shown, clock, 40, 60 * minutes / 1000)
    assert any("shorter" in line for _, line in lines) == advised
    assert any("stage 2 takes additional time, but not more than stage 1" in line for _, line in lines)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_reading_files_prints_a_line_every_half_minute(rank, monkeypatch, capsys):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setenv("RANK", rank)
    items = []
    for item in progress.count_through(range(100), "reading train", 1000):
        items.append(item)
        clock.now += 1
    assert items == [*range(100)]
    expected = "".join(f"reading train: {n} of 1,000\n" for n in (31, 62, 93))
    assert capsys.readouterr().out == (expected if rank == "0" else "")


def test_evaluations_count_for_the_hour(clock, lines):
    with shown_run(steps=700) as shown:
        take_steps(shown, clock, 100, 4)
        assert not any("shorter" in line for _, line in lines)
        evaluate(shown, clock, 400)                             # six more of them
        take_steps(shown, clock, 100, 4)
        evaluate(shown, clock, 400)
    assert sum("shorter" in line for _, line in lines) == 1


def test_the_stages_of_fine_tune_are_told_apart(clock, lines):
    for method, pretrained in ("rotation", None), ("fine_tune", None), ("fine_tune", "runs/x"):
        with shown_run(base="fine_tune", method=method, pretrained=pretrained) as shown:
            take_steps(shown, clock, 31, 1)
    one, line_one, two, line_two, only, line_only = (line for _, line in lines)
    rest = "left for 994 steps, plus 10 evaluations, which take an unknown time"
    more = "stage 2 takes additional time, but not more than stage 1"
    assert one == f"stage 1 of 2: about 16.6 minutes {rest}; {more}"
    assert two == f"stage 2 of 2: about 16.6 minutes {rest}" and only == f"about 16.6 minutes {rest}"
    left = "16.2 minutes left plus evaluations"
    assert line_one == f"stage 1 of 2   step 30/1000   a 13.5, b 0.5   {left} in this stage"
    assert line_two == f"stage 2 of 2   step 30/1000   a 13.5, b 0.5   {left}"
    assert line_only == f"step 30/1000   a 13.5, b 0.5   {left}"


# ---------------------------------------------------------------- runs

# The clock advances by 7 seconds per step and by `batch` seconds per batch of an evaluation.
TIMED_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from types import SimpleNamespace
import data, distributed, metrics, presets, progress, train_baselines, train_crae
clock = SimpleNamespace(now=0.0)
progress.time = SimpleNamespace(perf_counter=lambda: clock.now)
presets.digits["epoch"], metrics.CPU_EVAL_BATCH = 10, 1024
test_batches, crae = data.test_batches, train_crae.crae

def slow_batches(*args):
    for batch in test_batches(*args):
        clock.now += {batch}
        yield batch

def slow_crae(*args, step, **more):
    clock.now += 7 * (1 + distributed.rank())
    {hook}
    return crae(*args, step=step, **more)

data.test_batches, train_crae.crae = slow_batches, slow_crae
train_crae.train(recipe="paper", steps=20, batch=4, arch="wrn-10-0.25", device="cpu", out=sys.argv[2])
distributed.leave()             # as in cli.run: otherwise gloo sometimes aborts the process at its exit
"""


def test_a_run_without_a_terminal_prints_its_lines_at_once(tmp_path):
    """The run waits in step 16 until this test has seen the line of step 14."""
    code = TIMED_RUN.format(batch=25, hook="step == 15 and sys.stdin.readline()")
    run = subprocess.Popen([sys.executable, "-c", code, str(HERE), str(tmp_path / "run")], text=True,
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = []
    while not (lines and lines[-1].startswith("step 14/20")):
        lines.append(run.stdout.readline())
        assert lines[-1], run.stderr.read()
    rest, errors = run.communicate("go on\n", timeout=100)
    assert run.returncode == 0 and errors == "" and "\r" not in "".join(lines) + rest, errors
    losses = r"class \d\S*, aux \d\S*, rotation_labeled \d\S*, rotation_unlabeled \d\S*   "
    row = r"step 10/20   test error .* %   unlabelled error .* %   rotation accuracy .* %   .* images/s   "
    first, second = (fr"step 10/20   evaluating, unlabelled images {n}%   {losses}1.2 minutes left plus "
                     "evaluations\n" for n in (24, 48))
    # An evaluation has eight batches, so the ten steps and the evaluation that are left take 270 seconds.
    for pattern in (r"about 2.0 minutes left for 17 steps, plus 2 evaluations, which take an unknown time\n",
                    fr"step 4/20   {losses}1.9 minutes left plus evaluations\n", first, second,
                    fr"{row}{losses}4.5 minutes left\n",
                    r"about 4.5 minutes left for 10 steps and 1 evaluation\n",
                    fr"step 14/20   {losses}4.0 minutes left\n"):
        while lines and not re.fullmatch(pattern, lines[0]):
            lines.pop(0)
        assert lines, pattern                                   # all of them, in this order


def in_a_terminal(code, *words):
    """What a program writes to a terminal of 200 columns."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    run = subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stdin=child, stdout=child,
                           stderr=child)
    os.close(child)
    output = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:                                         # the program has ended
            break
        if not piece:
            break
        output += piece
    os.close(parent)
    assert run.wait(100) == 0, output.decode()
    return output.decode()


def test_a_run_in_a_terminal_has_a_bar_and_one_for_long_evaluations(tmp_path):
    code = TIMED_RUN.format(batch=25, hook="")
    output = in_a_terminal(code, HERE, tmp_path / "run")
    bars = [text for text in re.split(r"[\r\n]+", output) if "|" in text]
    losses = r"class \d\S*, aux \d\S*, rotation_labeled \d\S*, rotation_unlabeled \d\S*"
    assert any(re.search(fr"\| 1\d/20, \d\S* \w+ left, {losses}", text) for text in bars), bars
    assert re.search(fr"100%\|.*\| 20/20, {losses}", bars[-1]), bars
    assert any(text.startswith("evaluating, test images: ") for text in bars), bars
    # Between two evaluations' bars, the line is cleared; no such bar remains on the screen.
    assert re.search(r"evaluating[^\r\n]*[\r\n\x1b\[A]+ +[\r\x1b\[A]", output)
    lines = [text.strip() for text in re.split(r"[\r\n]+", output)]
    assert sum(text.startswith("step ") for text in lines) == 2         # only those of the evaluations


def test_a_short_evaluation_has_no_bar(tmp_path):
    output = in_a_terminal(TIMED_RUN.format(batch=0.0, hook=""), HERE, tmp_path / "run")
    assert "20/20" in output and "evaluating" not in output


@pytest.mark.slow
def test_processes_whose_clocks_disagree_finish_and_only_the_first_prints(tmp_path):
    """The second process has a clock twice as fast, so it would read and print at other steps."""
    script = tmp_path / "run.py"
    script.write_text(TIMED_RUN.format(batch=25, hook=""))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script,
               HERE, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200,
                          env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == len(set(lines)) and sum(line.startswith("step 4/20 ") for line in lines) == 1
    assert sum("about" in line for line in done.stdout.splitlines()) == 2


def test_reads_and_lines_do_not_change_the_run(tmp_path, monkeypatch, capsys):
    found, printed = [], []
    for name, seconds in ("often", 0), ("never", 1e9):
        for constant in "READ_EVERY", "FIRST_READ", "LINE_EVERY":
            monkeypatch.setattr(progress, constant, seconds)
        train_crae.train(steps=5, **QUICK, out=str(tmp_path / name))
        found.append(everything_in(tmp_path / name))
        printed.append(sum(line.startswith("step") for line in capsys.readouterr().out.splitlines()))
    assert same(*found) and printed[0] > 5 and printed[1] == 1


def test_fine_tune_prints_its_stages(tmp_path, monkeypatch, capsys):
    train_baselines.train(method="fine_tune", steps=2, **QUICK, out=str(tmp_path / "run"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("stage", "step"))]
    assert [line[:25] for line in lines] == ["stage 1 of 2   step 2/2  ", "stage 2 of 2   step 2/2  "]
