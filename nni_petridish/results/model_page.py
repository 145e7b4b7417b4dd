"""All about one model of a gallery, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nni_petridish.core.genotype import Genotype
from nni_petridish.registry import Measure

if TYPE_CHECKING:
    from pathlib import Path

    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.gallery.saved_model import SavedModel
    from nni_petridish.search.records import ModelRecord
    from nni_petridish.search.search import Search


def describe_model(gallery: Gallery, search: Search, record: ModelRecord, measure: Measure) -> str:
    """Return lines on a model: origin, results, training, cells, and how to use it.

    Parameters
    ----------
    gallery, search
        The gallery and the state of its search.
    record
        The model.
    measure
        The measure of the search.
    """
    documents = gallery.load_documents(record.id)
    growth, folder, id = documents["lineage"], gallery.folder, record.id
    lines = [
        f"lineage:    {' > '.join(search.lineage(record.id))}",
        f"growth:     λ {growth['l1']:g}, I_max {growth['i_max']}, seed {growth['seed']}",
        *_metrics(documents["metrics"].get("metrics", {}), measure),
        *(_phase(name, records) for name, records in documents["history"].items()),
        *_cells(Genotype.from_dict(documents["genotype"])),
        *_data(documents.get("facts", {})),
        f"files:      {folder / 'models' / id}",
        f'load:       nni_petridish.load_model("{folder}", "{id}")',
        f"export:     nni-petridish export {folder} {id} --format onnx --out {id}.onnx",
        f"train:      nni-petridish train {folder} {id}",
    ]
    return "\n".join(lines)


def describe_file(model: SavedModel, path: Path, measure: Measure) -> str:
    """Return lines on an exported model: results, size, space, cells, and how to use it."""
    facts = model.facts
    numbers = {key: facts[key] for key in ("multiply_adds", "parameters") if key in facts}
    lines = [
        f"model:      {facts.get('id', 'unnamed')}",
        *_metrics({key: value for key, value in facts.items() if "error" in key}, measure),
        *(f"{key.replace('_', '-') + ':':14} {value:,}" for key, value in numbers.items()),
        *(f"{key + ':':16} {value}" for key, value in model.space.items()),
        *_cells(model.genotype),
        *_data(facts),
        f'load:       nni_petridish.load_model("{path}")',
        f"export:     nni-petridish export {path} --format onnx --out model.onnx",
    ]
    return "\n".join(lines)


def _metrics(metrics: dict[str, Any], measure: Measure) -> list[str]:
    shown = {measure.name if key == "error" else key: value for key, value in metrics.items()}
    texts = [f"{name} {value:.4f}" for name, value in shown.items() if isinstance(value, float)]
    return [f"validation: {', '.join(texts)}"] if texts else []


def _phase(name: str, records: list[dict[str, Any]]) -> str:
    seconds = sum(record.get("seconds", 0.0) for record in records)
    loss = records[-1].get("loss") if records else None
    end = "" if loss is None else f", training loss {loss:.4f} at the end"
    return f"{name + ':':11} {len(records)} epochs, {seconds:.0f} s{end}"


def _cells(genotype: Genotype) -> list[str]:
    wider = f"width: {genotype.width:g} times the filters of the space"
    lines = [] if genotype.width == 1 else [wider]
    for key, learners in genotype.learners_by_key().items():
        lines.append(f"cell {key}:" + ("" if learners else " as in the seed"))
        for number, learner in enumerate(learners):
            shortcuts = ", ".join(f"{op}({source})" for source, op in learner)
            lines.append(f"  growth {number + 1}: {shortcuts}")
    return lines


def _data(facts: dict[str, Any]) -> list[str]:
    """Return a line on the inputs that the model takes, if it knows them."""
    if "words" in facts:
        return [f"inputs:     {len(facts['words']):,} words"]
    if "classes" not in facts:
        return []
    names = ", ".join(facts["classes"][:10]) + (", ..." if len(facts["classes"]) > 10 else "")
    inputs = "as in training"
    if "pixel_range" in facts:
        low, high = facts["pixel_range"]
        inputs = f"pixels from {low} to {high}"
    elif "columns" in facts:
        inputs = f"rows of {len(facts['columns'])} columns"
    return [f"inputs:     {inputs}; classes {names}"]
