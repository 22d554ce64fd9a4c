"""Write adapters to the files of the library peft, or merge them into the weights of their model.

adapter_config.json          peft's settings
adapter_model.safetensors    A and B of each adapter, and the modules that are trained themselves
adapters.json                the layers that have adapters, which a run records for `export`
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.checkpoint.foreign.state_dicts import open_state_dict, saved_state
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.save import KeptFile
from bigtrain.checkpoint.write import FileRecord, write_tensors
from bigtrain.errors import ConfigError, UnreadableError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_regular
from bigtrain.hub.folder import CONFIG
from bigtrain.hub.lora import (
    ADAPTER,
    BASE,
    DTYPES,
    Adapters,
    QuantizedLayer,
    adapters_of,
    dequantized_value,
    word_of,
)
from bigtrain.hub.nf4 import CARRIER
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor, whole_extents

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
RECORD = "adapters.json"
BASE_CONFIG = "base_config.json"
"""The file with the configuration of the model that the adapters belong to."""
_FORMAT = 1
_PREFIX = "base_model.model."
"""The prefix of the name of each tensor in peft's files."""
_MATRICES = re.compile(
    rf"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<letter>[AB])\.{ADAPTER}(?P<end>\.weight)?"
)


@dataclass(frozen=True)
class AdapterRecord:
    """The facts about a checkpoint's adapters that its tensors do not contain."""

    targets: tuple[str, ...]
    """Names of the modules that have adapters."""
    trained: tuple[str, ...]
    """Names of the modules whose own weights are trained."""
    transposed: tuple[str, ...]
    """See `Adapters.transposed`."""
    scale: float
    """See `Adapters.scale`."""
    settings: Mapping[str, Any]
    """The content of adapter_config.json."""
    quantized: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    """See `Adapters.quantized`."""

    @classmethod
    def of(cls, adapters: Adapters) -> AdapterRecord:
        """Return the record of a run's adapters."""
        kept = (adapters.targets, adapters.trained, adapters.transposed, adapters.scale)
        return cls(*kept, peft_settings(adapters), adapters.quantized)

    @classmethod
    def read(cls, folder: Path) -> AdapterRecord | None:
        """Read the record of a checkpoint; None if its model has no adapters.

        Raises:
            ConfigError: the file is damaged.
        """
        path = folder / RECORD
        if not is_regular(path):
            return None
        try:
            record = read_json_object(path)
            if record["format"] != _FORMAT:
                raise ValueError(
                    f"its format is {record['format']}, and this version reads {_FORMAT}"
                )
            keys = ("targets", "trained", "transposed")
            targets, trained, transposed = (tuple(map(str, record[key])) for key in keys)
            scale, settings = float(record["scale"]), dict(record["settings"])
            quantized = {
                name: QuantizedLayer(
                    (rows, columns), bool(layer["transposed"]), word_of(DTYPES[layer["dtype"]])
                )
                for name, layer in record.get("quantized", {}).items()
                for rows, columns in (map(int, layer["shape"]),)
            }
            return cls(targets, trained, transposed, scale, settings, quantized)
        except (UnreadableError, KeyError, TypeError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"export: {path} is not readable: {reason}.") from None

    def text(self) -> str:
        """Return the content of the file."""
        record = {"format": _FORMAT, **asdict(self)}
        if not self.quantized:
            del record["quantized"]
        return json.dumps(record, indent=1)


