"""The command line: thin entry points that import the rest only when a command needs it."""
