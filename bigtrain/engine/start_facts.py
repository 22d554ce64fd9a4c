"""The facts about a run that must be equal on all ranks; see `bigtrain.ranks.agreement`."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Collection, Iterator

from torch import nn

from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.workload import Workload
from bigtrain.data import Data
from bigtrain.files.regular import read_bytes
from bigtrain.job.schema import Job
from bigtrain.optim.whole import whole_optimizer
from bigtrain.ranks.agreement import flattened, in_words

_OWN_KEYS = ("data.workers", "mesh.setup_timeout")
"""Keys that may differ between ranks: nothing collective depends on them."""


def start_facts(
    job: Job,
    workload: Workload,
    resolved: ResolvedPlan,
    *,
    one_node: bool,
    data: Data | None = None,
) -> dict[str, str]:
    """Return the job, model, loss, optimizer, data and plan of this rank, as texts by name.

    Args:
        job: this rank's job.
        workload: this rank's workload with the whole model; values of weights are not read.
        resolved: the plan with every choice made.
        one_node: whether all ranks are on one node. On several nodes, `data.path` may differ.
        data: the job's data; None if the user's loop reads the data.
    """
    return {
        **_key_facts(job, one_node=one_node),
        **({} if data is None else _data_facts(data)),
        "loss": in_words(getattr(workload.loss, "fn", workload.loss)),
        **dict(_optimizer_facts(workload)),
        **dict(_model_facts(workload.model)),
        **_plan_facts(resolved),
    }


def _data_facts(data: Data) -> dict[str, str]:
    held_out = 0 if data.validation is None else len(data.validation)
    return {
        "training samples": str(len(data.train)),
        "validation samples": str(held_out),
        "task": data.task.name,
        "classes": str(data.task.num_classes),
        **({"contents of the data": data.digest} if data.digest else {}),
    }


def _key_facts(job: Job, *, one_node: bool) -> dict[str, str]:
    facts = flattened(job.model_dump())
    keys_of_a_rank = set(_OWN_KEYS)
    if not one_node:
        keys_of_a_rank.add("data.path")
    facts = {key: value for key, value in facts.items() if key not in keys_of_a_rank}
    file = job.strategy.deepspeed_file
    if file is not None:
        facts[f"contents of {file}"] = _short_hash(read_bytes(file))
    return facts


def _plan_facts(resolved: ResolvedPlan) -> dict[str, str]:
    plan, layout = resolved.plan, resolved.layout
    facts = {
        f"plan.{role}": f"{type(technique).__name__} {in_words(technique.model_dump())}"
        for role, technique in plan.techniques.items()
    }
    facts |= {
        "plan.batch": in_words(vars(plan.batch)),
        "plan.precision": plan.precision,
        "plan.untrained parameters": in_words(sorted(resolved.unreached)),
        "plan.modules recomputed or moved": in_words(sorted(resolved.policies)),
    }
    if layout is not None:
        for stage in layout.all_stages:
            names = layout.chosen.cut.tensor_names_of([stage])
            facts[f"plan.stage {stage}"] = _names_in_words(names)
    engines = {technique.traits.engine for technique in plan.techniques.values()}
    for engine in engines & {"deepspeed", "fairscale"}:
        facts[f"version of {engine}"] = importlib.metadata.version(engine)
    return facts


def _optimizer_facts(workload: Workload) -> Iterator[tuple[str, str]]:
    optimizer = whole_optimizer(workload.make_optimizer, workload.model)
    yield "optimizer", optimizer.kind_name
    for index, names in enumerate(optimizer.groups):
        yield f"parameters of optimizer group {index}", _names_in_words(names)
        for key, value in optimizer.settings[index].items():
            yield f"{key} of optimizer group {index}", in_words(value)


def _names_in_words(names: Collection[str]) -> str:
    return f"{len(names)} ({_short_hash(in_words(sorted(names)).encode())})"


def _model_facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        words = in_words(type(module))
        # The `extra_repr` of other modules may contain a memory address, which differs.
        if type(module).__module__.startswith("torch.nn."):
            words += f"({module.extra_repr()})"
        yield f"module {name or 'model'}", words
    for kind, tensors in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in tensors:
            trained = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
            yield f"{kind} {name}", f"{list(tensor.shape)} {tensor.dtype}{trained}"


def _short_hash(data: bytes) -> str:
    return f"sha256 {hashlib.sha256(data).hexdigest()[:12]}"
