"""What a GPU would object to, found without a GPU: mixed devices, and steps that make the CPU wait for it.

A step only launches work on the GPU. If the CPU needs a value back, or makes a blocking copy to the GPU, it
waits until the GPU is idle, and then the GPU waits for the CPU. The scripts run here on two devices:

    cuda    tensors of FakeTensorMode. They have no data, and autograd does not work: backward is replaced.
    meta    torch's own device without data: the same steps with real backward passes

`Watch` checks every operation. If there is a GPU, the last test runs the same steps on it.
"""
import math
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import augmentation
import contact_sheet
import data
import devices
import distributed
import metrics
import models
import progress
import run_folder
import train_baselines
import train_crae
import training

aten = torch.ops.aten
ALL_ON_ONE_DEVICE = aten.index.Tensor, aten.stack.default, aten.cat.default     # even scalars
MASKED_WRITES = aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default
REFUSED = (AssertionError, DataDependentOutputException, DynamicOutputShapeException,
           FakeTensorDeviceMismatchError, NotImplementedError, RuntimeError)
REAL = SimpleNamespace(generator=torch.Generator, make_model=models.make_model, start=training.start,
                       log_row=training.log_row, save=training.save, after_step=progress.after_step)

# ---------------------------------------------------------------- a device without data


class Watch(TorchDispatchMode):
    """Runs operations on CPU tensors as usual, so that indices are real, and checks those on the device.

    FakeTensorMode and meta refuse .item() and nonzero themselves, but not every index or copy that waits.
    If it may wait, a value that is read back is True, a tensor is 0, and `reads` names the reading function.
    """

    def __init__(self):
        super().__init__()
        self.may_wait, self.reads = True, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:               # torch asks a fake tensor for its device
            return args[0].fake_device
        kwargs, name = dict(kwargs or {}), func.name()
        # In inference mode, composite operations such as .item() arrive in one piece.
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        target = kwargs.get("device")
        if all(d.type == "cpu" for d in [t.device for t in tensors] + ([target] if target else [])):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if kwargs.get("generator"):                             # there is no generator for these devices
            kwargs["generator"] = None
        if self.may_wait and func is aten._local_scalar_dense.default:
            return self.read(True)
        if func is aten._to_copy.default and target and target.type != args[0].device.type:
            if target.type == "cpu":
                return self.read(torch.zeros, args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            assert self.may_wait or kwargs.get("non_blocking"), "a blocking copy to the GPU"
        elif func is aten.copy_.default and len({t.device.type for t in tensors}) > 1:
            waits = not kwargs.get("non_blocking", args[2:] == (True,)) or args[0].device.type == "cpu"
            assert self.may_wait or not waits, "a blocking copy"
        else:                                                   # elsewhere, a CPU scalar is an argument
            kinds = {t.device.type for t in tensors if t.dim() or func in ALL_ON_ONE_DEVICE}
            assert len(kinds) <= 1, f"{name} mixes devices: {kinds}"
        if func in MASKED_WRITES and any(i is not None and i.dtype == torch.bool for i in args[1]):
            # x[mask] = number fills; x[mask] = tensor looks for the positions first, as nonzero does.
            filled = args[2].numel() == 1 and args[2].device.type in ("cpu", "meta")
            assert self.may_wait or filled, f"{name} waits for the positions in a mask"
        return func(*args, **kwargs)

    def read(self, answer, *args, **kwargs):
        """Note the function of ours that reads a value back, and answer."""
        frame = sys._getframe()
        while Path(frame.f_code.co_filename).parent != Path(training.__file__).parent and frame.f_back:
            frame = frame.f_back
        assert self.may_wait, f"{frame.f_code.co_name} reads a value back"
        self.reads.append(frame.f_code.co_name)
        with _disable_current_modes():
            return answer(*args, **kwargs) if callable(answer) else answer


@contextmanager
def watched(device, watch):
    with FakeTensorMode(allow_non_fake_inputs=True) if device == "cuda" else nullcontext(), watch:
        yield


@pytest.fixture(params=["cuda", "meta"])
def device(request):
    return request.param


@pytest.fixture
def strict(device):
    """The device under a watch that allows no waiting."""
    watch = Watch()
    watch.may_wait = False
    with watched(device, watch):
        yield


WAITS = [                                                       # or mixes devices
    lambda x, i: x.sum().item(), lambda x, i: bool(x.sum()), lambda x, i: 1 if x.sum() > 0 else 0,
    lambda x, i: x.sum(0).tolist(), lambda x, i: x.cpu(), lambda x, i: x.nonzero(), lambda x, i: x[x > 0],
    lambda x, i: x.unique(), lambda x, i: x.long().flatten().bincount(), lambda x, i: torch.equal(x, x + 1),
    lambda x, i: x.__setitem__(x[:, 0] > 0, x[0] + 1), lambda x, i: x.repeat_interleave(x[:, 0].long(), 0),
    lambda x, i: x[i], lambda x, i: x[i.to(x.device)], lambda x, i: x + i, lambda x, i: x[0].copy_(i),
    lambda x, i: x.index_select(0, i), lambda x, i: x.index_add_(0, i, x + 1), lambda x, i: i.copy_(x[0]),
    lambda x, i: torch.cat([x[:, 0], i]), lambda x, i: torch.stack([x[0, 0], torch.tensor(1.0)]),
    lambda x, i: i[x[0].long()], lambda x, i: F.one_hot(x[:, 0].long()), lambda x, i: range(x[0, 0].long())]
COPIES = lambda x, i: x[[0, 1]], lambda x, i: torch.tensor([1, 2], device=x.device)     # no copies on meta


def test_what_the_watch_must_notice_works_on_a_cpu():
    for waits in *WAITS, *COPIES:                               # so an error elsewhere is the watch's
        waits(torch.zeros(3, 3), torch.arange(3))


@pytest.mark.parametrize("inference", [False, True])
def test_the_watch_notices_what_waits_or_mixes_devices(inference, device, strict):
    for k, waits in enumerate([*WAITS, *(COPIES if device == "cuda" else ())]):
        with torch.inference_mode(inference):
            x, i = torch.zeros(3, 3, device=device), torch.arange(3)
            try:
                waits(x, i)
            except REFUSED:
                continue
        pytest.fail(f"number {k} of the list was not noticed")


def test_the_watch_accepts_what_does_not_wait(device, strict):
    x, i = torch.zeros(3, 3, device=device), torch.arange(3)
    x = x + torch.tensor(2.0)                                   # a CPU scalar is an argument of the kernel
    x[x > 0] = 0.0
    x = torch.where(x > 0, 1, x)[i.to(device, non_blocking=True)]
    assert x.device.type == device and i.sum().item() == 3      # reading a CPU tensor is free


# ---------------------------------------------------------------- parts of a step


@pytest.mark.parametrize("part", [
    lambda x, gen: augmentation.flip_and_crop(x, True, gen), lambda x, gen: augmentation.rotate4(x)[0],
    lambda x, gen: augmentation.flip_and_crop(x, False, gen), lambda x, gen: augmentation.rotate4(x)[1],
    lambda x, gen: augmentation.scale(x), lambda x, gen: augmentation.strong_augment(x, gen),
    lambda x, gen: augmentation.mix(augmentation.scale(x), [len(x)], gen),
    lambda x, gen: augmentation.mixup_share(len(x), 0.75, gen, x.device),
    lambda x, gen: augmentation.rotated_batch(x, torch.zeros_like(x[:, 0, 0, 0]), x, training.unchanged)[2],
    lambda x, gen: augmentation.rotated_batch(x, x[:, 0, 0, 0], x, training.unchanged, gen, "two", "one")[2],
    lambda x, gen: train_baselines.reversed_batch(x)])
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("share", [(0, 1, 0, 1), (1, 2, 1, 2)], ids=["one process", "two processes"])
def test_augmentation(part, share, device, strict, monkeypatch):
    monkeypatch.setattr(distributed.dist, "all_gather", lambda gathered, x: None)
    x = torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device=device)
    with distributed.share_of_batch(*share):
        for gen in None, torch.Generator():
            result = part(x, gen)
            assert result.device.type == device and len(result) % 4 == 0


