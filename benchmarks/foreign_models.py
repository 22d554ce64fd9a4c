"""Models drawn at random, by a seed, from the lists of torchvision, timm and transformers.

bigtrain needs neither timm nor transformers: see `cut_zoo.py` for an environment with both. No
weights are downloaded. transformers' configurations are made small by the numbers in `SMALL` where
their classes have such fields; images have 64 pixels a side unless the model has a fixed size. A
model is left out, with its reason, if it has too many parameters or operations for a step within
seconds, or if it cannot run unchanged in one process.

    OMP_NUM_THREADS=1 /tmp/zoo/bin/python benchmarks/foreign_models.py  # draws, and writes FILE
"""

from __future__ import annotations

import json
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

FILE = Path(__file__).parent / "results" / "foreign_models.json"
SEED = 20261122
EACH = 16
"""Models of each library."""
MAX_PARAMETERS, MAX_FLOPS = 12_000_000, 4_000_000_000
"""Of a model, and of its forward pass with `ROWS` samples."""
MAX_SIDE, SIDE = 256, 64
"""Pixels a side of an image: at most, and where the model takes any."""
ROWS, CLASSES, WORDS, LENGTH = 2, 10, 1000, 64
HEADS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION")
"""transformers' lists of models that take tokens or an image alone."""
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "width")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_INNER = ("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "moe_intermediate_size", "ffn_size")
_STACKS = ("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers")
SMALL: dict[str, int] = {
    **{"vocab_size": WORDS, "max_position_embeddings": 128, "n_positions": 128},
    **{"image_size": SIDE, "patch_size": 8, "head_dim": 16, "d_kv": 16},
    **dict.fromkeys(_WIDTHS, 64),
    **dict.fromkeys(_LAYERS, 4),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_INNER, 192),
    **dict.fromkeys(_STACKS, 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 192),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id"), 1),
}


def of_torchvision(name: str, num_classes: int = CLASSES) -> nn.Module:
    """Return a classifier of torchvision with initial weights."""
    from torchvision import models

    options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    return model


def of_timm(name: str, num_classes: int = CLASSES) -> nn.Module:
    """Return a classifier of timm with initial weights."""
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes)
    return model


class OneInput(nn.Module):
    """Calls a model of transformers with one tensor, and returns its logits."""

    def __init__(self, model: nn.Module, head: str) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, inputs: Tensor) -> Any:
        """Take images, or tokens (rows, positions), which a decoder after an encoder gets, too."""
        if self.head == "IMAGE_CLASSIFICATION":
            return self.model(pixel_values=inputs).logits
        more = {"decoder_input_ids": inputs} if self.head == "SEQ_TO_SEQ_CAUSAL_LM" else {}
        return self.model(input_ids=inputs, **more).logits


def of_transformers(name: str, **_: Any) -> nn.Module:
    """Return a model by its head and kind, as `CAUSAL_LM:gpt2`, from a small configuration."""
    head, config_class, model_class = _classes(name)
    known = config_class().to_dict()
    small = {key: value for key, value in SMALL.items() if _is_number(known.get(key, "no"))}
    if "num_key_value_heads" in known:
        small["num_key_value_heads"] = 2
    if head == "IMAGE_CLASSIFICATION":
        small["num_labels"] = CLASSES
    model = model_class(config_class(**small))
    return OneInput(model, head)


def _classes(name: str) -> tuple[str, Any, Any]:
    import transformers
    from transformers.models.auto import modeling_auto

    head, kind = name.split(":")
    names = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")[kind]
    first = names if isinstance(names, str) else names[0]
    return head, transformers.CONFIG_MAPPING[kind], getattr(transformers, first)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "torchvision": of_torchvision,
    "timm": of_timm,
    "transformers": of_transformers,
}


def names_of(library: str) -> list[str]:
    """Return every model name that a library lists."""
    if library == "torchvision":
        from torchvision import models

        return sorted(map(str, models.list_models(module=models)))
    if library == "timm":
        import timm

        return sorted(map(str, timm.list_models()))
    from transformers.models.auto import modeling_auto

    return sorted(
        f"{head}:{kind}"
        for head in HEADS
        for kind in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
    )


