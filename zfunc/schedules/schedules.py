from zfunc.schedules.in_turn import gpipe, interleaved, one_f_one_b
from zfunc.schedules.zero_bubble import zb, zbv


def schedule(name, ranks, n, chunks=2):
    return {
        "gpipe": lambda: gpipe(ranks, n),
        "1f1b": lambda: one_f_one_b(ranks, n),
        "interleaved": lambda: interleaved(ranks, n, chunks),
        "zb": lambda: zb(ranks, n),
        "zbv": lambda: zbv(ranks, n),
    }[name]()
