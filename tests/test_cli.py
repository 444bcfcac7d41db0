"""The command line: random flags, calls from Python, signals; and which file imports which."""
import ast
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import budget
import cli
import devices
import train_baselines
import train_crae
import training
from helpers import HERE, command_line, run_script

TRIED = settings(max_examples=500, deadline=None, database=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SCRIPTS = ["train_crae.py", "train_baselines.py", "evaluate.py", "ablations.py", "report.py", "benchmark.py",
           "demo.py"]

# ---------------------------------------------------------------- random flags

GOOD = dict(dataset=["digits"], labels=["50", "100"], steps=["1", "7"], batch=["1", "8"], lr=["0.1", "1e-3"],
            weight_decay=["0", "0.1"], seed=["0", "7"], eta=["0.5", "2"], eta2=["1"],
            temperature=["0.5", "1"], image_size=["8", "16"], rot_dim=["1", "16"], heads=["0", "10"],
            weight=["0", "3.5"], save_minutes=["0.5"], out=["new", "new/er"],
            select=["marginal", "detach", "random"], arch=["wrn-10-1", "wrn-16-0.5"])
NUMBERS = st.sampled_from(["0", "1", "99999999999", "1%", "200%", "%", "3", "10", "50", "100", "-1", "1e3",
                           "1e-3", "0.5", "nan", "inf", "1e999", "many", "", "9" * 30, "0x10", "５", "5\n",
                           "x\ny", "\r"])
BOOLS = st.sampled_from(["true", "false", "True", "FALSE", "maybe", "1", ""])
WORDS = st.sampled_from(["", "x", "x\ny", "\u2028", "a b", "ö", "--", "-", "../x", "x\0y", "runs/x", "$(x)",
                         "[1]", "{'a': 1}", "None", "x" * 300, "--steps"])
SMALL_NETS = st.sampled_from(["wrn-10-99999999", "wrn-100000-1", "wrn-10-1", "wrn-10-0.25", "wrn-16-0.5",
                              "wrn-11-1", "wrn-10-0", "vgg", "wrn-10--1", "WRN-10-1", ""])
DATASETS = st.sampled_from(["digits", "digits", "digits", "nothing", "", ".", "x.npz", "/dev/null", "x" * 300,
                            "x/" * 2500, "imagenet"])
METHODS = st.sampled_from([*train_baselines.OBJECTIVES, *train_baselines.OBJECTIVES, "crae", "", "FixMatch"])


def values(kind):
    """Likely and unlikely texts for a flag of this type."""
    if isinstance(kind, (tuple, dict)):
        return st.sampled_from([*map(str, kind), "x"])
    if isinstance(kind, list):                                  # several values with commas
        return values(kind[0]) | st.lists(values(kind[0]), max_size=3).map(",".join)
    likely = {bool: BOOLS, int: NUMBERS, float: NUMBERS, cli.count: NUMBERS, str: WORDS}
    return likely[kind] | st.text(max_size=5)


def command_lines(flags, **fixed):
    """Lists of words: known flags with good and bad values in all notations, unknown flags, stray words."""
    kinds = {name: kind for name, (kind, _, _) in flags.items() if name not in ("device", "data_dir")}

    def good_word(name):
        return st.sampled_from(GOOD[name]).map(lambda value: [f"--{name}={value}"])

    def any_word(name):
        return (fixed[name] if name in fixed else values(kinds[name])).flatmap(lambda value: st.sampled_from([
            [f"--{name}={value}"], [f"--{name}", str(value)], [f"--{name}"], [f"--no{name}"],
            [f"-{name}", str(value)]]))

    good = st.sampled_from(sorted(kinds.keys() & GOOD.keys())).flatmap(good_word)
    any_value = st.sampled_from(sorted(kinds)).flatmap(any_word)
    stray = st.sampled_from([["word"], ["--unknown", "3"], ["--lable=3"], ["--"], ["-"], ["--steps"]])
    sane = st.lists(good, max_size=6)
    wild = st.lists(st.one_of(any_value, any_value, any_value, good, stray), max_size=6)
    one_wild = st.tuples(st.lists(good, max_size=3), any_value).map(lambda pair: [*pair[0], pair[1]])
    return st.one_of(sane, wild, one_wild, one_wild).map(lambda parts: sum(parts, []))


def under_fire(script, words, monkeypatch, folder, counted):
    """Either training could begin with these words, or the error is one line; no folder is left behind."""
    begun = []

    def fit(net, objective, loaded, config, **loop):
        begun.append(config)
        return {}

    monkeypatch.chdir(folder)
    monkeypatch.setattr(training, "fit", fit)
    monkeypatch.setattr(budget, "measure", lambda *rest: (0.01, 0.1, 0.5))     # seconds; trains nothing
    monkeypatch.setattr(devices, "step_flops", lambda *rest: 1e9)
    monkeypatch.setattr(train_baselines, "stage_one", lambda net, *rest: net.backbone.state_dict())
    try:
        command_line(script, words)
    except SystemExit as stop:
        if {"--help", "-h"} & set(words):
            assert stop.code == 0, words
        else:
            assert isinstance(stop.code, str) and len(stop.code.splitlines()) == 1, (words, stop.code)
        assert not begun, words
    else:
        assert begun, words
        for config in begun:
            assert config["steps"] > 0 and config["batch"] > 0 and config["lr"] > 0
            assert Path(config["out"]).name
            json.dumps(config)
    assert not list(folder.iterdir()), words
    counted["resolved" if begun else "refused"] += 1


@pytest.mark.slow
@pytest.mark.parametrize("script, fixed", [
    (train_crae, dict(arch=SMALL_NETS, dataset=DATASETS)),
    (train_baselines, dict(arch=SMALL_NETS, dataset=DATASETS, method=METHODS))])
def test_random_flags_resolve_or_give_a_one_line_error(script, fixed, monkeypatch, tmp_path):
    counted = dict(resolved=0, refused=0)
    prefix = [] if script is train_crae else ["--method=pi_model"]

    @TRIED
    @given(command_lines(script.FLAGS, **fixed), st.booleans())
    def fire_at(words, with_method):
        under_fire(script, (prefix if with_method else []) + words, monkeypatch, tmp_path, counted)

    fire_at()
    assert counted["resolved"] > 20 and counted["refused"] > 100, counted


@pytest.mark.slow
@pytest.mark.parametrize("script", [train_crae, train_baselines])
def test_every_flag_with_every_odd_value_alone(script, monkeypatch, tmp_path):
    """Finds the errors that a list of random flags hides behind its first mistake."""
    odd = ["0", "-1", "1e3", "nan", "inf", "9" * 30, "99999999999", "", "x", "x" * 300, "x/" * 900, "１",
           "1%", "101%", "0%", "-5%", "true", "None"]
    first, counted = ["--method=fine_tune"] if script is train_baselines else [], dict(resolved=0, refused=0)
    for name in script.FLAGS:
        if name not in ("device", "data_dir", "resume"):
            for value in odd:
                under_fire(script, [*first, f"--{name}={value}"], monkeypatch, tmp_path, counted)
    assert counted["resolved"] > 10 and counted["refused"] > 200, counted


# ---------------------------------------------------------------- calls from Python


@pytest.mark.parametrize("train", [train_crae.train, train_baselines.train])
@pytest.mark.parametrize("flags, message", [
    (dict(labels="50"), "--labels 50: must be a whole number or a percentage such as 10%"),
    (dict(steps="5"), "--steps 5: must be a whole number"),
    (dict(steps=5.0), "--steps 5.0: must be a whole number"),
    (dict(steps=True), "--steps True: must be a whole number"),
    (dict(lr="0.1"), "--lr 0.1: must be a number"),
    (dict(compile=1), "--compile 1: must be true or false"),
    (dict(dataset=3), "--dataset 3: must be text"),
    (dict(seed=None), "--seed None: must be a whole number"),
    (dict(precision="fp16"), "--precision fp16: must be one of bf16, fp32"),
    (dict(lables=50), "--lables: no such flag; did you mean --labels?"),
    (dict(unlike_any_other=1), "--unlike_any_other: no such flag; --help lists the flags")])
def test_a_wrong_type_or_flag_in_python_raises_refused(train, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cli.Refused) as stop:                    # not SystemExit, which would end a notebook
        train(**flags)
    assert str(stop.value) == message and isinstance(stop.value, ValueError)
    assert not list(tmp_path.iterdir())


def test_crae_plus_must_be_true_or_false_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cli.Refused) as stop:
        train_crae.train(plus=1)
    assert str(stop.value) == "--plus 1: must be true or false"


