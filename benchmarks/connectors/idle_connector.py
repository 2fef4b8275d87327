"""A connector that does nothing: what vLLM itself does differently with any connector.

"kv_connector": "IdleConnector", "kv_connector_module_path": "idle_connector", with this folder in PYTHONPATH.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class IdleMetadata(KVConnectorMetadata):
    pass


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return IdleMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass
