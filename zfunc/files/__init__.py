"""Checkpoints, and model files of other libraries.

A checkpoint is a folder of safetensors files and a manifest in JSON. It holds the full state under
dotted paths, in chunks with a digest each, so any world can restore what any other has saved.
Nothing is pickled. ``elements`` says which elements of a leaf something has, ``chunks`` and
``manifest`` what is in the files, and ``inventory`` what a state consists of. ``folder``,
``locking`` and ``reading`` work on what is there. ``saving``, ``replicas`` and ``background``
write, ``extras`` has what a program saves beside the state, and ``checkpoint`` has ``save`` and
``restore``.

``tensorfiles`` and ``pretrained`` read and write the safetensors files of Hugging Face. ``distcp``
reads checkpoints of ``torch.distributed.checkpoint``, and ``conversion`` makes one kind of another.
"""
