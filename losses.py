"""The mathematics of CRAE: one pure function per equation, tensors in, tensors out.

    Eq. 1   p(z|x) = sum_k R_k(z|x) p(y=k|x)                    log_p_z
    Eq. 2   CRAE:  L_ce(p(y|x_l), y_l)                          class_loss
                   + eta L_ce(p(z|x), z)                        labeled_rotation_loss, unlabeled_rotation_loss
    Eq. 3   sharpening of the mean prediction                   sharpen
    Eq. 4   CRAE+: Eq. 2 on mixed images
                   + eta2 L_ce(p(y|x_u), p_hat)                 soft_cross_entropy

The names are the paper's: x image, y class (one of C), z rotation (one of 4), R_k the k-th of K rotation
heads. Logits of any type are converted to float32 (float64 stays as it is): bfloat16 would keep only 8 bits
of a log-probability.
"""
import torch
import torch.nn.functional as F


def wide(x):
    """Convert x to float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.float()


def class_loss(logits, y):
    """L_ce(p(y|x), y), mean over the images."""
    return F.cross_entropy(wide(logits), y)


def log_p_z(class_logits, rot_logits):
    """Eq. 1 in log space: class logits (N, C) and rotation logits (N, K, 4) with K = C to log p(z|x) (N, 4).

    With K = 1, all classes share one head, and the weights p(y|x) sum to one: the rotation predictor of S4L.
    """
    log_p_y = F.log_softmax(wide(class_logits), dim=-1)         # (N, C)
    log_R = F.log_softmax(wide(rot_logits), dim=-1)             # (N, K, 4)
    return torch.logsumexp(log_p_y.unsqueeze(-1) + log_R, dim=1)        # (N, 4)


def labeled_rotation_loss(rot_logits, y, z):
    """Eq. 2 for labelled images: the one-hot y replaces p(y|x), so only the head of class y counts. (N,)"""
    R_y = rot_logits[torch.arange(len(y), device=y.device), y]  # (N, 4)
    return F.cross_entropy(wide(R_y), z, reduction="none")


def head_losses(rot_logits, z):
    """-log R_k(z|x) of every head, for the rotation z of each image. (N, K)"""
    z = z[:, None].expand(-1, rot_logits.shape[1])              # (N, K)
    return F.cross_entropy(wide(rot_logits).transpose(1, 2), z, reduction="none")


def unlabeled_rotation_loss(class_logits, rot_logits, z):
    """Eq. 2 for unlabelled images: -log p(z|x) of Eq. 1. Its gradient reaches the heads and p(y|x). (N,)

    Equals -log_p_z(...)[z], but evaluates only the rotation z.
    """
    log_p_y = F.log_softmax(wide(class_logits), dim=-1)         # (N, C)
    return -torch.logsumexp(log_p_y - head_losses(rot_logits, z), dim=1)


def independent_rotation_loss(rot_logits, z):
    """The ensemble baseline "independent": every head learns from every image; mean over the heads. (N,)"""
    return head_losses(rot_logits, z).mean(dim=1)


def sharpen(p, T):
    """Eq. 3: p_i^(1/T) / sum_j p_j^(1/T). In log space, a small T gives one-hot vectors, not 0/0. (N, C)"""
    tiny = torch.finfo(torch.float32).tiny                      # log(0) would give 0 * inf in the gradient
    log_p = wide(p).clamp_min(tiny).log()
    return F.softmax((log_p - log_p.amax(-1, keepdim=True)) / T, dim=-1)


def soft_cross_entropy(logits, target):
    """L_ce(p(y|x), p_hat), mean over the images; the target is a distribution (N, C)."""
    return F.cross_entropy(wide(logits), wide(target))


def entropy(logits):
    """Entropy minimisation (Grandvalet and Bengio 2005): the mean entropy of p(y|x)."""
    log_p = F.log_softmax(wide(logits), dim=-1)                 # (N, C)
    return -(log_p.exp() * log_p).sum(-1).mean()
