"""``quantize`` trains into low bits, or runs a function on low-bit parameters.

``transform`` chooses between the two. ``moq`` rounds weights in training, to fewer and fewer bits.
``low_bits`` stores parameters in 8 or 4 bits for inference. ``exporting`` takes the parameters that
``moq`` has trained to what ``low_bits`` loads.
"""
