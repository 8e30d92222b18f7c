"""Models that trainer and serving both run: torch, never torchrec.

Rows of embedding tables live on the parameter servers: a model gets the batch's unique rows as a leaf tensor and gives
their gradients back. Everything else that is learned is a dense parameter of the model.

    inputs.py    batch + lookup + rows → tensors            attention.py  target attention, list attention
    lists.py     candidates of a request, padded in groups  cross.py      DCNv2
    parts.py     what a model is put together from          mlp.py        layers, initial values
    ranker.py    the late-stage ranker                      loss.py       multi-task loss
"""
