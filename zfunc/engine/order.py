"""The order in which transforms act, whichever way a step was wrapped in them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Order"]


class Order(IntEnum):
    """Where on the way of the data a transform acts: smaller is nearer to storage.

    State comes from storage through all of them to the user's function, and goes back the other
    way. There is room between the numbers for transforms of your own.

    >>> sorted([Order.SHARD, Order.DONATE])[0].name
    'DONATE'
    """

    DONATE = 0  # memory itself: it sees the state first and the result last
    OFFLOAD = 100  # where the state is held
    COMPRESS = 150  # nearer to storage than shard: it takes over what shard leaves
    PIPELINE = 190  # around all that surrounds a layer: most of them run elsewhere
    SHARD = 200  # parameters are gathered, gradients are reduced
    SPLIT = (
        220  # leaves are split before they are cut, and after all that makes other leaves of them
    )
    ACCUMULATE = 250  # microbatches
    REMAT = 260  # outside of what computes in a layer
    PRECISION = 290  # around whatever may leave a layer out: all streams in one dtype
    DROP_LAYERS = 300
    QUANTIZE = 350  # what layers compute with
    LOW_BITS = 400  # weights of a tree that is no training state
    SKIP_UNUSED = 450  # a step that precision takes back has been missed by nobody
    OTHERS = 500
