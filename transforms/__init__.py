"""Transforms: functions from step to step, one file each, each opening with the law it keeps."""

from zfunc.transforms.accumulation import accumulate
from zfunc.transforms.compression.methods import compress_grads
from zfunc.transforms.donation import donate
from zfunc.transforms.layer_drop import drop_layers
from zfunc.transforms.mixed_precision.transform import precision
from zfunc.transforms.offloading.transform import offload
from zfunc.transforms.pipelining.transform import pipeline
from zfunc.transforms.quantization.transform import quantize
from zfunc.transforms.rematerialisation import remat
from zfunc.transforms.sharding import shard
from zfunc.transforms.splitting import split

__all__ = [
    "accumulate",
    "compress_grads",
    "donate",
    "drop_layers",
    "offload",
    "pipeline",
    "precision",
    "quantize",
    "remat",
    "shard",
    "split",
]
