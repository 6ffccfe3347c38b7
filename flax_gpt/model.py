"""GPT-2's modules: they hold the parameters, name them, and call `flax_gpt.ops` on them.

The parameter tree of `GPT(config)`, with the axes of each leaf (letters as in `flax_gpt.ops`):

    wte [v, d]   wpe [n_positions, d]
    blocks: every leaf of one Block, stacked on a leading layer axis l
      ln_1 {scale, bias} [l, d]
      attn {qkv {kernel [l, d, 3, h, k], bias [l, 3, h, k]}, out {kernel [l, h, k, d], bias [l, d]}}
      ln_2 {scale, bias} [l, d]
      mlp  {up {kernel [l, d, f], bias [l, f]}, down {kernel [l, f, d], bias [l, d]}}
    ln_f {scale, bias} [d]        head {kernel [d, v]}, where the embeddings are not tied

Dropout is on where an rng named "dropout" is given to `apply`, and off otherwise; no module has a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from flax_gpt import ops
from flax_gpt.activations import Edit, Recorder, Tap, check_captured, no_tap
from flax_gpt.config import GPTConfig

Layers = Literal["auto", "scan", "unroll"]

# A Python loop over the layers runs faster than a scan (on 2 CPU cores a training step of 4 layers, 128 wide, takes 1.4
# times as long scanned; 6 layers, 384 wide, 1.2 times) but compiles in a time that grows with depth.
UNROLL_AT_MOST = 12


class Linear(nn.Module):
    """An affine map from the axes `inputs` to the axes `outputs`: {kernel [*inputs, *outputs], bias [*outputs]}."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    std: float
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """[..., *inputs] -> [..., *outputs]."""
        kernel = self.param("kernel", nn.initializers.normal(self.std), (*self.inputs, *self.outputs))
        bias = self.param("bias", nn.initializers.zeros, tuple(self.outputs)) if self.use_bias else None
        return ops.linear(x, kernel, bias, n_in=len(self.inputs))


class LayerNorm(nn.Module):
    """LayerNorm with trainable scale and shift: {scale [d], bias [d]}."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """[b, t, d] -> [b, t, d]."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        return ops.layer_norm(x, scale, bias, self.config.layer_norm_epsilon)


def _dropout(module: nn.Module, x: Array, rate: float) -> Array:
    """Dropout where the module was given an rng for it."""
    if rate == 0 or not module.has_rng("dropout"):
        return x
    return ops.dropout(x, rate, module.make_rng("dropout"))


def _residual_std(config: GPTConfig) -> float:
    """Of the matrices that write to the residual stream: 2 * n_layer of them add up to a stream that is no larger for
    more layers (Radford et al. 2019, section 2.3).
    """
    return config.initializer_range / (2 * config.n_layer) ** 0.5


