"""What can go wrong with model files. Every error says which file, what was found and what would be right."""

from __future__ import annotations

import os
from pathlib import Path


def show(text: str) -> str:
    """A text from a file, fit for an error message: quoted, printable, at most 80 characters."""
    return repr(text if len(text) <= 80 else text[:79] + "…")


def printable(text: str) -> str:
    """A name from a file, safe for a terminal: printable, at most 200 characters."""
    return "".join(c if c.isprintable() else " " for c in text[:200])


class ModelError(Exception):
    """Base of everything this package raises about a model file, a slice or the slice cache."""


class AtPathError(ModelError):
    """Something is wrong with a file or a folder.

    Attributes:
        path: which one.
        message: the reason, without the path.
    """

    def __init__(self, path: str | os.PathLike[str], message: str) -> None:
        super().__init__(f"{os.fspath(path)}: {message}")
        self.path = Path(path)
        self.message = message


class GGUFError(AtPathError):
    """A file is missing, unreadable, damaged, or not a GGUF this version reads."""


class PackageError(GGUFError):
    """A layer package whose manifest or parts are wrong or contradict each other; ``path`` is at fault."""


class CheckpointError(AtPathError):
    """A checkpoint folder, or a file in it, is incomplete, damaged, or of a kind that is not converted."""


class HubError(ModelError):
    """A model on a hub is not there, may not be had, or cannot be reached; the text says what to do.

    Attributes:
        message: the reason, without the reference.
    """

    def __init__(self, reference: str, message: str) -> None:
        super().__init__(f"{reference}: {message}")
        self.message = message


class LayerRangeError(ModelError, ValueError):
    """The asked layer range does not exist in the file; the text states the valid range."""


class UnsupportedArchitectureError(ModelError):
    """The model can run whole, but skippy has no rule for cutting it.

    Attributes:
        architecture: the file's ``general.architecture``.
        needed: a sentence on what cutting it would take.
    """

    def __init__(self, architecture: str, needed: str) -> None:
        super().__init__(
            f"models of architecture {show(architecture)} cannot be split yet: {needed} "
            "(run the model unsplit, as one stage with all layers)"
        )
        self.architecture = architecture
        self.needed = needed


class CutError(UnsupportedArchitectureError):
    """The architecture can be cut, but not there."""

    def __init__(self, architecture: str, needed: str) -> None:
        ModelError.__init__(
            self, f"models of architecture {show(architecture)} cannot be cut there: {needed}"
        )
        self.architecture = architecture
        self.needed = needed


class SliceWriteError(ModelError):
    """A slice or cache entry could not be written (disk full, no permission, …); nothing partial stays."""
