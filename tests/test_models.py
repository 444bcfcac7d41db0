"""Networks have the layers, initial weights and parameter counts of the code bases that the paper follows."""
import re

import pytest
import torch
import torch.nn.functional as F

import cli
import models
from models import ResNet50v2, check_arch, classifier_state, classify, frozen_bn, make_model


def count(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("arch, classes, parameters", [
    ("wrn-28-2", 10, 1_469_642), ("wrn-28-8.4375", 100, 26_033_980), ("resnet50v2", 1000, 25_549_352)])
def test_number_of_parameters(arch, classes, parameters):
    with torch.device("meta"):
        assert count(make_model(arch, classes, rot_heads=0, aux=False)) == parameters


def test_heads_that_are_not_used_are_not_built():
    plain = make_model("wrn-10-1", 10, rot_heads=0, aux=False)
    assert {name.split(".")[0] for name, _ in plain.named_parameters()} == {"backbone", "classifier"}
    x = torch.randn(2, 3, 32, 32)
    class_logits, aux_logits, rot_logits = plain(x)
    assert class_logits.shape == (2, 10) and aux_logits is None and rot_logits is None
    full = make_model("wrn-10-1", 10, rot_heads=7, rot_dim=5)
    assert [t.shape for t in full(x)] == [(2, 10), (2, 10), (2, 7, 4)]
    assert count(full) - count(plain) == (64 * 10 + 10) + 64 * 5 + 7 * (5 * 4 + 4)


@pytest.mark.parametrize("arch", ["wrn-10-1", "wrn-16-0.5", "wrn-28-2", "resnet50v2"])
@pytest.mark.parametrize("rot_dim", [None, 3])
def test_every_parameter_gets_a_gradient(arch, rot_dim):
    torch.manual_seed(0)
    net = make_model(arch, 4, rot_heads=4, rot_dim=rot_dim)
    sum(logits.square().sum() for logits in net(torch.randn(4, 3, 64, 64))).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        if not re.search(r"backbone.*(conv|shortcut).*bias", name):     # BN subtracts these biases again
            assert p.grad.abs().max() > 1e-6, name


def wide_resnet_by_hand(s, x, stages, blocks):
    """The forward pass of MixMatch's WideResNet in evaluation mode, computed from the state dict `s`."""
    def bn(name, h):
        return F.batch_norm(h, s[name + ".running_mean"], s[name + ".running_var"], s[name + ".weight"],
                            s[name + ".bias"], eps=1e-3)

    def conv(name, h, stride=1, padding=1):
        return F.conv2d(h, s[name + ".weight"], s[name + ".bias"], stride, padding)

    h = conv("backbone.conv", x)
    for i in range(stages * blocks):
        name, stride = f"backbone.blocks.{i}", 2 if i % blocks == 0 and i else 1
        a = F.leaky_relu(bn(name + ".bn1", h), 0.1)
        shortcut = a if i == 0 else h                           # activated only in the very first block
        if f"{name}.shortcut.weight" in s:
            shortcut = conv(name + ".shortcut", shortcut, stride, 0)
        a = F.leaky_relu(bn(name + ".bn2", conv(name + ".conv1", a, stride)), 0.1)
        h = shortcut + conv(name + ".conv2", a)
    h = F.leaky_relu(bn("backbone.bn", h), 0.1).mean((2, 3))
    return h @ s["classifier.weight"].T + s["classifier.bias"]


@pytest.mark.parametrize("arch, blocks", [("wrn-10-0.25", 1), ("wrn-10-1", 1), ("wrn-16-2", 2)])
def test_wide_resnet_layer_by_layer(arch, blocks):
    """Values and gradients agree with a computation by hand, in the memory layout of training."""
    torch.manual_seed(0)
    net = make_model(arch, 10, rot_heads=0, aux=False, bn_momentum=0.5)
    net(torch.randn(8, 3, 16, 16))                              # running statistics other than 0 and 1
    net.eval()
    for p in net.parameters():                                  # no bias is 0, no scale is 1
        p.data += 0.1 * torch.randn_like(p)
    net.to(memory_format=torch.channels_last)
    x = torch.randn(64, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    state = {k: v.detach().double().requires_grad_(k.endswith(("weight", "bias")))
             for k, v in net.state_dict().items()}
    logits, by_hand = net(x)[0], wide_resnet_by_hand(state, x.double(), 3, blocks)
    assert (logits - by_hand).norm() < 1e-5 * by_hand.norm()
    logits.square().mean().backward()
    by_hand.square().mean().backward()
    for name, p in net.named_parameters():
        expected = state[name].grad
        assert (p.grad - expected).norm() < 1e-4 * expected.norm(), name


def test_wide_resnet_shortcuts_and_initial_weights():
    torch.manual_seed(0)
    net = make_model("wrn-28-2", 10, rot_heads=10)
    shortcuts = [isinstance(b.shortcut, torch.nn.Conv2d) for b in net.backbone.blocks]
    assert shortcuts == [True, False, False, False] * 3         # only where the number of channels changes
    assert [b.conv1.stride[0] for b in net.backbone.blocks] == [1] * 4 + [2, 1, 1, 1] * 2
    conv = net.backbone.blocks[-1].conv2.weight
    assert conv.std().item() == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.02)
    assert net.classifier.weight.std().item() == pytest.approx((2 / (128 + 10)) ** 0.5, rel=0.1)
    assert net.rotation.weight.std().item() == pytest.approx((2 / (128 + 4)) ** 0.5, rel=0.1)     # per head
    assert all(p.abs().max() == 0 for n, p in net.named_parameters() if n.endswith(".bias"))
    bns = [m for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in bns} == {(1e-3, 0.001)}


def test_resnet50v2_layers():
    with torch.device("meta"):
        net = ResNet50v2(bn_momentum=0.01)
        shapes = []
        for block in net.blocks:
            block.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape[1:])))
        assert net(torch.empty(1, 3, 224, 224)).shape == (1, 2048)
    assert shapes == [(256, 56, 56)] * 3 + [(512, 28, 28)] * 4 + [(1024, 14, 14)] * 6 + [(2048, 7, 7)] * 3
    assert [b.conv2.stride[0] for b in net.blocks] == [1] * 3 + [2, 1, 1, 1] + [2] + [1] * 5 + [2, 1, 1]
    assert all(m.bias is None for m in net.modules() if isinstance(m, torch.nn.Conv2d))


