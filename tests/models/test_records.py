"""What was tried: the records that come with the package, and the document made of them."""

from __future__ import annotations

from pathlib import Path

from skippy.models import FAMILIES, RULES_VERSION, GGUFHeader
from skippy.models.records import Record, Records, engine_version, own_records
from skippy.models.shape import shape_of
from skippy.models.tiny import write_tiny_model
from tests.support.families import DOCUMENT, VARIANTS, document
from tests.support.tiny_models import write_tiny


def test_the_document_says_what_the_records_do() -> None:
    assert DOCUMENT.read_text() == document(own_records()), "run `make families`"


def test_the_records_are_of_this_table_and_this_engine() -> None:
    records = own_records()
    assert (records.rules_version, records.llama_cpp_python) == (RULES_VERSION, engine_version())
    assert [record.model for record in records.records] == [str(variant) for variant in VARIANTS]
    assert {record.model: record.rules for record in records.records} == {
        record.model: FAMILIES[record.architecture].text for record in records.records
    }
    assert [record.model for record in records.records if not record.is_exact] == []
    served = {name for name, family in FAMILIES.items() if family.generates}
    assert records.architectures == served
    assert len(served) == 117  # as docs/models.md says


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = Records(
        3,
        "0.1",
        (
            Record("a", ("llama", "tensor output.weight"), "phase=4", 5, 2, largest_error=0.0),
            Record("b", ("gemma",), "", 0, failed=1, differs=2, largest_error=0.25),
        ),
    )
    records.write(tmp_path / "records.json")
    assert Records.read((tmp_path / "records.json").read_text()) == records
    assert records.architectures == {"llama"}
    assert records.table().splitlines()[2:] == [
        "| a | exact | 5 | 2 |",
        "| b | wrong, by up to 0.25 | 0 |  |",
    ]


def test_what_makes_a_shape(tmp_path: Path) -> None:
    tied = shape_of(GGUFHeader.read(write_tiny(tmp_path / "a.gguf", "llama", 2)))
    large = shape_of(GGUFHeader.read(write_tiny(tmp_path / "b.gguf", "llama", 7, width=128)))
    untied = shape_of(GGUFHeader.read(write_tiny(tmp_path / "c.gguf", "llama", 2, tied=False)))
    assert tied == large == ("llama",)
    assert untied == ("llama", "tensor output.weight")


def test_facts_about_metadata_and_tensors(tmp_path: Path) -> None:
    def shape(model: str, layers: int | None = None, **metadata: object) -> set[str]:
        keys = {key.replace("__", "."): value for key, value in metadata.items()}
        path = write_tiny_model(
            tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", model, layers, metadata=keys
        )
        return set(shape_of(GGUFHeader.read(path)))

    assert shape("gemma2") == {
        "gemma2",
        "attention.sliding_window: set",
        "attention.sliding_window_pattern: each layer, some without",
    }
    gone = shape("gemma2", attention__sliding_window_pattern=None)
    assert gone == {"gemma2", "attention.sliding_window: set"}
    nowhere = shape("gemma2", attention__sliding_window_pattern=[0])
    assert "attention.sliding_window_pattern: nowhere" in nowhere
    assert "46 layers: not to be changed" in shape("gemma2", 46)
    assert shape("gemma", novel=0) == {"gemma", "novel: 0, which is not known"}
    assert shape("gemma", novel=[1, 0]) == {"gemma", "novel: each layer, some without"}
    # 12 where the file does not say, so 0 is another thing.
    assert "embedding_scale: 0" in shape("minicpm", embedding_scale=0.0)
    assert "embedding_scale: 0" not in shape("granite", embedding_scale=0.0)
    assert "tensor position_embd.weight" in shape("gpt2")
