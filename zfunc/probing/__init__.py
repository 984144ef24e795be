"""How an unmodified module can be split over ranks: found by trying, without names of models.

In the order of reading: ``products`` (which submodules multiply by a weight), ``traits`` (what
tells layers of one class apart), ``attributes`` and ``reads`` (what code asks of modules and of
parameters), ``arguments`` (copies of what a call is given), ``examples`` (what a module is called
with), ``calls`` (the arguments that layers get), ``stages`` (a layer whose products are stand-ins),
``flows`` (which products feed which), ``reaches`` (which numbers depend on which), ``pieces`` (what
can go to different ranks), ``norms`` (which means ranks can share), ``numbers`` (what a module
keeps beside its leaves), ``homes`` (whether parameters are read where their gradients are summed),
``trials`` (whether a rank's numbers give its share), ``together`` (and all of a layer's),
``networks`` (experts in one leaf), ``positions`` (which layers run on some positions of the stream)
and ``pointwise`` (what else does), ``tables`` (vocabularies), ``plans`` (all of it), ``published``
(what a model's own plan says otherwise), ``texts`` (a plan in words).
"""