class Embedding(nn.Module):
    """Tokens and positions into the residual stream, and the stream back to tokens: {wte [v, d], wpe [p, d]}.

    Positions are drawn with half the standard deviation of tokens, as in OpenAI's code (0.01 and 0.02).
    """

    config: GPTConfig

    def setup(self) -> None:
        """Declares the two tables."""
        config, normal = self.config, nn.initializers.normal
        self.wte = self.param("wte", normal(config.initializer_range), (config.vocab_size, config.n_embd))
        self.wpe = self.param("wpe", normal(config.initializer_range / 2), (config.n_positions, config.n_embd))

    def __call__(
        self, tokens: Int[Array, "b t"], positions: Int[Array, "b t"] | None = None, dtype: Any = None
    ) -> Float[Array, "b t d"]:
        """Token + position embedding, after dropout, in `dtype` (None: the tables').

        Positions are 0 to t - 1 where not given. A token or position out of range gives a row of NaN.
        """
        positional = self.wpe[: tokens.shape[1]] if positions is None else _look_up(self.wpe, positions)
        x = _look_up(self.wte, tokens) + positional
        return _dropout(self, x.astype(dtype or x.dtype), self.config.embd_pdrop)

    def attend(self, x: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Logits by the inner product with every token's embedding, in at least float32."""
        return ops.einsum("btd,vd->btv", x, self.wte.astype(x.dtype))


def _look_up(table: Float[Array, "rows d"], index: Int[Array, "..."]) -> Float[Array, "... d"]:
    """Rows of a table; NaN for an index outside it, which plain indexing would turn into another row."""
    return table.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


class Head(nn.Module):
    """Logits by a matrix of their own, where the embeddings are not tied: {kernel [d, v]}."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """[b, t, d] -> [b, t, v], in at least float32."""
        config = self.config
        init = nn.initializers.normal(config.initializer_range)
        kernel = self.param("kernel", init, (config.n_embd, config.vocab_size))
        return ops.einsum("btd,dv->btv", x, kernel.astype(x.dtype))


class Attention(nn.Module):
    """Multi-head causal self-attention: {qkv {kernel [d, 3, h, k], bias [3, h, k]}, out {kernel [h, k, d], bias [d]}}.

    One fused projection gives queries, keys and values. Its kernel, reshaped, is GPT-2's `c_attn` [d, 3d].
    """

    config: GPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], visible: Bool[Array, "#b t s"] | None = None, tap: Tap = no_tap
    ) -> Float[Array, "b t d"]:
        """Mixes information between positions; dropout on the pattern."""
        config = self.config
        d, h, k = config.n_embd, config.n_head, config.head_width
        qkv = Linear((d,), (3, h, k), config.initializer_range, config.qkv_bias, name="qkv")(x)
        # `split`, whose gradient is one concatenation; that of indexing would be a sum of three padded arrays.
        q, key, v = (jnp.squeeze(part, 2) for part in jax.lax.split(qkv, (1, 1, 1), axis=2))
        rate = config.attn_pdrop if self.has_rng("dropout") else 0.0
        z = ops.causal_attention(
            tap("q", q),
            tap("k", key),
            tap("v", v),
            visible,
            dropout_rate=rate,
            dropout_key=self.make_rng("dropout") if rate else None,
            tap=tap,
        )
        return Linear((h, k), (d,), _residual_std(config), name="out")(tap("z", z))


class MLP(nn.Module):
    """Two linear maps with a non-linearity between: {up {kernel [d, f], bias [f]}, down {kernel [f, d], bias [d]}}."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Float[Array, "b t d"], tap: Tap = no_tap) -> Float[Array, "b t d"]:
        """Transforms each position on its own."""
        config = self.config
        d, f = config.n_embd, config.mlp_width
        x = tap("mlp_pre", Linear((d,), (f,), config.initializer_range, name="up")(x))
        x = tap("mlp_post", ops.ACTIVATION_FUNCTIONS[config.activation_function](x))
        return Linear((f,), (d,), _residual_std(config), name="down")(x)


class Block(nn.Module):
    """GPT-2's block, with LayerNorm before each part ("pre-LN").

        x = x + dropout(attention(layer_norm(x)))
        x = x + dropout(mlp(layer_norm(x)))

    A block of one's own is a module that is made from a GPTConfig and called like this one. It goes in by
    `GPT(config, block=MyBlock)` or `forward(..., block=MyBlock)`.
    """

    config: GPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], visible: Bool[Array, "#b t s"] | None = None, tap: Tap = no_tap
    ) -> Float[Array, "b t d"]:
        """One layer: the residual stream in and out."""
        config = self.config
        x = tap("resid_pre", x)
        y = tap("ln_1", LayerNorm(config, name="ln_1")(x))
        y = Attention(config, name="attn")(y, visible, tap)
        x = tap("resid_mid", x + tap("attn_out", _dropout(self, y, config.resid_pdrop)))
        y = tap("ln_2", LayerNorm(config, name="ln_2")(x))
        y = MLP(config, name="mlp")(y, tap)
        return tap("resid_post", x + tap("mlp_out", _dropout(self, y, config.resid_pdrop)))


