"""One job as types: every key of a YAML file, its default, its unit, and the batch arithmetic.

Defaults stand here and nowhere else; YAML files hold differences. Nothing here imports torch,
so a wrong key is answered in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bigtrain.errors import ConfigError, as_word, unquoted_word
from bigtrain.files.regular import check_name
from bigtrain.job.deepspeed_json import check_agreement
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
"""What a role means where its `name` is left out: these have one technique each."""
Bytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(value))]
"""A size: written '25MiB' or as a number, kept as an integer of bytes."""
Beta = Annotated[float, Field(ge=0, lt=1)]


def refuse_truth(kind: object, value: object, metadata: Sequence[object] = ()) -> object:
    """A value, unless it is or holds `true`, `false` or what is beyond 64 bits where numbers are.

    Args:
        kind: the annotation of what it is for; one with a check of its own is left to that.
        value: as it was given.
        metadata: that pydantic keeps beside the annotation of a field.

    Raises:
        ValueError: it is one: for pydantic that would be 1 or 0, or a number that no float holds.
    """
    if any(isinstance(one, BeforeValidator) for one in metadata):
        return value
    kinds = _plain_kinds(kind)
    held = [value, *(value if isinstance(value, list | tuple) else ())]
    if not kinds & {int, float} or kinds & _ANYTHING:
        return value
    if any(isinstance(one, bool) for one in held):
        shown = str(value).lower() if isinstance(value, bool) else value
        raise ValueError(f"needs a number (got {shown})")
    if any(isinstance(one, int) and abs(one) > MOST_WHOLE for one in held):
        raise ValueError(f"a whole number is at most {MOST_WHOLE:,}, and this is beyond it")
    return value


MOST_WHOLE = 2**63 - 1
"""The largest whole number of a key: what torch's integers hold."""


_ANYTHING: set[object] = {bool, Any, object}


def _plain_kinds(kind: object) -> set[object]:
    """The types in an annotation, those inside of unions and lists, too."""
    inner = get_args(kind)
    if any(isinstance(one, BeforeValidator) for one in inner):
        return {Any}
    if get_origin(kind) in (dict, Literal):
        return set()
    return set().union(*map(_plain_kinds, inner)) if inner else {kind}


class ConfigSection(BaseModel):
    """The base of every section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        return refuse_truth(field.annotation, value, field.metadata)


class ModelConfig(ConfigSection):
    """Which model is trained."""

    name: str = "gpt"
    """A built-in name (gpt-10m, lenet, resnet50, ...) or `package.module:Class`."""
    args: dict[str, Any] = {}
    """Arguments of its constructor; what the data decides (number of classes) may be left out."""
    pretrained: str | None = None
    """The state dict that it begins with: a file, or `cache` for the one that torchvision has
    fetched before (nothing is downloaded)."""
    pretrained_except: tuple[str, ...] = ()
    """Modules, by their names, that begin with initial weights all the same: a head for other
    classes."""
    loss: str | None = None
    """`package.module:function`, a mean loss of (output, target); left out, the task's own."""
    chunked_loss: bool | None = None
    """Cross entropy in chunks, without the whole logits; left out, for the built-in gpt models."""
    chunk_size: Bytes | None = Field(None, gt=0)
    """Bytes of the logits in one chunk; left out, 32 MiB on a CPU and 256 MiB elsewhere."""
    auxiliary_weight: float | None = Field(None, ge=0)
    """What the loss of each auxiliary head (`aux`) counts for beside that of the main one; left
    out, what is customary for the model's kind."""
    head: str | None = None
    """The linear layer that makes the logits, by its name; left out, it is found."""

    @model_validator(mode="after")
    def _begins_somewhere(self) -> ModelConfig:
        if self.pretrained_except and self.pretrained is None:
            raise ValueError(
                f"{as_word('pretrained_except', self.pretrained_except)} leaves out parts of a "
                "file, and there is none. Set model.pretrained=FILE, or leave it out"
            )
        return self


class DataConfig(ConfigSection):
    """What it is trained on."""

    name: str = "text"
    """A built-in source (text, digits, cifar10, ...) or `package.module:function`."""
    path: str | None = None
    """The file or folder of the source; for text, left out, the Python library's own source."""
    args: dict[str, Any] = {}
    """Arguments of the source."""
    workers: int | None = Field(None, ge=0)
    """Processes per rank that read samples ahead; 0 reads in the training process. Left out, none
    on a CPU, and on a GPU as many as there are cores for each rank, 4 at most."""
    batch_dims: dict[str, int | None] = {}
    """In a loop of your own: the dim of a tensor that goes along the rows, by its name in the batch
    (inputs, inputs.position_ids, inputs[1], targets); null for one that belongs to all rows. Left
    out, tensors begin with their rows, or belong to all where they have one row or no dim."""