def test_resnet50v2_block_projects_the_activated_tensor():
    torch.manual_seed(0)
    block = ResNet50v2(bn_momentum=0.01).blocks[3].eval()       # the first block of stage two, stride 2
    x = torch.randn(2, 256, 8, 8)
    s = block.state_dict()

    def bn_relu(name, h):
        mean, var = s[name + ".running_mean"], s[name + ".running_var"]
        return F.relu(F.batch_norm(h, mean, var, s[name + ".weight"], s[name + ".bias"], eps=1e-3))

    a = bn_relu("bn1", x)
    h = bn_relu("bn2", F.conv2d(a, s["conv1.weight"]))
    h = F.conv2d(bn_relu("bn3", F.conv2d(h, s["conv2.weight"], stride=2, padding=1)), s["conv3.weight"])
    torch.testing.assert_close(block(x), h + F.conv2d(a, s["project.weight"], stride=2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("aux", [True, False])
def test_inference_only_runs_the_backbone_and_one_classifier(aux):
    torch.manual_seed(0)
    net = make_model("wrn-10-1", 3, rot_heads=3, aux=aux).eval()
    x = torch.randn(2, 3, 8, 8)
    class_logits, aux_logits, _ = net(x)
    ran = []
    for name in "classifier", "aux", "rotation":
        if getattr(net, name):
            getattr(net, name).register_forward_hook(lambda m, i, o, name=name: ran.append(name))
    logits = classify(net, x)
    assert ran == ["aux" if aux else "classifier"]
    assert torch.equal(logits, aux_logits if aux else class_logits)
    small = make_model("wrn-10-1", 3, rot_heads=0, aux=False).eval()
    small.load_state_dict(classifier_state(net))
    assert torch.equal(classify(small, x), logits)


def test_frozen_bn_normalises_by_the_batch_and_updates_nothing():
    torch.manual_seed(0)
    net = make_model("wrn-10-1", 3, rot_heads=3)
    x = torch.randn(8, 3, 8, 8)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with frozen_bn(net):
        frozen = net(x)[0]
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(net(x)[0], frozen)                       # the same batch statistics
    assert net.backbone.bn.num_batches_tracked == 1
    assert not torch.equal(net.backbone.bn.running_mean, before["backbone.bn.running_mean"])


@pytest.mark.parametrize("arch", ["wrn-12-2", "wrn-4-1", "wrn-28", "wrn-28-0", "wrn-28--2", "wrn-28-x",
                                  "resnet18", ""])
def test_bad_architectures(arch):
    with pytest.raises(cli.Refused, match="--arch"):
        check_arch(arch)


# ---------------------------------------------------------------- fast paths against plain ones


@pytest.mark.parametrize("c_in, c_out, size", [(128, 128, 5), (24, 32, 3), (3, 5, 2), (8, 16, 1)])
def test_convolutions_on_small_maps_have_the_gradients_of_plain_ones(c_in, c_out, size):
    torch.manual_seed(0)
    x, weight, grad = torch.randn(16, c_in, size, size), torch.randn(c_out, c_in, 3, 3), None
    x, weight = (t.bfloat16().contiguous(memory_format=torch.channels_last) for t in (x, weight))
    found = []
    for convolve, kind in (models.Conv3OnSmallMaps.apply, torch.bfloat16), (plain_conv3, torch.float64):
        a, w = (t.detach().to(kind).requires_grad_() for t in (x, weight))
        y = convolve(a, w)
        grad = torch.randn_like(y) if grad is None else grad
        y.backward(grad.to(kind))
        found.append((y, a.grad, w.grad))
    for ours, exact in zip(*found):
        assert ours.dtype == torch.bfloat16 and ours.shape == exact.shape
        assert (ours - exact).norm() < 4e-3 * exact.norm()      # bfloat16 keeps 8 bits of the result


def plain_conv3(x, weight):
    return F.conv2d(x, weight, padding=1)


def test_a_bf16_step_of_fastnet_has_the_losses_and_gradients_of_plain_convolutions(monkeypatch):
    torch.manual_seed(0)
    net = make_model("fast-8-16-16", 10, rot_heads=10).to(memory_format=torch.channels_last)
    torch.nn.init.normal_(net.backbone.patch_weight)
    x = torch.randn(32, 3, 24, 24)
    small, found, uses = models.is_small_bf16, [], []

    def is_small(x):
        uses.append(small(x))
        return uses[-1]

    for choose in is_small, lambda x: False:
        monkeypatch.setattr(models, "is_small_bf16", choose)
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(logits.float().logsumexp(-1).mean() for logits in net(x))
        loss.backward()
        found.append((loss, {name: p.grad for name, p in net.named_parameters() if p.requires_grad}))
    assert uses == [False, False, False, True, True, True]      # maps of 23, 11, 11, 5, 5 and 2 pixels
    (loss, grads), (plain_loss, plain_grads) = found
    assert torch.equal(loss, plain_loss)                        # only the weight gradient differs
    for name, grad in grads.items():
        assert (grad - plain_grads[name]).norm() <= 4e-3 * plain_grads[name].norm(), name


def test_float32_and_other_devices_use_plain_convolutions():
    assert not models.is_small_bf16(torch.zeros(1, 1, 2, 2))
    assert not models.is_small_bf16(torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16, device="meta"))
    assert models.is_small_bf16(torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16))


