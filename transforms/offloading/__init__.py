"""``offload``: state on the host or on disk.

In the order of reading: ``transform``; ``streamed`` and ``evaluation`` (trees that are not in
memory), ``hosted`` (in the host's); on disk ``blocks`` (files), ``store`` and ``columns`` (who
writes where), ``generations`` (which slots are the newest whole state), ``stored`` (the tree),
``successor`` (the next state), ``recovery`` (what a killed process left).
"""
