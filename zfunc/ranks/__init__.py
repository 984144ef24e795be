"""Ranks: the processes or threads that a step runs on, and the collectives between them.

A *world* is all ranks of a run, as one of them sees it. There are three kinds: a single process,
threads of one process (``zf.simulate``), and processes under ``torch.distributed`` (``zf.launch``,
torchrun). A *mesh* names axes along which the ranks are laid out. The ranks along an axis form a
*group*, and a group has the collectives: all-gather, reduce-scatter, all-reduce and so on. They run
asynchronously, and their bytes are counted. Ranks that take different paths get an error that names
both. Random numbers are here, too, since ranks must agree on them.

Whoever reads a step needs ``world``, ``meshes``, ``accounting``, ``comm`` (what the collectives
mean), ``axes`` (groups along those of a mesh) and ``keys``; ``messages`` is what ranks exchange as
plain data. Behind them are:

- ``connected``: a group of several ranks. ``transport``: what moves data for it. ``routes``: who
  sends what to whom. ``adjacency``: who checks whose headers
- ``simulation``: ranks that are threads
- ``foreseen``: ranks that are not there, but for one
- ``distributed``, ``devices``, ``launching``, ``listening``: ranks that are processes
- ``gloo``, ``halving``, ``control_channel``, ``shared_memory``, ``scratch``: between hosts
- ``nccl``: between GPUs
- ``point_to_point``: messages from one rank to another; ``transfers``, ``mailboxes``,
  ``host_messages``, ``data_sockets``, ``device_messages``: what moves them

``collectives``, ``redistribution``, ``random`` and ``digests`` are what users and other rooms call.
"""
