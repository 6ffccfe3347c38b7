"""The pictures hold what they were given."""

import numpy as np
import pytest

from flax_gpt.interp import attention_plot, lens_plot, sweep_plot


def drawn(figure, path):
    figure.savefig(path)
    assert path.stat().st_size > 5000
    return figure.axes


def test_a_sweep_shows_its_values_and_axes(tmp_path):
    values = np.arange(10.0).reshape(2, 5) - 3
    axes, *_ = drawn(sweep_plot(values, "what was found", center=0.0, unit="nats"), tmp_path / "a.png")
    np.testing.assert_array_equal(axes.images[0].get_array(), values)
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("head", "layer", "what was found")
    assert axes.images[0].get_clim() == (-6, 6)
    assert [text.get_text() for text in axes.texts][:2] == ["-3", "-2"]
    labels = ["a", " b", "c$", "\n", "e"]
    axes, *_ = drawn(sweep_plot(values, "", columns=labels, over=("layer", "position")), tmp_path / "b.png")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "·b", r"c\$", "↵", "e"]
    large = drawn(sweep_plot(np.zeros((40, 30)), "", center=0.0), tmp_path / "c.png")[0]
    assert not large.texts
    with pytest.raises(ValueError, match=r"two axes to be drawn, got shape \(2, 2, 2\)"):
        sweep_plot(np.zeros((2, 2, 2)), "")
    with pytest.raises(ValueError, match="4 labels for 5 entries"):
        sweep_plot(values, "", columns=labels[:4])


def test_attention_has_a_panel_a_head(tmp_path):
    pattern = np.tri(6)[None].repeat(5, 0) / np.arange(1, 7)[:, None]
    figure = attention_plot(pattern, list("abcdef"), "layer 0")
    panels = [axes for axes in drawn(figure, tmp_path / "a.png") if axes.images and axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [f"head {i}" for i in range(5)]
    np.testing.assert_array_equal(panels[3].images[0].get_array(), pattern[3])
    with pytest.raises(ValueError, match=r"shape \[h, 3, s\]"):
        attention_plot(pattern, list("abc"))


def test_a_lens_shows_the_likeliest_token_of_each_layer(tmp_path):
    logits = np.random.default_rng(0).normal(size=(4, 3, 7)) * 3
    axes, *_ = drawn(lens_plot(logits, ["x", "y", "z"], lambda i: f"<{i}>"), tmp_path / "a.png")
    assert [text.get_text() for text in axes.texts] == [f"<{i}>" for i in logits.argmax(-1).ravel()]
    largest = np.exp(logits.max(-1)) / np.exp(logits).sum(-1)
    np.testing.assert_allclose(axes.images[0].get_array(), largest)
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["embeddings", "layer 0"]
