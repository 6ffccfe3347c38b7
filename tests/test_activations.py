"""Reading and changing what is inside a model: capture, edit, and what they cost."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tiny import BATCH, CONFIG, T, draw, random_params, random_tokens

from flax_gpt import MLP, SITES, forward
from flax_gpt.activations import BLOCK_SITES, no_tap
from flax_gpt.forward import _forward_jit

TOKENS = random_tokens()
L, B, D, H, K, F, V = 2, BATCH, 21, 3, 7, 29, 61
SHAPES = {
    **dict.fromkeys(("embed", "ln_f"), (B, T, D)),
    **dict.fromkeys(("resid_pre", "ln_1", "attn_out", "resid_mid", "ln_2", "mlp_out", "resid_post"), (L, B, T, D)),
    **dict.fromkeys(("q", "k", "v", "z"), (L, B, T, H, K)),
    **dict.fromkeys(("attn_scores", "pattern"), (L, B, H, T, T)),
    **dict.fromkeys(("mlp_pre", "mlp_post"), (L, B, T, F)),
    "logits": (B, T, V),
}


@pytest.fixture(scope="module")
def params():
    return random_params()


@pytest.fixture(scope="module")
def plain(params):
    return np.asarray(forward(CONFIG, params, TOKENS))


def shape_of(**kwargs):
    """The result of a forward pass that is traced and not run."""
    return jax.eval_shape(lambda params: forward(CONFIG, params, TOKENS, **kwargs), random_params())


# Capture


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_every_site_has_its_documented_shape(layers):
    assert SHAPES.keys() == set(SITES)
    _, acts = shape_of(capture=SITES, layers=layers)
    assert {site: (x.shape, x.dtype.name) for site, x in acts.items()} == {
        site: (shape, "float32") for site, shape in SHAPES.items()
    }


@pytest.mark.parametrize("capture", ["pattern", ("pattern",), ["pattern"]], ids=["str", "tuple", "list"])
def test_one_site_may_be_named_alone(capture):
    _, acts = shape_of(capture=capture)
    assert {site: x.shape for site, x in acts.items()} == {"pattern": SHAPES["pattern"]}


def test_without_capture_the_logits_come_alone():
    assert shape_of().shape == SHAPES["logits"]


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_an_unknown_site_is_answered_with_the_known_ones(layers):
    with pytest.raises(ValueError, match="no site 'residual' in this model; it has ") as error:
        shape_of(capture=("logits", "residual"), layers=layers)
    listed = str(error.value).splitlines()[0].split("it has ")[1].split(", ")
    assert sorted(listed) == sorted(SITES)


# Edit


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_an_edit_is_called_at_every_site_and_the_identity_changes_no_bit(params, layers):
    calls = []

    def edit(site, layer, value):
        calls.append((site, None if layer is None else (layer.shape, layer.dtype.name)))
        return value

    edited = jax.jit(lambda params: forward(CONFIG, params, TOKENS, edit=edit, layers=layers))(params)
    np.testing.assert_array_equal(edited, forward(CONFIG, params, TOKENS, layers=layers))
    inside = {(site, ((), "int32")) for site in BLOCK_SITES}
    assert set(calls) == inside | {(site, None) for site in ("embed", "ln_f", "logits")}


@pytest.fixture(scope="module")
def ablated(params):
    """The logits with the output of one head set to zero; layer and head are traced."""

    @jax.jit
    def run(layer, head):
        def edit(site, at, value):
            return jnp.where(at == layer, value.at[:, :, head].set(0), value) if site == "z" else value

        return forward(CONFIG, params, TOKENS, edit=edit, layers="scan")

    return run


def test_a_zeroed_head_is_a_head_that_writes_nothing(params, ablated):
    kernel = params["blocks"]["attn"]["out"]["kernel"].at[1, 2].set(0)
    without = jax.tree.map(lambda x: kernel if x.shape == kernel.shape else x, params)
    np.testing.assert_allclose(ablated(1, 2), forward(CONFIG, without, TOKENS), rtol=1e-5, atol=1e-5)


def test_every_layer_and_head_in_one_vmap_is_a_loop(ablated, plain):
    layer, head = (index.ravel() for index in jnp.meshgrid(jnp.arange(2), jnp.arange(3), indexing="ij"))
    sweep = jax.jit(jax.vmap(ablated))(layer, head)
    loop = jnp.stack([ablated(*at) for at in zip(layer, head, strict=True)])
    np.testing.assert_allclose(sweep, loop, rtol=1e-5, atol=1e-5)
    results = [plain, *sweep]
    assert all(np.abs(a - b).max() > 1e-2 for i, a in enumerate(results) for b in results[:i])  # no two are one


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_what_is_captured_is_the_edited_value_and_the_model_goes_on_with_it(params, layers):
    def edit(site, layer, value):
        return jnp.where(layer == 0, 0.5, value) if site == "resid_mid" else value

    _, acts = jax.jit(
        lambda: forward(
            CONFIG, params, TOKENS, edit=edit, capture=("resid_mid", "mlp_out", "resid_post"), layers=layers
        )
    )()
    assert (acts["resid_mid"][0] == 0.5).all()
    assert not (acts["resid_mid"][1] == 0.5).any()
    np.testing.assert_allclose(acts["resid_post"][0], 0.5 + acts["mlp_out"][0], rtol=1e-6)


def test_the_gradient_through_an_edit_is_that_of_finite_differences(x64):
    params, weights = random_params(dtype=np.float64), draw(B, T, V, dtype=np.float64)

    @jax.jit
    def score(vector):
        def edit(site, layer, value):
            return value + jnp.where(layer == 1, vector, 0) if site == "resid_mid" else value

        return (weights * forward(CONFIG, params, TOKENS, edit=edit, layers="scan")).sum()

    check_grads(score, (draw(D, dtype=np.float64, seed=1),), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_a_fresh_edit_over_traced_values_compiles_nothing(params, plain):
    def run(scale):
        return forward(CONFIG, params, TOKENS, edit=lambda site, _, x: x * scale if site == "attn_out" else x)

    jitted = jax.jit(chex.assert_max_traces(run, n=1))
    before = _forward_jit._cache_size()
    doubled, same = jitted(2.0), jitted(1.0)
    assert _forward_jit._cache_size() == before
    np.testing.assert_allclose(same, plain, rtol=1e-5, atol=1e-5)
    assert np.abs(doubled - plain).max() > 0.1


@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize(
    ("result", "got"),
    [(lambda x: None, "None"), (lambda x: 0.0, "0.0"), (lambda x: x[..., :1], r"shape \(2, 11, 3, 1\)")],
    ids=["None", "a number", "another shape"],
)
def test_an_edit_that_returns_something_else_is_refused_by_site_and_shape(layers, result, got):
    def edit(site, layer, value):
        return result(value) if site == "z" else value

    with pytest.raises(ValueError, match=rf"shape \(2, 11, 3, 7\) at site 'z', got {got}"):
        shape_of(edit=edit, layers=layers)


def test_an_edit_cannot_change_the_dtype_that_the_model_goes_on_with():
    def edit(site, layer, value):
        return value.astype(jnp.float16)

    logits, acts = shape_of(edit=edit, capture=("q", "embed"))
    assert {x.dtype.name for x in (logits, *acts.values())} == {"float32"}


# A block of one's own


class ParallelBlock(nn.Module):
    """An MLP whose output is gated, with a site for the gate."""

    config: object
    gates: tuple = ("gate",)

    @nn.compact
    def __call__(self, x, visible=None, tap=no_tap):
        """[b, t, d] -> [b, t, d]."""
        x = tap("resid_pre", x)
        y = MLP(self.config, name="mlp")(x, tap)
        for gate in self.gates:
            y = y * tap(gate, jax.nn.sigmoid(x))
        return tap("resid_post", x + y)


class TwiceTapped(ParallelBlock):
    """One name for two values."""

    gates: tuple = ("gate", "gate")


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_a_block_may_have_sites_of_its_own(layers):
    params = random_params(block=ParallelBlock)
    zero = jax.jit(
        lambda params: forward(
            CONFIG,
            params,
            TOKENS,
            block=ParallelBlock,
            capture=("gate", "resid_pre", "resid_post", "embed"),
            edit=lambda site, layer, x: jnp.where(layer == 1, 0, x) if site == "gate" else x,
            layers=layers,
        )
    )
    _, acts = zero(params)
    assert acts["gate"].shape == (L, B, T, D)
    np.testing.assert_array_equal(acts["resid_post"][1], acts["resid_pre"][1])
    np.testing.assert_allclose(acts["gate"][0], jax.nn.sigmoid(acts["embed"]), rtol=1e-6)
    with pytest.raises(ValueError, match=r"no site 'pattern'.*gate"):
        forward(CONFIG, params, TOKENS, block=ParallelBlock, capture="pattern", layers=layers)


def test_a_site_that_is_tapped_twice_is_refused():
    params = random_params(block=TwiceTapped)
    with pytest.raises(ValueError, match="'gate' is tapped twice"):
        forward(CONFIG, params, TOKENS, block=TwiceTapped, capture="gate")


# What it costs


@pytest.fixture(scope="module")
def compiled(params):
    """The compiled forward pass with these arguments."""

    def compile(**kwargs):
        run = jax.jit(lambda params, tokens: forward(CONFIG, params, tokens, layers="unroll", **kwargs))
        return run.lower(params, TOKENS).compile()

    return compile


def test_an_edit_that_changes_nothing_and_a_capture_of_one_site_cost_nothing(compiled):
    flops = {
        name: compiled(**kwargs).cost_analysis()["flops"]
        for name, kwargs in {
            "plain": {},
            "identity": {"edit": lambda site, layer, value: value},
            "capture": {"capture": "resid_mid"},
        }.items()
    }
    assert flops["identity"] == flops["plain"]
    # Of stacking the layers: a handful of operations an entry, where a second pass would double the count.
    assert 0 <= flops["capture"] - flops["plain"] <= 8 * math.prod(SHAPES["resid_mid"])


def test_capturing_nothing_and_editing_nothing_is_the_plain_program(params):
    def program(**kwargs):
        def run(params, tokens):
            return forward(CONFIG, params, tokens, **kwargs)

        return jax.jit(run).lower(params, TOKENS).as_text()

    assert program(capture=()) == program() == program(capture=[])
    assert program(capture="embed") != program()
