"""Language models: a small GPT, text to train it on, and ``generate`` for any causal model.

``generation`` asks a decoder for the logits of the next token, picks one, and gives it back to the
decoder, which keeps keys and values of all tokens in a cache. On a GPU that step is recorded as a
CUDA graph where it can be.

In the order of reading: ``gpt_layers``, ``gpt``, ``corpus``, ``decoding``, ``kv_cache``,
``gpt_decoding``, ``sampling``, ``generation``, ``staged_generation``, ``decoding_graph``.
"""