class PostLNBlock(nn.Module):
    """The first Transformer's block, with LayerNorm after each addition ("post-LN"); same parameters as `Block`.

    x = layer_norm(x + dropout(attention(x)))
    x = layer_norm(x + dropout(mlp(x)))
    """

    config: GPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], visible: Bool[Array, "#b t s"] | None = None, tap: Tap = no_tap
    ) -> Float[Array, "b t d"]:
        """One layer: the residual stream in and out."""
        config = self.config
        x = tap("resid_pre", x)
        y = Attention(config, name="attn")(x, visible, tap)
        x = x + tap("attn_out", _dropout(self, y, config.resid_pdrop))
        x = tap("resid_mid", tap("ln_1", LayerNorm(config, name="ln_1")(x)))
        y = MLP(config, name="mlp")(x, tap)
        x = x + tap("mlp_out", _dropout(self, y, config.resid_pdrop))
        return tap("resid_post", tap("ln_2", LayerNorm(config, name="ln_2")(x)))


class NoLNBlock(nn.Module):
    """A block without LayerNorm, to see what it is there for; parameters as `Block`'s, less ln_1 and ln_2.

    x = x + dropout(attention(x))
    x = x + dropout(mlp(x))
    """

    config: GPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], visible: Bool[Array, "#b t s"] | None = None, tap: Tap = no_tap
    ) -> Float[Array, "b t d"]:
        """One layer: the residual stream in and out."""
        config = self.config
        x = tap("resid_pre", x)
        y = Attention(config, name="attn")(x, visible, tap)
        x = tap("resid_mid", x + tap("attn_out", _dropout(self, y, config.resid_pdrop)))
        y = MLP(config, name="mlp")(x, tap)
        return tap("resid_post", x + tap("mlp_out", _dropout(self, y, config.resid_pdrop)))


BlockType = Callable[[GPTConfig], nn.Module]
BLOCKS: dict[str, BlockType] = {"pre_ln": Block, "post_ln": PostLNBlock, "no_ln": NoLNBlock}


def block_name(block: BlockType) -> str:
    """The name in `BLOCKS`, or the class's own."""
    return next((name for name, known in BLOCKS.items() if known is block), getattr(block, "__name__", repr(block)))