# ---------------------------------------------------------------- steps


class Streamed:
    """Images on disk, as folders.Files: they arrive on the device, while the indices stay on the CPU."""

    def __init__(self, n, size):
        self.shape = n, 3, size, size

    def batches(self, plan, device):
        for items in plan:
            yield torch.zeros(len(items), *self.shape[1:], dtype=torch.uint8, device=device)


def small_data(config):
    """Images, labels, split and classes in place of run_folder.load_data."""
    n, size, config["data"] = 48, config["image_size"] or 8, ""
    split = dict(labeled=np.arange(8), unlabeled=np.arange(8, 40), validation=np.arange(32, 40),
                 test=np.arange(40, 48))
    classes = 1000 if size == 64 else 10
    memory = torch.zeros(n, 3, size, size, dtype=torch.uint8)
    images = Streamed(n, size) if config["dataset"] == "imagenet" else memory
    return images, torch.arange(n) % classes, split, [str(c) for c in range(classes)]


@pytest.fixture
def loop(monkeypatch, tmp_path):
    """The scripts without their files and evaluations. The test sets two hooks:

    before(state) is called before the first step, after() after the last one.
    """
    hooks = SimpleNamespace(out=tmp_path / "run")

    def start(*args, **loop):
        state = REAL.start(*args, **loop)
        hooks.before(state)
        return state

    monkeypatch.setattr(run_folder, "load_data", small_data)
    monkeypatch.setattr(run_folder, "write_config", lambda *_: None)
    monkeypatch.setattr(run_folder, "write_split_csv", lambda *_: None)
    monkeypatch.setattr(contact_sheet, "write", lambda *_: None)
    monkeypatch.setattr(training, "resume", lambda state, *_: setattr(state, "rows", []))
    monkeypatch.setattr(training, "start", start)
    monkeypatch.setattr(training, "log_row", lambda *_: hooks.after())
    monkeypatch.setattr(training, "save", lambda *_: None)
    monkeypatch.setattr(training, "finish", lambda *_: None)
    monkeypatch.setattr(progress, "FIRST_READ", math.inf)       # even if two steps take more than ten seconds
    monkeypatch.setattr(train_baselines, "find_pretrained", lambda path, source, config: models.make_model(
        config["arch"], 2, 0).backbone.state_dict())
    return hooks


