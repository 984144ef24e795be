"""A whole loss without a number, and the run of one part of it.

Layers are dealt out to chunks. A rehearsal runs the loss on ghosts, tensors that have a shape and
no memory, and finds what each chunk needs of others. A run of one chunk computes its layers, and
has ghosts in the place of what others compute.

In the order of reading: ``results`` (the tensors in a layer's arguments and results), ``plans``
(what a rehearsal has found), ``shapes`` (what an operation gives, from shapes alone),
``ghosts`` (a tensor that is elsewhere), ``known`` (operations that ask for more than shapes),
``between`` (names for what is made between layers), ``crossing`` (what goes from chunk to chunk),
``made_up`` (numbers for layers that look at them), ``writes`` (tensors that are written to),
``refs`` (layers that are elsewhere), ``rehearsal``, ``chunk_run``. ``work`` counts operations.
``own_copies`` and ``silence`` let layers that remember, print or stop do so on numbers alone;
``failures`` says where something went wrong, and ``first_loss`` finds what a step differentiates.
"""
