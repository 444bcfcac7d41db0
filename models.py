"""Backbones (WideResNet, ResNet50v2, FastNet) and heads: classifier, additional classifier, K rotation heads.

    net = make_model("wrn-28-2", num_classes=10, rot_heads=10)
    class_logits, aux_logits, rot_logits = net(x)               # (N, 10), (N, 10), (N, 10, 4)
    logits = classify(net, x)                                   # test time: backbone and classifier, (N, 10)

The input is scaled to [-1, 1] and has three channels and any square size.
"""
import math
import re
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import cli


class WideBlock(nn.Module):
    """BN, LeakyReLU, conv3, BN, LeakyReLU, conv3, plus the shortcut."""

    def __init__(self, c_in, c_out, stride, activate_shortcut, bn_momentum):
        super().__init__()
        self.stride, self.activate_shortcut = stride, activate_shortcut
        # eps 1e-3: MixMatch, which uses TensorFlow's default.
        self.bn1 = nn.BatchNorm2d(c_in, eps=1e-3, momentum=bn_momentum)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1)
        self.bn2 = nn.BatchNorm2d(c_out, eps=1e-3, momentum=bn_momentum)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        # forward() slices the input because, on CPUs, oneDNN's strided 1x1 convolution has wrong gradients
        # for fewer than 8 or 16 channels (oneDNN issue 6035: it writes past its buffer).
        self.shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x):
        h = leaky_relu_(self.bn1(x))                            # conv1 always takes the activated input
        x = h if self.activate_shortcut else x                  # the shortcut only in the very first block
        h = leaky_relu_(self.bn2(self.conv1(h)))
        return self.conv2(h).add_(self.shortcut(x[:, :, ::self.stride, ::self.stride]))


class WideResNet(nn.Module):
    """WideResNet-depth-width as in the MixMatch code base: (N, 3, H, W) to features (N, 64 * width)."""

    def __init__(self, depth, width, bn_momentum):
        super().__init__()
        f = max(1, round(16 * width))                           # 8.4375 -> 135 filters in stage one
        self.num_features = 4 * f
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        blocks, c_in = [], 16
        for c_out, stride in (f, 1), (2 * f, 2), (4 * f, 2):
            for i in range((depth - 4) // 6):
                first_of_all = not blocks
                blocks.append(WideBlock(c_in, c_out, stride if i == 0 else 1, first_of_all, bn_momentum))
                c_in = c_out
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(c_in, eps=1e-3, momentum=bn_momentum)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):                        # N(0, sqrt(2 / (k^2 out))), as in MixMatch
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(m.bias)

    def forward(self, x):
        h = self.blocks(self.conv(x))                           # (N, 4f, H/4, W/4)
        return leaky_relu_(self.bn(h)).mean((2, 3))             # (N, 4f)


def leaky_relu_(x):
    """MixMatch: slope 0.1. In place, like relu_ and add_ in this file: no backward pass needs the input."""
    return F.leaky_relu_(x, 0.1)


