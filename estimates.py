"""The cost of CRAE on ImageNet with A100 and H100 GPUs: calculated from FLOPs and parameters."""
import torch
from torch.utils.flop_counter import FlopCounterMode

import devices
import models

# NVIDIA's data sheets: dense bfloat16 FLOP/s, memory, and bytes per second that a GPU sends inside a DGX and
# between two of them.
GPUS = {"A100 80 GB": (312e12, 80e9, 300e9, 25e9), "H100 80 GB": (989e12, 80e9, 450e9, 50e9)}
SHARE_OF_PEAK = 0.2                             # our assumption; such convolutional networks reach 0.1 to 0.3
GPU_HOUR = SHARE_OF_PEAK * GPUS["A100 80 GB"][0] * 3600       # FLOPs of an A100, at that share
# The paper's step on ImageNet: 256 + 256 images in four rotations, and features reduced to 16.
COPIES, CLASSES, SIZE, ROT_DIM = 8 * 256, 1000, 224, 16


def calculate_imagenet():
    """Print the cost of a step of CRAE on ImageNet, from FLOPs and parameters. Returns images per second."""
    cost = imagenet_cost()
    for dim in 0, ROT_DIM:
        print_head_cost(dim)
    print(f"one copy of an image: {cost['flops'] / 1e9:.1f} GFLOP forward and backward, "
          f"{cost['per_copy'] / 2 ** 20:.0f} MiB kept for the backward pass; "
          f"{cost['parameters']:,} parameters")
    print(f"CRAE+ needs two passes, and sends {COPIES * 3 * SIZE ** 2 / 1e6:.0f} MB of images to every GPU "
          f"per step\n\nCALCULATED, at {SHARE_OF_PEAK:.0%} of the peak:")
    return {(gpu, n): print_gpu_estimate(gpu, n, cost) for gpu in GPUS for n in (1, 8, 64)}


def imagenet_cost():
    """ResNet50v2: FLOPs and bytes per copy of an image, parameters, and bytes for any batch (`state`)."""
    torch.manual_seed(0)
    net = models.make_model("resnet50v2", CLASSES, CLASSES, rot_dim=ROT_DIM)
    with FlopCounterMode(display=False) as counter:
        net.eval()(torch.zeros(1, 3, SIZE, SIZE))
    parameters = sum(p.numel() for p in net.parameters())

    def forward(n):
        return net.train()(torch.zeros(n, 3, SIZE, SIZE))

    with torch.autocast("cpu", torch.bfloat16):
        fixed, per_copy = devices.kept_for_backward(net, forward)
    # The backward pass takes twice the FLOPs of the forward pass. State: weights, average, gradients and
    # momentum in float32, and the weights in bfloat16.
    return dict(flops=3 * counter.get_total_flops(), parameters=parameters, per_copy=per_copy,
                state=4 * 4 * parameters + fixed)


def print_head_cost(dim):
    net = models.make_model("resnet50v2", CLASSES, CLASSES, dim)
    heads = sum(p.numel() for name, p in net.named_parameters() if name.startswith(("reduce", "rotation")))
    reduction = f"features reduced to {dim}" if dim else "no reduction"
    print(f"{CLASSES} rotation heads, {reduction}: {heads:,} parameters, "
          f"{3 * 4 * heads / 2 ** 20:.1f} MiB with gradients and momentum; "
          f"logits of a step {COPIES * 4 * CLASSES * 4 / 2 ** 20:.1f} MiB")


def print_gpu_estimate(gpu, n, cost):
    """Print the time and memory of a step on n GPUs. Returns images per second."""
    peak, memory, inside, between = GPUS[gpu]
    copies = COPIES / n                                         # per GPU
    seconds = copies * cost["flops"] / (SHARE_OF_PEAK * peak)
    traffic = 2 * (n - 1) / n * 4 * cost["parameters"]          # ring all-reduce of float32 gradients
    wait = traffic / (inside if n <= 8 else between)
    needed = cost["state"] + copies * cost["per_copy"]
    parts = 1
    while cost["state"] + copies / parts * cost["per_copy"] >= 0.9 * memory:
        parts *= 2
    rate = COPIES / 4 / (seconds + wait)
    print(f"{n:>3} x {gpu}: {1000 * seconds:7.1f} ms computing + {1000 * wait:4.1f} ms sending "
          f"{traffic / 1e6:5.1f} MB per GPU (not overlapped), {rate:8,.0f} images/s, "
          f"{needed / 1e9:6.1f} GB per GPU"
          + (f": --accumulate {parts}" if parts > 1 else ""))
    return rate
