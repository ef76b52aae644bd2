"""The machines: samplers and trainers behind two small Protocols, checkpoints, processes."""
