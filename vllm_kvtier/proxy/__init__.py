"""The router for disaggregated serving: one OpenAI API over several prefill and decode engines.

``kvtier proxy`` runs it (docs/proxy.md); ``vllm_kvtier.proxy.app.create_app`` embeds it. Needs the extra
``vllm-kvtier[proxy]``; imports neither vLLM nor torch.
"""
