"""The mathematics of CRAE: one pure function an equation, tensors in, tensors out.

    Eq. 1   p(z|x) = sum_k R_k(z|x) p(y=k|x)                    log_p_z
    Eq. 2   CRAE:  L_ce(p(y|x_l), y_l) + eta L_ce(p(z|x), z)    labeled_rotation_loss, unlabeled_rotation_loss
    Eq. 3   sharpening of the mean prediction                   sharpen
    Eq. 4   CRAE+: Eq. 2 on mixed images + eta2 L_ce(p(y|x_u), p_hat)           soft_cross_entropy

Names are the paper's: x image, y class (C of them), z rotation (4 of them), R_k the k-th rotation head (K of them).
Everything is computed in float32, whatever the logits' type: bfloat16 keeps 8 bits of a log-probability.
"""
import torch
import torch.nn.functional as F


def log_p_z(class_logits, rot_logits):
    """Eq. 1 in log space: class logits (N, C) and rotation logits (N, K, 4), K = C, to log p(z|x) (N, 4).

    With K = 1 the one head is shared by all classes, and p(y|x) sums to one in front of it: the rotation predictor of S4L.
    """
    log_p_y = F.log_softmax(class_logits.float(), dim=-1)       # (N, C)
    log_R = F.log_softmax(rot_logits.float(), dim=-1)           # (N, K, 4)
    return torch.logsumexp(log_p_y.unsqueeze(-1) + log_R, dim=1)        # (N, 4)


def labeled_rotation_loss(rot_logits, y, z):
    """Eq. 2 for a labelled image: the one-hot y stands in for p(y|x), so only the head of its class takes part. (N,)"""
    R_y = rot_logits[torch.arange(len(y), device=y.device), y]                 # (N, 4)
    return F.cross_entropy(R_y.float(), z, reduction="none")


def unlabeled_rotation_loss(class_logits, rot_logits, z):
    """Eq. 2 for an unlabelled image: -log p(z|x) of Eq. 1, which sends gradient into the heads and into p(y|x). (N,)"""
    return F.nll_loss(log_p_z(class_logits, rot_logits), z, reduction="none")


def independent_rotation_loss(rot_logits, z):
    """The ensemble baseline "independent": every head is trained on every image by itself; mean over heads. (N,)"""
    K = rot_logits.shape[1]
    losses = F.cross_entropy(rot_logits.float().transpose(1, 2), z[:, None].expand(-1, K), reduction="none")   # (N, K)
    return losses.mean(dim=1)


def sharpen(p, T):
    """Eq. 3: p_i^(1/T) / sum_j p_j^(1/T), in log space so that a small T underflows to a one-hot, not to 0/0. (N, C)"""
    tiny = torch.finfo(torch.float32).tiny                      # log(0) would give 0 * inf in the gradient
    log_p = p.float().clamp_min(tiny).log()
    return F.softmax((log_p - log_p.amax(-1, keepdim=True)) / T, dim=-1)


def soft_cross_entropy(logits, target):
    """L_ce(p(y|x), p_hat), the mean over images; the target is a distribution (N, C)."""
    return F.cross_entropy(logits.float(), target.float())


def entropy(logits):
    """Entropy minimisation (Grandvalet and Bengio 2005): the mean entropy of p(y|x), with gradient into all of it."""
    log_p = F.log_softmax(logits.float(), dim=-1)               # (N, C)
    return -(log_p.exp() * log_p).sum(-1).mean()
