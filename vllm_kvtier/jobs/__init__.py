"""Transfer jobs that the scheduler side gives the workers, and the results that workers report.

Plain data, pickled by vLLM between its processes. Imports ``wire`` only.
"""
