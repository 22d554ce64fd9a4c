"""Compare random slices of random models on real ranks with one process, in float64.

Models are drawn by a seed from the lists of torchvision, timm and transformers
(`foreign_models.py`). Parameters and buffers of each, drawn by a seed, are sliced along random
dims, with random sections and units. Outputs, loss, gradients and buffers are compared with those
of the whole model. If they differ, the row names the tensors whose slices alone make a difference.
Dropout is off, as sliced tensors draw other random numbers.

    OMP_NUM_THREADS=1 PYTHONPATH=. /tmp/zoo/bin/python benchmarks/slicing_fuzz.py --models 20

With `--planned` the slices are those that bigtrain chooses: this checks that a sliced model
computes what one process does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.slice_planning.choose import plan_slices

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
FILE = HERE / "results" / "slicing_fuzz.json"
TOLERANCE = 1e-9
"""Of a difference beside the largest number of its tensor: deep norms make rounding larger."""
PLANNED = -1
"""In place of the seed of an assignment."""
SHARES = (0.1, 0.4, 0.9)
"""Of the tensors that could be sliced."""


def drop_nothing(model: nn.Module) -> None:
    """Set every dropout rate to 0."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(vars(owner).items()) if owner is not None else ():
                if isinstance(value, float) and ("drop" in name or name == "p"):
                    setattr(owner, name, 0.0)


def in_double() -> None:
    """Give float64 where a model's code asks for float32: rounding would hide differences."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def made(library: str, name: str, side: int | None) -> tuple[nn.Module, Any]:
    """Return a float64 model without zero weights, and a forward pass with a loss."""
    import foreign_models as zoo

    torch.manual_seed(0)
    model = zoo.MAKERS[library](name).double().train()
    drop_nothing(model)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # the fused kernel does not support float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    if side is None:
        inputs = torch.randint(zoo.WORDS, (zoo.ROWS, zoo.LENGTH // 4))
    else:
        inputs = torch.randn(zoo.ROWS, 3, side, side, dtype=torch.float64)

    def run(model: nn.Module) -> tuple[Any, Tensor]:
        output = model(inputs)
        logits = output if isinstance(output, Tensor) else output[0]
        return output, logits.square().mean() + logits.sum() / 1000

    return model, run


def of_rank(
    context: Any, row: dict[str, Any], seeds: list[int], sequence_dim: int | None
) -> list[dict[str, Any]]:
    """Return the results of one rank for one model."""
    import copy

    from support.sliced import compared, random_slices, slice_group

    warnings.simplefilter("ignore")
    model, run = made(row["library"], row["name"], row.get("side"))
    in_double()
    try:
        run(copy.deepcopy(model))[1].backward()
    except Exception as error:  # noqa: BLE001 - the table says what it was
        return [{"left_out": f"whole, in float64: {error}"[:300], "difference": 0.0}]
    results = []
    for seed in seeds:
        group = slice_group(context, sequence_dim)
        begin = time.perf_counter()
        if seed == PLANNED:
            try:
                slices, gathered = planned(row, group.size)
            except ConfigError as error:
                results.append({"seed": seed, "refused": str(error), "difference": 0.0})
                continue
        else:
            slices = random_slices(model, group.size, seed, SHARES[seed % len(SHARES)])
            gathered = frozenset()
        result = compared(copy.deepcopy(model), run, slices, group, gathered=gathered)
        if "bigtrain.errors.ConfigError: strategy.slice" in result.error:
            message = result.error.strip().splitlines()[-1]
            results.append({"seed": seed, "refused": message, "difference": 0.0})
            continue
        results.append(
            {
                **{"seed": seed, "sliced": len(slices), "difference": result.worst},
                **{"where": result.where, "gathers": result.gathers, "error": result.error},
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
        if _any(result.worst > TOLERANCE, group):
            results[-1]["alone"] = _alone(model, run, slices, context, sequence_dim)
    return results


def planned(row: dict[str, Any], ranks: int) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the slices chosen for a model, and the weights whose product is gathered at once."""
    from types import SimpleNamespace

    import slicing_zoo as zoo

    model, inputs = zoo.drawn(row)
    batch = SimpleNamespace(inputs=inputs)
    plan = plan_slices(SimpleNamespace(model=model, micro_batch=batch, loss=None), ranks)
    return dict(plan.slices), plan.gathered