class Bottleneck(nn.Module):
    """Pre-activation bottleneck as in the S4L code base: stride on the 3x3, shortcut from the activations."""

    def __init__(self, c_in, c_out, stride, bn_momentum):
        super().__init__()
        c_mid = c_out // 4
        self.bn1 = nn.BatchNorm2d(c_in, eps=1e-3, momentum=bn_momentum)
        self.conv1 = nn.Conv2d(c_in, c_mid, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_mid, eps=1e-3, momentum=bn_momentum)
        self.conv2 = nn.Conv2d(c_mid, c_mid, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(c_mid, eps=1e-3, momentum=bn_momentum)
        self.conv3 = nn.Conv2d(c_mid, c_out, 1, bias=False)
        self.project = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if stride > 1 or c_in != c_out else None

    def forward(self, x):
        h = self.bn1(x).relu_()
        x = self.project(h) if self.project else x
        h = self.bn2(self.conv1(h)).relu_()
        h = self.bn3(self.conv2(h)).relu_()
        return x + self.conv3(h)                                # add_ would change the strides of 1 x 1 maps


class ResNet50v2(nn.Module):
    """ResNet50v2 as in the S4L code base: (N, 3, H, W) to features (N, 2048)."""

    num_features = 2048

    def __init__(self, bn_momentum):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        blocks, c_in = [], 64
        for c_out, depth, stride in (256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2):
            for i in range(depth):
                blocks.append(Bottleneck(c_in, c_out, stride if i == 0 else 1, bn_momentum))
                c_in = c_out
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(c_in, eps=1e-3, momentum=bn_momentum)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.xavier_uniform_(m.weight)               # S4L: TensorFlow's default for convolutions

    def forward(self, x):
        h = self.blocks(F.max_pool2d(self.conv(x), 3, 2, padding=1))            # (N, 2048, H/32, W/32)
        return self.bn(h).relu_().mean((2, 3))                  # (N, 2048)


class FastNet(nn.Module):
    """A shallow, wide network in the style of airbench: (N, 3, H, W), H >= 8, to features (N, widths[2]).

    A fixed convolution whitens patches of 2 x 2 pixels (see `whiten`). Three groups follow: conv3, max-pool,
    BN, GELU, conv3, BN, GELU. The variants are for comparison: "relu" instead of GELU, "mean" instead of the
    maximum at the end, "plain": no whitening, the first convolution sees the pixels.
    """

    def __init__(self, widths, variants, bn_momentum):
        super().__init__()
        self.num_features = widths[2]
        self.activate = F.relu if "relu" in variants else F.gelu
        self.mean_pool = "mean" in variants
        c_in = 3
        if "plain" not in variants:
            c_in = 2 * PATCH                                    # each direction and its negative
            self.patch_weight = nn.Parameter(torch.zeros(c_in, 3, 2, 2), requires_grad=False)
            self.patch_bias = nn.Parameter(torch.zeros(c_in), requires_grad=False)
        self.convs, self.bns = nn.ModuleList(), nn.ModuleList()
        for c_out in widths:
            for c in c_in, c_out:
                conv = nn.Conv2d(c, c_out, 3, padding=1, bias=False)            # torch's initial weights
                with torch.no_grad():
                    nn.init.dirac_(conv.weight[:c])             # airbench: the first c filters copy the input
                self.convs.append(conv)
                self.bns.append(nn.BatchNorm2d(c_out, momentum=bn_momentum))
            c_in = c_out

    def forward(self, x):
        if hasattr(self, "patch_weight"):
            x = self.activate(F.conv2d(x, self.patch_weight, self.patch_bias))  # (N, 24, H-1, W-1)
        for i, (conv, bn) in enumerate(zip(self.convs, self.bns)):
            x = Conv3OnSmallMaps.apply(x, conv.weight.to(x.dtype)) if is_small_bf16(x) else conv(x)
            if i % 2 == 0 and x.shape[-1] >= 4:                 # we chose 4: images of 8 pixels keep 3 x 3
                x = F.max_pool2d(x, 2)
            x = self.activate(bn(x))
        return x.mean((2, 3)) if self.mean_pool else x.amax((2, 3))             # (N, widths[2])


PATCH = 3 * 2 * 2                                               # the values in a patch of 2 x 2 pixels


class Conv3OnSmallMaps(torch.autograd.Function):
    """A 3 x 3 convolution with padding 1. Its weight gradient is a matrix product for each kernel row.

    For bfloat16 on CPUs, oneDNN's own weight gradient takes up to 6 times as long on maps of a few pixels
    (docs/speed.md). The forward pass and the gradient of the input are oneDNN's.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = nn.grad.conv2d_input(x.shape, weight, grad, padding=1)
        if ctx.needs_input_grad[1]:
            (N, C, S, _), c_out = x.shape, len(weight)
            padded = F.pad(x.permute(2, 0, 3, 1), (0, 0, 1, 1, 0, 0, 1, 1))     # (S+2, N, S+2, C), rows first
            threes = padded.as_strided((S + 2, N, S, 3 * C), padded.stride())   # three neighbours in a row
            threes = threes.reshape(S + 2, N * S, 3 * C)
            grad = grad.permute(2, 0, 3, 1).reshape(-1, c_out).T                # (c_out, S N S)
            rows = [grad @ threes[k:k + S].view(-1, 3 * C) for k in range(3)]   # (c_out, 3 C) per kernel row
            grad_weight = torch.stack(rows, 1).view(c_out, 3, 3, C).permute(0, 3, 1, 2)
        return grad_x, grad_weight


def is_small_bf16(x):
    """Whether Conv3OnSmallMaps is the faster one; with 128 channels it is up to 5 pixels, not from 7 on."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.shape[-1] <= 5


@torch.no_grad()
def whiten(net, x):
    """Set FastNet's fixed convolution so that the patches of the scaled images x (N, 3, H, W) become white.

    Other networks stay as they are. The filters are the eigenvectors of the patches' covariance, divided by
    the root of the eigenvalue, and their negatives. 5e-4 is airbench's constant; its pixels have variance 1.
    """
    if not hasattr(net.backbone, "patch_weight") or net.backbone.patch_bias.any():      # pretrained
        return
    patches = F.unfold(x.double(), 2).transpose(1, 2).flatten(0, 1)             # (N (H-1) (W-1), 12)
    values, vectors = torch.linalg.eigh(patches.T.cov())        # (12,), (12, 12): one vector per column
    values = values.clamp_min(0)
    varies = values > 1e-6 * values.max()                       # grey images vary in 4 directions only
    scale = torch.where(varies, (values + 5e-4 * values.mean()).rsqrt(), 0)     # 0 / 0 if all are black
    w = (vectors * scale).T                                     # (12, 12)
    w = torch.cat([w, -w])                                      # (24, 12)
    net.backbone.patch_weight.copy_(w.view(-1, 3, 2, 2))
    net.backbone.patch_bias.copy_(-w @ patches.mean(0))


class Net(nn.Module):
    """A backbone and the requested heads; the other heads, and their logits, are None."""

    def __init__(self, backbone, num_classes, rot_heads, rot_dim, aux, init_):
        super().__init__()
        features = backbone.num_features
        self.backbone = backbone
        self.classifier = nn.Linear(features, num_classes)
        self.aux = nn.Linear(features, num_classes) if aux else None
        # The paper's dimension reduction before the rotation heads. Its form is not specified; we use one
        # linear map without a bias, since the heads have biases.
        self.reduce = nn.Linear(features, rot_dim, bias=False) if rot_heads and rot_dim else None
        # All K heads in one matrix.
        self.rotation = nn.Linear(rot_dim or features, 4 * rot_heads) if rot_heads else None
        for head in filter(None, (self.classifier, self.aux, self.reduce)):
            init_(head.weight)
        if rot_heads:
            for R_k in self.rotation.weight.split(4):           # not specified; the fan-out of a head is 4
                init_(R_k)
        for head in filter(None, (self.classifier, self.aux, self.rotation)):
            nn.init.zeros_(head.bias)

    def forward(self, x, detach=None, detach_heads=False):
        """detach: rows (first, last + 1) whose class loss must not reach the backbone (--detach_rotated).

        detach_heads: nor must their rotation loss (--mixmatch).
        """
        h = h_class = self.backbone(x)                          # (N, F)
        if detach:
            first, end = detach
            h_class = torch.cat([h[:first], h[first:end].detach(), h[end:]])
        aux_logits = self.aux(h) if self.aux else None          # (N, C)
        rot_logits = None
        if self.rotation:
            h_rot = h_class if detach_heads else h
            reduced = self.reduce(h_rot) if self.reduce else h_rot              # (N, rot_dim)
            rot_logits = self.rotation(reduced).unflatten(1, (-1, 4))           # (N, K, 4)
        return self.classifier(h_class), aux_logits, rot_logits


def make_model(arch, num_classes, rot_heads, rot_dim=None, aux=True, bn_momentum=0.001):
    """arch: see check_arch; bn_momentum follows torch (MixMatch 0.001, S4L 0.01)."""
    check_arch(arch)
    kind, *numbers = arch.split("-")
    if kind == "resnet50v2":
        backbone, init_ = ResNet50v2(bn_momentum), nn.init.xavier_uniform_      # S4L
    elif kind == "fast":
        backbone = FastNet([int(n) for n in numbers[:3]], numbers[3:], bn_momentum)
        init_ = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))               # torch's default for Linear
    else:
        backbone = WideResNet(int(numbers[0]), float(numbers[1]), bn_momentum)
        init_ = nn.init.xavier_normal_                          # MixMatch
    return Net(backbone, num_classes, rot_heads, rot_dim, aux, init_)


