"""Runs compiled models. `execution`: the choice between this machine and devices behind TVM's RPC tracker. `remote`
opens sessions with such devices, and `device` has the models that run on them."""
