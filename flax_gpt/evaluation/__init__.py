"""Evaluation of trained models: perplexity of texts of any length, and questions with choices."""

from flax_gpt.evaluation.choices import (
    ChoiceScore,
    LastWordScore,
    Question,
    read_questions,
    score_continuations,
    score_questions,
)
from flax_gpt.evaluation.perplexity import TextScore, score_ids, score_text, sliding_window_scores, window_scores

__all__ = [
    "ChoiceScore",
    "LastWordScore",
    "Question",
    "TextScore",
    "read_questions",
    "score_continuations",
    "score_ids",
    "score_questions",
    "score_text",
    "sliding_window_scores",
    "window_scores",
]
