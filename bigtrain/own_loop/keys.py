"""The keys of a job that `prepare` accepts, and the code that replaces the others in a loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.errors import ConfigError

FOLLOWED = frozenset(
    {
        "data.batch_dims",
        *("optim.clip_norm", "optim.master_weights", "optim.release_gradients"),
        *("train.global_batch_size", "train.micro_batch_size", "train.accumulation_steps"),
        *("train.seed", "train.precision", "train.sync_batchnorm", "train.check_finite"),
        *("train.check_first_steps", "train.deterministic", "train.matmul"),
        *("train.memory_format", "train.compile"),
        *("strategy.name", "strategy.deepspeed", "strategy.cut", "strategy.slice"),
        *("strategy.replicate", "strategy.recompute", "strategy.offload", "strategy.accumulate"),
        *("mesh.pp", "mesh.dp", "mesh.tp", "mesh.backend", "mesh.setup_timeout", "mesh.timeout"),
        *("memory.track_steps", "memory.predict", "memory.cap", "memory.on_oom"),
        *("checkpoint.keep", "checkpoint.asynchronous", "checkpoint.snapshot_bytes"),
        "device",
    }
)
"""The dotted names of the keys that have an effect in a custom loop. Options of techniques are not
listed, because the techniques check them."""

_MODEL = "the model is an argument here: prepare(model, ...)"
_CHUNKED = "a chunked loss is bigtrain.ChunkedCrossEntropy(head=...) as the second argument"
_OPTIMIZER = (
    "the optimizer is an argument here: prepare(model, loss, "
    "functools.partial(torch.optim.AdamW, lr=1e-3))"
)
_RATE = (
    "the rate of each step is an argument: prepare(..., learning_rate=lambda optimizer: "
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS))"
)
_LENGTH = "the loop decides its length: for batch in batches: engine.step(batch)"
_LOG = (
    "the loop logs the results of engine.step, as "
    'SummaryWriter().add_scalar("loss", result.loss, result.step)'
)
INSTEAD = {
    "model.name": _MODEL,
    "model.args": _MODEL,
    "model.pretrained": f"{_MODEL}, with its weights loaded",
    "model.pretrained_except": f"{_MODEL}, with its weights loaded",
    "model.freeze": f"{_MODEL}; set requires_grad=False on its parameters",
    "model.lora": f"{_MODEL}; attach peft's layers to it first",
    "model.loss": "the loss is the second argument: prepare(model, loss, optimizer)",
    "model.chunked_loss": _CHUNKED,
    "model.chunk_size": "it is bigtrain.ChunkedCrossEntropy(head=..., chunk_size=...) as the loss",
    "model.auxiliary_weight": "it is bigtrain.CrossEntropy(auxiliary_weight=...) as the loss",
    "model.head": _CHUNKED,
    "strategy.budget": "bigtrain plan --at SIZE writes a plan whose words prepare takes",
    "data.name": "the data are the loop's own: engine.loader(dataset)",
    "data.path": "the data are the loop's own: engine.loader(dataset)",
    "data.args": "the data are the loop's own: engine.loader(dataset)",
    "data.workers": "it is an argument of the loader: engine.loader(dataset, workers=...)",
    **dict.fromkeys(
        (
            *("optim.name", "optim.lr", "optim.weight_decay", "optim.betas", "optim.eps"),
            *("optim.momentum", "optim.dampening", "optim.nesterov", "optim.implementation"),
            *("optim.decay_norms_and_biases", "optim.state", "optim.stochastic_rounding"),
        ),
        _OPTIMIZER,
    ),
    **dict.fromkeys(
        (
            *("optim.base_batch_size", "optim.warmup_steps", "optim.warmup_epochs"),
            *("optim.warmup_factor", "optim.schedule", "optim.final_lr_share"),
            *("optim.poly_power", "optim.milestones", "optim.step_factor"),
        ),
        _RATE,
    ),
    "train.steps": _LENGTH,
    "train.epochs": _LENGTH,
    "train.eval_every": "the loop calls engine.evaluate(batches)",
    "checkpoint.every": "the loop calls engine.save(folder)",
    "checkpoint.at_end": "the loop calls engine.save(folder)",
    "checkpoint.best": (
        "the loop calls engine.save(folder, best=figures) where engine.evaluate was better"
    ),
    "checkpoint.resume": "the loop calls engine.load(engine.newest(folder))",
    **dict.fromkeys(("log.dir", "log.name", "log.every", "log.tensorboard", "log.wandb"), _LOG),
    "log.accuracy": "it is a metric: engine.evaluate(batches, metrics={...})",
}
"""By the dotted name of a key without effect in a custom loop, the code that replaces the key."""


def check_keys(keys: Mapping[str, Any]) -> None:
    """Refuse keys that have no effect in a custom loop.

    Args:
        keys: the keyword arguments of `prepare`, with two underscores for the dot.

    Raises:
        ConfigError: a key has no effect; the message has the code to write instead.
    """
    for key, value in keys.items():
        name = key.replace("__", ".")
        nested = [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) else []
        for dotted in (name, *nested):
            if dotted in INSTEAD:
                shown = dotted.replace(".", "__")
                raise ConfigError(
                    f"prepare(..., {shown}=...) would be ignored: {INSTEAD[dotted]}. Leave it out."
                )
