"""``pipeline``: ranks have different layers.

Read ``transform`` (what it is), ``measuring``, ``partition`` and ``assignment`` (who has what, and
whether all ranks mean the same), then ``gradients``
(one ``value_and_grad``) on ``stage``, with ``messages`` and ``sums`` (what goes where).
``failures`` says where something went wrong. ``evaluation`` runs without gradients, ``repeated`` a
token after the other.
"""
