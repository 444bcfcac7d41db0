"""The device: selection, precision, memory and speed."""
import copy
import ctypes
import math
import os
import re
import time
from functools import partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import cli
import distributed
from models import frozen_bn


def select(device, deterministic=False):
    """Set up the device for speed or, if `deterministic`, for reproducible results. Returns its name.

    None means a GPU if there is one. Under torchrun, each process gets the GPU of its local rank.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device != "cuda":
            raise cli.Refused(f"--device {device}: under torchrun each process has its own GPU; "
                              "omit the flag, or give cpu or cuda")
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise RuntimeError
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):                      # no such device, or torch without CUDA
        raise cli.Refused(f"--device {device}: torch finds no such device here; "
                          "omit the flag, or give cpu, cuda or cuda:<number>") from None
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")              # TF32 where autocast keeps float32
        torch.backends.cudnn.benchmark = not deterministic      # all training batches have the same shape
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")             # required by cuBLAS
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    return device


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4                          # from glibc's malloc.h


def keep_freed_memory():
    """Tell glibc to keep freed blocks for the next step instead of returning them to the system.

    Otherwise, each step pays for the page faults of all its activations again (docs/speed.md). Call it after
    the images are loaded, because loading needs memory that training does not. Other systems have no mallopt
    and stay as they are.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
    except (OSError, AttributeError):
        pass


def synchronize(device):
    """Wait for a GPU to finish its work; on a CPU there is nothing to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def default_precision(device, cpu_precision):
    """bf16 on GPUs; on a CPU, what the recipe asks for if the CPU has instructions for it, otherwise fp32."""
    if torch.device(device).type == "cuda":
        return "bf16"
    return cpu_precision if has_bf16() else "fp32"


def has_bf16():
    """Whether the CPU multiplies bfloat16 in hardware (AVX512_BF16 or AMX); in software it is slower."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def autocast(device, precision):
    """Returns a function that creates an autocast context for precision bf16 or fp32."""
    return partial(torch.autocast, torch.device(device).type, torch.bfloat16, enabled=precision == "bf16")


def cores():
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):                        # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory(device):
    """Bytes that can still be allocated on a device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):                            # not Linux: count all physical memory
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:                                                        # a container or Slurm may allow less
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text())
                       for name in ("memory.max", "memory.current"))
        return min(free, limit - used)
    except (OSError, ValueError):                               # "max" means no limit
        return free


def warn_of_memory(net, objective, size, config, *, unlabeled, augment, gen):
    """Print a note before the first step if a step would not fit into memory.

    The memory that a step keeps for its backward pass is measured on a few images and scaled up.
    """
    device, autocast_on = gen.device, autocast(gen.device, config["precision"])
    labeled = config["batch"] // (distributed.world() * config["accumulate"])   # labelled images per pass
    mu = math.ceil(unlabeled / config["batch"])                 # unlabelled images per labelled one, at most
    free = free_memory(device) / (1 if device.type == "cuda" else distributed.processes_here())
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    state = weights * (3 if config["optimizer"] == "adam" else 2)       # with gradients and optimiser state

    def forward(n):
        with frozen_bn(net), autocast_on():
            return net(torch.zeros(n, 3, size, size, device=device))

    fixed, each = kept_for_backward(net, forward)
    if state + fixed + each * labeled * 16 * max(1, mu) < free:         # no method makes more copies
        return
    model = copy.deepcopy(net)

    def step(n):
        x = torch.zeros(n + n * mu, 3, size, size, dtype=torch.uint8, device=device)
        y = torch.zeros(n, dtype=torch.int64, device=device)
        with autocast_on():
            return objective(model, x[:n], y, x[n:], augment=augment, gen=gen, step=0,
                             ema=copy.deepcopy(model))

    fixed, each = kept_for_backward(model, step)
    need = {n: state + fixed + each * (labeled // n) for n in range(1, labeled + 1) if labeled % n == 0}
    if need[1] > free:
        n = next((n for n in need if need[n] < free), labeled)
        print(f"note: a step needs about {need[1] / 2 ** 30:.1f} GiB, "
              f"but {device} has {free / 2 ** 30:.1f} GiB free; "
              f"--accumulate {n * config['accumulate']} would need about {need[n] / 2 ** 30:.1f} GiB",
              flush=True)


def kept_for_backward(model, forward):
    """Bytes that forward(n images) keeps for its backward pass, without the weights: (fixed, per image)."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(n):
        sizes = {}

        def keep(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = forward(n)                                 # keep it alive, or its memory may be reused
        del result
        return sum(size for place, size in sizes.items() if place not in weights)

    two, four = kept(2), kept(4)                                # includes autocast's copies of the weights
    return two - (four - two), (four - two) / 2


# ---------------------------------------------------------------- speed


def step_flops(build, config, num_classes, image_size):
    """FLOPs of one training step: convolutions and matrix products, forward and backward, whole batch.

    build(config, num_classes) returns the network, the objective and the arguments of training.fit, as in the
    training scripts. Nothing is computed: the tensors are fake. (The meta device has no autocast, which some
    objectives use.) Augmentation is left out, because it has hardly any FLOPs of this kind.
    """
    with FakeTensorMode():
        net, objective, loop = build(config, num_classes)
        n, unlabeled = config["batch"], loop["unlabeled"]
        x = torch.zeros(n + unlabeled, 3, image_size, image_size, dtype=torch.uint8)
        y = torch.zeros(n, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            terms = objective(net, x[:n], y, x[n:], augment=lambda x: x, gen=None, step=0, ema=net)
            sum(terms.values()).backward()
    return counter.get_total_flops()


# Pixels per measurement; we chose enough to keep a device busy: 64 and 4096 images of 32 x 32 pixels.
RATE_PIXELS = dict(cpu=2 ** 16, cuda=2 ** 22)


def flop_rate(net, config, image_size, seconds=3):
    """FLOP/s of a network, forward and backward, on the device and at the precision of a run.

    Measured for `seconds` on at most as many images as a step of CRAE has (four rotations of each image).
    """
    device = torch.device(config["device"])
    net = net.to(device, memory_format=torch.channels_last).train()
    copies = min(8 * config["batch"] // config["accumulate"], RATE_PIXELS[device.type] // image_size ** 2)
    x = torch.zeros(max(4, copies), 3, image_size, image_size, device=device)
    x = x.contiguous(memory_format=torch.channels_last)

    def forward_and_backward():
        with autocast(device, config["precision"])():
            heads = net(x)
        sum(logits.float().sum() for logits in heads if logits is not None).backward()
        synchronize(device)

    with FlopCounterMode(display=False) as counter:             # warms up, too
        forward_and_backward()
    times = []
    while sum(times) < seconds:
        before = time.perf_counter()
        forward_and_backward()
        times.append(time.perf_counter() - before)
    return counter.get_total_flops() / min(times)               # the pass least disturbed by other programs
