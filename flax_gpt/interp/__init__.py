"""Looking inside: interventions and their readings as pure functions, each one compiled program.

All take (config, params, tokens, ...) and return arrays; `flax_gpt.interp.figures` draws them.
"""

from flax_gpt.interp.attribution import attribution_patch
from flax_gpt.interp.edits import replace, silence_heads, steer, steering_vectors
from flax_gpt.interp.figures import attention_plot, lens_plot, sweep_plot
from flax_gpt.interp.folding import center_writes, fold_layer_norm, fold_value_bias
from flax_gpt.interp.heads import (
    Composition,
    HeadScores,
    composition,
    copying_scores,
    head_scores,
    ov_circuit,
    qk_circuit,
)
from flax_gpt.interp.lenses import LogitParts, direct_logit_attribution, logit_lens
from flax_gpt.interp.patching import ablate_heads, patch_sweep
from flax_gpt.interp.paths import path_patch
from flax_gpt.interp.probes import Probes, fit_probes, probe_accuracy, probe_logits

__all__ = [
    "Composition",
    "HeadScores",
    "LogitParts",
    "Probes",
    "ablate_heads",
    "attention_plot",
    "attribution_patch",
    "center_writes",
    "composition",
    "copying_scores",
    "direct_logit_attribution",
    "fit_probes",
    "fold_layer_norm",
    "fold_value_bias",
    "head_scores",
    "lens_plot",
    "logit_lens",
    "ov_circuit",
    "patch_sweep",
    "path_patch",
    "probe_accuracy",
    "probe_logits",
    "qk_circuit",
    "replace",
    "silence_heads",
    "steer",
    "steering_vectors",
    "sweep_plot",
]
