def balanced(weights, parts):
    n = len(weights)
    return [n * k // parts for k in range(parts)] + [n]
