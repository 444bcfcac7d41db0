"""A strict command line on top of Fire. It imports neither torch nor numpy, so it reports typos at once.

A script declares its flags as a table, name: (type, default, help). The type is bool, int, float, str,
`count`, a tuple of choices, a dict that maps choices to values, or a list such as [int] for comma-separated
values. The same table checks calls from Python:

    FLAGS = {"run": (str, WORD, "folder of a run"), "steps": (int, None, "training steps")}

    @strict(FLAGS)
    def train(**flags):         # train(run="x", steps="5") raises Refused: --steps 5: must be a whole number

    run(train, parse(FLAGS, __doc__))           # the command line; errors become one line and an exit code
"""
import difflib
import functools
import inspect
import numbers
import os
import re
import signal
import sys
import textwrap
import threading
from contextlib import contextmanager

import fire

WORD, WORDS = "<word>", "<words>"       # mark positional words: exactly one, or all that remain
WIDTH = 110                             # columns of the help text


class Refused(ValueError):
    """Bad input: the message is one line that names the flag or file, the problem and a remedy."""


class Stopped(KeyboardInterrupt):
    """A signal stopped the run, and its state is saved; the message gives the command that continues it."""

    def __init__(self, number, message=""):
        super().__init__(message)
        self.number = number


def reason(error):
    """Why an operation failed, in one short line: the operating system's message if there is one."""
    causes = (error, error.__context__, error.__cause__)
    system = next((e for e in causes if getattr(e, "strerror", None)), None)
    text = system.strerror if system else str(error) or type(error).__name__
    return textwrap.shorten(text, 150, placeholder=" ...")


# ---------------------------------------------------------------- flags shared by the training scripts


def count(value):
    """The type of --labels: a whole number, or a percentage such as "10%"."""
    return isinstance(value, numbers.Integral) or bool(re.fullmatch(r"\d+(\.\d+)?%", str(value), re.ASCII))


