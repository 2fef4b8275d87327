"""The router for disaggregated serving: several prefill engines, several decode engines, one OpenAI API.

``kvtier proxy`` runs it (docs/proxy.md); ``vllm_kvtier.proxy.app.create_app`` embeds it. Needs the extra
``vllm-kvtier[proxy]``; imports neither vLLM nor torch.
"""
