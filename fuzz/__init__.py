"""Fuzzing: bytes from strangers either parse, or raise our own error, within bounded memory.

``python -m fuzz --help`` runs it; ``docs/fuzzing.md`` says how, and what came out.
"""

from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
"""One folder of seeds per target, written by ``python -m fuzz.make_corpus``."""
