"""``offload`` keeps state in host memory or on disk, and computes with one unit of it at a time.

``transform`` is the transform itself. ``deferred`` has trees that are not in memory: operations on
them are recorded. ``evaluation`` computes them, and ``parts`` is what it computes with: one unit of
a tree. ``host_trees`` has trees in host memory. ``disk_trees`` has trees on disk; below it are
``disk`` (folders, lock, threads), ``blocks`` (files), ``tree_storage`` (where a tree lies in the
files) and ``disk_state`` (which trees together are the newest complete state). ``transitions``
puts a state there and makes the next state. ``recovery`` opens what a killed process left.
"""