def side_of(library: str, model: nn.Module) -> int:
    """Return the pixels a side of a model's images."""
    if library != "timm":
        return SIDE
    described: Any = getattr(model, "default_cfg", {})
    native_side = int(described["input_size"][-1])
    return native_side if described.get("fixed_input_size") else min(native_side, SIDE)


def words_of(model: dict[str, Any]) -> list[str]:
    """Return the keys of a job for a model and its random samples."""
    words = [f"model.name=foreign_models:of_{model['library']}", "data.name=synthetic"]
    words.append(f"model.args.name={json.dumps(model['name'])}")
    if "side" not in model:
        words += ["data.args.kind=language", f"data.args.vocabulary={WORDS}"]
        return [*words, f"data.args.length={LENGTH}"]
    side = model["side"]
    return [*words, f"data.args.input_shape=[3,{side},{side}]", f"data.args.num_classes={CLASSES}"]


def tried(library: str, name: str) -> dict[str, Any]:
    """Run a model once, forward and backward, in this process.

    Returns:
        Its row; with `left_out`, a reason, where it is too large or does not run.
    """
    row: dict[str, Any] = {"library": library, "name": name}
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in MAKERS[library](name).parameters())
    except Exception:  # noqa: BLE001 - some constructors read numbers: these are made for real
        count = 0
    try:
        if count <= MAX_PARAMETERS:
            model = MAKERS[library](name).train()
            count = sum(p.numel() for p in model.parameters())
        row["parameters"] = count
        if count > MAX_PARAMETERS:
            return {**row, "left_out": f"{count} parameters are more than {MAX_PARAMETERS}"}
        inputs = torch.randint(WORDS, (ROWS, LENGTH))
        if library != "transformers" or name.startswith("IMAGE_CLASSIFICATION:"):
            row["side"] = side = side_of(library, model)
            if side > MAX_SIDE:
                return {**row, "left_out": f"images of {side} pixels are more than {MAX_SIDE}"}
            inputs = torch.randn(ROWS, 3, side, side)
        with FlopCounterMode(display=False) as counter:
            output = model(inputs)
        row["flops"] = counter.get_total_flops()
        if row["flops"] > MAX_FLOPS:
            return {**row, "left_out": f"{row['flops']} operations are more than {MAX_FLOPS}"}
        logits = output if isinstance(output, Tensor) else output[0]
        logits.float().square().mean().backward()
    except Exception as error:  # noqa: BLE001 - the table says what it was
        lines = str(error).strip().splitlines() or [""]
        return {**row, "left_out": f"{type(error).__name__}: {lines[0][:200]}"}
    return row


def drawn(library: str) -> Iterable[dict[str, Any]]:
    """Draw models by the seed until enough of them run."""
    names = names_of(library)
    random.Random(f"{SEED}:{library}").shuffle(names)
    left = EACH
    for name in names:
        row = tried(library, name)
        yield row
        left -= "left_out" not in row
        if not left:
            return


def chosen() -> dict[str, dict[str, Any]]:
    """Return the drawn models that run, by the name for a row."""
    rows = json.loads(FILE.read_text())["models"]
    return {
        f"{row['library']}:{re.sub(r'[^A-Za-z0-9_.]', '_', row['name'])}": row
        for row in rows
        if "left_out" not in row
    }


def load() -> None:
    """Import the libraries of the chosen models."""
    import timm  # noqa: F401

    for row in chosen().values():
        if row["library"] == "transformers":
            _classes(row["name"])


def main() -> None:
    import timm
    import torchvision
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    versions = {module.__name__: module.__version__ for module in (timm, torchvision, transformers)}
    rows = []
    for library in MAKERS:
        for row in drawn(library):
            rows.append(row)
            print(library, row["name"], row.get("left_out", ""), file=sys.stderr, flush=True)
    document = {"seed": SEED, "versions": versions, "models": rows}
    FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
