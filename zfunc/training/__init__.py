"""Ready-made parts of a training loop: ``train_step``, ``preemption``, ``recover_world``."""
