"""What a codec costs a model: measured by ``kvtier quality``, kept in a record, read by ``codec: auto``.

``record`` needs neither torch nor transformers; everything that measures does.
"""
