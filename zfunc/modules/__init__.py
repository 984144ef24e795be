"""Any ``nn.Module`` as a pure function of its parameters.

In the order of reading: ``units`` (its anatomy), ``slots`` (where tensors go), ``lazy`` and
``binding`` (running it on given tensors), ``functional`` (what a user sees).
"""
