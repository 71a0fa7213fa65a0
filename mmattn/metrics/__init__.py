"""Scores of generated text against references: BLEU, chrF, CIDEr-D, ROUGE-L, diagnostics, bootstrap intervals.

They need no Java and no network.
Everywhere `hypotheses` is a list of N strings and `references` a list of N lists of strings: `references[i]` are the
references of `hypotheses[i]`, one or more, not the same number for each.
"""

from mmattn.metrics.bleu import bleu_orders, bleu_signature, corpus_bleu
from mmattn.metrics.bootstrap import Interval, bootstrap
from mmattn.metrics.captions import caption_scores, normalize_caption, repeats
from mmattn.metrics.cider import cider_d, cider_d_scores
from mmattn.metrics.rouge import rouge_l, rouge_l_scores
from mmattn.metrics.translation import bleu_interval, detokenize, translation_scores, words_for_bleu

__all__ = [
    "Interval",
    "bleu_interval",
    "bleu_orders",
    "bleu_signature",
    "bootstrap",
    "caption_scores",
    "cider_d",
    "cider_d_scores",
    "corpus_bleu",
    "detokenize",
    "normalize_caption",
    "repeats",
    "rouge_l",
    "rouge_l_scores",
    "translation_scores",
    "words_for_bleu",
]