DATASET_FLAGS = {
    "dataset": (str, "digits", """\
digits (embedded), cifar10, cifar100, svhn, svhn_extra, fashion_mnist (downloaded),
imagenet (ILSVRC-2012: --data_dir has train/<wnid>/* and val/<wnid>/*, or the archives),
a file my.npz (keys train_images, train_labels, test_images, test_labels;
optional: unlabeled_images, val_images, val_labels)
or a folder my_folder/ (train/<class>/*, test/<class>/* or val/<class>/*, unlabeled/*;
or <class>/*, unlabeled/*; or any images, with --labels_file)"""),
    "labels": (count, None, """\
number of labelled images to draw from the training set, or a percentage of it such as 10%
(default: the preset's number; for your own data, all training images are labelled).
imagenet: 1% and 10% are the paper's 13,762 and 128,866 images"""),
    "recipe": (("fast", "paper"), None, """\
fast: a small network, small images and a short schedule, for minutes on a CPU (docs/recipe.md)
paper: the paper's settings, for 2^20 steps on a GPU
(default: fast for digits, fashion_mnist and your own data; paper for the others)"""),
    "labels_file": (str, None, """\
table with the header image,label or image,label,split (train, test, val, unlabeled):
listed images are labelled, all others in the folder are unlabelled;
or a file with the names of the labelled images, one per line (as in S4L and SimCLR)"""),
}
# The default name of a run's folder lists the changed flags in this order. With another order, --resume would
# not find the folders of earlier runs.
NETWORK_FLAGS = {
    "arch": (str, None, "wrn-<depth>-<width>, for example wrn-28-2, fast-<width>-<width>-<width>, for "
                        "example fast-32-128-128, or resnet50v2 (default: the preset's)"),
    "steps": (int, None, "training steps (default: the preset's)"),
    "minutes": (float, None, "instead of --steps: train as many steps as fit into this time; "
                             "the run measures its speed first"),
    "pflop": (float, None, "instead of --steps: as many steps as take this many 10^15 FLOPs in all forward "
                           "and backward passes, so that methods can be compared at equal compute"),
    "batch": (int, None, "labelled images per step over all processes (default: the preset's)"),
    "unlabeled": (int, None, "unlabelled images per step over all processes "
                             "(default: 48 with --recipe fast, otherwise as many as labelled ones)"),
    "optimizer": (("adam", "sgd"), None, "adam with decoupled weight decay, or sgd with momentum 0.9 "
                                         "(default: the preset's)"),
    "lr": (float, None, "learning rate (default: the preset's)"),
    "weight_decay": (float, None, "weight decay on conv and dense kernels, decoupled for Adam, L2 for SGD "
                                  "(default: the preset's)"),
}
RUN_FLAGS = {
    "flip": (bool, None, "random horizontal flips (default: the preset's)"),
    "image_size": (int, None, "size in pixels; images are resized by their shorter side and cropped to the "
                              "centre (default: the preset's)"),
    "seed": (int, 0, "seed of the split, the weights and the batches; "
                     "methods with the same seed share their split"),
    "data_dir": (str, "data", "folder of downloaded datasets; a <dataset>.npz in it replaces a download"),
    "out": (str, None, "folder of this run "
                       "(default: runs/<dataset>_<labels>_<method>_<seed>_<differences from the preset>)"),
    "device": (str, None, "cpu, cuda or cuda:<number> (default: cuda if available)"),
    "deterministic": (bool, False, "use deterministic GPU algorithms where torch has them; slower"),
    "save_minutes": (float, 10.0, "save a checkpoint at least this often, in addition to every evaluation"),
    "accumulate": (int, 1, "process each batch in this many parts and add their gradients, to save memory"),
    "precision": (("bf16", "fp32"), None, "bf16 or fp32 (default: bf16 on GPUs and, with --recipe fast, on "
                                          "CPUs that support it; fp32 elsewhere)"),
    "compile": (bool, False, "compile the network with torch.compile: faster steps after about a minute"),
    "sync_bn": (bool, False, "compute BN statistics over the GPUs of all processes (torchrun)"),
    "crop": (("pad", "resized"), None, "pad: reflect-pad and crop, as in MixMatch; resized: random crops of "
                                       "the original files, as in S4L (default: the preset's)"),
    "stream": (bool, None, "read the images of a folder from disk at every step "
                           "(default: only if they do not fit into memory)"),
    "workers": (int, None, "processes that read images from disk (default: one per CPU core)"),
    "skip_broken": (bool, False, "continue without images that cannot be read, and print how many there are"),
    "resume": (bool, False, "continue the run in its folder; if there is none, start it; "
                            "if it is finished, print its result again"),
}


# ---------------------------------------------------------------- values


def from_text(text, kind):
    """Convert text to the flag's type. Returns the text itself if that is not possible."""
    if isinstance(kind, list):
        return [from_text(part, kind[0]) for part in text.split(",")]
    if is_switch(kind):
        return dict(true=True, false=False).get(text.lower(), text)
    if kind in (int, count) and re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        return int(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            return text
    return text


def is_switch(kind):
    """Whether --name and --noname are allowed: for bool, and for choices that accept True and False."""
    return kind is bool or isinstance(kind, dict)


def accepts(value, kind):
    """Whether a Python value has the flag's type."""
    if isinstance(kind, dict):
        return isinstance(value, (bool, str)) and value in kind
    if isinstance(kind, list):
        return isinstance(value, (list, tuple)) and bool(value) and all(accepts(v, kind[0]) for v in value)
    if isinstance(kind, tuple):
        return value in kind
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    types = {int: numbers.Integral, float: numbers.Real, str: (str, os.PathLike)}
    return isinstance(value, types[kind]) if kind in types else kind(value)


def expected(kind):
    """What a flag of this type must be, in words."""
    if isinstance(kind, list):
        return f"{expected(kind[0])}, or several separated by commas"
    if isinstance(kind, (tuple, dict)):
        return "one of " + ", ".join(choice for choice in kind if isinstance(choice, str))
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text",
            count: "a whole number or a percentage such as 10%"}[kind]


def plain(value, kind):
    """The value as a plain Python type, so that it can be written to config.json."""
    if isinstance(kind, list):
        return [plain(v, kind[0]) for v in value]
    if isinstance(kind, dict):
        return kind[value]
    if isinstance(value, (bool, str)):
        return value
    return {int: int, count: int, float: float, str: str}[kind](value)