class GPT(nn.Module):
    """GPT-2: embeddings, n_layer blocks, final LayerNorm, logits (Radford et al. 2019).

    Attributes:
        config: sizes, rates and choices.
        block: the module of one layer. All layers' parameters are stacked, so that they can be walked by a scan,
            sharded and indexed as an axis.
        layers: how the stack is walked: "scan" compiles one layer, whatever the depth; "unroll" compiles each, and
            runs faster; "auto" unrolls up to 12 layers. The results are the same.
        remat: keep only each block's input for the backward pass and compute the rest again (jax.checkpoint).
        compute_dtype: of activations and matrix products, such as jnp.bfloat16; None is that of the parameters.
    """

    config: GPTConfig
    block: BlockType = Block
    layers: Layers = "auto"
    remat: bool = False
    compute_dtype: Any = None

    def setup(self) -> None:
        """Declares the parameters."""
        config = self.config
        if self.layers not in ("auto", "scan", "unroll"):
            raise ValueError(f"layers must be 'auto', 'scan' or 'unroll', got {self.layers!r}")
        self.embedding = Embedding(config)
        nn.share_scope(self, self.embedding)  # wte and wpe stand at the root of the tree
        self.blocks = self.param("blocks", self._init_blocks)
        self.ln_f = LayerNorm(config)
        if not config.tie_word_embeddings:
            self.head = Head(config)

    def _init_blocks(self, key: Key[Array, ""]) -> PyTree[Array]:
        """The parameters of n_layer blocks, drawn independently, stacked."""
        block = self.block(self.config, parent=None)  # type: ignore[call-arg]  # every linen module takes `parent`
        x = jnp.zeros((1, 1, self.config.n_embd))
        return jax.lax.map(lambda key: block.init(key, x)["params"], jax.random.split(key, self.config.n_layer))

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        mask: Bool[Array, "b t"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
        capture: Sequence[str] = (),
        edit: Edit | None = None,
    ) -> tuple[Float[Array, "b t v"], dict[str, Array]]:
        """Next-token logits, and the activations that `capture` names.

        Args:
            tokens: ids in [0, v). One outside gives NaN logits throughout its row.
            mask: True at tokens, False at padding, which nothing sees; positions count tokens only. The ids at padding
                do not matter, be they in range or not.
            segment_ids: of packed documents; each sees itself alone, its positions from 0.
            capture: names of sites (`flax_gpt.activations`).
            edit: (site, layer, value) -> value, called at every site.

        Returns:
            logits [b, t, v] in at least float32, and {site: activation}, those of blocks stacked on a leading axis l.

        Raises:
            ValueError: t is above n_positions, or a site to capture does not exist.
        """
        t = tokens.shape[1]
        if t > self.config.n_positions:
            raise ValueError(f"the sequence has {t} tokens, more than n_positions={self.config.n_positions}")
        visible = None
        positions = None
        if mask is not None or segment_ids is not None:
            visible = ops.visible_keys(t, mask, segment_ids)
            positions = ops.positions(visible)
        if mask is not None:
            tokens = jnp.where(mask, tokens, 0)

        tap = Recorder(capture, edit)
        x = tap("embed", self.embedding(tokens, positions, self.compute_dtype))
        x, in_blocks, seen = self._walk(x, visible, capture, edit)
        logits = tap("logits", self.unembed(tap("ln_f", self.ln_f(x))))
        check_captured(capture, [*seen, *tap.seen])
        return logits, {**tap.captured, **in_blocks}

    def unembed(self, x: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """The logits of what the final LayerNorm gave, in at least float32."""
        return self.embedding.attend(x) if self.config.tie_word_embeddings else self.head(x)

    def _walk(
        self, x: Float[Array, "b t d"], visible: Bool[Array, "#b t s"] | None, capture: Sequence[str], edit: Edit | None
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], list[str]]:
        """Through all the blocks: the stream that leaves the last, what was captured, the names of the sites."""
        config = self.config
        n_layer = config.n_layer
        block = self.block(config, parent=None)  # type: ignore[call-arg]
        seen: list[str] = []

        def layer(x: Array, params: PyTree[Array], index: Any, key: Any) -> tuple[Array, dict[str, Array]]:
            tap = Recorder(capture, edit, index) if capture or edit else no_tap
            rngs = {} if key is None else {"dropout": key}
            x = block.apply({"params": params}, x, visible, tap, rngs=rngs)  # type: ignore[assignment]
            if isinstance(tap, Recorder):
                seen.extend(tap.seen)
                return x, tap.captured
            return x, {}

        if self.remat:
            layer = jax.checkpoint(layer)
        keys = jax.random.split(self.make_rng("dropout"), n_layer) if self.has_rng("dropout") else None
        if self.layers == "scan" or (self.layers == "auto" and n_layer > UNROLL_AT_MOST):
            x, captured = jax.lax.scan(
                lambda x, of_layer: layer(x, *of_layer), x, (self.blocks, jnp.arange(n_layer), keys)
            )
            return x, captured, seen
        captured_each = []
        for index, params in enumerate(unstack(self.blocks, n_layer)):
            # An array, not an int: an edit that works here works under scan too.
            x, captured = layer(x, params, np.int32(index), None if keys is None else keys[index])
            captured_each.append(captured)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *captured_each), seen


def unstack(tree: PyTree[Array], n: int) -> list[PyTree[Array]]:
    """A tree of arrays with a leading axis of n as a list of n trees without it.

    By `split`, whose gradient is one concatenation; that of n slices would be a sum of n zero-padded arrays.
    """
    parts = jax.tree.map(lambda x: [jnp.squeeze(part, 0) for part in jax.lax.split(x, (1,) * n)], tree)
    return [jax.tree.map(lambda _, p, i=i: p[i], tree, parts) for i in range(n)]
