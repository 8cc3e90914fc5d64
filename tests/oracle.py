"""Attention in float64 numpy and plain loops: the truth of these tests, written from the contract alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORD = 0xFFFFFFFF


def philox(counter, key):
    """Philox-4x32-10 on Python integers: four lanes."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ low, right & WORD, (left >> 32) ^ d ^ high, left & WORD
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return a, b, c, d


def is_kept(seed, p, b, h, i, j):
    """Whether dropout keeps element (b, h, i, j)."""
    seed %= 2**64
    return philox((j // 4, i, h, b), (seed & WORD, seed >> 32))[j % 4] >= int(p * 2**32)


def dropout_factors(seed, p, shape):
    """`(B, Hq, Sq, Skv)`: 0 where dropped, 1 / (1 - p) where kept."""
    factors = np.zeros(shape)
    for b, h, i, j in np.ndindex(shape):
        factors[b, h, i, j] = is_kept(seed, p, b, h, i, j) / (1 - p)
    return factors


def band(q_len, kv_len, causal, align, window):
    """`(Sq, Skv)` bool of causal and window, pair by pair."""
    left, right = window or (None, None)
    allowed = np.zeros((q_len, kv_len), dtype=bool)
    for i in range(q_len):
        position = i + kv_len - q_len if align == "bottom_right" else i
        for j in range(kv_len):
            seen = not causal or j <= position
            seen = seen and (left is None or j >= position - left)
            allowed[i, j] = seen and (right is None or j <= position + right)
    return allowed


@dataclass
class Solution:
    """o `(B, Hq, Sq, Dv)`, lse `(B, Hq, Sq)`, and the gradients by name."""

    o: np.ndarray
    lse: np.ndarray
    grads: dict[str, np.ndarray]


def solve(q, k, v, grad_o=None, grad_lse=None, *, scale=None, softcap=None, bias=None, sinks=None, factors=None, **rules):
    """Forward and every gradient, each from its formula.

    Args:
        q, k, v, bias, sinks, grad_o, grad_lse: float64 arrays; k and v with their own number of heads.
        factors: of dropout, `(B, Hq, Sq, Skv)`.
        rules: causal, align, window, mask, segment_ids (a pair) and dense (what a layout stands for).
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    keys, values = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = scale if scale is not None else (1 / np.sqrt(q.shape[3]) if q.shape[3] else 1.0)
    raw = scale * np.einsum("bhid,bhjd->bhij", q, keys)
    bent = raw if softcap is None else softcap * np.tanh(raw / softcap)
    slope = np.ones_like(raw) if softcap is None else slope_of_tanh(raw / softcap)
    allowed = allowed_pairs(raw.shape, bias=bias, **rules)
    biased = bent if bias is None else bent + np.where(np.isneginf(bias), 0.0, bias)
    p, p_sink, lse = softmax(np.where(allowed, biased, -np.inf), sinks)
    factors = np.ones_like(p) if factors is None else factors
    o = np.einsum("bhij,bhjd->bhid", p * factors, values)
    grad_o = np.zeros_like(o) if grad_o is None else grad_o
    grad_lse = np.zeros_like(lse) if grad_lse is None else grad_lse

    grad_p = factors * np.einsum("bhid,bhjd->bhij", grad_o, values)
    mean = (p * grad_p).sum(-1)  # what softmax takes off every score's gradient
    grad_biased = p * (grad_p + (grad_lse - mean)[..., None])
    grad_raw = grad_biased * slope
    grads = {
        "q": scale * np.einsum("bhij,bhjd->bhid", grad_raw, keys),
        "k": fold(scale * np.einsum("bhij,bhid->bhjd", grad_raw, q), group),
        "v": fold(np.einsum("bhij,bhid->bhjd", p * factors, grad_o), group),
    }
    if bias is not None:
        grads["bias"] = unbroadcast(grad_biased, bias.shape)
    if sinks is not None:
        grads["sinks"] = (p_sink * (grad_lse - mean)).sum((0, 2))
    return Solution(o, lse, grads)


def slope_of_tanh(x):
    """1 / cosh(x) ** 2, without the overflow and without the cancellation of 1 - tanh(x) ** 2."""
    small = np.exp(-2 * np.abs(x))
    return 4 * small / (1 + small) ** 2


def allowed_pairs(shape, *, bias=None, causal=False, align=None, window=None, mask=None, segment_ids=None, dense=None):
    """`(B, Hq, Sq, Skv)` bool: every rule ANDed."""
    allowed = np.broadcast_to(band(shape[2], shape[3], causal, align, window), shape).copy()
    for table in (mask, dense):
        if table is not None:
            allowed &= np.broadcast_to(table, shape)
    if bias is not None:
        allowed &= ~np.isneginf(np.broadcast_to(bias, shape))
    if segment_ids is not None:
        for b, i, j in np.ndindex(shape[0], shape[2], shape[3]):
            allowed[b, :, i, j] &= segment_ids[0][b, i] == segment_ids[1][b, j]
    return allowed


def softmax(scores, sinks):
    """P, each row's share of its sink, and the lse; 0, 0 and -inf where there is nothing."""
    sinks = np.full(scores.shape[1], -np.inf) if sinks is None else sinks
    column = np.broadcast_to(sinks.reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
    top = np.concatenate([scores, column], -1).max(-1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    weights, sink_weight = np.exp(scores - top), np.exp(column - top)
    total = weights.sum(-1, keepdims=True) + sink_weight
    safe = np.where(total == 0, 1.0, total)
    lse = np.where(total == 0, -np.inf, top + np.log(safe))[..., 0]
    return weights / safe, (sink_weight / safe)[..., 0], lse


def fold(grad, group):
    """Sum the query heads that share a key-value head."""
    batch, heads, length, dim = grad.shape
    return grad.reshape(batch, heads // group, group, length, dim).sum(2)


def unbroadcast(grad, shape):
    """Sum over what a bias of 2 or 4 dims was broadcast along."""
    wide = (1,) * (4 - len(shape)) + tuple(shape)
    axes = tuple(axis for axis in range(4) if wide[axis] == 1)
    return grad.sum(axes, keepdims=True).reshape(shape)
