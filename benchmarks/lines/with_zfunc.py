"""zfunc: the state is sharded, parameters are gathered layer by layer."""

import zfunc as zf
from benchmarks.lines.task import batches, loss_of, make

zf.init()
model = zf.functionalize(make())
tx = zf.optim.adamw(1e-2, weight_decay=1e-2)
step = zf.shard(zf.train_step(model.pure(loss_of), tx), stage=3)
state = step.place(zf.TrainState.create(model.params, tx))
for batch in batches():
    state, metrics = step(state, step.local_batch(batch))
if zf.rank() == 0:
    print(metrics["loss"].item())
