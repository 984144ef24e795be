"""Transforms: functions from step to step, one file each, each opening with the law it keeps."""

from zfunc.transforms.donation import donate
from zfunc.transforms.layer_drop import drop_layers
from zfunc.transforms.sharding import shard

__all__ = ["donate", "drop_layers", "shard"]
