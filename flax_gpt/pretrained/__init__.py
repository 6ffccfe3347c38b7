"""Weights in and out, as safetensors under GPT-2's published names.

Nothing is unpickled but nanoGPT's checkpoints, by torch's reader of tensors and plain values alone.
"""

from flax_gpt.pretrained.files import load_pretrained, save_pretrained
from flax_gpt.pretrained.hub import resolve_folder
from flax_gpt.pretrained.names import from_gpt2_names, to_gpt2_names

__all__ = ["from_gpt2_names", "load_pretrained", "resolve_folder", "save_pretrained", "to_gpt2_names"]