class OptimConfig(ConfigSection):
    """How the parameters are updated."""

    name: Literal["adamw", "adam", "sgd", "adafactor", "adamw_8bit", "adamw_4bit"] = "adamw"
    """adam adds weight decay to the gradient, adamw takes it from the weight; adafactor keeps a row
    and a column of its second moment; the last two keep 8 or 4 bits for each moment, in torchao's
    formats."""
    lr: float = Field(1e-3, ge=0)
    """The highest learning rate, for a global batch of `base_batch_size` where that is given."""
    base_batch_size: int | None = Field(None, ge=1)
    """Linear scaling: the rate is multiplied by global_batch_size / base_batch_size."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled from the gradient, except for adam and sgd, as in torch."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the first and second moments, for adamw and adam in all their forms."""
    eps: float = Field(1e-8, ge=0)
    """Added to the root of the second moment, for adamw and adam in all their forms."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """For sgd."""
    dampening: float = Field(0.0, ge=0, le=1)
    """For sgd: what of a new gradient is left out of the momentum."""
    nesterov: bool = False
    """For sgd: the step looks ahead along the momentum."""
    decay_norms_and_biases: bool = True
    """False: weight decay leaves out parameters of one dim, those of norms and biases (He et al.
    2018, arXiv 1812.01187, section 3.1)."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises linearly to `lr`."""
    warmup_epochs: float = Field(0.0, ge=0)
    """The same in passes over the training data, whatever the batch; give one of the two."""
    warmup_factor: float | None = Field(None, ge=0, le=1)
    """The share of the rate in the first step, from which it rises to all of it in the step after
    the warm-up; left out, one warm-up step's share, and all of it in the warm-up's last step."""
    schedule: Literal["constant", "cosine", "linear", "poly", "step", "deepspeed"] = "constant"
    """The rate after warm-up: held, let down to `final_lr_share` by the end of the last step (as a
    power of what remains: poly), multiplied by `step_factor` at each of `milestones`, or with its
    warm-up what the scheduler of `strategy.deepspeed` sets (written by bigtrain itself)."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """For schedule=cosine, linear and poly: the rate at the end, as a share of `lr`."""
    poly_power: float = Field(0.9, gt=0)
    """For schedule=poly: the power."""
    milestones: tuple[float, ...] = ()
    """For schedule=step: in epochs, ascending."""
    step_factor: float = Field(0.1, gt=0, le=1)
    """For schedule=step: the rate is multiplied by it at each milestone."""
    clip_norm: float | None = Field(None, gt=0)
    """Gradients are scaled down to this global norm where they exceed it."""
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """torch's kernels for the step; auto is fused, which needs no temporary copies."""
    state: Literal["fp32", "bf16"] = "fp32"
    """The dtype of adamw's moments; bf16 halves them."""
    master_weights: bool = True
    """False: with train.precision=bf16 the parameters themselves are bf16, without fp32 copies."""
    stochastic_rounding: bool | None = None
    """What is kept in bf16 is rounded up or down by chance; left out, true where there is any."""
    release_gradients: bool = False
    """Each parameter is updated in the backward pass, as soon as its gradient is there."""

    @model_validator(mode="after")
    def _fits(self) -> OptimConfig:
        fault = optimizer_fault(self) or schedule_fault(self)
        if fault is not None:
            raise ValueError(fault)
        return self

    @property
    def lean(self) -> bool:
        """Whether the update is bigtrain's own, a piece at a time, and not one of torch's."""
        own = self.state == "bf16" or not self.master_weights
        return self.name in LOW_BIT or (self.name == "adamw" and own)


LOW_BIT = {"adamw_8bit": 8, "adamw_4bit": 4}


_ADAMS = ("adamw", "adam", "adamw_8bit", "adamw_4bit")
_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "betas": _ADAMS,
    "eps": _ADAMS,
    "momentum": ("sgd",),
    "dampening": ("sgd",),
    "nesterov": ("sgd",),
}
"""Keys that not every optimizer has, and which have them."""


def keys_without_use(name: object) -> list[str]:
    """The keys that an optimizer of this name has not."""
    return [key for key, names in _OWN_KEYS.items() if name not in names]