def peft_settings(adapters: Adapters) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    config = adapters.config
    return {
        "peft_type": "LORA",
        "task_type": _task_type(adapters.class_name),
        "base_model_name_or_path": adapters.base,
        "r": config.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(adapters.shortest),
        "modules_to_save": list(adapters.trained) or None,
        "fan_in_fan_out": bool(adapters.transposed) and adapters.transposed == adapters.targets,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _task_type(class_name: str | None) -> str | None:
    """Return peft's task type for a class of transformers; None if the type would add a head."""
    if class_name is None:
        return None
    if class_name.endswith(("ForCausalLM", "LMHeadModel")):
        return "CAUSAL_LM"
    return "SEQ_2_SEQ_LM" if class_name.endswith("ForConditionalGeneration") else None


def with_adapter_files(model: nn.Module, files: Mapping[str, KeptFile]) -> dict[str, KeptFile]:
    """Return the files that a checkpoint has in addition to its tensors, with those of adapters.

    A model without adapters has no further files. With adapters, config.json is renamed: if a
    checkpoint had a file of this name, transformers would load the checkpoint's tensors as those of
    the model without adapters.

    Args:
        model: the model of a run.
        files: the files of the model by name.
    """
    adapters = adapters_of(model)
    if adapters is None:
        return dict(files)
    record = AdapterRecord.of(adapters)

    def write(folder: Path) -> Mapping[str, FileRecord]:
        state = peft_state(record, open_state_dict(folder).model)
        return write_tensors(folder / WEIGHTS, state, RunContext.alone())

    renamed = {BASE_CONFIG if name == CONFIG else name: file for name, file in files.items()}
    own: dict[str, KeptFile] = {
        SETTINGS: json.dumps(record.settings, indent=2),
        RECORD: record.text(),
        WEIGHTS: write,
    }
    return {**renamed, **own}


def read_model_state(checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, StateTensor]:
    """Return the tensors of a checkpoint's model by name.

    Args:
        checkpoint: the checkpoint.
        dtype: the dtype of floating-point tensors; None for that of the checkpoint.
    """
    return {
        name.removeprefix("model."): saved_state(tensor, dtype)
        for name, tensor in checkpoint.tensors.items()
        if name.startswith("model.")
    }


def peft_state(record: AdapterRecord, state: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """Return the trained tensors of a model under the names that they have in peft's file."""
    found = {}
    for name, tensor in state.items():
        matrix = _MATRICES.fullmatch(name)
        if matrix is not None and matrix["module"] in record.targets:
            kind = f"lora_{matrix['kind'] or ''}{matrix['letter']}{matrix['end'] or ''}"
            found[f"{_PREFIX}{matrix['module']}.{kind}"] = tensor
        elif any(name.startswith(f"{module}.") for module in record.trained):
            found[f"{_PREFIX}{name}"] = tensor
    return found


def merged_state(
    record: AdapterRecord, state: Mapping[str, StateTensor], dtype: torch.dtype | None = None
) -> dict[str, StateTensor]:
    """Return a model's tensors with the adapters added to the weights, under the plain names.

    A sum is computed in fp32 when its tensor is read.

    Args:
        record: the adapters.
        state: the tensors of the model with adapters.
        dtype: the dtype for weights that are in 4 bits in `state`; None for the dtype that they had
            before they were quantized.
    """
    found = {}
    for name, tensor in state.items():
        matrix = _MATRICES.fullmatch(name)
        if matrix is not None and matrix["module"] in record.targets:
            continue
        module, _, own = name.rpartition(".")
        inside = module.removesuffix(f".{BASE}")
        plain = inside if inside in record.targets else module
        weight, final = tensor, tensor.dtype
        layer = record.quantized.get(plain) if own == CARRIER else None
        if layer is not None:
            own, final = "weight", dtype or DTYPES[layer.dtype]
            weight = dequantized_value(tensor, layer)
        if own == "weight" and plain != module and plain in record.targets:
            weight = _merged(record, state, plain, weight)
        found[f"{plain}.{own}".strip(".")] = weight if layer is None else _cast(weight, final)
    return found


def _cast(tensor: StateTensor, dtype: torch.dtype) -> StateTensor:
    return replace(tensor, dtype=dtype, values=lambda: tensor.values().to(dtype))


def _merged(
    record: AdapterRecord, state: Mapping[str, StateTensor], module: str, weight: StateTensor
) -> StateTensor:
    first, second = (_matrix(state, module, letter) for letter in "AB")
    is_embedding = f"{module}.lora_embedding_A.{ADAPTER}" in state

    def values() -> Tensor:
        a, b = (tensor.values().view(tensor.shape).float() for tensor in (first, second))
        added = b @ a * record.scale
        if is_embedding or module in record.transposed:
            added = added.T
        own = weight.values().view(weight.shape).float()
        return (own + added).to(weight.dtype).reshape(-1)

    return StateTensor(weight.dtype, weight.shape, whole_extents(weight.shape), values)


def _matrix(state: Mapping[str, StateTensor], module: str, letter: str) -> StateTensor:
    names = (
        f"{module}.lora_{letter}.{ADAPTER}.weight",
        f"{module}.lora_embedding_{letter}.{ADAPTER}",
    )
    found = next((state[name] for name in names if name in state), None)
    if found is None:
        raise ConfigError(
            f"export: the checkpoint has no adapter {names[0]}, which its {RECORD} names. Give "
            "another checkpoint."
        )
    return found
