"""``pipeline``: ranks have different layers. Read ``transform`` (what it is), ``partition`` (who
what), then ``passes`` (one ``value_and_grad``), ``sums`` and ``traffic`` (what goes where).
"""
