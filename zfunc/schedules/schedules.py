from zfunc.schedules.schedule import Schedule, Action
def in_turn(ranks, n, chunks=1, flush=False):
    total, span, rows = n * chunks, ranks * chunks, []
    for r in range(ranks):
        at = [((t // span) * ranks + t % ranks, t % span // ranks) if chunks > 1 else (t, 0) for t in range(total)]
        f = [Action("F", i, c * ranks + r) for i, c in at]
        b = [Action("B", i, (chunks - 1 - c) * ranks + r) for i, c in at]
        lead = (ranks - r - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
        lead = total if flush else min(total, lead)
        pairs = [a for pair in zip(f[lead:], b, strict=False) for a in pair]
        rows.append(tuple(f[:lead] + pairs + b[total - lead :]))
    return Schedule(tuple(k % ranks for k in range(span)), n, tuple(rows))
def greedy(ranks, n, cap, vee=False):
    cost = {"F": 1.0, "I": 1.0, "W": 1.0}
    total = 2 * ranks if vee else ranks
    rank_of = tuple(k if k < ranks else total - 1 - k for k in range(total))
    rows = [[] for _ in range(ranks)]
    end = {}
    free, live = [0.0] * ranks, [0] * ranks
    nexts = {(kind, k): 0 for kind in "FIW" for k in range(total)}
    def needs(a):
        kind, i, k = a
        if kind == "F": return [("F", i, k - 1)] if k else []
        if kind == "W": return [("I", i, k)]
        return [("F", i, k)] + ([] if k == total - 1 else [("I", i, k + 1)])
    while any(nexts["W", k] < n for k in range(total)):
        found = []
        for (kind, k), i in nexts.items():
            r = rank_of[k]
            need = needs((kind, i, k))
            room = live[r] < cap - (not vee or k < ranks) + (not vee)
            if i < n and all(x in end for x in need) and (kind != "F" or room):
                start = max([free[r], *(end[x] for x in need)])
                found.append((start, "IFW".index(kind), i, -k, (kind, i, k)))
        start, *_, a = min(found)
        r = rank_of[a[2]]
        rows[r].append(Action(*a))
        free[r] = end[a] = start + cost[a[0]]
        live[r] += {"F": 1, "I": 0, "W": -1}[a[0]]
        nexts[a[0], a[2]] += 1
    return Schedule(rank_of, n, tuple(map(tuple, rows)))
def schedule(name, ranks, n, chunks=2):
    return {"gpipe": lambda: in_turn(ranks, n, flush=True), "1f1b": lambda: in_turn(ranks, n),
        "interleaved": lambda: in_turn(ranks, n, chunks), "zb": lambda: greedy(ranks, n, ranks),
        "zbv": lambda: greedy(ranks, n, 2 * ranks, vee=True)}[name]()
