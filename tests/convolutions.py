"""Convolutional sequence to sequence learning in loops: Gehring et al. 2017, section 3, one row without padding."""

from __future__ import annotations

import math

import numpy as np
from arrays import numbers


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def convolved(layer, x):
    """One row `(T, C)`: w = g v / |v| for each channel, taps to the left or around, then the gate."""
    v, g, b = (w.astype("float64") for w in layer.get_weights())
    k, channels = layer.kernel_size, x.shape[1]
    before = k - 1 if layer.causal else (k - 1) // 2
    found = np.zeros((len(x), v.shape[1]))
    for t in range(len(x)):
        for f in range(v.shape[1]):
            length = math.sqrt(sum(v[i, f] ** 2 for i in range(len(v))))
            for tap in range(k):
                place = t + tap - before
                if 0 <= place < len(x):
                    for c in range(channels):
                        found[t, f] += g[f] * v[tap * channels + c, f] / length * x[place, c]
            found[t, f] += b[f]
    if not layer.gated:
        return found
    half = v.shape[1] // 2
    return np.array([[row[f] * sigmoid(row[half + f]) for f in range(half)] for row in found])


def attended(layer, x, g, z, e, mask):
    """One row of the attention, place by place."""
    w_query, w_output = ([w.astype("float64") for w in part.get_weights()] for part in (layer.query, layer.output_map))
    maps = [(v * (length / np.sqrt((v * v).sum(axis=0))), b) for v, length, b in (w_query, w_output)]
    real = [j for j in range(len(z)) if mask[j]]
    found, weights = np.zeros_like(x), np.zeros((len(x), len(z)))
    for t in range(len(x)):
        d = (x[t] @ maps[0][0] + maps[0][1] + g[t]) * math.sqrt(0.5)
        scores = {j: math.exp(sum(d[i] * z[j, i] for i in range(len(d)))) for j in real}
        c = np.zeros(z.shape[1])
        for j in real:
            weights[t, j] = scores[j] / sum(scores.values())
            c += weights[t, j] * (z[j] + e[j]) * math.sqrt(0.5)
        c *= len(real) * math.sqrt(1.0 / len(real)) if real else 0.0
        found[t] = (x[t] + c @ maps[1][0] + maps[1][1]) * math.sqrt(0.5)
    return found, weights


def embedded(part, ids):
    """The embeddings `(T, F)` of one row: tokens and places."""
    vectors = numbers(part.token_embedding.embeddings).astype("float64")[ids]
    width = vectors.shape[1]
    for t in range(len(ids)):
        if part.positions == "learned":
            vectors[t] += numbers(part.position_embedding.embeddings)[t]
        elif part.positions == "sinusoidal":  # as deviating as the tokens' start, 0.1
            for i in range(width):
                angle = t / 10000.0 ** ((i - i % 2) / width)
                vectors[t, i] += 0.1 * math.sqrt(2) * (math.sin(angle) if i % 2 == 0 else math.cos(angle))
    return vectors


def encoded(encoder, ids):
    """z and e of one row without padding, layer by layer (sections 3.1, 3.2 and 3.4)."""
    e = embedded(encoder, ids)
    h = convolved(encoder.input_map, e)
    for block in encoder.blocks:
        h = (h + convolved(block.convolution, h)) * math.sqrt(0.5)
    return convolved(encoder.output_map, h), e


def decoded(decoder, ids, z=None, e=None):
    """The logits `(T, V)` and weights `(N, T, S)` of one row without padding, layer by layer (section 3)."""
    g = embedded(decoder, ids)
    h = convolved(decoder.input_map, g)
    weights = []
    for i, block in enumerate(decoder.blocks):
        h = (h + convolved(block.convolution, h)) * math.sqrt(0.5)
        if decoder.attentions:
            h, shares = attended(decoder.attentions[i], h, g, z, e, [True] * len(z))
            weights.append(shares)
    logits = convolved(decoder.output_map, h) @ numbers(decoder.token_embedding.embeddings).T
    if decoder.output_bias:
        logits = logits + numbers(decoder.token_embedding.bias)
    return logits, np.array(weights)


def randomised(layer, seed=3):
    rng = np.random.default_rng(seed)
    layer.set_weights([rng.normal(size=w.shape, scale=0.5) for w in layer.get_weights()])
    return layer
