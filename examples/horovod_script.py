"""A script for Horovod, but for one line: `mpirun -np 2 python examples/horovod_script.py`."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bigtrain.hvd as hvd  # was: import horovod.torch as hvd

hvd.init()
BATCH, STEPS = 32, 10  # samples of a step on all ranks; steps
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(hvd.rank())  # another seed on each rank: rank 0's weights are broadcast below
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10)).to(device)
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = hvd.DistributedOptimizer(
    adamw, named_parameters=model.named_parameters(), backward_passes_per_step=2
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

inputs = torch.randn(STEPS * BATCH, 16, generator=torch.Generator().manual_seed(0)).to(device)
targets = inputs[:, :10].argmax(dim=1)
half = BATCH // hvd.size() // 2  # samples of each of a rank's two backward passes
for step in range(STEPS):
    mean = torch.zeros((), device=device)
    for part in range(2):
        first = step * BATCH + (2 * hvd.rank() + part) * half
        rows = slice(first, first + half)
        loss = cross_entropy(model(inputs[rows]), targets[rows]) / 2
        loss.backward()
        mean += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    mean = hvd.allreduce(mean, name="loss")
    if hvd.rank() == 0:
        print(f"step {step + 1}  loss {mean:.4f}")
hvd.shutdown()
