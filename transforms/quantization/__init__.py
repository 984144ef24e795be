"""``quantize``: ``moq`` in training, ``low_bits`` in inference, ``exporting`` between the two."""
