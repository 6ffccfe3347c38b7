"""GPT-2 in float64 NumPy, written from the papers: the oracle that the package is held against.

Radford et al. 2019 for the model, Vaswani et al. 2017 (arXiv 1706.03762) for attention, Ba et al. 2016 (arXiv
1607.06450) for LayerNorm, Hendrycks and Gimpel 2016 (arXiv 1606.08415) for GELU. Nothing here comes from the package
but the form of its parameter tree. One row of a batch at a time, one head at a time, one query at a time.
"""

import math

import numpy as np


def layer_norm(x, scale, bias, epsilon=1e-5):  # [..., d], [d], [d] -> [..., d]
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return scale * (x - mean) / np.sqrt(variance + epsilon) + bias


def gelu_tanh(x):  # [...] -> [...]
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_exact(x):  # [...] -> [...]
    return 0.5 * x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


def relu(x):  # [...] -> [...]
    return np.where(x > 0, x, 0.0)


ACTIVATIONS = {
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": gelu_exact,
    "relu": relu,
    "linear": lambda x: x,
}


def softmax(x):  # [s] -> [s]
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def cross_entropy(logits, target):  # [v], () -> ()
    return np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target]


def visible_keys(t, mask=None, segments=None):  # (), bool [t], int [t] -> bool [t, s]
    visible = np.zeros((t, t), bool)
    for query in range(t):
        for key in range(query + 1):
            both_tokens = mask is None or (mask[query] and mask[key])
            same_document = segments is None or segments[query] == segments[key]
            visible[query, key] = both_tokens and same_document
    return visible


def positions(t, mask=None, segments=None):  # (), bool [t], int [t] -> int [t]
    count, result = {}, np.zeros(t, int)
    for i in range(t):
        if mask is None or mask[i]:
            document = 0 if segments is None else segments[i]
            result[i] = count.get(document, 0)
            count[document] = result[i] + 1
    return result


def attention(q, k, v, visible):  # [t, k], [s, k], [s, k], [t, s] -> [t, k], [t, s], [t, s]
    scores = q @ k.T / math.sqrt(q.shape[-1])
    pattern = np.zeros_like(scores)
    for query, row in enumerate(visible):
        if row.any():
            pattern[query, row] = softmax(scores[query, row])
    return pattern @ v, scores, pattern


def multi_head_attention(p, x, visible, sites):  # [t, d], [t, s] -> [t, d]
    heads = p["qkv"]["kernel"].shape[2]
    out = p["out"]["bias"].copy()
    found = {name: [] for name in ("q", "k", "v", "z", "attn_scores", "pattern")}
    for head in range(heads):
        q, k, v = (x @ p["qkv"]["kernel"][:, i, head] for i in range(3))
        if "bias" in p["qkv"]:
            q, k, v = (y + p["qkv"]["bias"][i, head] for i, y in enumerate((q, k, v)))
        z, scores, pattern = attention(q, k, v, visible)
        out = out + z @ p["out"]["kernel"][head]
        for name, value in zip(found, (q, k, v, z, scores, pattern), strict=True):
            found[name].append(value)
    for name, values in found.items():
        sites[name] = np.stack(values, axis=0 if name in ("attn_scores", "pattern") else 1)
    sites["attn_out"] = out
    return out


def mlp(p, x, activation, sites):  # [t, d] -> [t, d]
    sites["mlp_pre"] = x @ p["up"]["kernel"] + p["up"]["bias"]
    sites["mlp_post"] = ACTIVATIONS[activation](sites["mlp_pre"])
    sites["mlp_out"] = sites["mlp_post"] @ p["down"]["kernel"] + p["down"]["bias"]
    return sites["mlp_out"]


def block(p, x, visible, kind, activation, epsilon):  # [t, d], [t, s] -> [t, d], {site: value}
    def norm(name, x):
        sites[name] = layer_norm(x, p[name]["scale"], p[name]["bias"], epsilon)
        return sites[name]

    sites = {"resid_pre": x}
    if kind == "pre_ln":
        x = x + multi_head_attention(p["attn"], norm("ln_1", x), visible, sites)
        sites["resid_mid"] = x
        x = x + mlp(p["mlp"], norm("ln_2", x), activation, sites)
    elif kind == "post_ln":
        x = norm("ln_1", x + multi_head_attention(p["attn"], x, visible, sites))
        sites["resid_mid"] = x
        x = norm("ln_2", x + mlp(p["mlp"], x, activation, sites))
    elif kind == "no_ln":
        x = x + multi_head_attention(p["attn"], x, visible, sites)
        sites["resid_mid"] = x
        x = x + mlp(p["mlp"], x, activation, sites)
    else:
        raise ValueError(kind)
    sites["resid_post"] = x
    return x, sites


def layer_of(tree, index):  # leaves [l, ...] -> leaves [...]
    return {name: layer_of(x, index) if isinstance(x, dict) else x[index] for name, x in tree.items()}


def forward_row(p, tokens, kind, activation, epsilon, mask, segments):  # int [t] -> {site: value}
    t, n_layer = len(tokens), len(p["blocks"]["mlp"]["up"]["bias"])
    x = p["wte"][tokens] + p["wpe"][positions(t, mask, segments)]
    sites, layers = {"embed": x}, []
    for index in range(n_layer):
        parameters, visible = layer_of(p["blocks"], index), visible_keys(t, mask, segments)
        x, of_layer = block(parameters, x, visible, kind, activation, epsilon)
        layers.append(of_layer)
    sites |= {name: np.stack([of_layer[name] for of_layer in layers]) for name in layers[0]}
    sites["ln_f"] = layer_norm(x, p["ln_f"]["scale"], p["ln_f"]["bias"], epsilon)
    sites["logits"] = sites["ln_f"] @ (p["head"]["kernel"] if "head" in p else p["wte"].T)
    return sites


def forward(p, tokens, kind="pre_ln", activation="gelu_new", epsilon=1e-5, mask=None, segments=None):
    # int [b, t] -> {site: [b, ...] outside the blocks, [l, b, ...] inside them}
    tokens = np.asarray(tokens)
    nothing = [None] * len(tokens)
    masks, documents = nothing if mask is None else mask, nothing if segments is None else segments
    rows = [
        forward_row(p, row, kind, activation, epsilon, row_mask, row_segments)
        for row, row_mask, row_segments in zip(tokens, masks, documents, strict=True)
    ]
    outside = ("embed", "ln_f", "logits")
    return {site: np.stack([row[site] for row in rows], axis=0 if site in outside else 1) for site in rows[0]}


def token_log_probs(logits, tokens, mask=None, segments=None):  # [b, t, v], int [b, t] -> [b, t - 1]
    b, t = np.shape(tokens)
    scores = np.zeros((b, t - 1))
    for row in range(b):
        for i in range(t - 1):
            both_tokens = mask is None or (mask[row][i] and mask[row][i + 1])
            same_document = segments is None or segments[row][i] == segments[row][i + 1]
            if both_tokens and same_document:
                scores[row, i] = -cross_entropy(logits[row, i], tokens[row][i + 1])
    return scores
