"""`bigtrain verify --script`: a user's training script compared with a plain torch loop."""

from __future__ import annotations

import json

from support.zygote import forked_cli

SCRIPT = """\
import sys
import torch
import torch.nn.functional as F
from torch import nn
import bigtrain

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.d, self.h = nn.Embedding(13, 8), nn.Dropout(0.1), nn.Linear(8, 13)
    def forward(self, x):
        return self.h(self.d(torch.tanh(self.e(x))))

x = torch.randint(0, 13, (8, 6), generator=torch.Generator().manual_seed(1))
y = x.clone()
y[0, 2:] = y[2, 4:] = -100

def loss(output, target):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())

if "rows" in sys.argv:
    loss = bigtrain.MeanLoss(loss, count_of="rows")
keys = dict(train__global_batch_size=8, train__micro_batch_size=2, device="cpu")
with bigtrain.prepare(Net, loss, torch.optim.AdamW, example=(x[:2], y[:2]), **keys) as engine:
    rows = 8 // engine.context.dp_size
    own = slice(engine.context.dp_rank * rows, (engine.context.dp_rank + 1) * rows)
    for _ in range(1000):
        engine.step((x[own], y[own]))
"""


def verify(folder, arguments, *words):
    (folder / "script.py").write_text(SCRIPT, "utf-8")
    script = ["verify", "-n", "2", "--script", f"script.py {arguments}".strip()]
    return forked_cli([*script, *words], cwd=folder, timeout=300)


def test_a_script_is_held_against_a_plain_loop_under_each_strategy(tmp_path):
    done = verify(tmp_path, "", "--strategies", "ddp,zero3,1f1b", "--json")
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout)["rows"]:
        assert row["verdict"] == "pass", row
        assert row["loss"] < 1e-6


def test_a_script_that_counts_otherwise_differs_and_a_wrong_strategy_is_refused(tmp_path):
    done = verify(tmp_path, "rows", "--strategies", "ddp")
    assert done.returncode == 1
    assert "ddp: differs: step 1: the loss under ddp is" in done.stdout
    for words, message in (
        (("--strategies", "nosuch"), "strategy: unknown 'nosuch'"),
        (("optim.lr=1",), "the script passes its job to bigtrain.prepare"),
    ):
        refused = verify(tmp_path, "", *words)
        assert refused.returncode == 2
        assert message in refused.stderr
    (tmp_path / "script.py").unlink()
    missing = forked_cli(["verify", "--script", "script.py"], cwd=tmp_path, timeout=60)
    assert missing.returncode == 2
    assert "--script script.py: there is no such file" in missing.stderr
