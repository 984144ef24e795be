"""Torch's FSDP2: the state is sharded, parameters are gathered layer by layer."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from benchmarks.lines.task import batches, loss_of, make

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = make()
for layer in model[::2]:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
for batch in batches():
    loss = loss_of(model, batch[rank::ranks])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
mean = loss.detach() / ranks
dist.all_reduce(mean)
if rank == 0:
    print(mean.item())
dist.destroy_process_group()
