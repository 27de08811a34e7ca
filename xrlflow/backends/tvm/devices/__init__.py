"""Machines other than this one, behind TVM's RPC tracker: `remote` has sessions, `device` the models that run there."""