def take_steps(script, flags, out):
    """Call a script's train(...): two steps of a small network, or one step in ImageNet's setting."""
    small = dict(image_size=64, steps=1) if "dataset" in flags else dict(arch="wrn-10-0.25", steps=2)
    script.train(**dict(recipe="paper", batch=4, out=str(out)) | small | flags)


def without_data(device, loop, monkeypatch):
    """Replace what does not work on a device without data. Returns the watch, which lets no step wait."""
    watch = Watch()

    def make_model(*args, **kwargs):
        with torch.device(device):
            net = REAL.make_model(*args, **kwargs)
        net.again = partial(make_model, *args, **kwargs)
        return net

    def before(state):
        watch.may_wait = False

        def backward(loss):
            assert loss.requires_grad and loss.shape == () and loss.device.type == device
            for w in filter(lambda w: w.requires_grad, state.weights):
                w.grad = torch.empty_like(w)

        if device == "cuda":
            monkeypatch.setattr(torch.Tensor, "backward", backward)

    loop.before, loop.after = before, lambda: setattr(watch, "may_wait", True)
    monkeypatch.setattr(devices, "select", lambda *_: device)
    monkeypatch.setattr(devices, "warn_of_memory", lambda *_, **__: None)
    monkeypatch.setattr(torch, "Generator", lambda device=None: REAL.generator())
    monkeypatch.setattr(metrics, "samples", lambda labels, index, seed, quick: dict(
        sample=index["unlabeled"], quick_sample=index["unlabeled"][:5], quick_test=index["test"][:5],
        raw_test=index["test"]))
    monkeypatch.setattr(models, "make_model", make_model)
    # copy.deepcopy and Module.to would mix fake modes.
    monkeypatch.setattr(training, "copy", SimpleNamespace(deepcopy=lambda net: net.again()))
    monkeypatch.setattr(models.Net, "to", lambda net, *_, **__: net)
    if device == "cuda":
        monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        monkeypatch.setattr(torch.autograd, "grad", lambda y, x: [torch.empty_like(x)])
        with devices.autocast("cuda", "bf16")():
            assert torch.is_autocast_enabled("cuda")            # steps run in bfloat16, as on a GPU
    else:                                                       # meta has neither autocast nor fused Adam
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        monkeypatch.setattr(training, "make_adam",
                            lambda net, lr, weight_decay, beta2: training.make_sgd(net, lr, weight_decay))
    return watch


IMAGENET = dict(dataset="imagenet", labels="10%")
FAST = dict(recipe="fast", arch="fast-4-4-4")
CASES = [
    *((train_crae, dict(select=select)) for select in train_crae.FLAGS["select"][0]),
    *((train_crae, dict(aux=aux)) for aux in ("all", "none")),
    *((train_crae, flags) for flags in (
        dict(plus=True), dict(ext1=True), dict(ext2=True), dict(entmin=True), dict(entmin=True, ext2=True),
        dict(heads=0), dict(heads=0, ext1=True), dict(select="random", heads=3), dict(rot_dim=4),
        dict(plus=True, flip=True, accumulate=2), IMAGENET, IMAGENET | dict(plus=True))),
    *((train_baselines, dict(method=method)) for method in train_baselines.OBJECTIVES),
    *((train_baselines, dict(method="s4l") | flags) for flags in (
        dict(class_copies="upright"), dict(rotations="one"), IMAGENET)),
    (train_baselines, dict(method="mixmatch", accumulate=2)),
    *((train_crae, FAST | flags) for flags in (
        dict(), dict(plus=True), dict(rotations="one"), dict(mixmatch=True))),
    *((train_baselines, FAST | dict(method=method)) for method in ("s4l", "fixmatch")),
]
NAMES = [" ".join([script.__name__[6:], *(f"{k}={v}" for k, v in flags.items())]) for script, flags in CASES]