def foreign_key_fault(optim: OptimConfig) -> str | None:
    """What is given that the optimizer has not; None where nothing is."""
    for key in keys_without_use(optim.name):
        value = getattr(optim, key)
        if value != type(optim).model_fields[key].default:
            names = ", ".join(_OWN_KEYS[key])
            return (
                f"{unquoted_word(key, value)} is for {names}, and name is {optim.name}. "
                f"Leave optim.{key} out, or set optim.name={_OWN_KEYS[key][0]}"
            )
    if optim.nesterov and (not optim.momentum or optim.dampening):
        return (
            f"nesterov=true looks ahead along a momentum without dampening, and "
            f"momentum={optim.momentum:g} dampening={optim.dampening:g}. Use optim.momentum=0.9 "
            "optim.dampening=0, or optim.nesterov=false"
        )
    return None


def optimizer_fault(optim: OptimConfig) -> str | None:
    """What is wrong with these keys together, with the fix; None where nothing is."""
    name, rounded = optim.name, optim.state == "bf16" or not optim.master_weights
    foreign = foreign_key_fault(optim)
    if foreign is not None:
        return foreign
    if optim.state == "bf16" and name != "adamw":
        return f"state=bf16 is for name=adamw, and name is {name}. Leave optim.state out"
    if not optim.master_weights and name in ("sgd", "adam", "adafactor"):
        return (
            f"master_weights=false is for adamw, adamw_8bit and adamw_4bit, and name is {name}, "
            "which would lose every change below 1/256 of a weight. Use optim.name=adamw, or "
            "optim.master_weights=true"
        )
    if optim.stochastic_rounding and not rounded:
        return (
            "stochastic_rounding=true rounds what is kept in bf16, and nothing is. Set "
            "optim.state=bf16 or optim.master_weights=false, or leave it out"
        )
    if optim.implementation == "fused" and name == "adafactor":
        return "implementation=fused: torch has no such adafactor. Use optim.implementation=auto"
    if optim.lean and optim.implementation != "auto":
        return (
            f"implementation={optim.implementation} chooses among torch's kernels, and name={name} "
            "with these keys has one of its own. Use optim.implementation=auto"
        )
    if optim.release_gradients and optim.clip_norm is not None:
        return (
            f"release_gradients=true updates each parameter before the norm of all gradients is "
            f"known, and clip_norm={optim.clip_norm} needs it. Use optim.clip_norm=null, or "
            "optim.release_gradients=false"
        )
    return None


def schedule_fault(optim: OptimConfig) -> str | None:
    """What is wrong with the keys of the learning rate together; None where nothing is."""
    if optim.warmup_steps and optim.warmup_epochs:
        return (
            f"warmup_steps={optim.warmup_steps} and warmup_epochs={optim.warmup_epochs} both say "
            "how long the rate rises. Give one, as optim.warmup_steps=0"
        )
    if optim.warmup_factor is not None and not (optim.warmup_steps or optim.warmup_epochs):
        return (
            f"warmup_factor={optim.warmup_factor:g} is where a warm-up begins, and there is none. "
            "Give optim.warmup_steps or optim.warmup_epochs, or leave optim.warmup_factor out"
        )
    given = list(optim.milestones)
    if (optim.schedule == "step") != bool(given):
        return (
            f"schedule={optim.schedule} with milestones={given}: schedule=step needs the epochs "
            "after which the rate falls, and no other schedule has them. Use "
            "optim.schedule=step optim.milestones=[30,60,80], or optim.milestones=[]"
        )
    if given != sorted(set(given)) or (given and given[0] <= 0):
        return f"milestones={given} must ascend from above 0. Write them like [30,60,80]"
    return None


