"""The named values inside a GPT: where they are, how to read them (`capture`) and how to change them (`edit`).

A module passes each of its intermediate values through a tap, `value = tap(site, value)`, once, where it arises. The
tap of a plain forward pass hands the value back. The names are TransformerLens'; L is a layer's input [b, t, d].

    site          shape         what it is
    embed         [b, t, d]     token embedding + position embedding, after dropout
    resid_pre     [b, t, d]     the residual stream as the block receives it
    ln_1          [b, t, d]     output of the first LayerNorm, scale and shift applied
    q, k, v       [b, t, h, k]  queries, keys, values
    attn_scores   [b, h, t, s]  q k^T / sqrt(k), before masking; float32
    pattern       [b, h, t, s]  the softmax of it, before dropout; float32
    z             [b, t, h, k]  values weighted by the pattern, head by head
    attn_out      [b, t, d]     what attention adds to the stream, after dropout
    resid_mid     [b, t, d]     the stream between attention and MLP
    ln_2          [b, t, d]     output of the second LayerNorm
    mlp_pre       [b, t, f]     before the MLP's non-linearity
    mlp_post      [b, t, f]     after it
    mlp_out       [b, t, d]     what the MLP adds to the stream, after dropout
    resid_post    [b, t, d]     the stream as the block hands it on
    ln_f          [b, t, d]     output of the final LayerNorm
    logits        [b, t, v]     float32

All but embed, ln_f and logits exist in every block; captured, they come stacked on a leading layer axis l.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Shaped

BLOCK_SITES = (
    "resid_pre", "ln_1", "q", "k", "v", "attn_scores", "pattern", "z", "attn_out", "resid_mid",
    "ln_2", "mlp_pre", "mlp_post", "mlp_out", "resid_post",
)  # fmt: skip
SITES = ("embed", *BLOCK_SITES, "ln_f", "logits")

# (site, layer, value) -> value of the same shape; layer is an int32, perhaps traced, and None outside the blocks.
Edit = Callable[[str, Any, Array], Array]


@runtime_checkable
class Tap(Protocol):
    """What a module passes its intermediate values through."""

    def __call__(self, site: str, value: Array) -> Array:
        """Takes the value that arose at a site and returns the one to go on with."""
        ...


def no_tap(site: str, value: Array) -> Array:
    """The tap of a plain forward pass: nothing is read, nothing is changed."""
    return value


class Recorder:
    """The tap of one layer (or of what is outside the blocks) in a pass that captures or edits.

    It lives within one trace of that layer: the values in `captured` must leave the layer as its results.
    """

    def __init__(self, capture: Iterable[str], edit: Edit | None, layer: Any = None) -> None:
        self._capture, self._edit, self._layer = frozenset(capture), edit, layer
        self.seen: list[str] = []
        self.captured: dict[str, Array] = {}

    def __call__(self, site: str, value: Shaped[Array, "*any"]) -> Shaped[Array, "*any"]:
        """Edits the value, then records it where that was asked for."""
        if site in self.seen:
            raise ValueError(f"the site {site!r} is tapped twice in one layer; give each of its values a name")
        self.seen.append(site)
        if self._edit is not None:
            value = _edited(self._edit, site, self._layer, value)
        if site in self._capture:
            self.captured[site] = value
        return value


def _edited(edit: Edit, site: str, layer: Any, value: Array) -> Array:
    """`edit` applied, with its result held to the shape and brought to the dtype that the rest of the model expects."""
    edited = edit(site, layer, value)
    if not hasattr(edited, "shape") or edited.shape != value.shape:
        got = f"shape {edited.shape}" if hasattr(edited, "shape") else repr(edited)
        raise ValueError(f"edit must return a value of shape {value.shape} at site {site!r}, got {got}")
    return jnp.asarray(edited).astype(value.dtype)


def check_captured(capture: Iterable[str], seen: Iterable[str]) -> None:
    """Raises ValueError for a site that was to be captured and that the model never came by."""
    seen = list(dict.fromkeys(seen))
    if missing := [site for site in capture if site not in seen]:
        raise ValueError(f"no site {', '.join(map(repr, missing))} in this model; it has {', '.join(seen)}")
