"""Records of what was cut and compared: which shapes of models need no comparison of their own.

``records.json`` beside this file is written by ``make families``, from the project's own test set; the table
in ``docs/models.md`` is made of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Final

import attrs

from skippy.models import families
from skippy.models.gguf import GGUFHeader
from skippy.models.plan import RULES_VERSION
from skippy.models.shape import shape_of

RECORDS: Final = "records.json"


def engine_version() -> str:
    """The version of llama-cpp-python that is installed."""
    return metadata.version("llama-cpp-python")


@attrs.frozen(slots=True)
class Record:
    """One model that was cut everywhere.

    Attributes:
        model: what it is called.
        shape: what decided how it was cut (:func:`~skippy.models.shape.shape_of`).
        rules: the line of the table by which it was cut (:attr:`~skippy.models.Family.text`).
        exact, refused, differs, failed: ways to cut it, by what came of them.
        largest_error: of any logit.
    """

    model: str
    shape: tuple[str, ...]
    rules: str
    exact: int
    refused: int = 0
    differs: int = 0
    failed: int = 0
    largest_error: float | None = None

    @property
    def architecture(self) -> str:
        return self.shape[0]

    @property
    def is_exact(self) -> bool:
        """Wherever it may be cut, and it may be somewhere, every bit was the same."""
        return self.exact > 0 and not self.differs and not self.failed

    @property
    def verdict(self) -> str:
        if self.differs:
            return "wrong" if self.largest_error is None else f"wrong, by up to {self.largest_error:.2g}"
        return "failed" if self.failed else "exact" if self.exact else "refused"


@attrs.frozen(slots=True)
class Records:
    """All of them, and what they were made with.

    Attributes:
        rules_version: of slicing.
        llama_cpp_python: what the models were run by.
        records: in the order of the test set.
    """

    rules_version: int
    llama_cpp_python: str
    records: tuple[Record, ...]

    def cover(self, header: GGUFHeader, engine: str | None = None) -> bool:
        """Whether a model of this one's shape was cut by these rules, run by this engine, and was exact.

        Args:
            engine: default: the version that is installed.
        """
        if (self.rules_version, self.llama_cpp_python) != (RULES_VERSION, engine or engine_version()):
            return False
        shape = shape_of(header)
        family = families.FAMILIES.get(shape[0])
        rules = None if family is None else family.text
        found = [record for record in self.records if (record.shape, record.rules) == (shape, rules)]
        return bool(found) and all(record.is_exact for record in found)

    @property
    def architectures(self) -> frozenset[str]:
        """Those of which every model that was tried is exact."""
        return frozenset(r.architecture for r in self.records) - frozenset(
            r.architecture for r in self.records if not r.is_exact
        )

    def table(self) -> str:
        """The records as a table in Markdown."""
        head = "| model | verdict | ways to cut it that are exact | refused |\n| --- | --- | --- | --- |\n"
        return head + "".join(
            f"| {record.model} | {record.verdict} | {record.exact} | {record.refused or ''} |\n"
            for record in self.records
        )

    def write(self, path: Path) -> None:
        """Write them, one to a line."""
        fields = {"rules_version": self.rules_version, "llama_cpp_python": self.llama_cpp_python}
        head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in fields.items())
        lines = ",\n".join(f" {json.dumps(_compact(record))}" for record in self.records)
        path.write_text(f'{{\n{head}"records": [\n{lines}\n]\n}}\n')

    @classmethod
    def read(cls, text: str) -> Records:
        """What :meth:`write` has written."""
        value = json.loads(text)
        return cls(value["rules_version"], value["llama_cpp_python"], tuple(map(_record, value["records"])))


def new_records(records: Iterable[Record]) -> Records:
    """Records made with what is installed."""
    return Records(RULES_VERSION, engine_version(), tuple(records))


@functools.cache
def own_records() -> Records:
    """Those that come with the package."""
    return Records.read(resources.files(__package__).joinpath(RECORDS).read_text())


def _compact(record: Record) -> dict[str, Any]:
    fields = attrs.fields(Record)
    return {f.name: getattr(record, f.name) for f in fields if getattr(record, f.name) != f.default}


def _record(value: dict[str, Any]) -> Record:
    shape: Sequence[str] = value.pop("shape")
    return Record(shape=tuple(shape), **value)