def check(given, flags):
    """Check the given values. Returns them with the defaults of all other flags, or raises Refused."""
    for name, value in given.items():
        if name not in flags:
            close = difflib.get_close_matches(name, flags, n=1)
            hint = f"did you mean --{close[0]}?" if close else "--help lists the flags"
            raise Refused(f"--{name}: no such flag; {hint}")
        kind, default = kind_of(name, flags), flags[name][1]
        if not (accepts(value, kind) or value is None and default is None or default is WORDS and not value):
            shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            raise Refused(f"{label(name, default)} {shown}: must be {expected(kind)}")
    for name, (kind, default, _) in flags.items():
        if default is WORD and name not in given:
            choices = f", {expected(kind)}" if isinstance(kind, tuple) else ""
            raise Refused(f"{name.upper()} is missing{choices}; --help shows the usage")
    values = {name: [] if default is WORDS else default for name, (_, default, _) in flags.items()}
    return values | {name: value if value is None else plain(value, kind_of(name, flags))
                     for name, value in given.items()}


def kind_of(name, flags):
    """The type of a flag. A flag that takes all remaining words is a list."""
    kind, default, _ = flags[name]
    return [kind] if default is WORDS else kind


def label(name, default):
    return name.upper() if default in (WORD, WORDS) else f"--{name}"


def strict(flags):
    """Decorator: check the arguments, then call the function with every flag as a keyword argument."""
    words = [name for name, (_, default, _) in flags.items() if default is WORD]
    rest = next((name for name, (_, default, _) in flags.items() if default is WORDS), None)
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                  for name, (_, default, _) in flags.items() if default not in (WORD, WORDS)]
    positional = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in words]
    positional += [inspect.Parameter(rest, inspect.Parameter.VAR_POSITIONAL)] if rest else []

    def decorate(function):
        @functools.wraps(function)
        def checked(*args, **given):
            if len(args) > len(words) and not rest:
                raise Refused(f"{args[len(words)]}: unexpected argument; give the flags by name")
            remaining = {rest: list(args[len(words):])} if len(args) > len(words) else {}
            given = dict(zip(words, args)) | remaining | given
            return function(**check(given, flags))

        checked.__signature__ = inspect.Signature([*positional, *parameters])
        checked.__doc__ = f"{inspect.getdoc(function) or ''}\n\n{help_text(flags)}"
        return checked

    return decorate


# ---------------------------------------------------------------- the command line


