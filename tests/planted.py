"""What tests on a GPU plant in rendered sources and which blocks they take, where tests without one can see that it still fits the code."""

from __future__ import annotations

import re

from codegen.render import Source
from test_mutants import edited

SEQUENCE_SHAPES = ((64, 4, 32, 32), (128, 8, 65, 65), (72, 3, 19, 40))
"""dim, heads, height, width of blocks for which a search of the `sequence` family has other starts than its default, on both axes."""


def wrong_scale(source: Source) -> Source:
    """Scores half as large again."""
    return edited(source, "EXPONENT_SCALE =", "EXPONENT_SCALE = 1.5f *")


def behind_the_output(source: Source) -> Source:
    """Each store of a `sequence` kernel of 32 tokens of 64 channels a sequence also writes an element behind y."""
    store = "store_global(y + at, pair);"
    return edited(source, re.escape(store), f"{store} put(y + sequences * 2048 + 3, 1.0f);")


def into_the_input(source: Source) -> Source:
    """A row kernel of the `sequence` family writes an element of x before it reads any for a second time."""
    load = "load_and_normalise<Row>(x,"
    return edited(source, re.escape(load), f"const_cast<float*>(x)[5] = 1.0f;\n  {load}")
