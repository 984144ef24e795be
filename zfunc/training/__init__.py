"""Ready-made parts of a training loop.

``recipe`` has ``train_step``, which differentiates a loss and updates parameters. ``stopping`` has
``preemption``: all ranks stop at the same step. ``world_recovery`` has ``recover_world``: after an
error in which ranks parted they meet again and go on.
"""
