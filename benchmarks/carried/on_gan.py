"""Train a generator and a discriminator in turn, each with its own optimizer."""

import sys
from functools import partial

import torch
from samples import digits, report
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.utils.data import DataLoader

import bigtrain

BATCH, NOISE = 50, 16

train, _ = digits()
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 64), nn.GELU(), nn.Linear(64, 64), nn.Sigmoid())
judge = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))
judge_engine = bigtrain.prepare(
    judge, loss_of, optimizer, strategy="ddp", train__global_batch_size=2 * BATCH
)
frozen_judge = bigtrain.frozen(judge_engine)
generator_engine = bigtrain.prepare(
    generator,
    lambda made, truth: loss_of(frozen_judge(made), truth),
    optimizer,
    strategy=sys.argv[1],
    beside=judge_engine,
    train__global_batch_size=BATCH,
)
rank, ranks = judge_engine.context.dp_rank, judge_engine.context.dp_size
draws = torch.Generator().manual_seed(1)
for images, _ in DataLoader(train, BATCH):
    noise = torch.randn(BATCH, NOISE, generator=draws)
    images, noise = images[rank::ranks], noise[rank::ranks]
    ones, zeros = torch.ones(len(noise), 1), torch.zeros(len(noise), 1)
    generator_loss = generator_engine.step((noise, ones)).loss
    shown = torch.cat([images.flatten(1), generator_engine.predict(noise)])
    judge_loss = judge_engine.step((shown, torch.cat([ones, zeros]))).loss
    report(generator=generator_loss, judge=judge_loss)
generator_engine.close()
judge_engine.close()
