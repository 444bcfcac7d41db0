"""torchrun: several processes train one model. Without it, there is one process and nothing to communicate.

Every process holds the same weights and trains on its share of each batch; only the first writes and prints.
A batch is split across processes, and within a process into parts (--accumulate). Random numbers are drawn
for the whole batch and each part keeps its own rows, so n processes see what one process would see.
"""
import functools
import os
import sys
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Every use of randomness has its own stream. Seed, stream and step determine all numbers.
STREAMS = dict(split=0, labeled=1, unlabeled=2, training=3, sample=4, crops=5, sheet=6)


def seed_of(seed, stream, *place):
    """A seed derived from (seed, stream, step), so that a step does not depend on earlier ones."""
    return int(np.random.SeedSequence((seed, STREAMS[stream], *place)).generate_state(1)[0])


# ---------------------------------------------------------------- processes


def join(device):
    """Join the other processes that torchrun started."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return
    store, number, processes = next(dist.rendezvous("env://"))
    # After a restart by torchrun, processes must not find the addresses of dead ones in the store. Each
    # machine counts its own restarts, so several machines need a new store from torchrun (docs/scaling.md).
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "cpu:gloo" + (",cuda:nccl" if device != "cpu" else "")            # `agree` uses gloo
    dist.init_process_group(backend, store=store, rank=number, world_size=processes)
    if rank():
        sys.stdout = open(os.devnull, "w")


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def processes_here():
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def hide_bar():
    """For tqdm's `disable`: None shows a bar on a terminal. Only the first process has one."""
    return True if int(os.environ.get("RANK", 0)) else None


def agree(*numbers):
    """The largest value of each number over all processes, so that all of them decide alike.

    The exchange runs on the CPU, so no process waits for a GPU.
    """
    if world() == 1:
        return numbers
    numbers = torch.tensor(numbers, dtype=torch.float64)        # exact for every count and checksum used here
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def wait_for_all():
    agree(0)


def total(x):
    """The sum of a tensor over all processes."""
    if world() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def average_bn(net):
    """Replace the BN statistics of each process with their mean over all processes, as in a joint update."""
    if world() > 1:
        buffers = [b for b in net.buffers() if b.is_floating_point()]
        means = total(torch.cat([b.flatten() for b in buffers])) / world()
        means = means.split([b.numel() for b in buffers])
        torch._foreach_copy_(buffers, [m.view_as(b) for m, b in zip(means, buffers)])


def parallel(net):
    """The module to call in training: the network, wrapped in DDP if there are several processes."""
    if world() == 1:
        return net
    return DistributedDataParallel(net, forward_sync_buffers=False, gradient_as_bucket_view=True)


def sync_gradients(model, when):
    """Context for a backward pass: in DDP, gradients are only exchanged after the last part of a batch."""
    return nullcontext() if when or not isinstance(model, DistributedDataParallel) else model.no_sync()


def first_process_only(write):
    """Decorator for functions that write to the run folder."""
    @functools.wraps(write)
    def maybe(*args, **kwargs):
        if rank() == 0:
            return write(*args, **kwargs)
    return maybe


# ---------------------------------------------------------------- a share of a batch

_share = (0, 1, 0, 1)                   # this process, number of processes, this part, number of parts


@contextmanager
def share_of_batch(rank, world, part, parts):
    """Inside, tensors hold one part of a process's share of a batch; draws are made for the whole batch."""
    global _share
    before, _share = _share, (rank, world, part, parts)
    try:
        yield
    finally:
        _share = before


def is_split():
    """Whether several processes share the batch."""
    return _share[1] > 1


def global_size(n):
    """The number of images in the whole batch if n of them are local."""
    return n * _share[1] * _share[3]


def local_rows(drawn, sizes=None):
    """The rows for the local images, out of those drawn for the whole batch.

    A batch consists of one or more sets (for example the rotations of labelled and of unlabelled images), and
    each set is split separately. `sizes` are the local sizes of the sets; None means one set.
    """
    rank, world, part, parts = _share
    return rows_of_share(drawn, sizes, rank * parts + part, world * parts)


def rows_of_share(drawn, sizes, k, n):
    """Share number k of n of every set."""
    if n == 1:
        return drawn
    sizes = sizes or [len(drawn) // n]
    sets = drawn.split([n * size for size in sizes])
    return torch.cat([rows[k * size:(k + 1) * size] for rows, size in zip(sets, sizes)])


def gathered_size(n):
    """The number of rows that `all_gather` returns for n local ones."""
    return n * _share[1]


def all_gather(x, sizes=None):
    """Gather x from all processes, in the order that a single process would have. Carries no gradient."""
    world = _share[1]
    if world == 1:
        return x
    x = x.detach().contiguous()
    gathered = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(gathered, x)
    per_process = [rows.split(sizes or [len(x)]) for rows in gathered]
    return torch.cat([rows for same_set in zip(*per_process) for rows in same_set])


def gather_rows(x, order, sizes=None):
    """x[order] for the local images, where `order` indexes the images of all processes."""
    rank, world, *_ = _share
    return all_gather(x, sizes)[rows_of_share(order, sizes, rank, world)]


# ---------------------------------------------------------------- draws for a batch that is split
# n is the number of local images. Every draw is made for the whole batch, and the local rows are returned.


def rand(n, *shape, gen, device, sizes=None):
    return local_rows(torch.rand(global_size(n), *shape, generator=gen, device=device), sizes)


def randn(n, *shape, gen, device, sizes=None):
    return local_rows(torch.randn(global_size(n), *shape, generator=gen, device=device), sizes)


def randint(low, high, n, *shape, gen, device, sizes=None):
    return local_rows(torch.randint(low, high, (global_size(n), *shape), generator=gen, device=device), sizes)


def beta(concentration, n, *, gen, device, sizes=None):
    """Beta(concentration, concentration) from Gamma draws; torch.distributions takes no generator. (n,)"""
    alpha = torch.full((2, global_size(n)), float(concentration), device=device)
    a, b = torch._standard_gamma(alpha, generator=gen)
    return local_rows(a / (a + b), sizes)


def randperm(n, *, gen, device):
    """A permutation of the images of all processes, for `gather_rows`; each part has its own."""
    return torch.randperm(gathered_size(n), generator=gen, device=device)
