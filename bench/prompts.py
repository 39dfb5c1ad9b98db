"""Prompts: some whose greedy continuation is beyond doubt, and cold ones that nobody has seen before."""

from __future__ import annotations

import random
from typing import Final

_WORDS: Final = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community name
"""

CERTAIN = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday,",
    "2020, 2021, 2022, 2023, 2024, 2025, 2026, 2027, 2028, 2029, 2030, 2031, 2032,",
)
"""Continued the same way whatever the batch shape: quantised weights give slightly different numbers in
batches of other shapes, which decides only where two tokens are nearly as likely."""


def cold_prompt(words: int, seed: int) -> str:
    """Words in an order that ``seed`` alone gives, so that no cache of earlier prompts helps.

    Each is one token in the vocabularies of the models this is used with; servers report the exact number.
    """
    dice, known = random.Random(seed), _WORDS.split()
    return " ".join(dice.choice(known) for _ in range(words))
