"""Data: batches, tokenizers, text corpora of any size, and toy tasks whose best possible loss is known."""

from flax_gpt.data.bpe import GPT2Tokenizer
from flax_gpt.data.corpus import Corpus, read_text, stdlib_text
from flax_gpt.data.prepare import prepare
from flax_gpt.data.shards import ShardedCorpus, TokenStream, is_shards_folder, open_shards
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
    "GPT2Tokenizer",
    "IdTokenizer",
    "Induction",
    "MarkovChain",
    "ModularAddition",
    "ShardedCorpus",
    "Sort",
    "Source",
    "Task",
    "TokenStream",
    "Tokenizer",
    "is_shards_folder",
    "load_tokenizer",
    "open_shards",
    "prepare",
    "read_text",
    "save_tokenizer",
    "stdlib_text",
]
