"""Measure the share of parameters and of operations that is sliced, for models of three libraries.

    python -m venv /tmp/zoo && /tmp/zoo/bin/pip install -e . transformers timm torchvision
    OMP_NUM_THREADS=1 /tmp/zoo/bin/python benchmarks/slicing_zoo.py

The models are those drawn by the seed of `foreign_models.py` ("drawn"), and those listed in
`cut_zoo.py` ("listed"). Nothing runs on ranks: the script only chooses slices for one process's
model. A numeric check, in float64, tests up to a dozen classes of a model: the units of all tensors
of a class are permuted alike, and the output must not change. The check excludes the rows of a
look-up table and classes whose input is gathered on its way. The order of ALiBi's heads matters, as
each has its own slope in a constant, of which each rank has its own part.

Words on the command line select models by a part of their name. The table is printed, and its rows
are written to benchmarks/results/slicing_zoo.json. The goal: nine tenths of the parameters are
sliced over 2 ranks in nine of ten drawn models.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cut_zoo
import foreign_models
import timm
import torch
import transformers
from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.losses.loss import CrossEntropy
from bigtrain.slice_planning.axis_classes import AxisClasses
from bigtrain.slice_planning.axis_trace import trace_axes
from bigtrain.slice_planning.choose import plan_slices
from bigtrain.slice_planning.plan import SlicingPlan
from bigtrain.tensors.tree import map_tensors, tree_tensors

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.shuffled_units import difference, randomize  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "slicing_zoo.json"
DEGREES = (2, 4)
BAR = 0.9
MOST_SHUFFLED, LARGE, OF_LARGE = 12, 12_000_000, 4
"""Classes of a model that are shuffled, each of which takes a forward pass; from how many
parameters on it is fewer, and how many."""
LIKE_ALIBI = {"mpt", "bloom", "CAUSAL_LM:mpt"}


def drawn(row: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Return a model of `foreign_models.py`, and a batch for it."""
    torch.manual_seed(0)
    model = foreign_models.MAKERS[row["library"]](row["name"]).train()
    if "side" in row:
        return model, torch.randn(2, 3, row["side"], row["side"])
    return model, torch.randint(foreign_models.WORDS, (2, foreign_models.LENGTH))


def listed(library: str, name: str) -> tuple[nn.Module, Any]:
    """Return a model of `cut_zoo.py`, and a batch for it."""
    torch.manual_seed(0)
    make = cut_zoo.of_timm if library == "timm" else cut_zoo.of_transformers
    model, inputs = make(name)
    return model.train(), inputs


def shares(plan: SlicingPlan, model: nn.Module) -> dict[str, Any]:
    """Return the sliced shares, and the largest tensors that stay whole."""
    names = {id(p): name for name, p in model.named_parameters()}
    sliced = {name for name in plan.slices if name in names.values()}
    holders = [
        m for m in model.modules() if any(id(p) in names for p in m.parameters(recurse=False))
    ]
    inside = [
        module
        for module in holders
        if any(names[id(p)] in sliced for p in module.parameters(recurse=False))
    ]
    total = sum(p.numel() for p in model.parameters())
    whole_shares = {
        name: round(p.numel() / total, 4)
        for name, p in model.named_parameters()
        if name not in sliced
    }
    parts: list[Any] = [*plan.classes, *plan.single_layers]
    largest = sorted(whole_shares, key=lambda name: -whole_shares[name])[:3]
    return {
        "parameters": round(plan.sliced_share(model), 4),
        "operations": round(min(1.0, sum(part.flops for part in parts) / max(1, plan.flops)), 4),
        "modules": f"{len(inside)} of {len(holders)}",
        "classes": len(plan.classes),
        "by_themselves": len(plan.single_layers),
        "kept": {name: f"{whole_shares[name]:.2%}: {plan.whole_reasons[name]}" for name in largest},
    }


