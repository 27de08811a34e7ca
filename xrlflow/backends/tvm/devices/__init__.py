"""Where compiled models run (`execution`): on this machine, or on others behind TVM's RPC tracker. `remote` opens
sessions, `device` has the models that run there."""
