"""``pipeline``: ranks have different layers. Read ``transform`` (what it is), ``partition`` (who
has what), ``stage`` and ``messages`` (what goes where), then ``gradients`` (one ``value_and_grad``)
and ``sums``; ``evaluation`` (no gradients), and ``repeated`` (a token after the other).
"""