def parse(flags, doc, argv=None):
    """Parse and check the command line. Returns the given values; exits after --help or on an error."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))      # Ctrl-C while torch is imported: no traceback
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        try:
            print(f"{doc}\n{help_text(flags)}", flush=True)
        except BrokenPipeError:                                 # --help | head
            os._exit(0)
        sys.exit(0)
    try:
        given = read_argv(argv, flags)
        check(given, flags)
    except Refused as error:
        sys.exit(str(error))
    return given


def read_argv(argv, flags):
    """Read the values from argv. Fire alone would call the function before it reports a mistyped flag."""
    if any(re.search(r"[\x00-\x1f\x7f\x85\u2028\u2029]", word) for word in argv):
        raise Refused("a flag contains a control character, such as a line break")
    if "-" in argv or "--" in argv:                             # Fire has its own meaning for them
        raise Refused("a lone - or -- is not a flag; --help lists the flags")
    words, texts = [], {}

    @fire.decorators.SetParseFn(str)                            # leave every value as it was typed
    def gather(*args, **kwargs):
        words.extend(args)
        texts.update({name.removeprefix("given_"): text for name, text in kwargs.items()})

    # The prefix keeps Fire from reading --normal as "no rmal".
    fire.Fire(gather, command=[re.sub(r"^--?(?=[A-Za-z])", "--given_", word) for word in argv])
    given = {}
    for name, (kind, default, _) in flags.items():
        if default is WORD and words:
            given[name] = from_text(words.pop(0), kind)
        elif default is WORDS:
            given[name], words = [from_text(word, kind) for word in words], []
    if words:
        raise Refused(f"{words[0]}: not a flag; flags are written --name value, and --help lists them")
    typed = {*argv, *(word.partition("=")[2] for word in argv)}
    for name, text in texts.items():
        switch = name[2:] if name not in flags and name.startswith("no") else None
        if switch in flags and is_switch(flags[switch][0]):     # --noflip means --flip=False
            if text != "True":
                raise Refused(f"--{name}: takes no value; write --{switch}=True or --{name}")
            given[switch] = False
            continue
        kind = flags[name][0] if name in flags and flags[name][1] not in (WORD, WORDS) else None
        # "True" that was not typed is Fire's stand-in for a missing value.
        if kind and not is_switch(kind) and text == "True" and text not in typed:
            raise Refused(f"--{name}: needs a value")
        given[name if kind or name not in flags else f"{name} "] = from_text(text, kind)
    return given


def help_text(flags):
    """The text that --help prints: the usage, then one entry per flag."""
    words = [name.upper() for name, (_, default, _) in flags.items() if default is WORD]
    words += [f"[{name.upper()} ...]" for name, (_, default, _) in flags.items() if default is WORDS]
    lines = [" ".join(["Usage:", *words, "[--flag value ...]"]),
             "Write --name value or --name=value; "
             "--name and --noname switch a true-or-false flag on and off.", ""]
    for name, (_, default, text) in flags.items():
        if default is True:
            text += f" (default: on; --no{name} turns it off)"
        elif default is False:
            text += " (default: off)"
        elif default is not None and default not in (WORD, WORDS):
            shown = ",".join(map(str, default)) if isinstance(default, list) else default
            text += f" (default: {shown})"
        paragraphs = [textwrap.wrap(line, WIDTH - 18, subsequent_indent=line[:len(line) - len(line.lstrip())])
                      for line in text.splitlines()]
        first, *others = [line for paragraph in paragraphs for line in paragraph]
        lines += [f"  {label(name, default):<15} {first}", *(" " * 18 + line for line in others)]
    return "\n".join([*lines, f"  {'--help':<15} print this text"])


def run(function, arguments):
    """Call the function of a script; every expected error becomes a one-line message and an exit code."""
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    for number in signal.SIGTERM, signal.SIGUSR1:               # until the training loop catches them
        before[number] = signal.signal(number, lambda *_: sys.exit(143))
    try:
        return function(**arguments)
    except Refused as error:
        sys.exit(f"{of_process()}{error}")
    except Stopped as stop:
        if str(stop):
            print(stop, file=sys.stderr)
        sys.exit(128 + stop.number)
    except KeyboardInterrupt:                                   # while data is loaded, or a second Ctrl-C
        sys.exit(130)
    except RuntimeError as error:
        if not lost_process(error):
            raise
        # Flush now: NCCL may wait for the other process until this one ends.
        print(f"{of_process()}another process of this run has ended ({reason(error)}); the checkpoints are "
              "intact, and --resume continues the run", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        leave_processes()


def of_process():
    """The prefix of a message from any process other than the first."""
    distributed = sys.modules.get("distributed")
    return f"process {distributed.rank()}: " if distributed and distributed.rank() else ""


def lost_process(error):
    """Whether a RuntimeError means that another process of the run has died."""
    distributed = sys.modules.get("distributed")
    return (distributed and distributed.world() > 1
            and re.search("(?i)gloo|nccl|connection|peer", str(error)) is not None)


def leave_processes():
    """Leave the process group after success; after an error, the other processes may be waiting in it."""
    distributed = sys.modules.get("distributed")
    if distributed and not sys.exc_info()[0]:
        distributed.leave()


def refuse_torchrun(script):
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise Refused(f"torchrun is for the training scripts, not for {script}")


@contextmanager
def stop_signals():
    """Collect Ctrl-C, SIGTERM and Slurm's SIGUSR1 in a list, so that a loop can finish its step and save.

    A second Ctrl-C interrupts at once. Only the main thread can catch signals; elsewhere the list is empty.
    """
    caught = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def catch(number, frame):
        caught.append(signal.SIGTERM if number == signal.SIGUSR1 else number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, catch)
              for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
