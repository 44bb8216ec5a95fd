"""A request, its record, events, version spans, block hashes and codecs."""
