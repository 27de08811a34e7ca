"""Where compiled models run (`execution`): this machine, or others behind TVM's RPC tracker: `remote` has sessions,
`device` the models that run there."""
