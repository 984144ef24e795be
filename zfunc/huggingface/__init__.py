"""Parts of Hugging Face's models, recognised by what they compute, and kernels in their place.

In the order of reading: ``likeness``, ``fusion``, ``rotations``, ``blocks``, ``decoder_layers``.
"""