def test_positional_arguments_are_refused_in_python():
    with pytest.raises(cli.Refused, match="^cifar10: unexpected argument; give the flags by name$"):
        train_crae.train("cifar10")


def test_the_remaining_words_are_a_list_from_python_and_from_the_command_line():
    flags = {"what": (("a", "b"), cli.WORD, "x"), "files": (str, cli.WORDS, "x"), "n": (int, 3, "x")}
    call = cli.strict(flags)(lambda **values: values)
    expected = dict(what="a", files=["x", "y z"], n=3)
    assert call("a", "x", "y z") == call("a", files=["x", "y z"]) == expected
    assert call(**cli.read_argv(["a", "x", "y z"], flags)) == expected
    assert call("a")["files"] == call(**cli.read_argv(["a"], flags))["files"] == []


# ---------------------------------------------------------------- signals


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_while_the_data_is_loaded(number, tmp_path):
    """Slurm's signal must not look like a crash, whenever it arrives."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import time, cli, data, train_crae\n"
            "data.load = lambda *rest, **kwargs: (print('loading', flush=True), time.sleep(60))\n"
            "cli.run(train_crae.train, cli.parse(train_crae.FLAGS, '', ['--out', sys.argv[2]]))")
    run = subprocess.Popen([sys.executable, "-c", code, HERE, tmp_path / "run"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "loading\n"
    run.send_signal(number)
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 143 and not errors and not (tmp_path / "run").exists()


# Runs a script as __main__, prints a line when torch is first imported, then imports it as usual.
ANNOUNCE = """
import runpy, sys
class Announce:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("importing torch", flush=True)
sys.meta_path.insert(0, Announce())
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NEEDED = {"evaluate.py": ["test", "nowhere"], "ablations.py": ["components"], "report.py": ["nowhere"]}


