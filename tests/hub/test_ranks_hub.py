"""Models of the Hub under every strategy: loaded, trained, saved, exported, and opened again.

The oracle is a plain torch loop on the model that transformers itself opens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint, FileTensor
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.hub.export import export_folder
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import ModelConfig
from bigtrain.losses.loss import as_loss
from bigtrain.models.spec import ModelSpec

pytest.importorskip("transformers")
from safetensors import safe_open  # noqa: E402
from support import hub_models  # noqa: E402

ROWS = 4
EVERY = (*hub_models.FAMILIES, hub_models.LEGACY)
FEW = ("llama", "gpt2", "mixtral")
AXES = {"1f1b": "pp", "tensor": "tp"}


def of_logits(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), targets.flatten())


def batch(family: str) -> tuple[Any, Tensor]:
    given = hub_models.inputs(family, rows=ROWS)
    generator = torch.Generator().manual_seed(9)
    shape = (ROWS,)
    if family in hub_models.CAUSAL or family in ("bert mlm", "t5"):
        shape = (ROWS, hub_models.LENGTH)
    return given, torch.randint(0, 2, shape, generator=generator)


def rows_of(value: Any, rows: slice) -> Any:
    return {k: v[rows] for k, v in value.items()} if isinstance(value, dict) else value[rows]


def folder_of(root: Path, family: str) -> Path:
    return root / family.replace(" ", "_")


def known(family: str) -> str:
    return "bert" if family == hub_models.LEGACY else family


def plain_loop(folder: Path, family: str) -> tuple[float, nn.Module]:
    """The loss of the first step of transformers' own model, and the model after it."""
    model = hub_models.reopened(folder, family).train()
    given, targets = batch(known(family))
    loss = of_logits(model(**given) if isinstance(given, dict) else model(given), targets)
    loss.backward()
    sgd(model.parameters()).step()
    return float(loss.detach()), model.eval()


class CountedReads:
    """Counts the bytes that this process reads of tensors in files, inside a `with` block."""

    nbytes = 0

    def __enter__(self) -> CountedReads:
        self._patch, inner = pytest.MonkeyPatch(), FileTensor.read

        def read(tensor: FileTensor, extents: Any) -> Tensor:
            values = inner(tensor, extents)
            self.nbytes += values.nbytes
            return values

        self._patch.setattr(FileTensor, "read", read)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def train_each(context: Any, strategy: str, root: Path, families: tuple[str, ...]) -> Any:
    """By family the first loss and the bytes that were read; each is saved after one step."""
    found = {}
    for family in families:
        job = job_from_keys(
            strategy,
            {
                "train.global_batch_size": ROWS,
                "train.micro_batch_size": 1,
                "device": "cpu",
                "memory.predict": False,
            },
        )
        plan = make_plan(job, context.world_size, "cpu")
        config = ModelConfig(name=f"hf:{folder_of(root, family)}")
        blueprint = ModelSpec.of(config).describe(num_classes=None, sequence_length=None)
        assert blueprint.deferred, blueprint.reason
        given, targets = batch(known(family))
        each = ROWS // context.dp_size
        own = slice(context.dp_rank * each, (context.dp_rank + 1) * each)
        loss = as_loss(of_logits)
        first = (rows_of(given, slice(0, 1)), targets[:1])
        example = example_batch(first, loss, job, plan)
        with CountedReads() as reads:
            engine = Engine(blueprint, loss, sgd, job, context, example=example)
        with engine:
            step = engine.step((rows_of(given, own), targets[own]))
            found[family] = step.loss, reads.nbytes
            engine.save(root / "saved" / family.replace(" ", "_"))
    return found


def check_each(
    tmp_path: Path, strategy: str, ranks: int, families: tuple[str, ...], **axes: int
) -> None:
    for family in families:
        hub_models.save(family, folder_of(tmp_path, family))
    axes = axes or ({AXES[strategy]: ranks} if strategy in AXES else {})
    results = run_ranks(
        train_each, ranks, strategy, tmp_path, families, flavour="hub", timeout_s=400.0, **axes
    )
    for family in families:
        source = folder_of(tmp_path, family)
        loss, trained = plain_loop(source, family)
        for result in results:
            assert result[family][0] == pytest.approx(loss, abs=1e-6, rel=1e-6), family
        check_reads(strategy, source, [result[family][1] for result in results])
        given = batch(known(family))[0]
        expected = hub_models.logits_of(trained, given)
        step = tmp_path / "saved" / family.replace(" ", "_") / "step-1"
        out = tmp_path / "out" / family.replace(" ", "_")
        out.parent.mkdir(exist_ok=True)
        export_folder(Checkpoint(step), out, None, file_bytes=20_000)
        assert hub_models.keys_of(out) == hub_models.keys_of(source), family
        kept = {path.name for path in source.iterdir() if path.suffix != ".safetensors"}
        assert kept <= {path.name for path in out.iterdir()}, family
        for folder in (step, out):
            logits = hub_models.logits_of(hub_models.reopened(folder, family), given)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-6, msg=family)


def check_reads(strategy: str, source: Path, nbytes: list[int]) -> None:
    """Each rank reads no element twice, and where it holds a part of the model only that."""
    size = 0
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            size += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    if strategy == "fsdp":  # every element by one rank
        assert sum(nbytes) == size
        assert max(nbytes) < 0.75 * size
    elif strategy == "1f1b":  # a tied tensor by two
        assert size <= sum(nbytes) < 1.5 * size
    assert max(nbytes) <= size


@pytest.mark.parametrize("strategy", ["fsdp", "1f1b"])
def test_a_model_of_the_hub_trains_and_opens_again(strategy, tmp_path):
    check_each(tmp_path, strategy, 2, FEW)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3", "1f1b", "tensor"])
def test_every_family_trains_and_opens_again(strategy, ranks, tmp_path):
    check_each(tmp_path, strategy, ranks, EVERY)
