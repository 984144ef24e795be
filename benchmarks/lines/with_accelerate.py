"""Hugging Face's accelerate: DDP, where a launcher does not ask for more."""

import torch
from accelerate import Accelerator

from benchmarks.lines.task import batches, loss_of, make

accelerator = Accelerator(cpu=True)
model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
rank, ranks = accelerator.process_index, accelerator.num_processes
for batch in batches():
    loss = loss_of(model, batch[rank::ranks])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
mean = accelerator.reduce(loss.detach(), "mean")
accelerator.print(mean.item())
accelerator.end_training()