def sound(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return the number of classes that can be permuted, and those that change the output."""
    groups = AxisClasses(trace_axes(model, inputs, -1))
    classes = [
        slice_class
        for slice_class in groups.classes.values()
        if slice_class.units > 1
        and slice_class.in_activations
        and not slice_class.is_table
        and all(sent.kind != "all_gather" for sent in slice_class.exchanged)
    ]
    count = len(classes)
    most = OF_LARGE if sum(p.numel() for p in model.parameters()) > LARGE else MOST_SHUFFLED
    if count > most:
        classes = [classes[n * count // most] for n in range(most)]
    randomize(model)
    model.eval()

    def run(batch: Any) -> Tensor:
        return next(t for t in tree_tensors(model(batch)) if t.is_floating_point())

    precise = map_tensors(inputs, lambda t: t.double() if t.is_floating_point() else t)
    try:
        model.double()
        run(precise)
        bound = 1e-8
    except RuntimeError:  # operations that do not exist in float64
        model.float()
        precise, bound = inputs, 1e-3
    gaps = {
        slice_class.name: difference(model, lambda: run(precise), slice_class.slices)
        for slice_class in classes
    }
    others = {name: gap for name, gap in gaps.items() if not gap <= bound}
    return {
        "classes": count,
        "shuffled": len(gaps),
        "most": max(gaps.values(), default=0.0),
        "differ": others,
    }


def tried(library: str, name: str, origin: str, made: tuple[nn.Module, Any]) -> dict[str, Any]:
    """Return one row of the table."""
    model, inputs = made
    row: dict[str, Any] = {"library": library, "name": name, "origin": origin}
    work: Any = SimpleNamespace(
        model=model, micro_batch=SimpleNamespace(inputs=inputs), loss=CrossEntropy()
    )
    for degree in DEGREES:
        try:
            plan = plan_slices(work, degree)
            row[f"tp{degree}"] = shares(plan, model)
            row["failed"], row["guessed"] = plan.failed, plan.guessed
        except ConfigError as error:
            row[f"tp{degree}"] = {"refused": str(error)}
    row["sound"] = sound(model, inputs)
    return row


def show(row: dict[str, Any]) -> None:
    figures = [row[f"tp{degree}"] for degree in DEGREES]
    shown = [
        f"{degree_figures.get('parameters', 0):.3f} {degree_figures.get('operations', 0):.3f}"
        for degree_figures in figures
    ]
    permuted, differ = row["sound"], len(row["sound"]["differ"])
    print(
        f"{row['library']:13}{row['name']:44}{'  '.join(shown)}  {permuted['shuffled']:4} "
        f"{differ:3} {row.get('failed', '')[:80]}{figures[0].get('refused', '')[:80]}",
        flush=True,
    )


def save(row: dict[str, Any]) -> None:
    """Write one row into the file; it replaces an older one of the same model."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    key = ("library", "name", "origin")
    rows = [old for old in rows if any(old[k] != row[k] for k in key)] + [row]
    rows.sort(key=lambda old: [old[k] for k in ("origin", "library", "name")])
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    versions |= {"transformers": transformers.__version__, "timm": timm.__version__}
    document = {"versions": versions, "summary": summary(rows), "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of models that reach the goal, by origin and number of ranks."""
    by_origin: dict[str, Any] = {}
    for origin in ("drawn", "listed"):
        rows_of_origin = [row for row in rows if row["origin"] == origin]
        counts: Counter[str] = Counter(models=len(rows_of_origin))
        for row in rows_of_origin:
            for degree in DEGREES:
                counts[f"tp{degree}"] += row[f"tp{degree}"].get("parameters", 0.0) >= BAR
            counts["shuffled classes"] += row["sound"]["shuffled"]
            unexplained = row["sound"]["differ"] and row["name"] not in LIKE_ALIBI
            counts["unsound classes"] += len(row["sound"]["differ"]) if unexplained else 0
        by_origin[origin] = dict(counts)
    return by_origin


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    words = sys.argv[1:]

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    for row in foreign_models.chosen().values():
        if wanted(row["name"]):
            row_tried = tried(row["library"], row["name"], "drawn", drawn(row))
            show(row_tried)
            save(row_tried)
    pairs = [("transformers", name) for name in cut_zoo.MODELS]
    for library, name in (*pairs, *(("timm", name) for name in cut_zoo.TIMM)):
        if wanted(name):
            row_tried = tried(library, name, "listed", listed(library, name))
            show(row_tried)
            save(row_tried)
    print(json.dumps(summary(json.loads(RESULTS.read_text())["rows"]), indent=1))


if __name__ == "__main__":
    main()
