"""Train a generator and a discriminator in turn, each with its own optimizer."""

import torch
from samples import digits, report
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.utils.data import DataLoader

BATCH, NOISE = 50, 16

train, _ = digits()
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 64), nn.GELU(), nn.Linear(64, 64), nn.Sigmoid())
judge = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
draws = torch.Generator().manual_seed(1)
for images, _ in DataLoader(train, BATCH):
    noise = torch.randn(BATCH, NOISE, generator=draws)
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    generator_loss = loss_of(judge(generator(noise)), ones)
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generator_optimizer.step()
    shown = torch.cat([images.flatten(1), generator(noise).detach()])
    judge_loss = loss_of(judge(shown), torch.cat([ones, zeros]))
    judge_optimizer.zero_grad()
    judge_loss.backward()
    judge_optimizer.step()
    report(generator=float(generator_loss), judge=float(judge_loss))
