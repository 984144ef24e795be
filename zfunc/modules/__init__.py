"""Any ``nn.Module`` as a pure function of its parameters.

``functionalize`` takes the parameters out of a module, as a tree in which each layer is a unit. A
call lends a copy of the module that has no memory, puts the given tensors in, sends each layer
through ``zfunc.layer``, and takes the tensors out again.

In the order of reading: ``units`` (which submodules are layers, where each parameter lives),
``swapping`` (writing tensors into a module), ``lazy`` and ``binding`` (a call), ``functional``
(what a user sees). Modules on split leaves: ``split_plans`` (what is split how), ``split_modules``
and ``split_products`` (a copy of a module on a rank's parts), ``cut_streams`` and ``split_streams``
(on a rank's positions), ``split_randomness`` (its dropout), ``split_params`` (whose params are
parts). ``module_checks``, ``dropout_check``, ``parameters``
and ``empty_weights`` stand alone.
"""