def _any(is_wrong: bool, group: Any) -> bool:
    import torch.distributed as dist

    flag = torch.tensor([float(is_wrong)])
    dist.all_reduce(flag, group=group.group)
    return bool(flag.item())


def _alone(
    model: nn.Module, run: Any, slices: dict[str, Any], context: Any, sequence_dim: int | None
) -> list[str]:
    """Return at most three tensors whose slices alone make a difference."""
    import copy

    from support.sliced import compared, slice_group

    names = []
    for name, slices_of_tensor in slices.items():
        group = slice_group(context, sequence_dim)
        result = compared(copy.deepcopy(model), run, {name: slices_of_tensor}, group)
        if _any(result.worst > TOLERANCE, group):
            names.append(f"{name} {slices_of_tensor}: {result.where} {result.error[-600:]}")
            if len(names) == 3:
                break
    return names


def drawn(seed: int, count: int, libraries: list[str]) -> list[dict[str, Any]]:
    """Yield models that run, a number of each library."""
    import foreign_models as zoo

    rows = []
    for library in libraries:
        names = zoo.names_of(library)
        random.Random(f"{seed}:{library}").shuffle(names)
        left = count
        for name in names:
            row = zoo.tried(library, name)
            if "left_out" in row:
                continue
            rows.append(row)
            left -= 1
            if not left:
                break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--models", type=int, default=0, help="of each library (default: the known ones)"
    )
    parser.add_argument("--draw", type=int, default=1, help="seed of the models")
    parser.add_argument("--seeds", type=int, default=3, help="assignments of each model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequence", type=int, help="dim along which sums are sliced")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--libraries", default="torchvision,timm,transformers")
    parser.add_argument("--planned", action="store_true", help="slices as bigtrain chooses them")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import foreign_models as zoo
    import slicing_fuzz  # by name, so that other processes can unpickle its functions
    from support.ranks import run_ranks

    libraries = options.libraries.split(",")
    if options.models:
        rows = drawn(options.draw, options.models, libraries)
    else:
        rows = [row for row in zoo.chosen().values() if row["library"] in libraries]
    seeds = [PLANNED] if options.planned else list(range(options.seeds))
    results, failed = [], 0
    for row in rows:
        if options.only not in row["name"]:
            continue
        identity = {key: row.get(key) for key in ("library", "name", "side")}
        try:
            ranks = run_ranks(
                *(slicing_fuzz.of_rank, options.ranks, row, seeds, options.sequence),
                tp=options.ranks,
                timeout_s=300,
            )
        except Exception as error:  # noqa: BLE001 - the table says what it was
            results.append({**identity, "raised": str(error)[-1500:]})
            failed += 1
            print("RAISED", row["name"], results[-1]["raised"], flush=True)
            continue
        for of_ranks in zip(*ranks, strict=True):
            worst = max(of_ranks, key=lambda result: result["difference"])
            results.append({**identity, **worst})
            is_wrong = not worst["difference"] < TOLERANCE
            failed += is_wrong
            if "left_out" in worst or "refused" in worst:
                print(row["name"], worst.get("left_out", worst.get("refused")), flush=True)
                continue
            total = sum(worst["gathers"].values())
            figures = (worst["seed"], worst["difference"], worst["where"], total)
            print(row["name"], *figures, flush=True)
            if is_wrong:
                print("WRONG", worst["error"][-900:], *worst.get("alone", []), sep="\n", flush=True)
    print(f"{len(results)} runs, {failed} wrong")
    if options.save:
        about = {"draw": options.draw, "ranks": options.ranks, "tolerance": TOLERANCE}
        name = f"slicing_planned_{options.ranks}.json" if options.planned else FILE.name
        FILE.with_name(name).write_text(json.dumps({**about, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