def check_arch(arch):
    """Refuse anything but wrn-<depth>-<width>, resnet50v2 and fast-<width>-<width>-<width>[-<variants>]."""
    wide = re.fullmatch(r"wrn-(\d+)-(\d+\.?\d*|\.\d+)", arch)
    fast = re.fullmatch(r"fast-(\d{1,4})-(\d{1,4})-(\d{1,4})(-relu)?(-mean)?(-plain)?", arch)
    if not (wide or fast or arch == "resnet50v2"):
        raise cli.Refused(f"--arch {arch}: must be wrn-<depth>-<width>, for example wrn-28-2, "
                          "fast-<width>-<width>-<width>, for example fast-32-128-128, or resnet50v2")
    if fast and not all(int(width) for width in fast.groups()[:3]):
        raise cli.Refused(f"--arch {arch}: the widths must be 1 or more")
    if not wide:
        return
    depth, width = int(wide[1]), float(wide[2])
    if depth < 10 or (depth - 4) % 6:
        raise cli.Refused(f"--arch {arch}: the depth of a WideResNet must be 6n + 4, "
                          "that is 10, 16, 22, 28, ...")
    if not 0 < width <= 100 or depth > 1000:                    # our choice: beyond what any machine can do
        raise cli.Refused(f"--arch {arch}: the width must be above 0 and at most 100, the depth at most 1000")


