"""vLLM's matching calls: the state of each request, the walk through its sources, and the answer to vLLM.

``scheduler.wiring`` has the order of the sources (its list ``sources``); matching walks that list.

On vLLM's scheduler thread; nothing here blocks, except for the bounded waits of ``source_selector``.
Does not import ``offload`` or ``admin``.
"""
