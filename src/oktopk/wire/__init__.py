"""How selected entries become words of 32 bits: codecs of indices and values, and messages."""
