"""Train a GPT-2 of transformers on text: weight decay for matrices alone, clipping, perplexity."""

import math
import sys

import torch
from samples import gpt2, report, text_windows
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

import bigtrain

BATCH = 32

data = text_windows()
train, test = Subset(data, range(448)), Subset(data, range(448, 512))
torch.manual_seed(0)
model = gpt2()


def optimizer(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=3e-3,
    )


engine = bigtrain.prepare(
    model,
    lambda outputs, following: cross_entropy(outputs.logits.flatten(0, 1), following.flatten()),
    optimizer,
    strategy=sys.argv[1],
    example=data[:8],
    forward=lambda model, tokens: model(input_ids=tokens),
    optim__clip_norm=0.5,
    train__global_batch_size=BATCH,
)
loader = engine.loader(train, shuffle=False)
for _ in range(2):
    for batch in loader:
        result = engine.step(batch)
        report(loss=result.loss, norm=result.grad_norm)
found = engine.evaluate(engine.loader(test, training=False))
report(perplexity=math.exp(found["loss"]))
engine.close()