@pytest.mark.parametrize("script, flags", CASES, ids=NAMES)
def test_no_step_mixes_devices_or_waits(script, flags, device, loop, monkeypatch):
    watch = without_data(device, loop, monkeypatch)
    with watched(device, watch):
        take_steps(script, flags, loop.out)
    assert not any(isinstance(data.permutation(8, 0, "labeled", k), FakeTensor) for k in range(4))


@pytest.mark.parametrize("script, flags", [
    (train_crae, dict(plus=True)), (train_crae, dict(select="random")), (train_baselines, dict(method="ict")),
    (train_baselines, dict(method="mixmatch")), (train_baselines, dict(method="mixup", accumulate=2))],
    ids=["crae plus", "crae random", "ict", "mixmatch", "mixup accumulate"])
def test_no_step_of_one_of_two_processes_waits(script, flags, device, loop, monkeypatch):
    """Without the exchange itself, and without DDP."""
    watch = without_data(device, loop, monkeypatch)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "parallel", lambda net: net)
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(distributed.dist, "all_gather", lambda *_: None)
    with watched(device, watch):
        take_steps(script, flags, loop.out)


# ---------------------------------------------------------------- evaluations and checkpoints

# The sums of the losses; a check before the row and one before the checkpoint; whether the averaged weights
# differ; the unlabelled images; validation, test, and test with the weights themselves.
READS = Counter(log_row=1, check_finite=2, differ=1, measure_unlabeled=1, error_rates=3)


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("script, flags", [
    (train_crae, dict(plus=True)), (train_crae, dict(heads=0)), (train_baselines, dict(method="swa")),
    (train_crae, IMAGENET | dict(arch="wrn-10-0.25", image_size=8))],
    ids=["crae", "no rotation", "swa", "image files"])
def test_an_evaluation_reads_back_once_per_set_and_not_per_batch(script, flags, device, loop, monkeypatch):
    reads = {}
    for images_per_batch in 1024, 16:                           # one or several batches per set
        watch = without_data(device, loop, monkeypatch)

        def allowed(function, *args):
            watch.may_wait, watch.reads = True, watch.reads if function is REAL.save else []
            function(*args)

        monkeypatch.setattr(metrics, "EVAL_BATCH", images_per_batch)
        monkeypatch.setattr(FakeTensor, "tolist", lambda x: x.cpu().tolist())   # its own reads value by value
        monkeypatch.setattr(training, "log_row", partial(allowed, REAL.log_row))
        monkeypatch.setattr(training, "save", partial(allowed, REAL.save))
        monkeypatch.setattr(run_folder, "save_checkpoint", lambda *_: None)
        with watched(device, watch):
            take_steps(script, flags | dict(steps=1), loop.out / str(images_per_batch))
        reads[images_per_batch] = Counter(watch.reads)
    assert reads[1024] == reads[16] == READS


@pytest.mark.parametrize("device", ["cuda"])
def test_the_losses_are_read_once_per_ten_seconds_and_all_at_once(device, loop, monkeypatch):
    """Steps of four seconds: reads after steps 1, 4 and 7, that is after 4, 16 and 28 seconds."""
    watch, clock, reads = without_data(device, loop, monkeypatch), SimpleNamespace(now=0.0), []

    def after_step(shown):
        clock.now, watch.may_wait, watch.reads = clock.now + 4, True, []
        REAL.after_step(shown)
        watch.may_wait = False
        reads.append(watch.reads)

    monkeypatch.setattr(progress, "FIRST_READ", 3)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(progress, "after_step", after_step)
    monkeypatch.setattr(FakeTensor, "tolist", lambda x: x.cpu().tolist())       # its own reads value by value
    with watched(device, watch):
        take_steps(train_crae, dict(plus=True, steps=8), loop.out)
    assert [step for step, of_step in enumerate(reads, 1) if of_step] == [1, 4, 7]
    assert sum(reads, []) == ["read_losses"] * 3


# ---------------------------------------------------------------- a real GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("script, flags", CASES, ids=NAMES)
def test_no_step_waits_on_a_real_gpu(script, flags, loop):
    def after():
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.zeros(1, device="cuda").item()                # the mode was on
        torch.cuda.set_sync_debug_mode("default")

    loop.before, loop.after = lambda state: torch.cuda.set_sync_debug_mode("error"), after
    try:
        take_steps(script, flags | dict(device="cuda"), loop.out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
