"""Messages <-> token ids, and who wrote which token. Imports no torch: tokenizers come in as objects."""
