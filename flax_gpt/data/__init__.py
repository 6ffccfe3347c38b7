"""Data: batches, tokenizers, text corpora, and toy tasks whose best possible loss is known."""

from flax_gpt.data.corpus import Corpus, read_text, stdlib_text
from flax_gpt.data.source import Batch, Source
from flax_gpt.data.tasks import (
    TASKS,
    AssociativeRecall,
    Induction,
    MarkovChain,
    ModularAddition,
    Sort,
    Task,
)
from flax_gpt.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)

__all__ = [
    "TASKS",
    "AssociativeRecall",
    "Batch",
    "ByteTokenizer",
    "CharTokenizer",
    "Corpus",
    "IdTokenizer",
    "Induction",
    "MarkovChain",
    "ModularAddition",
    "Sort",
    "Source",
    "Task",
    "Tokenizer",
    "load_tokenizer",
    "read_text",
    "save_tokenizer",
    "stdlib_text",
]
