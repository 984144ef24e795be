"""Transforms: functions from step to step, one file each, each opening with the law it keeps."""

from zfunc.transforms.compression import compress_grads
from zfunc.transforms.donation import donate
from zfunc.transforms.sharding import shard

__all__ = ["compress_grads", "donate", "shard"]
