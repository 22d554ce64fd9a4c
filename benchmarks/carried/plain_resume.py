"""Save in the midst of an epoch, begin again from the file, and go on at the next batch."""

import sys
from pathlib import Path

import torch
from samples import classifier, digits, report
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Subset

BATCH, STEPS, STOP = 50, 20, 8

folder = Path(sys.argv[1])
train, _ = digits()
torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = CosineAnnealingLR(optimizer, STEPS)
done = 0
if (folder / "state.pt").exists():
    state = torch.load(folder / "state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    done = state["step"]
rest = Subset(train, range(done * BATCH, len(train)))
for images, labels in DataLoader(rest, BATCH):
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    done += 1
    report(step=done, loss=float(loss))
    if done in (STOP, STEPS):
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        folder.mkdir(exist_ok=True)
        torch.save(
            {k: v.state_dict() for k, v in state.items()} | {"step": done}, folder / "state.pt"
        )
        break