def classify(net, x):
    """Logits at test time: those of the additional classifier if there is one. No other head runs. (N, C)"""
    return (net.aux or net.classifier)(net.backbone(x))


def classifier_state(net):
    """The weights of the backbone and the tested classifier, named as in make_model(..., 0, aux=False)."""
    state = {f"backbone.{k}": v for k, v in net.backbone.state_dict().items()}
    return state | {f"classifier.{k}": v for k, v in (net.aux or net.classifier).state_dict().items()}


@contextmanager
def frozen_bn(model):
    """Inside, BN normalises with the statistics of the batch and does not update the running statistics."""
    layers = bn_layers(model)
    for m in layers:
        m.track_running_stats = False                           # in training mode, BN ignores its buffers
    try:
        yield
    finally:
        for m in layers:
            m.track_running_stats = True


@torch.no_grad()
def average_bn_over(batches, model):
    """Replace the running statistics with their means over some batches.

    Gives the same numbers as torch's update_bn, which would make a GPU wait for the CPU at each layer.
    """
    layers = bn_layers(model)
    before = [m.momentum for m in layers]
    for m in layers:
        m.reset_running_stats()
    for n, x in enumerate(batches, start=1):
        for m in layers:
            m.momentum = 1 / n                                  # the weight of batch n in a mean of n
        model(x)
    for m, momentum in zip(layers, before):
        m.momentum = momentum


def bn_layers(model):
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
