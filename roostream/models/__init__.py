"""Models that trainer and serving both run, in torch. TorchRec is imported only by models that need it.

Rows of embedding tables live on the parameter servers. A model gets the unique rows of a batch as a leaf
tensor, and their gradients are pushed back. All other parameters are dense. `model.py` is the interface,
`build.py` builds a model, `inputs.py` turns a batch, its lookup and its rows into tensors.
"""
