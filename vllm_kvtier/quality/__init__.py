"""The loss of quality by a codec: measured by ``kvtier quality``, kept in a record, read by ``codec: auto``.

``record`` needs neither torch nor transformers; the other modules do.
"""