def plain_leaky_relu(x):
    return F.leaky_relu(x, 0.1)


def plain_block(block, x):
    """WideBlock.forward with a new tensor for every activation."""
    h = plain_leaky_relu(block.bn1(x))
    x = h if block.activate_shortcut else x
    h = plain_leaky_relu(block.bn2(block.conv1(h)))
    return block.shortcut(x[:, :, ::block.stride, ::block.stride]) + block.conv2(h)


def plain_bottleneck(block, x):
    h = F.relu(block.bn1(x))
    x = block.project(h) if block.project else x
    h = F.relu(block.bn2(block.conv1(h)))
    return x + block.conv3(F.relu(block.bn3(block.conv2(h))))


@pytest.mark.parametrize("arch, size, block", [
    ("wrn-16-1", 8, (models.WideBlock, plain_block)),
    ("resnet50v2", 32, (models.Bottleneck, plain_bottleneck))])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_in_place_change_no_bit(arch, size, block, precision, monkeypatch):
    torch.manual_seed(0)
    net = make_model(arch, 10, rot_heads=10).to(memory_format=torch.channels_last)
    x, (kind, plain), found = torch.randn(4, 3, size, size, requires_grad=True), block, []
    for _ in range(2):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = sum(logits.float().logsumexp(-1).mean() for logits in net(x))
        grad_x, = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        found.append([loss, grad_x, *(p.grad for p in net.parameters())])
        monkeypatch.setattr(kind, "forward", plain)
        monkeypatch.setattr(models, "leaky_relu_", plain_leaky_relu)
        monkeypatch.setattr(torch.Tensor, "relu_", F.relu)      # the last one of ResNet50v2
    assert all(map(torch.equal, *found))
