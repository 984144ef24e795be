"""One process: what the others are compared with."""

import torch

from benchmarks.lines.task import batches, loss_of, make

model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
for batch in batches():
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