class TrainConfig(ConfigSection):
    """How long, in what batches, in what precision."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training data; give steps or epochs (neither means one epoch)."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples per optimizer step over all ranks; any two of these three give the third."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Samples per rank that go through the model at once."""
    accumulation_steps: int | None = Field(None, ge=1)
    """Micro-batches per rank and optimizer step."""
    seed: int = Field(0, ge=0)
    """Initial weights, the order of the samples and dropout depend on it."""
    precision: Precision = "fp32"
    """bf16 is autocast with fp32 parameters; fp64 is for proofs."""
    eval_every: int = Field(0, ge=0)
    """Steps between validations, besides the one at the end; 0 for that one alone."""
    sync_batchnorm: bool = False
    """BatchNorm statistics over all ranks (CUDA only)."""
    check_finite: bool = True
    """A step whose loss or norm is not finite is refused before the update. False: it is not, and
    a GPU has no pause between the backward pass and the update."""
    check_first_steps: int = Field(0, ge=0)
    """Steps whose loss and gradient norm are compared with those of a plain torch loop on the whole
    global batch, which rank 0 runs on its CPU beside them; a difference ends the run."""
    deterministic: bool = False
    """Only deterministic kernels (torch.use_deterministic_algorithms)."""
    matmul: Literal["highest", "high"] = "highest"
    """On a GPU: products and convolutions of fp32 numbers in fp32, or in TF32 (`high`), which keeps
    10 bits of each factor and is several times as fast."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """How images lie in memory, and the weights of convolutions where no technique shards them."""
    compile: Literal["none", "blocks"] = "none"
    """torch.compile of each repeated block; blocks that are alike share one program."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs} both say how long to train; "
                "give one (train.epochs=null drops the other)"
            )
        return self


BATCH_KEYS = ("global_batch_size", "micro_batch_size", "accumulation_steps")
"""Any two of them give the third."""


class MeshConfig(ConfigSection):
    """The ranks as axes, and how they talk."""

    pp: int | None = Field(None, ge=1)
    """Stages of a cut model; left out, all ranks that dp and tp leave where a technique cuts."""
    dp: int = Field(-1, ge=-1)
    """-1 is what remains of the world."""
    tp: int | None = Field(None, ge=1)
    """Ranks that hold slices of the same layers; left out, 1, and where a technique slices all
    ranks, or 2 beside replicas or stages."""
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """The library that exchanges tensors; auto is nccl on GPUs and gloo on a CPU."""
    setup_timeout: float = Field(300.0, gt=0)
    """Seconds the ranks wait for each other at the start."""
    timeout: float = Field(100.0, gt=0)
    """Seconds a collective may take afterwards; at least 1800 with train.compile=blocks."""

    @field_validator("dp")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("dp=0 has no ranks; use -1 for what remains")
        return value


class RoleConfig(BaseModel):
    """One technique: its name, and its own options, which its module checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The technique's options, as written."""
        return dict(self.model_extra or {})


class StrategyConfig(ConfigSection):
    """At most one technique for each role."""

    name: str = "single"
    """What the reports call it: the words that it was named by. Without a cut, replicas or
    DeepSpeed's file beside it, it names them: {name: ddp+full}."""
    deepspeed: str | None = None
    """A DeepSpeed configuration file (JSON): `zero` on DeepSpeed, as the file says."""
    cut: RoleConfig | None = None
    """Lays the model's layers over ranks or devices: stages of a pipeline."""
    slice: RoleConfig | None = None
    """Lays each layer over ranks: tensor parallelism."""
    replicate: RoleConfig | None = None
    """How replicas share gradients, optimizer state and parameters."""
    recompute: RoleConfig | None = None
    """Which activations are kept for the backward pass, and which are computed again."""
    offload: RoleConfig | None = None
    """Keeps optimizer state or activations on the host or on disk."""
    accumulate: RoleConfig | None = None
    """How many micro-batches make a step."""

    @field_validator(*ROLES, mode="before")
    @classmethod
    def _short_form(cls, value: object, info: ValidationInfo) -> object:
        return long_form(str(info.field_name), value)

    @property
    def deepspeed_file(self) -> str | None:
        """The DeepSpeed configuration that is followed, however it is named.

        Raises:
            ConfigError: `deepspeed` and what stands beside it contradict each other.
        """
        if self.deepspeed is not None:
            return _file_of(zero_from_file(self.replicate, self.deepspeed))
        return _file_of(self.replicate)

    def roles(self) -> dict[Role, RoleConfig]:
        """The roles that are filled, in the order of composition."""
        filled: dict[Role, RoleConfig] = {}
        for role in ROLES:
            config: RoleConfig | None = getattr(self, role)
            if role == "replicate" and self.deepspeed is not None:
                config = zero_from_file(config, self.deepspeed)
            if config is not None:
                filled[role] = config
        return filled


def _file_of(replicate: RoleConfig | None) -> str | None:
    """The DeepSpeed file that `zero` on DeepSpeed is given."""
    if replicate is None or replicate.name != "zero":
        return None
    options = replicate.options
    path = options.get("config")
    on_deepspeed = options.get("engine", "deepspeed") == "deepspeed"
    return path if on_deepspeed and isinstance(path, str) else None