@pytest.mark.parametrize("script", [
    SCRIPTS[0], *(pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS[1:])])
def test_ctrl_c_while_torch_is_imported_prints_no_traceback(script, tmp_path):
    command = [sys.executable, "-c", ANNOUNCE, HERE / script, *NEEDED.get(script, [])]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "importing torch\n", run.communicate()
    time.sleep(0.5)                                             # the import takes more than a second
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=20)
    assert run.returncode == 130 and not output and not errors


# ---------------------------------------------------------------- imports


def best_of_three(*commands):
    """The shortest of three times of each command, in seconds; the commands take turns."""
    times = [[] for _ in commands]
    for _ in range(3):
        for command, seconds in zip(commands, times):
            start = time.perf_counter()
            command()
            seconds.append(time.perf_counter() - start)
    return map(min, times)


@pytest.mark.slow
def test_a_mistyped_flag_is_refused_in_less_time_than_torch_is_imported(tmp_path):
    def refuse():
        done = run_script("train_crae.py", "--lables=5", cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr == "--lables: no such flag; did you mean --labels?\n" and not done.stdout

    def import_torch():
        subprocess.run([sys.executable, "-c", "import torch"], check=True)

    refused, imported = best_of_three(refuse, import_torch)
    assert refused < imported, (refused, imported)


PARSE_ALL = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
import cli, presets

def parse(flags, doc, argv=None):
    print(*{"torch", "torchvision", "numpy", "matplotlib", "PIL"} & sys.modules.keys(), len(flags))
    sys.exit()

cli.parse = parse
for script in sys.argv[1:]:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        pass
"""


def test_neither_cli_nor_presets_nor_the_tables_of_flags_import_torch():
    done = subprocess.run([sys.executable, "-c", PARSE_ALL, HERE, *(HERE / script for script in SCRIPTS)],
                          capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(SCRIPTS) and all(line.isdigit() and int(line) > 0 for line in lines), done.stdout


# A file may import files of its own and of earlier groups, but not in a circle.
ORDER = [["cli"], ["losses", "models", "presets", "devices", "distributed", "tables"],
         ["augmentation", "listing", "progress"], ["folders"], ["data"], ["inventory", "settings"],
         ["metrics"], ["run_folder"], ["contact_sheet"],
         ["training", "results", "predictions", "exports", "overview", "pages"], ["budget"],
         ["claims", "sweeps", "estimates", "timing", *(Path(script).stem for script in SCRIPTS)]]


@pytest.fixture(scope="module")
def imports():
    """{module: all modules that it imports, also inside functions}"""
    found = {}
    for path in HERE.glob("*.py"):
        found[path.stem] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[path.stem] |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                found[path.stem].add(node.module.split(".")[0])
    return found


def test_imports_point_in_one_direction(imports):
    assert imports.keys() == {*sum(ORDER, []), "plots", "sheets"}     # a new file needs a place in the order
    group = {name: i for i, names in enumerate(ORDER) for name in names}
    for name, i in group.items():
        later = {other for other in imports[name] & group.keys() if group[other] > i}
        assert not later, f"{name}.py imports {', '.join(later)}"


def test_imports_do_not_form_a_circle(imports):
    left = {name: others & imports.keys() for name, others in imports.items()}
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        assert free, f"in a circle: {', '.join(left)}"
        for name in free:
            del left[name]


def test_what_single_files_import(imports):
    ours = imports.keys()
    assert imports["cli"] <= sys.stdlib_module_names | {"fire"}
    assert imports["presets"] <= sys.stdlib_module_names
    assert imports["losses"] == {"torch"}
    assert not imports["plots"] & ours and imports["sheets"] & ours == {"plots"}
    assert {name for name in ours if "matplotlib" in imports[name]} == {"plots", "sheets"}
