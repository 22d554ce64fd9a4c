"""Models of transformers with their outputs and losses, compared with a plain torch loop.

They are skipped if transformers is not installed, which bigtrain does not require. Their special
features (a cache, a built-in loss, a mapping as output) are tested everywhere on nets of this
repository: `support.caching_nets`, `test_ranks_user_losses.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss

ROWS, LENGTH, WORDS, STEPS = 8, 6, 31, 3


class ByKeyword(nn.Module):
    """Passes a mapping as keywords, labels included: the output contains the model's loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "vocab_size": WORDS}
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=WORDS))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_labels": 3}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **quiet, num_attention_heads=2, vocab_size=WORDS)
    return BertForSequenceClassification(config)


def tokens(step: int) -> tuple[Any, Any]:
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return ids, ids.roll(-1, 1)


def labelled(step: int) -> tuple[Any, Any]:
    ids, _ = tokens(step)
    return {"input_ids": ids, "labels": ids}, ids


def classes(step: int) -> tuple[Any, Any]:
    ids, _ = tokens(step)
    return ids, ids[:, 0] % 3


def labelled_classes(step: int) -> tuple[Any, Any]:
    ids, labels = classes(step)
    return {"input_ids": ids, "labels": labels}, labels


def of_logits(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), targets.flatten())


def own_loss(output: Any, _: Any) -> Tensor:
    return output.loss


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "GPT-2, loss on logits": (gpt2, tokens, of_logits),
    "GPT-2, its own loss": (lambda: ByKeyword(gpt2()), labelled, own_loss),
    "Llama, loss on logits": (llama, tokens, of_logits),
    "Llama, its own loss": (lambda: ByKeyword(llama()), labelled, own_loss),
    "BERT, loss on logits": (bert, classes, of_logits),
    "BERT, its own loss": (lambda: ByKeyword(bert()), labelled_classes, own_loss),
}


def rows_of(batch: tuple[Any, Any], rows: slice) -> tuple[Any, Any]:
    inputs, targets = batch
    cut = {k: v[rows] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
    return cut, targets[rows]


def plain_loop(case: str) -> list[float]:
    """The losses of a plain torch loop on whole batches, with the cache on, as by default."""
    make, batch, loss = CASES[case]
    torch.manual_seed(0)
    model, losses = make().train(), []
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def train_all(context: Any, strategy: str) -> dict[str, tuple[list[float], list[float]]]:
    """For each case, the losses and the stages' shares of the work."""
    results: dict[str, tuple[list[float], list[float]]] = {}
    for case, (make, batch, loss) in CASES.items():
        keys = {"train.global_batch_size": ROWS, "train.micro_batch_size": 2, "device": "cpu"}
        job = job_from_keys(strategy, {**keys, "memory.predict": False})
        plan = make_plan(job, context.world_size, "cpu")
        each = ROWS // context.dp_size
        rank_rows = slice(context.dp_rank * each, (context.dp_rank + 1) * each)
        torch.manual_seed(0)
        model, made_loss = make(), as_loss(loss)
        example = example_batch(rows_of(batch(0), slice(0, 2)), made_loss, job, plan)
        with Engine(model, made_loss, sgd, job, context, example=example) as engine:
            losses = [engine.step(rows_of(batch(step), rank_rows)).loss for step in range(STEPS)]
            seconds = engine.layout.chosen.partition.seconds if engine.layout is not None else ()
            results[case] = losses, [stage_seconds / sum(seconds) for stage_seconds in seconds]
    return results


@pytest.mark.parametrize("strategy", ["1f1b", "ddp", "fsdp", "zero2", "tensor"])
def test_stock_models_train_as_in_a_plain_loop(strategy):
    pytest.importorskip("transformers")
    axes = {"1f1b": {"pp": 2}, "tensor": {"tp": 2}}.get(strategy, {})
    expected = {case: plain_loop(case) for case in CASES}
    for record in run_ranks(train_all, 2, strategy, timeout_s=300.0, **axes):
        for case, (losses, shares) in record.items():
            assert losses == pytest.approx(expected[case], rel=2e-5), case
            assert max(shares, default=0.5) < 0.62, case