def deepspeed_file_in(strategy: object) -> str | None:
    """The DeepSpeed file that a `strategy` names, before it is checked; None without one."""
    if not isinstance(strategy, dict):
        return None
    path, replicate = strategy.get("deepspeed"), strategy.get("replicate")
    if isinstance(path, str):
        return path
    if not isinstance(replicate, dict) or not isinstance(replicate.get("name"), str):
        return None
    return _file_of(RoleConfig.model_validate(replicate))


def long_form(role: str, value: object) -> object:
    """What a role says as a mapping with its technique's name, where it is a word or has none."""
    if isinstance(value, str) and role == "recompute" and ":" not in value:
        return _recompute(value)
    if isinstance(value, str):
        return {"name": value}
    name = DEFAULT_TECHNIQUE.get(role)
    if isinstance(value, dict) and name is not None:
        return {"name": name, **value}
    return value


def _recompute(word: str) -> dict[str, Any]:
    """`full`, `selective`, or a budget as `6GiB` or `80%`."""
    if word == "checkpointing":
        return {"name": word}
    key = "budget" if word[:1].isdigit() else "mode"
    return {"name": "checkpointing", key: word}


def zero_from_file(replicate: RoleConfig | None, path: str) -> RoleConfig:
    """`zero` on DeepSpeed with its file; a preset may stand beside it that says no other.

    Raises:
        ConfigError: the preset names another technique, engine or file.
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
    """Steps from the start during which every tensor is tracked; 0 tracks none."""
    predict: bool = True
    """Predict the peak from a pass over fake tensors, and print it beside the measured one."""
    cap: Bytes | None = Field(None, gt=0)
    """The most that a rank may take: of the GPU, or on a CPU above what it held before the model
    was built."""
    on_oom: Literal["stop", "adapt"] = "stop"
    """When memory runs out: stop with an explanation, or go on from the last checkpoint with half
    the micro-batch and the same global batch."""


class CheckpointConfig(ConfigSection):
    """When the state is saved and where it is taken from."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    at_end: bool = True
    """Save after the last step."""
    keep: int = Field(3, ge=1)
    """How many of the newest are kept."""
    best: str | None = None
    """A figure of the validation, such as `loss` or `top1`: a state that is better in it than all
    before is saved, and kept beside the newest. Lower is better of a loss, higher of a share."""
    asynchronous: bool = False
    """Training goes on while files are written, from a copy on the host."""
    snapshot_bytes: Bytes | None = Field(None, ge=0)
    """The most that a rank copies for that; what is more is written before. None: no limit."""
    resume: str | None = None
    """`auto`: the run's newest, if there is one; or the path of a checkpoint."""

    @property
    def saves(self) -> bool:
        """Whether a run saves its state at all."""
        return self.every > 0 or self.at_end or self.best is not None


class LogConfig(ConfigSection):
    """What is written while it runs."""

    dir: str = "runs"
    """The folder that holds the runs' folders."""
    name: str | None = None
    """The run's folder below `dir`; left out, model-strategy-number."""
    every: int = Field(10, ge=1)
    """Steps between log lines where the output is not a terminal."""
    tensorboard: bool = False
    """Write TensorBoard files into the run's folder; needs the package tensorboard."""
    accuracy: bool = False
    """`top1` of each training step in metrics.jsonl: the share of the global batch that was right,
    from the outputs of the step itself. For data with a class for each sample."""

    @field_validator("dir", "name")
    @classmethod
    def _is_path(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            check_name(value, f"log.{info.field_name}")
        return value

    @field_validator("name")
    @classmethod
    def _stays_below(cls, value: str | None) -> str | None:
        parts = PurePath(value or "").parts
        if value is not None and (not parts or ".." in parts or PurePath(value).is_absolute()):
            raise ValueError(
                f"{value!r} leads out of log.dir. Give a name such as log.name=first, and "
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
    """The kind of device to train on; auto takes an accelerator where there is one."""

    @model_validator(mode="after")
    def _deepspeed_agrees(self) -> Job:
        path = self.strategy.deepspeed_file  # refuses a technique that the file contradicts
        if path is not None:
            check_agreement(path, {"optim": dict(self.optim), "train": dict(self.train)})
        elif self.optim.schedule == "deepspeed":
            raise ConfigError(
                "optim.schedule=deepspeed is the scheduler of a DeepSpeed file, and there is none. "
                "Set strategy.deepspeed=FILE, or another optim.schedule."
            )
        return self
