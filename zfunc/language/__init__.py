"""Language models: a small GPT, text to train it on, and ``generate`` for any causal model.

In the order of reading: ``gpt_layers``, ``gpt``, ``corpus``, ``decoding``, ``gpt_decoding``,
``sampling``, ``generation``.
"""
