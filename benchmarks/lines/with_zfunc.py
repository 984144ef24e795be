"""zfunc: the state is sharded, parameters are gathered layer by layer."""

from functools import partial

import zfunc as zf
from benchmarks.lines.task import batches, loss_of, make
from zfunc import optim

zf.init()
model = zf.functionalize(make())
tx = optim.adamw(1e-2, weight_decay=1e-2)
step = zf.train_step(lambda params, batch: loss_of(partial(model.apply, params), batch), tx)
step = zf.shard(step, stage=3)
state = step.place(zf.TrainState.create(model.params, tx))
for batch in batches():
    state, metrics = step(state, step.local_batch(batch))
if zf.rank() == 0:
    print(metrics["loss"].item())
