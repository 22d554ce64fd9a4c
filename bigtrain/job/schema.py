"""The typed configuration of one run: every key of a job, with its default and its unit.

Defaults are written only here; YAML files contain the values that differ from them. This module
does not import torch, so a wrong key is refused within milliseconds.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bigtrain.errors import ConfigError, as_word
from bigtrain.files.regular import check_name
from bigtrain.job.deepspeed_json import check_agreement
from bigtrain.job.optim_keys import OptimConfig
from bigtrain.job.sections import ConfigSection
from bigtrain.units import parse_bytes

Precision = Literal["fp32", "bf16", "fp64"]
Role = Literal["cut", "slice", "replicate", "recompute", "offload", "accumulate"]
ROLES: tuple[Role, ...] = ("cut", "slice", "replicate", "recompute", "offload", "accumulate")
DEFAULT_TECHNIQUE = {
    "slice": "tensor",
    "recompute": "checkpointing",
    "offload": "offload",
    "accumulate": "accumulation",
}
"""The technique of a role whose `name` is left out: these roles have one technique each."""
Bytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(value))]
"""A size in bytes: an integer, or text such as '25MiB'."""


class LoraConfig(ConfigSection):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685), as the library peft has them."""

    rank: int = Field(ge=1)
    """Rows of the matrix A and columns of the matrix B of each adapter."""
    alpha: float | None = Field(None, gt=0)
    """An adapter adds alpha / rank times B A to its weight; by default twice the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropout before A."""
    targets: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter: names, last parts of names, or patterns (`layers.[0-3].*_proj`).
    `all-linear`: every linear layer but the head."""
    modules_to_save: tuple[str, ...] = ()
    """Modules, named as in `targets`, whose own weights are trained and saved with the adapters."""
    quantize: Literal["nf4"] | None = None
    """`nf4`: the frozen weights of linear layers, but not that of the head, are stored in 4 bits
    (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""
    quantize_except: tuple[str, ...] = ()
    """Modules, named as in `targets`, whose weights are not quantized."""

    @field_validator("targets", "modules_to_save", "quantize_except", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("targets")
    @classmethod
    def _has_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("needs a name or pattern, such as all-linear (got an empty list)")
        return value


class ModelConfig(ConfigSection):
    """The model."""

    name: str = "gpt"
    """A built-in name (gpt-10m, lenet, resnet50, ...), `hf:FOLDER_OR_ID` for a model of the Hugging
    Face Hub, `timm:NAME`, or `package.module:Class`."""
    args: dict[str, Any] = {}
    """Arguments of the model's constructor. For an `hf:` model: fields of its configuration, and
    `architecture` for another class. Arguments that follow from the data, such as the number of
    classes, may be left out."""
    pretrained: str | None = None
    """Initial weights: a file with a state dict, or `cache` for weights that torchvision has
    downloaded before (nothing is downloaded here). An `hf:` model has the folder's weights by
    default, and random weights with `false`. Other models have random weights by default."""
    pretrained_except: tuple[str, ...] = ()
    """Names of modules that are not loaded from `pretrained` and begin with random weights, such as
    a head for other classes."""
    freeze: tuple[str, ...] = ()
    """Patterns of names. A parameter is not trained if its name fits one, or the name of a module
    that contains it. A pattern after `!` names parameters that are trained. The last pattern that
    fits decides: `['*', '!head']`."""
    lora: LoraConfig | None = None
    """Train adapters, and freeze everything else: `model.lora.rank=8`."""
    loss: str | None = None
    """`package.module:function`, a mean loss of (output, target); by default the task's loss."""
    chunked_loss: bool | None = None
    """Compute cross entropy in chunks, so that the logits never exist as a whole. By default true
    for the built-in gpt models, and for language models of the Hub whose logits are the unchanged
    output of a linear layer."""
    chunk_size: Bytes | None = Field(None, gt=0)
    """Bytes of the logits in one chunk; by default 32 MiB on a CPU and 256 MiB elsewhere."""
    auxiliary_weight: float | None = Field(None, ge=0)
    """The weight of each auxiliary head's loss (`aux`), where the main head's is 1; by default the
    customary weight for the kind of model."""
    head: str | None = None
    """The name of the linear layer that computes the logits; by default it is searched for."""

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("pretrained", mode="before")
    @classmethod
    def _no_weights(cls, value: object) -> object:
        return "none" if value is False or value == "false" else value

    @model_validator(mode="after")
    def _frozen_once(self) -> ModelConfig:
        if self.lora is not None and self.freeze:
            raise ValueError(
                f"{as_word('freeze', self.freeze)}: with model.lora all but the adapters and "
                "model.lora.modules_to_save is frozen. Leave model.freeze out"
            )
        return self

    @model_validator(mode="after")
    def _begins_somewhere(self) -> ModelConfig:
        has_own = self.name.startswith("hf:") and self.pretrained is None
        if self.pretrained_except and self.pretrained in (None, "none") and not has_own:
            raise ValueError(
                f"{as_word('pretrained_except', self.pretrained_except)} excludes parts of a "
                "file, and no file is given. Set model.pretrained=FILE, or leave it out"
            )
        return self


class DataConfig(ConfigSection):
    """The data."""

    name: str = "text"
    """A built-in source (text, digits, cifar10, ...) or `package.module:function`."""
    path: str | None = None
    """The file or folder of the source. The default for `text`: the source code of Python's
    standard library."""
    args: dict[str, Any] = {}
    """Arguments of the source."""
    workers: int | None = Field(None, ge=0)
    """Processes per rank that read samples ahead; 0 reads in the training process. By default 0 on
    a CPU, and on a GPU the number of cores for each rank, at most 4."""
    batch_dims: dict[str, int | None] = {}
    """In a custom training loop: the batch dim of a tensor, by its name in the batch (inputs,
    inputs.position_ids, inputs[1], targets); null for a tensor that all rows share. By default 0; a
    tensor with one row or no dim is shared."""


class TrainConfig(ConfigSection):
    """Length, batches and precision of training."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training data. Give steps or epochs; without either, one epoch."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples of an optimizer step over all ranks. Any two of `global_batch_size`,
    `micro_batch_size` and `accumulation_steps` give the third."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Samples per rank in one forward pass."""
    accumulation_steps: int | None = Field(None, ge=1)
    """Micro-batches per rank and optimizer step."""
    seed: int = Field(0, ge=0)
    """Seed of initial weights, the order of samples, and dropout."""
    precision: Precision = "fp32"
    """bf16 is autocast with fp32 parameters; fp64 is for numerical checks."""
    eval_every: int = Field(0, ge=0)
    """Steps between validations; 0: validate only after the last step. The last step is always
    validated."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over all ranks (CUDA only)."""
    check_finite: bool = True
    """Stop before the update if the loss or the gradient norm is not finite. False: do not check,
    so that a GPU need not wait between the backward pass and the update."""
    check_first_steps: int = Field(0, ge=0)
    """Compare the loss and the gradient norm of this many first steps with a plain torch loop over
    the whole global batch, which rank 0 runs on its CPU; a difference ends the run."""
    deterministic: bool = False
    """Use deterministic kernels only (torch.use_deterministic_algorithms)."""
    matmul: Literal["highest", "high"] = "highest"
    """On a GPU: compute matrix products and convolutions of fp32 tensors in fp32 (`highest`), or in
    TF32 (`high`), which keeps 10 bits of each factor's mantissa and is several times faster."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """Memory format of images, and of convolution weights that no technique shards."""
    compile: Literal["none", "blocks"] = "none"
    """Compile each repeated block with torch.compile; equal blocks share one program."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs} both say how long to train; "
                "give one (train.epochs=null drops the other)"
            )
        return self


BATCH_KEYS = ("global_batch_size", "micro_batch_size", "accumulation_steps")
"""The keys of the batch; any two of them give the third."""


class MeshConfig(ConfigSection):
    """The device mesh, and how its ranks communicate."""

    pp: int | None = Field(None, ge=1)
    """Ranks that share the stages of a pipeline. By default 1; with a pipeline strategy, all ranks
    that dp and tp leave."""
    dp: int = Field(-1, ge=-1)
    """Replicas; -1 is all ranks that pp and tp leave."""
    tp: int | None = Field(None, ge=1)
    """Ranks that share the slices of each layer. By default 1; with tensor parallelism all ranks,
    or 2 if there are replicas or stages as well."""
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """The communication backend; auto is nccl on GPUs and gloo on a CPU."""
    setup_timeout: float = Field(300.0, gt=0)
    """Seconds that the ranks wait for each other at the start."""
    timeout: float = Field(100.0, gt=0)
    """Seconds that a collective may take after the start; at least 1800 with
    train.compile=blocks."""

    @field_validator("dp")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("dp=0 has no ranks. Use -1 for all that remain")
        return value


class RoleConfig(BaseModel):
    """One technique: its name and its options, which its module checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The technique's options, not yet checked."""
        return dict(self.model_extra or {})


class StrategyConfig(ConfigSection):
    """At most one technique for each role."""

    name: str = "single"
    """The words that name the strategy: {name: ddp+full}. They are also its label in reports. If
    the section has `cut`, `replicate` or `deepspeed`, the name is only that label."""
    deepspeed: str | None = None
    """The path of a DeepSpeed configuration file (JSON), which configures `zero` on DeepSpeed."""
    budget: Bytes | None = Field(None, gt=0)
    """The most bytes of a rank's tensors at its peak, as predicted. The planner then chooses the
    fastest of all plans with these words: which blocks recompute, which stay gathered, when
    gradients are reduced, and the micro-batch. With `--strategy auto` it chooses the words, too."""
    cut: RoleConfig | None = None
    """How the model is cut into pipeline stages on ranks or devices."""
    slice: RoleConfig | None = None
    """How each layer is sliced over ranks: tensor parallelism."""
    replicate: RoleConfig | None = None
    """How replicas share gradients, optimizer state and parameters."""
    recompute: RoleConfig | None = None
    """Which activations are saved for the backward pass, and which are recomputed."""
    offload: RoleConfig | None = None
    """Moves optimizer state, parameters or activations to the host or to disk."""
    accumulate: RoleConfig | None = None
    """How many micro-batches make a step."""

    @field_validator(*ROLES, mode="before")
    @classmethod
    def _short_form(cls, value: object, info: ValidationInfo) -> object:
        return long_form(str(info.field_name), value)

    @property
    def deepspeed_file(self) -> str | None:
        """The path of the DeepSpeed file, by whichever key it is named; None without one.

        Raises:
            ConfigError: `deepspeed` and `replicate` contradict each other.
        """
        if self.deepspeed is not None:
            return _file_of(zero_from_file(self.replicate, self.deepspeed))
        return _file_of(self.replicate)

    def roles(self) -> dict[Role, RoleConfig]:
        """Return the techniques by role, in the order of composition.

        Raises:
            ConfigError: `deepspeed` and `replicate` contradict each other.
        """
        filled: dict[Role, RoleConfig] = {}
        for role in ROLES:
            config: RoleConfig | None = getattr(self, role)
            if role == "replicate" and self.deepspeed is not None:
                config = zero_from_file(config, self.deepspeed)
            if config is not None:
                filled[role] = config
        return filled


def _file_of(replicate: RoleConfig | None) -> str | None:
    """Return the path of the DeepSpeed file among the options of `zero`; None without one."""
    if replicate is None or replicate.name != "zero":
        return None
    options = replicate.options
    path = options.get("config")
    on_deepspeed = options.get("engine", "deepspeed") == "deepspeed"
    return path if on_deepspeed and isinstance(path, str) else None


def deepspeed_file_in(strategy: object) -> str | None:
    """Return the path of the DeepSpeed file in an unchecked `strategy` section, or None."""
    if not isinstance(strategy, dict):
        return None
    path, replicate = strategy.get("deepspeed"), strategy.get("replicate")
    if isinstance(path, str):
        return path
    if not isinstance(replicate, dict) or not isinstance(replicate.get("name"), str):
        return None
    return _file_of(RoleConfig.model_validate(replicate))


def long_form(role: str, value: object) -> object:
    """Return a role's value as a mapping with a name, from a word or a mapping without a name."""
    if isinstance(value, str) and role == "recompute" and ":" not in value:
        return _recompute(value)
    if isinstance(value, str):
        return {"name": value}
    name = DEFAULT_TECHNIQUE.get(role)
    if isinstance(value, dict) and name is not None:
        return {"name": name, **value}
    return value


def _recompute(word: str) -> dict[str, Any]:
    """Return the options that a word means: `full`, `selective`, or a budget (`6GiB`, `80%`)."""
    if word == "checkpointing":
        return {"name": word}
    key = "budget" if word[:1].isdigit() else "mode"
    return {"name": "checkpointing", key: word}


def zero_from_file(replicate: RoleConfig | None, path: str) -> RoleConfig:
    """Return `zero` on DeepSpeed, configured by a file.

    Args:
        replicate: the section `replicate` of the job or its preset, whose other options remain;
            None without one.
        path: the path of DeepSpeed's file.

    Raises:
        ConfigError: `replicate` names another technique, engine or file.
    """
    options = replicate.options if replicate is not None else {}
    named = {"name": replicate.name if replicate is not None else "zero", **options}
    for key, value in (("name", "zero"), ("engine", "deepspeed"), ("config", path)):
        if named.get(key, value) != value:
            raise ConfigError(
                f"strategy.replicate.{key}={named[key]}, but strategy.deepspeed={path} means "
                f"{key}={value}. Leave one of the two out."
            )
    return RoleConfig(name="zero", **{**options, "engine": "deepspeed", "config": path})


class MemoryConfig(ConfigSection):
    """How memory is measured and predicted."""

    track_steps: int = Field(3, ge=0)
    """Steps from the start during which all tensors are tracked; 0 tracks none."""
    predict: bool = True
    """Predict the peak from a run on fake tensors, and print it next to the measured one."""
    cap: Bytes | None = Field(None, gt=0)
    """The most memory that a rank may take: of the GPU, or on a CPU in addition to the memory that
    it had before the model was built."""
    on_oom: Literal["stop", "adapt"] = "stop"
    """If memory runs out: stop with an explanation, or continue from the last checkpoint with half
    the micro-batch size and the same global batch."""


class CheckpointConfig(ConfigSection):
    """When the state is saved, and from where it is loaded."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    at_end: bool = True
    """Save after the last step."""
    keep: int = Field(3, ge=1)
    """The number of newest checkpoints that are not deleted."""
    best: str | None = None
    """A validation metric, such as `loss` or `top1`. A state that is better than all before is
    saved, and kept in addition to the newest checkpoints. A lower loss and a higher share are
    better."""
    asynchronous: bool = False
    """Continue training while the files are written, from a copy on the host."""
    snapshot_bytes: Bytes | None = Field(None, ge=0)
    """The most bytes that a rank copies to the host with `asynchronous`; the rest is written before
    training continues. null: no limit."""
    resume: str | None = None
    """`auto`: the newest checkpoint of the run, if there is one; or the path of a checkpoint."""

    @property
    def saves(self) -> bool:
        """Whether a run saves its state at all."""
        return self.every > 0 or self.at_end or self.best is not None


class LogConfig(ConfigSection):
    """The folder and the output of a run."""

    dir: str = "runs"
    """The folder of all runs."""
    name: str | None = None
    """The run's folder below `dir`; by default model-strategy-number."""
    every: int = Field(10, ge=1)
    """Steps between log lines where the output is not a terminal."""
    tensorboard: bool = False
    """Write TensorBoard files into the run's folder; needs the package tensorboard."""
    wandb: str | None = None
    """The project at Weights & Biases that gets the numbers of each step and validation; needs the
    package wandb. Its variables, such as WANDB_MODE=offline, have their usual meaning."""
    accuracy: bool = False
    """Write `top1` of each training step to metrics.jsonl: the share of the global batch that was
    classified correctly, from the outputs of the step. For data with one class per sample."""

    @field_validator("dir", "name")
    @classmethod
    def _is_path(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            check_name(value, f"log.{info.field_name}")
        return value

    @field_validator("wandb")
    @classmethod
    def _is_project(cls, value: str | None) -> str | None:
        # wandb has the same rule, but would raise only after the ranks have connected.
        if value is not None and (not value or len(value) > 128 or set(value) & set("/\\#?%:")):
            raise ValueError(
                f"{value!r} is not a project's name: 1 to 128 characters, none of / \\ # ? % :. "
                "Use log.wandb=first-runs"
            )
        return value

    @field_validator("name")
    @classmethod
    def _stays_below(cls, value: str | None) -> str | None:
        parts = PurePath(value or "").parts
        if value is not None and (not parts or ".." in parts or PurePath(value).is_absolute()):
            raise ValueError(
                f"{value!r} is not below log.dir. Give a name such as log.name=first, and "
                "the folder above it as log.dir=FOLDER"
            )
        return value


class Job(ConfigSection):
    """The typed configuration of one run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    strategy: StrategyConfig = StrategyConfig()
    mesh: MeshConfig = MeshConfig()
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """The kind of device to train on; auto is an accelerator if there is one."""

    @model_validator(mode="after")
    def _deepspeed_agrees(self) -> Job:
        path = self.strategy.deepspeed_file  # refuses a technique that the file contradicts
        if path is not None:
            check_agreement(path, {"optim": dict(self.optim), "train": dict(self.train)})
        elif self.optim.schedule == "deepspeed":
            raise ConfigError(
                "optim.schedule=deepspeed needs the scheduler of a DeepSpeed file. "
                "Set strategy.deepspeed=FILE, or another optim.schedule."
            )
        return self
