"""A request, its record of segments, events, version spans, block hashes and codecs."""
